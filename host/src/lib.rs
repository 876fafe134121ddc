//! GPU kernels of the gated delta rule for inference engines.
//!
//! [`Library`] holds the kernels of one GPU; an operator ([`ops::gdn_decode`], [`ops::gdn_mtp`],
//! [`ops::kda_recurrent`]) takes borrowed [`Tensor`]s and a borrowed stream, checks them, and launches. Nothing is
//! copied, and after the first launch of a layer's shape nothing is allocated, synchronised or compiled.

#[cfg(feature = "cust")]
mod cust_views;
pub mod driver;
pub mod error;
mod launch;
pub mod library;
pub mod module_cache;
pub mod ops;
mod plan;
mod ptx;
mod select;
mod shapes;
pub mod stream;
pub mod tensor;

pub use error::{DriverError, Error};
pub use gated_delta_kernels::entries::Entry;
pub use library::{KernelResources, Library};
pub use stream::StreamRef;
pub use tensor::{DType, DeviceElement, Tensor};

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

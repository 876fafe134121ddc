//! GPU kernels of the gated delta rule for inference engines.
//!
//! | an engine has | it makes |
//! |---|---|
//! | a GPU, or a `CUcontext` of its own | a [`Context`]: [`Context::primary`], [`Context::from_raw`]; and from the context one
//! [`Library`] for all threads |
//! | a stream | a [`StreamRef`]: [`StreamRef::from_raw`] |
//! | tensors | a [`Tensor`] from each address, dtype and shape: [`Tensor::from_raw`]; views of packed tensors |
//! | a layer | a [`GdnLayer`] or [`KdaLayer`] from its weights and pools; the layer makes prefills, decodes, verifies, resumes
//! and commits |
//! | a layer with its own kernels for convolution or norm | a step, [`Gdn`] or [`Kda`]; a [`GdnCommit`] or [`KdaCommit`] |
//! | slots of states | [`States::update`], [`States::read_only`] or [`States::per_token`] |
//!
//! and launches them: [`Library::launch`]. Arguments are checked and borrowed. A launch copies nothing. After the first launch of
//! a layer's shape it allocates, synchronises and compiles nothing. [`Library::prewarm`] does this first-time work, for example
//! before a graph is captured; [`Library::plan`] checks everything but addresses, B and P once. A launch leaves the calling
//! thread's context unchanged.
//!
//! Other entry points: [`Library::self_test`] once after loading, [`Library::validate`] to debug slots, [`Library::simulator`]
//! for tests without a GPU, [`raw`] for an engine with its own launcher, and [`driver`] for an engine without a binding of the
//! driver.
//! Every failure is an [`Error`] that names what was wanted and what came.
//!
//! [`guide::engines`] shows all of this in an engine, [`guide::notation`] explains the terms.
//!
//! | feature | default | |
//! |---|---|---|
//! | `simulator` | on | [`Library::simulator`] |
//! | `self-test` | on | [`Library::self_test`] |
//! | `cust` | off | views of cust's buffers and streams; the driver functions that cust calls go to the driver's library |
//!
//! ```
//! use gated_delta::{Gdn, GdnGates, Inputs, Library, Options, States, StreamRef, Tensor};
//!
//! // One sequence and one head, on the simulator: its tensors are slices. The key is the first channel's unit vector.
//! let mut key = [0.0f32; 64];
//! key[0] = 1.0;
//! let (value, log_decay, beta, slot) = ([0.5f32; 64], [0.0f32], [1.0f32], [2i32]);
//! let (mut output, mut states) = ([f32::NAN; 64], vec![0.0f32; 4 * 64 * 64]);
//! let key = Tensor::from_slice(&key, &[1, 1, 1, 64])?;
//! let gates = GdnGates::given(
//!     Tensor::from_slice(&log_decay, &[1, 1, 1])?,
//!     Tensor::from_slice(&beta, &[1, 1, 1])?,
//! );
//! let o = Tensor::from_slice_mut(&mut output, &[1, 1, 1, 64])?;
//! let pool = States::update(Tensor::from_slice_mut(&mut states, &[4, 1, 64, 64])?);
//! let step = Gdn::new(
//!     Inputs::qkv(key, key, Tensor::from_slice(&value, &[1, 1, 1, 64])?),
//!     gates,
//!     o,
//!     pool.slots(Tensor::from_slice(&slot, &[1])?),
//! );
//! let step = step.options(Options::default().scale(1.0).qk_l2norm(false));
//! // SAFETY: a simulated launch is done when it returns.
//! unsafe { Library::simulator().launch(StreamRef::default_stream(), &step) }?;
//! assert_eq!(output[63], 0.5); // what the key has stored,
//! assert_eq!(states[2 * 64 * 64..][..2], [0.5, 0.0]); // in slot 2
//! # Ok::<(), gated_delta::Error>(())
//! ```
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "cust")]
mod cust_views;
pub mod driver;
mod enqueue;
pub mod error;
#[cfg(any(doc, doctest))]
pub mod guide;
mod instruments;
pub mod layer;
pub mod library;
#[doc(hidden)]
pub mod module_cache;
mod on_threads;
mod ptx;
pub mod raw;
mod recall;
#[doc(hidden)]
pub mod specialise;

#[cfg(feature = "self-test")]
mod self_test;
mod send_sync;
pub mod step;
pub mod stream;
pub mod tensor;
mod tensor_checks;
mod try_lock;
pub mod validate;

pub use driver::{Context, Device};
pub use error::{DriverError, Error};
pub use gated_delta_kernels::entries::Entry;
pub use layer::{GdnLayer, KdaLayer, Layer};
pub use library::{KernelResources, Library};
#[cfg(feature = "self-test")]
pub use self_test::SelfTest;
pub use step::{
    Activation, BetaScale, Checkpoints, Commit, Convolution, Flush, Formulation, Gates, Gdn,
    GdnCommit, GdnGates, HeadMap, Inputs, Kda, KdaBeta, KdaCommit, KdaDecay, KdaGates, MAX_BATCH,
    MAX_TOKENS, Norm, Operator, Options, Packed, Pending, Plan, Previous, StateLayout, States,
    Step, Stored, Work,
};
pub use stream::StreamRef;
pub use tensor::{DType, DeviceElement, Tensor};
pub use validate::{InactiveRow, IndexReport};

/// The example of the README that is packaged compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

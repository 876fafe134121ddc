//! Gated DeltaNet (GDN) and Kimi Delta Attention (KDA) in f64 on the CPU: the exact results that GPU kernels are compared with.
//!
//! The code is written for comparison with the formulas, not for speed. It has no dependencies and shares no code with the
//! kernels. Reading order: [`recurrence`], [`gate`], [`recurrent`], [`gdn`], [`kda`], [`conv`], [`norm`],
//! [`layer`], [`deferred`]; then the comparison of results: [`judge`], [`tolerance`].
//!
//! Letters: `B` rows of the batch, `T` tokens of a row, `H` query/key heads, `HV` value heads, `K` and `V` head
//! dims, `P` pool slots, `D` channels of a convolution over `W` tokens. Tensors are contiguous row-major `f64` slices.
//! Rounding inputs or the stored state to a narrower type is up to the caller: pass rounded values, and round the
//! results.

pub mod conv;
pub mod deferred;
pub mod gate;
pub mod gdn;
pub mod judge;
pub mod kda;
pub mod layer;
pub mod norm;
pub mod recurrence;
pub mod recurrent;
pub mod tolerance;

mod error;
mod heads;
mod sum;

pub use error::Error;

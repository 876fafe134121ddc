//! Gated DeltaNet (GDN) and Kimi Delta Attention (KDA) in f64 on the CPU: the truth for the GPU kernels.
//!
//! Written to be compared with the formulas, not to be fast; it has no dependencies, and none of it is shared with
//! the kernels. Reading order: [`recurrence`], [`gate`], [`recurrent`], [`gdn`], [`kda`], [`conv`], [`norm`],
//! [`layer`], [`deferred`]; what is held against it, and how: [`judge`], [`compare`].
//!
//! Letters: `B` rows of the batch, `T` tokens of a row, `H` query/key heads, `HV` value heads, `K` and `V` head
//! dims, `P` pool slots, `D` channels of a convolution over `W` tokens. Tensors are contiguous row-major `f64` slices.
//! Rounding inputs or the stored state to a narrower type is the caller's business: pass the rounded values, round
//! what comes back.

pub mod compare;
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

mod error;
mod heads;
mod sum;

pub use error::Error;

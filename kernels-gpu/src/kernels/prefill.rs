//! Kernels that the prefills of both operators share; the operator is a load-time constant.
//!
//! Math     docs/prefill.md; prefill/convolution.rs, prefill/single.rs and single_klast.rs, prefill/norm.rs
//! Shapes   as kernels/gdn_prefill.rs and kernels/kda_prefill.rs
//! Grid     [`Convolve`] x = n · chunk + index among the heads' q, k and v; [`Single`] x = value head, z = b; [`Finish`] x =
//!          blocks of windows, then n · chunk + value head
//! Truth    as kernels/gdn_prefill.rs

pub use crate::prefill::kernels::{Carry, Convolve, Finish, Single};

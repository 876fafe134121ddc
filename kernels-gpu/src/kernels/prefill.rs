//! What the prefills of both operators share: one kernel, whose operator is a load-time constant.
//!
//! Math     docs/prefill.md; prefill/convolution.rs, prefill/single.rs and single_klast.rs, prefill/norm.rs
//! Shapes   as kernels/gdn_prefill.rs and kernels/kda_prefill.rs
//! Grid     [`Convolve`] x = n · unit + which of q, k and v; [`Single`] x = value head, z = b; [`Finish`] x = windows' blocks, then
//!          n · unit + value head
//! Truth    as kernels/gdn_prefill.rs

pub use crate::prefill::kernels::{Carry, Convolve, Finish, Single};

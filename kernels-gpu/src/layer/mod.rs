//! The layer step: the convolution before the recurrence and the gated norm after it, with the recurrence between, for one or
//! several tokens.
//!
//! All value heads of a query/key head need its q and k channels, and the norm needs all of V. So one thread of the GPU reads a
//! channel of the convolution and writes its window, and all threads that need the channel are in the block or the cluster of
//! this thread:
//!
//! - [`WholeKLast`], [`WholeVLast`]: a block has all value heads of a query/key head, one after the other. Their states stream
//!   through its shared memory while the convolution runs (`whole.rs`, `slices.rs`).
//! - [`KLast`], [`VLast`]: a block has one tile of each of these heads, and a cluster has all tiles, for batches that do not fill
//!   a GPU with whole heads. Blocks send each other the convolved q and k, and their sums of the squares of o (`mail.rs`).
//! - [`MtpKLast`], [`MtpVLast`]: several tokens, after the tokens of the last step that are committed first. A block has one tile
//!   of all value heads, up to whole heads, and prepares all tokens in shared memory (`mtp.rs`, `drafts.rs`).
//!
//! [`Parallel`] computes several tokens together: a block has a tile of one value head, and a cluster has all tiles of all value
//! heads of a query/key head.
//!
//! No block waits for another block outside its cluster. Every entry has the convolution (`conv.rs`) and the norm (`norm.rs`) as
//! load-time constants: an option that is off costs nothing. All kernels of a formulation compute results with the same bits.
//!
//! # Safety
//! Unless its doc says otherwise, an unsafe function here relies on the following: `params` and `c` describe live tensors,
//! everything that it loads from shared memory has been stored there, and only this thread writes the places that it stores to.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

pub(crate) mod conv;
mod drafts;
mod klast;
mod mail;
mod mtp;
mod mtp_klast;
mod mtp_vlast;
pub(crate) mod norm;
mod parallel;
mod place;
mod slices;
mod vlast;
mod whole;
mod whole_klast;
mod whole_vlast;

pub use klast::KLast;
pub use mtp_klast::MtpKLast;
pub use mtp_vlast::MtpVLast;
pub use parallel::Parallel;
pub(crate) use parallel::{Layer, MOST_BLOCKS, Rings};
pub(crate) use place::Place;
pub(crate) use slices::Slices;
pub use vlast::VLast;
pub(crate) use whole::{Ahead, Whole, description, finish, store_zeros};
pub use whole_klast::WholeKLast;
pub use whole_vlast::WholeVLast;

use crate::device::warp::lane_id;
use crate::recurrent::vlast::load_rows;
use crate::state::{FRAGMENT, StateElement};

/// Byte offset of channel `i` of a head in shared memory. The channels are in the order in which `lanes` lanes load them with
/// [`crate::recurrent::klast::load_parts`] for K-last states of `S`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn position<S: StateElement>(lanes: u32, i: u32) -> u32 {
    let run = lanes * FRAGMENT;
    let (part, i) = (i / run * run, i % run);
    4 * (part
        + if S::VECTORS == 1 {
            i % 8 / 4 * (run / 2) + i / 8 * 4 + i % 4
        } else {
            i
        })
}

/// This lane's share of the channels at `smem`: 2 channels if K = 64; for a larger K 4 channels in each of the first K/4 lanes.
/// Padded with zeros to 4.
///
/// # Safety
/// The channels are stored there, one after the other.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn warp_channels<const K: u32>(smem: u32) -> [f32; 4] {
    if K > 64 {
        if lane_id() < K / 4 {
            load_rows::<4>(smem + lane_id() * 16)
        } else {
            [0.0; 4]
        }
    } else {
        let [x, y] = load_rows::<2>(smem + lane_id() * 8);
        [x, y, 0.0, 0.0]
    }
}

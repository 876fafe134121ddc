//! Messages between the blocks of a cluster: q and k after the convolution, and the sums of the squares of o.

use crate::device::cluster::{MAILBOX_BYTES, arrive_relaxed, open_mailbox};
use crate::device::shared::dynamic_shared_mem;
use crate::device::thread::thread_idx_x;
use crate::step::StepConstants;

/// Bytes of both mailboxes, at the start of a block's shared memory.
pub const BYTES: u32 = 2 * MAILBOX_BYTES;

/// The mailbox of q and k; open if the step has a convolution.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn of_channels() -> u32 {
    dynamic_shared_mem()
}

/// The mailbox of the sums; open if the step has a norm.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn of_sums() -> u32 {
    dynamic_shared_mem() + MAILBOX_BYTES
}

/// Opens the mailboxes for `channels` channels of q and k and `sums` sums per head, and arrives at the cluster's barrier. Every
/// thread of the block calls it.
///
/// # Safety
/// The first [`BYTES`] of the block's shared memory have no other use.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn open_and_arrive(c: &StepConstants, channels: u32, sums: u32) {
    if thread_idx_x() == 0 {
        if c.taps != 0 {
            open_mailbox(of_channels(), channels * 4);
        }
        if c.has_norm != 0 {
            open_mailbox(of_sums(), c.ratio * sums * 4);
        }
    }
    arrive_relaxed();
}

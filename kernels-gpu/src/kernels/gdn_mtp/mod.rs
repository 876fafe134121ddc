//! GDN MTP verify: several tokens per sequence (Gated DeltaNet, arXiv 2412.06464).

use crate::recurrent::{self, Gating};

/// One decay per value head.
pub struct PerHead;

impl Gating for PerHead {
    const PER_CHANNEL: bool = false;
}

/// Token by token on K-last states.
pub type KLast<S, const K: u32, const ROWS: usize, const THREADS: u32> =
    recurrent::KLast<PerHead, S, K, ROWS, THREADS>;

/// Token by token on V-last states.
pub type VLast<S, const K: u32, const LANES: u32, const ROWS: usize> =
    recurrent::VLast<PerHead, S, K, LANES, ROWS>;

//! KDA's layer step: [`super::gdn_layer`]'s with (2) S ← S diag(α), a decay of each key channel (Kimi Delta Attention, arXiv
//! 2510.26692).
//!
//! Shapes   as there, and g [B, 1, HV, K]
//! Threads  as there; K-last: a lane has the α of its 8 channels, V-last: a thread of each head finds that of one channel
//! Truth    reference::layer; tests/layer.rs, tests/laws

use super::kda_recurrent::PerChannel;
use crate::launch::Family;
use crate::layer::{self, Layered};

impl Layered for PerChannel {
    const LAYER: Family = Family::KdaLayer;
    const LAYER_MTP: Family = Family::KdaLayerMtp;
    const LAYER_PARALLEL: Family = Family::KdaLayerParallel;
}

/// K-last states.
pub type KLast<S, const K: u32, const V: u32, const ROWS: usize, const THREADS: u32> =
    layer::KLast<PerChannel, S, K, V, ROWS, THREADS>;

/// V-last states.
pub type VLast<
    S,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const CHANNELS: usize,
> = layer::VLast<PerChannel, S, K, V, LANES, ROWS, CHANNELS>;

/// K-last states, whole heads a block.
pub type WholeKLast<
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
> = layer::WholeKLast<PerChannel, S, K, V, ROWS, THREADS, DEPTH>;

/// V-last states, whole heads a block.
pub type WholeVLast<
    S,
    const K: u32,
    const V: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
> = layer::WholeVLast<PerChannel, S, K, V, LANES, ROWS, THREADS>;

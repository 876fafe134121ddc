//! KDA's layer step of several tokens: [`super::gdn_layer_mtp`]'s with (2) S ← S diag(α), a decay of each key channel.
//!
//! Shapes   as there, and g [B, T, HV, K]
//! Truth    reference::layer; tests/layer.rs, tests/laws

use super::kda_recurrent::PerChannel;
use crate::layer;

/// K-last states.
pub type KLast<
    S,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
> = layer::MtpKLast<PerChannel, S, K, V, TILE, ROWS, THREADS, DEPTH>;

/// V-last states.
pub type VLast<
    S,
    const K: u32,
    const V: u32,
    const TILE: u32,
    const LANES: u32,
    const ROWS: usize,
    const THREADS: u32,
    const DEPTH: u32,
> = layer::MtpVLast<PerChannel, S, K, V, TILE, LANES, ROWS, THREADS, DEPTH>;

/// K-last states of 16 bits, all tokens at once.
pub type Parallel<
    const K: u32,
    const V: u32,
    const WARPS: u32,
    const TILES16: usize,
    const CLUSTERED: bool,
> = layer::Parallel<PerChannel, K, V, WARPS, TILES16, CLUSTERED>;

//! Layout of the workspace. For each chunk of more than one token and query/key head: the image of k̂ and q̂, then T, P, factors
//! and (where the pass stores it) v of each value head. With decays by channel, each value head has its own images.
//!
//! The convolution stores k and q in the place of the images of k̂ and q̂ (of every value head, with decays by channel), and
//! their scales in the place of the first factors.
//!
//! After v: the scales of o, if the scan stores o in f16. The norm after the scan multiplies by them ([`super::norm`]).
//!
//! After all chunks: o of chunks of one token in f32, where no block has all channels of a head and no clusters exist: the first
//! and the last chunk of each row ([`tokens`]). Then, for a prompt in segments, the f32 state that a scan stores for the next
//! one; for rows in splits, states and transitions ([`super::split`]).

use super::values::tiles_bytes;
use super::{head_bytes, image_bytes, images_bytes, norm, opaque, units};
use crate::machine;
use crate::step::{PrefillParams, StepConstants};

/// Bytes of a chunk's data that belongs to one value head.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn own_bytes(c: &StepConstants, k: u32, v: u32, per_channel: bool) -> u32 {
    let images = if per_channel {
        images_bytes(k, true)
    } else {
        0
    };
    images + head_bytes(k, per_channel) + tiles_bytes(c, v) + scales_bytes(c, v)
}

/// Bytes of the scales of o for a value head of `dim` channels; 0 unless a norm follows and the scan stores o in f16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn scales_bytes(c: &StepConstants, dim: u32) -> u32 {
    if norm::is_left(c) {
        norm::scales_bytes(dim)
    } else {
        0
    }
}

/// Bytes of a chunk's data for one query/key head, including its value heads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn unit_bytes(c: &StepConstants, k: u32, v: u32, per_channel: bool) -> u32 {
    let shared = if per_channel { 0 } else { image_bytes(k) };
    shared + own_bytes(c, k, v, per_channel) * c.ratio
}

/// Addresses of a chunk's operands for one value head.
#[derive(Clone, Copy)]
pub struct Operands {
    /// The image of k̂ and q̂.
    pub images: u64,
    /// T, P and factors.
    pub head: u64,
    /// Tiles of v.
    pub values: u64,
    /// Scales of o.
    pub scales: u64,
}

impl Operands {
    /// Operands of chunk `unit` for value head `r` of query/key head `h`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new<const K: u32, const V: u32>(
        c: &StepConstants,
        params: &PrefillParams,
        per_channel: bool,
        unit: u64,
        (h, r): (u32, u32),
    ) -> Self {
        let number = unit * c.h as u64 + h as u64;
        Self::of_head::<K, V>(c, params, per_channel, (number, r))
    }

    /// Operands of value head `r` of the query/key head that is number `number` among the query/key heads of all chunks.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_head<const K: u32, const V: u32>(
        c: &StepConstants,
        params: &PrefillParams,
        per_channel: bool,
        (number, r): (u64, u32),
    ) -> Self {
        let first = params.workspace + number * unit_bytes(c, K, V, per_channel) as u64;
        Self::at::<K, V>(c, per_channel, (first, r))
    }

    /// Operands of value head `r` of a query/key head whose operands begin at address `first`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at<const K: u32, const V: u32>(
        c: &StepConstants,
        per_channel: bool,
        (first, r): (u64, u32),
    ) -> Self {
        let own = own_bytes(c, K, V, per_channel);
        let (images, head) = if per_channel {
            let images = first + (own * r) as u64;
            (images, images + images_bytes(K, true) as u64)
        } else {
            (first, first + (image_bytes(K) + own * r) as u64)
        };
        let values = head + head_bytes(K, per_channel) as u64;
        Self {
            images,
            head,
            values,
            scales: values + tiles_bytes(c, V) as u64,
        }
    }
}

/// Address, after the chunks of a single row, of the carried state of 64 rows of value head `hv` from row `first` on: the
/// registers of a warpgroup's threads, 16 bytes of each thread in turn.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn carried<const K: u32, const V: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (per_channel, leaves_tokens): (bool, bool),
    (hv, first): (u32, u32),
) -> u64 {
    // An opaque factor in place of a branch: docs/compiler.md, One value, not two.
    let is_packed = opaque((c.cu_seqlens_index != 0) as u32);
    let total = is_packed * params.layer.step.total_tokens + (1 - is_packed) * params.tokens;
    let units = units(total as u64, 1, c.positions_index != 0);
    let unit = unit_bytes(c, K, V, per_channel) as u64;
    let row = (hv * V + first) as u64;
    let of_tokens = if leaves_tokens {
        // Opaque: the sum with the workspace's address would be kept from row to row, and there is no register for it.
        opaque(tokens_bytes(1, c.h * c.ratio, V) as u32) as u64
    } else {
        0
    };
    params.workspace + units * c.h as u64 * unit + of_tokens + row * (4 * K) as u64
}

/// Whether o of chunks of one token is stored for the norm after the scan: on machines whose scan has no clusters and whose
/// blocks have 64 channels of a value head each.
#[must_use]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn leaves_tokens(c: &StepConstants, v: u32) -> bool {
    c.has_norm != 0 && c.machine != machine::HOPPER && v > 64
}

/// Address of o of value head `hv` for a row's first chunk, or its last one (`last`).
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tokens<const K: u32, const V: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    per_channel: bool,
    (b, last): (u32, bool),
    hv: u32,
) -> u64 {
    let token = (2 * b + last as u32) as u64 * (c.h * c.ratio) as u64 + hv as u64;
    behind_units::<K, V>(c, params, per_channel) + token * (4 * V) as u64
}

/// Address after the chunks of all rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn behind_units<const K: u32, const V: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    per_channel: bool,
) -> u64 {
    let is_packed = opaque((c.cu_seqlens_index != 0) as u32);
    let of_rows = params.rows as u64 * params.tokens as u64;
    let total =
        is_packed as u64 * params.layer.step.total_tokens as u64 + (1 - is_packed) as u64 * of_rows;
    let units = units(total, params.rows as u64, c.positions_index != 0);
    let unit = unit_bytes(c, K, V, per_channel) as u64;
    params.workspace + units * c.h as u64 * unit
}

/// Bytes of o of the chunks of one token of `rows` rows.
#[must_use]
pub const fn tokens_bytes(rows: u32, value_heads: u32, v: u32) -> u64 {
    8 * rows as u64 * value_heads as u64 * v as u64
}

/// Bytes of the carried state of all value heads.
#[must_use]
pub const fn carried_bytes(value_heads: u32, k: u32, v: u32) -> u64 {
    4 * value_heads as u64 * k as u64 * v as u64
}

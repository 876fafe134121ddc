//! Which variant a shape gets. Each row is a measurement (`cargo bench`, docs/lab-notes.md).

use gated_delta_kernels::entries::Entry;

use crate::ops::StateLayout;
use crate::tensor::DType;

/// Up to `heads` = B · HV, the entry.
type Row = (u32, Entry);

const KLAST_BF16_K64: &[Row] = &[
    (384, Entry::gdn_decode_klast_bf16_k64_tile16),
    (u32::MAX, Entry::gdn_decode_klast_bf16_k64_tile32),
];
const KLAST_BF16_K128: &[Row] = &[
    (160, Entry::gdn_decode_klast_bf16_k128_tile16),
    (u32::MAX, Entry::gdn_decode_klast_bf16_k128_tile16_warps2),
];
const KLAST_F32_K64: &[Row] = &[
    (1024, Entry::gdn_decode_klast_f32_k64_tile8),
    (u32::MAX, Entry::gdn_decode_klast_f32_k64_tile16),
];
const KLAST_F32_K128: &[Row] = &[
    (1024, Entry::gdn_decode_klast_f32_k128_tile4),
    (u32::MAX, Entry::gdn_decode_klast_f32_k128_tile8),
];
const VLAST_BF16_K64: &[Row] = &[
    (512, Entry::gdn_decode_vlast_bf16_k64_tile32),
    (u32::MAX, Entry::gdn_decode_vlast_bf16_k64_tile64),
];
const VLAST_BF16_K128: &[Row] = &[
    (192, Entry::gdn_decode_vlast_bf16_k128_tile32),
    (1024, Entry::gdn_decode_vlast_bf16_k128_tile64),
    (u32::MAX, Entry::gdn_decode_vlast_bf16_k128_tile128),
];
const VLAST_F32_K64: &[Row] = &[
    (512, Entry::gdn_decode_vlast_f32_k64_tile32),
    (u32::MAX, Entry::gdn_decode_vlast_f32_k64_tile64),
];
const VLAST_F32_K128: &[Row] = &[
    (768, Entry::gdn_decode_vlast_f32_k128_tile32),
    (u32::MAX, Entry::gdn_decode_vlast_f32_k128_tile64),
];

fn gdn_decode_rows(layout: StateLayout, state: DType, k_dim: u32) -> &'static [Row] {
    match (layout, state == DType::F32, k_dim == 64) {
        (StateLayout::KLast, false, true) => KLAST_BF16_K64,
        (StateLayout::KLast, false, false) => KLAST_BF16_K128,
        (StateLayout::KLast, true, true) => KLAST_F32_K64,
        (StateLayout::KLast, true, false) => KLAST_F32_K128,
        (StateLayout::VLast, false, true) => VLAST_BF16_K64,
        (StateLayout::VLast, false, false) => VLAST_BF16_K128,
        (StateLayout::VLast, true, true) => VLAST_F32_K64,
        (StateLayout::VLast, true, false) => VLAST_F32_K128,
    }
}

/// The GDN decode entry for `heads` = B · HV states in K = V = `k_dim`.
pub(crate) fn gdn_decode(layout: StateLayout, state: DType, k_dim: u32, heads: u32) -> Entry {
    let rows = gdn_decode_rows(layout, state, k_dim);
    rows.iter()
        .find(|&&(up_to, _)| heads <= up_to)
        .unwrap_or(&rows[rows.len() - 1])
        .1
}

/// Every entry that [`gdn_decode`] may answer, over all batch sizes.
pub(crate) fn gdn_decode_entries(
    layout: StateLayout,
    state: DType,
    k_dim: u32,
) -> impl Iterator<Item = Entry> {
    gdn_decode_rows(layout, state, k_dim)
        .iter()
        .map(|&(_, entry)| entry)
}

/// Every entry that computes a GDN decode of this kind, selected or not.
pub(crate) fn gdn_decode_variants(
    layout: StateLayout,
    state: DType,
    k_dim: u32,
) -> impl Iterator<Item = Entry> {
    let layout = if layout == StateLayout::KLast {
        "klast"
    } else {
        "vlast"
    };
    let prefix = format!("gdn_decode_{layout}_{state}_k{k_dim}_");
    Entry::ALL
        .iter()
        .copied()
        .filter(move |entry| entry.name().starts_with(&prefix))
}

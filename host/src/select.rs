//! Which variant a shape gets. Each threshold is a measurement (`cargo bench`, docs/lab-notes.md).

use gated_delta_kernels::entries::Entry;

use crate::error::Error;
use crate::step::StateLayout;
use crate::tensor::DType;

/// A family of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operator {
    GdnDecode,
    GdnMtp,
    GdnMtpParallel(Mode),
    /// Of one token, and no previous ones.
    KdaDecode,
    KdaRecurrent,
    KdaRecurrentParallel(Mode),
}

impl Operator {
    /// Whether a decay is one per key channel.
    pub fn per_channel(self) -> bool {
        matches!(
            self,
            Self::KdaDecode | Self::KdaRecurrent | Self::KdaRecurrentParallel(_)
        )
    }

    /// The same for views that are not 16-byte aligned.
    pub fn narrow(self) -> Self {
        match self {
            Self::GdnMtpParallel(Mode::Resume) => Self::GdnMtpParallel(Mode::NarrowResume),
            Self::KdaRecurrentParallel(Mode::Resume) => {
                Self::KdaRecurrentParallel(Mode::NarrowResume)
            }
            operator => operator,
        }
    }
}

/// What a launch of the parallel formulation does with states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mode {
    /// Reads them.
    Verify,
    /// Reads and writes them: an update or a commit.
    Update,
    /// Writes them, and goes on from there.
    Resume,
    /// The same on views that are not 16-byte aligned: two tiles a warp have no registers left for it.
    NarrowResume,
}

/// Kernels that compute the same: what remains to be chosen is the tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub operator: Operator,
    pub layout: StateLayout,
    /// f32 or bf16.
    pub state: DType,
    pub k_dim: u32,
    pub v_dim: u32,
}

/// Up to `heads` = B · HV, the entry.
type Row = (u32, Entry);

/// Any number of heads.
const ANY: u32 = u32::MAX;

impl Kind {
    #[rustfmt::skip]
    fn rows(self) -> &'static [Row] {
        use Entry as E;
        use Operator::{GdnDecode, GdnMtp, GdnMtpParallel, KdaDecode, KdaRecurrent, KdaRecurrentParallel};
        use StateLayout::{KLast, VLast};

        let (f32_state, k64) = (self.state == DType::F32, self.k_dim == 64);
        match (self.operator, self.layout, f32_state, k64) {
            (GdnDecode, KLast, false, true) => &[(384, E::gdn_decode_klast_bf16_k64_tile16), (ANY, E::gdn_decode_klast_bf16_k64_tile32)],
            (GdnDecode, KLast, false, false) => &[(160, E::gdn_decode_klast_bf16_k128_tile16), (ANY, E::gdn_decode_klast_bf16_k128_tile16_warps2)],
            (GdnDecode, KLast, true, true) => &[(1024, E::gdn_decode_klast_f32_k64_tile8), (ANY, E::gdn_decode_klast_f32_k64_tile16)],
            (GdnDecode, KLast, true, false) => &[(1024, E::gdn_decode_klast_f32_k128_tile4), (ANY, E::gdn_decode_klast_f32_k128_tile8)],
            (GdnDecode, VLast, false, true) => &[(512, E::gdn_decode_vlast_bf16_k64_tile32), (ANY, E::gdn_decode_vlast_bf16_k64_tile64)],
            (GdnDecode, VLast, false, false) => &[(192, E::gdn_decode_vlast_bf16_k128_tile32), (1024, E::gdn_decode_vlast_bf16_k128_tile64), (ANY, E::gdn_decode_vlast_bf16_k128_tile128)],
            (GdnDecode, VLast, true, true) => &[(512, E::gdn_decode_vlast_f32_k64_tile32), (ANY, E::gdn_decode_vlast_f32_k64_tile64)],
            (GdnDecode, VLast, true, false) => &[(768, E::gdn_decode_vlast_f32_k128_tile32), (ANY, E::gdn_decode_vlast_f32_k128_tile64)],
            (GdnMtp, KLast, false, true) => &[(64, E::gdn_mtp_klast_bf16_k64_tile16), (ANY, E::gdn_mtp_klast_bf16_k64_tile32)],
            (GdnMtp, KLast, false, false) => &[(64, E::gdn_mtp_klast_bf16_k128_tile16), (ANY, E::gdn_mtp_klast_bf16_k128_tile16_warps2)],
            (GdnMtp, KLast, true, true) => &[(128, E::gdn_mtp_klast_f32_k64_tile16), (ANY, E::gdn_mtp_klast_f32_k64_tile32)],
            (GdnMtp, KLast, true, false) => &[(64, E::gdn_mtp_klast_f32_k128_tile16), (ANY, E::gdn_mtp_klast_f32_k128_tile16_warps2)],
            (GdnMtp, VLast, false, true) => &[(ANY, E::gdn_mtp_vlast_bf16_k64_tile32)],
            (GdnMtp, VLast, false, false) => &[(ANY, E::gdn_mtp_vlast_bf16_k128_tile32)],
            (GdnMtp, VLast, true, true) => &[(ANY, E::gdn_mtp_vlast_f32_k64_tile32)],
            (GdnMtp, VLast, true, false) => &[(ANY, E::gdn_mtp_vlast_f32_k128_tile32)],
            (GdnMtpParallel(Mode::NarrowResume), _, _, true) => &[(128, E::gdn_mtp_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k64_tile64)],
            (GdnMtpParallel(Mode::NarrowResume), _, _, false) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64)],
            (GdnMtpParallel(Mode::Update), _, _, true) => &[(128, E::gdn_mtp_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k64_tile64)],
            (GdnMtpParallel(_), _, _, true) => &[(32, E::gdn_mtp_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k64_tile64_warps2)],
            (GdnMtpParallel(Mode::Verify), _, _, false) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile64), (1024, E::gdn_mtp_parallel_klast_bf16_k128_tile128), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64_warps2)],
            (GdnMtpParallel(Mode::Update), _, _, false) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile32), (256, E::gdn_mtp_parallel_klast_bf16_k128_tile64), (1024, E::gdn_mtp_parallel_klast_bf16_k128_tile128), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64)],
            (GdnMtpParallel(Mode::Resume), _, _, false) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile32), (1024, E::gdn_mtp_parallel_klast_bf16_k128_tile128), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64_warps2)],
            (KdaDecode, KLast, false, true) => &[(128, E::kda_recurrent_klast_bf16_k64_tile16), (ANY, E::kda_recurrent_klast_bf16_k64_tile32)],
            (KdaDecode, KLast, false, false) => &[(256, E::kda_recurrent_klast_bf16_k128_tile16), (ANY, E::kda_recurrent_klast_bf16_k128_tile16_warps2)],
            (KdaDecode, KLast, true, true) => &[(256, E::kda_recurrent_klast_f32_k64_tile16), (512, E::kda_recurrent_klast_f32_k64_tile32), (ANY, E::kda_recurrent_klast_f32_k64_tile16)],
            (KdaDecode, KLast, true, false) => &[(64, E::kda_recurrent_klast_f32_k128_tile8), (128, E::kda_recurrent_klast_f32_k128_tile16), (ANY, E::kda_recurrent_klast_f32_k128_tile8)],
            (KdaRecurrent, KLast, false, true) => &[(64, E::kda_recurrent_klast_bf16_k64_tile16), (ANY, E::kda_recurrent_klast_bf16_k64_tile32)],
            (KdaRecurrent, KLast, false, false) => &[(32, E::kda_recurrent_klast_bf16_k128_tile16), (ANY, E::kda_recurrent_klast_bf16_k128_tile16_warps2)],
            (KdaRecurrent, KLast, true, true) => &[(64, E::kda_recurrent_klast_f32_k64_tile16), (ANY, E::kda_recurrent_klast_f32_k64_tile32)],
            (KdaRecurrent, KLast, true, false) => &[(ANY, E::kda_recurrent_klast_f32_k128_tile16)],
            (KdaDecode | KdaRecurrent, VLast, false, true) => &[(ANY, E::kda_recurrent_vlast_bf16_k64_tile32)],
            (KdaDecode, VLast, false, false) => &[(1024, E::kda_recurrent_vlast_bf16_k128_tile32), (ANY, E::kda_recurrent_vlast_bf16_k128_tile64)],
            (KdaRecurrent, VLast, false, false) => &[(ANY, E::kda_recurrent_vlast_bf16_k128_tile32)],
            (KdaDecode | KdaRecurrent, VLast, true, true) => &[(ANY, E::kda_recurrent_vlast_f32_k64_tile32)],
            (KdaDecode | KdaRecurrent, VLast, true, false) => &[(ANY, E::kda_recurrent_vlast_f32_k128_tile32)],
            (KdaRecurrentParallel(Mode::NarrowResume), _, _, true) => &[(ANY, E::kda_recurrent_parallel_klast_bf16_k64_tile32)],
            (KdaRecurrentParallel(Mode::NarrowResume), _, _, false) => &[(ANY, E::kda_recurrent_parallel_klast_bf16_k128_tile64)],
            (KdaRecurrentParallel(Mode::Resume), _, _, true) => &[(256, E::kda_recurrent_parallel_klast_bf16_k64_tile32), (ANY, E::kda_recurrent_parallel_klast_bf16_k64_tile64)],
            (KdaRecurrentParallel(_), _, _, true) => &[(64, E::kda_recurrent_parallel_klast_bf16_k64_tile32), (ANY, E::kda_recurrent_parallel_klast_bf16_k64_tile64)],
            (KdaRecurrentParallel(Mode::Verify), _, _, false) => &[(64, E::kda_recurrent_parallel_klast_bf16_k128_tile64), (ANY, E::kda_recurrent_parallel_klast_bf16_k128_tile128)],
            (KdaRecurrentParallel(_), _, _, false) => &[(128, E::kda_recurrent_parallel_klast_bf16_k128_tile64), (ANY, E::kda_recurrent_parallel_klast_bf16_k128_tile128)],
        }
    }

    /// The entry for `heads` = B · HV states.
    pub fn entry(self, heads: u32) -> Result<Entry, Error> {
        let row = self.rows().iter().find(|&&(up_to, _)| heads <= up_to);
        row.map(|&(_, entry)| entry)
            .ok_or_else(|| Error::Unsupported {
                what: "kernel",
                got: self.prefix(),
                allowed: "no variant of it is compiled",
            })
    }

    /// Every entry that [`Kind::entry`] may answer, over all batch sizes.
    pub fn entries(self) -> impl Iterator<Item = Entry> {
        self.rows().iter().map(|&(_, entry)| entry)
    }

    /// Every entry that computes this kind, selected or not.
    pub fn variants(self) -> impl Iterator<Item = Entry> {
        let prefix = self.prefix();
        let selected_alone = matches!(
            self.operator,
            Operator::GdnMtpParallel(Mode::NarrowResume)
                | Operator::KdaRecurrentParallel(Mode::NarrowResume)
        );
        Entry::ALL.iter().copied().filter(move |entry| {
            let rest = entry.name().strip_prefix(&prefix);
            rest.is_some_and(|rest| rest.starts_with('_'))
                && !(selected_alone && self.entries().all(|selected| selected != *entry))
        })
    }

    fn prefix(self) -> String {
        let operator = match self.operator {
            Operator::GdnDecode => "gdn_decode",
            Operator::GdnMtp => "gdn_mtp",
            Operator::GdnMtpParallel(_) => "gdn_mtp_parallel",
            Operator::KdaDecode | Operator::KdaRecurrent => "kda_recurrent",
            Operator::KdaRecurrentParallel(_) => "kda_recurrent_parallel",
        };
        let layout = match self.layout {
            StateLayout::KLast => "klast",
            StateLayout::VLast => "vlast",
        };
        format!("{operator}_{layout}_{}_k{}", self.state, self.k_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds() -> impl Iterator<Item = Kind> {
        use Operator::{
            GdnDecode, GdnMtp, GdnMtpParallel, KdaDecode, KdaRecurrent, KdaRecurrentParallel,
        };
        use StateLayout::{KLast, VLast};

        let families = [GdnDecode, GdnMtp, KdaDecode, KdaRecurrent]
            .into_iter()
            .flat_map(|operator| {
                [KLast, VLast].into_iter().flat_map(move |layout| {
                    [DType::F32, DType::Bf16].map(move |state| (operator, layout, state))
                })
            });
        let parallel = [Mode::Verify, Mode::Update, Mode::Resume, Mode::NarrowResume]
            .into_iter()
            .flat_map(|mode| [GdnMtpParallel(mode), KdaRecurrentParallel(mode)])
            .map(|operator| (operator, KLast, DType::Bf16));
        families
            .chain(parallel)
            .flat_map(|(operator, layout, state)| {
                [64, 128].map(|k_dim| Kind {
                    operator,
                    layout,
                    state,
                    k_dim,
                    v_dim: k_dim,
                })
            })
    }

    #[test]
    fn tables_rise_to_any_number_of_heads_and_hold_entries_of_their_kind() {
        for kind in kinds() {
            let (rows, variants): (_, Vec<_>) = (kind.rows(), kind.variants().collect());
            assert_eq!(rows.is_empty(), variants.is_empty(), "{kind:?}");
            assert!(rows.is_sorted_by(|one, next| one.0 < next.0), "{kind:?}");
            assert!(rows.last().is_none_or(|last| last.0 == ANY), "{kind:?}");
            for (_, entry) in rows {
                assert!(variants.contains(entry), "{kind:?}: {}", entry.name());
            }
        }
    }

    #[test]
    fn every_variant_is_of_some_kind() {
        let mut of_kinds: Vec<Entry> = kinds().flat_map(Kind::variants).collect();
        of_kinds.sort();
        of_kinds.dedup();
        let operators = ["gdn_decode", "gdn_mtp", "kda_recurrent"];
        let all = Entry::ALL.iter().copied();
        let mut all: Vec<Entry> = all
            .filter(|entry| operators.contains(&entry.operator()))
            .collect();
        all.sort();
        assert_eq!(of_kinds, all);
    }
}

//! Which variant a shape gets. Each threshold is a measurement (`cargo bench`, docs/lab-notes.md).

use gated_delta_kernels::constants::Element;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::{Family, Layout, States};
use gated_delta_kernels::machine;

use super::{StateLayout, checks};
use crate::error::Error;
use crate::shapes::range;
use crate::tensor::DType;

/// A family of kernels, or a use of one that has thresholds of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operator {
    GdnDecode,
    GdnMtp,
    GdnMtpParallel(Mode),
    /// Of one token, and no previous ones.
    KdaDecode,
    KdaRecurrent,
    KdaRecurrentParallel(Mode),
    /// Of one token, on states that wait; of none, a flush.
    GdnDeferred,
    KdaDeferred,
    /// Of one token, on states that wait, with a convolution before it, a norm after it, or both.
    GdnDeferredLayer,
    KdaDeferredLayer,
    /// Of up to 8 tokens at once, on states that wait; of none, a flush.
    GdnDeferredParallel,
    KdaDeferredParallel,
    /// Of up to 8 tokens at once, on states that wait, with a convolution before it, a norm after it, or both; of none, a flush
    /// that moves windows.
    GdnDeferredLayerParallel,
    KdaDeferredLayerParallel,
    /// Of one token, with a convolution before it, a norm after it, or both.
    GdnLayer,
    KdaLayer,
    /// Token by token, with a convolution before it, a norm after it, or both.
    GdnLayerMtp,
    KdaLayerMtp,
    /// All tokens at once, with a convolution before it, a norm after it, or both.
    GdnLayerParallel(Mode),
    KdaLayerParallel(Mode),
    /// Any number of tokens, after a preparation, with or without a convolution and a norm.
    GdnPrefill,
    KdaPrefill,
    /// Rows of at most 64 tokens, without a preparation.
    GdnPrefillShort,
    KdaPrefillShort,
}

impl Operator {
    /// That of its kernels.
    pub fn family(self) -> Family {
        match self {
            Self::GdnDecode => Family::GdnDecode,
            Self::GdnMtp | Self::KdaDecode | Self::KdaRecurrent => Family::Recurrent,
            Self::GdnMtpParallel(_) => Family::GdnMtpParallel,
            Self::KdaRecurrentParallel(_) => Family::KdaRecurrentParallel,
            Self::GdnDeferred | Self::KdaDeferred => Family::Deferred,
            Self::GdnDeferredLayer | Self::KdaDeferredLayer => Family::DeferredLayer,
            Self::GdnDeferredParallel => Family::GdnDeferredParallel,
            Self::KdaDeferredParallel => Family::KdaDeferredParallel,
            Self::GdnDeferredLayerParallel => Family::GdnDeferredLayerParallel,
            Self::KdaDeferredLayerParallel => Family::KdaDeferredLayerParallel,
            Self::GdnLayer | Self::KdaLayer => Family::Layer,
            Self::GdnLayerMtp | Self::KdaLayerMtp => Family::LayerMtp,
            Self::GdnLayerParallel(_) => Family::GdnLayerParallel,
            Self::KdaLayerParallel(_) => Family::KdaLayerParallel,
            Self::GdnPrefill => Family::GdnPrefillChain,
            Self::KdaPrefill => Family::KdaPrefillChain,
            Self::GdnPrefillShort => Family::GdnPrefillShort,
            Self::KdaPrefillShort => Family::KdaPrefillShort,
        }
    }

    /// Whether a decay is one per key channel: KDA's.
    pub fn per_channel(self) -> bool {
        match self {
            Self::GdnDecode
            | Self::GdnMtp
            | Self::GdnMtpParallel(_)
            | Self::GdnDeferred
            | Self::GdnDeferredLayer
            | Self::GdnDeferredParallel
            | Self::GdnDeferredLayerParallel
            | Self::GdnLayer
            | Self::GdnLayerMtp
            | Self::GdnLayerParallel(_)
            | Self::GdnPrefill
            | Self::GdnPrefillShort => false,
            Self::KdaDecode
            | Self::KdaRecurrent
            | Self::KdaRecurrentParallel(_)
            | Self::KdaDeferred
            | Self::KdaDeferredLayer
            | Self::KdaDeferredParallel
            | Self::KdaDeferredLayerParallel
            | Self::KdaLayer
            | Self::KdaLayerMtp
            | Self::KdaLayerParallel(_)
            | Self::KdaPrefill
            | Self::KdaPrefillShort => true,
        }
    }

    /// Whether it is a prefill.
    pub fn is_chunked(self) -> bool {
        self.family().is_chunked()
    }

    /// Whether it takes several tokens, on states that wait.
    fn has_drafts_wait(self) -> bool {
        self.family().is_deferred() && self.family().is_parallel()
    }

    /// What a launch of the parallel formulation does with states.
    fn mode(self) -> Option<Mode> {
        match self {
            Self::GdnMtpParallel(mode)
            | Self::KdaRecurrentParallel(mode)
            | Self::GdnLayerParallel(mode)
            | Self::KdaLayerParallel(mode) => Some(mode),
            _ => None,
        }
    }

    /// Whether a block has one value head, whatever is around the recurrence, or all of a query/key head.
    #[cfg(test)]
    fn has_whole_blocks(self) -> bool {
        !matches!(
            self,
            Self::GdnLayerParallel(_)
                | Self::KdaLayerParallel(_)
                | Self::GdnDeferredLayerParallel
                | Self::KdaDeferredLayerParallel
        )
    }

    /// The same for views that are not 16-byte aligned.
    pub fn narrow(self) -> Self {
        match self {
            Self::GdnMtpParallel(Mode::Resume) => Self::GdnMtpParallel(Mode::NarrowResume),
            Self::KdaRecurrentParallel(Mode::Resume) => {
                Self::KdaRecurrentParallel(Mode::NarrowResume)
            }
            Self::GdnLayerParallel(Mode::Resume) => Self::GdnLayerParallel(Mode::NarrowResume),
            Self::KdaLayerParallel(Mode::Resume) => Self::KdaLayerParallel(Mode::NarrowResume),
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

/// Which states a step that goes token by token keeps, where a choice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keeps {
    /// That after the last token: an update without previous tokens.
    Last,
    /// That after each token: snapshots or token slots, without previous tokens.
    Each,
    /// None, or that after the previous tokens.
    Other,
}

/// Kernels that compute the same: what remains to be chosen is the tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub operator: Operator,
    pub layout: StateLayout,
    /// bf16, f16 or f32.
    pub state: DType,
    pub k_dim: u32,
    pub v_dim: u32,
    /// HV / H.
    pub ratio: u32,
    /// T + T'
    pub tokens: u32,
    pub keeps: Keeps,
    /// Of a prefill: there is a norm.
    pub norm: bool,
}

/// Dynamic shared memory that a block may have on every GPU that is supported, bytes.
pub(crate) const MAX_SHARED_BYTES: u32 = 99 * 1024;

/// The same on Hopper.
const MAX_HOPPER_SHARED_BYTES: u32 = 227 * 1024;

/// Whether `entry` is for this machine: of a chain's entries those of warpgroups for Hopper, the others for all other machines.
pub(crate) fn serves(entry: Entry, machine: u32) -> bool {
    let family = entry.computes().map(|computes| computes.family);
    let is_chain = matches!(
        family,
        Some(Family::GdnPrefillChain | Family::KdaPrefillChain)
    );
    let is_hopper = machine == machine::HOPPER;
    match entry.takes_warpgroups() {
        true => is_hopper,
        false => !is_chain || !is_hopper,
    }
}

/// Dynamic shared memory that a block of `entry` may have, bytes.
fn most_shared_bytes(entry: Entry) -> u32 {
    match entry.takes_warpgroups() {
        true => MAX_HOPPER_SHARED_BYTES,
        false => MAX_SHARED_BYTES,
    }
}

/// What the choice asks of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub multiprocessors: u32,
    /// Major and minor.
    pub compute_capability: (u32, u32),
}

impl Gpu {
    /// It has clusters of blocks.
    pub fn has_clusters(self) -> bool {
        self.compute_capability.0 >= 9
    }

    /// A launch may begin before the one before it on its stream has ended.
    pub fn overlaps(self) -> bool {
        self.machine() >= machine::HOPPER
    }

    /// What it has, as kernels know it.
    pub fn machine(self) -> u32 {
        machine::of_capability(self.compute_capability)
    }

    /// Shared memory that a block may have, bytes.
    pub fn shared_bytes(self) -> u32 {
        machine::shared_bytes(self.compute_capability)
    }

    #[cold]
    pub fn no_such(self, entry: Entry) -> Error {
        let (major, minor) = self.compute_capability;
        Error::Unsupported {
            what: "compute capability of the variant",
            got: format!("{major}.{minor} of {}", entry.name()),
            allowed: match entry.takes_warpgroups() {
                true => "9.0, whose warpgroups multiply; the selected variant runs anywhere",
                false => "any but 9.0, which has variants of its own",
            },
        }
    }
}

/// The GPU that the thresholds were measured on, an H200.
pub(crate) const MEASURED_ON: Gpu = Gpu {
    multiprocessors: 132,
    compute_capability: (9, 0),
};

/// Most stretches of a prompt.
pub(crate) const MOST_STRETCHES: usize = 8;

/// Units from which on a prompt is cut: a preparation of less takes no longer than what a cut costs.
pub(crate) const STRETCHED_FROM: u32 = 32;

/// Least units of the first stretch, whose preparation nothing hides; and of the last.
const LEAST_OF_STRETCH: [u32; 2] = [16, 8];

/// By how many units a stretch grows if it may, so that there are no more of them than they are good for.
const LEAST_GROWTH: u32 = 8;

/// Units of a prompt for each of its first stretch, where eight that grow as they may are not enough otherwise.
const OF_FIRST_STRETCH: u32 = 26;

/// Where a prompt of so many units is cut, whose chain has so many blocks: the first pieces of all stretches but the first;
/// 0 behind them.
///
/// The preparation of a stretch runs beside the chain of the one before, on the multiprocessors that this leaves free: at least
/// half of them, where it takes 0.7 of the time for a unit that the chain takes for a piece. So a stretch has up to 1.4 times the units of
/// the one before, and no more of them than it has to: what is prepared is in L2 if that has room for it. The last has what remains.
pub(crate) fn stretches(units: u32, blocks: u64, gpu: Gpu) -> [u32; MOST_STRETCHES - 1] {
    let mut firsts = [0; MOST_STRETCHES - 1];
    if units < STRETCHED_FROM || 2 * blocks > u64::from(gpu.multiprocessors) {
        return firsts;
    }
    let [least_first, least_last] = LEAST_OF_STRETCH;
    let mut count = units.div_ceil(OF_FIRST_STRETCH).max(least_first);
    let mut end = 0;
    for (i, first) in firsts.iter_mut().enumerate() {
        end += count;
        if units < end + least_last {
            break;
        }
        *first = end;
        let (rest, most) = (units - end, count + count * 2 / 5);
        if rest <= most {
            break;
        }
        let of_each = rest.div_ceil((MOST_STRETCHES - 1 - i) as u32);
        count = most.min(of_each.max(count + LEAST_GROWTH));
    }
    firsts
}

/// Up to `heads` = B · HV on that GPU, the entry.
type Row = (u32, Entry);

/// Any number of heads.
const ANY: u32 = u32::MAX;

/// No number of heads: the entry is for machines that no other entry of the table serves.
const ELSEWHERE: u32 = 0;

impl Kind {
    /// The state dtype that its entries are named by: those of bf16 take f16 too, by a load-time constant, but for drafts on states
    /// that wait.
    fn state_of_entries(self) -> DType {
        match self.state {
            DType::F16 if !self.operator.has_drafts_wait() => DType::Bf16,
            state => state,
        }
    }

    #[rustfmt::skip]
    fn rows(self) -> &'static [Row] {
        use Entry as E;
        use Operator::{GdnDecode, GdnDeferred, GdnDeferredLayer, GdnDeferredLayerParallel, GdnDeferredParallel, KdaDeferred, KdaDeferredLayer, KdaDeferredLayerParallel, KdaDeferredParallel, GdnLayer, GdnLayerMtp, GdnLayerParallel, GdnMtp, GdnMtpParallel, GdnPrefill, GdnPrefillShort, KdaDecode, KdaLayer, KdaLayerMtp, KdaLayerParallel, KdaPrefill, KdaPrefillShort, KdaRecurrent, KdaRecurrentParallel};
        use DType::{Bf16, F16, F32};
        use StateLayout::{KLast, VLast};

        match (self.operator, self.layout, self.state_of_entries(), [self.k_dim, self.v_dim]) {
            (GdnDecode, KLast, Bf16, [64, 64]) => &[(384, E::gdn_decode_klast_bf16_k64_tile16), (ANY, E::gdn_decode_klast_bf16_k64_tile32)],
            (GdnDecode, KLast, Bf16, [128, 128]) => &[(160, E::gdn_decode_klast_bf16_k128_tile16), (ANY, E::gdn_decode_klast_bf16_k128_tile16_warps2)],
            (GdnDecode, KLast, F32, [64, 64]) => &[(1024, E::gdn_decode_klast_f32_k64_tile8), (ANY, E::gdn_decode_klast_f32_k64_tile16)],
            (GdnDecode, KLast, F32, [128, 128]) => &[(1024, E::gdn_decode_klast_f32_k128_tile4), (ANY, E::gdn_decode_klast_f32_k128_tile8)],
            (GdnDecode, VLast, Bf16, [64, 64]) => &[(512, E::gdn_decode_vlast_bf16_k64_tile32), (ANY, E::gdn_decode_vlast_bf16_k64_tile64)],
            (GdnDecode, VLast, Bf16, [128, 128]) => &[(192, E::gdn_decode_vlast_bf16_k128_tile32), (1024, E::gdn_decode_vlast_bf16_k128_tile64), (ANY, E::gdn_decode_vlast_bf16_k128_tile128)],
            (GdnDecode, VLast, F32, [64, 64]) => &[(512, E::gdn_decode_vlast_f32_k64_tile32), (ANY, E::gdn_decode_vlast_f32_k64_tile64)],
            (GdnDecode, VLast, F32, [128, 128]) => &[(768, E::gdn_decode_vlast_f32_k128_tile32), (ANY, E::gdn_decode_vlast_f32_k128_tile64)],
            (GdnMtp, KLast, Bf16, [64, 64]) => &[(64, E::recurrent_klast_bf16_k64_tile16), (ANY, E::recurrent_klast_bf16_k64_tile32)],
            (GdnMtp, KLast, Bf16, [128, 128]) => &[(64, E::recurrent_klast_bf16_k128_tile16), (ANY, E::recurrent_klast_bf16_k128_tile16_warps2)],
            (GdnMtp, KLast, F32, [64, 64]) => &[(128, E::recurrent_klast_f32_k64_tile16), (ANY, E::recurrent_klast_f32_k64_tile32)],
            (GdnMtp, KLast, F32, [128, 128]) if self.keeps == Keeps::Last && self.tokens == 8 => &[(64, E::recurrent_klast_f32_k128_tile16), (256, E::recurrent_klast_f32_k128_tile16_warps2), (ANY, E::recurrent_klast_f32_k128_tile16)],
            (GdnMtp, KLast, F32, [128, 128]) => &[(64, E::recurrent_klast_f32_k128_tile16), (ANY, E::recurrent_klast_f32_k128_tile16_warps2)],
            (GdnMtp, VLast, Bf16, [64, 64]) => &[(ANY, E::recurrent_vlast_bf16_k64_tile32)],
            (GdnMtp, VLast, Bf16, [128, 128]) if self.keeps == Keeps::Each && self.tokens >= 8 => &[(1024, E::recurrent_vlast_bf16_k128_tile32), (ANY, E::recurrent_vlast_bf16_k128_tile64)],
            (GdnMtp, VLast, Bf16, [128, 128]) => &[(ANY, E::recurrent_vlast_bf16_k128_tile32)],
            (GdnMtp, VLast, F32, [64, 64]) => &[(ANY, E::recurrent_vlast_f32_k64_tile32)],
            (GdnMtp, VLast, F32, [128, 128]) if self.keeps == Keeps::Each && self.tokens >= 4 => &[(1024, E::recurrent_vlast_f32_k128_tile32), (ANY, E::recurrent_vlast_f32_k128_tile64)],
            (GdnMtp, VLast, F32, [128, 128]) => &[(ANY, E::recurrent_vlast_f32_k128_tile32)],
            (GdnMtpParallel(Mode::NarrowResume), KLast, Bf16, [64, 64]) => &[(128, E::gdn_mtp_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k64_tile64)],
            (GdnMtpParallel(Mode::NarrowResume), KLast, Bf16, [128, 128]) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64)],
            (GdnMtpParallel(Mode::Update), KLast, Bf16, [64, 64]) => &[(128, E::gdn_mtp_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k64_tile64)],
            (GdnMtpParallel(_), KLast, Bf16, [64, 64]) => &[(32, E::gdn_mtp_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k64_tile64_warps2)],
            (GdnMtpParallel(Mode::Verify), KLast, Bf16, [128, 128]) if self.state == F16 => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile64), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile128)],
            (GdnMtpParallel(Mode::Resume), KLast, Bf16, [128, 128]) if self.state == F16 => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile32), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile128)],
            (GdnMtpParallel(Mode::Verify), KLast, Bf16, [128, 128]) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile64), (1024, E::gdn_mtp_parallel_klast_bf16_k128_tile128), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64_warps2)],
            (GdnMtpParallel(Mode::Update), KLast, Bf16, [128, 128]) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile32), (256, E::gdn_mtp_parallel_klast_bf16_k128_tile64), (1024, E::gdn_mtp_parallel_klast_bf16_k128_tile128), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64)],
            (GdnMtpParallel(Mode::Resume), KLast, Bf16, [128, 128]) => &[(64, E::gdn_mtp_parallel_klast_bf16_k128_tile32), (1024, E::gdn_mtp_parallel_klast_bf16_k128_tile128), (ANY, E::gdn_mtp_parallel_klast_bf16_k128_tile64_warps2)],
            (KdaDecode, KLast, Bf16, [64, 64]) => &[(128, E::recurrent_klast_bf16_k64_tile16), (ANY, E::recurrent_klast_bf16_k64_tile32)],
            (KdaDecode, KLast, Bf16, [128, 128]) => &[(256, E::recurrent_klast_bf16_k128_tile16), (ANY, E::recurrent_klast_bf16_k128_tile16_warps2)],
            (KdaDecode, KLast, F32, [64, 64]) => &[(256, E::recurrent_klast_f32_k64_tile16), (512, E::recurrent_klast_f32_k64_tile32), (ANY, E::recurrent_klast_f32_k64_tile16)],
            (KdaDecode, KLast, F32, [128, 128]) => &[(64, E::recurrent_klast_f32_k128_tile8), (128, E::recurrent_klast_f32_k128_tile16), (ANY, E::recurrent_klast_f32_k128_tile8)],
            (KdaRecurrent, KLast, Bf16, [64, 64]) => &[(64, E::recurrent_klast_bf16_k64_tile16), (ANY, E::recurrent_klast_bf16_k64_tile32)],
            (KdaRecurrent, KLast, Bf16, [128, 128]) if self.tokens == 2 => &[(ANY, E::recurrent_klast_bf16_k128_tile16_warps2)],
            (KdaRecurrent, KLast, Bf16, [128, 128]) => &[(32, E::recurrent_klast_bf16_k128_tile16), (ANY, E::recurrent_klast_bf16_k128_tile16_warps2)],
            (KdaRecurrent, KLast, F32, [64, 64]) => &[(64, E::recurrent_klast_f32_k64_tile16), (ANY, E::recurrent_klast_f32_k64_tile32)],
            (KdaRecurrent, KLast, F32, [128, 128]) if self.keeps == Keeps::Last && self.tokens == 8 => &[(64, E::recurrent_klast_f32_k128_tile16), (256, E::recurrent_klast_f32_k128_tile16_warps2), (ANY, E::recurrent_klast_f32_k128_tile16)],
            (KdaRecurrent, KLast, F32, [128, 128]) => &[(64, E::recurrent_klast_f32_k128_tile16), (ANY, E::recurrent_klast_f32_k128_tile16_warps2)],
            (KdaDecode | KdaRecurrent, VLast, Bf16, [64, 64]) => &[(ANY, E::recurrent_vlast_bf16_k64_tile32)],
            (KdaDecode, VLast, Bf16, [128, 128]) => &[(1024, E::recurrent_vlast_bf16_k128_tile32), (ANY, E::recurrent_vlast_bf16_k128_tile64)],
            (KdaRecurrent, VLast, Bf16, [128, 128]) if self.keeps == Keeps::Each && self.tokens >= 8 => &[(1024, E::recurrent_vlast_bf16_k128_tile32), (ANY, E::recurrent_vlast_bf16_k128_tile64)],
            (KdaRecurrent, VLast, Bf16, [128, 128]) => &[(ANY, E::recurrent_vlast_bf16_k128_tile32)],
            (KdaDecode | KdaRecurrent, VLast, F32, [64, 64]) => &[(ANY, E::recurrent_vlast_f32_k64_tile32)],
            (KdaDecode | KdaRecurrent, VLast, F32, [128, 128]) => &[(ANY, E::recurrent_vlast_f32_k128_tile32)],
            (KdaRecurrentParallel(Mode::NarrowResume), KLast, Bf16, [128, 128]) => &[(ANY, E::kda_recurrent_parallel_klast_bf16_k128_tile64)],
            (KdaRecurrentParallel(Mode::Verify), KLast, Bf16, [128, 128]) => &[(64, E::kda_recurrent_parallel_klast_bf16_k128_tile64), (ANY, E::kda_recurrent_parallel_klast_bf16_k128_tile128)],
            (KdaRecurrentParallel(_), KLast, Bf16, [128, 128]) => &[(128, E::kda_recurrent_parallel_klast_bf16_k128_tile64), (ANY, E::kda_recurrent_parallel_klast_bf16_k128_tile128)],
            (GdnDeferred, KLast, Bf16, [64, 64]) => &[(ANY, E::deferred_klast_bf16_k64_tile64)],
            (GdnDeferred, KLast, Bf16, [128, 128]) => &[(384, E::deferred_klast_bf16_k128_tile32), (ANY, E::deferred_klast_bf16_k128_tile64)],
            (GdnDeferred, KLast, F32, [64, 64]) => &[(ANY, E::deferred_klast_f32_k64_tile64)],
            (GdnDeferred, KLast, F32, [128, 128]) => &[(ANY, E::deferred_klast_f32_k128_tile32)],
            (KdaDeferred, KLast, Bf16, [64, 64]) => &[(ANY, E::deferred_klast_bf16_k64_tile64)],
            (KdaDeferred, KLast, Bf16, [128, 128]) => &[(384, E::deferred_klast_bf16_k128_tile32), (ANY, E::deferred_klast_bf16_k128_tile64)],
            (KdaDeferred, KLast, F32, [64, 64]) => &[(ANY, E::deferred_klast_f32_k64_tile64)],
            (KdaDeferred, KLast, F32, [128, 128]) => &[(ANY, E::deferred_klast_f32_k128_tile32)],
            (GdnDeferredParallel, KLast, Bf16, [64, 64]) => &[(64, E::gdn_deferred_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_deferred_parallel_klast_bf16_k64_tile64)],
            (GdnDeferredParallel, KLast, Bf16, [128, 128]) => &[(128, E::gdn_deferred_parallel_klast_bf16_k128_tile64), (ANY, E::gdn_deferred_parallel_klast_bf16_k128_tile128)],
            (KdaDeferredParallel, KLast, Bf16, [128, 128]) => &[(128, E::kda_deferred_parallel_klast_bf16_k128_tile64), (ANY, E::kda_deferred_parallel_klast_bf16_k128_tile128)],
            (GdnDeferredLayerParallel, KLast, Bf16, [64, 64]) => &[(ANY, E::gdn_deferred_layer_parallel_klast_bf16_k64_tile64)],
            (GdnDeferredLayerParallel, KLast, Bf16, [128, 128]) => &[(128, E::gdn_deferred_layer_parallel_klast_bf16_k128_tile64), (ANY, E::gdn_deferred_layer_parallel_klast_bf16_k128_tile128)],
            (KdaDeferredLayerParallel, KLast, Bf16, [128, 128]) => &[(ANY, E::kda_deferred_layer_parallel_klast_bf16_k128_tile64)],
            (GdnDeferredLayer, KLast, Bf16, [64, 64]) => &[(ANY, E::deferred_layer_klast_bf16_k64_tile64)],
            (GdnDeferredLayer, KLast, Bf16, [128, 128]) => &[(ANY, E::deferred_layer_klast_bf16_k128_tile128)],
            (GdnDeferredLayer, KLast, F32, [64, 64]) => &[(ANY, E::deferred_layer_klast_f32_k64_tile64)],
            (GdnDeferredLayer, KLast, F32, [128, 128]) => &[(ANY, E::deferred_layer_klast_f32_k128_tile128)],
            (KdaDeferredLayer, KLast, Bf16, [64, 64]) => &[(ANY, E::deferred_layer_klast_bf16_k64_tile64)],
            (KdaDeferredLayer, KLast, Bf16, [128, 128]) => &[(ANY, E::deferred_layer_klast_bf16_k128_tile128)],
            (KdaDeferredLayer, KLast, F32, [64, 64]) => &[(ANY, E::deferred_layer_klast_f32_k64_tile64)],
            (KdaDeferredLayer, KLast, F32, [128, 128]) => &[(ANY, E::deferred_layer_klast_f32_k128_tile128)],
            (GdnLayer, KLast, Bf16, [64, 64]) => &[(192, E::layer_klast_bf16_k64_tile16), (ANY, E::layer_klast_bf16_k64_tile64)],
            (GdnLayer, KLast, Bf16, [128, 128]) => &[(128, E::layer_klast_bf16_k128_tile16), (ANY, E::layer_klast_bf16_k128_tile128)],
            (GdnLayer, KLast, F32, [64, 64]) => &[(256, E::layer_klast_f32_k64_tile16), (ANY, E::layer_klast_f32_k64_tile64)],
            (GdnLayer, KLast, F32, [128, 128]) => &[(96, E::layer_klast_f32_k128_tile16), (ANY, E::layer_klast_f32_k128_tile128_warps16)],
            (GdnLayer, VLast, Bf16, [64, 64]) => &[(256, E::layer_vlast_bf16_k64_tile32), (ANY, E::layer_vlast_bf16_k64_tile64)],
            (GdnLayer, VLast, Bf16, [128, 128]) => &[(128, E::layer_vlast_bf16_k128_tile32), (ANY, E::layer_vlast_bf16_k128_tile128)],
            (GdnLayer, VLast, F32, [64, 64]) => &[(256, E::layer_vlast_f32_k64_tile32), (ANY, E::layer_vlast_f32_k64_tile64)],
            (GdnLayer, VLast, F32, [128, 128]) => &[(128, E::layer_vlast_f32_k128_tile32), (ANY, E::layer_vlast_f32_k128_tile128)],
            (KdaLayer, KLast, Bf16, [64, 64]) => &[(192, E::layer_klast_bf16_k64_tile16), (ANY, E::layer_klast_bf16_k64_tile64)],
            (KdaLayer, KLast, Bf16, [128, 128]) => &[(64, E::layer_klast_bf16_k128_tile16), (ANY, E::layer_klast_bf16_k128_tile128)],
            (KdaLayer, KLast, F32, [64, 64]) => &[(192, E::layer_klast_f32_k64_tile16), (ANY, E::layer_klast_f32_k64_tile64)],
            (KdaLayer, KLast, F32, [128, 128]) => &[(64, E::layer_klast_f32_k128_tile16), (256, E::layer_klast_f32_k128_tile128_warps16), (ANY, E::layer_klast_f32_k128_tile128)],
            (KdaLayer, VLast, Bf16, [64, 64]) => &[(256, E::layer_vlast_bf16_k64_tile32), (ANY, E::layer_vlast_bf16_k64_tile64)],
            (KdaLayer, VLast, Bf16, [128, 128]) => &[(128, E::layer_vlast_bf16_k128_tile32), (ANY, E::layer_vlast_bf16_k128_tile128)],
            (KdaLayer, VLast, F32, [64, 64]) => &[(256, E::layer_vlast_f32_k64_tile32), (ANY, E::layer_vlast_f32_k64_tile64)],
            (KdaLayer, VLast, F32, [128, 128]) => &[(128, E::layer_vlast_f32_k128_tile32), (ANY, E::layer_vlast_f32_k128_tile128)],
            (GdnLayerMtp, KLast, Bf16, [64, 64]) => &[(192, E::layer_mtp_klast_bf16_k64_tile16), (ANY, E::layer_mtp_klast_bf16_k64_tile64)],
            (GdnLayerMtp, KLast, F32, [64, 64]) => &[(192, E::layer_mtp_klast_f32_k64_tile16), (ANY, E::layer_mtp_klast_f32_k64_tile64)],
            (GdnLayerMtp, VLast, Bf16, [64, 64]) => &[(192, E::layer_mtp_vlast_bf16_k64_tile32), (ANY, E::layer_mtp_vlast_bf16_k64_tile64)],
            (GdnLayerMtp, VLast, F32, [64, 64]) => &[(192, E::layer_mtp_vlast_f32_k64_tile32), (ANY, E::layer_mtp_vlast_f32_k64_tile64)],
            (KdaLayerMtp, KLast, Bf16, [64, 64]) => &[(192, E::layer_mtp_klast_bf16_k64_tile16), (ANY, E::layer_mtp_klast_bf16_k64_tile64)],
            (KdaLayerMtp, KLast, F32, [64, 64]) => &[(192, E::layer_mtp_klast_f32_k64_tile16), (ANY, E::layer_mtp_klast_f32_k64_tile64)],
            (KdaLayerMtp, VLast, Bf16, [64, 64]) => &[(192, E::layer_mtp_vlast_bf16_k64_tile32), (ANY, E::layer_mtp_vlast_bf16_k64_tile64)],
            (KdaLayerMtp, VLast, F32, [64, 64]) => &[(192, E::layer_mtp_vlast_f32_k64_tile32), (ANY, E::layer_mtp_vlast_f32_k64_tile64)],
            (GdnLayerMtp, KLast, Bf16, [128, 128]) if self.keeps == Keeps::Last && self.tokens >= 4 => &[(48, E::layer_mtp_klast_bf16_k128_tile32), (256, E::layer_mtp_klast_bf16_k128_tile64), (ANY, E::layer_mtp_klast_bf16_k128_tile128)],
            (GdnLayerMtp, KLast, Bf16, [128, 128]) => &[(48, E::layer_mtp_klast_bf16_k128_tile32), (2048, E::layer_mtp_klast_bf16_k128_tile64), (ANY, E::layer_mtp_klast_bf16_k128_tile128)],
            (GdnLayerMtp, KLast, F32, [128, 128]) if self.keeps == Keeps::Last && self.tokens == 4 => &[(48, E::layer_mtp_klast_f32_k128_tile32), (256, E::layer_mtp_klast_f32_k128_tile64), (ANY, E::layer_mtp_klast_f32_k128_tile128)],
            (GdnLayerMtp, KLast, F32, [128, 128]) => &[(48, E::layer_mtp_klast_f32_k128_tile32), (2048, E::layer_mtp_klast_f32_k128_tile64), (ANY, E::layer_mtp_klast_f32_k128_tile128)],
            (GdnLayerMtp, VLast, Bf16, [128, 128]) if self.keeps == Keeps::Last && self.tokens >= 4 => &[(48, E::layer_mtp_vlast_bf16_k128_tile32), (256, E::layer_mtp_vlast_bf16_k128_tile64), (ANY, E::layer_mtp_vlast_bf16_k128_tile128)],
            (GdnLayerMtp, VLast, Bf16, [128, 128]) => &[(48, E::layer_mtp_vlast_bf16_k128_tile32), (2048, E::layer_mtp_vlast_bf16_k128_tile64), (ANY, E::layer_mtp_vlast_bf16_k128_tile128)],
            (GdnLayerMtp, VLast, F32, [128, 128]) if self.keeps == Keeps::Last && self.tokens == 8 => &[(48, E::layer_mtp_vlast_f32_k128_tile32), (1024, E::layer_mtp_vlast_f32_k128_tile64), (ANY, E::layer_mtp_vlast_f32_k128_tile128)],
            (GdnLayerMtp, VLast, F32, [128, 128]) if self.keeps == Keeps::Each && self.tokens == 4 => &[(48, E::layer_mtp_vlast_f32_k128_tile32), (256, E::layer_mtp_vlast_f32_k128_tile64), (16384, E::layer_mtp_vlast_f32_k128_tile32), (ANY, E::layer_mtp_vlast_f32_k128_tile128)],
            (GdnLayerMtp, VLast, F32, [128, 128]) => &[(48, E::layer_mtp_vlast_f32_k128_tile32), (2048, E::layer_mtp_vlast_f32_k128_tile64), (ANY, E::layer_mtp_vlast_f32_k128_tile128)],
            (KdaLayerMtp, KLast, Bf16, [128, 128]) => &[(256, E::layer_mtp_klast_bf16_k128_tile64), (ANY, E::layer_mtp_klast_bf16_k128_tile128)],
            (KdaLayerMtp, KLast, F32, [128, 128]) if self.keeps == Keeps::Last && self.tokens >= 4 => &[(256, E::layer_mtp_klast_f32_k128_tile64), (ANY, E::layer_mtp_klast_f32_k128_tile128)],
            (KdaLayerMtp, KLast, F32, [128, 128]) => &[(2048, E::layer_mtp_klast_f32_k128_tile64), (ANY, E::layer_mtp_klast_f32_k128_tile128)],
            (KdaLayerMtp, VLast, Bf16, [128, 128]) if self.keeps == Keeps::Last && self.tokens >= 4 => &[(256, E::layer_mtp_vlast_bf16_k128_tile64), (ANY, E::layer_mtp_vlast_bf16_k128_tile128)],
            (KdaLayerMtp, VLast, Bf16, [128, 128]) => &[(2048, E::layer_mtp_vlast_bf16_k128_tile64), (ANY, E::layer_mtp_vlast_bf16_k128_tile128)],
            (KdaLayerMtp, VLast, F32, [128, 128]) if self.keeps == Keeps::Last && self.tokens >= 4 => &[(256, E::layer_mtp_vlast_f32_k128_tile64), (ANY, E::layer_mtp_vlast_f32_k128_tile128)],
            (KdaLayerMtp, VLast, F32, [128, 128]) => &[(2048, E::layer_mtp_vlast_f32_k128_tile64), (ANY, E::layer_mtp_vlast_f32_k128_tile128)],
            (GdnLayerParallel(Mode::NarrowResume), KLast, Bf16, [128, 128]) if self.ratio == 1 => &[(64, E::gdn_layer_parallel_klast_bf16_k128_tile64), (ANY, E::gdn_layer_parallel_klast_bf16_k128_tile128_warps8_alone)],
            (GdnLayerParallel(_), KLast, Bf16, [128, 128]) if self.ratio == 1 => &[(64, E::gdn_layer_parallel_klast_bf16_k128_tile64), (256, E::gdn_layer_parallel_klast_bf16_k128_tile128_warps8_alone), (ANY, E::gdn_layer_parallel_klast_bf16_k128_tile128_alone)],
            (GdnLayerParallel(_), KLast, Bf16, [64, 64]) if self.ratio == 1 => &[(64, E::gdn_layer_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_layer_parallel_klast_bf16_k64_tile64_alone)],
            (GdnLayerParallel(Mode::NarrowResume), KLast, Bf16, [128, 128]) => &[(64, E::gdn_layer_parallel_klast_bf16_k128_tile64), (ANY, E::gdn_layer_parallel_klast_bf16_k128_tile128_warps8)],
            (GdnLayerParallel(_), KLast, Bf16, [128, 128]) => &[(64, E::gdn_layer_parallel_klast_bf16_k128_tile64), (256, E::gdn_layer_parallel_klast_bf16_k128_tile128_warps8), (ANY, E::gdn_layer_parallel_klast_bf16_k128_tile128)],
            (GdnLayerParallel(_), KLast, Bf16, [64, 64]) => &[(64, E::gdn_layer_parallel_klast_bf16_k64_tile32), (ANY, E::gdn_layer_parallel_klast_bf16_k64_tile64)],
            (KdaLayerParallel(Mode::NarrowResume), KLast, Bf16, [128, 128]) if self.ratio == 1 => &[(64, E::kda_layer_parallel_klast_bf16_k128_tile64), (ANY, E::kda_layer_parallel_klast_bf16_k128_tile128_warps8_alone)],
            (KdaLayerParallel(_), KLast, Bf16, [128, 128]) if self.ratio == 1 => &[(256, E::kda_layer_parallel_klast_bf16_k128_tile128_warps8_alone), (ANY, E::kda_layer_parallel_klast_bf16_k128_tile128_alone)],
            (KdaLayerParallel(_), KLast, Bf16, [128, 128]) => &[(ANY, E::kda_layer_parallel_klast_bf16_k128_tile64)],
            (GdnDecode, KLast, Bf16, [96, 192]) => &[(ANY, E::gdn_decode_klast_bf16_k96v192_tile32)],
            (GdnDecode, KLast, F32, [96, 192]) => &[(160, E::gdn_decode_klast_f32_k96v192_tile8), (ANY, E::gdn_decode_klast_f32_k96v192_tile16)],
            (GdnDecode, VLast, Bf16, [96, 192]) => &[(192, E::gdn_decode_vlast_bf16_k96v192_tile32), (ANY, E::gdn_decode_vlast_bf16_k96v192_tile64)],
            (GdnDecode, VLast, F32, [96, 192]) => &[(ANY, E::gdn_decode_vlast_f32_k96v192_tile32)],
            (GdnMtp, KLast, Bf16, [96, 192]) => &[(ANY, E::recurrent_klast_bf16_k96v192_tile32)],
            (GdnMtp, KLast, F32, [96, 192]) => &[(ANY, E::recurrent_klast_f32_k96v192_tile16)],
            (GdnMtp, VLast, Bf16, [96, 192]) => &[(ANY, E::recurrent_vlast_bf16_k96v192_tile32)],
            (GdnMtp, VLast, F32, [96, 192]) => &[(ANY, E::recurrent_vlast_f32_k96v192_tile32)],
            (GdnLayer, KLast, Bf16, [96, 192]) => &[(128, E::layer_klast_bf16_k96v192_tile32), (ANY, E::layer_klast_bf16_k96v192_tile192)],
            (GdnLayer, KLast, F32, [96, 192]) => &[(96, E::layer_klast_f32_k96v192_tile32), (ANY, E::layer_klast_f32_k96v192_tile192)],
            (GdnLayer, VLast, Bf16, [96, 192]) => &[(128, E::layer_vlast_bf16_k96v192_tile32), (ANY, E::layer_vlast_bf16_k96v192_tile192)],
            (GdnLayer, VLast, F32, [96, 192]) => &[(128, E::layer_vlast_f32_k96v192_tile32), (ANY, E::layer_vlast_f32_k96v192_tile192)],
            (GdnLayerMtp, KLast, Bf16, [96, 192]) => &[(128, E::layer_mtp_klast_bf16_k96v192_tile32), (ANY, E::layer_mtp_klast_bf16_k96v192_tile192)],
            (GdnLayerMtp, KLast, F32, [96, 192]) => &[(ANY, E::layer_mtp_klast_f32_k96v192_tile192)],
            (GdnLayerMtp, VLast, Bf16, [96, 192]) => &[(ANY, E::layer_mtp_vlast_bf16_k96v192_tile192)],
            (GdnLayerMtp, VLast, F32, [96, 192]) => &[(ANY, E::layer_mtp_vlast_f32_k96v192_tile192)],
            (GdnPrefill, _, _, [64, 64]) => &[(ELSEWHERE, E::gdn_prefill_chain_k64_tile64_mma), (ANY, E::gdn_prefill_chain_k64_tile64)],
            (GdnPrefill, _, _, [128, 128]) => &[(ELSEWHERE, E::gdn_prefill_chain_k128_tile64_mma), (128, E::gdn_prefill_chain_k128_tile64), (ANY, E::gdn_prefill_chain_k128_tile128)],
            (GdnPrefill, _, _, [96, 192]) => &[(ELSEWHERE, E::gdn_prefill_chain_k96v192_tile64_mma), (ANY, E::gdn_prefill_chain_k96v192_tile64)],
            (GdnPrefillShort, _, _, [64, 64]) => &[(ANY, E::gdn_prefill_short_k64_tile64)],
            (GdnPrefillShort, KLast, _, [128, 128]) => &[(64, E::gdn_prefill_short_k128_tile64), (ANY, E::gdn_prefill_short_k128_tile128)],
            (GdnPrefillShort, VLast, _, [128, 128]) => &[(ANY, E::gdn_prefill_short_k128_tile128)],
            (GdnPrefillShort, _, _, [96, 192]) => &[(ANY, E::gdn_prefill_short_k96v192_tile64)],
            (KdaPrefill, _, _, [128, 128]) => &[(ELSEWHERE, E::kda_prefill_chain_k128_tile64_mma), (128, E::kda_prefill_chain_k128_tile64), (ANY, E::kda_prefill_chain_k128_tile128)],
            (KdaPrefillShort, _, _, [128, 128]) => &[(ANY, E::kda_prefill_short_k128_tile128)],
            _ => &[],
        }
    }

    /// That for K, of those for K = 64, 96 and 128.
    fn of_dim(self, [of_64, of_96, of_128]: [Option<Entry>; 3]) -> Option<Entry> {
        match self.k_dim {
            64 => of_64,
            96 => of_96,
            128 => of_128,
            _ => None,
        }
    }

    /// What is launched before its entries, with the same constants.
    pub fn prepare(self) -> Option<Entry> {
        use Entry as E;
        let entries = match self.operator {
            Operator::GdnPrefill => [
                Some(E::gdn_prefill_prepare_k64),
                Some(E::gdn_prefill_prepare_k96v192),
                Some(E::gdn_prefill_prepare_k128),
            ],
            Operator::KdaPrefill => [None, None, Some(E::kda_prefill_prepare_k128)],
            _ => [None; 3],
        };
        self.of_dim(entries)
    }

    /// What is launched before [`Self::prepare`] where there is a convolution, with the same constants.
    pub fn convolve(self) -> Option<Entry> {
        use Entry as E;
        self.prepare()?;
        let entries = [
            E::prefill_convolve_k64,
            E::prefill_convolve_k96v192,
            E::prefill_convolve_k128,
        ];
        self.of_dim(entries.map(Some))
    }

    /// What is launched behind its entries, with the same constants: it writes windows, and norms o of rows that are not short.
    pub fn finish(self) -> Option<Entry> {
        use Entry as E;
        let entries = [
            E::prefill_finish_k64,
            E::prefill_finish_k96v192,
            E::prefill_finish_k128,
        ];
        let is_chunked = self.operator.is_chunked();
        self.of_dim(entries.map(|entry| is_chunked.then_some(entry)))
    }

    /// What is launched behind its entries, beside them, of rows of one token, with the same constants.
    pub fn single(self) -> Option<Entry> {
        use Entry as E;
        self.prepare()?;
        let entries = [
            E::prefill_single_k64,
            E::prefill_single_k96v192,
            E::prefill_single_k128,
        ];
        self.of_dim(entries.map(Some))
    }

    /// Whether what is behind its entries norms o: of rows that have a preparation.
    pub fn norms_behind(self) -> bool {
        self.norm && self.prepare().is_some()
    }

    /// All that is launched with its entries, with a convolution or without.
    pub fn beside(self, convolves: bool) -> impl Iterator<Item = Entry> {
        let convolve = self.convolve().filter(|_| convolves);
        let finish = self.finish();
        let finish = finish.filter(|_| convolves || self.norms_behind());
        let all = [convolve, self.prepare(), self.single(), finish];
        all.into_iter().flatten()
    }

    /// The kinds that a launch may be of, by lengths that are no constants.
    pub fn of_any_lengths(self) -> Vec<Self> {
        [Some(self), self.of_short_rows()]
            .into_iter()
            .flatten()
            .collect()
    }

    /// That of rows of at most 64 tokens, where these have kernels of their own.
    pub fn of_short_rows(self) -> Option<Self> {
        let operator = match self.operator {
            Operator::GdnPrefill => Operator::GdnPrefillShort,
            Operator::KdaPrefill => Operator::KdaPrefillShort,
            _ => return None,
        };
        Some(Self { operator, ..self })
    }

    /// Most value heads of a query/key head, where its kernels compute all of these together.
    pub fn max_heads(self) -> Option<u32> {
        let is_layer = matches!(
            self.operator,
            Operator::GdnDeferredLayer
                | Operator::KdaDeferredLayer
                | Operator::GdnLayer
                | Operator::KdaLayer
                | Operator::GdnLayerMtp
                | Operator::KdaLayerMtp
                | Operator::GdnLayerParallel(_)
                | Operator::KdaLayerParallel(_)
                | Operator::GdnDeferredLayerParallel
                | Operator::KdaDeferredLayerParallel
        );
        // Some of a single value head take no other.
        let of_several = Self { ratio: 2, ..self };
        let entries = of_several.rows().iter();
        let most = |&(_, entry): &Row| {
            let fits = |&ratio: &u32| {
                let of_one = Self {
                    ratio,
                    tokens: 1,
                    ..self
                };
                of_one.shared_bytes(entry) <= most_shared_bytes(entry)
            };
            (1..=entry.max_ratio()).rev().find(fits)
        };
        if is_layer {
            entries.filter_map(most).max()
        } else {
            None
        }
    }

    /// Dynamic shared memory of a block of `entry`, bytes.
    pub fn shared_bytes(self, entry: Entry) -> u32 {
        let of_state = match (self.layout, self.state) {
            (StateLayout::KLast, state) => entry.shared_state_elements() * state.size_of() as u32,
            (StateLayout::VLast, _) => 0,
        };
        let shared = entry.shared(self.operator.per_channel());
        shared.bytes(self.tokens, self.ratio) + of_state
    }

    /// Some variant has room for these tokens and value heads, where any is compiled.
    pub fn check_room(self) -> Result<(), Error> {
        checks::ratio(self.ratio as usize, self.max_heads())?;
        let mut entries = self.rows().iter().map(|&(_, entry)| entry);
        if self.rows().is_empty() || entries.any(|entry| self.has_room(entry)) {
            return Ok(());
        }
        Err(self.no_room(|_| true))
    }

    /// What is wanted where no variant has room, of those that a GPU `takes`.
    #[cold]
    fn no_room(self, takes: impl Fn(Entry) -> bool) -> Error {
        let fits = |kind: Self| {
            let mut entries = self.rows().iter().map(|&(_, entry)| entry);
            entries.any(|entry| takes(entry) && kind.has_room(entry))
        };
        let (ratio, tokens) = (self.ratio, self.tokens);
        let most = (0..tokens)
            .rev()
            .find(|&tokens| fits(Self { tokens, ..self }));
        match most {
            Some(most) if most > 0 => range(
                "T + T'",
                format!("at most {most} with HV / H = {ratio}, by the shared memory of a block"),
                tokens,
            ),
            _ => {
                let most = (0..ratio).rev().find(|&ratio| fits(Self { ratio, ..self }));
                let most = most.unwrap_or(0);
                let wanted = format!("at most {most}, by the shared memory of a block");
                range("HV / H", wanted, ratio)
            }
        }
    }

    /// Whether `entry` has room for the value heads that it takes together, and for the tokens.
    fn has_room(self, entry: Entry) -> bool {
        self.ratio <= entry.max_ratio() && self.shared_bytes(entry) <= most_shared_bytes(entry)
    }

    /// The entry for `heads` = B · HV states on a GPU: what counts is how many times the blocks fill it. Where that has no
    /// room, another that has.
    pub fn entry(self, heads: u32, gpu: Gpu) -> Result<Entry, Error> {
        let measured = u64::from(heads) * u64::from(MEASURED_ON.multiprocessors);
        let reaches =
            |up_to| up_to == ANY || measured <= u64::from(up_to) * u64::from(gpu.multiprocessors);
        let mut last = None;
        for &(up_to, entry) in self.rows() {
            if self.runs_on(entry, gpu) {
                if reaches(up_to) {
                    return Ok(entry);
                }
                last = Some(entry);
            }
        }
        last.ok_or_else(|| self.no_entry(gpu))
    }

    /// The most states that each of its entries but the last is selected for.
    pub fn last_heads(self, gpu: Gpu) -> impl Iterator<Item = u32> {
        let up_to = self.rows().iter().map(|&(up_to, _)| up_to);
        up_to.filter(|&up_to| up_to != ANY).map(move |up_to| {
            let filled = u64::from(up_to) * u64::from(gpu.multiprocessors);
            let heads = filled / u64::from(MEASURED_ON.multiprocessors);
            u32::try_from(heads).unwrap_or(u32::MAX)
        })
    }

    #[cold]
    fn no_entry(self, gpu: Gpu) -> Error {
        let mut entries = self.rows().iter().map(|&(_, entry)| entry);
        if !gpu.has_clusters() && entries.any(|entry| self.has_room(entry)) {
            return Error::Unsupported {
                what: "kernel",
                got: format!(
                    "{:?} with HV / H = {}, on a GPU without clusters of blocks",
                    self.operator, self.ratio
                ),
                allowed: "compute capability 9.0 or newer, or the recurrent formulation",
            };
        }
        if !self.rows().is_empty() {
            return self.no_room(|entry| !entry.takes_clusters() || gpu.has_clusters());
        }
        Error::Unsupported {
            what: "kernel",
            got: format!(
                "{:?}, {} {} states, K = {}, V = {}",
                self.operator, self.layout, self.state, self.k_dim, self.v_dim
            ),
            allowed: "no variant of it is compiled",
        }
    }

    fn runs_on(self, entry: Entry, gpu: Gpu) -> bool {
        self.has_room(entry)
            && (!entry.takes_clusters() || gpu.has_clusters())
            && serves(entry, gpu.machine())
    }

    /// Every entry that [`Kind::entry`] may answer, over all batch sizes.
    pub fn entries(self, gpu: Gpu) -> impl Iterator<Item = Entry> {
        let entries = self.rows().iter().map(|&(_, entry)| entry);
        entries.filter(move |&entry| self.runs_on(entry, gpu))
    }

    /// Every entry that computes this kind, selected or not.
    pub fn variants(self) -> impl Iterator<Item = Entry> {
        let selected_alone = self.operator.mode() == Some(Mode::NarrowResume);
        Entry::ALL.iter().copied().filter(move |entry| {
            self.is_computed_by(*entry)
                && self.has_room(*entry)
                && !(selected_alone && self.rows().iter().all(|(_, selected)| selected != entry))
        })
    }

    fn is_computed_by(self, entry: Entry) -> bool {
        let layout = match self.layout {
            StateLayout::KLast => Layout::KLast,
            StateLayout::VLast => Layout::VLast,
        };
        let element = match self.state_of_entries() {
            DType::F32 => Element::F32,
            DType::Bf16 => Element::Bf16,
            _ => return false,
        };
        entry.computes().is_some_and(|computes| {
            let per_channel = self.operator.per_channel();
            computes.family == self.operator.family()
                && computes.per_channel.is_none_or(|own| own == per_channel)
                && computes
                    .all_states()
                    .any(|it| it == States { layout, element })
                && [computes.k, computes.v] == [self.k_dim, self.v_dim]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds() -> impl Iterator<Item = Kind> {
        use Operator::{
            GdnDecode, GdnDeferred, GdnDeferredLayer, GdnDeferredLayerParallel,
            GdnDeferredParallel, GdnLayer, GdnLayerMtp, GdnLayerParallel, GdnMtp, GdnMtpParallel,
            GdnPrefill, GdnPrefillShort, KdaDecode, KdaDeferred, KdaDeferredLayer,
            KdaDeferredLayerParallel, KdaDeferredParallel, KdaLayer, KdaLayerMtp, KdaLayerParallel,
            KdaPrefill, KdaPrefillShort, KdaRecurrent, KdaRecurrentParallel,
        };
        use StateLayout::{KLast, VLast};

        let token_by_token = [
            GdnDecode,
            GdnMtp,
            KdaDecode,
            KdaRecurrent,
            GdnDeferred,
            KdaDeferred,
            GdnDeferredLayer,
            KdaDeferredLayer,
            GdnLayer,
            KdaLayer,
            GdnLayerMtp,
            KdaLayerMtp,
            GdnPrefill,
            GdnPrefillShort,
            KdaPrefill,
            KdaPrefillShort,
        ];
        let families = token_by_token.into_iter().flat_map(|operator| {
            [KLast, VLast].into_iter().flat_map(move |layout| {
                [DType::F32, DType::Bf16, DType::F16].map(move |state| (operator, layout, state))
            })
        });
        let parallel = [Mode::Verify, Mode::Update, Mode::Resume, Mode::NarrowResume]
            .into_iter()
            .flat_map(|mode| {
                [
                    GdnMtpParallel(mode),
                    KdaRecurrentParallel(mode),
                    GdnLayerParallel(mode),
                    KdaLayerParallel(mode),
                ]
            })
            .flat_map(|operator| [DType::Bf16, DType::F16].map(|state| (operator, KLast, state)))
            .chain(
                [
                    GdnDeferredParallel,
                    KdaDeferredParallel,
                    GdnDeferredLayerParallel,
                    KdaDeferredLayerParallel,
                ]
                .map(|it| (it, KLast, DType::Bf16)),
            );
        families
            .chain(parallel)
            .flat_map(|(operator, layout, state)| {
                [[64, 64], [96, 192], [128, 128]].map(|[k_dim, v_dim]| Kind {
                    operator,
                    layout,
                    state,
                    k_dim,
                    v_dim,
                    ratio: 1,
                    tokens: 1,
                    keeps: Keeps::Other,
                    norm: false,
                })
            })
            .flat_map(|kind| {
                // Those that have a table of their own besides.
                let others = [
                    (4, Keeps::Last),
                    (8, Keeps::Last),
                    (4, Keeps::Each),
                    (8, Keeps::Each),
                ];
                let others = others.map(|(tokens, keeps)| Kind {
                    tokens,
                    keeps,
                    ..kind
                });
                let others = others
                    .into_iter()
                    .filter(move |other| other.rows() != kind.rows());
                [kind].into_iter().chain(others)
            })
    }

    /// What a step keeps has a table of its own: f32 K-last updates of eight tokens, V-last states after each of many.
    #[test]
    fn what_is_kept_chooses() {
        let kind = |layout, state, tokens, keeps| Kind {
            operator: Operator::GdnMtp,
            layout,
            state,
            k_dim: 128,
            v_dim: 128,
            ratio: 2,
            tokens,
            keeps,
            norm: false,
        };
        let (k_last, v_last) = (StateLayout::KLast, StateLayout::VLast);
        let (each, last, other) = (Keeps::Each, Keeps::Last, Keeps::Other);
        for (kind, heads, wanted) in [
            (kind(k_last, DType::F32, 8, last), 512, "f32_k128_tile16"),
            (
                kind(k_last, DType::F32, 8, last),
                128,
                "f32_k128_tile16_warps2",
            ),
            (
                kind(k_last, DType::F32, 8, other),
                512,
                "f32_k128_tile16_warps2",
            ),
            (
                kind(k_last, DType::F32, 4, last),
                512,
                "f32_k128_tile16_warps2",
            ),
            (kind(v_last, DType::Bf16, 8, each), 2048, "bf16_k128_tile64"),
            (kind(v_last, DType::F16, 8, each), 512, "bf16_k128_tile32"),
            (kind(v_last, DType::Bf16, 8, last), 2048, "bf16_k128_tile32"),
            (kind(v_last, DType::Bf16, 4, each), 2048, "bf16_k128_tile32"),
        ] {
            let entry = kind.entry(heads, MEASURED_ON).unwrap();
            assert!(
                entry.name().ends_with(&format!("_{wanted}")),
                "{kind:?}: {}",
                entry.name()
            );
        }
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
        let of_kind = |kind: Kind| kind.variants().chain(kind.beside(true));
        let mut of_kinds: Vec<Entry> = kinds().flat_map(of_kind).collect();
        of_kinds.sort();
        of_kinds.dedup();
        let all = Entry::ALL.iter().copied();
        let mut all: Vec<Entry> = all.filter(|entry| entry.computes().is_some()).collect();
        all.sort();
        assert_eq!(of_kinds, all);
    }

    #[test]
    fn a_gpu_with_half_the_multiprocessors_changes_at_half_the_heads() {
        for kind in kinds() {
            let measured = |heads| kind.entry(heads, MEASURED_ON);
            for multiprocessors in 16..=192 {
                let gpu = Gpu {
                    multiprocessors,
                    ..MEASURED_ON
                };
                let on_hopper = |row: &&Row| row.0 != ELSEWHERE;
                for &(up_to, entry) in kind.rows().iter().filter(on_hopper) {
                    if up_to == ANY {
                        assert_eq!(kind.entry(u32::MAX, gpu).unwrap(), entry);
                        continue;
                    }
                    let last = up_to * multiprocessors / MEASURED_ON.multiprocessors;
                    assert_eq!(kind.entry(last, gpu).unwrap(), entry, "{kind:?}");
                    assert_ne!(kind.entry(last + 1, gpu).unwrap(), entry, "{kind:?}");
                    assert_eq!(measured(up_to).unwrap(), entry);
                }
            }
        }
    }

    #[test]
    fn every_gpu_and_every_ratio_has_an_entry_that_runs_there() {
        let without = Gpu {
            compute_capability: (8, 6),
            ..MEASURED_ON
        };
        for kind in kinds().filter(|kind| !kind.rows().is_empty()) {
            // With many tokens a block has no room for the most heads.
            let most = kind.max_heads().unwrap_or(8);
            let most = if kind.tokens > 1 { 2 } else { most };
            for ratio in [1, 2, most] {
                let kind = Kind { ratio, ..kind };
                // Short rows are worked by the chain there.
                let is_short = matches!(
                    kind.operator,
                    Operator::GdnPrefillShort | Operator::KdaPrefillShort
                );
                // In the parallel formulation a block has one value head, and these meet in clusters; where states wait even
                // of one.
                let clusters = matches!(
                    kind.operator,
                    Operator::GdnDeferredLayerParallel | Operator::KdaDeferredLayerParallel
                );
                let alone = (ratio == 1 && !clusters) || kind.operator.has_whole_blocks();
                for heads in [1, 100, 10_000] {
                    match kind.entry(heads, without) {
                        Ok(entry) => {
                            assert!(!entry.takes_clusters() && alone, "{kind:?}");
                            assert!(!entry.takes_warpgroups() && !is_short, "{kind:?}");
                        }
                        Err(error) => {
                            assert!(!alone || is_short, "{kind:?}");
                            if is_short {
                                continue;
                            }
                            assert!(error.to_string().contains("clusters"), "{error}");
                        }
                    }
                    let entry = kind.entry(heads, MEASURED_ON).unwrap();
                    assert!(kind.variants().any(|variant| variant == entry));
                    assert!(ratio <= entry.max_ratio(), "{kind:?}");
                }
            }
        }
    }

    /// Where no more than a number of tokens, or of value heads, has room, an error says how many.
    #[test]
    fn what_has_no_room_in_a_block_is_an_error() {
        let (mut by_tokens, mut by_heads) = (0, 0);
        for kind in kinds().filter(|kind| !kind.rows().is_empty()) {
            let fits = |kind: Kind| {
                let entries = kind.rows().iter().map(|&(_, entry)| entry);
                let mut entries = entries.map(|entry| (entry, kind.shared_bytes(entry)));
                entries.any(|(entry, bytes)| bytes <= most_shared_bytes(entry))
            };
            let message = |kind: Kind| kind.check_room().unwrap_err().to_string();
            for tokens in [1, 2 * 16] {
                assert!(Kind { tokens, ..kind }.check_room().is_ok(), "{kind:?}");
            }
            let with = |tokens| Kind { tokens, ..kind };
            if let Some(first) = (1..20_000).find(|&tokens| !fits(with(tokens))) {
                with(first - 1).check_room().unwrap();
                let wanted = format!(
                    "T + T': wanted at most {} with HV / H = 1, by the shared memory of a block, got {first}",
                    first - 1
                );
                assert_eq!(message(with(first)), wanted);
                let error = with(first).entry(1, MEASURED_ON).unwrap_err();
                assert_eq!(error.to_string(), wanted);
                by_tokens += 1;
            }
            let Some(most) = kind.max_heads() else {
                continue;
            };
            let with = |ratio| Kind { ratio, ..kind };
            let wanted = format!("HV / H: wanted at most {most} with a convolution or a norm");
            assert!(message(with(most + 1)).starts_with(&wanted), "{kind:?}");
            by_heads += 1;
        }
        assert!(by_tokens > 0 && by_heads > 0);
    }

    /// Of K-last states a chain's copier brings those of a block that has all of a head.
    #[test]
    fn a_block_has_room_for_the_state_that_is_brought() {
        let bytes = |entry, layout, state| {
            let kind = Kind {
                operator: Operator::GdnPrefill,
                layout,
                state,
                k_dim: 128,
                v_dim: 128,
                ratio: 2,
                tokens: 1,
                keeps: Keeps::Other,
                norm: false,
            };
            kind.shared_bytes(entry)
        };
        for (entry, elements) in [
            (Entry::gdn_prefill_chain_k128_tile128, 128 * 128),
            (Entry::gdn_prefill_chain_k128_tile64, 0),
            (Entry::prefill_single_k128, 0),
        ] {
            let without = entry.shared_bytes();
            for (state, of_element) in [(DType::F32, 4), (DType::Bf16, 2), (DType::F16, 2)] {
                let k_last = bytes(entry, StateLayout::KLast, state);
                assert_eq!(
                    k_last,
                    without + of_element * elements,
                    "{entry:?}, {state}"
                );
                assert_eq!(bytes(entry, StateLayout::VLast, state), without);
            }
        }
    }

    /// A batch for whose entry there is no room gets one that has.
    #[test]
    fn entries_without_room_are_passed_over() {
        let mut passed = 0;
        for kind in kinds().filter(|kind| kind.rows().len() > 1) {
            for tokens in 1..2_000 {
                let kind = Kind { tokens, ..kind };
                let rows = kind.rows().iter();
                let room: Vec<bool> = rows.map(|&(_, entry)| kind.has_room(entry)).collect();
                if room.iter().all(|&room| room) || !room.contains(&true) {
                    continue;
                }
                for &(up_to, _) in kind.rows() {
                    let entry = kind.entry(up_to, MEASURED_ON).unwrap();
                    assert!(kind.has_room(entry), "{kind:?}: {}", entry.name());
                    passed += 1;
                }
            }
        }
        assert!(passed > 0);
    }

    /// The units of every stretch.
    fn counts(units: u32, blocks: u64, multiprocessors: u32) -> Vec<u32> {
        let gpu = Gpu {
            multiprocessors,
            ..MEASURED_ON
        };
        let firsts = stretches(units, blocks, gpu).into_iter();
        let firsts = firsts.take_while(|&first| first != 0);
        let edges: Vec<u32> = [0].into_iter().chain(firsts).chain([units]).collect();
        edges.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    #[test]
    fn a_prompt_is_cut_from_so_many_units_on_where_half_of_the_gpu_is_free() {
        assert_eq!(counts(31, 64, 132), [31]);
        assert_eq!(counts(32, 64, 132), [16, 16]);
        assert_eq!(counts(256, 66, 132), [16, 22, 30, 38, 46, 54, 50]);
        assert_eq!(counts(64, 64, 132), [16, 22, 26]);
        assert_eq!(counts(256, 67, 132), [256]);
        assert_eq!(counts(256, 64, 128), counts(256, 64, 132));
        assert_eq!(counts(256, 64, 127), [256]);
        assert_eq!(counts(256, u64::MAX / 4, 132), [256]);
    }

    #[test]
    fn stretches_grow_by_no_more_than_they_may() {
        for units in (32..5000).chain([1 << 20, u32::MAX / 64]) {
            let counts = counts(units, 1, 132);
            assert!(counts.len() <= MOST_STRETCHES, "{units}");
            assert_eq!(counts.iter().sum::<u32>(), units);
            assert!(counts[0] >= 16 && counts.last() >= Some(&8), "{units}");
            for (i, pair) in counts.windows(2).enumerate() {
                // A rest that is no stretch of its own is the last one's.
                let rest = if i + 2 == counts.len() { 7 } else { 0 };
                assert!(5 * (pair[1] - rest) <= 7 * pair[0], "{units}: {counts:?}");
            }
        }
    }

    #[test]
    fn what_is_not_compiled_is_an_error() {
        let kind = Kind {
            operator: Operator::GdnMtpParallel(Mode::Verify),
            layout: StateLayout::KLast,
            state: DType::F16,
            k_dim: 96,
            v_dim: 192,
            ratio: 1,
            tokens: 1,
            keeps: Keeps::Other,
            norm: false,
        };
        assert_eq!(
            kind.entry(1, MEASURED_ON).unwrap_err().to_string(),
            "kernel = GdnMtpParallel(Verify), k_last f16 states, K = 96, V = 192 is not supported: no variant of it is compiled"
        );
        assert_eq!(kind.variants().count(), 0);
    }
}

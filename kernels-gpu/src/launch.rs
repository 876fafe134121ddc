//! What a kernel is to the host and the simulator: parameters, constants, and the shape of a launch.

use crate::constants::{Constants, Element};

/// A kernel body with its compile-time parameters filled in.
pub trait Kernel {
    /// The single, by-value argument.
    type Params: bytemuck::Pod;
    /// What is written into the PTX when it is loaded.
    type Constants: Constants;
    /// Threads of a block (x only), a multiple of 32.
    const BLOCK: u32;
    /// Blocks of a multiprocessor that registers must leave room for; 0 leaves it to the assembler.
    const MIN_BLOCKS_PER_SM: u32 = 0;
    /// Whether a load-time constant says so instead ([`StepConstants::blocks_per_sm`](crate::step::StepConstants)): where narrow
    /// accesses, the dtype of tokens or the layout of states take more registers.
    const MIN_BLOCKS_BY_CONSTANT: bool = false;
    /// Whether a block may have two value heads of a query/key head, one after the other: where the grid has HV/(2 H) blocks
    /// along x instead of HV/H.
    const MAKES_PAIRS: bool = false;
    /// Whether the kernel waits itself for the launch before it on its stream (`griddepcontrol.wait`), so that the host may launch it
    /// with programmatic stream serialization behind any kernel. The other kernels of a prefill may be launched so only behind kernels
    /// of the same prefill ([`LaunchShape::overlaps`]).
    const OVERLAPS: bool = false;
    /// Blocks that share one head's state.
    const TILES: u32;
    /// Dynamic shared memory of a block, bytes.
    const SHARED_BYTES: u32 = 0;
    /// Bytes of dynamic shared memory besides where [`StepConstants::stages`](crate::step::StepConstants::stages) is 2.
    const SHARED_BYTES_OF_STAGE: u32 = 0;
    /// Elements of a K-last state for which a block has dynamic shared memory besides; none of a V-last one.
    const SHARED_STATE_ELEMENTS: u32 = 0;
    /// Of [`Self::SHARED_BYTES`], those that are not needed where q, k and the keys of a ring are bf16: the low parts of split tokens, at
    /// the end.
    const SHARED_BYTES_OF_LOWS: u32 = 0;
    /// Dynamic shared memory of a block for each token of a row, bytes.
    const SHARED_BYTES_PER_TOKEN: u32 = 0;
    /// Dynamic shared memory besides, where each key channel has its own decay.
    const SHARED_OF_CHANNELS: Shared = Shared::NONE;
    /// Value heads that a block may have, where it has all those of a query/key head; 1: a block has one value head.
    const MAX_HEADS: u32 = 1;
    /// Whether a block has [`Self::BLOCK`] threads for each of its value heads.
    const BLOCK_PER_HEAD: bool = false;
    /// Dynamic shared memory of a block for each of its value heads, bytes.
    const SHARED_BYTES_PER_HEAD: u32 = 0;
    /// Dynamic shared memory of a block for each token of a row and each of its value heads, bytes.
    const SHARED_BYTES_PER_TOKEN_OF_HEAD: u32 = 0;
    /// Blocks along x of a cluster; 1: none.
    const CLUSTER: u32 = 1;
    /// Whether a cluster has [`Self::CLUSTER`] blocks for each value head of a query/key head. The grid's y then goes
    /// through the value heads, those of a query/key head one after the other.
    const CLUSTER_OF_HEADS: bool = false;
    /// Whether it multiplies as warpgroups ([`crate::device::warpgroup`]), or goes with what does: takes a GPU of compute
    /// capability 9.0, no later one.
    const WARPGROUPS: bool = false;
    /// Whether its tests have passed on a GPU. What has not is for the simulator, and for a host that asks for it.
    const PROVED: bool = true;
    /// Most value heads of a query/key head.
    const MAX_RATIO: u32 = if Self::MAX_HEADS == 1 {
        u32::MAX
    } else {
        Self::MAX_HEADS
    };
    /// Of the workspace, for a unit of a prefill and a query/key head, bytes: of k and q, the same for every ratio.
    const WORKSPACE_BYTES: u32 = 0;
    /// Of the workspace, for a unit of a prefill and a value head, bytes.
    const WORKSPACE_BYTES_PER_HEAD: u32 = 0;
    /// Bytes more of a value head where there are tiles of v ([`makes_values`](crate::step::StepConstants::makes_values)).
    const WORKSPACE_BYTES_OF_VALUES: u32 = 0;
    /// Bytes more of a value head where o is left in f16 for a norm ([`crate::prefill::norm::is_left`]).
    const WORKSPACE_BYTES_OF_NORM: u32 = 0;
    /// What an operator on states computes with it; nothing of other kernels.
    const COMPUTES: Option<Computes> = None;

    /// The body, as run by every thread.
    ///
    /// # Safety
    /// `params` and the load-time constants describe live tensors.
    unsafe fn run(params: &Self::Params);
}

/// What a kernel of an operator on states computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Computes {
    /// Which recurrence, and how.
    pub family: Family,
    /// Whether each key channel has its own decay: KDA's; GDN's is one of a value head. `None`: either, by a load-time constant.
    pub per_channel: Option<bool>,
    /// Its states; `None`: any, by load-time constants, or none.
    pub states: Option<States>,
    /// Head dim of q and k.
    pub k: u32,
    /// Head dim of v and o.
    pub v: u32,
}

/// Dynamic shared memory of a block, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Whatever it has.
    pub block: u32,
    /// For each token of a row.
    pub per_token: u32,
    /// For each of its value heads.
    pub per_head: u32,
    /// For each token of each of its value heads.
    pub per_token_of_head: u32,
}

impl Shared {
    /// None.
    pub const NONE: Self = Self {
        block: 0,
        per_token: 0,
        per_head: 0,
        per_token_of_head: 0,
    };

    /// Of a block with `heads` value heads, for rows of `tokens` tokens.
    #[must_use]
    pub const fn bytes(self, tokens: u32, heads: u32) -> u32 {
        let of_block = self.block + self.per_token * tokens;
        let of_head = self.per_head + self.per_token_of_head * tokens;
        of_block.saturating_add(of_head.saturating_mul(heads))
    }
}

/// The states that an entry is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct States {
    /// Which dim is contiguous.
    pub layout: Layout,
    /// Their element: bf16 where they may be f16 too.
    pub element: Element,
}

impl States {
    /// All that there are entries for.
    pub const ALL: [Self; 4] = [
        Self::new(Layout::KLast, Element::Bf16),
        Self::new(Layout::KLast, Element::F32),
        Self::new(Layout::VLast, Element::Bf16),
        Self::new(Layout::VLast, Element::F32),
    ];

    const fn new(layout: Layout, element: Element) -> Self {
        Self { layout, element }
    }
}

impl Computes {
    /// The states that it computes with: those that it is compiled for, or all.
    pub fn all_states(&self) -> impl Iterator<Item = States> + use<> {
        let own = self.states;
        let knows = self.family.knows_states();
        let all = States::ALL.into_iter();
        all.filter(move |it| own.map_or(knows, |own| own == *it))
    }

    /// Whether each key channel has its own decay, for each operator that it computes: GDN's first.
    pub fn all_operators(&self) -> impl Iterator<Item = bool> + use<> {
        let own = self.per_channel;
        let all = [false, true].into_iter();
        all.filter(move |it| own.is_none_or(|own| own == *it))
    }
}

/// Kernels that compute the same, in the same way; the symbols of a family's entries begin with its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// GDN, one token.
    GdnDecode,
    /// Token by token.
    Recurrent,
    /// GDN, all tokens at once.
    GdnMtpParallel,
    /// KDA, all tokens at once.
    KdaRecurrentParallel,
    /// One token, on states that wait for the tokens of a ring. It takes [`crate::step::DeferredParams`].
    Deferred,
    /// One token, on states that wait, with a convolution before and a norm after it.
    DeferredLayer,
    /// GDN, all tokens at once, on states that wait.
    GdnDeferredParallel,
    /// KDA, the same.
    KdaDeferredParallel,
    /// GDN, all tokens at once, on states that wait, with a convolution before and a norm after it.
    GdnDeferredLayerParallel,
    /// KDA, the same.
    KdaDeferredLayerParallel,
    /// One token, with a convolution before and a norm after it.
    Layer,
    /// Token by token, with a convolution before and a norm after it.
    LayerMtp,
    /// GDN, all tokens at once, with a convolution before and a norm after it.
    GdnLayerParallel,
    /// KDA, the same.
    KdaLayerParallel,
    /// Any number of tokens, in chunks, with a convolution: q, k and v are convolved, before [`Family::GdnPrefillPrepare`] or
    /// [`Family::KdaPrefillPrepare`] with the same parameters and constants. The grid is x = n · unit + which of q, k (H each;
    /// of KDA HV) and v (HV). It knows no states.
    PrefillConvolve,
    /// GDN, any number of tokens, in chunks: what their operands are, which do not depend on states. The grid is x = n · unit +
    /// ⌈HV/H / 2⌉ · query/key head + which pair of its value heads, units from
    /// [`first_piece`](crate::step::PrefillParams::first_piece) on. It knows no states.
    GdnPrefillPrepare,
    /// GDN, any number of tokens, in chunks: from state to state, after [`Family::GdnPrefillPrepare`] with the same
    /// parameters and constants; of a prompt in stretches, after the chain of the stretch before too.
    GdnPrefillChain,
    /// GDN, rows of at most 64 tokens: [`Family::GdnPrefillPrepare`] and [`Family::GdnPrefillChain`] in one, without a
    /// workspace.
    GdnPrefillShort,
    /// The rows of one token of a launch with longer ones: beside a chain, which leaves them alone
    /// ([`has_singles`](crate::step::PrefillParams::has_singles)), with the same parameters and constants.
    PrefillSingle,
    /// With a convolution or a norm: behind the others, with the same parameters and constants, it writes windows and norms o
    /// of what is not short. The grid is x = windows' blocks, ⌈D / block⌉ of each row where the convolution keeps any, and behind
    /// them n · unit + value head where there is a norm. It knows no states.
    PrefillFinish,
    /// KDA, any number of tokens, in chunks: what their operands are. The grid is x = n · unit + HV/H · query/key head + which of
    /// its value heads. It knows no states, as [`Family::GdnPrefillPrepare`].
    KdaPrefillPrepare,
    /// KDA, from state to state, after [`Family::KdaPrefillPrepare`].
    KdaPrefillChain,
    /// KDA, rows of at most 64 tokens, both in one.
    KdaPrefillShort,
}

impl Family {
    /// Most tokens of a row, and most previous ones.
    #[must_use]
    pub const fn max_tokens(self) -> u32 {
        match self {
            Self::GdnDecode
            | Self::Deferred
            | Self::DeferredLayer
            | Self::Layer
            | Self::PrefillSingle => 1,
            Self::Recurrent | Self::LayerMtp => 16,
            Self::GdnMtpParallel
            | Self::KdaRecurrentParallel
            | Self::GdnLayerParallel
            | Self::KdaLayerParallel
            | Self::GdnDeferredParallel
            | Self::KdaDeferredParallel
            | Self::GdnDeferredLayerParallel
            | Self::KdaDeferredLayerParallel => 8,
            Self::PrefillConvolve
            | Self::GdnPrefillPrepare
            | Self::GdnPrefillChain
            | Self::KdaPrefillPrepare
            | Self::KdaPrefillChain
            | Self::PrefillFinish => u32::MAX,
            Self::GdnPrefillShort | Self::KdaPrefillShort => 64,
        }
    }

    /// Whether it takes previous tokens, to commit them.
    #[must_use]
    pub const fn takes_previous(self) -> bool {
        self.max_tokens() > 1 && !self.is_chunked() && !self.is_deferred()
    }

    /// Whether all tokens are computed at once, on the tensor cores: no state between the first and the last is made.
    #[must_use]
    pub const fn is_parallel(self) -> bool {
        matches!(
            self,
            Self::GdnMtpParallel
                | Self::KdaRecurrentParallel
                | Self::GdnLayerParallel
                | Self::KdaLayerParallel
                | Self::GdnDeferredParallel
                | Self::KdaDeferredParallel
                | Self::GdnDeferredLayerParallel
                | Self::KdaDeferredLayerParallel
        )
    }

    /// Whether states wait: it takes [`crate::step::DeferredParams`].
    #[must_use]
    pub const fn is_deferred(self) -> bool {
        matches!(
            self,
            Self::Deferred
                | Self::DeferredLayer
                | Self::GdnDeferredParallel
                | Self::KdaDeferredParallel
                | Self::GdnDeferredLayerParallel
                | Self::KdaDeferredLayerParallel
        )
    }

    /// Whether it is of a prefill: works in pieces that end at multiples of 64 tokens of a sequence, and takes
    /// [`crate::step::PrefillParams`].
    #[must_use]
    pub const fn is_chunked(self) -> bool {
        matches!(
            self,
            Self::PrefillConvolve
                | Self::GdnPrefillPrepare
                | Self::GdnPrefillChain
                | Self::GdnPrefillShort
                | Self::PrefillSingle
                | Self::KdaPrefillPrepare
                | Self::KdaPrefillChain
                | Self::KdaPrefillShort
                | Self::PrefillFinish
        )
    }

    /// Whether it takes the rows of one token of a prefill, beside the longer ones.
    #[must_use]
    pub const fn takes_singles(self) -> bool {
        matches!(self, Self::PrefillSingle)
    }

    /// Whether it prepares a prefill: makes what does not depend on states.
    #[must_use]
    pub const fn prepares(self) -> bool {
        matches!(self, Self::GdnPrefillPrepare | Self::KdaPrefillPrepare)
    }

    /// Whether it convolves for a prefill: leaves q, k and v for who prepares it.
    #[must_use]
    pub const fn convolves(self) -> bool {
        matches!(self, Self::PrefillConvolve)
    }

    /// Whether it is behind a prefill's others: norms o, and writes windows.
    #[must_use]
    pub const fn finishes(self) -> bool {
        matches!(self, Self::PrefillFinish)
    }

    /// Whether it has to do with states.
    #[must_use]
    pub const fn knows_states(self) -> bool {
        !self.convolves() && !self.prepares() && !self.finishes()
    }

    /// Blocks of a unit of a prefill, of what convolves, prepares or norms one with H query/key heads of `ratio` value heads each,
    /// whose key channels have decays of their own where `per_channel`; 0 of others.
    #[must_use]
    pub const fn blocks_of_unit(self, h: u32, ratio: u32, per_channel: bool) -> u32 {
        match self {
            Self::PrefillConvolve if per_channel => h * 3 * ratio,
            Self::PrefillConvolve => h * (2 + ratio),
            Self::GdnPrefillPrepare => h * ratio.div_ceil(2),
            Self::KdaPrefillPrepare | Self::PrefillFinish => h * ratio,
            _ => 0,
        }
    }
}

/// Which dim of a state is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[P, HV, V, K]`
    KLast,
    /// `[P, HV, K, V]`
    VLast,
}

/// Shape of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block (x only), a multiple of 32.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Blocks that share a cluster, neighbours along x and, where these are all of a row, along y; 1: none. The PTX says it
    /// too: a launcher need not.
    pub cluster: u32,
    /// The launch may begin before the one before it on its stream has ended
    /// (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`), for which the kernel waits itself. Without that attribute it
    /// begins behind it, and computes the same.
    pub overlaps: bool,
}

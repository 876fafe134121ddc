//! What a kernel is to the host and the simulator: parameters, constants, and the shape of a launch.

use crate::constants::{Constants, Element};
pub use crate::device::shapes::LaunchShape;

/// A kernel body with its compile-time parameters filled in.
pub trait Kernel {
    /// The single, by-value argument.
    type Params: bytemuck::Pod;
    /// Numbers that are written into the PTX when it is loaded.
    type Constants: Constants;
    /// The launch, and the operator that it computes.
    const DESCRIPTION: Description;

    /// The body, as run by every thread.
    ///
    /// # Safety
    /// `params` and the load-time constants describe live tensors.
    unsafe fn run(params: &Self::Params);
}

/// All that a host and a simulator know of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// The operator on states that it computes; none of other kernels.
    pub computes: Option<Computes>,
    /// Threads of a block (x only), a multiple of 32.
    pub block: u32,
    /// Whether a block has [`Self::block`] threads for each of its value heads.
    pub block_per_head: bool,
    /// Blocks of a multiprocessor that registers must leave room for; 0 leaves it to the assembler.
    pub min_blocks_per_sm: u32,
    /// Whether a load-time constant bounds that number ([`StepConstants::blocks_per_sm`](crate::step::StepConstants)): where narrow
    /// accesses, the dtype of tokens or the layout of states take more registers.
    pub min_blocks_by_constant: bool,
    /// Whether one block of a multiprocessor is said to be enough on machines before Hopper, where the assembler would spill for a second
    /// one unasked.
    pub one_block_before_hopper: bool,
    /// Blocks that share one head's state.
    pub tiles: u32,
    /// Whether a block may have two value heads of a query/key head, one after the other: where the grid has HV/(2 H) blocks
    /// along x instead of HV/H.
    pub makes_pairs: bool,
    /// Value heads that a block may have, where it has all those of a query/key head; 1: a block has one value head.
    pub max_heads: u32,
    /// Most value heads of a query/key head, where a block has one.
    pub max_ratio: u32,
    /// Blocks along x of a cluster; 1: none.
    pub cluster: u32,
    /// Whether a cluster has [`Self::cluster`] blocks for each value head of a query/key head. The grid's y then goes
    /// through the value heads, those of a query/key head one after the other.
    pub cluster_of_heads: bool,
    /// Whether it multiplies as warpgroups ([`crate::device::warpgroup`]), or goes with what does: takes a GPU of compute
    /// capability 9.0, no later one (sm_90a).
    pub warpgroups: bool,
    /// Whether the kernel waits itself for the launch before it on its stream (`griddepcontrol.wait`), so that the host may launch it
    /// with programmatic stream serialization behind any kernel. The other kernels of a prefill may be launched so only behind kernels
    /// of the same prefill ([`LaunchShape::overlaps`]).
    pub overlaps: bool,
    /// Whether its tests have passed on a GPU. A kernel without that is for the simulator, and for a host that asks for it.
    pub proved: bool,
    /// Dynamic shared memory of a block.
    pub shared: Shared,
    /// Dynamic shared memory besides, where each key channel has its own decay.
    pub shared_of_channels: Shared,
    /// Dynamic shared memory besides where [`StepConstants::stages`](crate::step::StepConstants::stages) is 2, bytes.
    pub shared_of_stage: u32,
    /// Bytes of [`Self::shared`] that are not needed where q, k and the keys of a ring are bf16: the low parts of split tokens, at the
    /// end.
    pub shared_of_lows: u32,
    /// Dynamic shared memory besides where a parallel step goes through its tokens in sets of 8, bytes.
    pub shared_of_sets: u32,
    /// Elements of a K-last state for which a block has dynamic shared memory besides; none of a V-last one.
    pub shared_state_elements: u32,
    /// Workspace of a prefill.
    pub workspace: Workspace,
}

impl Description {
    /// A kernel in blocks of `block` threads, and nothing besides.
    #[must_use]
    pub const fn new(block: u32) -> Self {
        Self {
            computes: None,
            block,
            block_per_head: false,
            min_blocks_per_sm: 0,
            min_blocks_by_constant: false,
            one_block_before_hopper: false,
            tiles: 1,
            makes_pairs: false,
            max_heads: 1,
            max_ratio: u32::MAX,
            cluster: 1,
            cluster_of_heads: false,
            warpgroups: false,
            overlaps: false,
            proved: true,
            shared: Shared::NONE,
            shared_of_channels: Shared::NONE,
            shared_of_stage: 0,
            shared_of_lows: 0,
            shared_of_sets: 0,
            shared_state_elements: 0,
            workspace: Workspace::NONE,
        }
    }

    /// The same of an operator on states.
    #[must_use]
    pub const fn of(block: u32, computes: Computes) -> Self {
        Self {
            computes: Some(computes),
            ..Self::new(block)
        }
    }
}

/// The operator on states that a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Computes {
    /// Which recurrence, and how.
    pub family: Family,
    /// Whether each key channel has its own decay: KDA's; GDN's is one of a value head. `None`: either, by a load-time constant.
    pub per_channel: Option<bool>,
    /// Layout of its states; `None`: either, by a load-time constant, or no states.
    pub layout: Option<Layout>,
    /// Elements of its states, in shared memory where it [takes sets](Self::takes_sets): bf16 where they may be f16 too; `None`: any,
    /// by load-time constants, or no states.
    pub element: Option<Element>,
    /// Head dim of q and k.
    pub k: u32,
    /// Head dim of v and o.
    pub v: u32,
}

/// Dynamic shared memory of a block, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// For the block.
    pub block: u32,
    /// For each token and previous token of a row.
    pub per_token: u32,
    /// For each of its value heads.
    pub per_head: u32,
    /// For each token and previous token of each of its value heads.
    pub per_token_of_head: u32,
}

impl Shared {
    /// None.
    pub const NONE: Self = Self::of_block(0);

    /// So many bytes, whatever a block has.
    #[must_use]
    pub const fn of_block(block: u32) -> Self {
        Self {
            block,
            per_token: 0,
            per_head: 0,
            per_token_of_head: 0,
        }
    }

    /// This and `more`.
    #[must_use]
    pub const fn and(self, more: Self) -> Self {
        Self {
            block: self.block + more.block,
            per_token: self.per_token + more.per_token,
            per_head: self.per_head + more.per_head,
            per_token_of_head: self.per_token_of_head + more.per_token_of_head,
        }
    }

    /// Bytes of a block with `heads` value heads, for rows of `tokens` tokens.
    #[must_use]
    pub const fn bytes(self, tokens: u32, heads: u32) -> u32 {
        let of_block = self.block + self.per_token * tokens;
        let of_head = self.per_head + self.per_token_of_head * tokens;
        of_block.saturating_add(of_head.saturating_mul(heads))
    }
}

/// Workspace of a unit of a prefill, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workspace {
    /// For a query/key head, of k and q: the same for every ratio.
    pub per_key_head: u32,
    /// For a value head.
    pub per_head: u32,
    /// More of a value head where there are tiles of v ([`makes_values`](crate::step::StepConstants::makes_values)).
    pub of_values: u32,
    /// More of a value head where o is left in f16 for a norm ([`crate::prefill::norm::is_left`]).
    pub of_norm: u32,
}

impl Workspace {
    /// None.
    pub const NONE: Self = Self {
        per_key_head: 0,
        per_head: 0,
        of_values: 0,
        of_norm: 0,
    };
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
    /// A kernel for heads of these dims, whose decays are `per_channel` and whose states are any.
    #[must_use]
    pub const fn new(family: Family, per_channel: Option<bool>, [k, v]: [u32; 2]) -> Self {
        Self {
            family,
            per_channel,
            layout: None,
            element: None,
            k,
            v,
        }
    }

    /// The same for these states alone.
    #[must_use]
    pub const fn on(self, layout: Layout, element: Element) -> Self {
        let layout = Some(layout);
        Self {
            layout,
            ..self.of(element)
        }
    }

    /// The same for states of these elements, in either layout.
    #[must_use]
    pub const fn of(self, element: Element) -> Self {
        let element = Some(element);
        Self { element, ..self }
    }

    /// Most tokens of a row, and most previous ones: those of its family, and twice as many where it [takes
    /// sets](Self::takes_sets).
    #[must_use]
    pub const fn max_tokens(&self) -> u32 {
        match self.takes_sets() {
            true => 2 * self.family.max_tokens(),
            false => self.family.max_tokens(),
        }
    }

    /// Whether it goes through more tokens than its family computes at once, set by set. Its states are f32 in shared memory; in the
    /// pool they may be of 16 bits too, by a load-time constant.
    #[must_use]
    pub const fn takes_sets(&self) -> bool {
        let family = self.family;
        let of_f32 = matches!(self.element, Some(Element::F32));
        family.is_parallel() && of_f32 && !family.layer && !family.deferred
    }

    /// Whether load-time constants decide the layout of its states, or their element too.
    #[must_use]
    pub const fn has_any_states(&self) -> bool {
        self.layout.is_none() && self.family.knows_states()
    }

    /// Whether a load-time constant decides whether the states of the pool are f32 or of 16 bits.
    #[must_use]
    pub const fn has_any_elements(&self) -> bool {
        self.has_any_states() && (self.element.is_none() || self.takes_sets())
    }

    /// The states that it computes with: those that it is compiled for, or all.
    pub fn all_states(&self) -> impl Iterator<Item = States> + use<> {
        let own = *self;
        let all = States::ALL.into_iter();
        all.filter(move |it| {
            (own.has_any_states() || own.layout == Some(it.layout))
                && (own.has_any_elements() || own.element == Some(it.element))
        })
    }

    /// Whether each key channel has its own decay, for each operator that it computes: GDN's first.
    pub fn all_operators(&self) -> impl Iterator<Item = bool> + use<> {
        let own = self.per_channel;
        let all = [false, true].into_iter();
        all.filter(move |it| own.is_none_or(|own| own == *it))
    }
}

/// Kernels that compute the same, in the same way, for either operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Family {
    /// How tokens are gone through.
    pub form: Form,
    /// Whether there is a convolution before and a norm after it. A prefill's are load-time constants and kernels of their own.
    pub layer: bool,
    /// Whether states wait for the tokens of a ring: it takes [`crate::step::DeferredParams`].
    pub deferred: bool,
}

#[cfg(not(target_arch = "nvptx64"))]
impl core::fmt::Display for Family {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let deferred = if self.deferred { "deferred " } else { "" };
        let layer = if self.layer { "layer " } else { "" };
        let form = match self.form {
            Form::Decode => "decode",
            Form::Recurrent => "recurrent step",
            Form::Parallel => "parallel step",
            Form::Chunked(_) => "prefill",
        };
        write!(f, "{deferred}{layer}{form}")
    }
}

/// How tokens are gone through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// One token.
    Decode,
    /// Token by token.
    Recurrent,
    /// All tokens at once, on the tensor cores: no state between the first and the last is made.
    Parallel,
    /// Any number of tokens, in chunks that end at multiples of 64 tokens of a sequence. It takes [`crate::step::PrefillParams`].
    Chunked(Stage),
}

/// Kernels of a prefill, in the order of their launches, with the same parameters and constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The convolution of q, k and v. The grid is x = n · unit + which of q, k (H each; of KDA HV) and v (HV). It knows no states.
    Convolve,
    /// The intra-chunk pass: the chain's operands, which do not depend on states. The grid is x = n · unit + which head: of GDN one
    /// of ⌈HV/H / 2⌉ pairs of value heads of a query/key head, of KDA one of HV/H value heads; units from
    /// [`first_chunk`](crate::step::PrefillParams::first_chunk) on. It knows no states.
    Prepare,
    /// The inter-chunk scan: from state to state, after [`Stage::Prepare`]; of a prompt in segments, after the chain of the segment
    /// before too.
    Chain,
    /// Of rows in splits, between the two passes of the chain: states at the begins of splits.
    Carry,
    /// Rows of at most 64 tokens: [`Stage::Prepare`] and [`Stage::Chain`] in one, without a workspace.
    Short,
    /// The rows of one token of a launch with longer ones: beside a chain, which leaves them alone
    /// ([`has_singles`](crate::step::PrefillParams::has_singles)).
    Single,
    /// With a convolution or a norm: behind the others, it writes windows and norms o of what is not short. The grid is x =
    /// windows' blocks, ⌈D / block⌉ of each row where the convolution keeps any, and behind them n · unit + value head where there
    /// is a norm. It knows no states.
    Finish,
}

impl Family {
    /// One token of a layer, or on states that wait; without either [`Self::RECURRENT`] takes it.
    pub const DECODE: Self = Self::of(Form::Decode);
    /// Token by token, on states that do not wait, without convolution and norm.
    pub const RECURRENT: Self = Self::of(Form::Recurrent);
    /// The same, all tokens at once.
    pub const PARALLEL: Self = Self::of(Form::Parallel);

    const fn of(form: Form) -> Self {
        Self {
            form,
            layer: false,
            deferred: false,
        }
    }

    /// A kernel of a prefill.
    #[must_use]
    pub const fn chunked(stage: Stage) -> Self {
        Self::of(Form::Chunked(stage))
    }

    /// The same with a convolution before and a norm after it.
    #[must_use]
    pub const fn in_layer(self) -> Self {
        Self {
            layer: true,
            ..self
        }
    }

    /// The same on states that wait.
    #[must_use]
    pub const fn on_deferred(self) -> Self {
        Self {
            deferred: true,
            ..self
        }
    }

    /// Whether states wait for the tokens of a ring.
    #[must_use]
    pub const fn is_deferred(self) -> bool {
        self.deferred
    }

    /// Most tokens of a row, and most previous ones, whatever the states.
    #[must_use]
    pub const fn max_tokens(self) -> u32 {
        match self.form {
            Form::Decode | Form::Chunked(Stage::Single) => 1,
            Form::Recurrent => 16,
            Form::Parallel => 8,
            Form::Chunked(Stage::Short) => 64,
            Form::Chunked(_) => u32::MAX,
        }
    }

    /// Whether it takes previous tokens, to commit them.
    #[must_use]
    pub const fn takes_previous(self) -> bool {
        matches!(self.form, Form::Recurrent | Form::Parallel) && !self.deferred
    }

    /// Whether all tokens are computed at once.
    #[must_use]
    pub const fn is_parallel(self) -> bool {
        matches!(self.form, Form::Parallel)
    }

    /// Which kernel of a prefill it is.
    #[must_use]
    pub const fn stage(self) -> Option<Stage> {
        match self.form {
            Form::Chunked(stage) => Some(stage),
            _ => None,
        }
    }

    /// Whether it is a kernel of a prefill.
    #[must_use]
    pub const fn is_chunked(self) -> bool {
        self.stage().is_some()
    }

    /// Whether it is a prefill's chain.
    #[must_use]
    pub const fn is_chain(self) -> bool {
        matches!(self.form, Form::Chunked(Stage::Chain))
    }

    /// Whether it takes the rows of one token of a prefill, beside the longer ones.
    #[must_use]
    pub const fn takes_singles(self) -> bool {
        matches!(self.form, Form::Chunked(Stage::Single))
    }

    /// Whether it has to do with states.
    #[must_use]
    pub const fn knows_states(self) -> bool {
        !matches!(
            self.form,
            Form::Chunked(Stage::Convolve | Stage::Prepare | Stage::Carry | Stage::Finish)
        )
    }

    /// Blocks of a unit, in a kernel of a prefill that convolves, prepares or norms units, with H query/key heads of `ratio` value heads each,
    /// whose key channels have decays of their own where `per_channel`; 0 of others.
    #[must_use]
    pub const fn blocks_of_unit(self, h: u32, ratio: u32, per_channel: bool) -> u32 {
        match self.stage() {
            Some(Stage::Convolve) if per_channel => h * 3 * ratio,
            Some(Stage::Convolve) => h * (2 + ratio),
            Some(Stage::Prepare) if !per_channel => h * ratio.div_ceil(2),
            Some(Stage::Prepare | Stage::Finish) => h * ratio,
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

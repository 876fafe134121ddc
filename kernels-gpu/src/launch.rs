//! The host's and the simulator's view of a kernel: parameters, constants, and the shape of a launch.

use crate::constants::{Constants, Element};
pub use crate::device::shapes::LaunchShape;

/// A kernel body with its compile-time parameters filled in.
pub trait Kernel {
    /// The single, by-value argument.
    type Params: bytemuck::Pod;
    /// Constants that are written into the PTX text when it is loaded.
    type Constants: Constants;
    /// The shape of the launch, and the operator that the kernel computes.
    const DESCRIPTION: Description;

    /// The body, as run by every thread.
    ///
    /// # Safety
    /// `params` and the load-time constants describe live tensors.
    unsafe fn run(params: &Self::Params);
}

/// All facts that a host and a simulator need about a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// The operator on states that the kernel computes; `None` for other kernels.
    pub computes: Option<Computes>,
    /// Threads of a block (x only), a multiple of 32.
    pub block: u32,
    /// Whether a block has [`Self::block`] threads for each of its value heads.
    pub block_per_head: bool,
    /// Minimum number of blocks per multiprocessor, which bounds registers; 0 leaves it to the assembler.
    pub min_blocks_per_sm: u32,
    /// Whether a load-time constant lowers that number ([`StepConstants::blocks_per_sm`](crate::step::StepConstants)), because
    /// narrow accesses, the dtype of tokens or the layout of states may take more registers.
    pub min_blocks_by_constant: bool,
    /// Whether to tell the assembler, on machines before Hopper, that one block per multiprocessor is enough; otherwise it would
    /// spill in order to fit a second block.
    pub one_block_before_hopper: bool,
    /// Blocks that share one head's state.
    pub tiles: u32,
    /// Whether a block may have two value heads of a query/key head, one after the other; the grid then has HV/(2 H) blocks along
    /// x instead of HV/H.
    pub makes_pairs: bool,
    /// Largest number of value heads of a block that has all those of a query/key head; 1: a block has one value head.
    pub max_heads: u32,
    /// Largest number of value heads per query/key head, if a block has one value head.
    pub max_ratio: u32,
    /// Blocks of a cluster, along x; 1: no cluster.
    pub cluster: u32,
    /// Whether a cluster has [`Self::cluster`] blocks for each value head of a query/key head. The y of the grid is then the
    /// value head, where those of a query/key head are consecutive.
    pub cluster_of_heads: bool,
    /// Whether the kernel multiplies by warpgroups ([`crate::device::warpgroup`]), or is launched together with such a kernel.
    /// Needs a GPU of compute capability 9.0, and no later one (sm_90a).
    pub warpgroups: bool,
    /// Whether the kernel itself waits for the previous launch on its stream (`griddepcontrol.wait`). The host may then launch it
    /// with programmatic stream serialization after any kernel. It may launch the other kernels of a prefill in this way only
    /// after kernels of the same prefill ([`LaunchShape::overlaps`]).
    pub overlaps: bool,
    /// Whether the kernel's tests have passed on a GPU. Otherwise it is for the simulator, and for a host that asks for it.
    pub proved: bool,
    /// Dynamic shared memory of a block.
    pub shared: Shared,
    /// Additional dynamic shared memory if each key channel has its own decay.
    pub shared_of_channels: Shared,
    /// Bytes at the end of [`Self::shared`] that are not needed if q, k and the keys of a ring are bf16: the low parts of split
    /// tokens.
    pub shared_of_lows: u32,
    /// Additional bytes of dynamic shared memory if a parallel step computes its tokens in sets of 8.
    pub shared_of_sets: u32,
    /// Elements of a K-last state for which a block has additional dynamic shared memory; not needed for V-last states.
    pub shared_state_elements: u32,
    /// Workspace of a prefill.
    pub workspace: Workspace,
}

impl Description {
    /// A kernel with blocks of `block` threads, and defaults for everything else.
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
            shared_of_lows: 0,
            shared_of_sets: 0,
            shared_state_elements: 0,
            workspace: Workspace::NONE,
        }
    }

    /// The same for an operator on states.
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
    /// The recurrence, and the way of computing it.
    pub family: Family,
    /// Whether each key channel has its own decay (KDA), or each value head (GDN). `None`: either, by a load-time constant.
    pub per_channel: Option<bool>,
    /// Layout of the states; `None`: either, by a load-time constant, or no states.
    pub layout: Option<Layout>,
    /// Element type of the states, in shared memory if the kernel [takes sets](Self::takes_sets); bf16 also stands for f16.
    /// `None`: any, by load-time constants, or no states.
    pub element: Option<Element>,
    /// Head dim of q and k.
    pub k: u32,
    /// Head dim of v and o.
    pub v: u32,
}

/// Dynamic shared memory of a block, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Bytes of the block.
    pub block: u32,
    /// Bytes of each token and previous token of a row.
    pub per_token: u32,
    /// Bytes of each of the block's value heads.
    pub per_head: u32,
    /// Bytes of each token and previous token of each of the block's value heads.
    pub per_token_of_head: u32,
}

impl Shared {
    /// None.
    pub const NONE: Self = Self::of_block(0);

    /// A fixed number of bytes per block.
    #[must_use]
    pub const fn of_block(block: u32) -> Self {
        Self {
            block,
            per_token: 0,
            per_head: 0,
            per_token_of_head: 0,
        }
    }

    /// The sum of this and `more`.
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

/// Workspace of a chunk of a prefill, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workspace {
    /// Bytes of a query/key head, for k and q: the same for every ratio.
    pub per_key_head: u32,
    /// Bytes of a value head.
    pub per_head: u32,
    /// Additional bytes of a value head for tiles of v ([`makes_values`](crate::step::StepConstants::makes_values)).
    pub of_values: u32,
    /// Additional bytes of a value head if o is stored in f16 for a norm ([`crate::prefill::norm::is_left`]).
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
    /// Their element type; bf16 also stands for f16.
    pub element: Element,
}

impl States {
    /// All kinds of states for which entries exist.
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
    /// A kernel for heads of these dims, with decays per channel or head as `per_channel` says, for all states.
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

    /// The same, only for these states.
    #[must_use]
    pub const fn on(self, layout: Layout, element: Element) -> Self {
        let layout = Some(layout);
        Self {
            layout,
            ..self.of(element)
        }
    }

    /// The same for states of this element type, in either layout.
    #[must_use]
    pub const fn of(self, element: Element) -> Self {
        let element = Some(element);
        Self { element, ..self }
    }

    /// Largest number of tokens of a row: that of the family, or twice as many if the kernel [takes sets](Self::takes_sets) or a
    /// [pair](Self::takes_pair).
    #[must_use]
    pub const fn max_tokens(&self) -> u32 {
        match self.takes_sets() || self.takes_pair() {
            true => 2 * self.family.max_tokens(),
            false => self.family.max_tokens(),
        }
    }

    /// Whether the kernel processes more tokens than its family computes together, set by set. Its states are f32 in shared
    /// memory; in the pool they may also have 16 bits, by a load-time constant.
    #[must_use]
    pub const fn takes_sets(&self) -> bool {
        let family = self.family;
        let of_f32 = matches!(self.element, Some(Element::F32));
        family.is_parallel() && of_f32 && !family.layer && !family.deferred
    }

    /// Whether the kernel computes twice as many new tokens as its family, if there are no previous ones: two sets, both from the
    /// state before the first. Its states have 16 bits.
    #[must_use]
    pub const fn takes_pair(&self) -> bool {
        let family = self.family;
        let of_bf16 = matches!(self.element, Some(Element::Bf16));
        family.is_parallel() && of_bf16 && !family.layer && !family.deferred
    }

    /// Whether load-time constants decide the layout of the states, or also their element type.
    #[must_use]
    pub const fn has_any_states(&self) -> bool {
        self.layout.is_none() && self.family.knows_states()
    }

    /// Whether a load-time constant decides if the states of the pool are f32 or 16-bit.
    #[must_use]
    pub const fn has_any_elements(&self) -> bool {
        self.has_any_states() && (self.element.is_none() || self.takes_sets())
    }

    /// The states that the kernel supports: those that it is compiled for, or all.
    pub fn all_states(&self) -> impl Iterator<Item = States> + use<> {
        let own = *self;
        let all = States::ALL.into_iter();
        all.filter(move |it| {
            (own.has_any_states() || own.layout == Some(it.layout))
                && (own.has_any_elements() || own.element == Some(it.element))
        })
    }

    /// The operators that the kernel computes, GDN first, each as whether every key channel has its own decay.
    pub fn all_operators(&self) -> impl Iterator<Item = bool> + use<> {
        let own = self.per_channel;
        let all = [false, true].into_iter();
        all.filter(move |it| own.is_none_or(|own| own == *it))
    }
}

/// Kernels with the same function and formulation, for either operator (GDN, KDA).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Family {
    /// How tokens are processed.
    pub form: Form,
    /// Whether the kernel has a convolution before the recurrence and a norm after it. A prefill has load-time constants and
    /// separate kernels for both.
    pub layer: bool,
    /// Whether states are deferred: the kernel takes [`crate::step::DeferredParams`].
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

/// How tokens are processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// One token.
    Decode,
    /// Token by token.
    Recurrent,
    /// All tokens together, on the tensor cores: no state between the first and the last is computed.
    Parallel,
    /// Any number of tokens, in chunks that end at multiples of 64 tokens of a sequence. It takes [`crate::step::PrefillParams`].
    Chunked(Stage),
}

/// Kernels of a prefill, in the order of their launches, with the same parameters and constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The convolution of q, k and v. The grid is x = n · chunk + index among the heads of q, k (H each; with KDA HV) and v (HV).
    /// It reads no states.
    Convolve,
    /// The intra-chunk pass: the scan's operands that do not depend on states. The grid is x = n · chunk + index of a head: with
    /// GDN of one of ⌈HV/H / 2⌉ pairs of value heads of a query/key head, with KDA of one of HV/H value heads. Chunks from
    /// [`first_chunk`](crate::step::PrefillParams::first_chunk) on. It reads no states.
    Prepare,
    /// The inter-chunk scan: carries states from chunk to chunk, after [`Stage::Prepare`]; for a prompt in segments, also after
    /// the scan of the previous segment.
    Chain,
    /// For rows in splits, between the two passes of the scan: computes the states at the beginnings of splits.
    Carry,
    /// Rows of at most 64 tokens: [`Stage::Prepare`] and [`Stage::Chain`] in one kernel, without a workspace.
    Short,
    /// The rows of one token of a launch that also has longer rows: concurrently with a scan, which skips them
    /// ([`has_singles`](crate::step::PrefillParams::has_singles)).
    Single,
    /// With a convolution or a norm: after the others, writes windows and norms o of rows that are not short. The grid is x =
    /// first ⌈D / block⌉ blocks of windows for each row, if the convolution keeps windows, then n · chunk + value head, if there
    /// is a norm. It reads no states.
    Finish,
}

impl Family {
    /// One token of a layer, or on deferred states; without either, [`Self::RECURRENT`] computes one token.
    pub const DECODE: Self = Self::of(Form::Decode);
    /// Token by token, on states that are not deferred, without convolution and norm.
    pub const RECURRENT: Self = Self::of(Form::Recurrent);
    /// The same, all tokens together.
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

    /// The same with a convolution before the recurrence and a norm after it.
    #[must_use]
    pub const fn in_layer(self) -> Self {
        Self {
            layer: true,
            ..self
        }
    }

    /// The same on deferred states.
    #[must_use]
    pub const fn on_deferred(self) -> Self {
        Self {
            deferred: true,
            ..self
        }
    }

    /// Whether states are deferred.
    #[must_use]
    pub const fn is_deferred(self) -> bool {
        self.deferred
    }

    /// Largest number of tokens of a row, and of previous tokens, for all kinds of states.
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

    /// Whether the family takes previous tokens, and commits them.
    #[must_use]
    pub const fn takes_previous(self) -> bool {
        matches!(self.form, Form::Recurrent | Form::Parallel) && !self.deferred
    }

    /// Whether all tokens are computed together.
    #[must_use]
    pub const fn is_parallel(self) -> bool {
        matches!(self.form, Form::Parallel)
    }

    /// The stage of a prefill kernel.
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

    /// Whether it is the inter-chunk scan of a prefill.
    #[must_use]
    pub const fn is_chain(self) -> bool {
        matches!(self.form, Form::Chunked(Stage::Chain))
    }

    /// Whether it computes the rows of one token of a prefill, concurrently with the longer rows.
    #[must_use]
    pub const fn takes_singles(self) -> bool {
        matches!(self.form, Form::Chunked(Stage::Single))
    }

    /// Whether the kernel reads or writes states.
    #[must_use]
    pub const fn knows_states(self) -> bool {
        !matches!(
            self.form,
            Form::Chunked(Stage::Convolve | Stage::Prepare | Stage::Carry | Stage::Finish)
        )
    }

    /// Number of blocks per chunk, in a kernel of a prefill that convolves, prepares or norms chunks, with H query/key heads of
    /// `ratio` value heads each; `per_channel`: each key channel has its own decay. 0 for other kernels.
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

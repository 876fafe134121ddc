//! Arguments of a launch of any kernel on states: parameters, which vary from launch to launch, and load-time constants, which
//! are fixed for a layer and a way of keeping states. Each kernel reads only those that it needs.

use crate::constants::{Element, Index, constants};
use crate::machine;

/// Pointers and sizes of one launch. Addresses are device addresses; 0 for an absent tensor.
///
/// `T'` is the number of previous tokens; with `cu_seqlens` the `[B, T, …]` tensors are `[1, total, …]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct StepParams {
    /// `[B, T, H, K]`
    pub q: u64,
    /// `[B, T, H, K]`
    pub k: u64,
    /// `[B, T, HV, V]`
    pub v: u64,
    /// GDN `[B, T, HV]`, KDA `[B, T, HV, K]`: the raw gate or the log decay.
    pub g: u64,
    /// `[B, T, HV]`: beta or its logit.
    pub b: u64,
    /// `[B, T, HV, V]`, written.
    pub o: u64,
    /// `[B, T', H, K]`: k of the previous tokens, of which the first `keep` are committed.
    pub previous_k: u64,
    /// `[B, T', HV, V]`
    pub previous_v: u64,
    /// Like `g`, of the previous tokens.
    pub previous_g: u64,
    /// `[B, T', HV]`
    pub previous_b: u64,
    /// `[B]`: number of previous tokens to commit.
    pub keep: u64,
    /// `[HV]` or `[H]`, f32.
    pub a_log: u64,
    /// GDN `[HV]`, KDA `[HV, K]` or `[H, K]`, f32.
    pub dt_bias: u64,
    /// `[P, HV, V, K]` (K-last) or `[P, HV, K, V]` (V-last): states that rows start from.
    pub read_pool: u64,
    /// Like `read_pool`, written; the same address as `read_pool` if states are updated in place.
    pub write_pool: u64,
    /// `[B, steps, HV, V, K]` (K-last) or `[B, steps, HV, K, V]` (V-last), written: the state after every token.
    pub snapshots: u64,
    /// `[B]`
    pub read_slots: u64,
    /// `[B]`
    pub write_slots: u64,
    /// `[B, T]`: slot of the state after each token.
    pub token_slots: u64,
    /// `[B]`: the row starts from its token slot `accepted - 1`.
    pub accepted: u64,
    /// `[B + 1]`: first token of each row.
    pub cu_seqlens: u64,
    /// P of `read_pool`.
    pub read_pool_slots: u32,
    /// P of `write_pool`.
    pub write_pool_slots: u32,
    /// Tokens of `o`'s `[1, total, …]`, with `cu_seqlens`.
    pub total_tokens: u32,
    /// B, with `cu_seqlens`.
    pub rows: u32,
    /// `[B]`: not 0 if the row starts from zeros.
    pub fresh: u64,
}

/// Parameters of a layer's kernel: [`StepParams`], without q, k and v if there is a convolution, and the parameters of the
/// convolution and the norm.
///
/// D = 2·H·K + HV·V channels: those of q, then of k, then of v. W taps.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct LayerParams {
    /// Parameters of the recurrence.
    pub step: StepParams,
    /// `[B, T, D]`: input of the convolution.
    pub x: u64,
    /// `[D, W]`
    pub conv_weight: u64,
    /// `[D]`
    pub conv_bias: u64,
    /// `[P, D, W - 1]`: the last inputs of every slot, oldest first; slots are those of `read_pool`. With token slots
    /// `[P, D, W - 2 + T]`, in the slot of the row's first token: the inputs of the last step, one more for every token.
    pub read_windows: u64,
    /// Like `read_windows`, written; slots are those of `write_pool`.
    pub write_windows: u64,
    /// `[B, T, HV, V]`: gate of the norm.
    pub z: u64,
    /// `[V]`
    pub norm_weight: u64,
    /// P of `read_windows`.
    pub read_windows_slots: u32,
    /// P of `write_windows`.
    pub write_windows_slots: u32,
    /// `[B, T', D]`: x of the previous tokens.
    pub previous_x: u64,
    /// `[B, steps, D, W - 1]`, written: the window after every token.
    pub window_snapshots: u64,
}

/// Parameters of a prefill: [`LayerParams`], the rows' positions, checkpoints and lengths. Lengths are not load-time constants of
/// a prefill: the constants `tokens` and `*_row` are 0.
///
/// A step may be several launches of entries, one after another. All get the same parameters, except for the segment of a prompt.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PrefillParams {
    /// Without a convolution `x` and the windows are 0, with one `step.q`, `step.k` and `step.v`; without a norm `z` is 0.
    pub layer: LayerParams,
    /// `[B]`: tokens of the row before this launch; 0: no row has any.
    pub positions: u64,
    /// `[B, C]`: slot of `write_pool` for the state after the row's j-th multiple of `checkpoint_every` in this launch; a slot
    /// that is out of range or null is skipped.
    pub checkpoint_slots: u64,
    /// Address of the chunks' operands, a multiple of 16; 0 for an entry without a workspace.
    pub workspace: u64,
    /// B
    pub rows: u32,
    /// T of dense tensors; with `cu_seqlens` the largest number of tokens of a row: a row with more counts as one without tokens.
    pub tokens: u32,
    /// C of `checkpoint_slots`.
    pub checkpoints: u32,
    /// Elements between rows of `checkpoint_slots`.
    pub checkpoint_slots_row: u32,
    /// Elements between rows b of q; 0 with `cu_seqlens`, here and below.
    pub q_row: u32,
    /// Elements between rows b of k.
    pub k_row: u32,
    /// Elements between rows b of v.
    pub v_row: u32,
    /// Elements between rows b of o.
    pub o_row: u32,
    /// Elements between rows b of g.
    pub g_row: u32,
    /// Elements between rows b of b.
    pub b_row: u32,
    /// Elements between rows b of x.
    pub x_row: u32,
    /// Elements between rows b of z.
    pub z_row: u32,
    /// First chunk of the launch: of the row in a scan, among the workspace's chunks in an intra-chunk pass. Nonzero only if
    /// the launch has a single row.
    pub first_chunk: u32,
    /// A scan ends before this chunk; [`ALL_CHUNKS`](crate::prefill::ALL_CHUNKS): after the row's last chunk.
    pub end_chunk: u32,
    /// B of a scan's grid: a block processes every `turns`-th row, one after the other.
    pub turns: u32,
    /// Not 0: the launch after the scan's computes the rows of one token.
    pub has_singles: u32,
    /// Largest number of splits of a row.
    pub splits: u32,
    /// 0; makes the size a multiple of 8 bytes.
    pub padding: u32,
}

/// Parameters of a kernel on deferred states: [`LayerParams`], and the rings, with R entries for every slot.
///
/// An entry is the update of one token. Slots are those of `read_pool`.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct DeferredParams {
    /// Parameters of the layer; a flush has no tokens.
    pub layer: LayerParams,
    /// `[P, H, R, K]`, written: k before normalisation; times a power of two if Σk² overflows f32 and k is normalised.
    pub keys: u64,
    /// `[P, HV, R, V]`, f32 or bf16, written: u, which is δ of the normalised key, divided by the length of k.
    pub updates: u64,
    /// GDN `[P, HV, R]`, KDA `[P, HV, R, K]`, f32, written: the log decay.
    pub decays: u64,
    /// `[B]`: number of pending tokens of the row's slot.
    pub pending_len: u64,
    /// `[B]`: ring entry of the first pending token.
    pub pending_base: u64,
    /// With a convolution of drafts, `[P, R, D]`, written: x, unchanged.
    pub inputs: u64,
}

/// Largest number of taps of the convolution.
pub const TAPS: usize = 4;

constants! {
    /// Constants of a layer and of a way of keeping states, written into the kernel's PTX text when it is loaded.
    ///
    /// Strides are in elements. `*_index` are [`crate::constants::Index`], `*_element` [`crate::constants::Element`].
    pub struct StepConstants {
        /// Query/key heads, H.
        h = "GD_H",
        /// HV / H.
        ratio = "GD_RATIO",
        /// 1: query/key head of hv is `hv % H` (tiled); 0: `hv / ratio` (grouped).
        tiled = "GD_TILED",
        /// 1: normalise q and k.
        l2norm = "GD_L2NORM",
        /// Bits of the f32 scale of q.
        scale = "GD_SCALE",
        /// [`Gate`] of `g`.
        gate = "GD_GATE",
        /// Bits of the f32 lower bound of the log decay, with [`Gate::LowerBound`].
        lower_bound = "GD_LOWER_BOUND",
        /// 1: `a_log` is given.
        has_a_log = "GD_HAS_A_LOG",
        /// 1: `dt_bias` is given.
        has_dt_bias = "GD_HAS_DT_BIAS",
        /// 1: `a_log` and `dt_bias` have H rows; 0: HV.
        gate_rows_h = "GD_GATE_ROWS_H",
        /// 1: β is `beta_scale` · sigmoid(b); 0: `b` is β.
        beta_logit = "GD_BETA_LOGIT",
        /// Bits of the f32 factor of sigmoid(b): 1 or 2.
        beta_scale = "GD_BETA_SCALE",
        /// T, the largest number of tokens of a row; 0: only a commit or a flush.
        tokens = "GD_TOKENS",
        /// T', the largest number of previous tokens of a row; 0: none.
        previous_tokens = "GD_PREVIOUS_TOKENS",
        /// 1: the state after a row's last token is written to the write slot. 0 with previous tokens or token slots, which have
        /// their own rules for writes.
        update_state = "GD_UPDATE_STATE",
        /// 1: the state after every token is written to `snapshots`.
        has_snapshots = "GD_HAS_SNAPSHOTS",
        /// Slot that makes a row inactive, like slots out of range; u32::MAX for none.
        null_slot = "GD_NULL_SLOT",
        /// Integer type of `read_slots`: [`crate::constants::Index`].
        read_index = "GD_READ_INDEX",
        /// Integer type of `write_slots`: [`crate::constants::Index`].
        write_index = "GD_WRITE_INDEX",
        /// Integer type of `token_slots`: [`crate::constants::Index`].
        token_index = "GD_TOKEN_INDEX",
        /// Integer type of `accepted`: [`crate::constants::Index`].
        accepted_index = "GD_ACCEPTED_INDEX",
        /// Integer type of `cu_seqlens`: [`crate::constants::Index`].
        cu_seqlens_index = "GD_CU_SEQLENS_INDEX",
        /// Integer type of `keep`: [`crate::constants::Index`].
        keep_index = "GD_KEEP_INDEX",
        /// Element of q: [`crate::constants::Element`].
        q_element = "GD_Q_ELEMENT",
        /// Element of k and the previous k: [`crate::constants::Element`].
        k_element = "GD_K_ELEMENT",
        /// Element of v and the previous v: [`crate::constants::Element`].
        v_element = "GD_V_ELEMENT",
        /// Element of o: [`crate::constants::Element`].
        o_element = "GD_O_ELEMENT",
        /// Element of g and the previous g: [`crate::constants::Element`].
        g_element = "GD_G_ELEMENT",
        /// Element of b and the previous b: [`crate::constants::Element`].
        b_element = "GD_B_ELEMENT",
        /// 1: every address and stride of q, k, v, o and the previous k and v is a multiple of 16 bytes; with KDA, those of g and
        /// dt_bias too; for a prefill with a convolution, those of x and o.
        wide_io = "GD_WIDE_IO",
        /// 1: every address and stride of the pools and the snapshots is a multiple of 16 bytes.
        wide_state = "GD_WIDE_STATE",
        /// Between rows b of q; 0 with `cu_seqlens`, here and below.
        q_row = "GD_Q_ROW",
        /// Between tokens of q.
        q_token = "GD_Q_TOKEN",
        /// Between heads of q.
        q_head = "GD_Q_HEAD",
        /// Between rows b of k.
        k_row = "GD_K_ROW",
        /// Between tokens of k.
        k_token = "GD_K_TOKEN",
        /// Between heads of k.
        k_head = "GD_K_HEAD",
        /// Between rows b of v.
        v_row = "GD_V_ROW",
        /// Between tokens of v.
        v_token = "GD_V_TOKEN",
        /// Between heads of v.
        v_head = "GD_V_HEAD",
        /// Between rows b of o.
        o_row = "GD_O_ROW",
        /// Between tokens of o.
        o_token = "GD_O_TOKEN",
        /// Between heads of o.
        o_head = "GD_O_HEAD",
        /// Between rows b of g.
        g_row = "GD_G_ROW",
        /// Between tokens of g.
        g_token = "GD_G_TOKEN",
        /// Between heads of g: 1 with GDN.
        g_head = "GD_G_HEAD",
        /// Between rows b of b.
        b_row = "GD_B_ROW",
        /// Between tokens of b.
        b_token = "GD_B_TOKEN",
        /// Between rows b of the previous k.
        previous_k_row = "GD_PREVIOUS_K_ROW",
        /// Between tokens of the previous k.
        previous_k_token = "GD_PREVIOUS_K_TOKEN",
        /// Between heads of the previous k.
        previous_k_head = "GD_PREVIOUS_K_HEAD",
        /// Between rows b of the previous v.
        previous_v_row = "GD_PREVIOUS_V_ROW",
        /// Between tokens of the previous v.
        previous_v_token = "GD_PREVIOUS_V_TOKEN",
        /// Between heads of the previous v.
        previous_v_head = "GD_PREVIOUS_V_HEAD",
        /// Between rows b of the previous g.
        previous_g_row = "GD_PREVIOUS_G_ROW",
        /// Between tokens of the previous g.
        previous_g_token = "GD_PREVIOUS_G_TOKEN",
        /// Between heads of the previous g: 1 with GDN.
        previous_g_head = "GD_PREVIOUS_G_HEAD",
        /// Between rows b of the previous b.
        previous_b_row = "GD_PREVIOUS_B_ROW",
        /// Between tokens of the previous b.
        previous_b_token = "GD_PREVIOUS_B_TOKEN",
        /// Between slots of `read_pool`.
        read_slot = "GD_READ_SLOT",
        /// Between slots of `write_pool`.
        write_slot = "GD_WRITE_SLOT",
        /// Between rows b of `snapshots`.
        snapshot_row = "GD_SNAPSHOT_ROW",
        /// Between tokens of `snapshots`.
        snapshot_token = "GD_SNAPSHOT_TOKEN",
        /// Between rows b of `token_slots`.
        token_slots_row = "GD_TOKEN_SLOTS_ROW",
        /// Integer type of `fresh`: [`crate::constants::Index`].
        fresh_index = "GD_FRESH_INDEX",
        /// W, taps of the convolution; 0: none.
        taps = "GD_TAPS",
        /// [`Activation`] of the convolution.
        conv_activation = "GD_CONV_ACTIVATION",
        /// 1: `conv_bias` is given.
        has_conv_bias = "GD_HAS_CONV_BIAS",
        /// Element of x and the windows: [`crate::constants::Element`].
        x_element = "GD_X_ELEMENT",
        /// Element of `conv_weight`: [`crate::constants::Element`].
        conv_weight_element = "GD_CONV_WEIGHT_ELEMENT",
        /// Element of `conv_bias`: [`crate::constants::Element`].
        conv_bias_element = "GD_CONV_BIAS_ELEMENT",
        /// 1: the taps of every channel are aligned to their total size, for W = 2 or 4.
        wide_conv_weight = "GD_WIDE_CONV_WEIGHT",
        /// Between rows b of x.
        x_row = "GD_X_ROW",
        /// Between tokens of x.
        x_token = "GD_X_TOKEN",
        /// Between channels of `conv_weight`.
        conv_weight_channel = "GD_CONV_WEIGHT_CHANNEL",
        /// Between slots of `read_windows`.
        read_windows_slot = "GD_READ_WINDOWS_SLOT",
        /// Between channels of `read_windows`.
        read_windows_channel = "GD_READ_WINDOWS_CHANNEL",
        /// Between inputs of a channel of `read_windows`.
        read_windows_input = "GD_READ_WINDOWS_INPUT",
        /// Between slots of `write_windows`.
        write_windows_slot = "GD_WRITE_WINDOWS_SLOT",
        /// Between channels of `write_windows`.
        write_windows_channel = "GD_WRITE_WINDOWS_CHANNEL",
        /// Between inputs of a channel of `write_windows`.
        write_windows_input = "GD_WRITE_WINDOWS_INPUT",
        /// Between rows b of the previous x.
        previous_x_row = "GD_PREVIOUS_X_ROW",
        /// Between tokens of the previous x.
        previous_x_token = "GD_PREVIOUS_X_TOKEN",
        /// 1: the window after every token is written to `window_snapshots`.
        has_window_snapshots = "GD_HAS_WINDOW_SNAPSHOTS",
        /// Between rows b of `window_snapshots`.
        window_snapshot_row = "GD_WINDOW_SNAPSHOT_ROW",
        /// Between tokens of `window_snapshots`.
        window_snapshot_token = "GD_WINDOW_SNAPSHOT_TOKEN",
        /// Between channels of `window_snapshots`.
        window_snapshot_channel = "GD_WINDOW_SNAPSHOT_CHANNEL",
        /// Between inputs of a channel of `window_snapshots`.
        window_snapshot_input = "GD_WINDOW_SNAPSHOT_INPUT",
        /// 1: o is normed, and gated by z.
        has_norm = "GD_HAS_NORM",
        /// [`Activation`] of z.
        norm_activation = "GD_NORM_ACTIVATION",
        /// Bits of the f32 that is added to the mean of o².
        norm_eps = "GD_NORM_EPS",
        /// Element of z: [`crate::constants::Element`].
        z_element = "GD_Z_ELEMENT",
        /// Element of `norm_weight`: [`crate::constants::Element`].
        norm_weight_element = "GD_NORM_WEIGHT_ELEMENT",
        /// 1: every address and stride of z and `norm_weight` is a multiple of 16 bytes.
        wide_norm = "GD_WIDE_NORM",
        /// Between rows b of z.
        z_row = "GD_Z_ROW",
        /// Between tokens of z.
        z_token = "GD_Z_TOKEN",
        /// Between heads of z.
        z_head = "GD_Z_HEAD",
        /// Integer type of `positions`: [`crate::constants::Index`].
        positions_index = "GD_POSITIONS_INDEX",
        /// Integer type of `checkpoint_slots`: [`crate::constants::Index`].
        checkpoint_index = "GD_CHECKPOINT_INDEX",
        /// Tokens between checkpoints of a sequence, a multiple of 64; 0: no checkpoints.
        checkpoint_every = "GD_CHECKPOINT_EVERY",
        /// Tokens between splits of a sequence, a multiple of 64; 0: rows are not split.
        split = "GD_SPLIT",
        /// [`Pass`](crate::prefill::split::Pass) of a scan over rows in splits.
        pass = "GD_PASS",
        /// N, the largest number of pending tokens of a slot; 0: states are not deferred.
        pending = "GD_PENDING",
        /// R, entries of a ring, more than N.
        ring = "GD_RING",
        /// Element of `keys`: [`crate::constants::Element`].
        keys_element = "GD_KEYS_ELEMENT",
        /// Between slots of `keys`.
        keys_slot = "GD_KEYS_SLOT",
        /// Element of `updates`: [`crate::constants::Element`].
        updates_element = "GD_UPDATES_ELEMENT",
        /// Between slots of `updates`.
        updates_slot = "GD_UPDATES_SLOT",
        /// Between slots of `decays`.
        decays_slot = "GD_DECAYS_SLOT",
        /// Integer type of `pending_len`: [`crate::constants::Index`].
        pending_len_index = "GD_PENDING_LEN_INDEX",
        /// Integer type of `pending_base`: [`crate::constants::Index`].
        pending_base_index = "GD_PENDING_BASE_INDEX",
        /// 1: 16-bit states are f16; 0: bf16.
        state_f16 = "GD_STATE_F16",
        /// 1: states are f32; 0: 16-bit. For a prefill and a parallel step.
        state_f32 = "GD_STATE_F32",
        /// 1: states are `[P, HV, K, V]`; 0: `[P, HV, V, K]`. For a prefill and a parallel step.
        state_v_last = "GD_STATE_V_LAST",
        /// 1: each key channel has its own decay (KDA); 0: each value head has one (GDN).
        per_channel = "GD_PER_CHANNEL",
        /// Between slots of `inputs`.
        inputs_slot = "GD_INPUTS_SLOT",
        /// The GPU's [`machine`], for a prefill.
        machine = "GD_MACHINE",
        /// 0; no kernel reads it. With one constant less, LLVM compiles parallel steps differently, and one of KDA's spills
        /// (docs/lab-notes.md, "Prompts on every GPU").
        reserved = "GD_RESERVED",
        /// Upper bound of an entry's minimum number of blocks per multiprocessor, for blocks of up to 5 warps.
        blocks_per_sm = "GD_BLOCKS_PER_SM",
    }
}

impl StepConstants {
    /// Whether q, k and the keys of a ring are bf16, if given: they have no low parts then.
    #[must_use]
    pub const fn tokens_are_bf16(&self) -> bool {
        let bf16 = Element::Bf16 as u32;
        // A flush has no tokens except those of the ring.
        let new_are_bf16 = self.tokens == 0 || (self.q_element == bf16 && self.k_element == bf16);
        self.keys_element == bf16 && new_are_bf16
    }

    /// [`Self::blocks_per_sm`] for the other constants: 2 if accesses to tokens and states are wide, 4 if tokens are also bf16
    /// with one decay per head; otherwise 1, because the assembler would spill registers.
    #[must_use]
    pub const fn blocks_by_tokens(&self) -> u32 {
        let is_wide = self.wide_state != 0 && (self.tokens == 0 || self.wide_io != 0);
        let v_is_bf16 = self.tokens == 0 || self.v_element == Element::Bf16 as u32;
        match (
            is_wide,
            self.tokens_are_bf16() && v_is_bf16 && self.per_channel == 0,
        ) {
            (false, _) => 1,
            (true, false) => 2,
            (true, true) => 4,
        }
    }

    /// [`Self::blocks_per_sm`] for a parallel layer on a machine: on Hopper as many as the entry needs, unless the assembler
    /// would spill registers. On other machines the same text has fewer registers, and the assembler chooses the number.
    #[must_use]
    pub const fn blocks_of_layer(&self, machine: u32, state_f32: bool) -> u32 {
        let resumes = self.previous_tokens != 0;
        let is_narrow = self.wide_state == 0;
        let is_tight = match self.state_v_last != 0 {
            true => resumes || is_narrow,
            false => resumes && is_narrow,
        };
        match (self.per_channel != 0, state_f32) {
            _ if machine != crate::machine::HOPPER => 1,
            (false, true) if is_narrow => 1,
            (_, false) if is_narrow || self.wide_io == 0 => 1,
            (false, _) => 4,
            (true, true) => 3 - is_tight as u32,
            (true, false) => 4 - (resumes && self.state_f16 != 0) as u32,
        }
    }

    /// [`Self::blocks_per_sm`] for a parallel step without convolution and norm on a machine: as many as the entry needs. For
    /// sets of 8 tokens, and 16-bit states that the kernel `widens` to f32, only Hopper has the registers. KDA's pair needs more if
    /// accesses are narrow.
    #[must_use]
    pub const fn blocks_of_drafts(&self, machine: u32, widens: bool) -> u32 {
        let has_sets = self.tokens > 8 || self.previous_tokens > 8 || widens;
        let is_tight = self.per_channel != 0 && self.wide_io == 0 && self.tokens > 8;
        if has_sets && (machine != machine::HOPPER || is_tight) {
            1
        } else {
            4
        }
    }

    /// [`Self::blocks_per_sm`] for a step token by token, in blocks of two warps: 16 for GDN's decode of bf16 tokens and states that
    /// stores one state. They leave 64 registers for a thread, so that more blocks run in one wave. Otherwise 8, because the
    /// assembler would spill registers.
    #[must_use]
    pub const fn blocks_of_two_warps(&self) -> u32 {
        let bf16 = Element::Bf16 as u32;
        let is_bf16 = self.state_f16 == 0
            && self.q_element == bf16
            && self.k_element == bf16
            && self.v_element == bf16;
        let is_wide = self.wide_io != 0 && self.wide_state != 0;
        let keeps_one = self.has_snapshots == 0 && self.token_index == Index::None as u32;
        match (self.per_channel, self.tokens, self.previous_tokens) {
            (0, 1, 0) if is_bf16 && is_wide && keeps_one => 16,
            _ => 8,
        }
    }

    /// [`Self::blocks_per_sm`] for rows of one token in a prefill, with `v` channels of a value head: a thread has 128 registers
    /// for 64 rows of a state and for 128 rows of a K-last state, otherwise the maximum. 128 are too few for KDA's f32 tokens on
    /// machines after Hopper.
    #[must_use]
    pub const fn blocks_of_singles(&self, v: u32) -> u32 {
        let is_tight = self.machine > machine::HOPPER
            && self.per_channel != 0
            && self.k_element == Element::F32 as u32;
        match (v, self.state_v_last) {
            (128, 0) if is_tight => 1,
            (64, _) | (128, 0) => 4,
            _ => 1,
        }
    }

    /// Whether the machine has bulk copies: one thread copies any number of bytes from and to global memory.
    #[must_use]
    pub const fn copies_in_bulk(&self) -> bool {
        self.machine >= machine::HOPPER
    }

    /// Whether the intra-chunk pass of a prefill stores v in f16: if the scan cannot copy v unchanged in pieces of 16 bytes.
    #[must_use]
    pub const fn makes_values(&self) -> bool {
        self.taps != 0 || self.wide_io == 0 || self.v_element == Element::F32 as u32
    }
}

/// The meaning of `g`, as a load-time constant.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// The log decay.
    Log = 0,
    /// x of the log decay −exp(A_log) · softplus(x + dt_bias).
    Softplus = 1,
    /// x of the log decay lower_bound · sigmoid(exp(A_log) · (x + dt_bias)).
    LowerBound = 2,
}

/// Activation of a sum of the convolution, and of the norm's z, as a load-time constant.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x
    None = 0,
    /// x · sigmoid(x)
    Silu = 1,
    /// sigmoid(x)
    Sigmoid = 2,
}

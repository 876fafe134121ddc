//! The pending tokens of a slot: their ring next to its state, and the ring of inputs next to its window. See
//! [`crate::deferred`].
//!
//! # Safety
//! `load` relies on `params` and `c` describing live tensors.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use crate::constants::Element;
use crate::device::global::store_b32;
use crate::device::warp::lane_id;
use crate::math::elements::bytes_of;
use crate::row::Row;
use crate::state::{is_fresh, is_live, slot_of};
use crate::step::{DeferredParams, StepConstants, TAPS};

/// Largest number of pending tokens of a slot in steps of one token.
pub const MAX_PENDING: u32 = 8;

/// Largest number of pending tokens of a slot in steps of drafts, on the tensor cores.
pub const MAX_PENDING_DRAFTS: u32 = 16;

/// Whether a step of `tokens` tokens first flushes a row that has `pending` pending tokens, of at most `most`.
#[must_use]
pub const fn flushes(pending: u32, tokens: u32, most: u32) -> bool {
    pending.saturating_add(tokens) > most
}

/// Bytes of an f32.
const F32: u64 = bytes_of(Element::F32 as u32) as u64;

/// The slot of a row, and which entries of its ring are pending.
#[derive(Clone, Copy)]
pub struct Pending {
    /// Slot of the state and of the rings.
    pub slot: u64,
    /// Whether the row starts from zeros, with no pending tokens.
    pub fresh: bool,
    /// Whether slot, number of tokens and first entry are valid.
    pub live: bool,
    /// Number of pending tokens; 0 if the row is not live.
    pub len: u32,
    /// Ring entry of the first pending token.
    base: u32,
}

/// The rings of a value head and of its query/key head in one slot.
#[derive(Clone, Copy)]
pub struct Ring {
    keys: u64,
    key_bytes: u32,
    updates: u64,
    update_element: u32,
    decays: u64,
    base: u32,
    entries: u32,
}

impl Pending {
    /// The pending tokens of row `b`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(c: &StepConstants, params: &DeferredParams, b: u32) -> Self {
        let step = &params.layer.step;
        // SAFETY: the caller's promise; there are B of each.
        let (slot, len, base, fresh) = unsafe {
            let b = b as u64;
            (
                slot_of(step.read_slots, c.read_index, b, b),
                slot_of(params.pending_len, c.pending_len_index, b, 0),
                slot_of(params.pending_base, c.pending_base_index, b, 0),
                is_fresh(c, step, b as u32),
            )
        };
        let len = if fresh { 0 } else { len };
        let live = is_live(slot, step.read_pool_slots, c.null_slot)
            && len <= c.pending as u64
            && base < c.ring as u64;
        Self {
            slot,
            fresh,
            live,
            len: if live { len as u32 } else { 0 },
            base: base as u32,
        }
    }

    /// Whether a launch flushes the row; a `Flush` (a launch of no tokens) flushes every row with pending tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn flushes(&self, c: &StepConstants) -> bool {
        self.len > 0 && (c.tokens == 0 || flushes(self.len, c.tokens, c.pending))
    }
}

/// The ring of a slot's convolution inputs, one entry per token. The slot's window precedes the pending tokens.
#[derive(Clone, Copy)]
pub struct InputRing {
    /// Address of entry 0 of the slot.
    first: u64,
    /// Bytes of an entry: all channels of a token.
    token: u64,
    base: u32,
    entries: u32,
    len: u32,
    live: bool,
    /// Whether the launch writes window and state before the new tokens, because the row is flushed or fresh.
    pub moves: bool,
}

impl InputRing {
    /// The ring for heads with K keys and V values; `flushes`: whether the launch flushes the row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(
        c: &StepConstants,
        params: &DeferredParams,
        pending: &Pending,
        [k, v]: [u32; 2],
        flushes: bool,
    ) -> Self {
        let bytes = bytes_of(c.x_element) as u64;
        let slot = pending.slot as u32 as u64 * c.inputs_slot as u64;
        Self {
            first: params.inputs + slot * bytes,
            token: (c.h * (2 * k + c.ratio * v)) as u64 * bytes,
            base: pending.base,
            entries: c.ring,
            len: pending.len,
            live: pending.live,
            moves: flushes || pending.fresh,
        }
    }

    /// Address of a channel of new token `t`, after the pending tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new_input(&self, c: &StepConstants, t: u32, channel: u32) -> u64 {
        self.input(c, self.len + t, channel)
    }

    /// Address of the input at place `i` of the window after the pending tokens, which has [`TAPS`] − 1 places, and whether the
    /// input may be read; `None` if the input is older than the pending tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn pending_input(&self, c: &StepConstants, i: usize, channel: u32) -> Option<(u64, bool)> {
        let back = (TAPS - 1 - i) as u32;
        (back <= self.len).then(|| (self.input(c, self.len - back, channel), self.live))
    }

    /// Number of pending tokens. Older inputs are that many places further in the slot's window.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn pending(&self) -> u32 {
        self.len
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn input(&self, c: &StepConstants, j: u32, channel: u32) -> u64 {
        let entry = entry(self.base + j, self.entries);
        self.first + entry * self.token + channel as u64 * bytes_of(c.x_element) as u64
    }
}

/// Index of an entry, `at` modulo the number of entries; `at` is less than twice this number.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn entry(at: u32, entries: u32) -> u64 {
    (if at < entries { at } else { at - entries }) as u64
}

impl Ring {
    /// The rings of a live row, for heads with K keys and V values, with u in elements of type `update_element`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(
        c: &StepConstants,
        params: &DeferredParams,
        pending: Pending,
        row: Row,
        [k, v]: [u32; 2],
        (update_element, per_channel): (u32, bool),
    ) -> Self {
        let slot = pending.slot as u32 as u64;
        let first = |stride: u32, head: u32, entry: u32| {
            slot * stride as u64 + (head * c.ring) as u64 * entry as u64
        };
        let update_bytes = bytes_of(update_element) as u64;
        let decay = if per_channel { k } else { 1 };
        let key_bytes = k * bytes_of(c.keys_element);
        Self {
            keys: params.keys
                + slot * c.keys_slot as u64 * bytes_of(c.keys_element) as u64
                + (row.h * c.ring) as u64 * key_bytes as u64,
            key_bytes,
            updates: params.updates + first(c.updates_slot, row.hv, v) * update_bytes,
            update_element,
            decays: params.decays + first(c.decays_slot, row.hv, decay) * F32,
            base: pending.base,
            entries: c.ring,
        }
    }

    /// Entry of pending token `j`; with `j` ≥ `len`, the entry of new token `j` − `len`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn entry(self, j: u32) -> u64 {
        entry(self.base + j, self.entries)
    }

    /// Address of token `j`'s k `[K]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn key(self, j: u32) -> u64 {
        self.keys + self.entry(j) * self.key_bytes as u64
    }

    /// Bytes of a token's k.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn key_bytes(self) -> u32 {
        self.key_bytes
    }

    /// Address of element `first` of token `j`'s u `[V]`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn update(self, j: u32, v: u32, first: u32) -> u64 {
        let element = self.entry(j) * v as u64 + first as u64;
        self.updates + element * bytes_of(self.update_element) as u64
    }

    /// The [`Element`] of u.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn update_element(self) -> u32 {
        self.update_element
    }

    /// Stores element `v` of u, in f32, in the entry after the `len` pending tokens.
    ///
    /// # Safety
    /// The ring is live, and only this thread writes the element.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn leave_update(self, len: u32, dim: u32, v: u32, update: f32) {
        // SAFETY: the caller's promise; no pending token has this entry.
        unsafe { store_b32(self.update(len, dim, v), update.to_bits()) };
    }

    /// GDN: stores log α of the first `count` new tokens in the entries after the `len` pending ones. Lane t of the warp has
    /// token t.
    ///
    /// # Safety
    /// The ring is live, and only this warp writes these numbers.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn leave_log_decay(self, len: u32, count: u32, log_decay: f32) {
        if lane_id() < count {
            // SAFETY: the caller's promise; no pending token has these entries.
            unsafe { store_b32(self.decay(len + lane_id(), 1), log_decay.to_bits()) };
        }
    }

    /// Address of token `j`'s `channels` log decays, f32.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn decay(self, j: u32, channels: u32) -> u64 {
        self.decays + self.entry(j) * channels as u64 * F32
    }
}

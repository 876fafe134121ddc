//! Sources and destinations of a row's state.

use crate::row::Row;
use crate::state::{Head, Shape, StateElement, Tile, is_fresh, is_live, slot_of};
use crate::step::{StepConstants, StepParams};

/// The slots in which a row's state starts and ends. The destinations of the state after each token are separate:
/// [`Slots::after`].
#[derive(Clone, Copy)]
pub struct Slots {
    start: u64,
    write: u64,
    first_token: u32,
    fresh: bool,
}

impl Slots {
    /// The slots of row `b`, from global memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(c: &StepConstants, params: &StepParams, b: u32) -> Self {
        // SAFETY: the caller's promise; `accepted` is in range when a token slot is read for it.
        unsafe {
            let fresh = is_fresh(c, params, b);
            if c.token_index != 0 {
                let last = slot_of(params.accepted, c.accepted_index, b as u64, 1).wrapping_sub(1);
                let accepted = last < c.tokens as u64;
                let first_token = if accepted { last as u32 } else { 0 };
                let slot = token_slot(c, params, b, first_token);
                let start = if accepted { slot } else { u64::MAX };
                return Self {
                    start,
                    write: start,
                    first_token,
                    fresh,
                };
            }
            let b = b as u64;
            let start = slot_of(params.read_slots, c.read_index, b, b);
            Self {
                start,
                write: slot_of(params.write_slots, c.write_index, b, start),
                first_token: 0,
                fresh,
            }
        }
    }

    /// One slot that is read and written.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of(slot: u64, fresh: bool) -> Self {
        Self {
            start: slot,
            write: slot,
            first_token: 0,
            fresh,
        }
    }

    /// Whether the row starts from zeros, whatever its slot holds.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Slot that the row starts from.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn start_slot(&self) -> u64 {
        self.start
    }

    /// With token slots, the token of the last step after which the row starts, which is the last accepted one; otherwise 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn first_token(&self) -> u32 {
        self.first_token
    }

    /// Slot of the row's final state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn write_slot(&self) -> u64 {
        self.write
    }

    /// Whether the slots are valid.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn live(&self, c: &StepConstants, params: &StepParams) -> bool {
        (self.fresh || is_live(self.start, params.read_pool_slots, c.null_slot))
            && (!self.looks_at_write(c)
                || is_live(self.write, params.write_pool_slots, c.null_slot))
    }

    /// Whether [`Self::live`] checks the write slot: if the final state is written, and, without token slots, for every fresh
    /// row, because its read slot is not checked.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn looks_at_write(&self, c: &StepConstants) -> bool {
        writes_final(c) || (self.fresh && c.token_index == 0)
    }

    /// The state of a head from which the row starts.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn start<S: StateElement>(
        &self,
        c: &StepConstants,
        params: &StepParams,
        head: (u32, Shape),
    ) -> Head {
        let wide = c.wide_state != 0;
        Head::of_slot::<S>(params.read_pool, self.start, c.read_slot, head, wide)
    }

    /// The state of a head with which the row ends.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn write<S: StateElement>(
        &self,
        c: &StepConstants,
        params: &StepParams,
        head: (u32, Shape),
    ) -> Head {
        let wide = c.wide_state != 0;
        Head::of_slot::<S>(params.write_pool, self.write, c.write_slot, head, wide)
    }

    /// For a live row without tokens: copies a block's tile of the state of value head `hv` from the slot that the row starts
    /// from to the slot that it writes; zeros if the row is fresh, nothing if both slots are the same. All threads that have the
    /// tile call it, with their index and their number.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; nobody else accesses the tile in the slot that is written.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn carry<S: StateElement>(
        &self,
        c: &StepConstants,
        params: &StepParams,
        (hv, tile): (u32, Tile),
        threads: (u32, u32),
    ) {
        let start = self.start::<S>(c, params, (hv, tile.shape));
        let write = self.write::<S>(c, params, (hv, tile.shape));
        if c.update_state != 0 && (self.fresh || start.address != write.address) {
            tile.copy::<S>((start, write), self.fresh, threads);
        }
    }

    /// Calls `store` with every destination of the state after token `t`; `token_slot` is the result of [`token_slot`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn after<S: StateElement>(
        &self,
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        shape: Shape,
        (t, is_last, token_slot): (u32, bool, u64),
        store: impl Fn(Head),
    ) {
        let head = (row.hv, shape);
        let wide = c.wide_state != 0;
        if c.has_snapshots != 0 {
            let first = row.b as u64 * c.snapshot_row as u64 + t as u64 * c.snapshot_token as u64;
            let address = params.snapshots + first * S::BYTES as u64;
            store(Head::of_slot::<S>(address, 0, 0, head, wide));
        }
        if c.token_index != 0 && is_live(token_slot, params.write_pool_slots, c.null_slot) {
            store(Head::of_slot::<S>(
                params.write_pool,
                token_slot,
                c.write_slot,
                head,
                wide,
            ));
        }
        if c.update_state != 0 && is_last {
            store(self.write::<S>(c, params, head));
        }
    }
}

/// Slot of the state after token `t` of row `b`; an arbitrary number without token slots. Loaded well before its use, because a
/// store would wait for it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn token_slot(c: &StepConstants, params: &StepParams, b: u32, t: u32) -> u64 {
    let i = b as u64 * c.token_slots_row as u64 + t as u64;
    slot_of(params.token_slots, c.token_index, i, 0)
}

/// Whether the final slot is written: by an update or by a commit.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn writes_final(c: &StepConstants) -> bool {
    c.update_state != 0 || c.previous_tokens != 0
}

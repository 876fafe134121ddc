//! Where a row's state and window come from and go to.

use crate::math::elements::bytes_of;
use crate::recurrent::slots::Slots;
use crate::state::is_live;
use crate::step::{LayerParams, StepConstants};

/// The slots of a row, which its windows share with its states.
pub struct Place {
    pub slots: Slots,
    live: bool,
}

impl Place {
    /// Of row `b`.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors.
    #[inline(always)]
    pub unsafe fn load(c: &StepConstants, params: &LayerParams, b: u32) -> Self {
        // SAFETY: the caller's promise.
        let slots = unsafe { Slots::load(c, &params.step, b) };
        let mut live = slots.live(c, &params.step);
        if c.taps != 0 {
            let (read, write) = (params.read_windows_slots, params.write_windows_slots);
            live = live
                && (slots.is_fresh() || is_live(slots.start_slot(), read, c.null_slot))
                && (!slots.looks_at_write(c) || is_live(slots.write_slot(), write, c.null_slot));
        }
        Self { slots, live }
    }

    /// Whether the slots are there, of states and of windows.
    #[inline(always)]
    pub fn live(&self) -> bool {
        self.live
    }

    /// Whether the row starts from zeros.
    #[inline(always)]
    pub fn is_fresh(&self) -> bool {
        self.slots.is_fresh()
    }

    /// Whether it starts from its slot.
    #[inline(always)]
    pub fn reads(&self) -> bool {
        self.live && !self.slots.is_fresh()
    }

    /// Address of the window that it starts from.
    #[inline(always)]
    pub fn read_window(&self, c: &StepConstants, params: &LayerParams) -> u64 {
        let slot = self.slots.start_slot() as u32 as u64;
        params.read_windows + slot * c.read_windows_slot as u64 * bytes_of(c.x_element) as u64
    }

    /// Address of the window that it leaves.
    #[inline(always)]
    pub fn write_window(&self, c: &StepConstants, params: &LayerParams) -> u64 {
        let slot = self.slots.write_slot() as u32 as u64;
        params.write_windows + slot * c.write_windows_slot as u64 * bytes_of(c.x_element) as u64
    }
}

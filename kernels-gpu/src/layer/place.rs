//! Sources and destinations of a row's state and window.

use crate::math::elements::bytes_of;
use crate::recurrent::slots::{Slots, token_slot};
use crate::state::is_live;
use crate::step::{LayerParams, StepConstants};

/// The slots of a row, which are the same for its windows and its states. With token slots one window, in the slot of the first
/// token, serves all of them.
#[derive(Clone, Copy)]
pub struct Place {
    pub slots: Slots,
    /// The slots of the windows that the row reads and writes.
    windows: [u64; 2],
    live: bool,
}

impl Place {
    /// The slots of row `b`, from global memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(c: &StepConstants, params: &LayerParams, b: u32) -> Self {
        // SAFETY: the caller's promise; the row's first token slot is there.
        let (slots, first) = unsafe {
            let first = token_slot(c, &params.step, b, 0);
            (Slots::load(c, &params.step, b), first)
        };
        let mut live = slots.live(c, &params.step);
        let mut windows = [slots.start_slot(), slots.write_slot()];
        if c.taps != 0 {
            let (mut reads, mut writes) = (!slots.is_fresh(), slots.looks_at_write(c));
            if c.token_index != 0 {
                windows = [first; 2];
                (reads, writes) = (true, true);
            }
            let [start, write] = windows;
            let (read_slots, write_slots) = (params.read_windows_slots, params.write_windows_slots);
            live = live
                && (!reads || is_live(start, read_slots, c.null_slot))
                && (!writes || is_live(write, write_slots, c.null_slot));
        }
        Self {
            slots,
            windows,
            live,
        }
    }

    /// Whether the slots of states and windows are valid.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn live(&self) -> bool {
        self.live
    }

    /// Whether the row starts from zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_fresh(&self) -> bool {
        self.slots.is_fresh()
    }

    /// Whether the row starts from its slot, not from zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn reads(&self) -> bool {
        self.live && !self.slots.is_fresh()
    }

    /// Address of the window that the row starts from.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn read_window(&self, c: &StepConstants, params: &LayerParams) -> u64 {
        let [slot, _] = self.windows.map(|slot| slot as u32 as u64);
        let first = slot * c.read_windows_slot as u64
            + self.slots.first_token() as u64 * c.read_windows_input as u64;
        params.read_windows + first * bytes_of(c.x_element) as u64
    }

    /// Whether a live row without tokens has to write its window: states are written, and the row starts from another window or
    /// from zeros.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn carries_window(&self, c: &StepConstants, params: &LayerParams) -> bool {
        let in_place = self.read_window(c, params) == self.write_window(c, params)
            && c.read_windows_channel == c.write_windows_channel
            && c.read_windows_input == c.write_windows_input;
        c.taps != 0 && c.update_state != 0 && (self.is_fresh() || !in_place)
    }

    /// Address of the window that the row writes.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn write_window(&self, c: &StepConstants, params: &LayerParams) -> u64 {
        let [_, slot] = self.windows.map(|slot| slot as u32 as u64);
        params.write_windows + slot * c.write_windows_slot as u64 * bytes_of(c.x_element) as u64
    }
}

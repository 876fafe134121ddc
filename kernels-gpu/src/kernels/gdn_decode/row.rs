//! The addresses of a block's row, its slots and its gates, for both layouts.

use crate::device::global::load_b32;
use crate::math::elements::{Raw, load_one};
use crate::math::gate;
use crate::row::Row;
use crate::state::{Head, Shape, StateElement, is_fresh, is_live, slot_of};
use crate::step::{Gate, StepConstants, StepParams};

impl Row {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn q(self, c: &StepConstants, params: &StepParams, first: u32) -> u64 {
        self.at(params.q, c.q_row, self.h * c.q_head, first, c.q_element)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn k(self, c: &StepConstants, params: &StepParams, first: u32) -> u64 {
        self.at(params.k, c.k_row, self.h * c.k_head, first, c.k_element)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn v(self, c: &StepConstants, params: &StepParams, first: u32) -> u64 {
        self.at(params.v, c.v_row, self.hv * c.v_head, first, c.v_element)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(super) fn o(self, c: &StepConstants, params: &StepParams, first: u32) -> u64 {
        self.at(params.o, c.o_row, self.hv * c.o_head, first, c.o_element)
    }
}

/// The slots that a row names.
pub struct DecodeSlots {
    read: u64,
    write: u64,
    fresh: bool,
}

impl DecodeSlots {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(c: &StepConstants, params: &StepParams, b: u32) -> Self {
        let read = slot_of(params.read_slots, c.read_index, b as u64, b as u64);
        Self {
            read,
            write: slot_of(params.write_slots, c.write_index, b as u64, read),
            fresh: is_fresh(c, params, b),
        }
    }

    /// Whether the slots are there; of a fresh row that to write, whether it is written or not, since that to read is not
    /// looked at.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn live(&self, c: &StepConstants, params: &StepParams) -> bool {
        let looks_at_write = c.update_state != 0 || self.fresh;
        (self.fresh || is_live(self.read, params.read_pool_slots, c.null_slot))
            && (!looks_at_write || is_live(self.write, params.write_pool_slots, c.null_slot))
    }

    /// Whether the row starts from zeros, whatever its slot holds.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// A head of the read slot.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn read_head<S: StateElement>(
        &self,
        c: &StepConstants,
        params: &StepParams,
        head: (u32, Shape),
    ) -> Head {
        Head::of_slot::<S>(
            params.read_pool,
            self.read,
            c.read_slot,
            head,
            c.wide_state != 0,
        )
    }

    /// A head of the write slot.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn write_head<S: StateElement>(
        &self,
        c: &StepConstants,
        params: &StepParams,
        head: (u32, Shape),
    ) -> Head {
        Head::of_slot::<S>(
            params.write_pool,
            self.write,
            c.write_slot,
            head,
            c.wide_state != 0,
        )
    }
}

/// Gates as they lie in memory.
pub struct DecodeGates {
    a: Raw<1>,
    b: Raw<1>,
    a_log: f32,
    dt_bias: f32,
}

impl DecodeGates {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(c: &StepConstants, params: &StepParams, row: Row) -> Self {
        let (a_log, dt_bias) = if c.gate == Gate::Log as u32 {
            (0, 0)
        } else {
            let offset = 4 * row.hv as u64;
            (
                load_b32(params.a_log + offset),
                load_b32(params.dt_bias + offset),
            )
        };
        Self {
            a: load_one(
                row.at(params.g, c.g_row, row.hv, 0, c.g_element),
                c.g_element,
            ),
            b: load_one(
                row.at(params.b, c.b_row, row.hv, 0, c.b_element),
                c.b_element,
            ),
            a_log: f32::from_bits(a_log),
            dt_bias: f32::from_bits(dt_bias),
        }
    }

    /// α and β.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn values(self, c: &StepConstants) -> (f32, f32) {
        let ([a], [b]) = (self.a.to_f32(c.g_element), self.b.to_f32(c.b_element));
        let (log_decay, beta) = if c.gate == Gate::Log as u32 {
            (a, b)
        } else {
            (
                gate::log_decay(a, self.a_log, self.dt_bias),
                gate::sigmoid(b) * f32::from_bits(c.beta_scale),
            )
        };
        (gate::exp(log_decay), beta)
    }
}

//! What both layouts share: the row and heads of a block, its slots, gates and scalars.

use super::{GdnDecodeConstants, GdnDecodeParams};
use crate::device::float::{fma, rsqrt};
use crate::device::global::load_b32;
use crate::device::thread::{block_idx_x, block_idx_y, block_idx_z};
use crate::math::elements::{Raw, bytes_of, load_one};
use crate::math::gate;
use crate::state::{Head, StateElement, is_live, slot_of};

/// What this block works on: a tile of row b and value head hv, whose query/key head is h.
#[derive(Clone, Copy)]
pub struct Row {
    pub b: u32,
    pub h: u32,
    pub hv: u32,
    pub tile: u32,
}

impl Row {
    #[inline(always)]
    pub fn of_block(c: &GdnDecodeConstants, tiles: u32) -> Self {
        let (x, h, b) = (block_idx_x(), block_idx_y(), block_idx_z());
        let (tile, r) = (x % tiles, x / tiles);
        let hv = if c.tiled != 0 {
            r * c.h + h
        } else {
            h * c.ratio + r
        };
        Self { b, h, hv, tile }
    }

    /// Address of element `first` of `head` in this row of a tensor with the strides `row` and `head_stride`.
    #[inline(always)]
    pub fn at(self, base: u64, row: u32, head: u32, first: u32, element: u32) -> u64 {
        base + (self.b as u64 * row as u64 + head as u64) * bytes_of(element) as u64
            + (first * bytes_of(element)) as u64
    }

    #[inline(always)]
    pub fn q(self, c: &GdnDecodeConstants, params: &GdnDecodeParams, first: u32) -> u64 {
        self.at(params.q, c.q_row, self.h * c.q_head, first, c.q_element)
    }

    #[inline(always)]
    pub fn k(self, c: &GdnDecodeConstants, params: &GdnDecodeParams, first: u32) -> u64 {
        self.at(params.k, c.k_row, self.h * c.k_head, first, c.k_element)
    }

    #[inline(always)]
    pub fn v(self, c: &GdnDecodeConstants, params: &GdnDecodeParams, first: u32) -> u64 {
        self.at(params.v, c.v_row, self.hv * c.v_head, first, c.v_element)
    }

    #[inline(always)]
    pub fn o(self, c: &GdnDecodeConstants, params: &GdnDecodeParams, first: u32) -> u64 {
        self.at(params.o, c.o_row, self.hv * c.o_head, first, c.o_element)
    }
}

/// The slots that a row names.
pub struct Slots {
    read: u64,
    write: u64,
}

impl Slots {
    #[inline(always)]
    pub unsafe fn load(c: &GdnDecodeConstants, params: &GdnDecodeParams, b: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let read = slot_of(params.read_slots, c.read_index, b, b as u64);
            Self {
                read,
                write: slot_of(params.write_slots, c.write_index, b, read),
            }
        }
    }

    #[inline(always)]
    pub fn live(&self, c: &GdnDecodeConstants, params: &GdnDecodeParams) -> bool {
        is_live(self.read, params.read_pool_slots, c.null_slot)
            && (c.update_state == 0 || is_live(self.write, params.write_pool_slots, c.null_slot))
    }

    /// Head hv of the read slot.
    #[inline(always)]
    pub fn read_head<S: StateElement, const K: u32>(
        &self,
        c: &GdnDecodeConstants,
        params: &GdnDecodeParams,
        hv: u32,
    ) -> Head {
        head::<S, K>(c, params.read_pool, self.read, c.read_slot, hv)
    }

    /// Head hv of the write slot.
    #[inline(always)]
    pub fn write_head<S: StateElement, const K: u32>(
        &self,
        c: &GdnDecodeConstants,
        params: &GdnDecodeParams,
        hv: u32,
    ) -> Head {
        head::<S, K>(c, params.write_pool, self.write, c.write_slot, hv)
    }
}

#[inline(always)]
fn head<S: StateElement, const K: u32>(
    c: &GdnDecodeConstants,
    pool: u64,
    slot: u64,
    stride: u32,
    hv: u32,
) -> Head {
    Head {
        address: pool
            + (slot as u32 as u64 * stride as u64 + (hv * K * K) as u64) * S::BYTES as u64,
        row_elements: K,
        wide: c.wide_state != 0,
    }
}

/// Gates as they lie in memory.
pub struct RawGates {
    a: Raw<1>,
    b: Raw<1>,
    a_log: f32,
    dt_bias: f32,
}

impl RawGates {
    #[inline(always)]
    pub unsafe fn load(c: &GdnDecodeConstants, params: &GdnDecodeParams, row: Row) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let (a_log, dt_bias) = if c.given_gates != 0 {
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
                    row.at(params.a, c.a_row, row.hv, 0, c.a_element),
                    c.a_element,
                ),
                b: load_one(
                    row.at(params.b, c.b_row, row.hv, 0, c.b_element),
                    c.b_element,
                ),
                a_log: f32::from_bits(a_log),
                dt_bias: f32::from_bits(dt_bias),
            }
        }
    }

    /// Log decay and beta.
    #[inline(always)]
    pub fn values(self, c: &GdnDecodeConstants) -> (f32, f32) {
        let ([a], [b]) = (self.a.to_f32(c.a_element), self.b.to_f32(c.b_element));
        if c.given_gates != 0 {
            (a, b)
        } else {
            (
                gate::log_decay(a, self.a_log, self.dt_bias),
                gate::sigmoid(b) * f32::from_bits(c.beta_scale),
            )
        }
    }
}

/// Scalars of one head and token.
pub struct Factors {
    /// α
    pub decay: f32,
    /// β
    pub beta: f32,
    /// k̂ = k · this
    pub k: f32,
    /// q̂ = q · this
    pub q: f32,
    /// k̂·q̂
    pub kq: f32,
}

impl Factors {
    /// From Σk², Σq², k·q, and (log decay, beta).
    #[inline(always)]
    pub fn new(
        c: &GdnDecodeConstants,
        [kk, qq, kq]: [f32; 3],
        (log_decay, beta): (f32, f32),
    ) -> Self {
        let scale = f32::from_bits(c.scale);
        let (k, q) = if c.l2norm != 0 {
            (rsqrt(kk + 1e-6), rsqrt(qq + 1e-6) * scale)
        } else {
            (1.0, scale)
        };
        Self {
            decay: gate::exp(log_decay),
            beta,
            k,
            q,
            kq: kq * k * q,
        }
    }

    /// δ of one v, from S k.
    #[inline(always)]
    pub fn delta(&self, v: f32, sk: f32) -> f32 {
        self.beta * fma(-(self.decay * self.k), sk, v)
    }

    /// o of one v, from S q and δ.
    #[inline(always)]
    pub fn output(&self, sq: f32, delta: f32) -> f32 {
        fma(self.decay * self.q, sq, delta * self.kq)
    }
}

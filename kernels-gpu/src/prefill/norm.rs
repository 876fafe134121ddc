//! The norm of what the chain leaves of o, a unit and a value head at a time.
//!
//! An f32 of o is its upper half where o will be, and its lower one in the workspace where v was, whose tiles nobody reads any
//! more: no bit is lost, and no room is taken. An o of f32 is where it will be.

use super::output::{Scales, sum_of_quad};
use super::rows::{Piece, Span};
use super::values::TILE_BYTES;
use crate::constants::Element;
use crate::device::thread::thread_idx_x;
use crate::math::elements::{Raw, load};
use crate::step::{PrefillParams, StepConstants};

const B16: u32 = Element::Bf16 as u32;

/// Most groups of 64 channels.
const MOST_GROUPS: usize = 3;

/// 16 channels of a token, as the chain left them.
#[derive(Clone, Copy)]
struct Left {
    /// The upper halves, or all of an f32.
    high: [Raw<8>; 2],
    low: [Raw<8>; 2],
}

impl Left {
    const NONE: Self = Self {
        high: [Raw([0; 8]); 2],
        low: [Raw([0; 8]); 2],
    };

    /// # Safety
    /// They are there.
    #[inline(always)]
    unsafe fn load(c: &StepConstants, o: u64, low: u64) -> Self {
        let mut left = Self::NONE;
        let mut i = 0;
        // SAFETY: the caller's promise.
        unsafe {
            while i < 2 {
                if c.o_element == Element::F32 as u32 {
                    left.high[i] = load::<8>(o + 32 * i as u64, c.o_element, c.wide_io != 0);
                } else {
                    left.high[i] = load::<8>(o + 16 * i as u64, B16, c.wide_io != 0);
                    left.low[i] = load::<8>(low + 16 * i as u64, B16, true);
                }
                i += 1;
            }
        }
        left
    }

    #[inline(always)]
    fn values(&self, c: &StepConstants) -> [f32; 16] {
        let mut values = [0.0; 16];
        let mut i = 0;
        while i < 16 {
            let (high, low) = (self.high[i / 8].0, self.low[i / 8].0);
            let n = i % 8;
            let half = |words: [u32; 8]| words[n / 2] >> (16 * (n % 2)) & 0xffff;
            values[i] = f32::from_bits(if c.o_element == Element::F32 as u32 {
                high[n]
            } else {
                half(high) << 16 | half(low)
            });
            i += 1;
        }
        values
    }
}

/// Norms o of a unit and value head `hv`, whose lower halves are at `lows`, and stores it. Four of the 256 threads have
/// a token.
///
/// # Safety
/// `params` and `c` describe live tensors; the chain has left o, and nobody else touches that of the unit and head.
#[inline(always)]
pub unsafe fn of_unit<const V: u32>(
    c: &StepConstants,
    params: &PrefillParams,
    (span, piece): (&Span, Piece),
    hv: u32,
    lows: u64,
) {
    const { assert!(V / 64 <= MOST_GROUPS as u32) };
    let groups = V as usize / 64;
    let (token, part) = (thread_idx_x() / 4, thread_idx_x() % 4 * 16);
    let is_there = token < piece.count;
    let t = piece.start + if is_there { token } else { 0 };
    let channel = |group: usize| 64 * group as u32 + part;
    // SAFETY: the caller's promise; a thread has its own channels of a token, and loads them before it stores any.
    unsafe {
        let mut left = [Left::NONE; MOST_GROUPS];
        let mut scales = [Scales::NONE; MOST_GROUPS];
        let mut group = 0;
        while group < groups {
            let (base, strides) = (params.layer.step.o, (params.o_row, c.o_token));
            let at = hv * c.o_head + channel(group);
            let o = span.at(base, strides, t, at, c.o_element);
            let low = group as u32 * TILE_BYTES + token * 128 + 2 * part;
            if is_there {
                left[group] = Left::load(c, o, lows + low as u64);
                scales[group] = Scales::load(c, params, (span, t), (hv, channel(group)));
            }
            group += 1;
        }
        let mut values = [[0.0; 16]; MOST_GROUPS];
        let mut squares = 0.0;
        group = 0;
        while group < groups {
            values[group] = left[group].values(c);
            squares += sum_of_quad(&values[group]);
            group += 1;
        }
        group = 0;
        while group < groups && is_there {
            let of = (hv, channel(group));
            scales[group].store::<V>(c, params, (span, t), of, &values[group], squares);
            group += 1;
        }
    }
}

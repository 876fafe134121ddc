//! A warpgroup's 64 rows of a state in registers, as the sums of a product: element 4 j + 2 half + e of a thread is row
//! 16 warp + r + 8 half, channel 8 j + 2 c + e, with r = lane / 4, c = lane % 4.

use crate::device::float::b16x2_to_f32;
use crate::device::global::{
    load_state_b16, load_state_b32, load_state_b64, load_state_b128, store_state_b16,
    store_state_b32, store_state_b64, store_state_b128,
};
use crate::state::{Head, StateElement};
use crate::step::StepConstants;

/// Where the elements of a thread are in a head's state.
#[derive(Clone, Copy)]
pub struct Places<const K: u32, const V: u32, const V_LAST: bool> {
    row: u32,
    channel: u32,
}

impl<const K: u32, const V: u32, const V_LAST: bool> Places<K, V, V_LAST> {
    /// Of a thread, with its warpgroup's rows from `first` on.
    #[inline(always)]
    pub fn new(thread: u32, first: u32) -> Self {
        Self {
            row: first + thread / 32 % 4 * 16 + thread % 32 / 4,
            channel: thread % 4 * 2,
        }
    }

    /// Address of the first of the thread's elements in a head's state.
    #[inline(always)]
    fn first<S: StateElement>(self, head: Head) -> u64 {
        let element = if V_LAST {
            self.channel * V + self.row
        } else {
            self.row * K + self.channel
        };
        head.address + (element * S::BYTES) as u64
    }

    /// Bytes from there to the element of `j` and `half`, and to the next channel's.
    #[inline(always)]
    const fn offsets<S: StateElement>(j: u32, half: u32) -> [u64; 2] {
        let (element, next) = if V_LAST {
            (8 * j * V + 8 * half, V)
        } else {
            (8 * half * K + 8 * j, 1)
        };
        [
            (element * S::BYTES) as u64,
            ((element + next) * S::BYTES) as u64,
        ]
    }

    /// Zeros where not `live`.
    ///
    /// # Safety
    /// Where `live`, `head` is in global memory, and no other thread writes these elements.
    #[inline(always)]
    pub unsafe fn load<S: StateElement>(
        self,
        c: &StepConstants,
        head: Head,
        live: bool,
    ) -> [f32; 64] {
        let mut s = [0.0; 64];
        if !live {
            return s;
        }
        let first = self.first::<S>(head);
        let mut i = 0;
        while i < K as usize / 4 {
            let [address, other] = Self::offsets::<S>(i as u32 / 2, i as u32 % 2);
            let (address, other) = (first + address, first + other);
            // SAFETY: the caller's promise.
            let pair = unsafe {
                match (S::BYTES, !V_LAST && head.wide) {
                    (4, true) => load_state_b64(address, true).map(f32::from_bits),
                    (4, false) => {
                        [address, other].map(|at| f32::from_bits(load_state_b32(at, true)))
                    }
                    (_, true) => b16x2_to_f32(load_state_b32(address, true), c.state_f16 != 0),
                    _ => [address, other].map(|at| {
                        let [value, _] =
                            b16x2_to_f32(load_state_b16(at, true).into(), c.state_f16 != 0);
                        value
                    }),
                }
            };
            [s[2 * i], s[2 * i + 1]] = pair;
            i += 1;
        }
        s
    }

    /// # Safety
    /// `head` is in global memory, and no other thread touches these elements.
    #[inline(always)]
    pub unsafe fn store<S: StateElement>(self, c: &StepConstants, head: Head, s: &[f32; 64]) {
        let first = self.first::<S>(head);
        let mut i = 0;
        while i < K as usize / 4 {
            let [address, other] = Self::offsets::<S>(i as u32 / 2, i as u32 % 2);
            let (address, other) = (first + address, first + other);
            let pair = [s[2 * i], s[2 * i + 1], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
            let raw = S::narrow(c, pair);
            // SAFETY: the caller's promise.
            unsafe {
                match (S::BYTES, !V_LAST && head.wide) {
                    (4, true) => store_state_b64(address, [raw[0], raw[1]]),
                    (4, false) => {
                        store_state_b32(address, raw[0]);
                        store_state_b32(other, raw[1]);
                    }
                    (_, true) => store_state_b32(address, raw[0]),
                    _ => {
                        store_state_b16(address, raw[0] as u16);
                        store_state_b16(other, (raw[0] >> 16) as u16);
                    }
                }
            }
            i += 1;
        }
    }
}

/// What a thread left with [`store_carried`] in a launch before.
///
/// # Safety
/// `carried` is in global memory, and nobody writes there meanwhile.
#[inline(always)]
pub unsafe fn load_carried<const K: u32>(carried: u64, thread: u32) -> [f32; 64] {
    let first = carried + (thread % 128 * 16) as u64;
    let mut s = [0.0; 64];
    let mut i = 0;
    while i < K as usize / 8 {
        // SAFETY: the caller's promise.
        let words = unsafe { load_state_b128(first + 2048 * i as u64, true) };
        [s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]] = words.map(f32::from_bits);
        i += 1;
    }
    s
}

/// Leaves what a thread of a warpgroup has, bit for bit.
///
/// # Safety
/// `carried` is in global memory, and no other warpgroup touches it.
#[inline(always)]
pub unsafe fn store_carried<const K: u32>(carried: u64, thread: u32, s: &[f32; 64]) {
    let first = carried + (thread % 128 * 16) as u64;
    let mut i = 0;
    while i < K as usize / 8 {
        let words = [s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]].map(f32::to_bits);
        // SAFETY: the caller's promise.
        unsafe { store_state_b128(first + 2048 * i as u64, words) };
        i += 1;
    }
}

//! A warpgroup's 64 rows of a state in registers, as the sums of a product: element 4 j + 2 half + e of a thread is row
//! 16 warp + r + 8 half, channel 8 j + 2 c + e, with r = lane / 4, c = lane % 4.

use crate::device::global::{
    load_state_b16, load_state_b32, load_state_b64, store_state_b16, store_state_b32,
    store_state_b64,
};
use crate::device::thread::thread_idx_x;
use crate::device::warp::lane_id;
use crate::math::elements::bf16_to_f32;
use crate::state::{Head, StateElement};

/// Where the elements of a thread are in a head's state.
#[derive(Clone, Copy)]
pub struct Places<const K: u32, const V: u32, const V_LAST: bool> {
    row: u32,
    channel: u32,
}

impl<const K: u32, const V: u32, const V_LAST: bool> Places<K, V, V_LAST> {
    /// With the warpgroup's rows from `first` on.
    #[inline(always)]
    pub fn new(first: u32) -> Self {
        Self {
            row: first + thread_idx_x() / 32 % 4 * 16 + lane_id() / 4,
            channel: lane_id() % 4 * 2,
        }
    }

    /// Element of the head's state, of `j` and `half`; the next channel's is this many behind.
    #[inline(always)]
    fn element(self, j: u32, half: u32) -> (u32, u32) {
        let (row, channel) = (self.row + 8 * half, self.channel + 8 * j);
        if V_LAST {
            (channel * V + row, V)
        } else {
            (row * K + channel, 1)
        }
    }

    /// Zeros where not `live`.
    ///
    /// # Safety
    /// Where `live`, `head` is in global memory, and no other thread writes these elements.
    #[inline(always)]
    pub unsafe fn load<S: StateElement>(self, head: Head, live: bool) -> [f32; 64] {
        let mut s = [0.0; 64];
        let mut i = 0;
        while i < K as usize / 4 {
            let (element, next) = self.element(i as u32 / 2, i as u32 % 2);
            let address = head.address + (element * S::BYTES) as u64;
            let other = address + (next * S::BYTES) as u64;
            // SAFETY: the caller's promise.
            let pair = unsafe {
                match (S::BYTES, !V_LAST && head.wide) {
                    (4, true) => load_state_b64(address, live).map(f32::from_bits),
                    (4, false) => {
                        [address, other].map(|at| f32::from_bits(load_state_b32(at, live)))
                    }
                    (_, true) => {
                        let word = load_state_b32(address, live);
                        [bf16_to_f32(word as u16), f32::from_bits(word & 0xffff_0000)]
                    }
                    _ => [address, other].map(|at| bf16_to_f32(load_state_b16(at, live))),
                }
            };
            [s[2 * i], s[2 * i + 1]] = pair;
            i += 1;
        }
        if live { s } else { [0.0; 64] }
    }

    /// # Safety
    /// `head` is in global memory, and no other thread touches these elements.
    #[inline(always)]
    pub unsafe fn store<S: StateElement>(self, head: Head, s: &[f32; 64]) {
        let mut i = 0;
        while i < K as usize / 4 {
            let (element, next) = self.element(i as u32 / 2, i as u32 % 2);
            let address = head.address + (element * S::BYTES) as u64;
            let other = address + (next * S::BYTES) as u64;
            let pair = [s[2 * i], s[2 * i + 1], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
            let raw = S::narrow(pair);
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

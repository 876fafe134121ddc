//! A warpgroup's 64 rows of a state in registers, in the layout of a product's sums: element 4 j + 2 half + e of a thread is row
//! 16 warp + r + 8 half, channel 8 j + 2 c + e, with r = lane / 4, c = lane % 4.
//!
//! Layout and element of the states are load-time constants (`state_v_last`, `state_f32`). They matter only here, where a state
//! is loaded and stored. Each combination has its own body, whose loops have constant bounds.

use crate::device::float::b16x2_to_f32;
use crate::device::global::{
    load_state_b16, load_state_b32, load_state_b64, load_state_b128, store_state_b16,
    store_state_b32, store_state_b64, store_state_b128,
};
use crate::device::shared::{load_shared_b64, load_shared_b128};
use crate::device::warp::warp_shuffle_xor;
use crate::math::each::each;
use crate::state::{B16, F32, Head, StateElement};
use crate::step::StepConstants;

/// Bytes of an element of a state.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub const fn bytes_of(c: &StepConstants) -> u32 {
    if c.state_f32 != 0 {
        F32::BYTES
    } else {
        B16::BYTES
    }
}

/// Row and channel of a thread's first element in a head's state.
#[derive(Clone, Copy)]
pub struct Places<const K: u32, const V: u32> {
    row: u32,
    channel: u32,
}

impl<const K: u32, const V: u32> Places<K, V> {
    /// Places of a thread, whose warpgroup has rows from `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(thread: u32, first: u32) -> Self {
        Self {
            row: first + thread / 32 % 4 * 16 + thread % 32 / 4,
            channel: thread % 4 * 2,
        }
    }

    /// Address of the first of the thread's elements in a head's state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first<S: StateElement, const V_LAST: bool>(self, head: Head) -> u64 {
        let element = if V_LAST {
            self.channel * V + self.row
        } else {
            self.row * K + self.channel
        };
        head.address + (element * S::BYTES) as u64
    }

    /// Byte offsets from the first element to the element of `j` and `half`, and to that of the next channel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    const fn offsets<S: StateElement, const V_LAST: bool>(j: u32, half: u32) -> [u64; 2] {
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

    /// Loads the thread's elements; zeros unless `live`. Called by all lanes of a warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(self, c: &StepConstants, head: Head, live: bool) -> [f32; 64] {
        self.settle(c, self.bring(c, head, live))
    }

    /// [`Self::load`] without waiting for the loads. For a wide state each lane gets runs of channels, which [`Self::settle`]
    /// exchanges for its elements.
    ///
    /// # Safety
    /// If `live`, `head` is in global memory, and no other thread writes these elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn bring(self, c: &StepConstants, head: Head, live: bool) -> [f32; 64] {
        if !live {
            return [0.0; 64];
        }
        match (Self::has_runs(c), c.state_v_last != 0, c.state_f32 != 0) {
            (true, _, true) => self.load_runs::<F32>(c, head),
            (true, _, false) => self.load_runs::<B16>(c, head),
            (_, true, true) => self.load_elements::<F32, true>(c, head),
            (_, true, false) => self.load_elements::<B16, true>(c, head),
            (_, false, true) => self.load_elements::<F32, false>(c, head),
            (_, false, false) => self.load_elements::<B16, false>(c, head),
        }
    }

    /// [`Self::bring`] element by element.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_elements<S: StateElement, const V_LAST: bool>(
        self,
        c: &StepConstants,
        head: Head,
    ) -> [f32; 64] {
        let mut s = [0.0; 64];
        let first = self.first::<S, V_LAST>(head);
        each!(i in 0..K as usize / 4 => {
            let [address, other] = Self::offsets::<S, V_LAST>(i as u32 / 2, i as u32 % 2);
            // SAFETY: the caller's promise.
            let pair = [first + address, first + other].map(|at| unsafe {
                match S::BYTES {
                    4 => f32::from_bits(load_state_b32(at, true)),
                    _ => {
                        let raw = load_state_b16(at, true).into();
                        b16x2_to_f32(raw, c.state_f16 != 0)[0]
                    }
                }
            });
            [s[2 * i], s[2 * i + 1]] = pair;
        });
        s
    }

    /// Stores a thread's elements. Called by all lanes of a warp.
    ///
    /// # Safety
    /// `head` is in global memory, and no other thread accesses these elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store(self, c: &StepConstants, head: Head, s: &[f32; 64]) {
        match (Self::has_runs(c), c.state_v_last != 0, c.state_f32 != 0) {
            (true, _, true) => self.store_runs::<F32>(c, head, s),
            (true, _, false) => self.store_runs::<B16>(c, head, s),
            (_, true, true) => self.store_elements::<F32, true>(c, head, s),
            (_, true, false) => self.store_elements::<B16, true>(c, head, s),
            (_, false, true) => self.store_elements::<F32, false>(c, head, s),
            (_, false, false) => self.store_elements::<B16, false>(c, head, s),
        }
    }

    /// [`Self::store`] element by element.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_elements<S: StateElement, const V_LAST: bool>(
        self,
        c: &StepConstants,
        head: Head,
        s: &[f32; 64],
    ) {
        let first = self.first::<S, V_LAST>(head);
        each!(i in 0..K as usize / 4 => {
            let [address, other] = Self::offsets::<S, V_LAST>(i as u32 / 2, i as u32 % 2);
            let (address, other) = (first + address, first + other);
            let pair = [s[2 * i], s[2 * i + 1], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
            let raw = S::narrow(c, pair);
            // SAFETY: the caller's promise.
            unsafe {
                match S::BYTES {
                    4 => {
                        store_state_b32(address, raw[0]);
                        store_state_b32(other, raw[1]);
                    }
                    _ => {
                        store_state_b16(address, raw[0] as u16);
                        store_state_b16(other, (raw[0] >> 16) as u16);
                    }
                }
            }
        });
    }

    /// Byte offset of this lane's first run of four channels in a head's state. Of 16 channels of a row, lanes 0 and 2 have the
    /// runs of the first 8, lanes 1 and 3 those of the other 8, so that neighbours exchange one pair.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first_run<S: StateElement>(self) -> u32 {
        let lane = self.channel / 2;
        let element = self.row * K + lane % 2 * 8 + lane / 2 * 4;
        element * S::BYTES
    }

    /// Byte offset of run `n` from the first run. Two consecutive runs are of the same 16 channels, in rows r and r + 8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    const fn run<S: StateElement>(n: u32) -> u32 {
        (n % 2 * 8 * K + n / 2 * 16) * S::BYTES
    }

    /// All ones if the lane has the second run of two neighbours, else 0.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn second(self) -> u32 {
        (self.channel / 2 % 2).wrapping_neg()
    }

    /// Whether rows are loaded and stored by runs: for wide K-last states. A warp then accesses 64 bytes of each of its rows per
    /// instruction (32 in 16-bit states), otherwise half of that.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn has_runs(c: &StepConstants) -> bool {
        c.state_v_last == 0 && c.wide_state != 0
    }

    /// Loads this lane's runs, in the places of the elements that they are exchanged for.
    ///
    /// # Safety
    /// `head` is in global memory, and no other thread writes there.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_runs<S: StateElement>(self, c: &StepConstants, head: Head) -> [f32; 64] {
        let first = head.address + self.first_run::<S>() as u64;
        // SAFETY: the caller's promise.
        Self::runs::<S>(
            c,
            |byte| unsafe { load_state_b128(first + byte as u64, true) },
            |byte| unsafe { load_state_b64(first + byte as u64, true) },
        )
    }

    /// Loads what [`Self::bring`] loads, from a head's state that [has runs](Self::has_runs) and has been copied to `state` in
    /// shared memory.
    ///
    /// # Safety
    /// The state is in shared memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn take(self, c: &StepConstants, state: u32) -> [f32; 64] {
        if c.state_f32 != 0 {
            self.take_runs::<F32>(c, state)
        } else {
            self.take_runs::<B16>(c, state)
        }
    }

    /// # Safety
    /// As for [`Self::take`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn take_runs<S: StateElement>(self, c: &StepConstants, state: u32) -> [f32; 64] {
        let first = state + self.first_run::<S>();
        // SAFETY: the caller's promise.
        Self::runs::<S>(
            c,
            |byte| unsafe { load_shared_b128(first + byte) },
            |byte| unsafe { load_shared_b64(first + byte) },
        )
    }

    /// A lane's runs. By the element of the state, `of_f32` or `of_b16` returns the words at a byte offset from the first run.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn runs<S: StateElement>(
        c: &StepConstants,
        of_f32: impl Fn(u32) -> [u32; 4],
        of_b16: impl Fn(u32) -> [u32; 2],
    ) -> [f32; 64] {
        let mut s = [0.0; 64];
        each!(n in 0..K as usize / 8 => {
            let byte = Self::run::<S>(n as u32);
            let run = match S::BYTES {
                4 => pairs_of(of_f32(byte)),
                _ => of_b16(byte).map(|raw| b16x2_to_f32(raw, c.state_f16 != 0)),
            };
            set_pairs(&mut s, n, run);
        });
        s
    }

    /// A thread's elements, from the runs that [`Self::bring`] loaded. Called by all lanes of a warp.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn settle(self, c: &StepConstants, mut s: [f32; 64]) -> [f32; 64] {
        if Self::has_runs(c) {
            let second = self.second();
            each!(n in 0..K as usize / 8 => {
                let traded = trade(pairs(&s, n), second);
                set_pairs(&mut s, n, traded);
            });
        }
        s
    }

    /// [`Self::store`] by runs.
    ///
    /// # Safety
    /// As for [`Self::store`]; all lanes of a warp call this.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_runs<S: StateElement>(self, c: &StepConstants, head: Head, s: &[f32; 64]) {
        let (first, second) = (head.address + self.first_run::<S>() as u64, self.second());
        each!(n in 0..K as usize / 8 => {
            let [[x, y], [z, w]] = trade(pairs(s, n), second);
            let raw = S::narrow(c, [x, y, z, w, 0.0, 0.0, 0.0, 0.0]);
            let at = first + Self::run::<S>(n as u32) as u64;
            // SAFETY: the caller's promise.
            unsafe {
                match S::BYTES {
                    4 => store_state_b128(at, [raw[0], raw[1], raw[2], raw[3]]),
                    _ => store_state_b64(at, [raw[0], raw[1]]),
                }
            }
        });
    }
}

/// Four f32 in two pairs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn pairs_of(words: [u32; 4]) -> [[f32; 2]; 2] {
    let [x, y, z, w] = words.map(f32::from_bits);
    [[x, y], [z, w]]
}

/// The two pairs that are exchanged for run `n`; their channels are 8 apart.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn pairs(s: &[f32; 64], n: usize) -> [[f32; 2]; 2] {
    let at = n / 2 * 8 + n % 2 * 2;
    [[s[at], s[at + 1]], [s[at + 4], s[at + 5]]]
}

/// Sets these two pairs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn set_pairs(s: &mut [f32; 64], n: usize, [a, b]: [[f32; 2]; 2]) {
    let at = n / 2 * 8 + n % 2 * 2;
    [s[at], s[at + 1], s[at + 4], s[at + 5]] = [a[0], a[1], b[0], b[1]];
}

/// Lanes 2 i and 2 i + 1 exchange pairs: from a run of four channels in each lane to the first pairs of both runs in one lane and
/// the second pairs in the other, or back; the exchange is its own inverse. `second` is all ones in lane 2 i + 1, 0 in lane 2 i.
///
/// Uses masks (docs/compiler.md), because ptxas turns a choice into two shuffles, one for each lane.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn trade(pairs: [[f32; 2]; 2], second: u32) -> [[f32; 2]; 2] {
    let [a, b] = pairs.map(|pair| pair.map(f32::to_bits));
    let choose = |x: u32, y: u32| f32::from_bits(x & !second | y & second);
    let takes = [0, 1].map(|e| warp_shuffle_xor(choose(b[e], a[e]), 1).to_bits());
    [
        [0, 1].map(|e| choose(a[e], takes[e])),
        [0, 1].map(|e| choose(takes[e], b[e])),
    ]
}

/// Loads the elements that a thread stored with [`store_carried`] in an earlier launch.
///
/// # Safety
/// `carried` is in global memory, and nobody writes there at the same time.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_carried<const K: u32>((carried, thread): (u64, u32)) -> [f32; 64] {
    let first = carried + (thread % 128 * 16) as u64;
    let mut s = [0.0; 64];
    each!(i in 0..K as usize / 8 => {
        let words = load_state_b128(first + 2048 * i as u64, true);
        [s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]] = words.map(f32::from_bits);
    });
    s
}

/// Stores a thread's elements, bit for bit.
///
/// # Safety
/// `carried` is in global memory, and no other warpgroup accesses it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_carried<const K: u32>((carried, thread): (u64, u32), s: &[f32; 64]) {
    let first = carried + (thread % 128 * 16) as u64;
    each!(i in 0..K as usize / 8 => {
        let words = [s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]].map(f32::to_bits);
        store_state_b128(first + 2048 * i as u64, words);
    });
}

//! States of either layout that are f32 in shared memory; in the pool they are f32, or 16-bit in a launch of sets
//! ([`super::sets`]): layout and pool type are load-time constants.
//!
//! A product takes S as two parts of bf16, with a relative error of 2⁻¹⁷; the new state is computed by additions in f32. A lane
//! holds channels 4c .. 4c+4 and 16+4c .. 16+4c+4 of a fragment, two vectors of a K-last row. Of a V-last state it takes the 8
//! channels from 8 rows of [`Map::state_of_channel`], word by word: 32 lanes without bank conflicts, and whole sectors of global
//! memory.

use super::fragments::{Fragment, Steps, TokenFragment, split};
use super::map::{Block, Map};
use super::state::StateRows;
use super::worker::Worker;
use crate::device::float::{b16x2_to_f32, pack_b16x2};
use crate::device::global::{store_state_b16, store_state_b32};
use crate::device::shared::{
    copy_async_b128, load_shared_b32, load_shared_b128, store_shared_b32, store_shared_b128,
};
use crate::device::warp::lane_id;
use crate::math::each::each;
use crate::state::{B16, F32, Head, Share, StateElement};

/// Elements in 16 bytes.
const VECTOR: u32 = F32::VECTOR;

impl<B: Block<State = F32>, const TILES16: usize> Worker<B, TILES16> {
    /// Turns of a warp's pass over its rows of S, 16 bytes per lane: accesses cover whole sectors, and lines, of global memory.
    const TURNS_OF_STATE: u32 = B::ROWS * B::K / VECTOR / 32;

    /// This lane's 16 bytes in turn `i`: index of the first element in the head's state, and shared-memory address.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn vector(&self, i: u32) -> (u32, u32) {
        let of_row = if self.v_last { B::ROWS } else { B::K } / VECTOR;
        let chunk = lane_id() % of_row;
        let row = i * (32 / of_row) + lane_id() / of_row;
        if self.v_last {
            let element = row * B::V + self.first + VECTOR * chunk;
            (element, Map::<B>::state_of_channel(self.warp, row, chunk))
        } else {
            let element = (self.first + row) * B::K + VECTOR * chunk;
            (element, Map::<B>::state(self.warp, row, chunk))
        }
    }

    /// [`Self::vector`] for a 16-bit state, half as many turns: the two addresses are for the halves after conversion to f32.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn narrow_vector(&self, i: u32) -> (u32, [u32; 2]) {
        let of_row = if self.v_last { B::ROWS } else { B::K } / B16::VECTOR;
        let chunk = lane_id() % of_row;
        let row = i * (32 / of_row) + lane_id() / of_row;
        let halves = [2 * chunk, 2 * chunk + 1];
        if self.v_last {
            let element = row * B::V + self.first + B16::VECTOR * chunk;
            let place = |half| Map::<B>::state_of_channel(self.warp, row, half);
            (element, halves.map(place))
        } else {
            let element = (self.first + row) * B::K + B16::VECTOR * chunk;
            let place = |half| Map::<B>::state(self.warp, row, half);
            (element, halves.map(place))
        }
    }

    /// Channel, and row among the warp's rows, of element `i` of this lane's part of a fragment, for rows 8 `half` + r of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn place((tile, fragment): (usize, usize), half: usize, i: usize) -> (u32, u32) {
        let channel = lane_share(fragment).first + lane_share(fragment).column::<F32>(i);
        (channel, (16 * tile + 8 * half) as u32 + lane_id() / 4)
    }

    /// Shared-memory address of element `i` of this lane's part of a fragment of a V-last state, for rows 8 `half` + r of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn word(&self, at: (usize, usize), half: usize, i: usize) -> u32 {
        let (channel, row) = Self::place(at, half, i);
        let place = Map::<B>::state_of_channel(self.warp, channel, row / VECTOR);
        place + row % VECTOR * 4
    }

    /// A lane's part of a row of a fragment as 16-bit elements of the pool, packed in pairs.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn pairs(&self, row: [f32; 8]) -> [u32; 4] {
        let mut pairs = [0; 4];
        each!(j in 0..4 => pairs[j] = pack_b16x2(row[2 * j], row[2 * j + 1], self.pool_f16));
        pairs
    }

    /// Shared-memory address of elements 4 `i` .. 4 `i` + 4 of this lane's part of a fragment of a K-last state, for rows 8
    /// `half` + r of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn vector_of(&self, (tile, fragment): (usize, usize), half: usize, i: usize) -> u32 {
        let row = (16 * tile + 8 * half) as u32 + lane_id() / 4;
        let chunk = 8 * fragment as u32 + 4 * i as u32 + lane_id() % 4;
        Map::<B>::state(self.warp, row, chunk)
    }
}

/// This lane's channels of a fragment.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn lane_share(fragment: usize) -> Share {
    Share::of(lane_id(), 4).from(32 * fragment as u32)
}

impl StateRows for F32 {
    type Fragment = [[f32; 8]; 2];
    type Factors = [Fragment; 2];

    const CHANNELS: [u32; 2] = [64, 16];

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        fresh: bool,
    ) {
        each!(i in 0..Worker::<B, TILES16>::TURNS_OF_STATE => {
            let (element, place) = worker.vector(i);
            // SAFETY: the caller's promise; the warp reads them after it has waited.
            unsafe {
                if fresh {
                    store_shared_b128(place, [0; 4]);
                } else if worker.wide_state {
                    copy_async_b128(place, head.address + 4 * element as u64);
                } else {
                    store_shared_b128(place, head.load_vector::<Self>(element));
                }
            }
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        tile: usize,
        fragment: usize,
    ) -> [[f32; 8]; 2] {
        let mut state = [[0; 8]; 2];
        each!(half in 0..2 => {
            if worker.v_last {
                each!(i in 0..8 => {
                    state[half][i] = load_shared_b32(worker.word((tile, fragment), half, i));
                });
            } else {
                each!(i in 0..2 => {
                    let words = load_shared_b128(worker.vector_of((tile, fragment), half, i));
                    each!(word in 0..4 => state[half][4 * i + word] = words[word]);
                });
            }
        });
        state.map(|row| row.map(f32::from_bits))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn factors(state: [[f32; 8]; 2]) -> [Fragment; 2] {
        let mut parts = [[[0; 4]; 2]; 2];
        each!(half in 0..2 => {
            each!(j in 0..4 => {
                let [high, low] = split(state[half][2 * j], state[half][2 * j + 1], false);
                (parts[0][half][j], parts[1][half][j]) = (high, low);
            });
        });
        parts
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn product(sum: [f32; 4], state: [Fragment; 2], tokens: TokenFragment) -> [f32; 4] {
        tokens.times_split_state(sum, state)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn advance<const SETS: usize>(
        (state, _): ([[f32; 8]; 2], bool),
        sets: [(Steps, [f32; 8], TokenFragment); SETS],
        moved: u32,
    ) -> [[f32; 8]; 2] {
        let mut next = state;
        each!(i in 0..SETS => {
            let (steps, decays, k) = sets[i];
            next = steps.advance_f32(next, decays, k);
        });
        let mut kept = [[0.0; 8]; 2];
        each!(half in 0..2 => {
            each!(i in 0..8 => {
                let (next, state) = (next[half][i].to_bits(), state[half][i].to_bits());
                kept[half][i] = f32::from_bits(next & moved | state & !moved);
            });
        });
        kept
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        (tile, fragment): (usize, usize),
        next: [[f32; 8]; 2],
    ) {
        each!(half in 0..2 => {
            if worker.v_last {
                each!(i in 0..8 => {
                    let (channel, row) = Worker::<B, TILES16>::place((tile, fragment), half, i);
                    let element = channel * B::V + worker.first + row;
                    let address = head.address + 4 * element as u64;
                    // SAFETY: the caller's promise.
                    unsafe { store_state_b32(address, next[half][i].to_bits()) };
                });
            } else {
                let row = worker.first + (16 * tile + 8 * half) as u32 + lane_id() / 4;
                head.store::<Self>(lane_share(fragment), row, next[half].map(f32::to_bits));
            }
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        at: (usize, usize),
        next: [[f32; 8]; 2],
    ) {
        each!(half in 0..2 => {
            let words = next[half].map(f32::to_bits);
            // SAFETY: the caller's promise; only this lane accesses the words.
            unsafe {
                if worker.v_last {
                    each!(i in 0..8 => store_shared_b32(worker.word(at, half, i), words[i]));
                } else {
                    let [a, b, c, d, e, f, g, h] = words;
                    store_shared_b128(worker.vector_of(at, half, 0), [a, b, c, d]);
                    store_shared_b128(worker.vector_of(at, half, 1), [e, f, g, h]);
                }
            }
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_pair<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        (tile, pair): (usize, usize),
        [first, second]: [[[f32; 8]; 2]; 2],
    ) {
        Self::store(worker, head, (tile, 2 * pair), first);
        Self::store(worker, head, (tile, 2 * pair + 1), second);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy_narrow<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        fresh: bool,
    ) {
        each!(i in 0..Worker::<B, TILES16>::TURNS_OF_STATE / 2 => {
            let (element, [place, _]) = worker.narrow_vector(i);
            // SAFETY: the caller's promise; the warp reads them after it has waited.
            unsafe {
                if fresh {
                    store_shared_b128(place, [0; 4]);
                } else if worker.wide_state {
                    copy_async_b128(place, head.address + 2 * element as u64);
                } else {
                    store_shared_b128(place, head.load_vector::<B16>(element));
                }
            }
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn widen_rows<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
    ) {
        each!(i in 0..Worker::<B, TILES16>::TURNS_OF_STATE / 2 => {
            // SAFETY: the caller's promise; only this lane accesses these 32 bytes.
            unsafe {
                let (_, [first, second]) = worker.narrow_vector(i);
                let values = load_shared_b128(first)
                    .map(|word| b16x2_to_f32(word, worker.pool_f16).map(f32::to_bits));
                let [[a, b], [c, d], [e, f], [g, h]] = values;
                store_shared_b128(first, [a, b, c, d]);
                store_shared_b128(second, [e, f, g, h]);
            }
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn rounded<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        mut fragment: [[f32; 8]; 2],
    ) -> [[f32; 8]; 2] {
        each!(half in 0..2 => {
            let pairs = worker.pairs(fragment[half]);
            each!(j in 0..4 => {
                let pair = b16x2_to_f32(pairs[j], worker.pool_f16);
                [fragment[half][2 * j], fragment[half][2 * j + 1]] = pair;
            });
        });
        fragment
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_narrow<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        at: (usize, usize),
        next: [[f32; 8]; 2],
    ) {
        each!(half in 0..2 => {
            let pairs = worker.pairs(next[half]);
            if worker.v_last {
                each!(i in 0..8 => {
                    let (channel, row) = Worker::<B, TILES16>::place(at, half, i);
                    let element = channel * B::V + worker.first + row;
                    let bits = pairs[i / 2] >> (16 * (i % 2) as u32);
                    // SAFETY: the caller's promise.
                    unsafe { store_state_b16(head.address + 2 * element as u64, bits as u16) };
                });
            } else {
                each!(i in 0..2 => {
                    let (channel, row) = Worker::<B, TILES16>::place(at, half, 4 * i);
                    let element = (worker.first + row) * B::K + channel;
                    // SAFETY: the caller's promise.
                    unsafe { head.store_four(element, [pairs[2 * i], pairs[2 * i + 1]]) };
                });
            }
        });
    }
}

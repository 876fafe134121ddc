//! Transfer of the state between global memory and the warp that owns its rows. [`StateRows`] has the parts that depend on its
//! element type.

use super::fragments::{Fragment, Split, SplitMatrix, Steps, TokenFragment, Tokens8};
use super::map::{Block, Map, Set};
use super::worker::Worker;
use crate::device::shared::{
    copy_async_b128, copy_async_commit, copy_async_wait, load_shared_b32, load_shared_b128,
    store_shared_b128,
};
use crate::device::warp::{FULL_MASK, lane_id, sync_warp, warp_shuffle_idx, warp_shuffle_xor};
use crate::math::each::each;
use crate::state::{B16, Head, Share, StateElement};

/// A fragment of S in a block's warps.
pub(crate) type StateFragment<B> = <<B as Block>::State as StateRows>::Fragment;

/// Rows of S that a warp owns, by their elements in shared memory: 16-bit, K-last; or f32 in either layout
/// ([`super::state_f32`]).
pub(crate) trait StateRows: StateElement {
    /// 32 channels of 16 rows of S, 8 channels of rows r and r + 8 to a lane.
    type Fragment: Copy;
    /// A fragment as the left factor of a product.
    type Factors: Copy;

    /// Starts copying the warp's rows of S to shared memory; stores zeros for a `fresh` row.
    ///
    /// # Safety
    /// The head is a live state unless the row is fresh.
    unsafe fn copy<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        fresh: bool,
    );

    /// This lane's part of a fragment of a tile.
    ///
    /// # Safety
    /// The warp has waited for its copies of the state.
    unsafe fn load<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        tile: usize,
        fragment: usize,
    ) -> Self::Fragment;

    fn factors(fragment: Self::Fragment) -> Self::Factors;

    /// `sum` + S · tokensᵀ.
    fn product(sum: [f32; 4], state: Self::Factors, tokens: TokenFragment) -> [f32; 4];

    /// (e) on a fragment, for one set of tokens after the other, rounded once; returns `state` unchanged, bit for bit, if `moved`
    /// is 0.
    fn advance<const SETS: usize>(
        state: (Self::Fragment, bool),
        sets: [(Steps, [f32; 8], TokenFragment); SETS],
        moved: u32,
    ) -> Self::Fragment;

    /// Bytes between the f32 of a lane's first and fifth channel of a fragment, and between neighbouring lanes.
    const CHANNELS: [u32; 2];

    /// Stores a fragment of a tile.
    ///
    /// # Safety
    /// The head is a live state.
    unsafe fn store<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        at: (usize, usize),
        next: Self::Fragment,
    );

    /// Stores a fragment of a tile in shared memory, where [`Self::load`] finds it.
    ///
    /// # Safety
    /// The warp has waited for its copies of the state.
    unsafe fn leave<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        at: (usize, usize),
        next: Self::Fragment,
    );

    /// Stores two neighbouring fragments of a tile, from `pair` · 2. All lanes of the warp call it.
    ///
    /// # Safety
    /// The head is a live state.
    unsafe fn store_pair<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        at: (usize, usize),
        fragments: [Self::Fragment; 2],
    );

    /// [`Self::copy`] from 16-bit elements, which [`Self::widen_rows`] then converts to those of S. This and the following
    /// functions are called only if the pool's elements differ from those of S ([`Worker::widens`]).
    ///
    /// # Safety
    /// As for [`Self::copy`].
    unsafe fn copy_narrow<B: Block<State = Self>, const TILES16: usize>(
        _: &Worker<B, TILES16>,
        _: Head,
        _: bool,
    ) {
    }

    /// Converts the warp's rows, as copied by [`Self::copy_narrow`], to elements of S.
    ///
    /// # Safety
    /// The warp has waited for its copies of the state.
    unsafe fn widen_rows<B: Block<State = Self>, const TILES16: usize>(_: &Worker<B, TILES16>) {}

    /// A fragment rounded as [`Self::store_narrow`] stores it.
    fn rounded<B: Block<State = Self>, const TILES16: usize>(
        _: &Worker<B, TILES16>,
        fragment: Self::Fragment,
    ) -> Self::Fragment {
        fragment
    }

    /// [`Self::store`] as 16-bit elements, rounded.
    ///
    /// # Safety
    /// As for [`Self::store`].
    unsafe fn store_narrow<B: Block<State = Self>, const TILES16: usize>(
        _: &Worker<B, TILES16>,
        _: Head,
        _: (usize, usize),
        _: Self::Fragment,
    ) {
    }
}

/// (e): the operands of G S₀ + Σ δ k̂ᵀ, for one set of tokens after the other.
pub struct Advance<const TILES16: usize, const SETS: usize = 1> {
    pub sets: [AdvanceBySet<TILES16>; SETS],
    /// All ones if there is any token, else 0: the state then stays unchanged, bit for bit. See [`mask`].
    pub moved: u32,
    pub state_f16: bool,
}

/// The operands of a set.
#[derive(Clone, Copy)]
pub struct AdvanceBySet<const TILES16: usize> {
    /// δ as factors of k.
    pub steps: [Steps; TILES16],
    pub decays: Decays,
    pub keys: Tokens8,
}

/// All ones if `is`, else 0, from a shuffle: docs/compiler.md, Masks. For [`Worker::advance_by`]. All lanes of the warp call it
/// with the same condition.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn mask(is: bool) -> u32 {
    let mask = if is { u32::MAX } else { 0 };
    warp_shuffle_idx(f32::from_bits(mask), 0).to_bits()
}

/// Γ, the decay of S₀ up to the last token.
#[derive(Clone, Copy)]
pub enum Decays {
    Head(f32),
    /// `[K]` f32 in shared memory, at this address.
    Channels(u32),
}

impl Decays {
    /// The decays of this lane's 8 channels of a fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn of_fragment<S: StateRows>(&self, fragment: usize) -> [f32; 8] {
        match *self {
            Self::Head(decay) => [decay; 8],
            Self::Channels(address) => {
                let [later, lane] = S::CHANNELS;
                let address = address + 128 * fragment as u32 + lane_id() % 4 * lane;
                let [[a, b, c, d], [e, f, g, h]] =
                    [load_shared_b128(address), load_shared_b128(address + later)];
                [a, b, c, d, e, f, g, h].map(f32::from_bits)
            }
        }
    }
}

impl<B: Block, const TILES16: usize> Worker<B, TILES16> {
    /// Starts copying the warp's rows of S to shared memory; stores zeros for a `fresh` row.
    ///
    /// # Safety
    /// The head is a live state unless the row is fresh.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn copy_state(&self, head: Head, fresh: bool) {
        B::State::copy(self, head, fresh);
        copy_async_commit();
    }

    /// Waits for the state's copies.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn wait_for_state() {
        copy_async_wait::<0>();
        sync_warp(FULL_MASK);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn state(&self, tile: usize, fragment: usize) -> StateFragment<B> {
        B::State::load(self, tile, fragment)
    }

    /// (c), and the operands that advance S₀ over the tokens of `set`; if `moved` is 0, S₀ stays.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn advance_by(
        &self,
        set: Set,
        residuals: &[Split; TILES16],
        keys: Tokens8,
        moved: u32,
    ) -> Advance<TILES16> {
        let solution = Map::<B>::solution(set);
        let mut steps = [Steps::ZERO; TILES16];
        let deltas = Self::load_deltas(set);
        each!(tile in 0..TILES16 => {
            steps[tile] = Steps::new(residuals[tile].times([0.0; 4], deltas), keys);
        });
        let decays = if B::PER_CHANNEL {
            Decays::Channels(Map::<B>::kept())
        } else {
            Decays::Head(f32::from_bits(load_shared_b32(solution.decay())))
        };
        Advance {
            sets: [AdvanceBySet {
                steps,
                decays,
                keys,
            }],
            moved,
            state_f16: self.state_f16,
        }
    }

    /// T of a set, which turns v − S k̂ into factors of k: see [`super::map::Solution::step_factors`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_deltas(set: Set) -> SplitMatrix {
        let solution = Map::<B>::solution(set);
        let place = 4 * (lane_id() / 4);
        let factor = f32::from_bits(load_shared_b32(solution.step_factors() + place));
        SplitMatrix::load(solution.delta(), factor)
    }

    /// Fragment `fragment` of `tile` of the advanced state; `state` is the fragment before.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn advance_fragment<const SETS: usize>(
        advance: &Advance<TILES16, SETS>,
        tile: usize,
        fragment: usize,
        state: StateFragment<B>,
    ) -> StateFragment<B> {
        let mut sets = [(Steps::ZERO, [0.0; 8], TokenFragment::NONE); SETS];
        each!(i in 0..SETS => {
            let set = &advance.sets[i];
            let (keys, decays) = (
                set.keys.channels(fragment),
                set.decays.of_fragment::<B::State>(fragment),
            );
            sets[i] = (set.steps[tile], decays, keys);
        });
        let state = (state, advance.state_f16);
        B::State::advance(state, sets, advance.moved)
    }

    /// Advances S₀ and stores it; its copies have been waited for.
    ///
    /// # Safety
    /// The head is a live state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_state<const SETS: usize>(
        &self,
        advance: &Advance<TILES16, SETS>,
        head: Head,
    ) {
        each!(pair in 0..Self::FRAGMENTS / 2 => {
            each!(tile in 0..TILES16 => {
                // Not by `map`, which takes more registers.
                let [one, two] = [2 * pair, 2 * pair + 1];
                let first = Self::advance_fragment(advance, tile, one, self.state(tile, one));
                let second = Self::advance_fragment(advance, tile, two, self.state(tile, two));
                B::State::store_pair(self, head, (tile, pair), [first, second]);
            });
            // A load fence: docs/compiler.md.
            sync_warp(FULL_MASK);
        });
    }

    /// Stores a fragment of a tile in shared memory, where [`Self::state`] finds it.
    ///
    /// # Safety
    /// The warp has waited for its copies of the state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn leave_fragment(&self, tile: usize, fragment: usize, next: StateFragment<B>) {
        B::State::leave(self, (tile, fragment), next);
    }

    /// Stores a fragment of a tile to global memory.
    ///
    /// # Safety
    /// The head is a live state.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_fragment(
        &self,
        head: Head,
        tile: usize,
        fragment: usize,
        next: StateFragment<B>,
    ) {
        B::State::store(self, head, (tile, fragment), next);
    }
}

/// 16-bit states, K-last.
impl<B: Block<State = B16>, const TILES16: usize> Worker<B, TILES16> {
    /// Chunks of 8 channels of a row of S.
    const CHUNKS: u32 = B::K / 8;

    /// This lane's chunk of whole rows, a row, and its place in shared memory, in the `i`-th turn of a warp's pass over its rows:
    /// accesses cover whole sectors, and lines, of global memory.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_rows(&self, i: u32) -> (Share, u32, u32) {
        let chunk = lane_id() % Self::CHUNKS;
        let row = i * (32 / Self::CHUNKS) + lane_id() / Self::CHUNKS;
        let share = Share {
            lane: chunk,
            lanes: Self::CHUNKS,
            first: 0,
        };
        let place = Map::<B>::state(self.warp, row, chunk);
        (share, self.first + row, place)
    }

    const ROW_TURNS: u32 = B::ROWS * Self::CHUNKS / 32;

    /// Shared-memory address of this lane's fragment: channels 8c .. 8c+8 in row 8 `half` + r of a tile.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn fragment(&self, tile: usize, fragment: usize, half: usize) -> u32 {
        let row = (16 * tile + 8 * half) as u32 + lane_id() / 4;
        let chunk = 4 * fragment as u32 + lane_id() % 4;
        Map::<B>::state(self.warp, row, chunk)
    }
}

impl StateRows for B16 {
    type Fragment = Fragment;
    type Factors = Fragment;

    const CHANNELS: [u32; 2] = [16, 32];

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn copy<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        fresh: bool,
    ) {
        each!(i in 0..Worker::<B, TILES16>::ROW_TURNS => {
            let (share, row, place) = worker.of_rows(i);
            // SAFETY: the caller's promise; the warp reads them after it has waited.
            unsafe {
                if fresh {
                    store_shared_b128(place, [0; 4]);
                } else if worker.wide_state {
                    let element = row * B::K + 8 * share.lane;
                    copy_async_b128(place, head.address + 2 * element as u64);
                } else {
                    let [a, b, c, d, ..] = head.load::<B16>(share, row, true);
                    store_shared_b128(place, [a, b, c, d]);
                }
            }
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        tile: usize,
        fragment: usize,
    ) -> Fragment {
        [0, 1].map(|half| load_shared_b128(worker.fragment(tile, fragment, half)))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn factors(fragment: Fragment) -> Fragment {
        fragment
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn product(sum: [f32; 4], state: Fragment, tokens: TokenFragment) -> [f32; 4] {
        tokens.times_state(sum, state)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn advance<const SETS: usize>(
        state: (Fragment, bool),
        sets: [(Steps, [f32; 8], TokenFragment); SETS],
        moved: u32,
    ) -> Fragment {
        let mut next = Steps::advance(state, sets);
        let (state, _) = state;
        each!(half in 0..2 => {
            each!(j in 0..4 => {
                next[half][j] = next[half][j] & moved | state[half][j] & !moved;
            });
        });
        next
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        (tile, fragment): (usize, usize),
        next: Fragment,
    ) {
        let share = Share::of(lane_id(), 4).from(32 * fragment as u32);
        each!(half in 0..2 => {
            let [a, b, c, d] = next[half];
            let row = worker.first + (16 * tile + 8 * half) as u32 + lane_id() / 4;
            head.store::<Self>(share, row, [a, b, c, d, 0, 0, 0, 0]);
        });
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn leave<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        (tile, fragment): (usize, usize),
        next: Fragment,
    ) {
        each!(half in 0..2 => {
            // SAFETY: the caller's promise; only this lane accesses the fragment.
            unsafe { store_shared_b128(worker.fragment(tile, fragment, half), next[half]) };
        });
    }

    /// Lanes of neighbouring rows exchange words, so that 8 lanes store 128 bytes of one row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_pair<B: Block<State = Self>, const TILES16: usize>(
        worker: &Worker<B, TILES16>,
        head: Head,
        (tile, pair): (usize, usize),
        fragments: [Fragment; 2],
    ) {
        // Masks: docs/compiler.md.
        let odd = 0u32.wrapping_sub(lane_id() / 4 % 2);
        let share = Share::of(lane_id(), 8).from(64 * pair as u32);
        each!(half in 0..2 => {
            let (mut even_row, mut odd_row) = ([0; 8], [0; 8]);
            each!(j in 0..4 => {
                let (first, second) = (fragments[0][half][j], fragments[1][half][j]);
                let exchanged = (first ^ second) & odd;
                let (own, others) = (first ^ exchanged, second ^ exchanged);
                let got = warp_shuffle_xor(f32::from_bits(others), 4).to_bits();
                let exchanged = (own ^ got) & odd;
                (even_row[j], odd_row[j]) = (own ^ exchanged, got ^ exchanged);
            });
            let row = worker.first + (16 * tile + 8 * half) as u32 + lane_id() / 8 * 2;
            head.store::<Self>(share, row, even_row);
            head.store::<Self>(share, row + 1, odd_row);
        });
    }
}

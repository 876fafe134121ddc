//! A warp that owns some tiles of 16 rows of S. Its products, from S to o, stay within the four lanes of a row.

use core::marker::PhantomData;

use super::fragments::{Split, SplitMatrix, Tokens8};
use super::map::{Block, Map, Set};
use super::state::{StateFragment, StateRows};
use crate::constants::Element;
use crate::device::float::fma;
use crate::device::shared::{load_shared_b16, load_shared_b32, load_shared_b64, store_shared_b32};
use crate::device::thread::thread_idx_x;
use crate::device::warp::{FULL_MASK, lane_id, sync_warp};
use crate::math::each::each;
use crate::math::elements::Raw;
use crate::step::StepConstants;

/// Products of a warp's tiles with 8 tokens: a lane has rows r and r + 8, tokens 2c and 2c + 1.
pub type Products<const TILES16: usize> = [[f32; 4]; TILES16];

/// This warp.
pub struct Worker<B, const TILES16: usize> {
    block: PhantomData<B>,
    pub warp: u32,
    /// First row of S.
    pub first: u32,
    pub wide_io: bool,
    pub wide_state: bool,
    /// The state in shared memory is f16, not bf16.
    pub state_f16: bool,
    /// The state in shared memory is V-last; never true for 16-bit states.
    pub v_last: bool,
    /// The state is f32 in shared memory, and 16-bit in the pool.
    pub widens: bool,
    /// The state in the pool is f16, not bf16.
    pub pool_f16: bool,
}

impl<B: Block, const TILES16: usize> Worker<B, TILES16> {
    /// Fragments of a row of S.
    pub const FRAGMENTS: usize = (B::K / 32) as usize;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(c: &StepConstants, tile: u32) -> Self {
        let warp = thread_idx_x() / 32;
        Self {
            block: PhantomData,
            warp,
            first: (tile * B::WARPS + warp) * B::ROWS,
            wide_io: c.wide_io != 0,
            wide_state: c.wide_state != 0,
            state_f16: Map::<B>::is_f16(c),
            v_last: Map::<B>::F32_STATE && c.state_v_last != 0,
            widens: Map::<B>::widens(c),
            pool_f16: c.state_f16 != 0,
        }
    }

    /// S₀ · kᵀ. `fragments` is [`Self::FRAGMENTS`].
    ///
    /// # Safety
    /// The tokens are in shared memory, and the copies of the state have been started.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn key_products(&self, keys: Tokens8, fragments: usize) -> Products<TILES16> {
        Self::wait_for_state();
        let mut products = [[0.0; 4]; TILES16];
        each!(fragment in 0..fragments => {
            let k = keys.fragment(fragment);
            each!(tile in 0..TILES16 => {
                let s = B::State::factors(self.state(tile, fragment));
                products[tile] = B::State::product(products[tile], s, k);
            });
        });
        products
    }

    /// S · kᵀ and S · qᵀ, where S is `state` of each tile and fragment of S₀. `fragments` is [`Self::FRAGMENTS`].
    ///
    /// # Safety
    /// As for [`Self::key_products`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn products(
        &self,
        keys: Tokens8,
        queries: Tokens8,
        fragments: usize,
        state: impl Fn(usize, usize, StateFragment<B>) -> StateFragment<B>,
    ) -> [Products<TILES16>; 2] {
        Self::wait_for_state();
        let (mut sk, mut sq) = ([[0.0; 4]; TILES16], [[0.0; 4]; TILES16]);
        each!(fragment in 0..fragments => {
            let (k, q) = (keys.fragment(fragment), queries.fragment(fragment));
            each!(tile in 0..TILES16 => {
                let s = state(tile, fragment, self.state(tile, fragment));
                let s = B::State::factors(s);
                sk[tile] = B::State::product(sk[tile], s, k);
                sq[tile] = B::State::product(sq[tile], s, q);
            });
        });
        [sk, sq]
    }

    /// Token, and row among the warp's rows, of element `i` of a product with `tile`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn place_of(tile: usize, i: usize) -> (u32, u32) {
        let t = lane_id() % 4 * 2 + i as u32 % 2;
        (t, 16 * tile as u32 + 8 * (i as u32 / 2) + lane_id() / 4)
    }

    /// (b): v − S k̂ of every tile, as factors of products.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn residuals(
        &self,
        set: Set,
        sk: &Products<TILES16>,
        element: u32,
    ) -> [Split; TILES16] {
        let mut residuals = [Split::ZERO; TILES16];
        let factors = token_factors(Map::<B>::solution(set).key_factors());
        each!(tile in 0..TILES16 => {
            let mut r = [0.0; 4];
            each!(i in 0..4 => {
                let (t, row) = Self::place_of(tile, i);
                let v = load_value(self.value_address(set, t, row, element), element);
                r[i] = fma(-factors[i % 2], sk[tile][i], v);
            });
            residuals[tile] = Split::new(r);
        });
        residuals
    }

    /// (d): o of the tokens of `set`, from v − S k̂ and S · qᵀ, stored in place of their values. All lanes of the warp call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn outputs(&self, set: Set, residuals: &[Split; TILES16], sq: &Products<TILES16>) {
        let solution = Map::<B>::solution(set);
        let f32s = Element::F32 as u32;
        // SAFETY: the caller's promise; o takes the place of v once every lane has read its own.
        unsafe {
            let factors = token_factors(solution.query_factors());
            let weights = SplitMatrix::load(solution.output(), 1.0);
            sync_warp(FULL_MASK);
            each!(tile in 0..TILES16 => {
                let mut o = [0.0; 4];
                each!(i in 0..4 => o[i] = factors[i % 2] * sq[tile][i]);
                let o = residuals[tile].times(o, weights);
                each!(i in 0..4 => {
                    let (t, row) = Self::place_of(tile, i);
                    store_shared_b32(self.value_address(set, t, row, f32s), o[i].to_bits());
                });
            });
        }
    }
}

/// Loads one element from shared memory.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_value(address: u32, element: u32) -> f32 {
    let bits = if element == Element::F32 as u32 {
        load_shared_b32(address)
    } else {
        load_shared_b16(address) as u32
    };
    let [value] = Raw([bits]).to_f32(element);
    value
}

/// Loads the elements of an `[8]` for tokens 2c and 2c + 1.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn token_factors(address: u32) -> [f32; 2] {
    load_shared_b64(address + lane_id() % 4 * 8).map(f32::from_bits)
}

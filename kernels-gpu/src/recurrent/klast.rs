//! Token by token on K-last states, which stay in registers between tokens.

use core::marker::PhantomData;

use super::gates::LaneGates;
use super::prepared::{Prepared, description};
use super::slots::{Slots, token_slot};
use super::tokens::{Decays, Tokens, clear_rest_of_tile};
use crate::device::float::fma;
use crate::device::rarely;
use crate::device::shared::{
    load_shared_b32, load_shared_b128, store_shared_b32, store_shared_b128,
};
use crate::device::thread::{sync_threads, thread_idx_x};
use crate::launch::{Description, Kernel, Layout};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, Raw, load};
use crate::math::range::{may_overflow, overflow, shrinking, shrunk, times};
use crate::math::reduce::{
    butterfly_sum, butterfly_sum_both, butterfly_sum_pairs, butterfly_sum_small, dot_parts,
};
use crate::row::Row;
use crate::state::{Share, StateElement, Tile, check_k_last, lanes_of, widen_rows};
use crate::step::{StepConstants, StepParams};

/// K-last states: `ROWS` rows of S per group of [`lanes_of`] lanes; `THREADS` per block.
///
/// With one new token and no previous one, each group loads the token into its own registers. Otherwise tokens are prepared in
/// shared memory, each by one group for the whole block; then all groups process them in order.
pub struct KLast<
    G,
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize = 1,
>(PhantomData<(G, S)>);

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize,
> KLast<G, S, K, V, ROWS, THREADS, PARTS>
{
    /// Lanes of a group.
    const LANES: u32 = lanes_of(K, PARTS);
    const GROUPS: u32 = THREADS / Self::LANES;
    const GROUPS_OF_WARP: u32 = 32 / Self::LANES;
    /// Whether rows are stored with one base ([`crate::state::Rows`]). f32 updates of several tokens take 3 to 4 % longer so.
    const ONE_BASE: bool = S::BYTES == 2;
    /// Whether the load-time constants decide how many registers a thread has: [`StepConstants::blocks_of_two_warps`].
    const TWO_WARPS: bool = S::BYTES == 2 && K == 128 && THREADS == 64;

    /// Stores this group's rows to every destination of the state after a token: see [`Slots::after`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_after(
        slots: &Slots,
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        after: (u32, bool, u64),
        states: &Rows<ROWS, PARTS>,
        (share, first): (Share, u32),
    ) {
        slots.after::<S>(c, params, row, [V, K], after, |head| {
            if const { Self::ONE_BASE } {
                let rows = head.rows::<S>(share, first);
                each!(r in 0..ROWS => {
                    rows.store_row::<S, PARTS>(c, r, states[r]);
                });
            } else {
                each!(r in 0..ROWS => {
                    head.store_row::<S, PARTS>(c, share, first + r as u32, states[r]);
                });
            }
        });
    }

    /// Loads the first token that this group prepares (token index = group), and v of the group's rows for token index
    /// `share.lane`. A missing token is replaced by the nearest one.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load_turn(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        tokens: &Tokens,
        share: Share,
        first: u32,
    ) -> (RawToken<PARTS>, Raw<ROWS>) {
        let group = thread_idx_x() / Self::LANES;
        let v = tokens.v.at(tokens.nearest(share.lane), first);
        (
            RawToken::load::<G, S, K>(c, params, row, tokens, tokens.nearest(group), share),
            load::<ROWS>(v, c.v_element, c.wide_io != 0),
        )
    }

    /// Prepares all of `tokens` in shared memory, after the `before` tokens that are there already. The groups take turns; their
    /// first turn is loaded already. All threads of the block call it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn prepare(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        (tokens, before): (&Tokens, u32),
        (mut raw, mut v): (RawToken<PARTS>, Raw<ROWS>),
        (share, first): (Share, u32),
    ) {
        let group = thread_idx_x() / Self::LANES;
        let smem = Self::token(c, before);
        let values = smem + Self::VALUES + group * ROWS as u32 * 4;
        // SAFETY: the caller's promise; each token's bytes have one writer, and each v too.
        unsafe {
            let mut t = share.lane;
            while t < tokens.count {
                let v_of_rows = v.to_f32(c.v_element);
                each!(r in 0..ROWS => {
                    let address = values + t * Self::token_bytes(c) + r as u32 * 4;
                    store_shared_b32(address, v_of_rows[r].to_bits());
                });
                t += Self::LANES;
                if t < tokens.count {
                    v = load::<ROWS>(tokens.v.at(t, first), c.v_element, c.wide_io != 0);
                }
            }
            // All lanes of a warp stay together: a group without a token repeats the last one.
            let mut t = group;
            let is_due = |t: u32| t / Self::GROUPS_OF_WARP * Self::GROUPS_OF_WARP < tokens.count;
            while is_due(t) {
                let token = raw.values::<G>(c, Self::LANES, false);
                let smem = smem + t * Self::token_bytes(c);
                if t < tokens.count {
                    store_parts(smem, share, token.k);
                    store_parts(smem + Self::Q, share, token.q);
                    if G::per_channel(c) {
                        store_channels(smem + Self::DECAY, share, token.decay);
                    }
                    if share.lane == 0 {
                        Self::store_factors(c, smem, token.factors, token.slot);
                    }
                }
                t += Self::GROUPS;
                if is_due(t) {
                    let nearest = tokens.nearest(t);
                    raw = RawToken::load::<G, S, K>(c, params, row, tokens, nearest, share);
                }
            }
        }
    }

    /// Loads prepared token `i`, and v of this group's rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn prepared(c: &StepConstants, i: u32, share: Share) -> (Token<PARTS>, [f32; ROWS]) {
        let smem = Self::token(c, i);
        let group = thread_idx_x() / Self::LANES;
        let factors = Self::factors(c, smem);
        let mut v = [0.0; ROWS];
        each!(r in 0..ROWS => {
            let address = smem + Self::VALUES + (group * ROWS as u32 + r as u32) * 4;
            v[r] = f32::from_bits(load_shared_b32(address));
        });
        let slot = Self::slot(c, smem);
        let token = Token {
            slot,
            k: load_parts(smem, share),
            q: load_parts(smem + Self::Q, share),
            decay: if G::per_channel(c) {
                load_channels(smem + Self::DECAY, share)
            } else {
                [0.0; 8]
            },
            factors,
        };
        (token, v)
    }
}

impl<
    G: Decays,
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize,
> Prepared for KLast<G, S, K, V, ROWS, THREADS, PARTS>
{
    type Decays = G;
    const K: u32 = K;
    const TILE: u32 = THREADS / lanes_of(K, PARTS) * ROWS as u32;
    const TOKENS: u32 = 0;
}

/// Panics if a kernel that may have one decay per key channel has rows of several `parts`: α has one part.
pub(crate) const fn check_parts<D: Decays>(parts: usize) {
    assert!(
        parts == 1 || matches!(D::OF_CHANNELS, Some(false)),
        "α is of one part"
    );
}

/// A token in a lane's registers: the lane's 8 channels of each part.
#[derive(Clone, Copy)]
pub(crate) struct Token<const PARTS: usize = 1> {
    pub k: [[f32; 8]; PARTS],
    pub q: [[f32; 8]; PARTS],
    /// KDA's α, which has one part; GDN's α is in the factors.
    pub decay: [f32; 8],
    pub factors: Factors,
    /// The token slot for the state after the token.
    pub slot: u64,
}

/// A token, unconverted.
#[derive(Clone, Copy)]
struct RawToken<const PARTS: usize> {
    k: [Raw<8>; PARTS],
    q: [Raw<8>; PARTS],
    q_element: u32,
    gates: LaneGates,
    /// The token slot for the state after the token.
    slot: u64,
}

impl<const PARTS: usize> RawToken<PARTS> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn load<G: Decays, S: StateElement, const K: u32>(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        tokens: &Tokens,
        t: u32,
        share: Share,
    ) -> Self {
        let wide = c.wide_io != 0;
        Self {
            k: share.load_parts::<S, PARTS>(tokens.k.at(t, 0), c.k_element, wide),
            q: share.load_parts::<S, PARTS>(tokens.q.at(t, 0), tokens.q.element(), wide),
            gates: LaneGates::load::<G, S, K>(c, params, row, tokens, t, share),
            q_element: tokens.q.element(),
            slot: token_slot(c, params, row.b, t),
        }
    }

    /// k and q in f32, and whether Σk² or Σq² [`may_overflow`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn channels(&self, c: &StepConstants) -> (KeyAndQuery<PARTS>, bool) {
        let channels = (
            parts_to_f32(self.k, c.k_element),
            parts_to_f32(self.q, self.q_element),
        );
        let elements = [c.k_element, self.q_element];
        (channels, may_overflow(c.l2norm != 0, elements))
    }

    /// Converts the token. All lanes of the warp call it. `together`: all groups of the warp have the same token, so each
    /// computes KDA's α of a part of the channels for all of them.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values<G: Decays>(self, c: &StepConstants, lanes: u32, together: bool) -> Token<PARTS> {
        let (channels, may_overflow) = self.channels(c);
        let gates = self.gates.values::<G>(c, lanes, together);
        let (channels, norms) = normable_of(may_overflow, channels, lanes);
        Token::new(c, channels, norms, gates, self.slot)
    }
}

/// Converts a lane's channels of all parts.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn parts_to_f32<const PARTS: usize>(
    raw: [Raw<8>; PARTS],
    element: u32,
) -> [[f32; 8]; PARTS] {
    raw.map(|raw| raw.to_f32(element))
}

/// Σk², Σq² and k·q over a group of `lanes` lanes (1). All lanes of the warp call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn norms<const PARTS: usize>(channels: KeyAndQuery<PARTS>, lanes: u32) -> [f32; 3] {
    butterfly_sum(own_norms(channels), 1, lanes)
}

/// A lane's terms of [`norms`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn own_norms<const PARTS: usize>((k, q): KeyAndQuery<PARTS>) -> [f32; 3] {
    [dot_parts(k, k), dot_parts(q, q), dot_parts(k, q)]
}

/// A lane's channels of k and of q, of all parts.
pub(crate) type KeyAndQuery<const PARTS: usize> = ([[f32; 8]; PARTS], [[f32; 8]; PARTS]);

/// Results of [`LaneGates::values`]: KDA's α of a lane's channels; GDN's α (KDA: 1) and β.
pub(crate) type LaneGateValues = ([f32; 8], (f32, f32));

/// A lane's channels of its group's rows of S.
type Rows<const ROWS: usize, const PARTS: usize> = [[[f32; 8]; PARTS]; ROWS];

/// k and q of a token, which a group of `lanes` lanes has, and their [`norms`]. A vector whose sum of squares is not finite is
/// multiplied by a power of two. All lanes of the warp call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn normable<const PARTS: usize>(
    c: &StepConstants,
    channels: KeyAndQuery<PARTS>,
    lanes: u32,
) -> (KeyAndQuery<PARTS>, [f32; 3]) {
    normable_of(c.l2norm != 0, channels, lanes)
}

/// [`normable`], if the sums [`may_overflow`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn normable_of<const PARTS: usize>(
    may_overflow: bool,
    mut channels: KeyAndQuery<PARTS>,
    lanes: u32,
) -> (KeyAndQuery<PARTS>, [f32; 3]) {
    let mut sums = norms(channels, lanes);
    if overflow(may_overflow, sums) {
        (channels, sums) = shrink(channels, sums, lanes);
    }
    (channels, sums)
}

/// k and q, whose [`norms`] [`overflow`], times powers of two, and their norms. All lanes of the warp call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn shrink<const PARTS: usize>(
    (mut k, mut q): KeyAndQuery<PARTS>,
    sums: [f32; 3],
    lanes: u32,
) -> (KeyAndQuery<PARTS>, [f32; 3]) {
    let powers = shrinking(sums);
    each!(part in 0..PARTS => {
        k[part] = times(k[part], powers[0]);
        q[part] = times(q[part], powers[1]);
    });
    let sums = butterfly_sum_small(own_norms((k, q)), lanes);
    ((k, q), shrunk(sums, powers))
}

impl<const PARTS: usize> Token<PARTS> {
    /// A token with a lane's channels of k and q, their [`norms`], and the gates from [`LaneGates::values`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub(crate) fn new(
        c: &StepConstants,
        (k, q): KeyAndQuery<PARTS>,
        norms: [f32; 3],
        (decay, gates): LaneGateValues,
        slot: u64,
    ) -> Self {
        Self {
            k,
            q,
            decay,
            factors: Factors::new(c.l2norm != 0, f32::from_bits(c.scale), norms, gates),
            slot,
        }
    }
}

/// Processes one token on this group's rows; returns their outputs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn step<G: Decays, const ROWS: usize, const PARTS: usize>(
    c: &StepConstants,
    states: &mut Rows<ROWS, PARTS>,
    token: Token<PARTS>,
    v: [f32; ROWS],
    lanes: u32,
) -> [f32; ROWS] {
    let decays = (G::per_channel(c), token.decay);
    let products = own_products(states, (token.k, token.q), decays);
    let products = butterfly_sum_pairs(products, 1, lanes);
    update::<G, ROWS, PARTS>(c, states, token, v, products)
}

/// [`step`] for a row's only token, from its channels and gates. The [`norms`] are summed together with S k and S q, not before
/// them. `may_overflow`: whether the norms may overflow. All lanes of the warp call it.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn only_step<G: Decays, const ROWS: usize, const PARTS: usize>(
    c: &StepConstants,
    may_overflow: bool,
    states: &mut Rows<ROWS, PARTS>,
    (mut channels, gates, v): (KeyAndQuery<PARTS>, LaneGateValues, [f32; ROWS]),
    lanes: u32,
) -> [f32; ROWS] {
    let products = own_products(states, channels, (G::per_channel(c), gates.0));
    let (mut norms, mut products) = butterfly_sum_both(own_norms(channels), products, lanes);
    if overflow(may_overflow, norms) {
        (channels, norms) = shrink(channels, norms, lanes);
        // S has already been decayed.
        let own = own_products(states, channels, (false, gates.0));
        let [sk, sq] = [0, 1].map(|of| butterfly_sum_small(own.map(|own| own[of]), lanes));
        each!(r in 0..ROWS => products[r] = [sk[r], sq[r]]);
    }
    let token = Token::new(c, channels, norms, gates, 0);
    update::<G, ROWS, PARTS>(c, states, token, v, products)
}

/// A lane's terms of S k and S q for each row; first multiplies S by `decay`, one per channel, if `decays`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn own_products<const ROWS: usize, const PARTS: usize>(
    states: &mut Rows<ROWS, PARTS>,
    (k, q): KeyAndQuery<PARTS>,
    (decays, decay): (bool, [f32; 8]),
) -> [[f32; 2]; ROWS] {
    let mut products = [[0.0; 2]; ROWS];
    each!(r in 0..ROWS => {
        if decays {
            each!(i in 0..8 => {
                states[r][0][i] *= decay[i]; // (2)
            });
        }
        products[r] = [dot_parts(states[r], k), dot_parts(states[r], q)];
    });
    products
}

/// Updates the state by a token; `products` are S k and S q. Returns the outputs.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn update<G: Decays, const ROWS: usize, const PARTS: usize>(
    c: &StepConstants,
    states: &mut Rows<ROWS, PARTS>,
    token: Token<PARTS>,
    v: [f32; ROWS],
    products: [[f32; 2]; ROWS],
) -> [f32; ROWS] {
    let per_channel = G::per_channel(c);
    let mut o = [0.0; ROWS];
    each!(r in 0..ROWS => {
        let [sk, sq] = products[r];
        let delta = token.factors.delta(v[r], sk); // (3)
        o[r] = token.factors.output(sq, delta); // (5)
        let step = delta * token.factors.k;
        each!(part in 0..PARTS => {
            let (s, k) = (&mut states[r][part], token.k[part]);
            each!(i in 0..8 => {
                // KDA's state is already decayed.
                let decayed = if per_channel {
                    s[i]
                } else {
                    token.factors.decay * s[i]
                };
                s[i] = fma(step, k[i], decayed); // (2) (4)
            });
        });
    });
    o
}

impl<
    G: Decays,
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize,
> Kernel for KLast<G, S, K, V, ROWS, THREADS, PARTS>
{
    type Params = StepParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        // Several parts of k, q and states take more than 128 registers; with K = 96 and views that are not aligned, more than
        // 168.
        min_blocks_per_sm: match (PARTS > 1, K) {
            (true, 96) => 256,
            (true, _) => 384,
            // [`StepConstants::blocks_of_two_warps`]
            (false, 128) if Self::TWO_WARPS => 1024,
            (false, _) => 512,
        } / THREADS,
        min_blocks_by_constant: Self::TWO_WARPS,
        ..description::<Self, S>(Layout::KLast, THREADS, V)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &StepParams) {
        const { check_k_last((K, PARTS), V, ROWS as u32, THREADS) };
        const { check_parts::<G>(PARTS) };
        let c = StepConstants::get();
        let tiles = const { Self::DESCRIPTION.tiles };
        let row = Row::of_block(c.h, c.ratio, c.tiled != 0, tiles);
        let group = thread_idx_x() / Self::LANES;
        let share = Share::of(thread_idx_x(), Self::LANES);
        let first = row.tile * Self::TILE + group * ROWS as u32;
        let wide = c.wide_io != 0;
        // SAFETY: the caller's promise; a group owns its ROWS rows, a lane its share of each; prepared tokens are written before
        // the barrier that precedes their reads.
        unsafe {
            let slots = Slots::load(&c, params, row.b);
            let tokens = Tokens::new(&c, params, row);
            clear_rest_of_tile(&c, params, (row, Self::TILE), THREADS);
            if !tokens.live {
                return;
            }
            let mut live = slots.live(&c, params);
            if tokens.are_none(&c) {
                rarely();
                let tile = Tile::new(false, [K, V], (row.tile * Self::TILE, Self::TILE));
                if live {
                    slots.carry::<S>(&c, params, (row.hv, tile), (thread_idx_x(), THREADS));
                }
                return;
            }
            let mut earliest = tokens;
            if c.previous_tokens != 0 {
                earliest = Tokens::previous(&c, params, row);
                live = live && earliest.live;
            }
            let start = slots.start::<S>(&c, params, (row.hv, [V, K]));
            let load_states = || {
                let from = (live, slots.is_fresh());
                start.load_start_rows::<S, ROWS, PARTS>(share, first, from)
            };
            let store_zeros = || {
                let mut t = 0;
                while t < tokens.count && share.lane == 0 {
                    let o = tokens.o.at(t, first);
                    elements::store([0.0; ROWS], o, c.o_element, wide);
                    t += 1;
                }
            };

            if c.tokens == 1 && c.previous_tokens == 0 {
                let raw = load_states();
                let token = RawToken::load::<G, S, K>(&c, params, row, &tokens, 0, share);
                let v = load::<ROWS>(tokens.v.at(0, first), c.v_element, wide);
                // Loads first: docs/compiler.md.
                if !live {
                    if share.lane == 0 {
                        elements::store([0.0; ROWS], tokens.o.at(0, first), c.o_element, wide);
                    }
                    return;
                }
                let slot = token.slot;
                let v = v.to_f32(c.v_element);
                let (mut states, o);
                // With more rows `only_step` would take too many registers: it keeps the partial S k and S q of every row until
                // they are reduced together with the norms.
                if const { ROWS * PARTS <= 2 } {
                    let (channels, may_overflow) = token.channels(&c);
                    let gates = token.gates.values::<G>(&c, Self::LANES, true);
                    states = widen_rows::<S, ROWS, PARTS>(&c, raw);
                    let of_token = (channels, gates, v);
                    o = only_step::<G, ROWS, PARTS>(
                        &c,
                        may_overflow,
                        &mut states,
                        of_token,
                        Self::LANES,
                    );
                } else {
                    let token = token.values::<G>(&c, Self::LANES, true);
                    states = widen_rows::<S, ROWS, PARTS>(&c, raw);
                    o = step::<G, ROWS, PARTS>(&c, &mut states, token, v, Self::LANES);
                }
                Self::store_after(
                    &slots,
                    &c,
                    params,
                    row,
                    (0, true, slot),
                    &states,
                    (share, first),
                );
                if share.lane == 0 {
                    elements::store(o, tokens.o.at(0, first), c.o_element, wide);
                }
                return;
            }

            // Tokens are needed before the states, and their loads do not wait for a slot.
            let turn = Self::load_turn(&c, params, row, &earliest, share, first);
            let raw = load_states();
            if !live {
                store_zeros();
                return;
            }
            Self::prepare(&c, params, row, (&earliest, 0), turn, (share, first));
            let mut kept = 0;
            if c.previous_tokens != 0 {
                kept = earliest.count;
                if tokens.count != 0 {
                    let turn = Self::load_turn(&c, params, row, &tokens, share, first);
                    Self::prepare(&c, params, row, (&tokens, kept), turn, (share, first));
                }
            }
            sync_threads();
            let mut states = widen_rows::<S, ROWS, PARTS>(&c, raw);
            if c.previous_tokens != 0 {
                each!(t in 0..kept => {
                    let (token, v) = Self::prepared(&c, t, share);
                    step::<G, ROWS, PARTS>(&c, &mut states, token, v, Self::LANES);
                });
                let write = slots.write::<S>(&c, params, (row.hv, [V, K]));
                if const { Self::ONE_BASE } {
                    let rows = write.rows::<S>(share, first);
                    each!(r in 0..ROWS => {
                        states[r] = rows.store_rounded::<S, PARTS>(&c, r, states[r]);
                    });
                } else {
                    each!(r in 0..ROWS => {
                        states[r] =
                            write.store_rounded::<S, PARTS>(&c, share, first + r as u32, states[r]);
                    });
                }
            }
            each!(t in 0..tokens.count => {
                let (token, v) = Self::prepared(&c, kept + t, share);
                let o = step::<G, ROWS, PARTS>(&c, &mut states, token, v, Self::LANES);
                let is_last = t + 1 == tokens.count;
                Self::store_after(
                    &slots,
                    &c,
                    params,
                    row,
                    (t, is_last, token.slot),
                    &states,
                    (share, first),
                );
                if share.lane == 0 {
                    elements::store(o, tokens.o.at(t, first), c.o_element, wide);
                }
            });
        }
    }
}

/// Stores a lane's 8 values in two halves of 16 bytes: each store of a group then covers consecutive addresses, without bank
/// conflicts.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn store_channels(smem: u32, share: Share, values: [f32; 8]) {
    let [a, b, c, d, e, f, g, h] = values.map(f32::to_bits);
    let own = smem + share.lane * 16;
    store_shared_b128(own, [a, b, c, d]);
    store_shared_b128(own + share.lanes * 16, [e, f, g, h]);
}

/// Loads the values that [`store_channels`] stored for this lane.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn load_channels(smem: u32, share: Share) -> [f32; 8] {
    let own = smem + share.lane * 16;
    let [a, b, c, d] = load_shared_b128(own);
    let [e, f, g, h] = load_shared_b128(own + share.lanes * 16);
    [a, b, c, d, e, f, g, h].map(f32::from_bits)
}

/// [`store_channels`] for every part, one after the other.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn store_parts<const PARTS: usize>(
    smem: u32,
    share: Share,
    values: [[f32; 8]; PARTS],
) {
    each!(i in 0..PARTS => store_channels(smem + i as u32 * share.lanes * 32, share, values[i]));
}

/// Loads the values that [`store_parts`] stored for this lane.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) unsafe fn load_parts<const PARTS: usize>(smem: u32, share: Share) -> [[f32; 8]; PARTS] {
    let mut values = [[0.0; 8]; PARTS];
    each!(i in 0..PARTS => values[i] = load_channels(smem + i as u32 * share.lanes * 32, share));
    values
}

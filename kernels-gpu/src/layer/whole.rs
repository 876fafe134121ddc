//! Kernels whose blocks have whole heads: shared memory, loads, convolution and gates, and the end of a head.

use super::Place;
use super::conv::{Part, Qkv, ThreadChannels};
use super::norm::{Scale, finish_heads};
use crate::device::shared::{dynamic_shared_mem, store_shared_b32};
use crate::device::thread::thread_idx_x;
use crate::launch::{Computes, Description, Family, Layout, Shared};
use crate::math::elements::{self, load_one};
use crate::recurrent::gates::{RawGates, load_gate};
use crate::recurrent::prepared::bytes_of_channels;
use crate::recurrent::tokens::{Decays, Tokens};
use crate::row::Row;
use crate::state::StateElement;
use crate::step::{LayerParams, StepConstants};

/// A block that has all value heads of a query/key head. Part of its shared memory, in bytes:
///
/// | from | bytes | content |
/// |---|---|---|
/// | `KEYS` | 4 K | k, f32, each channel at [`Whole::place`] |
/// | `Q` | 4 K | q, likewise |
/// | `HEADS` | `HEAD_BYTES` a head | v `[V]`; o `[V]`; GDN's α ([`Whole::values_of`]); β; sums of 32 squares |
/// | `DECAYS` of a head | `DECAY_BYTES` | KDA's α of every channel, at [`Whole::place`] |
pub trait Whole {
    /// One decay per key channel (KDA) or per value head (GDN).
    type Decays: Decays;
    const K: u32;
    const V: u32;
    /// Threads of a block, at least K and V.
    const THREADS: u32;
    /// Offset of this map in shared memory, a multiple of 16.
    const KEYS: u32;

    const Q: u32 = Self::KEYS + Self::K * 4;
    const HEADS: u32 = Self::Q + Self::K * 4;
    const O: u32 = Self::V * 4;
    const DECAY: u32 = 2 * Self::O;
    const BETA: u32 = Self::DECAY + 4;
    const SUMS: u32 = Self::BETA + 4;
    /// Bytes of a head with one decay.
    const HEAD_BYTES: u32 = (Self::SUMS + Self::V / 32 * 4).next_multiple_of(16);
    const DECAYS: u32 = Self::HEAD_BYTES;
    /// Additional bytes of a head with one decay per key channel.
    const DECAY_BYTES: u32 = bytes_of_channels::<Self::Decays>(Self::K * 4);

    /// Byte offset of channel `i` of k, q or α from channel 0 in shared memory.
    fn place(i: u32) -> u32;

    /// α of a channel (log α for deferred states), and β.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn values_of(c: &StepConstants, gates: RawGates<1>) -> ([f32; 1], f32) {
        gates.values(c)
    }

    /// Address in shared memory of the block's `r`-th value head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn head(c: &StepConstants, r: u32) -> u32 {
        let bytes = if Self::Decays::per_channel(c) {
            Self::HEAD_BYTES + Self::DECAY_BYTES
        } else {
            Self::HEAD_BYTES
        };
        dynamic_shared_mem() + Self::HEADS + r * bytes
    }

    /// Value head and key channel of the block's gate `i`; channel 0 if a head has one gate.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn gate(c: &StepConstants, i: u32) -> (u32, u32) {
        if Self::Decays::per_channel(c) {
            (i / Self::K, i % Self::K)
        } else {
            (i, 0)
        }
    }

    /// Number of gates of a value head.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn gates(c: &StepConstants) -> u32 {
        if Self::Decays::per_channel(c) {
            Self::K
        } else {
            1
        }
    }

    /// Loads this thread's first two channels of the convolution, from channel `first` on.
    ///
    /// # Safety
    /// As for [`ThreadChannels::load`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn channels(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        row: Row,
        first: u32,
    ) -> ThreadChannels<2> {
        let (dims, tiles) = ([Self::K, Self::V], (1, Self::V));
        // With K = 64 no thread has a second channel, so no loads are in its branch.
        let all = 2 * Self::K + c.ratio * Self::V > Self::THREADS;
        ThreadChannels::load(
            c,
            params,
            place,
            row,
            dims,
            tiles,
            (first, Self::THREADS, all),
        )
    }
}

/// The description of a kernel of `family` in such blocks, for states of `S`.
pub const fn description<W: Whole, S: StateElement>(family: Family, layout: Layout) -> Description {
    let computes = Computes::new(family, W::Decays::OF_CHANNELS, [W::K, W::V]);
    Description {
        max_heads: 16,
        shared_of_channels: Shared {
            per_head: W::DECAY_BYTES,
            ..Shared::NONE
        },
        shared: Shared {
            block: W::HEADS,
            per_head: W::HEAD_BYTES,
            ..Shared::NONE
        },
        ..Description::of(W::THREADS, computes.on(layout, S::ELEMENT))
    }
}

/// The registers that a thread loads before it waits for anything: two channels of the convolution, a gate, z and weight for an
/// element of o.
pub struct Ahead {
    channels: ThreadChannels<2>,
    gates: RawGates<1>,
    scale: Scale,
}

impl Ahead {
    /// # Safety
    /// `params` and `c` describe live tensors; if the row is live, nobody else writes the windows of the block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load<W: Whole>(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        row: Row,
    ) -> Self {
        let thread = thread_idx_x();
        let own = row.with_head(c, thread / W::V % c.ratio);
        let (r, channel) = W::gate(c, thread);
        Self {
            channels: W::channels(c, params, place, row, thread),
            gates: load_gates::<W>(c, params, row, (r % c.ratio, channel)),
            scale: Scale::load(c, params, own, (0, thread % W::V)),
        }
    }

    /// Stores k, q, v and the gates of all heads in shared memory, and writes the windows. Returns the scale, which the end
    /// needs.
    ///
    /// # Safety
    /// As for [`Self::load`]; the row is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn give<W: Whole>(
        self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        row: Row,
    ) -> Scale {
        let thread = thread_idx_x();
        if c.taps == 0 {
            give_qkv::<W>(c, params, row);
        } else {
            let give = |channels: &ThreadChannels<2>| {
                channels.convolve(c, |part, y| give::<W>(c, part, y));
                channels.store_windows(c, params, place);
            };
            give(&self.channels);
            let mut i = thread + 2 * W::THREADS;
            while i < 2 * W::K + c.ratio * W::V {
                give(&W::channels(c, params, place, row, i));
                i += 2 * W::THREADS;
            }
        }
        give_gates::<W>(c, thread, self.gates);
        let mut i = thread + W::THREADS;
        while i < c.ratio * W::gates(c) {
            give_gates::<W>(c, i, load_gates::<W>(c, params, row, W::gate(c, i)));
            i += W::THREADS;
        }
        self.scale
    }
}

/// Norms o, if the step has a norm, and stores it. All threads of the block call it.
///
/// # Safety
/// o of every head was written before a barrier that all threads have passed.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn finish<W: Whole>(c: &StepConstants, params: &LayerParams, row: Row, scale: Scale) {
    finish_heads(c, params, row, W::V, (scale, W::THREADS), |r| {
        (W::head(c, r) + W::O, W::head(c, r) + W::SUMS)
    });
}

/// Stores o of an inactive row.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_zeros<W: Whole>(c: &StepConstants, params: &LayerParams, row: Row) {
    let mut i = thread_idx_x();
    while i < c.ratio * W::V {
        let tokens = Tokens::new(c, &params.step, row.with_head(c, i / W::V));
        elements::store([0.0], tokens.o.at(0, i % W::V), c.o_element, false);
        i += W::THREADS;
    }
}

/// Loads the gate of the block's `r`-th value head and of a channel.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn load_gates<W: Whole>(
    c: &StepConstants,
    params: &LayerParams,
    row: Row,
    (r, channel): (u32, u32),
) -> RawGates<1> {
    let own = row.with_head(c, r);
    let tokens = Tokens::new(c, &params.step, own);
    load_gate::<W::Decays>(c, &params.step, own, (&tokens, 0), (channel, W::K))
}

/// Stores gate `i` of the block in its place.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn give_gates<W: Whole>(c: &StepConstants, i: u32, gates: RawGates<1>) {
    let (r, channel) = W::gate(c, i);
    if r >= c.ratio {
        return;
    }
    let ([decay], beta) = W::values_of(c, gates);
    let of_decay = if W::Decays::per_channel(c) {
        W::DECAYS + W::place(channel)
    } else {
        W::DECAY
    };
    store_shared_b32(W::head(c, r) + of_decay, decay.to_bits());
    if channel == 0 {
        store_shared_b32(W::head(c, r) + W::BETA, beta.to_bits());
    }
}

/// Stores a convolved channel in its place.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn give<W: Whole>(c: &StepConstants, part: &Part, y: f32) {
    let smem = dynamic_shared_mem();
    let address = match part.of {
        Qkv::Key => smem + W::KEYS + W::place(part.own),
        Qkv::Query => smem + W::Q + W::place(part.own),
        Qkv::Value => W::head(c, part.own / W::V) + part.own % W::V * 4,
    };
    store_shared_b32(address, y.to_bits());
}

/// Stores q, k and v as given.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn give_qkv<W: Whole>(c: &StepConstants, params: &LayerParams, row: Row) {
    let (smem, thread) = (dynamic_shared_mem(), thread_idx_x());
    let tokens = Tokens::new(c, &params.step, row);
    if thread < W::K {
        let [k] = load_one(tokens.k.at(0, thread), c.k_element).to_f32(c.k_element);
        let [q] = load_one(tokens.q.at(0, thread), c.q_element).to_f32(c.q_element);
        store_shared_b32(smem + W::KEYS + W::place(thread), k.to_bits());
        store_shared_b32(smem + W::Q + W::place(thread), q.to_bits());
    }
    let mut i = thread;
    while i < c.ratio * W::V {
        let tokens = Tokens::new(c, &params.step, row.with_head(c, i / W::V));
        let [v] = load_one(tokens.v.at(0, i % W::V), c.v_element).to_f32(c.v_element);
        store_shared_b32(W::head(c, i / W::V) + i % W::V * 4, v.to_bits());
        i += W::THREADS;
    }
}

//! The kinds of decay, and the tokens of a row in global memory.

use crate::device::rarely;
use crate::device::thread::thread_idx_x;
use crate::math::elements::{self, bytes_of};
use crate::row::Row;
use crate::state::slot_of;
use crate::step::{StepConstants, StepParams};

/// Whether the decay is one per key channel (KDA) or one per value head (GDN).
pub trait Decays {
    /// Whether each key channel has its own decay; `None`: a load-time constant says so.
    const OF_CHANNELS: Option<bool>;

    /// Whether the running launch has one decay per key channel.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn per_channel(c: &StepConstants) -> bool {
        match Self::OF_CHANNELS {
            Some(of_channels) => of_channels,
            None => c.per_channel != 0,
        }
    }
}

/// Decays of either kind, by a load-time constant.
pub struct Either;

impl Decays for Either {
    const OF_CHANNELS: Option<bool> = None;
}

/// Decays of kernels that are compiled for one operator.
pub trait Gating: Decays {
    /// KDA: one decay per key channel; GDN: one per value head.
    const PER_CHANNEL: bool = matches!(Self::OF_CHANNELS, Some(true));
}

/// One decay per value head: GDN's.
pub struct PerHead;

impl Decays for PerHead {
    const OF_CHANNELS: Option<bool> = Some(false);
}

impl Gating for PerHead {}

/// One decay per key channel: KDA's.
pub struct PerChannel;

impl Decays for PerChannel {
    const OF_CHANNELS: Option<bool> = Some(true);
}

impl Gating for PerChannel {}

/// One tensor of one row and head: element `i` of token t is `t · token + i` elements after `first`.
#[derive(Clone, Copy)]
pub struct Run {
    first: u64,
    token: u32,
    element: u32,
}

impl Run {
    /// Address of element `i` of token `t`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn at(self, t: u32, i: u32) -> u64 {
        self.first + (t as u64 * self.token as u64 + i as u64) * bytes_of(self.element) as u64
    }

    /// The same from token `t` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn from(self, t: u32) -> Self {
        Self {
            first: self.at(t, 0),
            ..self
        }
    }

    /// [`crate::constants::Element`] of the tensor.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn element(self) -> u32 {
        self.element
    }
}

/// Tokens of one row and value head.
#[derive(Clone, Copy)]
pub struct Tokens {
    /// q of the query/key head; previous tokens have no q, and k in its place.
    pub q: Run,
    /// k of the query/key head.
    pub k: Run,
    /// v of the value head.
    pub v: Run,
    /// The gate of the value head.
    pub g: Run,
    /// β, or its logit, of the value head.
    pub b: Run,
    /// o of the value head.
    pub o: Run,
    /// Index of the first token among the tokens of its tensors' row.
    pub start: u32,
    /// Number of tokens; 0 for a packed row without tokens.
    pub count: u32,
    /// Whether the row's lengths are consistent, and not above the largest number of tokens of a row.
    pub live: bool,
    are_previous: bool,
}

impl Tokens {
    /// The tokens of this launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn new(c: &StepConstants, params: &StepParams, row: Row) -> Self {
        let (mut start, mut count, mut live) = (0, c.tokens, true);
        if c.cu_seqlens_index != 0 {
            // SAFETY: the caller's promise; `cu_seqlens` has B + 1 elements.
            let (first, end) = unsafe {
                let at = |i| slot_of(params.cu_seqlens, c.cu_seqlens_index, i, 0);
                (at(row.b as u64), at(row.b as u64 + 1))
            };
            live =
                first <= end && end <= params.total_tokens as u64 && end - first <= c.tokens as u64;
            start = first as u32;
            count = if live { (end - first) as u32 } else { 0 };
        }
        Self::of_head(c, params, row, (start, count, live))
    }

    /// Whether the launch only carries the row's state on: a packed row with neither tokens nor previous tokens.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn are_none(&self, c: &StepConstants) -> bool {
        c.cu_seqlens_index != 0 && c.previous_tokens == 0 && self.count == 0
    }

    /// Whether they are the tokens of this launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn are_new(&self) -> bool {
        !self.are_previous
    }

    /// The same tokens for the value head of `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn with_head(&self, c: &StepConstants, params: &StepParams, row: Row) -> Self {
        if self.are_previous {
            return Self::previous_of_head(c, params, row, (self.count, self.live));
        }
        Self::of_head(c, params, row, (self.start, self.count, self.live))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn of_head(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        (start, count, live): (u32, u32, bool),
    ) -> Self {
        let run = |base, stride: u32, token: u32, head: u32, element| Run {
            first: row.at(base, stride, head, 0, element)
                + start as u64 * token as u64 * bytes_of(element) as u64,
            token,
            element,
        };
        Self {
            q: run(params.q, c.q_row, c.q_token, row.h * c.q_head, c.q_element),
            k: run(params.k, c.k_row, c.k_token, row.h * c.k_head, c.k_element),
            v: run(params.v, c.v_row, c.v_token, row.hv * c.v_head, c.v_element),
            g: run(params.g, c.g_row, c.g_token, row.hv * c.g_head, c.g_element),
            b: run(params.b, c.b_row, c.b_token, row.hv, c.b_element),
            o: run(params.o, c.o_row, c.o_token, row.hv * c.o_head, c.o_element),
            start,
            count,
            live,
            are_previous: false,
        }
    }

    /// The tokens from token `t` on, at most `most`. Only the runs and `count` change; `start` is still that of the row.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn from(&self, t: u32, most: u32) -> Self {
        Self {
            q: self.q.from(t),
            k: self.k.from(t),
            v: self.v.from(t),
            g: self.g.from(t),
            b: self.b.from(t),
            o: self.o.from(t),
            count: self.count.saturating_sub(t).min(most),
            ..*self
        }
    }

    /// Token `t`; the last token if there are fewer, 0 if there are none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn nearest(&self, t: u32) -> u32 {
        if t < self.count {
            t
        } else {
            self.count.max(1) - 1
        }
    }

    /// The kept previous tokens, which have neither q nor o. Their number is 0 if the launch has none.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn previous(c: &StepConstants, params: &StepParams, row: Row) -> Self {
        // SAFETY: the caller's promise; `keep` has B elements.
        let keep = unsafe { slot_of(params.keep, c.keep_index, row.b as u64, 0) };
        let live = keep <= c.previous_tokens as u64;
        let count = if live { keep as u32 } else { 0 };
        Self::previous_of_head(c, params, row, (count, live))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn previous_of_head(
        c: &StepConstants,
        params: &StepParams,
        row: Row,
        (count, live): (u32, bool),
    ) -> Self {
        let run = |base, stride, token, head, element| Run {
            first: row.at(base, stride, head, 0, element),
            token,
            element,
        };
        let k = run(
            params.previous_k,
            c.previous_k_row,
            c.previous_k_token,
            row.h * c.previous_k_head,
            c.k_element,
        );
        let v = run(
            params.previous_v,
            c.previous_v_row,
            c.previous_v_token,
            row.hv * c.previous_v_head,
            c.v_element,
        );
        Self {
            q: k,
            k,
            v,
            g: run(
                params.previous_g,
                c.previous_g_row,
                c.previous_g_token,
                row.hv * c.previous_g_head,
                c.g_element,
            ),
            b: run(
                params.previous_b,
                c.previous_b_row,
                c.previous_b_token,
                row.hv,
                c.b_element,
            ),
            o: v,
            start: 0,
            count,
            live,
            are_previous: true,
        }
    }
}

/// Stores zeros for o of packed tokens that belong to no row: those before the first bound, and those from the last bound on.
/// Blocks take turns at these tokens: turn `turn` of `turns` has every `turns`-th one. The block has `channels` elements of o of
/// a token; `at` returns the index of an element. A thread passes its index and the number of threads.
///
/// A bound outside the range of tokens is ignored.
///
/// # Safety
/// `params` and `c` describe live tensors; no other block with the same turn has these channels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn clear_rest(
    c: &StepConstants,
    params: &StepParams,
    (turn, turns): (u32, u32),
    (thread, threads): (u32, u32),
    channels: u32,
    at: impl Fn(u32) -> u32,
) {
    if c.cu_seqlens_index == 0 {
        return;
    }
    let total = params.total_tokens as u64;
    // SAFETY: the caller's promise; `cu_seqlens` has B + 1 elements.
    let [first, end] = [0, params.rows as u64]
        .map(|i| unsafe { slot_of(params.cu_seqlens, c.cu_seqlens_index, i, 0) });
    let (first, end) = (
        if first <= total { first } else { 0 },
        if end <= total { end } else { total },
    );
    if first > end || turn as u64 >= first + (total - end) {
        return;
    }
    rarely();
    let (mut n, mut channel) = (turn as u64, thread);
    loop {
        while channel >= channels {
            channel -= channels;
            n += turns as u64;
        }
        if n >= first + (total - end) {
            return;
        }
        let token = if n < first { n } else { end + (n - first) };
        let element = token * c.o_token as u64 + at(channel) as u64;
        let address = params.o + element * bytes_of(c.o_element) as u64;
        elements::store([0.0], address, c.o_element, false);
        channel += threads;
    }
}

/// [`clear_rest`] for a block that has `tile` elements of o of the row's value head; rows take turns.
///
/// # Safety
/// As for [`clear_rest`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn clear_rest_of_tile(
    c: &StepConstants,
    params: &StepParams,
    (row, tile): (Row, u32),
    threads: u32,
) {
    let first = row.hv * c.o_head + row.tile * tile;
    let (turn, thread) = ((row.b, params.rows), (thread_idx_x(), threads));
    clear_rest(c, params, turn, thread, tile, |i| first + i);
}

//! Runs the rows of a problem, from their start states to everything that they write.

use std::ops::Range;

use super::{Output, Previous, Recurrent, TokenGates};
use crate::error::{Error, Tokens};
use crate::heads::Heads;
use crate::recurrence::{Token, normalise, take};

/// States, and windows, that are kept within rows, after every `every` tokens of a sequence, in addition to those after the last
/// tokens.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoints<'a> {
    /// Tokens from one checkpoint to the next, counted from the sequence's first token.
    pub every: usize,
    /// `[B, C]`: slot of the write pool for the row's j-th multiple of `every` in this launch. A dead slot skips only that store.
    /// Multiples beyond C are not kept.
    pub slots: &'a [i64],
    /// `[B]`: number of tokens of the sequence before the row's first; by default 0.
    pub positions: Option<&'a [i64]>,
}

/// Parts of a layer that decide which rows are active and where they start.
#[derive(Clone, Copy, Default)]
pub(crate) struct Around<'a> {
    /// `[B]`: a row with a value other than 0 starts from zeros.
    pub fresh: Option<&'a [i64]>,
    /// Whether rows have windows. With token slots a window is in the slot of the first token, which then has to be live.
    pub windows: bool,
    /// Checkpoints of rows whose last state is written.
    pub checkpoints: Option<Checkpoints<'a>>,
}

/// As [`recurrent`](super::recurrent), for switches that are known to be compatible. `tokens` are the leading dimensions of `q`.
pub(crate) fn advance(
    problem: &Recurrent,
    tokens: Tokens,
    read_pool: &[f64],
    write_pool: &[f64],
    snapshots: Option<&[f64]>,
    around: Around,
) -> Result<Output, Error> {
    let pools = (read_pool, write_pool);
    let (mut after, rows) = begin(problem, tokens, pools, snapshots, around)?;
    for row in rows {
        for hv in 0..problem.value_heads {
            problem.advance_head(&row, hv, read_pool, &mut after)?;
        }
    }
    Ok(after)
}

/// The output of a launch before its active rows have written anything, and these rows.
pub(crate) fn begin(
    problem: &Recurrent,
    tokens: Tokens,
    (read_pool, write_pool): (&[f64], &[f64]),
    snapshots: Option<&[f64]>,
    around: Around,
) -> Result<(Output, Vec<Row>), Error> {
    let p = problem;
    p.check_shapes(tokens, snapshots)?;
    let heads = p.sizes();
    let pool_slots = (
        heads.slots_of("read_pool", read_pool)?,
        heads.slots_of("write_pool", write_pool)?,
    );

    let token_len = p.value_heads * p.value_dim;
    let mut after = Output {
        o: vec![f64::NAN; p.v.len()],
        pool: write_pool.to_vec(),
        snapshots: snapshots.map(<[f64]>::to_vec),
    };
    for rest in p.tokens_of_no_row(tokens.count) {
        after.o[rest.start * token_len..rest.end * token_len].fill(0.0);
    }
    let in_place = std::ptr::eq(read_pool, write_pool);
    let mut rows = Vec::new();
    for (own, row) in p.rows(tokens.count, pool_slots, around) {
        after.o[own.start * token_len..own.end * token_len].fill(0.0);
        let Some(mut row) = row else {
            continue;
        };
        if in_place && row.stays() {
            row.end = None;
        }
        rows.push(row);
    }
    Ok((after, rows))
}

/// Slots and tokens that an active row reads and writes.
pub(crate) struct Row {
    /// Index of the row in the batch.
    pub b: usize,
    /// Tokens of the row among the tokens of all rows.
    pub tokens: Range<usize>,
    /// Slot of the read pool, unless the row is fresh.
    pub start: Option<usize>,
    /// Number of previous tokens to commit, and the slot of the write pool for the state after them.
    pub commit: Option<(usize, usize)>,
    /// With token slots and windows: the window's slot, in either pool of windows, and the column of its oldest input.
    pub wide_window: Option<(usize, usize)>,
    /// Slot of the write pool for the state after each token.
    pub stores: Vec<Option<usize>>,
    /// For a row without tokens, new or previous: slot of the write pool for its start state.
    pub end: Option<usize>,
    /// Checkpoints: tokens, counted from the row's first, and the slot of the write pool for the state after each.
    pub checkpoints: Vec<(usize, usize)>,
}

impl Row {
    /// Whether the row writes nothing if states, or windows, are read and written in the same pool.
    pub fn stays(&self) -> bool {
        self.end.is_some() && self.end == self.start
    }
}

impl Checkpoints<'_> {
    /// The checkpoints of row b of `batch`: pairs of a token, counted from the row's first, and the slot for the state after it.
    fn of_row(&self, b: usize, batch: usize, tokens: usize) -> impl Iterator<Item = (usize, i64)> {
        let of_row = self.slots.len().checked_div(batch).unwrap_or(0);
        let slots = self.slots[b * of_row..][..of_row].iter().copied();
        let before = self
            .positions
            .map_or(0, |positions| positions[b].max(0) as usize);
        let every = self.every.max(1);
        // Tokens up to and including each multiple.
        let ends = (1..=tokens).filter(move |end| (before + end).is_multiple_of(every));
        ends.map(|end| end - 1).zip(slots)
    }
}

impl Recurrent<'_> {
    pub(crate) fn sizes(&self) -> Heads {
        Heads {
            heads: self.heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            head_map: self.head_map,
            layout: self.layout,
        }
    }

    /// The tokens of every row within bounds, and its reads and writes, which are `None` for an inactive row.
    pub(crate) fn rows(
        &self,
        total: usize,
        pool_slots: (usize, usize),
        around: Around,
    ) -> Vec<(Range<usize>, Option<Row>)> {
        let row = |b| {
            let own = self.tokens_of(b, total)?;
            Some((own.clone(), self.row(b, own, pool_slots, around)))
        };
        (0..self.batch).filter_map(row).collect()
    }

    /// The tokens of row b; `None` if its bounds are invalid, so that it touches nothing.
    fn tokens_of(&self, b: usize, total: usize) -> Option<Range<usize>> {
        let Some(cu_seqlens) = self.cu_seqlens else {
            return Some(b * self.tokens..(b + 1) * self.tokens);
        };
        let start = usize::try_from(cu_seqlens[b]).ok()?;
        let end = usize::try_from(cu_seqlens[b + 1]).ok()?;
        let length = end.checked_sub(start)?;
        (length <= self.tokens && end <= total).then_some(start..end)
    }

    /// Packed tokens before the first bound and after the last one. A bound outside of the tokens is ignored.
    fn tokens_of_no_row(&self, total: usize) -> [Range<usize>; 2] {
        let bound = |bound: Option<&i64>| {
            let bound = usize::try_from(*bound?).ok()?;
            (bound <= total).then_some(bound)
        };
        let bounds = self.cu_seqlens.filter(|_| self.batch > 0);
        let bounds = bounds.unwrap_or_default();
        let first = bound(bounds.first()).unwrap_or(0);
        let end = bound(bounds.last()).unwrap_or(total);
        match first <= end {
            true => [0..first, end..total],
            false => [0..0, total..total],
        }
    }

    /// Reads and writes of row b between pools of these many slots; `None` if it is inactive.
    fn row(
        &self,
        b: usize,
        tokens: Range<usize>,
        (read_pool_slots, write_pool_slots): (usize, usize),
        around: Around,
    ) -> Option<Row> {
        let fresh = around.fresh.is_some_and(|fresh| fresh[b] != 0);
        let mut stores = vec![None; tokens.len()];
        if let Some(token_slots) = self.token_slots {
            let slots = &token_slots[b * self.tokens..][..self.tokens];
            for (store, &slot) in stores.iter_mut().zip(slots) {
                *store = self.live(slot, write_pool_slots);
            }
            let (start, column) = if fresh {
                (None, 0)
            } else {
                let accepted = self.accepted.map_or(1, |accepted| accepted[b]);
                let last = usize::try_from(accepted).ok()?.checked_sub(1)?;
                (Some(self.live(*slots.get(last)?, read_pool_slots)?), last)
            };
            let wide_window = if around.windows {
                let slot = self.live(slots[0], read_pool_slots.min(write_pool_slots))?;
                Some((slot, column))
            } else {
                None
            };
            return Some(Row {
                b,
                tokens,
                start,
                commit: None,
                wide_window,
                stores,
                end: None,
                checkpoints: Vec::new(),
            });
        }
        let read_slot = self.read_slots.map_or(b as i64, |slots| slots[b]);
        let write_slot = self.write_slots.map_or(read_slot, |slots| slots[b]);
        let start = if fresh {
            None
        } else {
            Some(self.live(read_slot, read_pool_slots)?)
        };
        let end = self.live(write_slot, write_pool_slots)?;
        let commit = match &self.previous {
            Some(previous) => Some((previous.keep(b)?, end)),
            None => None,
        };
        let checkpoints = around.checkpoints.map_or(Vec::new(), |checkpoints| {
            let entries = checkpoints.of_row(b, self.batch, tokens.len());
            let live =
                entries.filter_map(|(t, slot)| Some((t, self.live(slot, write_pool_slots)?)));
            live.collect()
        });
        let mut carried = None;
        if self.update_state && commit.is_none() {
            match stores.last_mut() {
                Some(last) => *last = Some(end),
                None => carried = Some(end),
            }
        }
        Some(Row {
            b,
            tokens,
            start,
            commit,
            wide_window: None,
            stores,
            end: carried,
            checkpoints,
        })
    }

    /// `slot` as an index; `None` if it is dead.
    fn live(&self, slot: i64, pool_slots: usize) -> Option<usize> {
        if self.null_slot == Some(slot) {
            return None;
        }
        usize::try_from(slot).ok().filter(|&slot| slot < pool_slots)
    }

    fn advance_head(
        &self,
        row: &Row,
        hv: usize,
        read_pool: &[f64],
        after: &mut Output,
    ) -> Result<(), Error> {
        let heads = self.sizes();
        let mut state = match row.start {
            Some(slot) => heads.load(read_pool, slot, hv),
            None => vec![0.0; self.value_dim * self.key_dim],
        };
        if let (Some(previous), Some((keep, slot))) = (&self.previous, row.commit) {
            let first = row.b * previous.tokens;
            for token in first..first + keep {
                take(&mut state, &self.previous_token(previous, token, hv))?;
            }
            heads.store(&mut after.pool, slot, hv, &state);
            for s in &mut state {
                *s = (self.round_state)(*s);
            }
        }
        if let Some(end) = row.end {
            heads.store(&mut after.pool, end, hv, &state);
        }
        for (t, token) in row.tokens.clone().enumerate() {
            let (of_token, _) = take(&mut state, &self.token(token, hv))?;
            let o = ((row.tokens.start + t) * self.value_heads + hv) * self.value_dim;
            after.o[o..][..self.value_dim].copy_from_slice(&of_token);
            let besides = row.checkpoints.iter().filter(|(at, _)| *at == t);
            for &slot in besides.map(|(_, slot)| slot).chain(&row.stores[t]) {
                heads.store(&mut after.pool, slot, hv, &state);
            }
            if let (Some(steps), Some(snapshots)) = (self.snapshot_steps, &mut after.snapshots) {
                heads.store(snapshots, row.b * steps + t, hv, &state);
            }
        }
        Ok(())
    }

    /// q̂ `[K]` of a token, counted over all rows, for value head `hv`.
    #[must_use]
    pub fn query(&self, token: usize, hv: usize) -> Vec<f64> {
        let head = token * self.heads + self.sizes().of(hv);
        let q = &self.q[head * self.key_dim..][..self.key_dim];
        normalise(q, self.l2norm, self.scale)
    }

    pub(crate) fn token(&self, token: usize, hv: usize) -> Token {
        Token {
            q: self.query(token, hv),
            ..self.keys_and_values(self.k, self.v, &self.gates, token, hv)
        }
    }

    /// A previous token. Its query is zero: nothing is read with it.
    pub(crate) fn previous_token(&self, previous: &Previous, token: usize, hv: usize) -> Token {
        self.keys_and_values(previous.k, previous.v, &previous.gates, token, hv)
    }

    /// A token with a query of zeros.
    fn keys_and_values(
        &self,
        k: &[f64],
        v: &[f64],
        gates: &TokenGates,
        token: usize,
        hv: usize,
    ) -> Token {
        let heads = self.sizes();
        let (head, value_head) = (
            token * self.heads + heads.of(hv),
            token * self.value_heads + hv,
        );
        let (log_decay, beta) = gates.at(token, hv, &heads);
        Token {
            q: vec![0.0; self.key_dim],
            k: normalise(&k[head * self.key_dim..][..self.key_dim], self.l2norm, 1.0),
            v: v[value_head * self.value_dim..][..self.value_dim].to_vec(),
            log_decay,
            beta,
        }
    }
}

impl Previous<'_> {
    /// `keep` of row b; `None` if it is out of range.
    fn keep(&self, b: usize) -> Option<usize> {
        usize::try_from(self.keep[b])
            .ok()
            .filter(|keep| *keep <= self.tokens)
    }
}

impl TokenGates<'_> {
    /// Whether each key channel has a decay of its own.
    pub(crate) fn per_channel(&self) -> bool {
        matches!(self, Self::Kda(_))
    }

    /// Log decays `[K]` and beta of a value head.
    fn at(&self, token: usize, hv: usize, heads: &Heads) -> (Vec<f64>, f64) {
        match self {
            Self::Gdn(gates) => {
                let (log_decay, beta) = gates.at(token, hv, heads);
                (vec![log_decay; heads.key_dim], beta)
            }
            Self::Kda(gates) => gates.at(token, hv, heads),
        }
    }
}

//! The layer step: all operations between the projections of a layer, for a batch whose states and windows are in the slots of pools. It
//! is the recurrence with an optional convolution before it and an optional norm after it.
//!
//! Nothing is rounded between them. The windows hold the unmodified inputs of the convolution.

use std::ops::Range;

use crate::conv::{Conv, convolve, window_after};
use crate::error::{Error, Tokens, check_length, elements};
use crate::norm::{GatedNorm, gated_norm};
use crate::recurrent::{Around, Checkpoints, Previous, Recurrent, Row, advance};

/// A layer step of `B` rows.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// Rows, heads, gates and slots. With a projection, its q, k and v, and those of the previous tokens, are empty.
    pub step: Recurrent<'a>,
    /// Input and convolution that q, k and v are computed from.
    pub projection: Option<Projection<'a>>,
    /// Norm of the outputs o.
    pub norm: Option<GatedNorm<'a>>,
    /// `[B]`: a row with a value other than 0 starts from a state and a window of zeros, regardless of its read slot and its
    /// `accepted`. A dead write slot, by default the read slot, makes it inactive like any other row; with token slots, a dead
    /// slot of its window does.
    pub fresh: Option<&'a [i64]>,
    /// States and windows kept within rows, in addition to those after the last tokens. They need states that are written, and
    /// exclude token slots and previous tokens.
    pub checkpoints: Option<Checkpoints<'a>>,
}

/// The input of a convolution and the convolution. Its channels are those of q, of k and of v: D = 2·H·K + HV·V.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// `[B, T, D]`, with `cu_seqlens` `[total, D]`.
    pub x: &'a [f64],
    /// Inputs of the previous tokens, `[B, T', D]`, if there are any.
    pub previous: Option<&'a [f64]>,
    /// Convolution from x to q, k and v.
    pub conv: Conv<'a>,
}

/// Pools and snapshots before a launch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pools<'a> {
    /// `[P, HV, V, K]` (K-last) or `[P, HV, K, V]` (V-last)
    pub states: &'a [f64],
    /// Pool to write states to, by default `states`; its P may differ.
    pub write_states: Option<&'a [f64]>,
    /// Windows, with a projection, in the slots of the states: `[P, D, W − 1]`, oldest input first. With token slots `[P, D, W − 2 + T]`: a
    /// row's window begins at column `accepted` − 1 of the slot of its first token.
    pub windows: Option<&'a [f64]>,
    /// Windows to write, by default `windows`; their P is that of the states that are written.
    pub write_windows: Option<&'a [f64]>,
    /// Snapshots of states, `[B, steps, HV, V, K]` (V-last: `[B, steps, HV, K, V]`).
    pub snapshots: Option<&'a [f64]>,
    /// Window after every token, `[B, steps, D, W − 1]`. Needs snapshots of states, whose steps may differ, and a projection.
    pub window_snapshots: Option<&'a [f64]>,
}

/// Outputs, pools and snapshots after a launch.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerOutput {
    /// `[B, T, HV, V]`, with `cu_seqlens` `[total, HV, V]`; zero for inactive rows and for tokens of no row, NaN if not written.
    pub o: Vec<f64>,
    /// The pool that may be written, after the launch.
    pub states: Vec<f64>,
    /// The windows that may be written, after the launch.
    pub windows: Option<Vec<f64>>,
    /// All snapshots after the launch, if there are any.
    pub snapshots: Option<Vec<f64>>,
    /// All window snapshots after the launch, if there are any.
    pub window_snapshots: Option<Vec<f64>>,
}

/// Runs a layer step.
///
/// A row's window becomes the last W − 1 inputs of the old window and the row's tokens. With previous tokens it becomes the last W − 1 of
/// the old window and the kept tokens, after which the new tokens are convolved. A window is written if the state after the same
/// tokens is.
///
/// With token slots the window is in the slot of the row's first token; if that slot is dead in either pool, the row is inactive.
/// After a row of n tokens the slot has the window without its oldest input, followed by the n inputs; later columns are
/// unchanged, and a row without tokens changes nothing. The slot thus has the window after each token; `accepted` of the next
/// step selects one.
///
/// # Errors
/// The errors of [`recurrent`](crate::recurrent::recurrent), a length that contradicts the shape, and parts that contradict each other,
/// such as a norm without outputs.
pub fn layer(problem: &Layer, pools: &Pools) -> Result<LayerOutput, Error> {
    let (states, write_states) = pools.states();
    let (o, after, convolved) = problem.surround(
        pools,
        |_| true,
        |step, tokens, around| {
            let snapshots = pools.snapshots;
            let after = advance(step, tokens, states, write_states, snapshots, around)?;
            Ok((after.o, (after.pool, after.snapshots)))
        },
    )?;
    let (windows, window_snapshots) = match convolved {
        Some(convolved) => (Some(convolved.windows), convolved.window_snapshots),
        None => (None, None),
    };
    let (states, snapshots) = after;
    Ok(LayerOutput {
        o,
        states,
        windows,
        snapshots,
        window_snapshots,
    })
}

impl<'a> Pools<'a> {
    /// The pool that is read, and the pool that may be written.
    pub(crate) fn states(&self) -> (&'a [f64], &'a [f64]) {
        (self.states, self.write_states.unwrap_or(self.states))
    }
}

impl Layer<'_> {
    /// Runs convolution, `recur` and norm. `recur` gets q, k and v, and returns o and other results. Returns the normed o, these results,
    /// and the results of the convolution. Rows take part if their slots make them active and `live` accepts their index.
    pub(crate) fn surround<R>(
        &self,
        pools: &Pools,
        live: impl Fn(usize) -> bool,
        recur: impl FnOnce(&Recurrent, Tokens, Around) -> Result<(Vec<f64>, R), Error>,
    ) -> Result<(Vec<f64>, R, Option<Convolved>), Error> {
        let step = &self.step;
        self.check_parts(pools)?;
        let heads = step.sizes();
        heads.check()?;
        let (states, write_states) = pools.states();
        let slots = (
            heads.slots_of("read_pool", states)?,
            heads.slots_of("write_pool", write_states)?,
        );
        let mut convolved = match &self.projection {
            Some(projection) => Some(Convolved::new(projection, step, pools, slots)?),
            None => None,
        };
        let unfilled = convolved.as_ref().map_or(*step, |made| made.of(step));
        let tokens = unfilled.token_dims()?;
        unfilled.check_shapes(tokens, pools.snapshots)?;
        if let Some(fresh) = self.fresh {
            check_length("fresh", "[B]", &[step.batch], fresh.len())?;
        }
        if let Some(checkpoints) = &self.checkpoints {
            let slots = checkpoints.slots.len();
            Error::check_multiple(
                "checkpoint slots",
                "one entry of each row, B",
                step.batch,
                slots,
            )?;
            if let Some(positions) = checkpoints.positions {
                check_length("positions", "[B]", &[step.batch], positions.len())?;
            }
        }
        if let Some(norm) = &self.norm {
            let [value_heads, value_dim] = [step.value_heads, step.value_dim];
            tokens.check("z", "HV, V", &[value_heads, value_dim], norm.z.len())?;
            check_length("norm weight", "[V]", &[value_dim], norm.weight.len())?;
        }

        let around = Around {
            fresh: self.fresh,
            windows: self.projection.is_some(),
            checkpoints: self.checkpoints,
        };
        let rows = step.rows(tokens.count, slots, around);
        let active = || {
            let rows = rows.iter().filter_map(|(_, row)| row.as_ref());
            rows.filter(|row| live(row.b))
        };
        if let (Some(convolved), Some(projection)) = (&mut convolved, &self.projection) {
            let in_place = pools.write_windows.is_none();
            for row in active().filter(|row| !(in_place && row.stays())) {
                convolved.fill(projection, step, row, pools.windows.unwrap_or_default())?;
            }
        }
        let filled = convolved.as_ref().map_or(*step, |made| made.of(step));
        let (mut o, rest) = recur(&filled, tokens, around)?;
        if let Some(norm) = &self.norm {
            for row in active() {
                let own = times(&row.tokens, step.value_heads * step.value_dim);
                let of_row = GatedNorm {
                    z: &norm.z[own.clone()],
                    ..*norm
                };
                let normed = gated_norm(&of_row, &o[own.clone()])?;
                o[own].copy_from_slice(&normed);
            }
        }
        Ok((o, rest, convolved))
    }

    fn check_parts(&self, pools: &Pools) -> Result<(), Error> {
        let step = &self.step;
        step.check_switches(pools.write_states.is_some(), pools.snapshots.is_some())?;
        let projection = self.projection.is_some();
        let previous = step.previous.as_ref();
        let previous_x = self.projection.and_then(|projection| projection.previous);
        let keys_or_values = |k: &[f64], v: &[f64]| projection && !(k.is_empty() && v.is_empty());
        let contradictions = [
            (projection && !step.q.is_empty(), "q", "projection"),
            (keys_or_values(step.k, step.v), "k and v", "projection"),
            (
                previous.is_some_and(|previous| keys_or_values(previous.k, previous.v)),
                "previous k and v",
                "projection",
            ),
            (
                pools.write_windows.is_some() && !step.update_state,
                "write_windows",
                "update_state = false",
            ),
            (
                self.norm.is_some() && step.tokens == 0,
                "norm",
                "tokens = 0",
            ),
            (
                self.checkpoints.is_some() && !step.update_state,
                "checkpoints",
                "update_state = false",
            ),
            (
                self.checkpoints.is_some() && step.token_slots.is_some(),
                "checkpoints",
                "token_slots",
            ),
            (
                self.checkpoints.is_some() && previous.is_some(),
                "checkpoints",
                "previous",
            ),
        ];
        if let Some(&(_, name, with)) = contradictions.iter().find(|(both, ..)| *both) {
            return Err(Error::Contradiction { name, with });
        }
        let needs = [
            (
                projection && pools.windows.is_none(),
                "windows",
                "projection",
            ),
            (
                !projection && pools.windows.is_some(),
                "projection",
                "windows",
            ),
            (
                pools.write_windows.is_some() && pools.windows.is_none(),
                "windows",
                "write_windows",
            ),
            (
                !projection && pools.window_snapshots.is_some(),
                "projection",
                "window_snapshots",
            ),
            (
                pools.window_snapshots.is_some() && pools.snapshots.is_none(),
                "snapshots",
                "window_snapshots",
            ),
            (
                projection && previous.is_some() && previous_x.is_none(),
                "previous x",
                "previous",
            ),
            (
                previous_x.is_some() && previous.is_none(),
                "previous",
                "previous x",
            ),
        ];
        match needs.iter().find(|(lacks, ..)| *lacks) {
            Some(&(_, name, with)) => Err(Error::Missing { name, with }),
            None => Ok(()),
        }
    }
}

/// Results of the convolution of x, with NaN for tokens of inactive rows, and the windows.
pub(crate) struct Convolved {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    previous_k: Vec<f64>,
    previous_v: Vec<f64>,
    /// The windows that may be written, after the launch.
    pub windows: Vec<f64>,
    /// Columns of a slot of windows.
    columns: usize,
    /// Window snapshots after the launch, if there are any.
    pub window_snapshots: Option<Vec<f64>>,
    /// Snapshots of each row.
    steps: usize,
}

impl Convolved {
    /// Results before any row is convolved: all NaN, and the windows as they were.
    fn new(
        projection: &Projection,
        step: &Recurrent,
        pools: &Pools,
        (slots, write_slots): (usize, usize),
    ) -> Result<Self, Error> {
        let conv = &projection.conv;
        let (keys, values) = (step.heads * step.key_dim, step.value_heads * step.value_dim);
        let channels = 2 * keys + values;
        check_length("channels", "2*H*K + HV*V", &[channels], conv.channels)?;
        conv.check_weights()?;
        let count = match step.cu_seqlens {
            Some(_) => Error::check_multiple("x", "one token, D", channels, projection.x.len())?,
            None => {
                let count = elements(&[step.batch, step.tokens]);
                let letters = "B, T";
                Tokens { letters, count }.check("x", "D", &[channels], projection.x.len())?;
                count
            }
        };
        let previous = match (&step.previous, projection.previous) {
            (Some(previous), Some(x)) => {
                let count = elements(&[step.batch, previous.tokens]);
                let letters = "B, T'";
                Tokens { letters, count }
                    .check("x", "D", &[channels], x.len())
                    .map_err(|error| Error::Previous(Box::new(error)))?;
                count
            }
            _ => 0,
        };
        let windows = pools.windows.unwrap_or_default();
        let write_windows = pools.write_windows.unwrap_or(windows);
        let before = conv.width - 1;
        let (columns, letters) = match step.token_slots {
            Some(_) => (
                (before + step.tokens).saturating_sub(1),
                "[P, D, W - 2 + T]",
            ),
            None => (before, "[P, D, W - 1]"),
        };
        for (name, windows, slots) in [
            ("windows", windows, slots),
            ("write_windows", write_windows, write_slots),
        ] {
            let dims = [slots, channels, columns];
            check_length(name, letters, &dims, windows.len())?;
        }
        let mut steps = 0;
        if let Some(snapshots) = pools.window_snapshots {
            let (name, got) = ("window_snapshots", snapshots.len());
            let of_step = elements(&[step.batch, channels, before]);
            steps = Error::check_multiple(name, "one step, B*D*(W - 1)", of_step, got)?;
            if steps < step.tokens {
                let dims = [step.batch, step.tokens, channels, before];
                check_length(name, "[B, steps >= T, D, W - 1]", &dims, got)?;
            }
        }
        let nothing = |tokens: usize, token: usize| vec![f64::NAN; tokens * token];
        Ok(Self {
            q: nothing(count, keys),
            k: nothing(count, keys),
            v: nothing(count, values),
            previous_k: nothing(previous, keys),
            previous_v: nothing(previous, values),
            windows: write_windows.to_vec(),
            columns,
            window_snapshots: pools.window_snapshots.map(<[f64]>::to_vec),
            steps,
        })
    }

    /// `step` with q, k and v from the convolution.
    fn of<'a>(&'a self, step: &Recurrent<'a>) -> Recurrent<'a> {
        Recurrent {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            previous: step.previous.map(|previous| Previous {
                k: &self.previous_k,
                v: &self.previous_v,
                ..previous
            }),
            ..*step
        }
    }

    /// Convolves the tokens of a row. Writes the window after them or after the kept tokens, and the windows after each token for token
    /// slots and snapshots.
    fn fill(
        &mut self,
        projection: &Projection,
        step: &Recurrent,
        row: &Row,
        windows: &[f64],
    ) -> Result<(), Error> {
        let conv = &projection.conv;
        let before = conv.width - 1;
        let len = conv.channels * before;
        let slot = |slot: usize| slot * len..(slot + 1) * len;
        let mut window = match (row.start, row.wide_window) {
            (None, _) => vec![0.0; len],
            (Some(start), None) => windows[slot(start)].to_vec(),
            (Some(_), Some((slot, column))) => (0..conv.channels)
                .map(|c| (slot * conv.channels + c) * self.columns + column)
                .flat_map(|oldest| &windows[oldest..oldest + before])
                .copied()
                .collect(),
        };
        let keys = step.heads * step.key_dim;
        if let (Some(previous), Some((keep, end)), Some(x)) =
            (&step.previous, row.commit, projection.previous)
        {
            let own = row.b * previous.tokens..(row.b + 1) * previous.tokens;
            let x = &x[times(&own, conv.channels)];
            for (t, y) in own.zip(convolve(conv, &window, x)?.chunks(conv.channels)) {
                let (k, v) = y[keys..].split_at(keys);
                put(&mut self.previous_k, t, k);
                put(&mut self.previous_v, t, v);
            }
            window = window_after(conv, &window, x, keep)?;
            self.windows[slot(end)].copy_from_slice(&window);
        }
        let x = &projection.x[times(&row.tokens, conv.channels)];
        let y = convolve(conv, &window, x)?;
        for (t, y) in row.tokens.clone().zip(y.chunks(conv.channels)) {
            let (q, rest) = y.split_at(keys);
            let (k, v) = rest.split_at(keys);
            put(&mut self.q, t, q);
            put(&mut self.k, t, k);
            put(&mut self.v, t, v);
        }
        if let Some(snapshots) = &mut self.window_snapshots {
            for t in 0..row.tokens.len() {
                let after = window_after(conv, &window, x, t + 1)?;
                put(snapshots, row.b * self.steps + t, &after);
            }
        }
        for &(t, slot_of) in &row.checkpoints {
            let after = window_after(conv, &window, x, t + 1)?;
            self.windows[slot(slot_of)].copy_from_slice(&after);
        }
        if let Some((slot, _)) = row.wide_window {
            if row.tokens.is_empty() {
                return Ok(());
            }
            // All inputs but the oldest.
            for c in 0..conv.channels {
                let channel = &mut self.windows[(slot * conv.channels + c) * self.columns..];
                for i in 1..before + row.tokens.len() {
                    channel[i - 1] = conv.input(&window, x, c, i);
                }
            }
        } else if let Some(end) = row.end.or(row.stores.last().copied().flatten()) {
            let after = window_after(conv, &window, x, row.tokens.len())?;
            self.windows[slot(end)].copy_from_slice(&after);
        }
        Ok(())
    }
}

/// Sets token t of `tensor`.
fn put(tensor: &mut [f64], t: usize, token: &[f64]) {
    tensor[t * token.len()..][..token.len()].copy_from_slice(token);
}

/// Elements of a range of tokens, `len` for each token.
fn times(tokens: &Range<usize>, len: usize) -> Range<usize> {
    tokens.start * len..tokens.end * len
}

//! Checks of a launch: results are within a bound of the reference, and all other bytes are unchanged.

use gated_delta::{DType, Entry};
use gated_delta_reference::judge::{Allowed, Judgement};
pub use gated_delta_reference::tolerance::norm;
use gated_delta_reference::tolerance::{of_underflow, within};

use crate::backend::{Turns, backends};
use crate::buffer::View;
use crate::case::Case;
use crate::problem::{Sizes, conv, window_snapshots};
use crate::truth;
pub use crate::truth::truth;

/// Panics unless each value of `got` is the rounding to `dtype` of a value within `allowed` of `exact`. NaN of inputs must come out
/// in the same places.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], exact: &[f64], dtype: DType, allowed: f64) {
    assert_eq!(got.len(), exact.len(), "{what}: elements");
    let pairs = got.iter().copied().zip(exact.iter().copied());
    let is_nowhere = |(got, exact): &(f64, f64)| got.is_nan() && exact.is_nan();
    let of_others: (Vec<f64>, Vec<f64>);
    let (got, exact) = match pairs.clone().any(|pair| is_nowhere(&pair)) {
        true => {
            of_others = pairs.filter(|pair| !is_nowhere(pair)).unzip();
            (&of_others.0[..], &of_others.1[..])
        }
        false => (got, exact),
    };
    if got.is_empty() {
        return;
    }
    let allowed = allowed + of_underflow(got.len());
    if let Err(far) = within(got, exact, dtype.into(), allowed) {
        panic!("{what} ({dtype}): {far}");
    }
}

/// Panics unless `after` is a correct result of a launch on `before`. o, the written states and the snapshots are within bounds of
/// the reference. Inactive rows have zero output. All other bytes of all buffers are unchanged.
#[track_caller]
pub fn check(before: &Case, after: &Case) {
    check_by(&truth(before, Some(after)), before, after);
}

/// Like [`check`], with `wanted` as the reference's results.
///
/// # Panics
/// As [`check`].
#[track_caller]
pub fn check_by(wanted: &Judgement, before: &Case, after: &Case) {
    let rows = before.rows();
    let allowed = &wanted.allowed;
    let mut written = Vec::new();
    let [_, heads, width, _] = before.as_klast(&before.pool).dims[..] else {
        panic!("a pool has four dims")
    };
    for (b, row) in rows.iter().enumerate() {
        for (t, token) in row.tokens.iter().flat_map(Clone::clone).enumerate() {
            for hv in 0..heads {
                let i = token * heads + hv;
                let o = after.o().entry(&after.token(token)).entry(&[hv]);
                let o_type = after.buffers[o.buffer].dtype;
                let what = format!("o of row {b}, token {t}, value head {hv}");
                let got = after.floats(&o);
                if row.live.is_some() {
                    let exact = &wanted.o[i * width..][..width];
                    assert_close(&what, &got, exact, o_type, allowed.o[i]);
                } else {
                    assert!(
                        got.iter().all(|x| x.to_bits() == 0),
                        "{what}, which is inactive: wanted zeros, got {got:?}"
                    );
                }
                written.push(o);
            }
        }
    }
    for token in before.tokens_of_no_row() {
        let o = after.o().entry(&after.token(token));
        let got = after.floats(&o);
        assert!(
            got.iter().all(|x| x.to_bits() == 0),
            "o of token {token}, which is no row's: wanted zeros, got {got:?}"
        );
        written.push(o);
    }
    let mut states = States { after, written };
    let pool = after.as_klast(after.written_pool());
    for (b, live) in rows
        .iter()
        .enumerate()
        .filter_map(|(b, row)| Some((b, row.live.as_ref()?)))
    {
        for slot in live.writes() {
            states.check(
                &format!("slot {slot}"),
                &pool,
                &[slot],
                (&wanted.states, &allowed.states),
            );
        }
        if let Some(slot) = live.carried {
            let read = |slot| before.bits(&before.as_klast(&before.pool).entry(&[slot]));
            let got = after.bits(&pool.entry(&[slot]));
            let wanted = live.start.map_or(vec![0; got.len()], read);
            assert!(
                got == wanted,
                "the state of row {b}, which has no tokens, is not that which it starts from"
            );
        }
        if let (Some(view), Some(exact)) = (&after.snapshots, &wanted.snapshots) {
            let view = after.as_klast(view);
            for t in 0..rows[b].tokens.as_ref().map_or(0, ExactSizeIterator::len) {
                let wanted = (&exact[..], &allowed.snapshots[..]);
                states.check(&format!("row {b} after token {t}"), &view, &[b, t], wanted);
            }
        }
    }
    let mut written = states.written;
    written.extend(after.workspace.clone());
    written.extend(check_windows(before, after, wanted));
    assert_rest_unchanged(before, after, &written);
}

/// Panics unless each written window, in the pool or as a snapshot, has the last inputs of the old window and the row, bit for bit.
/// Returns the views of the written windows.
#[track_caller]
fn check_windows(before: &Case, after: &Case, wanted: &Judgement) -> Vec<View> {
    let (Some(conv), Some([read, write])) = (conv(before), before.windows()) else {
        return Vec::new();
    };
    let pool = wanted.windows.as_deref();
    let pool = pool.expect("the reference has windows");
    let steps = wanted.window_snapshots.as_deref();
    let len = conv.weight.dims[1] - 1;
    let mut written = Vec::new();
    // The reference gives the same windows as values, without bits: all of `whole`, one of `dims[0]` entries for each channel.
    let mut check =
        |what: &str, view: View, inputs: &[u64], (whole, exact): (&View, &[f64]), entry: usize| {
            assert!(after.bits(&view) == inputs, "{what} is wrong");
            let columns = whole.dims[whole.dims.len() - 1];
            let channels = view.dims[0];
            let exact = exact[entry * channels * columns..][..channels * columns].chunks(columns);
            let exact: Vec<f64> = exact
                .flat_map(|channel| &channel[..view.dims[1]])
                .copied()
                .collect();
            assert_close(what, &after.floats(&view), &exact, DType::F32, 0.0);
            written.push(view);
        };
    for (b, row) in before.rows().into_iter().enumerate() {
        let (Some(tokens), Some(live)) = (row.tokens, row.live) else {
            continue;
        };
        let Some(window) = live.window else {
            assert!(tokens.is_empty(), "there is a convolution");
            continue;
        };
        let bits = match window.start {
            Some([slot, column]) => before.bits(&read.entry(&[slot]).narrow(1, column, len)),
            None => vec![0; read.dims[1] * len],
        };
        // All inputs of each channel, from the window's oldest input on.
        let mut inputs: Vec<Vec<u64>> = bits.chunks(len).map(<[u64]>::to_vec).collect();
        let push = |inputs: &mut Vec<Vec<u64>>, x: View| {
            let x = before.bits(&x);
            inputs
                .iter_mut()
                .zip(x)
                .for_each(|(channel, x)| channel.push(x));
        };
        let last = |inputs: &[Vec<u64>], end: usize, len: usize| -> Vec<u64> {
            inputs
                .iter()
                .flat_map(|channel| &channel[end - len..end])
                .copied()
                .collect()
        };
        if let (Some((keep, slot)), Some(kept)) = (live.commit, &before.previous_x) {
            (0..keep).for_each(|t| push(&mut inputs, kept.x.entry(&[b, t])));
            let kept = last(&inputs, keep + len, len);
            let what = format!("the window of row {b}, in slot {slot}, after what is kept");
            check(&what, write.entry(&[slot]), &kept, (write, pool), slot);
            continue;
        }
        let x = before.convolved.as_ref().map(|convolved| &convolved.x);
        for (token, x) in tokens.clone().zip(x.into_iter().cycle()) {
            push(&mut inputs, x.entry(&before.token(token)));
        }
        if let Some(slot) = window.end {
            // The windows after each token, concatenated, or the window after the last token.
            let columns = match before.token_slots {
                Some(_) => len - 1 + tokens.len(),
                None => len,
            };
            let view = write.entry(&[slot]).narrow(1, 0, columns);
            let inputs = last(&inputs, len + tokens.len(), columns);
            let what = format!("the window of row {b}, in slot {slot},");
            check(&what, view, &inputs, (write, pool), slot);
        }
        for &(t, slot) in &live.checkpoints {
            let inputs = last(&inputs, len + t + 1, len);
            let what = format!("the window of row {b} after token {t}, in slot {slot},");
            check(&what, write.entry(&[slot]), &inputs, (write, pool), slot);
        }
        if let (Some(view), Some(exact)) = (window_snapshots(before), steps) {
            for t in 0..tokens.len() {
                let inputs = last(&inputs, len + t + 1, len);
                let what = format!("the window of row {b} after token {t}");
                let entry = b * view.dims[1] + t;
                check(&what, view.entry(&[b, t]), &inputs, (view, exact), entry);
            }
        }
    }
    written
}

/// Check of the states after a launch.
struct States<'a> {
    after: &'a Case,
    /// Views that were checked.
    written: Vec<View>,
}

impl States<'_> {
    /// Panics unless the states at `index` of `view`, `[…, HV, V, K]`, are within `allowed`, `[…, HV]`, of `exact`, which has the
    /// dims of the states.
    #[track_caller]
    fn check(
        &mut self,
        what: &str,
        view: &View,
        index: &[usize],
        (exact, allowed): (&[f64], &[f64]),
    ) {
        let dtype = self.after.buffers[view.buffer].dtype;
        let first = index
            .iter()
            .zip(&view.dims)
            .fold(0, |first, (i, dim)| first * dim + i);
        let [heads, value_dim, key_dim] = view.dims[index.len()..] else {
            panic!("a state has three dims")
        };
        let len = value_dim * key_dim;
        let held = |x: &f64| gated_delta_reference::tolerance::DType::from(dtype).held(*x);
        for hv in 0..heads {
            let state = view.entry(index).entry(&[hv]);
            let i = first * heads + hv;
            assert_close(
                &format!("state of {what}, value head {hv}"),
                &self.after.floats(&state),
                &exact[i * len..][..len]
                    .iter()
                    .map(held)
                    .collect::<Vec<f64>>(),
                dtype,
                allowed[i],
            );
            self.written.push(state);
        }
    }
}

/// Output and final states by the reference of a launch on `case` whose pool has the values `states`, `[P, HV, V, K]`.
#[must_use]
pub fn reference(case: &Case, states: &[f64]) -> (Vec<f64>, Vec<f64>) {
    truth::after(case, states)
}

/// Panics unless o, the written pool and the snapshots of two launches on `before` differ by rounding only. The two may have
/// different layouts of states.
#[track_caller]
pub fn assert_near(before: &Case, one: &Case, other: &Case) {
    let Allowed {
        o,
        states: of_states,
        snapshots,
    } = truth(before, None).allowed;
    let states = |case: &Case| Some(case.as_klast(case.written_pool()));
    let o_of = |case: &Case| case.outputs().cloned();
    near("o", [one, other], o_of, &o);
    near("state", [one, other], states, &of_states);
    let of = |case: &Case| Some(case.as_klast(case.snapshots.as_ref()?));
    near("snapshot", [one, other], of, &snapshots);
}

/// Panics unless the elements of `view` in both cases are near each other. The view is compared in as many parts as `allowed` has
/// entries.
#[track_caller]
fn near(what: &str, cases: [&Case; 2], view: impl Fn(&Case) -> Option<View>, allowed: &[f64]) {
    let [one, other] = cases.map(|case| view(case).map_or(Vec::new(), |view| case.floats(&view)));
    assert_eq!(one.len(), other.len(), "{what}: elements");
    let len = one.len() / allowed.len().max(1);
    for (i, allowed) in allowed.iter().enumerate() {
        let part = i * len..(i + 1) * len;
        // NaN on both sides marks elements that neither launch wrote.
        let (one, other): (Vec<f64>, Vec<f64>) = one[part.clone()]
            .iter()
            .zip(&other[part])
            .filter(|(one, other)| !(one.is_nan() && other.is_nan()))
            .unzip();
        // Each of the two results may be `allowed` away from the exact one.
        assert_close(
            &format!("{what} {i}"),
            &one,
            &other,
            DType::F32,
            2.0 * allowed,
        );
    }
}

/// Panics if a byte outside of the `written` views has changed.
#[track_caller]
pub fn assert_rest_unchanged(before: &Case, after: &Case, written: &[View]) {
    for (i, was) in before.buffers.iter().enumerate() {
        if *was == after.buffers[i] {
            continue;
        }
        let mut rest = after.buffers[i].clone();
        for view in written.iter().filter(|view| view.buffer == i) {
            rest.copy_from(was, view);
        }
        if *was != rest {
            let changed = (0..was.len()).find(|&element| was.bits(element) != rest.bits(element));
            panic!(
                "{}: element {changed:?} of the buffer is nobody's to write, and changed",
                before.names_of(i)
            );
        }
    }
}

/// Runs `case` on every backend, with `variant` or with the selected variant, and checks the results.
///
/// # Panics
/// If a result is wrong.
#[track_caller]
pub fn check_everywhere(case: &Case, variant: Option<Entry>) {
    for backend in backends() {
        check(case, &backend.run(case, variant));
    }
}

/// Like [`check_everywhere`], on the backends whose turn it is.
///
/// # Panics
/// If a result is wrong.
pub fn check_in_turn(turns: &Turns, case: &Case, variant: Option<Entry>) {
    turns.next(|backend| check(case, &backend.run(case, variant)));
}

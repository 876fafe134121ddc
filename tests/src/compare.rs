//! What a launch must leave behind: results within a bound of the reference, everything else as it was.

use gated_delta::ops::{BetaScale, HeadMap};
use gated_delta::{DType, Entry};
use gated_delta_reference::gdn::{self, Decoded, Gates, GdnDecode, Layout, decode_between};
use gated_delta_reference::recurrence::{default_scale, normalise};
use half::{bf16, f16};

use crate::backend::backends;
use crate::buffer::View;
use crate::case::Case;

/// How far from the truth a result may be before it is rounded to its dtype: f32 arithmetic, with approximate
/// exponentials and roots. Of a state, as a part of its norm; of o, as a part of the norms of q̂ and of the state
/// that it is read from, whose product o may be much smaller than.
const STATE: f64 = 1e-5;
const OUTPUT: f64 = 1e-6;
/// What is no difference in an element, among values around 1: below it f32 exponentials are denormal, or inexact
/// by their argument.
const ELEMENT: f64 = 1e-12;

/// Leading bits of a significand, and the exponent of the smallest normal number.
fn precision(dtype: DType) -> (i32, i32) {
    match dtype {
        DType::Bf16 => (8, -126),
        DType::F16 => (11, -14),
        _ => (24, -126),
    }
}

/// `x` as the nearest value of `dtype`.
fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => bf16::from_f64(x).to_f64(),
        DType::F16 => f16::from_f64(x).to_f64(),
        _ => (x as f32).into(),
    }
}

/// How far `got` is from being the rounding of `exact`.
fn excess(got: f64, exact: f64, dtype: DType) -> f64 {
    if got == exact || got.is_nan() || got.is_infinite() {
        return 0.0;
    }
    let (bits, smallest) = precision(dtype);
    let exponent = (got.abs().max(exact.abs()).log2().floor() as i32).max(smallest);
    ((got - exact).abs() - 2f64.powi(exponent - bits)).max(0.0)
}

/// Panics unless NaN and infinities are in the same places, and `got` is the rounding of something whose distance
/// to `exact` is at most `allowed`.
#[track_caller]
pub fn assert_close(what: &str, got: &[f64], exact: &[f64], dtype: DType, allowed: f64) {
    assert_eq!(got.len(), exact.len(), "{what}: elements");
    for (i, (&got, &exact)) in got.iter().zip(exact).enumerate() {
        let rounded = rounded(exact, dtype);
        let same = (rounded.is_finite() && got.is_finite())
            || rounded == got
            || (rounded.is_nan() && got.is_nan());
        assert!(same, "{what}, element {i}: wanted {exact}, got {got}");
    }
    let allowed = allowed + ELEMENT * (got.len() as f64).sqrt();
    let excesses: Vec<f64> = got
        .iter()
        .zip(exact)
        .map(|(&got, &exact)| excess(got, exact, dtype))
        .collect();
    let off = norm(&excesses);
    if off > allowed {
        let worst = (0..got.len())
            .max_by(|&i, &j| excesses[i].total_cmp(&excesses[j]))
            .unwrap_or(0);
        let (got, exact) = (got[worst], exact[worst]);
        panic!(
            "{what} ({dtype}): off by {off:.1e} besides rounding, allowed {allowed:.1e}; element {worst}: wanted {exact}, got {got}"
        );
    }
}

/// The norm of what is finite.
#[must_use]
pub fn norm(values: &[f64]) -> f64 {
    values
        .iter()
        .filter(|x| x.is_finite())
        .map(|x| x * x)
        .sum::<f64>()
        .sqrt()
}

/// What [`check`] compares with.
struct Expected {
    /// `[B, HV, V]`, and the written pool `[P, HV, V, K]`.
    decoded: Decoded,
    /// `[B, HV]`: norms of the new states, written or not.
    states: Vec<f64>,
    /// `[B, HV]`: norms of q̂.
    queries: Vec<f64>,
}

/// The truth about a case.
fn expected(case: &Case) -> Expected {
    let [q, k, v, a, b] =
        [&case.q, &case.k, &case.v, &case.a, &case.b].map(|view| case.floats(view));
    let raw = case
        .raw
        .as_ref()
        .map(|(a_log, dt_bias, scale)| (case.floats(a_log), case.floats(dt_bias), scale));
    let slots = |view: &Option<View>| view.as_ref().map(|view| case.indices(view));
    let (read_slots, write_slots) = (slots(&case.read_slots), slots(&case.write_slots));
    let options = &case.options;
    let [batch, _, heads, key_dim] = case.q.dims[..] else {
        panic!("q has four dims")
    };
    let [_, _, value_heads, value_dim] = case.v.dims[..] else {
        panic!("v has four dims")
    };
    let problem = GdnDecode {
        batch,
        heads,
        value_heads,
        key_dim,
        value_dim,
        q: &q,
        k: &k,
        v: &v,
        gates: match &raw {
            Some((a_log, dt_bias, scale)) => {
                let beta_scale = if **scale == BetaScale::Two { 2.0 } else { 1.0 };
                Gates::Raw {
                    a: &a,
                    b: &b,
                    a_log,
                    dt_bias,
                    beta_scale,
                }
            }
            None => Gates::Given { g: &a, beta: &b },
        },
        l2norm: options.qk_l2norm,
        scale: options
            .scale
            .map_or_else(|| default_scale(key_dim), f64::from),
        head_map: if options.head_map == HeadMap::Tiled {
            gdn::HeadMap::Tiled
        } else {
            gdn::HeadMap::Grouped
        },
        layout: Layout::KLast,
        read_slots: read_slots.as_deref(),
        write_slots: write_slots.as_deref(),
        null_slot: options.null_slot.map(i64::from),
        update_state: options.update_state,
    };
    let pool = |view: &View| case.floats(&case.as_klast(view));
    let read_pool = pool(&case.pool);
    let decoded = decode_between(&problem, &read_pool, &pool(case.written_pool()));

    let rows: Vec<i64> = (0..batch as i64).collect();
    let of_rows = GdnDecode {
        write_slots: Some(&rows),
        null_slot: None,
        update_state: true,
        ..problem
    };
    let nowhere = vec![0.0; batch * value_heads * value_dim * key_dim];
    let states = decode_between(&of_rows, &read_pool, &nowhere);
    let query = |i: usize| {
        let (b, hv) = (i / value_heads, i % value_heads);
        let h = if options.head_map == HeadMap::Tiled {
            hv % heads
        } else {
            hv / (value_heads / heads)
        };
        norm(&normalise(
            &q[(b * heads + h) * key_dim..][..key_dim],
            problem.l2norm,
            problem.scale,
        ))
    };
    Expected {
        decoded: decoded.unwrap_or_else(|error| panic!("{error}")),
        states: states
            .unwrap_or_else(|error| panic!("{error}"))
            .pool
            .chunks(value_dim * key_dim)
            .map(norm)
            .collect(),
        queries: (0..batch * value_heads).map(query).collect(),
    }
}

/// Panics unless `after` is what a launch on `before` must leave: o and the written states as the reference has
/// them, zeros for inactive rows, and every other byte of every buffer as it was.
#[track_caller]
pub fn check(before: &Case, after: &Case) {
    let wanted = expected(before);
    let live = before.live();
    let [_, _, heads, width] = before.o.dims[..] else {
        panic!("o has four dims")
    };
    let o = after.floats(&after.o);
    let o_type = after.buffers[after.o.buffer].dtype;
    for (i, row) in o.chunks(width).enumerate() {
        let (b, hv) = (i / heads, i % heads);
        if live[b].is_some() {
            let exact = &wanted.decoded.o[i * width..][..width];
            let allowed = OUTPUT * wanted.states[i] * wanted.queries[i];
            assert_close(
                &format!("o of row {b}, value head {hv}"),
                row,
                exact,
                o_type,
                allowed,
            );
        } else {
            assert!(
                row.iter().all(|x| x.to_bits() == 0),
                "o of inactive row {b}, value head {hv}: wanted zeros, got {row:?}"
            );
        }
    }
    let pool = after.as_klast(after.written_pool());
    let mut written = Vec::new();
    if before.options.update_state {
        let state_type = after.buffers[pool.buffer].dtype;
        for (_, slot) in live.iter().flatten() {
            for hv in 0..heads {
                let mut state = pool.clone();
                state.offset += slot * pool.strides[0] + hv * pool.strides[1];
                (state.dims, state.strides) = (pool.dims[2..].to_vec(), pool.strides[2..].to_vec());
                let exact =
                    &wanted.decoded.pool[(slot * heads + hv) * width * width..][..width * width];
                let what = format!("state of slot {slot}, value head {hv}");
                assert_close(
                    &what,
                    &after.floats(&state),
                    exact,
                    state_type,
                    STATE * norm(exact),
                );
                written.push(state);
            }
        }
    }
    written.push(after.o.clone());
    assert_rest_unchanged(before, after, &written);
}

/// Panics where a byte changed that is in none of `written`.
#[track_caller]
pub fn assert_rest_unchanged(before: &Case, after: &Case, written: &[View]) {
    let blank = |case: &Case| {
        let mut buffers = case.buffers.clone();
        for view in written {
            view.positions()
                .into_iter()
                .for_each(|i| buffers[view.buffer].set_bits(i, 0));
        }
        buffers
    };
    for (i, (was, is)) in blank(before).iter().zip(&blank(after)).enumerate() {
        if was != is {
            let changed = (0..was.len()).find(|&element| was.bits(element) != is.bits(element));
            panic!(
                "{}: element {changed:?} of the buffer is nobody's to write, and changed",
                before.names_of(i)
            );
        }
    }
}

/// Runs `case` on every backend, with the variant that is selected or with `variant`, and checks what comes out.
///
/// # Panics
/// Where it is wrong.
#[track_caller]
pub fn check_everywhere(case: &Case, variant: Option<Entry>) {
    for backend in backends() {
        check(case, &backend.run(case, variant));
    }
}

//! The layer step: effects of a convolution, a norm and fresh rows.

use gated_delta::{Activation, DType};
use gated_delta_harness::arguments::{Convolved, New, Tokens, value_dim};
use gated_delta_reference::conv::{Conv, convolve};
use gated_delta_reference::norm::{GatedNorm, gated_norm};
use gated_delta_reference::tolerance::{Tolerance, norm, of_norm};
use gated_delta_test_support::backend::{Backend, backends};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::{assert_close, assert_near, reference};
use gated_delta_test_support::layout::{Form, Layout};
use gated_delta_test_support::problem::{Array, Problem, Sizes, windows_mut};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{ConvChoice, Family, Spec};
use gated_delta_test_support::variants;

use crate::laws::{assert_same_bits, in_f32, law_of, run};

/// Families with a convolution, a norm, or both.
fn layers() -> Vec<Family> {
    Family::which(|family| family.layer)
}

/// Makes all rows active: no invalid indices and no null slot.
fn live(spec: &mut Spec) {
    (spec.slots.inactive, spec.options.null_slot) = (false, None);
}

/// Adds a convolution if none was drawn.
fn with_conv(spec: &mut Spec) {
    spec.conv.get_or_insert(ConvChoice {
        taps: 4,
        bias: true,
        activation: Activation::Silu,
        apart: false,
        window_snapshots: Some(0),
    });
}

/// A launch whose fresh rows are all off has the bits of a launch without `fresh`, by the same kernels, which are not a layer's.
#[test]
fn what_is_off_changes_nothing() {
    let adjust = |spec: &mut Spec| spec.fresh = false;
    law_of(Family::all(), adjust, |backend, spec| {
        let without = spec.problem();
        let none = Problem {
            fresh: Some(Array::indices(vec![0; spec.batch])),
            ..without.clone()
        };
        let kernels = [&without, &none].map(|problem| variants(&problem.case(&spec.form)));
        assert_eq!(kernels[0], kernels[1]);
        let around = without.windows().is_some() || without.norm.is_some();
        for entry in &kernels[0] {
            let layer = Family::of(*entry).map(|family| family.layer);
            assert_eq!(layer, Some(around), "{}", entry.name());
        }
        let [without, none] = [without, none].map(|problem| run(backend, &problem, &spec.form));
        assert_same_bits(&without, &none);
    });
}

/// The problem with q, k and v that the reference has convolved, without a convolution.
fn convolved_before(problem: &Problem, case: &Case) -> Problem {
    let convolved = problem.convolved.as_ref().unwrap();
    let Convolved { x, weight, o, .. } = convolved;
    let (channels, width) = (weight.dims[0], weight.dims[1]);
    let conv = Conv {
        channels,
        width,
        weight: &weight.values,
        bias: convolved.bias.as_ref().map(|bias| &*bias.values),
        activation: convolved.activation.into(),
    };
    let values = o.dims[2] * o.dims[3];
    let keys = (channels - values) / 2;
    let [mut q, mut k, mut v] =
        [keys, keys, values].map(|len| vec![f64::NAN; o.dims[0] * o.dims[1] * len]);
    for row in case.rows() {
        let len = channels * (width - 1);
        let (Some(tokens), Some(live)) = (row.tokens, row.live) else {
            continue;
        };
        let window = match live.start {
            Some(slot) => convolved.windows.values[slot * len..][..len].to_vec(),
            None => vec![0.0; len],
        };
        let x = &x.values[tokens.start * channels..tokens.end * channels];
        let y = convolve(&conv, &window, x).unwrap();
        for (t, y) in tokens.zip(y.chunks(channels)) {
            q[t * keys..][..keys].copy_from_slice(&y[..keys]);
            k[t * keys..][..keys].copy_from_slice(&y[keys..2 * keys]);
            v[t * values..][..values].copy_from_slice(&y[2 * keys..]);
        }
    }
    let of = |values: Vec<f64>, heads: usize, dim: usize| Array {
        values,
        dims: vec![o.dims[0], o.dims[1], heads, dim],
    };
    let (heads, k_dim) = (convolved.heads, keys / convolved.heads);
    Problem {
        new: Some(New {
            q: of(q, heads, k_dim),
            tokens: Tokens {
                k: of(k, heads, k_dim),
                v: of(v, o.dims[2], o.dims[3]),
                gate: convolved.gate.clone(),
                beta: convolved.beta.clone(),
            },
            o: o.clone(),
        }),
        convolved: None,
        ..problem.clone()
    }
}

#[test]
fn a_convolution_and_a_recurrence_are_one_after_the_other() {
    let adjust = |spec: &mut Spec| {
        in_f32(spec);
        with_conv(spec);
        (spec.norm, spec.form.qkvo) = (None, [DType::F32; 4]);
        (spec.tokens, spec.previous) = (spec.tokens.max(1), None);
        spec.slots.of_tokens = None;
    };
    // f32 states are near each other in every element.
    let recurrent = |family: Family| family.layer && family.is_recurrent();
    law_of(Family::which(recurrent), adjust, |backend, spec| {
        let problem = spec.problem();
        let before = problem.case(&spec.form);
        let apart = convolved_before(&problem, &before);
        let together = backend.run(&before, None);
        assert_near(&before, &together, &run(backend, &apart, &spec.form));
    });
}

/// The norm takes the unrounded output of the same launch without a norm. States and windows are those of that launch.
#[test]
fn a_norm_is_of_what_there_is_without_it() {
    let adjust = |spec: &mut Spec| {
        with_conv(spec);
        (spec.form.qkvo[3], spec.form.norm) = (DType::F32, [DType::F32; 2]);
    };
    law_of(layers(), adjust, |backend, spec| {
        let mut problem = spec.problem();
        let normed = run(backend, &problem, &spec.form);
        let Some(gated) = problem.norm.take() else {
            return;
        };
        let before = problem.case(&spec.form);
        let plain = backend.run(&before, None);
        assert!(plain.state_bits() == normed.state_bits(), "states differ");
        assert!(
            plain.window_bits() == normed.window_bits(),
            "windows differ"
        );
        let [plain, normed] = [plain, normed].map(|case| case.floats(case.o()));
        let heads = spec.value_heads();
        for (b, row) in before.rows().into_iter().enumerate() {
            let tokens = row.tokens.filter(|_| row.live.is_some()).unwrap_or(0..0);
            for i in tokens.start * heads..tokens.end * heads {
                let dim = value_dim(spec.dim);
                let own = i * dim..(i + 1) * dim;
                let of_head = GatedNorm {
                    z: &gated.z.values[own.clone()],
                    weight: &gated.weight.values,
                    eps: gated.eps.into(),
                    activation: gated.activation.into(),
                };
                let o = &plain[own.clone()];
                let exact = gated_norm(&of_head, o).unwrap();
                let allowed = of_norm(&of_head, o, 0.0).unwrap();
                let what = format!("o of row {b}, head {i}");
                assert_close(&what, &normed[own], &exact, DType::F32, allowed);
            }
        }
    });
}

/// After hundreds of in-place launches of one token, with the variants in turn, windows are exact. o and f32 states are as near the
/// reference's, which runs on its own states, as after one launch. Some tokens start a new sequence.
#[test]
fn a_long_sequence_of_layer_steps_stays_near_the_truth() {
    const STEPS: usize = 300;
    let wanted = |family: Family| {
        family.layer && family.decode && family.state == DType::F32 && family.dim == 64
    };
    for family in Family::which(wanted) {
        let spec = Spec {
            batch: 1,
            heads: 1,
            ratio: 1,
            fresh: true,
            conv: Some(ConvChoice {
                taps: 4,
                bias: true,
                activation: Activation::Silu,
                apart: false,
                window_snapshots: Some(0),
            }),
            form: Form {
                norm: [DType::F32; 2],
                ..Form::PLAIN
            },
            ..Spec::plain(family)
        };
        for backend in backends() {
            long_sequence(backend, &spec, STEPS);
        }
    }
}

fn long_sequence(backend: &Backend, spec: &Spec, steps: usize) {
    let first = spec.problem();
    let weights = first.convolved.clone().unwrap();
    let mut case = first.case(&spec.form);
    let variants = variants(&case);
    let mut truth = case.floats(&case.as_klast(&case.pool));
    let mut inputs = case.window_bits();
    for step in 0..steps {
        let mut problem = Spec {
            seed: step as u64,
            ..spec.clone()
        }
        .problem();
        problem.fresh = Some(Array::indices([i64::from(step % 100 == 99)]));
        (problem.a_log, problem.dt_bias) = (first.a_log.clone(), first.dt_bias.clone());
        if let Some(convolved) = &mut problem.convolved {
            convolved.weight = weights.weight.clone();
            convolved.bias = weights.bias.clone();
        }
        let mut next = problem.case(&spec.form);
        for [to, from] in [
            [next.pool.buffer, case.pool.buffer],
            [
                next.windows().unwrap()[0].buffer,
                case.windows().unwrap()[0].buffer,
            ],
        ] {
            next.buffers[to] = case.buffers[from].clone();
        }
        let (o, states) = reference(&next, &truth);
        let mut without_norm = next.clone();
        without_norm.norm = None;
        let (plain, _) = reference(&without_norm, &truth);
        let gated = problem.norm.as_ref().unwrap();
        let gated = GatedNorm {
            z: &gated.z.values,
            weight: &gated.weight.values,
            eps: gated.eps.into(),
            activation: gated.activation.into(),
        };
        let after = backend.run(&next, Some(variants[step % variants.len()]));

        if step % 100 == 99 {
            inputs.fill(0);
        }
        let x = next.bits(&next.convolved.as_ref().unwrap().x);
        for (window, x) in inputs.chunks_mut(3).zip(x) {
            window.rotate_left(1);
            window[2] = x;
        }
        assert!(
            after.window_bits() == inputs,
            "the window after step {step}"
        );
        let got = after.floats(&after.as_klast(&after.pool));
        let allowed = Tolerance::RECURRENT.state * norm(&states);
        assert_close("the state", &got, &states, DType::F32, allowed);
        // The normalised q has the norm of the scale.
        let off = allowed / (spec.dim as f64).sqrt();
        let allowed = of_norm(&gated, &plain, off).unwrap();
        assert_close("o", &after.floats(after.o()), &o, DType::F32, allowed);
        (case, truth) = (after, states);
    }
}

/// A fresh row equals a row whose slot holds zeros, whatever is in its slot, and whichever slot it is.
#[test]
fn fresh_rows_start_from_zeros() {
    let adjust = |spec: &mut Spec| {
        live(spec);
        spec.fresh = false;
        // Every row has its own slots. An inactive row with an invalid read slot would be active as a fresh row, and might write to
        // another row's slot.
        spec.slots = match spec.slots.of_tokens {
            Some(accepted) => SlotChoice {
                of_tokens: Some(accepted),
                inactive: false,
                ..SlotChoice::OF_TOKENS
            },
            None => SlotChoice {
                write: spec.update_state,
                ..SlotChoice::LIVE
            },
        };
    };
    law_of(Family::all(), adjust, |backend, spec| {
        let problem = spec.problem();
        // The launch writes to another pool, so that the unread one is NaN.
        let apart = |array: &Array| Some(Array::unread(&array.dims));
        let with = |fresh: bool, value: f64, dead: bool| {
            let mut problem = problem.clone();
            problem.pool.values.fill(value);
            if let Some((windows, others)) = windows_mut(&mut problem) {
                windows.values.fill(value);
                if spec.update_state && others.is_none() {
                    *others = apart(windows);
                }
            }
            if spec.update_state && problem.write_pool.is_none() {
                problem.write_pool = apart(&problem.pool);
            }
            problem.fresh = fresh.then(|| Array::indices(vec![1; spec.batch]));
            if dead && spec.update_state {
                let start = match &problem.token_slots {
                    Some(_) => problem.accepted.as_mut(),
                    None => problem.read_slots.as_mut(),
                };
                let slots = start.into_iter().flat_map(|start| &mut start.values);
                slots.for_each(|slot| *slot = i32::MAX.into());
            }
            run(backend, &problem, &spec.form)
        };
        let zeros = with(false, 0.0, false);
        for dead in [false, true] {
            let fresh = with(true, f64::NAN, dead);
            if spec.update_state {
                assert_same_bits(&zeros, &fresh);
            } else {
                assert!(zeros.o_bits() == fresh.o_bits(), "o differs");
            }
        }
    });
}

/// In a launch that writes no states a fresh row starts from zeros too, and is inactive if its slot is invalid.
#[test]
fn fresh_rows_of_a_launch_that_writes_nothing() {
    for family in Family::of_each_kind() {
        let mut spec = Spec {
            batch: 3,
            slots: SlotChoice {
                write: false,
                ..SlotChoice::LIVE
            },
            ..Spec::plain(family)
        };
        spec.update_state = false;
        let mut problem = spec.problem();
        problem.read_slots = Some(Array::indices([2, -1, 0]));
        let with = |fresh: bool, value: f64| {
            let mut problem = problem.clone();
            problem.pool.values.fill(value);
            let windows = problem
                .convolved
                .as_mut()
                .map(|conv| &mut conv.windows.values);
            windows.into_iter().for_each(|windows| windows.fill(value));
            problem.fresh = fresh.then(|| Array::indices([1, 1, -1]));
            problem.case(&spec.form)
        };
        for backend in backends() {
            let garbage = with(true, f64::NAN);
            let after = backend.run(&garbage, None);
            let zeros = backend.run(&with(false, 0.0), None);
            assert!(after.o_bits() == zeros.o_bits(), "{family:?}: o differs");
            let inactive = after.bits(&after.o().entry(&[1]));
            assert!(inactive.iter().all(|bits| *bits == 0), "{family:?}");
            assert!(after.state_bits() == garbage.state_bits(), "{family:?}");
            assert!(after.window_bits() == garbage.window_bits(), "{family:?}");
        }
    }
}

/// NaN in x and z of one row changes no other row.
#[test]
fn a_nan_stays_in_its_row() {
    let adjust = |spec: &mut Spec| {
        live(spec);
        (spec.tokens, spec.packed) = (spec.tokens.max(1), false);
    };
    law_of(layers(), adjust, |backend, spec| {
        let problem = spec.problem();
        let clean = run(backend, &problem, &spec.form);
        let bad = spec.seed as usize % spec.batch;
        let mut with_nan = problem.clone();
        let x = with_nan.convolved.as_mut().map(|conv| &mut conv.x);
        let previous_x = with_nan.previous_x.as_mut().map(|kept| &mut kept.x);
        let z = with_nan.norm.as_mut().map(|norm| &mut norm.z);
        for array in [x, previous_x, z].into_iter().flatten() {
            array.entry_mut(1, bad).fill(f64::NAN);
        }
        let before = with_nan.case(&spec.form);
        let after = backend.run(&before, None);
        for (b, row) in before.rows().into_iter().enumerate() {
            let [o, clean_o] = [&after, &clean].map(|case| case.bits(&case.o().entry(&[b])));
            if b == bad {
                let o = after.floats(&after.o().entry(&[b]));
                let is_nan = o.iter().all(|x| x.is_nan());
                assert!(is_nan || row.live.is_none(), "o of the row of NaN");
                continue;
            }
            assert!(o == clean_o, "o of row {b} differs");
            for slot in row.live.iter().flat_map(|live| live.writes()) {
                assert!(
                    after.slot_bits(slot) == clean.slot_bits(slot),
                    "states differ"
                );
                let windows = [&after, &clean].map(|case| case.slot_window_bits(slot));
                assert!(windows[0] == windows[1], "windows differ");
            }
        }
    });
}

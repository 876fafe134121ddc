//! Prefills: neither the cuts of a prompt, nor the rows next to it, nor the kept states change a bit.

use std::ops::Range;

use gated_delta::{DType, Entry, Formulation};
use gated_delta_harness::arguments::{Checkpoints, GateKind, Operator};
use gated_delta_test_support::backend::{Backend, Turns, backends};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::{assert_near, check};
use gated_delta_test_support::for_all;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Array, Change, Problem, Sizes, windows_mut};
use gated_delta_test_support::rows::{Row, of_problem};
use gated_delta_test_support::spec::{Family, PrefillChoice, Spec};
use gated_delta_test_support::strategy::any_specs;
use gated_delta_test_support::variants_on;

use super::with_finite_squares;

/// Tokens of a whole chunk.
const CHUNK: usize = 64;

/// All families of prefills with a number of cases: those with K = 64, and, in separate groups for GDN and KDA, the larger ones.
fn by_cost(of_64: u32, of_others: u32) -> [(Vec<Family>, u32); 3] {
    let of = |operator, is_small: bool| {
        let all = Family::prefills().into_iter();
        let wanted = |it: &Family| (it.operator, it.dim == 64) == (operator, is_small);
        all.filter(wanted).collect()
    };
    [
        (of(Operator::Gdn, true), of_64),
        (of(Operator::Gdn, false), of_others),
        (of(Operator::Kda, false), of_others),
    ]
}

/// Checks a law on a few random prefills that `adjust` has changed, on every backend.
fn law(adjust: impl Fn(&mut Spec), holds: impl Fn(&Backend, &Spec)) {
    law_of([3, 1], adjust, holds);
}

/// Like [`law`], with numbers of cases as in [`by_cost`].
fn law_of(
    [of_64, of_others]: [u32; 2],
    adjust: impl Fn(&mut Spec),
    holds: impl Fn(&Backend, &Spec),
) {
    for (families, cases) in by_cost(of_64, of_others) {
        let turns = Turns::of_machines();
        for_all("laws", cases, any_specs(families, 3), |mut spec| {
            adjust(&mut spec);
            with_finite_squares(&mut spec);
            turns.next(|backend| holds(backend, &spec));
        });
    }
}

/// In-place states and windows, so that a next launch can continue.
fn in_place(spec: &mut Spec) {
    spec.slots.write_pool = None;
    if let Some(conv) = &mut spec.conv {
        conv.apart = false;
    }
}

/// f32 states, which are not rounded between launches.
fn f32_states(spec: &mut Spec) {
    in_place(spec);
    spec.form.state = DType::F32;
}

/// Checkpoints every 64 tokens, in as many slots as are needed.
fn with_checkpoints(spec: &mut Spec) {
    spec.prefill.checkpoints = Some([1, spec.tokens / CHUNK + 1]);
}

/// At least `tokens` tokens.
fn longer(spec: &mut Spec, tokens: usize) {
    spec.tokens = spec.tokens.max(tokens);
}

/// Tokens of a sequence at whose multiples a prompt may be cut.
fn cut_unit(spec: &Spec) -> usize {
    spec.options.split.map_or(CHUNK, |split| split as usize)
}

/// The tokens `part` of row `b`, counted from its first, as a launch of one row.
fn part_of(problem: &Problem, row: &Row, b: usize, part: Range<usize>) -> Problem {
    let first = row.tokens.as_ref().map_or(0, |tokens| tokens.start);
    let order: Vec<usize> = (first + part.start..first + part.end).collect();
    let mut one = problem.each_new(|array| {
        let total = array.dims[0] * array.dims[1];
        let dims: Vec<usize> = [1, total].iter().chain(&array.dims[2..]).copied().collect();
        *array = array.clone().reshape(&dims).take(1, &order);
    });
    let of_row = |indices: &Option<Array>| indices.as_ref().map(|array| array.take(0, &[b]));
    one.packed = None;
    one.read_slots = match of_row(&problem.read_slots) {
        None => Some(Array::indices([b as i64])),
        slots => slots,
    };
    one.write_slots = of_row(&problem.write_slots);
    one.fresh = of_row(&problem.fresh);
    let before = of_row(&problem.positions).map_or(0, |positions| positions.integers()[0] as usize);
    one.positions = Some(Array::indices([(before + part.start) as i64]));
    if part.start > 0 {
        // A later part continues from the state that the part before it has left.
        one.fresh = one.fresh.map(|_| Array::indices([0]));
        one.read_slots = one.write_slots.clone().or(one.read_slots);
    }
    one.checkpoints = problem.checkpoints.as_ref().map(|of| {
        let behind = (before + part.start) / of.every - before / of.every;
        let slots = of.slots.take(0, &[b]).integers();
        let slots = slots.into_iter().skip(behind).collect::<Vec<_>>();
        Checkpoints {
            every: of.every,
            slots: Array::indices(slots.clone()).reshape(&[1, slots.len()]),
        }
    });
    one
}

/// The problem with the pools that `after` has left.
fn go_on(mut problem: Problem, after: &Case) -> Problem {
    let states = after.as_klast(after.written_pool());
    problem.pool.values = after.floats(&states);
    if let Some((windows, _)) = windows_mut(&mut problem) {
        let [_, written] = after.windows().expect("there is a convolution");
        windows.values = after.floats(written);
    }
    problem
}

/// The active rows with tokens, and their numbers.
fn active(problem: &Problem) -> Vec<(usize, Row)> {
    let rows = of_problem(problem).into_iter().enumerate();
    rows.filter(|(_, row)| row.live.is_some() && len(row) > 0)
        .collect()
}

/// Bits of o of the tokens `part` of a row.
fn o_of(case: &Case, row: &Row, part: Range<usize>) -> Vec<u64> {
    let first = row.tokens.as_ref().map_or(0, |tokens| tokens.start);
    let tokens = first + part.start..first + part.end;
    tokens
        .flat_map(|token| case.bits(&case.o().entry(&case.token(token))))
        .collect()
}

/// Bits of all states and windows that a row has written to slots.
fn written_by(case: &Case, row: &Row) -> Vec<(Vec<u64>, Vec<u64>)> {
    let live = row.live.as_ref().expect("the row is active");
    live.writes()
        .map(|slot| (case.slot_bits(slot), case.slot_window_bits(slot)))
        .collect()
}

/// Token ranges of all rows.
fn tokens(problem: &Problem) -> Vec<Option<Range<usize>>> {
    let rows = of_problem(problem);
    rows.into_iter().map(|row| row.tokens).collect()
}

fn len(row: &Row) -> usize {
    row.tokens.as_ref().map_or(0, ExactSizeIterator::len)
}

/// The bits of a row do not depend on other rows, the order of rows, packing, the longest row, or the kernels that follow from
/// these.
#[test]
fn a_row_alone_has_the_same_bits() {
    law(in_place, |backend, spec| {
        let problem = spec.problem();
        let together = backend.run(&problem.case(&spec.form), None);
        for (b, row) in active(&problem) {
            let alone = part_of(&problem, &row, b, 0..len(&row));
            let alone = backend.run(&alone.case(&spec.form), None);
            assert!(
                o_of(&together, &row, 0..len(&row)) == alone.o_bits(),
                "o of row {b} differs"
            );
            assert!(
                written_by(&together, &row) == written_by(&alone, &row),
                "what row {b} writes differs"
            );
        }
    });
}

/// All tiles give the same bits, and so do one and two launches for short rows.
#[test]
fn every_entry_has_the_same_bits() {
    let adjust = |spec: &mut Spec| {
        // f32 outputs are not rounded, so that a different order of a sum shows.
        spec.form.qkvo[3] = DType::F32;
    };
    law_of([5, 3], adjust, |backend, spec| {
        let problem = match spec.problem() {
            problem if problem.packed.is_some() => problem,
            problem => problem.packed(),
        };
        let mut without_a_promise = problem.clone();
        if let Some(packed) = &mut without_a_promise.packed {
            packed.max_tokens = usize::MAX;
        }
        // Under a promise of short rows a longer row is invalid. The launch without the promise is comparable only if there is no
        // such row.
        let kept = tokens(&problem) == tokens(&without_a_promise);
        let mut runs: Vec<(Entry, Case)> = Vec::new();
        for problem in [&problem]
            .into_iter()
            .chain(kept.then_some(&without_a_promise))
        {
            let case = problem.case(&spec.form);
            for entry in variants_on(backend, &case) {
                let run = backend.run(&case, Some(entry));
                runs.push((entry, run));
            }
        }
        for (entry, run) in &runs[1..] {
            let (first, wanted) = &runs[0];
            assert!(
                run.o_bits() == wanted.o_bits(),
                "o of {} differs from that of {}",
                entry.name(),
                first.name()
            );
            for (_, row) in active(&problem) {
                assert!(
                    written_by(run, &row) == written_by(wanted, &row),
                    "what {} writes differs from what {} does",
                    entry.name(),
                    first.name()
                );
            }
        }
    });
}

/// A prompt that is cut at multiples of 64 tokens of its sequence, in splits at their ends, has the same bits, whatever its position.
#[test]
fn a_prompt_cut_at_multiples_of_64_keeps_every_bit() {
    let adjust = |spec: &mut Spec| {
        f32_states(spec);
        longer(spec, 130);
        with_checkpoints(spec);
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let whole = backend.run(&problem.case(&spec.form), None);
        for (b, row) in active(&problem) {
            let before = problem.positions.as_ref();
            let before = before.map_or(0, |positions| positions.integers()[b] as usize);
            // Bits of the seed choose at which of the multiples the row is cut.
            let (mut cuts, unit) = (vec![0], cut_unit(spec));
            let multiples = (before / unit + 1..).map(|i| i * unit - before);
            let multiples = multiples.take_while(|cut| *cut < len(&row)).enumerate();
            let kept = multiples.filter(|(i, _)| spec.seed >> (i % 8) & 1 == 0);
            cuts.extend(kept.map(|(_, cut)| cut));
            cuts.push(len(&row));
            check_parts(backend, spec, &whole, (&problem, &row, b), &cuts);
        }
    });
}

/// Panics unless launches of the tokens between `cuts` of row `b` have the bits of the whole launch.
fn check_parts(
    backend: &Backend,
    spec: &Spec,
    whole: &Case,
    (problem, row, b): (&Problem, &Row, usize),
    cuts: &[usize],
) {
    let mut pools = None;
    for part in cuts.windows(2).map(|cut| cut[0]..cut[1]) {
        let mut problem = part_of(problem, row, b, part.clone());
        if let Some(after) = &pools {
            problem = go_on(problem, after);
        }
        let after = backend.run(&problem.case(&spec.form), None);
        assert!(
            o_of(whole, row, part.clone()) == after.o_bits(),
            "o of tokens {part:?} of row {b} differs"
        );
        pools = Some(after);
    }
    let last = pools.expect("the row has tokens");
    assert!(
        written_by(whole, row) == written_by(&last, row),
        "what row {b} leaves differs"
    );
}

/// A prompt that is long enough for segments has the bits of launches of its parts, which have none.
#[test]
fn a_long_prompt_has_the_bits_of_its_parts() {
    for (families, cases) in by_cost(2, 1) {
        for_all("laws", cases, any_specs(families, 1), |mut spec| {
            f32_states(&mut spec);
            with_finite_squares(&mut spec);
            (spec.batch, spec.packed) = (1, false);
            // Value heads are independent, so one of the larger states is enough.
            let ratio = if spec.dim == 64 { spec.ratio.min(2) } else { 1 };
            (spec.heads, spec.ratio) = (1, ratio);
            (spec.slots.inactive, spec.options.null_slot) = (false, None);
            spec.tokens = 33 * CHUNK + spec.seed as usize % (4 * CHUNK);
            with_checkpoints(&mut spec);
            let problem = spec.problem();
            for backend in backends() {
                let whole = backend.run(&problem.case(&spec.form), None);
                for (b, row) in active(&problem) {
                    let before = problem.positions.as_ref();
                    let before = before.map_or(0, |of| of.integers()[b] as usize);
                    let unit = cut_unit(&spec);
                    let middle = 20 * CHUNK / unit * unit - before % unit;
                    let cuts = [0, middle, len(&row)];
                    check_parts(backend, &spec, &whole, (&problem, &row, b), &cuts);
                }
            }
        });
    }
}

/// A checkpoint is the final state of the prompt up to there, rounded to the dtype of states.
#[test]
fn a_checkpoint_is_the_final_state_of_the_shorter_prompt() {
    let adjust = |spec: &mut Spec| {
        in_place(spec);
        longer(spec, 70);
        with_checkpoints(spec);
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let whole = backend.run(&problem.case(&spec.form), None);
        for (b, row) in active(&problem) {
            let live = row.live.as_ref().expect("the row is active");
            for &(t, slot) in &live.checkpoints {
                let mut shorter = part_of(&problem, &row, b, 0..t + 1);
                shorter.checkpoints = None;
                let shorter = backend.run(&shorter.case(&spec.form), None);
                let (_, end) = live.stores[0];
                assert!(
                    whole.slot_bits(slot) == shorter.slot_bits(end),
                    "the state after {} tokens of row {b} differs",
                    t + 1
                );
                assert!(
                    whole.slot_window_bits(slot) == shorter.slot_window_bits(end),
                    "the window after {} tokens of row {b} differs",
                    t + 1
                );
            }
        }
    });
}

/// The same rows of one token as a decode.
fn decode(problem: &Problem) -> Problem {
    Problem {
        positions: None,
        checkpoints: None,
        options: problem.options.formulation(Formulation::Recurrent),
        ..problem.clone()
    }
}

/// Rows of one token have the bits of a decode with f32 states. With bf16 states a decode sums in another order, that of wider
/// loads.
#[test]
fn rows_of_one_token_have_the_bits_of_a_decode() {
    let adjust = |spec: &mut Spec| {
        f32_states(spec);
        (spec.tokens, spec.prefill.checkpoints) = (1, None);
        (spec.packed, spec.batch) = (false, spec.batch + 2);
    };
    law_of([8, 6], adjust, |backend, spec| {
        let problem = spec.problem();
        let [prefill, decode] = [problem.clone(), decode(&problem)]
            .map(|problem| backend.run(&problem.case(&spec.form), None));
        crate::laws::assert_same_bits(&prefill, &decode);
    });
}

/// A last chunk of one token has the bits of a decode too, if the state before it is f32.
#[test]
fn a_piece_of_one_token_has_the_bits_of_a_decode() {
    let adjust = |spec: &mut Spec| {
        f32_states(spec);
        (spec.tokens, spec.packed) = (CHUNK + 1, false);
        spec.prefill = PrefillChoice::NONE;
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let whole = backend.run(&problem.case(&spec.form), None);
        for (b, row) in active(&problem) {
            let first = part_of(&problem, &row, b, 0..CHUNK);
            let first = backend.run(&first.case(&spec.form), None);
            let last = decode(&part_of(&problem, &row, b, CHUNK..CHUNK + 1));
            let last = backend.run(&go_on(last, &first).case(&spec.form), None);
            assert!(
                o_of(&whole, &row, CHUNK..CHUNK + 1) == last.o_bits(),
                "o of the last token of row {b} differs"
            );
            assert!(
                written_by(&whole, &row) == written_by(&last, &row),
                "what row {b} leaves differs"
            );
        }
    });
}

/// A prefill equals launches of 16 tokens up to rounding. These have the bits of as many decodes.
#[test]
fn a_prefill_is_decodes_but_for_rounding() {
    let adjust = |spec: &mut Spec| {
        f32_states(spec);
        (spec.conv, spec.norm, spec.packed) = (None, None, false);
        spec.prefill = PrefillChoice::NONE;
        spec.form.qkvo[3] = DType::F32;
        spec.slots.inactive = false;
        spec.options.null_slot = None;
        longer(spec, 70);
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let whole = problem.case(&spec.form);
        let prefill = backend.run(&whole, None);
        // An inactive row has a zero output.
        let mut steps = whole.clone();
        for row in of_problem(&problem).iter().filter(|row| row.live.is_none()) {
            for token in row.tokens.iter().flat_map(Clone::clone) {
                let o = steps.o().entry(&steps.token(token));
                write_bits(&mut steps, &o, &vec![0; o.positions().len()]);
            }
        }
        for (b, row) in active(&problem) {
            let mut pools: Option<Case> = None;
            for start in (0..len(&row)).step_by(16) {
                let part = start..len(&row).min(start + 16);
                let mut problem = decode(&part_of(&problem, &row, b, part.clone()));
                if let Some(after) = &pools {
                    problem = go_on(problem, after);
                }
                let after = backend.run(&problem.case(&spec.form), None);
                for (t, token) in part.enumerate() {
                    let first = row.tokens.as_ref().map_or(0, |tokens| tokens.start);
                    let to = steps.o().entry(&steps.token(first + token));
                    let from = after.bits(&after.o().entry(&after.token(t)));
                    write_bits(&mut steps, &to, &from);
                }
                pools = Some(after);
            }
            let (Some(after), Some(live)) = (pools, &row.live) else {
                continue;
            };
            for slot in live.writes() {
                let to = steps.as_klast(steps.written_pool()).entry(&[slot]);
                write_bits(&mut steps, &to, &after.slot_bits(slot));
            }
        }
        assert_near(&whole, &prefill, &steps);
    });
}

fn write_bits(case: &mut Case, view: &gated_delta_test_support::buffer::View, bits: &[u64]) {
    let buffer = &mut case.buffers[view.buffer];
    for (i, bits) in view.positions().into_iter().zip(bits) {
        buffer.set_bits(i, *bits);
    }
}

/// Whole chunks or splits before a row change no bit: only the position modulo 64 or modulo a split matters.
#[test]
fn whole_pieces_before_a_row_change_no_bit() {
    let adjust = |spec: &mut Spec| spec.prefill.checkpoints = None;
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let shifted = Problem {
            positions: Some(match &problem.positions {
                Some(positions) => {
                    let more = |position: i64| position + (7 * cut_unit(spec)) as i64;
                    Array::indices(positions.integers().into_iter().map(more))
                }
                None => Array::indices(vec![(3 * cut_unit(spec)) as i64; spec.batch]),
            }),
            ..problem.clone()
        };
        let [one, other] =
            [&problem, &shifted].map(|problem| backend.run(&problem.case(&spec.form), None));
        crate::laws::assert_same_bits(&one, &other);
    });
}

/// No decay, decays to nothing, β of 0, 1 and 2, and equal keys give finite results near the reference.
#[test]
fn extreme_gates_and_equal_keys_stay_finite() {
    let adjust = |spec: &mut Spec| {
        (spec.conv, spec.norm) = (None, None);
        (spec.gates, spec.form.gates) = (GateKind::Given, [DType::F32; 2]);
        longer(spec, 66);
    };
    law(adjust, |backend, spec| {
        let decays = [0.0, -1e30, f64::NEG_INFINITY, -1e-3, -50.0];
        for (turn, beta) in [0.0, 1.0, 2.0].into_iter().enumerate() {
            let seed = spec.seed as usize;
            let mut problem = spec.problem().map_gates(|gate, betas| {
                let decay = |i: usize| decays[(i * 7 + i / 13 + seed + turn) % decays.len()];
                for (i, gate) in gate.values.iter_mut().enumerate() {
                    *gate = decay(i);
                }
                betas.values.fill(beta);
            });
            if let (Some(new), true) = (&mut problem.new, turn != 0) {
                let (heads, dim) = (new.tokens.k.dims[2], spec.dim);
                let key: Vec<f64> = (0..heads * dim).map(|i| 1.0 + (i % 5) as f64).collect();
                for token in new.tokens.k.values.chunks_mut(heads * dim) {
                    // Unread keys stay NaN.
                    if token[0].is_finite() {
                        token.copy_from_slice(&key);
                    }
                }
                let scale = 1.0 / 30.0;
                new.tokens.k.values.iter_mut().for_each(|k| *k *= scale);
            }
            let before = problem.case(&spec.form);
            let after = backend.run(&before, None);
            check(&before, &after);
            for (b, row) in active(&problem) {
                for token in row.tokens.iter().flat_map(Clone::clone) {
                    let o = after.floats(&after.o().entry(&after.token(token)));
                    assert!(
                        o.iter().all(|o| o.is_finite()),
                        "o of row {b} is not finite"
                    );
                }
            }
        }
    });
}

#[test]
fn nan_stays_in_its_row() {
    let adjust = |spec: &mut Spec| {
        in_place(spec);
        spec.batch = spec.batch.max(3);
        with_checkpoints(spec);
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let rows = active(&problem);
        if rows.len() < 2 {
            return;
        }
        let (_, sick) = &rows[spec.seed as usize % rows.len()];
        let tokens = sick.tokens.clone().unwrap_or(0..0);
        let nan = problem.each_new(|array| {
            if array.values.is_empty() {
                return;
            }
            for token in tokens.clone() {
                array.entry_mut(2, token).fill(f64::NAN);
            }
        });
        // Cases skip NaN when they write values to memory, but unwritten memory is NaN already.
        let [well, ill] =
            [&problem, &nan].map(|problem| backend.run(&problem.case(&spec.form), None));
        for (b, row) in rows.iter().filter(|(_, row)| row != sick) {
            let all = 0..len(row);
            assert!(
                o_of(&well, row, all.clone()) == o_of(&ill, row, all),
                "o of row {b} differs"
            );
            assert!(
                written_by(&well, row) == written_by(&ill, row),
                "what row {b} writes differs"
            );
        }
    });
}

/// A token whose q, k or v is infinite or NaN, or whose k or v has another size, changes no bit of earlier tokens.
#[test]
fn a_token_changes_nothing_before_it() {
    let adjust = |spec: &mut Spec| {
        (spec.conv, spec.packed) = (None, false);
        longer(spec, 2);
    };
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let well = backend.run(&problem.case(&spec.form), None);
        let at = spec.seed as usize % problem.max_tokens();
        let wrong = [
            ("q", f64::INFINITY),
            ("k", f64::INFINITY),
            ("k", f64::NAN),
            ("k", 1e25),
            ("v", f64::INFINITY),
            ("v", f64::NAN),
            ("v", 1e6),
            ("v", 1e-8),
        ];
        let (which, factor) = wrong[spec.seed as usize / 7 % wrong.len()];
        let ill = problem.each(|name, array| {
            if name == which {
                for b in 0..spec.batch {
                    let token = array.entry_mut(2, b * spec.tokens + at);
                    match factor.is_finite() {
                        true => token.iter_mut().for_each(|x| *x *= factor),
                        false => token[0] = factor,
                    }
                }
            }
        });
        let ill = backend.run(&ill.case(&spec.form), None);
        for (b, row) in active(&problem) {
            assert!(
                o_of(&well, &row, 0..at) == o_of(&ill, &row, 0..at),
                "o of row {b} before token {at} with a {which} of {factor} differs"
            );
        }
    });
}

/// A row with more than the promised 64 tokens writes no output, state or window.
#[test]
fn nothing_of_a_row_longer_than_promised_is_written() {
    let adjust = |spec: &mut Spec| {
        spec.packed = true;
        spec.batch = spec.batch.max(2);
        (spec.slots.inactive, spec.options.null_slot) = (false, None);
        longer(spec, 2 * CHUNK);
    };
    law(adjust, |backend, spec| {
        let mut problem = spec.problem();
        let [(one, _), .., (other, _)] = active(&problem)[..] else {
            return;
        };
        // Tokens of inactive rows are NaN, and this test gives them to active rows.
        let mut rows = of_problem(&problem).into_iter();
        if rows.any(|row| row.tokens.is_some() && row.live.is_none()) {
            return;
        }
        let packed = problem.packed.as_mut().expect("rows are packed");
        packed.max_tokens = CHUNK;
        // One row gets all tokens but 20, another one the rest.
        let mut bounds = packed.cu_seqlens.integers();
        let [first, end] = [bounds[0], bounds[spec.batch]];
        bounds[..=one].fill(first);
        bounds[one + 1..=other].fill((end - 20).max(first));
        bounds[other + 1..].fill(end);
        packed.cu_seqlens = Array::indices(bounds);
        let before = problem.case(&spec.form);
        check(&before, &backend.run(&before, None));
    });
}

/// Dense rows without tokens copy their start states, as packed ones do.
#[test]
fn rows_without_tokens_write_what_they_start_from() {
    let adjust = |spec: &mut Spec| spec.packed = false;
    law(adjust, |backend, spec| {
        let problem = spec.problem();
        let none = problem.each_new(|array| *array = array.take(1, &[]));
        let dense = backend.run(&none.case(&spec.form), None);
        let packed = Problem {
            packed: Some(gated_delta_harness::arguments::Packed {
                cu_seqlens: Array::indices(vec![0; spec.batch + 1]),
                max_tokens: usize::MAX,
            }),
            ..none.each_new(|array| {
                let dims: Vec<usize> = [1, 0].iter().chain(&array.dims[2..]).copied().collect();
                *array = array.clone().reshape(&dims);
            })
        };
        let before = packed.case(&spec.form);
        let after = backend.run(&before, None);
        check(&before, &after);
        assert!(dense.state_bits() == after.state_bits(), "dense rows");
    });
}

//! Every family of kernels against the reference, on fixed cases. `entries` has random ones.

use gated_delta::{Activation, BetaScale, DType, Formulation, KdaBeta, StateLayout};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};
use gated_delta_reference::gate::{sigmoid, softplus_log_decay};
use gated_delta_reference::recurrence::{Token, default_scale, normalise, recurrence};
use gated_delta_test_support::backend::{Turns, backends, on_threads, simulator};
use gated_delta_test_support::compare::{assert_close, check, check_in_turn, norm, reference};
use gated_delta_test_support::layout::{Form, Layout, Spacing};
use gated_delta_test_support::problem::{Array, Change, Problem, Sizes};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Magnitude, Spec};

/// Runs `test` on each family, on all cores. The GPU takes a part of the problems, and other ones for neighbouring families.
fn each(families: Vec<Family>, test: impl Fn(&Turns, Family) + Sync) {
    each_of(families, |_, turns, family| test(turns, family));
}

/// Like [`each`], with the position of each family.
fn each_of(families: Vec<Family>, test: impl Fn(usize, &Turns, Family) + Sync) {
    let families: Vec<_> = families.into_iter().enumerate().collect();
    on_threads(&families, |&(i, family)| {
        test(i, &Turns::of_fixed(i), family);
    });
}

/// The launches of `plain` with each way of keeping states that its family has.
fn ways(family: Family, plain: &Spec) -> Vec<Spec> {
    let of_tokens = SlotChoice {
        inactive: plain.slots.inactive,
        ..SlotChoice::OF_TOKENS
    };
    let mut frozen = plain.clone();
    (frozen.update_state, frozen.slots.write) = (false, false);
    let mut ways = vec![plain.clone(), frozen];
    if family.decode {
        return ways;
    }
    if family.is_recurrent() {
        ways.push(Spec {
            snapshots: Some(1),
            ..plain.clone()
        });
        ways.push(Spec {
            slots: of_tokens,
            ..plain.clone()
        });
    }
    for tokens in [plain.tokens, 0] {
        ways.push(Spec {
            previous: Some(2),
            tokens,
            ..plain.clone()
        });
    }
    ways
}

#[test]
fn every_number_of_tokens() {
    let mut families = Family::of_kernels();
    families.retain(|family| !family.decode && family.dim == 64);
    each(families, |turns, family| {
        for tokens in 1..=family.max_tokens() {
            let spec = Spec {
                batch: 1,
                heads: 1,
                ratio: 2,
                tokens,
                seed: tokens as u64,
                ..Spec::plain(family)
            };
            check_in_turn(turns, &spec.case(), None);
            let previous = Some(family.max_tokens() + 1 - tokens);
            check_in_turn(turns, &Spec { previous, ..spec }.case(), None);
        }
    });
}

/// Every dtype of every tensor, aligned and unaligned. Of two neighbouring families one has a dtype aligned, the other unaligned.
#[test]
fn every_element_type() {
    each_of(Family::all(), |i, turns, family| {
        for (j, element) in [DType::F32, DType::Bf16, DType::F16]
            .into_iter()
            .enumerate()
        {
            let spacing = [Spacing::Dense, Spacing::Odd][(i + j) % 2];
            let mut spec = Spec {
                batch: 1,
                heads: 1,
                previous: (!family.decode).then_some(2),
                ..Spec::plain(family)
            };
            spec.form = Form {
                qkvo: [element; 4],
                gates: [element; 2],
                norm: [element; 2],
                io: spacing,
                pools: spacing,
                ..spec.form
            };
            check_in_turn(turns, &spec.case(), None);
        }
    });
}

#[test]
fn gates_at_the_ends_of_their_range() {
    let of_kda = |decay| GateKind::Kda(decay, KdaBeta::Logit);
    each(Family::of_kernels(), |turns, family| {
        let gates = match family.operator {
            Operator::Gdn => [
                GateKind::Raw(BetaScale::One),
                GateKind::Raw(BetaScale::Two),
                GateKind::Given,
            ],
            Operator::Kda => [
                of_kda(DecayKind::Softplus),
                of_kda(DecayKind::LowerBound(-5.0)),
                of_kda(DecayKind::Log),
            ],
        };
        for (seed, gates) in (1..).zip(gates) {
            let mut spec = Spec {
                extreme_gates: true,
                gates,
                seed,
                heads: 1,
                ratio: 3,
                batch: 1,
                ..Spec::plain(family)
            };
            spec.form.gates = [DType::F32; 2];
            check_in_turn(turns, &spec.case(), None);
        }
    });
}

#[test]
fn zero_queries_and_keys() {
    each(Family::of_kernels(), |turns, family| {
        for qk_l2norm in [true, false] {
            // Without l2norm the code is the same for all dims.
            if !qk_l2norm && family.dim > 64 {
                continue;
            }
            let mut spec = Spec {
                magnitude: Magnitude::Zeros,
                seed: 5,
                ..Spec::plain(family)
            };
            spec.options.qk_l2norm = qk_l2norm;
            check_in_turn(turns, &spec.case(), None);
        }
    });
}

/// Normalised q and k with elements of 1e38, 1e19 and 1e-20 next to usual ones give the right results, though f32 does not hold
/// their squares.
#[test]
fn queries_and_keys_beyond_the_squares_of_f32() {
    each(Family::of_kernels(), |turns, family| {
        for previous in [None, Some(2)] {
            // The same code normalises previous tokens of other families.
            if previous.is_some() && (family.decode || family.dim > 64) {
                continue;
            }
            let spec = Spec {
                magnitude: Magnitude::Extreme,
                seed: 5,
                previous,
                ..Spec::plain(family)
            };
            check_in_turn(turns, &spec.case(), None);
        }
    });
}

/// Keys of length 5e12 after a decay of e⁻⁷⁴: the inverse norm times the decay is below the least f32. The state and o are not.
#[test]
fn long_keys_after_a_strong_decay() {
    each(Family::of_kernels(), |turns, family| {
        // f16 does not hold this decay (docs/prefill.md), nor does the factor of GDN token by token (docs/gdn.md). A layer's gates are
        // those of its recurrence.
        let by_token = family.is_recurrent() && family.operator == Operator::Gdn;
        if by_token || family.decode || family.is_chunked() || family.layer {
            return;
        }
        let gates = match family.operator {
            Operator::Gdn => GateKind::Given,
            Operator::Kda => GateKind::Kda(DecayKind::Log, KdaBeta::Given),
        };
        let mut spec = Spec {
            gates,
            batch: 1,
            ..Spec::plain(family)
        };
        spec.form.gates = [DType::F32; 2];
        let problem = spec.problem().each(|name, array| match name {
            "q" | "k" => array.values.iter_mut().for_each(|x| *x *= 1e12),
            "pool" => array.values.iter_mut().for_each(|x| *x *= 1e24),
            "v" => array.values.fill(0.0),
            "g" => {
                let of_token = array.values.len() / spec.tokens;
                array.values[..of_token].fill(-74.0);
            }
            _ => {}
        });
        check_in_turn(turns, &problem.case(&spec.form), None);
    });
}

/// An output o with elements of about 1e25 is normed correctly.
#[test]
fn outputs_beyond_the_squares_of_f32_are_normed() {
    each(Family::of_kernels(), |turns, family| {
        if !family.layer {
            return;
        }
        let spec = Spec {
            batch: 1,
            conv: None,
            ..Spec::plain(family)
        };
        let problem = spec.problem().each(|name, array| {
            if ["v", "pool"].contains(&name) {
                array.values.iter_mut().for_each(|value| *value *= 1e25);
            }
        });
        check_in_turn(turns, &problem.case(&spec.form), None);
    });
}

/// Many inactive rows among few active ones, with all kinds of indices.
#[test]
fn inactive_rows() {
    each_of(Family::of_kernels(), |i, turns, family| {
        for (seed, index) in [DType::I32, DType::I64, DType::U32].into_iter().enumerate() {
            let mut spec = Spec {
                batch: 8,
                tokens: 1,
                heads: 1,
                ratio: 1,
                slots: SlotChoice::BOTH,
                packed: !family.decode,
                ..Spec::plain(family)
            };
            spec.form.indices = [index; 6];
            // Every second kernel of each kind of index has a null slot.
            spec.options.null_slot = [None, Some(0)][(i + seed) % 2];
            spec.seed = seed as u64;
            let case = spec.case();
            let live = case.rows().iter().filter(|row| row.live.is_some()).count();
            assert!(
                (1..spec.batch).contains(&live),
                "{live} live rows of {}: choose another seed",
                spec.batch
            );
            check_in_turn(turns, &case, None);
        }
    });
}

#[test]
fn an_empty_batch_does_nothing() {
    each(Family::of_kernels(), |turns, family| {
        let spare = SlotChoice {
            spare: 2,
            ..SlotChoice::NONE
        };
        for slots in [spare, SlotChoice::LIVE] {
            let plain = Spec {
                batch: 0,
                slots,
                ..Spec::plain(family)
            };
            for spec in ways(family, &plain) {
                for packed in [false, spec.tokens > 0 && !family.decode] {
                    let case = Spec {
                        packed,
                        ..spec.clone()
                    }
                    .case();
                    turns.next(|backend| {
                        let after = backend.run(&case, None);
                        assert!(after == case, "{}: something was written", backend.name());
                    });
                }
            }
        }
    });
}

/// A batch of padding rows, which engines launch to warm up, has zero output and leaves all states as they were.
#[test]
fn an_inactive_batch_touches_no_state() {
    // The code that skips rows is the same for all dims.
    let mut families = Family::of_kernels();
    families.retain(|family| family.dim == 64);
    each(families, |turns, family| {
        let plain = Spec {
            slots: SlotChoice::LIVE,
            ..Spec::plain(family)
        };
        for spec in ways(family, &plain) {
            let good = spec.problem();
            let fill = |wanted: &[&str], with: i64| {
                good.each(|name, array| {
                    if wanted.contains(&name) {
                        array.values.fill(with as f64);
                    }
                })
            };
            let mut problems = vec![fill(&["read_slots", "token_slots"], -1)];
            if good.accepted.is_some() {
                problems.extend([0, 4].map(|accepted| fill(&["accepted"], accepted)));
            }
            if good.windows().is_some() && good.token_slots.is_some() {
                // Here the windows have no slots, though the states have.
                problems.push(good.each(|name, array| {
                    if name == "token_slots" {
                        let rows = array.values.chunks_mut(spec.tokens);
                        rows.for_each(|row| row[0] = -1.0);
                    }
                }));
            }
            if good.has_previous() {
                problems.extend([-1, 3].map(|keep| fill(&["keep"], keep)));
            }
            for problem in problems {
                let case = problem.case(&spec.form);
                turns.next(|backend| {
                    let after = backend.run(&case, None);
                    assert!(
                        after.o_bits().iter().all(|bits| *bits == 0),
                        "{}",
                        backend.name()
                    );
                    check(&case, &after);
                    assert!(after.state_bits() == case.state_bits(), "states differ");
                    assert!(after.window_bits() == case.window_bits(), "windows differ");
                });
            }
        }
    });
}

/// A pool that is not written may be borrowed read-only, as may every tensor except o.
#[test]
fn without_update_the_pool_is_only_read() {
    each(Family::of_kernels(), |turns, family| {
        let mut spec = Spec::plain(family);
        spec.update_state = false;
        let case = spec.case();
        assert!(!case.writes(case.pool.buffer));
        check_in_turn(turns, &case, None);
    });
}

/// Packed rows without tokens copy their states. Rows with too many tokens or with bounds out of range touch nothing but o, which
/// is zero for tokens of no row.
#[test]
fn rows_without_tokens_write_what_they_start_from() {
    let mut families = Family::of_kernels();
    families.retain(|family| !family.decode);
    each(families, |turns, family| {
        let plain = Spec {
            slots: SlotChoice::LIVE,
            ..Spec::plain(family)
        };
        for spec in ways(family, &plain).iter().filter(|spec| spec.tokens > 0) {
            let packed = spec.problem().packed();
            for cu_seqlens in [[6, 6, 6], [0, 0, 0], [4, 3, 2], [-3, 0, -1], [5, 7, 6]] {
                // The code that reads bounds is the same for all dims.
                if family.dim > 64 && cu_seqlens[0] != 6 {
                    continue;
                }
                let mut problem = packed.clone();
                if let Some(packed) = &mut problem.packed {
                    packed.cu_seqlens = Array::indices(cu_seqlens);
                }
                let case = problem.case(&spec.form);
                turns.next(|backend| {
                    let after = backend.run(&case, None);
                    if cu_seqlens.is_sorted() {
                        check(&case, &after);
                    } else {
                        assert!(after.state_bits() == case.state_bits(), "{cu_seqlens:?}");
                        assert!(after.window_bits() == case.window_bits(), "{cu_seqlens:?}");
                    }
                });
            }
        }
    });
}

/// f16 states that would overflow become the largest f16, and later results are finite. This holds for each way of keeping states.
#[test]
fn f16_states_stop_at_the_largest_one() {
    let wanted = |family: Family| family.state == DType::F16 && family.dim == 64;
    each(Family::which(wanted), |turns, family| {
        let mut plain = Spec::plain(family);
        plain.form.qkvo = [DType::F32; 4];
        // δ² is beyond f32 where |v| is 1e28.
        let sizes: &[f64] = match family.formulation {
            Formulation::Parallel => &[1e6, 1e28],
            _ => &[1e6],
        };
        let specs = ways(family, &plain);
        for (spec, size) in specs
            .iter()
            .flat_map(|spec| sizes.iter().map(move |size| (spec, size)))
        {
            let problem = spec.problem().each(|name, array| {
                if matches!(name, "v" | "x" | "previous v" | "previous x") {
                    array.values.iter_mut().for_each(|value| *value *= size);
                }
            });
            let case = problem.case(&spec.form);
            turns.next(|backend| {
                let after = backend.run(&case, None);
                check(&case, &after);
                if case.state_bits() == after.state_bits() {
                    return; // No state is written.
                }
                let is = |wanted: u64| move |bits: &u64| bits & 0x7fff == wanted;
                let bits = after.state_bits();
                assert!(bits.iter().any(is(0x7bff)), "{family:?}: none is so large");
                assert!(!bits.iter().any(is(0x7c00)), "{family:?}: an infinity");
            });
        }
    });
}

/// The [`ways`] of a family that write states.
fn written(family: Family, plain: &Spec) -> Vec<Spec> {
    let mut ways = ways(family, plain);
    ways.retain(|spec| spec.update_state);
    ways
}

/// The families of the parallel formulation, which multiply on tensor cores in the dtype of the state.
fn at_once() -> Vec<Family> {
    Family::which(|family| family.formulation == Formulation::Parallel)
}

/// q and k of sizes that f32 can represent and f16 cannot, normalised and not, in 32 and in 16 bits, given or made by a
/// convolution.
#[test]
fn keys_and_queries_of_every_size() {
    each(at_once(), |turns, family| {
        for (seed, element) in (1..).zip([DType::F32, DType::Bf16]) {
            // Each dtype has the smallest and the largest sizes normalised. The other sizes have one dtype each.
            let others = match element {
                DType::F32 => [(1e-4, 1e4, true), (1e-9, 1e12, false), (0.1, 1e4, false)],
                _ => [(1e4, 1e-4, true), (1e-4, 1e-9, false), (0.1, 1e4, false)],
            };
            let ends = [(1e-9, 1e-6, true), (1e12, 1e15, true)];
            for (of_k, of_q, qk_l2norm) in ends.into_iter().chain(others) {
                let mut plain = Spec {
                    seed,
                    batch: 1,
                    ratio: 1,
                    norm: None,
                    ..Spec::plain(family)
                };
                plain.form.qkvo = [element; 4];
                plain.form.qkvo[3] = DType::F32;
                plain.options.qk_l2norm = qk_l2norm;
                if let Some(conv) = &mut plain.conv {
                    conv.activation = Activation::None;
                }
                for spec in written(family, &plain) {
                    let keys = plain.heads * family.dim;
                    let problem = spec.problem().each(|name, array| {
                        let width = array.dims.last().copied().unwrap_or(1);
                        let (q, k) = match name {
                            "q" => (array.values.len(), 0),
                            "k" | "previous k" => (0, array.values.len()),
                            "conv_weight" => (keys * width, keys * width),
                            _ => (0, 0),
                        };
                        let (queries, rest) = array.values.split_at_mut(q);
                        queries.iter_mut().for_each(|value| *value *= of_q);
                        rest[..k].iter_mut().for_each(|value| *value *= of_k);
                    });
                    check_in_turn(turns, &problem.case(&spec.form), None);
                }
            }
        }
    });
}

/// Tokens that decay a state to almost nothing and write little or nothing keep the relative error of the small rest within the
/// usual bound.
#[test]
fn what_has_decayed_keeps_its_digits() {
    each(at_once(), |turns, family| {
        for (seed, beta) in (1..).zip([0.0, 1e-9, 1e-4]) {
            let mut plain = Spec {
                seed,
                batch: 1,
                ratio: 1,
                tokens: 8,
                norm: None,
                gates: match family.operator {
                    Operator::Kda => GateKind::Kda(DecayKind::Log, KdaBeta::Given),
                    Operator::Gdn => GateKind::Given,
                },
                ..Spec::plain(family)
            };
            plain.form.qkvo = [DType::F32; 4];
            plain.form.gates = [DType::F32; 2];
            for spec in written(family, &plain) {
                let problem = spec.problem().map_gates(|gate, of_token| {
                    of_token.values.fill(beta);
                    gate.values.iter_mut().for_each(|log| *log -= 1.0);
                });
                check_in_turn(turns, &problem.case(&spec.form), None);
            }
        }
    });
}

/// Factors on tensor cores, except states, are split into two 16-bit parts. So results of f32 tokens are ten times more exact than
/// single f16 factors would give.
#[test]
fn factors_at_once_have_more_digits_than_one_of_16_bits() {
    const MOST: f64 = 2e-5;
    each(at_once(), |turns, family| {
        let mut plain = Spec {
            norm: None,
            tokens: 4,
            ..Spec::plain(family)
        };
        plain.form.qkvo = [DType::F32; 4];
        for spec in written(family, &plain) {
            if spec.previous.is_some() && spec.tokens > 0 {
                continue; // A resume verifies from a rounded state.
            }
            let case = spec.case();
            let pool = case.as_klast(&case.pool);
            let (o, states) = reference(&case, &case.floats(&pool));
            turns.next(|backend| {
                let after = backend.run(&case, None);
                if let Some(view) = after.outputs() {
                    let got = after.floats(view);
                    assert_close("o", &got, &o, DType::F32, MOST * norm(&o));
                }
                let got = after.floats(&after.as_klast(after.written_pool()));
                assert_close("states", &got, &states, family.state, MOST * norm(&states));
            });
        }
    });
}

/// After hundreds of in-place launches with f32 states rounding errors have not accumulated, since the decay forgets them.
#[test]
fn a_long_sequence_stays_near_the_truth() {
    const STEPS: u64 = 300;
    let wanted = |family: Family| {
        let decode = family.decode && !family.layer && family.operator == Operator::Gdn;
        decode && family.state == DType::F32 && family.dim == 64
    };
    for family in Family::which(wanted) {
        let spec = Spec {
            batch: 1,
            heads: 1,
            ratio: 1,
            form: Form::PLAIN,
            ..Spec::plain(family)
        };
        let start = spec.problem().pool;
        let step = |seed| {
            let spec = spec.clone();
            Spec { seed, ..spec }.problem()
        };
        let steps: Vec<Problem> = (0..STEPS).map(step).collect();
        let tokens: Vec<Token> = steps.iter().map(token).collect();
        let truth = recurrence(&start.values, &tokens).unwrap();
        for backend in backends() {
            let mut pool = start.clone();
            for (step, truth) in steps.iter().zip(&truth) {
                let mut step = step.clone();
                step.pool = pool.clone();
                let after = backend.run(&step.case(&spec.form), None);
                pool.values = after.floats(&after.as_klast(&after.pool));
                let allowed = 1e-5 * norm(&truth.state);
                assert_close("state", &pool.values, &truth.state, DType::F32, allowed);
            }
        }
    }
}

/// The token of one row and head.
fn token(problem: &Problem) -> Token {
    let new = problem.new.as_ref().unwrap();
    let (q, k, v) = (&new.q.values, &new.tokens.k.values, &new.tokens.v.values);
    let [gate, beta] = [&new.tokens.gate, &new.tokens.beta].map(|array| array.values[0]);
    let parameter = |array: &Option<Array>| array.as_ref().unwrap().values[0];
    let (a_log, dt_bias) = (parameter(&problem.a_log), parameter(&problem.dt_bias));
    Token {
        q: normalise(q, true, default_scale(k.len())),
        k: normalise(k, true, 1.0),
        log_decay: vec![softplus_log_decay(gate, a_log, dt_bias); k.len()],
        beta: sigmoid(beta),
        v: v.clone(),
    }
}

/// `bytes` counts each state that is read or written once, and every other tensor once.
#[test]
fn bytes_are_what_must_be_moved() {
    let bytes_of = |plain: &Spec, change: fn(&mut Spec)| {
        let mut spec = plain.clone();
        change(&mut spec);
        let case = spec.case();
        assert_eq!(case.batch(), 3);
        let (bytes, _) = simulator()
            .with(&case, |_, _, args| args.work()?.bytes())
            .unwrap();
        bytes.unwrap()
    };
    let plain = |family| Spec {
        batch: 3,
        ..Spec::plain(family)
    };
    let state = 3 * 4 * 64 * 64 * 4;
    let of_tokens = |tokens: u64| 2 * tokens * ((2 + 4) * 64 + 4 + 4);
    let new = |tokens| of_tokens(tokens) + 2 * tokens * (2 + 4) * 64 + 4 * (4 + 4);

    let decode = plain(Family::decode(StateLayout::KLast, DType::F32, 64));
    let bytes = |change| bytes_of(&decode, change);
    assert_eq!(bytes(|_| {}), 2 * state + new(3));
    assert_eq!(
        bytes(|spec| spec.slots.read = true),
        2 * state + new(3) + 12
    );
    assert_eq!(bytes(|spec| spec.update_state = false), state + new(3));

    let verify = plain(Family::new(
        Operator::Gdn,
        StateLayout::KLast,
        DType::F32,
        64,
    ));
    let bytes = |change| bytes_of(&verify, change);
    let new = new(9);
    assert_eq!(bytes(|_| {}), 2 * state + new);
    assert_eq!(bytes(|spec| spec.slots.read = true), 2 * state + new + 12);
    assert_eq!(bytes(|spec| spec.update_state = false), state + new);
    assert_eq!(bytes(|spec| spec.snapshots = Some(2)), 5 * state + new);
    assert_eq!(
        bytes(|spec| (spec.snapshots, spec.update_state) = (Some(0), false)),
        4 * state + new
    );
    assert_eq!(
        bytes(|spec| spec.slots = SlotChoice::OF_TOKENS),
        4 * state + new + 4 * (9 + 3)
    );
    assert_eq!(
        bytes(|spec| spec.previous = Some(5)),
        2 * state + new + of_tokens(15) + 12
    );
    assert_eq!(
        bytes(|spec| (spec.previous, spec.tokens) = (Some(5), 0)),
        2 * state + of_tokens(15) + 4 * (4 + 4) + 12
    );
}

//! A graph that was captured after a prewarm takes the indices that are in memory at each replay.

use std::ffi::c_void;

use gated_delta::driver::{Context, Graph, Stream};
use gated_delta::{DType, Tensor};
use gated_delta_harness::arguments::{Arguments, Operator};
use gated_delta_test_support::backend::{cuda, launch, of_gpu, on_threads};
use gated_delta_test_support::buffer::Buffer;
use gated_delta_test_support::case::Case;
use gated_delta_test_support::deferred;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Array, Change, Problem, keep};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};

use crate::launches::{context_of, spec, wait_for_copies};

/// Overwrites a tensor's buffer. No work may be running.
fn overwrite(context: &Context, tensor: &Tensor<'_>, buffer: &Buffer) {
    let _current = context.enter().unwrap();
    let (from, bytes) = (
        buffer.words.as_ptr().cast::<c_void>(),
        size_of_val(&*buffer.words),
    );
    // SAFETY: the tensor is a whole buffer of that many words, and no other work is running.
    unsafe { context.driver().memcpy_htod(tensor.address(), from, bytes) }.unwrap();
    wait_for_copies(context);
}

/// The tensors that change between replays: indices, and the projections of a layer.
fn changing<T: Clone>(args: &Arguments<T>) -> Vec<T> {
    let names = [
        "read_slots",
        "write_slots",
        "token_slots",
        "accepted",
        "cu_seqlens",
        "keep",
        "fresh",
        "positions",
        "checkpoint_slots",
        "pending len",
        "pending base",
        "x",
        "z",
    ];
    let mut args = args.clone();
    let all = args.tensors_mut().into_iter();
    let changing = all.filter(|(name, _)| names.contains(name));
    changing.map(|(_, tensor)| tensor.clone()).collect()
}

/// One family of each kind that `wanted` accepts. Empty without a GPU, so that no problem is made.
fn kinds(wanted: fn(Family) -> bool) -> Vec<Family> {
    let mut kinds = Family::of_each_kind();
    kinds.retain(|&family| cuda().is_some() && wanted(family));
    kinds
}

/// Captures a launch of `problems[0]` and replays the graph with the indices of each problem. Each replay must equal a launch. In a
/// layer x and z change too.
fn replay(name: &str, spec: &Spec, problems: &[Problem]) {
    let cases = problems.iter().map(|problem| problem.case(&spec.form));
    replay_cases(name, &cases.collect::<Vec<_>>());
}

/// Like `replay`, for cases in memory.
fn replay_cases(name: &str, cases: &[Case]) {
    let Some(backend) = cuda() else { return };
    let first = &cases[0];
    let mut eager = first.clone();
    for case in cases {
        for view in changing(&case.args) {
            assert_eq!(view.offset, 0);
            eager.buffers[view.buffer] = case.buffers[view.buffer].clone();
        }
        eager = backend.run(&eager, None);
    }
    let (_, replayed) = backend
        .with(first, |library, _, args| {
            let context = context_of(library);
            let stream = Stream::new(context).unwrap();
            library.prewarm(&*args.work().unwrap()).unwrap();
            // SAFETY: the buffers are alive until `with` has waited; live rows write slots of their own.
            let mut graph =
                unsafe { Graph::capture(&stream, || launch(library, stream.as_ref(), args, None)) }
                    .unwrap();
            for case in cases {
                let tensors = changing(args).into_iter();
                for (tensor, view) in tensors.zip(changing(&case.args)) {
                    overwrite(context, &tensor, &case.buffers[view.buffer]);
                }
                // SAFETY: as above.
                unsafe { graph.launch(&stream) }.unwrap();
                stream.synchronize().unwrap();
            }
        })
        .unwrap();
    assert!(replayed == eager, "{name}: a replay differs from launches");
}

#[test]
fn a_replayed_graph_sees_changed_slots() {
    on_threads(&kinds(|_| true), |&family| {
        let spec = spec(family);
        let problem = spec.problem();
        let slots = problem.read_slots.as_ref().unwrap().integers();
        let with_slots = |slots: [i64; 4]| Problem {
            read_slots: Some(Array::indices(slots)),
            ..problem.clone()
        };
        let problems = [
            with_slots([-1; 4]),
            problem.clone(),
            with_slots([slots[0], -1, slots[2], i32::MAX.into()]),
        ];
        replay(&format!("{family:?}"), &spec, &problems);
    });
}

/// A thousand replays of a layer step, as an engine decodes: rows come and go, and start new sequences.
#[test]
fn a_layer_step_replayed_a_thousand_times() {
    const REPLAYS: usize = 1000;
    on_threads(&kinds(|family| family.layer), |&family| {
        let spec = Spec {
            fresh: true,
            slots: SlotChoice {
                write: false,
                ..SlotChoice::LIVE
            },
            ..spec(family)
        };
        let slots = [
            [0, 1, 2, 3],
            [3, -1, 1, 0],
            [5, 4, -1, 6],
            [-1; 4],
            [2, 6, 0, i32::MAX.into()],
        ];
        let fresh = [
            [1, 1, 1, 1],
            [0, 1, 0, 0],
            [1, 1, 1, -1],
            [1; 4],
            [0, 0, 1, 1],
        ];
        let problems: Vec<Problem> = (0..REPLAYS)
            .map(|i| {
                let mut problem = Spec {
                    // The launch reads no NaN except in slots that no row has written.
                    slots: SlotChoice::NONE,
                    seed: i as u64 % 7,
                    ..spec.clone()
                }
                .problem();
                let first = spec.problem();
                (problem.pool, problem.read_slots) = (first.pool, None);
                if let (Some(convolved), Some(first)) = (&mut problem.convolved, first.convolved) {
                    convolved.windows = first.windows;
                    (convolved.weight, convolved.gate) = (first.weight, first.gate);
                    convolved.beta = first.beta;
                }
                problem.read_slots = Some(Array::indices(slots[i % slots.len()]));
                problem.fresh = Some(Array::indices(fresh[i * i % fresh.len()]));
                problem
            })
            .collect();
        replay(&format!("{family:?}"), &spec, &problems);
    });
}

#[test]
fn a_replayed_graph_sees_changed_lengths() {
    on_threads(&kinds(|family| !family.decode), |&family| {
        let mut spec = spec(family);
        spec.form.indices[4] = DType::I64;
        let packed = spec.problem().packed();
        let with_lengths = |bounds: [i64; 5]| {
            let mut problem = packed.clone();
            if let Some(packed) = &mut problem.packed {
                packed.cu_seqlens = Array::indices(bounds);
            }
            problem
        };
        let problems = [
            with_lengths([0; 5]),
            packed.clone(),
            with_lengths([0, 1, 3, 3, 6]),
            with_lengths([3, 6, 9, -1, 12]),
        ];
        replay(&format!("{family:?}"), &spec, &problems);
    });
}

/// A replay takes other lengths, positions, single-token rows and slots of checkpoints than the graph was captured with. The GPU takes
/// a share of the families, with a convolution and a norm or without.
#[test]
fn a_replayed_prefill_sees_changed_lengths_and_positions() {
    const TOKENS: i64 = 260;
    if cuda().is_none() {
        return;
    }
    let families = Family::prefills();
    let with_around = families
        .iter()
        .flat_map(|&family| [(family, false), (family, true)]);
    on_threads(&of_gpu(with_around.collect(), 0), |&(family, around)| {
        let mut spec = Spec {
            tokens: TOKENS as usize / 4,
            ..spec(family)
        };
        spec.form.indices[4] = DType::I64;
        spec.prefill.positions = true;
        spec.prefill.checkpoints = Some([1, 4]);
        if around {
            let layer = Spec::plain(Family::layer(
                Operator::Gdn,
                family.layout,
                family.state,
                family.dim,
            ));
            (spec.conv, spec.norm) = (layer.conv, layer.norm);
        }
        let packed = spec.problem().packed();
        let with = |bounds: [i64; 5], positions: [i64; 4]| {
            let mut problem = packed.clone();
            if let Some(packed) = &mut problem.packed {
                packed.cu_seqlens = Array::indices(bounds);
                packed.max_tokens = TOKENS as usize;
            }
            problem.positions = Some(Array::indices(positions));
            if let Some(checkpoints) = &mut problem.checkpoints {
                let slots = checkpoints.slots.integers();
                let turned = slots.iter().cycle().skip(positions[0] as usize % 7);
                let turned: Vec<i64> = turned.take(slots.len()).copied().collect();
                checkpoints.slots = Array::indices(turned).reshape(&[4, 4]);
            }
            problem
        };
        let problems = [
            with([0, 65, 130, 195, TOKENS], [0; 4]),
            with([0; 5], [0; 4]),
            with([0, TOKENS, TOKENS, TOKENS, TOKENS], [0, 3, 0, 0]),
            with([0, 1, 2, TOKENS - 1, TOKENS], [63, 64, 65, 0]),
            with([10, 74, 139, 139, 141], [1, 0, 7, 127]),
        ];
        replay(&format!("{family:?}, {around}"), &spec, &problems);
    });
}

/// Forty steps with deferred write-back, as an engine decodes: each row flushes at a different step, by the lengths at the replay.
#[test]
fn a_replayed_graph_sees_what_is_pending() {
    if cuda().is_none() {
        return;
    }
    let entries: Vec<_> = deferred::entries().collect();
    on_threads(&entries, |&entry| {
        for spec in deferred::of_entry(entry, &[0, 3, 8, 7]) {
            let mut problems = vec![spec.problem()];
            for step in 1..40 {
                let last = &problems[step - 1];
                // One draft in five is rejected.
                problems.push(last.next(last, usize::from(step % 5 > 0), spec.seed));
            }
            let cases: Vec<Case> = problems.iter().map(deferred::Problem::case).collect();
            replay_cases(&format!("{spec:?}"), &cases);
        }
    });
}

/// Replays of a resume, packed and not, and of a commit take other numbers of kept tokens.
#[test]
fn a_replayed_graph_sees_other_accepted_prefixes() {
    on_threads(&kinds(|family| !family.decode), |&family| {
        for (tokens, packed) in [(3, false), (3, true), (0, false)] {
            let spec = Spec {
                previous: Some(5),
                tokens,
                ..spec(family)
            };
            let mut problem = spec.problem();
            if packed {
                problem = problem.packed();
            }
            let kept = keep(&problem).unwrap().integers();
            let with_keep = |change: fn(i64) -> i64| {
                problem.each(|name, array| {
                    if name == "keep" {
                        *array = Array::indices(kept.iter().map(|keep| change(*keep)));
                    }
                })
            };
            let problems = [
                with_keep(|_| -1),
                problem.clone(),
                with_keep(|keep| keep / 2),
                with_keep(|keep| if keep > 2 { 6 } else { 0 }),
            ];
            replay(&format!("{family:?}, {tokens} tokens"), &spec, &problems);
        }
    });
}

#[test]
fn a_replayed_graph_sees_changed_token_slots() {
    on_threads(
        &kinds(|family| !family.decode && family.is_recurrent()),
        |&family| {
            let slots = SlotChoice {
                inactive: false,
                spare: 12,
                ..SlotChoice::OF_TOKENS
            };
            let spec = Spec {
                slots,
                ..spec(family)
            };
            let problem = spec.problem();
            let mut other = problem.take_rows(&[1, 0, 3, 2]);
            other.new = problem.new.clone();
            other.convolved = problem.convolved.clone();
            other.accepted = Some(Array::indices([3, 4, 1, 2]));
            let mut nobody = problem.clone();
            nobody.accepted = Some(Array::indices([0; 4]));
            let problems = [nobody, problem, other];
            replay(&format!("{family:?}"), &spec, &problems);
        },
    );
}

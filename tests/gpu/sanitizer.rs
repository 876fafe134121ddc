//! Small launches of every entry with every form and every switch, for `compute-sanitizer`, which sees what a comparison
//! does not.
//!
//! `SHARD=i/n` launches each n-th of them from the i-th on, so that n processes share the work: a sanitizer follows one
//! launch at a time. `ENTRIES=kinds` launches one entry of each kind of text, which is what a sanitizer has the time for; without
//! it, without a sanitizer, every entry is compared with the reference in every form.

use std::env;
use std::sync::Mutex;

use gated_delta::{Activation, BetaScale, DType, Entry, HeadMap, KdaBeta};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};
use gated_delta_test_support::backend::{cuda, cuda_for, on_threads, simulator_for};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::deferred;
use gated_delta_test_support::layout::{Form, Spacing};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{ConvChoice, Family, NormChoice, Spec};
use gated_delta_test_support::{entries_of_each_kind, variants_on};

type Change = fn(&mut Spec);

/// Wide and narrow accesses, each element and index type, active and inactive rows, each gate.
const FORMS: [Change; 6] = [
    |_| {},
    |spec| {
        spec.form = Form {
            qkvo: [DType::F32; 4],
            gates: [DType::F32; 2],
            indices: [DType::I64; 6],
            ..spec.form
        };
        (spec.options.head_map, spec.options.qk_l2norm) = (HeadMap::Tiled, false);
        spec.gates = gates(spec, GateKind::Given, DecayKind::Log, KdaBeta::Given);
        spec.slots.write_pool = Some(1);
    },
    |spec| {
        spec.form = Form {
            qkvo: [DType::F16; 4],
            gates: [DType::F16; 2],
            indices: [DType::U32; 6],
            ..spec.form
        };
        (spec.form.packed, spec.form.io, spec.form.pools) =
            (true, Spacing::Aligned, Spacing::Aligned);
        let raw = GateKind::Raw(BetaScale::Two);
        spec.gates = gates(spec, raw, DecayKind::LowerBound(-5.0), KdaBeta::Logit);
        spec.options.null_slot = Some(0);
    },
    |spec| {
        spec.form = Form {
            qkvo: [DType::F32; 4],
            gates: [DType::F32; 2],
            ..spec.form
        };
        (spec.form.io, spec.form.pools) = (Spacing::Odd, Spacing::Odd);
        (spec.update_state, spec.slots.write) = (false, false);
        (spec.parameters.a_log, spec.parameters.dt_bias) = (false, false);
    },
    |spec| {
        (spec.form.packed, spec.form.io, spec.form.pools) = (true, Spacing::Odd, Spacing::Odd);
        (spec.batch, spec.slots) = (2, SlotChoice::NONE);
        spec.parameters.of_h = true;
    },
    |spec| {
        spec.form = Form {
            qkvo: [DType::F16; 4],
            gates: [DType::F16; 2],
            indices: [
                DType::I64,
                DType::U32,
                DType::I64,
                DType::U32,
                DType::I64,
                DType::U32,
            ],
            ..spec.form
        };
        (spec.form.io, spec.form.pools, spec.extreme_gates) = (Spacing::Odd, Spacing::Dense, true);
    },
];

/// What is around the recurrence, and fresh rows, in the form of the same place. Of a decode, the fresh rows.
const AROUND: [Change; 6] = [
    |_| {},
    |spec| {
        (spec.norm, spec.fresh) = (None, true);
        let around = spec.conv.iter_mut();
        around.for_each(|conv| (conv.taps, conv.bias) = (2, true));
    },
    |spec| {
        spec.form.norm = [DType::F16, DType::F32];
        let around = spec.conv.iter_mut();
        around.for_each(|conv| (conv.activation, conv.apart) = (Activation::None, true));
    },
    |spec| (spec.conv, spec.fresh) = (None, true),
    |spec| {
        (spec.fresh, spec.form.token_major) = (true, true);
        let around = spec.norm.iter_mut();
        around.for_each(|norm| norm.activation = Activation::Sigmoid);
    },
    |spec| {
        spec.form.norm = [DType::F32, DType::F16];
        (spec.fresh, spec.form.fresh) = (true, DType::I64);
        let around = spec.conv.iter_mut();
        around.for_each(|conv| (conv.taps, conv.bias, conv.apart) = (3, true, true));
    },
];

/// One packed token, and ways of keeping states, of operators that take several tokens.
const SWITCHES: [Change; 6] = [
    |spec| (spec.tokens, spec.packed) = (1, true),
    |spec| (spec.snapshots, spec.packed) = (Some(2), true),
    |spec| {
        let SlotChoice { write_pool, .. } = spec.slots;
        spec.slots = SlotChoice {
            write_pool,
            ..SlotChoice::OF_TOKENS
        };
        (spec.snapshots, spec.update_state) = (Some(0), true);
    },
    |spec| (spec.previous, spec.update_state) = (Some(4), true),
    |spec| (spec.previous, spec.packed, spec.update_state) = (Some(2), true, true),
    |spec| (spec.previous, spec.tokens, spec.update_state) = (Some(5), 0, true),
];

/// What prefills have, in the form of the same place.
const PREFILLS: [Change; 6] = [
    |spec| spec.prefill.checkpoints = Some([1, 1]),
    |spec| (spec.packed, spec.prefill.positions) = (true, true),
    |spec| {
        (spec.conv, spec.norm) = (Some(CONV), Some(NORM));
        spec.prefill.checkpoints = Some([1, 2]);
    },
    |spec| (spec.packed, spec.fresh, spec.norm) = (true, true, Some(NORM)),
    |spec| {
        (spec.packed, spec.fresh, spec.conv) = (true, true, Some(CONV));
        (spec.prefill.positions, spec.prefill.checkpoints) = (true, Some([1, 1]));
    },
    |spec| (spec.conv, spec.norm, spec.form.token_major) = (Some(CONV), Some(NORM), true),
];

const CONV: ConvChoice = ConvChoice {
    taps: 4,
    bias: true,
    activation: Activation::Silu,
    apart: false,
    window_snapshots: None,
};

const NORM: NormChoice = NormChoice {
    eps: 1e-6,
    activation: Activation::Silu,
};

/// Whether it is for rows of at most 64 tokens.
fn is_short(entry: Entry) -> bool {
    let computes = entry.computes();
    computes.is_some_and(|computes| computes.family.max_tokens() == 64)
}

/// The operator's gates.
fn gates(spec: &Spec, gdn: GateKind, decay: DecayKind, beta: KdaBeta) -> GateKind {
    match spec.gates.operator() {
        Operator::Kda => GateKind::Kda(decay, beta),
        Operator::Gdn => gdn,
    }
}

/// Each form, and each switch in one form that the entry takes it in. Which one is the next at each `turn`: the entries
/// of a kernel have most pairs between them.
fn specs(entry: Entry, family: Family, turn: usize) -> Vec<Spec> {
    let plain = Spec {
        batch: 4,
        slots: SlotChoice::BOTH,
        seed: 4,
        ratio: entry.max_ratio().min(2) as usize,
        ..Spec::plain(family)
    };
    let of = |form: Change, switches: Change| {
        let mut spec = plain.clone();
        form(&mut spec);
        switches(&mut spec);
        spec
    };
    if family.is_chunked() {
        let forms = FORMS.into_iter().zip(PREFILLS).enumerate();
        return forms
            .map(|(i, (form, prefill))| {
                let mut spec = of(form, prefill);
                // A state is written. Of two pieces, or of one in the launch of short rows.
                spec.update_state = true;
                spec.tokens = if is_short(entry) { 33 } else { 65 + i % 2 };
                if !is_short(entry) && i % 2 == 1 {
                    // Where it is packed, rows of one token have a launch of their own beside it.
                    (spec.prefill.singles, spec.prefill.unpromised) = (true, true);
                }
                // Packed rows of more than 64 tokens, or of none that has more.
                let takes = |seed: &u64| {
                    let spec = Spec {
                        seed: *seed,
                        ..spec.clone()
                    };
                    variants_on(simulator_for(entry), &spec.case()).contains(&entry)
                };
                spec.seed = (4..20).find(takes).unwrap_or(spec.seed);
                spec
            })
            .collect();
    }
    if family.decode {
        let forms = FORMS.into_iter().zip(AROUND);
        return forms.map(|(form, around)| of(form, around)).collect();
    }
    let mut specs: Vec<_> = FORMS.into_iter().map(|form| of(form, |_| {})).collect();
    for (i, switches) in SWITCHES.into_iter().enumerate() {
        let forms = FORMS.iter().cycle().skip(i + turn).take(FORMS.len());
        specs.extend(forms.map(|form| of(*form, switches)).find(|spec| {
            let each_token = spec.snapshots.is_some() || spec.slots.of_tokens.is_some();
            let takes = family.is_recurrent() || !each_token;
            takes && variants_on(simulator_for(entry), &spec.case()).contains(&entry)
        }));
    }
    specs
}

/// The entries whose launches are asked for.
fn entries() -> Vec<Entry> {
    match env::var("ENTRIES").as_deref() {
        Ok("kinds") => entries_of_each_kind(),
        Ok("all") | Err(_) => Entry::ALL.to_vec(),
        Ok(other) => panic!("ENTRIES: wanted all or kinds, got {other}"),
    }
}

/// One family of each layout and element of an entry's states: f16's kernels are bf16's.
fn families_of(entry: Entry) -> impl Iterator<Item = Family> {
    let all = Family::all_of(entry).into_iter();
    all.filter(|family| family.state != DType::F16)
}

/// What is launched of these entries.
fn launches(entries: &[Entry]) -> Vec<(Entry, Spec)> {
    let entries: Vec<(usize, Entry)> = entries.iter().copied().enumerate().collect();
    let made = Mutex::new(Vec::new());
    on_threads(&entries, |&(turn, entry)| {
        for family in families_of(entry) {
            let specs = specs(entry, family, turn);
            made.lock().unwrap().push((turn, entry, specs));
        }
    });
    let mut made = made.into_inner().unwrap();
    made.sort_by_key(|(turn, ..)| *turn);
    let of_entry = |(_, entry, specs): (usize, Entry, Vec<Spec>)| {
        specs.into_iter().map(move |spec| (entry, spec))
    };
    made.into_iter().flat_map(of_entry).collect()
}

/// i and n of `i/n`.
fn parse_shard(text: &str) -> Option<[usize; 2]> {
    let (i, n) = text.split_once('/')?;
    let [i, n] = [i.parse().ok()?, n.parse().ok()?];
    (i < n).then_some([i, n])
}

/// Those of `all` that are this process's.
fn of_this_process<T>(all: Vec<T>) -> Vec<T> {
    let text = env::var("SHARD").unwrap_or("0/1".into());
    let shard = parse_shard(&text);
    let shard = shard.unwrap_or_else(|| panic!("SHARD: wanted i/n with i below n, got {text}"));
    share(all, shard)
}

/// Each n-th from the i-th on.
fn share<T>(all: Vec<T>, [i, n]: [usize; 2]) -> Vec<T> {
    all.into_iter().skip(i).step_by(n).collect()
}

#[test]
fn sanitizer_every_entry_and_switch() {
    if cuda().is_none() {
        return;
    }
    on_threads(&of_this_process(launches(&entries())), |(entry, spec)| {
        if let (Some(backend), case) = (cuda_for(*entry), spec.case()) {
            check(&case, &backend.run(&case, Some(*entry)));
        }
    });
}

/// Steps and flushes on states that wait, of every entry: rows that fold and rows that do not, fresh and inactive ones; of a
/// layer with a convolution, a norm and both.
fn waiting(wanted: &[Entry]) -> Vec<(Entry, deferred::Spec)> {
    let steps = |spec: deferred::Spec| {
        let gaps = deferred::Spec {
            raw_gates: true,
            io: DType::F32,
            index: DType::I64,
            gap: 3,
            tiled: true,
            l2norm: false,
            fresh: Some(vec![false, false, true, false]),
            heads: [2, 2],
            ..spec.clone()
        };
        let nulls = deferred::Spec {
            index: DType::U32,
            null_slot: Some(1),
            ..spec.clone()
        };
        let (Some(conv), Some(_)) = (spec.conv, spec.norm) else {
            return vec![spec, gaps, deferred::Spec { tokens: 0, ..nulls }];
        };
        let conv = deferred::ConvSpec {
            taps: 3,
            bias: false,
            by_input: true,
            ..conv
        };
        let gaps = deferred::Spec {
            conv: Some(conv),
            norm: None,
            ..gaps
        };
        let flush = deferred::Spec {
            tokens: 0,
            fresh: None,
            ..gaps.clone()
        };
        let flush = spec.windows_wait().then_some(flush);
        let norm = deferred::Spec {
            conv: None,
            ..nulls
        };
        [spec, gaps, norm].into_iter().chain(flush).collect()
    };
    let of = |entry| {
        let specs = deferred::of_entry(entry, &[0, 8, 5, 9]);
        let specs = specs.into_iter().flat_map(steps);
        specs.map(move |spec| (entry, spec))
    };
    let entries = deferred::entries().filter(|entry| wanted.contains(entry));
    entries.flat_map(of).collect()
}

#[test]
fn sanitizer_states_that_wait() {
    let Some(backend) = cuda() else { return };
    on_threads(&of_this_process(waiting(&entries())), |(entry, spec)| {
        let problem = spec.problem();
        problem.check(&problem.run(backend, Some(*entry)));
    });
}

#[test]
fn sanitizer_an_empty_batch() {
    let Some(backend) = cuda() else { return };
    on_threads(&of_this_process(Family::all()), |&family| {
        let case = Spec {
            batch: 0,
            slots: SlotChoice {
                spare: 1,
                ..SlotChoice::NONE
            },
            ..Spec::plain(family)
        }
        .case();
        assert!(
            backend.run(&case, None) == case,
            "{family:?}: something was written"
        );
    });
}

/// Of each entry every form, and every switch that its formulation has.
#[test]
fn every_entry_has_its_launches() {
    // Without a GPU there are none of all entries, and those of each kind are looked at.
    let all = match cuda() {
        Some(_) => Entry::ALL.to_vec(),
        None => entries_of_each_kind(),
    };
    on_threads(&all, |&entry| {
        for family in families_of(entry) {
            let turn = all.iter().position(|other| *other == entry);
            let of_entry = specs(entry, family, turn.unwrap_or(0)).into_iter();
            let taken = of_entry
                .filter(|spec| variants_on(simulator_for(entry), &spec.case()).contains(&entry));
            let wanted = match (family.decode, family.is_recurrent()) {
                _ if family.is_chunked() => PREFILLS.len(),
                (true, _) => FORMS.len(),
                (false, true) => FORMS.len() + SWITCHES.len(),
                // Without snapshots and token slots.
                (false, false) => FORMS.len() + SWITCHES.len() - 2,
            };
            assert_eq!(taken.count(), wanted, "{}, {family:?}", entry.name());
        }
    });
    for (entry, spec) in waiting(&all) {
        assert!(spec.tokens > 0 || spec.fresh.is_none(), "{spec:?}");
        let variants = spec.problem().variants();
        assert!(variants.contains(&entry), "{}: {spec:?}", entry.name());
    }
}

#[test]
fn processes_share_the_launches() {
    assert_eq!(parse_shard("2/3"), Some([2, 3]));
    for bad in ["", "1", "3/3", "a/3", "1/", "0/0", "-1/2"] {
        assert_eq!(parse_shard(bad), None, "{bad}");
    }
    let all: Vec<usize> = (0..10).collect();
    for n in 1..12 {
        let mut shared: Vec<_> = (0..n).flat_map(|i| share(all.clone(), [i, n])).collect();
        shared.sort_unstable();
        assert_eq!(shared, all, "{n}");
    }
}

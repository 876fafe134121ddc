//! Small launches of every entry with every form and every switch, for `compute-sanitizer`, which finds errors that do not change
//! results.
//!
//! `SHARD=i/n` launches every n-th of them from the i-th on, so that n processes share the work: a sanitizer follows one launch at
//! a time. `ENTRIES=kinds` launches one entry of each kind of text, as many as a sanitizer has time for, and `ENTRIES=all` launches all
//! entries. Without the variable, and without a sanitizer, every entry is compared with the reference in its share of these launches
//! (`GATED_DELTA_GPU_SHARE`).

use std::env;
use std::sync::Mutex;

use gated_delta::{Activation, BetaScale, DType, Entry, HeadMap, KdaBeta};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};
use gated_delta_test_support::backend::{
    cuda, cuda_for, is_of_gpu, of_gpu, on_threads, simulator_for,
};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::deferred;
use gated_delta_test_support::layout::{Form, Spacing};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{ConvChoice, Family, NormChoice, Spec};
use gated_delta_test_support::{entries_of_each_kind, variants_on};

type Change = fn(&mut Spec);

/// Wide and narrow accesses, each dtype of elements and indices, active and inactive rows, each kind of gates.
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

/// Convolution, norm and fresh rows, for the form at the same position. A decode takes the fresh rows only.
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

/// One packed token, and ways of keeping states, for operators that take several tokens.
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

/// Switches of prefills, for the form at the same position.
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

/// Whether the entry is for rows of at most 64 tokens.
fn is_short(entry: Entry) -> bool {
    let computes = entry.computes();
    computes.is_some_and(|computes| computes.family.max_tokens() == 64)
}

/// The gates of the operator: `gdn`, or those of KDA.
fn gates(spec: &Spec, gdn: GateKind, decay: DecayKind, beta: KdaBeta) -> GateKind {
    match spec.gates.operator() {
        Operator::Kda => GateKind::Kda(decay, beta),
        Operator::Gdn => gdn,
    }
}

/// Each form, and each switch in one form that the entry takes. `turn` selects this form, so that the entries of a kernel together
/// cover most pairs.
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
        spec.grow_to(entry);
        spec
    };
    if family.is_chunked() {
        let forms = FORMS.into_iter().zip(PREFILLS).enumerate();
        return forms
            .map(|(i, (form, prefill))| {
                let mut spec = of(form, prefill);
                // The launch writes states. Rows have two chunks, or one in the launch of short rows.
                spec.update_state = true;
                spec.tokens = if is_short(entry) { 33 } else { 65 + i % 2 };
                if !is_short(entry) && i % 2 == 1 {
                    // Packed rows of one token have a concurrent launch of their own.
                    (spec.prefill.singles, spec.prefill.unpromised) = (true, true);
                }
                // Some packed row has more than 64 tokens, or none has, as the entry requires.
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

/// The entries that the variables ask for.
fn entries() -> Vec<Entry> {
    match env::var("ENTRIES").as_deref() {
        Ok("kinds") => entries_of_each_kind(),
        Ok("all") | Err(_) => Entry::ALL.to_vec(),
        Ok(other) => panic!("ENTRIES: wanted all or kinds, got {other}"),
    }
}

/// One family of each layout and dtype of an entry's states, without f16, which shares kernels with bf16.
fn families_of(entry: Entry) -> impl Iterator<Item = Family> {
    let all = Family::all_of(entry).into_iter();
    all.filter(|family| family.state != DType::F16)
}

/// The wanted part of an entry's launches: all that `ENTRIES` names, or the GPU's share.
fn wanted<T>(launches: Vec<T>, turn: usize) -> Vec<T> {
    match env::var_os("ENTRIES") {
        Some(_) => launches,
        None => of_gpu(launches, turn),
    }
}

/// The launches of `entries`.
fn launches(entries: &[Entry]) -> Vec<(Entry, Spec)> {
    let entries: Vec<(usize, Entry)> = entries.iter().copied().enumerate().collect();
    let made = Mutex::new(Vec::new());
    on_threads(&entries, |&(turn, entry)| {
        let families = families_of(entry).enumerate();
        let all = families.flat_map(|(i, family)| {
            let specs = specs(entry, family, turn).into_iter().enumerate();
            // The kernels of a prefill are for all states: each form has one layout and dtype.
            let taken = specs.filter(move |(j, _)| !family.is_chunked() || is_of_gpu(i + j, 4));
            taken.map(|(_, spec)| spec)
        });
        let specs = wanted(all.collect(), turn);
        made.lock().unwrap().push((turn, entry, specs));
    });
    let mut made = made.into_inner().unwrap();
    made.sort_by_key(|(turn, ..)| *turn);
    let of_entry = |(_, entry, specs): (usize, Entry, Vec<Spec>)| {
        specs.into_iter().map(move |spec| (entry, spec))
    };
    made.into_iter().flat_map(of_entry).collect()
}

/// Parses `i/n` into i and n.
fn parse_shard(text: &str) -> Option<[usize; 2]> {
    let (i, n) = text.split_once('/')?;
    let [i, n] = [i.parse().ok()?, n.parse().ok()?];
    (i < n).then_some([i, n])
}

/// The part of `all` for this process.
fn of_this_process<T>(all: Vec<T>) -> Vec<T> {
    let text = env::var("SHARD").unwrap_or("0/1".into());
    let shard = parse_shard(&text);
    let shard = shard.unwrap_or_else(|| panic!("SHARD: wanted i/n with i below n, got {text}"));
    share(all, shard)
}

/// Every n-th element from the i-th on.
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

/// Steps and flushes with deferred write-back for each wanted entry: rows that flush and rows that do not, fresh and inactive ones.
/// Layers have a convolution, a norm, and both.
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
fn sanitizer_deferred() {
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

/// Each entry has a launch for every form, and for every switch that its formulation takes.
#[test]
fn every_entry_has_its_launches() {
    // Without a GPU the list of all entries is empty, so the entries of each kind are checked.
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
                // All switches except snapshots and token slots.
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

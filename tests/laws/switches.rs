//! How states are kept does not change what is computed: any two sets of switches agree wherever both define a result.

use gated_delta::Formulation;
use gated_delta_harness::arguments::Kept;
use gated_delta_tests::backend::{Backend, backends};
use gated_delta_tests::for_all;
use gated_delta_tests::layout::Layout;
use gated_delta_tests::problem::{Array, Change, Problem, Sizes, of_tokens};
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};
use gated_delta_tests::strategy::any_specs;
use proptest::prelude::{Strategy, any};
use proptest::sample::select;

use crate::run;

/// Where the state after a token goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Goal {
    InPlace,
    AnotherSlot,
    AnotherPool,
    Nowhere,
    /// A slot for each token, the row's own for the last one accepted.
    SlotOfToken,
    /// Not that of a new token: the row keeps its state, none of the previous tokens is kept.
    Committed,
}

/// A set of switches.
#[derive(Clone, Copy, Debug)]
struct Switches {
    goal: Goal,
    /// Read slots, where the goal allows them.
    read_slots: bool,
    /// More steps than tokens.
    snapshots: Option<usize>,
    packed: bool,
}

fn switches() -> impl Strategy<Value = Switches> {
    let goals = vec![
        Goal::InPlace,
        Goal::AnotherSlot,
        Goal::AnotherPool,
        Goal::Nowhere,
        Goal::SlotOfToken,
        Goal::Committed,
    ];
    (select(goals), any::<[bool; 3]>(), 0usize..3).prop_map(
        |(goal, [read_slots, snapshots, packed], more)| Switches {
            goal,
            read_slots,
            snapshots: snapshots.then_some(more),
            packed,
        },
    )
}

impl Switches {
    /// Without what `formulation` refuses.
    fn allowed(self, formulation: Formulation) -> Self {
        match (formulation, self.goal) {
            (Formulation::Recurrent, Goal::Committed) => Self {
                snapshots: None,
                ..self
            },
            (Formulation::Recurrent, _) => self,
            (_, Goal::SlotOfToken) => Self {
                goal: Goal::InPlace,
                snapshots: None,
                ..self
            },
            _ => Self {
                snapshots: None,
                ..self
            },
        }
    }

    /// `plain`, whose row b starts from slot b, with these switches.
    fn of(self, plain: &Problem) -> Problem {
        let (batch, tokens) = (plain.batch(), plain.max_tokens());
        let rows = || 0..batch as i64;
        let mut problem = plain.clone();
        let more_slots = |slots: usize| {
            let mut pool = plain.pool.clone();
            pool.dims[0] += slots;
            let len = pool.dims.iter().product();
            pool.values.resize(len, f64::NAN);
            pool
        };
        match self.goal {
            Goal::InPlace => {}
            Goal::AnotherSlot => {
                problem.pool = more_slots(batch);
                problem.write_slots = Some(Array::indices(rows().rev().map(|b| b + batch as i64)));
            }
            Goal::AnotherPool => {
                problem.write_pool = Some(Array::unread(&plain.pool.dims));
            }
            Goal::Nowhere => problem.update_state = false,
            Goal::SlotOfToken => {
                problem.pool = more_slots(batch * tokens);
                let accepted = |b: i64| b % tokens as i64 + 1;
                let of_row = |b: i64| {
                    (0..tokens as i64).map(move |t| match t + 1 == accepted(b) {
                        true => b,
                        false => batch as i64 + b * tokens as i64 + t,
                    })
                };
                let slots = Array::indices(rows().flat_map(of_row));
                problem.token_slots = Some(slots.reshape(&[batch, tokens]));
                problem.accepted = Some(Array::indices(rows().map(accepted)));
            }
            Goal::Committed => {
                let one = plain.take_tokens(&[0]).new;
                let mut tokens = one.expect("new tokens").tokens;
                for array in of_tokens(&mut tokens) {
                    array.values.clear();
                }
                let keep = Array::indices(vec![0; batch]);
                problem.previous = Some(Kept { tokens, keep });
            }
        }
        if self.read_slots && self.goal != Goal::SlotOfToken {
            problem.read_slots = Some(Array::indices(rows()));
        }
        problem.snapshots = self
            .snapshots
            .map(|more| Array::unread(&[&[batch, tokens + more], &plain.pool.dims[1..]].concat()));
        if self.packed {
            problem.packed()
        } else {
            problem
        }
    }
}

/// What a launch says about a row.
struct Results {
    /// For each token.
    o: Vec<Vec<u64>>,
    /// After each token, from wherever it is kept, each place that keeps it.
    states: Vec<Vec<Vec<u64>>>,
}

/// What `problem` with `switches` says about each row.
fn results(backend: &Backend, plain: &Problem, switches: Switches, spec: &Spec) -> Vec<Results> {
    let problem = switches.of(plain);
    let before = problem.case(&spec.form);
    let after = run(backend, &problem, &spec.form);
    let of_row = |(b, row): (usize, gated_delta_tests::rows::Row)| {
        let (tokens, live) = (row.tokens.unwrap(), row.live.unwrap());
        let state = |t| {
            let snapshot = after.snapshots.iter().map(move |_| (b, t));
            let stored = live.stores.iter().filter(move |store| store.0 == t);
            let snapshot = snapshot.map(|(b, t)| after.snapshot_bits(b, t));
            snapshot
                .chain(stored.map(|(_, slot)| after.slot_bits(*slot)))
                .collect()
        };
        Results {
            states: (0..tokens.len()).map(state).collect(),
            o: tokens
                .map(|token| after.bits(&after.o().entry(&after.token(token))))
                .collect(),
        }
    };
    before.rows().into_iter().enumerate().map(of_row).collect()
}

#[test]
fn switches_change_nothing_elsewhere() {
    let specs = any_specs(Family::several(), 8);
    let strategy = (specs, switches(), switches());
    for_all("laws", 150, &strategy, |(mut spec, one, other)| {
        spec.tokens = spec.tokens.max(1);
        (spec.packed, spec.previous, spec.snapshots) = (false, None, None);
        (spec.slots, spec.update_state, spec.fresh) = (SlotChoice::NONE, true, false);
        spec.options.null_slot = None;
        let plain = spec.problem();
        for backend in backends() {
            let [one, other] = [one, other].map(|switches| {
                let switches = switches.allowed(spec.options.formulation);
                results(backend, &plain, switches, &spec)
            });
            for (b, (one, other)) in one.iter().zip(&other).enumerate() {
                assert!(one.o == other.o, "o of row {b} differs");
                for (t, states) in one.states.iter().zip(&other.states).enumerate() {
                    let mut all = states.0.iter().chain(states.1);
                    let first = all.next();
                    assert!(
                        all.all(|state| Some(state) == first),
                        "the state of row {b} after token {t} differs"
                    );
                }
            }
        }
    });
}

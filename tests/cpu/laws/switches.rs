//! The way of keeping states does not change results: any two sets of switches agree on the results that both define.

use gated_delta::Formulation;
use gated_delta_harness::arguments::{Kept, KeptX, New};
use gated_delta_test_support::backend::{Backend, Turns};
use gated_delta_test_support::for_all;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{
    Array, Change, Problem, Sizes, of_tokens, window_snapshots, windows_mut,
};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};
use gated_delta_test_support::strategy::any_specs;
use proptest::prelude::{Strategy, any};
use proptest::sample::select;

use crate::laws::run;

/// Place that the state after a token is written to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Goal {
    InPlace,
    AnotherSlot,
    AnotherPool,
    Nowhere,
    /// A token slot for each token. The last accepted one is in the row's own slot.
    SlotOfToken,
    /// No place for states of new tokens. The row writes its start state, since no previous token is kept.
    Committed,
}

/// A combination of switches.
#[derive(Clone, Copy, Debug)]
struct Switches {
    goal: Goal,
    /// Whether there are read slots, if the goal allows them.
    read_slots: bool,
    /// Steps beyond T in the snapshots. `None` without snapshots.
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
    /// The switches without those that `formulation` refuses.
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
        let more_slots = |pool: &mut Array, slots: usize| {
            pool.dims[0] += slots;
            let len = pool.dims.iter().product();
            pool.values.resize(len, f64::NAN);
        };
        let windows = windows_mut(&mut problem);
        match self.goal {
            Goal::InPlace => {}
            Goal::AnotherSlot => {
                if let Some((windows, _)) = windows {
                    more_slots(windows, batch);
                }
                more_slots(&mut problem.pool, batch);
                problem.write_slots = Some(Array::indices(rows().rev().map(|b| b + batch as i64)));
            }
            Goal::AnotherPool => {
                if let Some((windows, others)) = windows {
                    *others = Some(Array::unread(&windows.dims));
                }
                problem.write_pool = Some(Array::unread(&plain.pool.dims));
            }
            Goal::Nowhere => problem.update_state = false,
            Goal::SlotOfToken => {
                let accepted = |b: i64| b % tokens as i64 + 1;
                if let Some((windows, _)) = windows {
                    let first = |b: i64| match accepted(b) {
                        1 => b as usize,
                        _ => batch + b as usize * tokens,
                    };
                    let places = rows().map(|b| [first(b), accepted(b) as usize - 1]);
                    widen(windows, tokens, batch * (tokens + 1), places);
                }
                more_slots(&mut problem.pool, batch * tokens);
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
                let one = plain.take_tokens(&[0]);
                let keep = Array::indices(vec![0; batch]);
                let unread = |array: Array| Array::unread(&array.dims);
                problem.previous_x = one.convolved.map(|one| KeptX {
                    x: unread(one.x),
                    gate: unread(one.gate),
                    beta: unread(one.beta),
                    keep: keep.clone(),
                    conv: None,
                });
                problem.previous = one.new.map(|New { mut tokens, .. }| {
                    for array in of_tokens(&mut tokens) {
                        array.values.clear();
                    }
                    Kept { tokens, keep }
                });
            }
        }
        if self.read_slots && self.goal != Goal::SlotOfToken {
            problem.read_slots = Some(Array::indices(rows()));
        }
        problem.snapshots = self
            .snapshots
            .map(|more| Array::unread(&[&[batch, tokens + more], &plain.pool.dims[1..]].concat()));
        if let Some(convolved) = &mut problem.convolved {
            let [_, channels, inputs] = plain.windows().expect("a convolution")[0].dims[..] else {
                panic!("windows have three dims")
            };
            convolved.window_snapshots = self
                .snapshots
                .map(|more| Array::unread(&[batch, tokens + more, channels, inputs]));
        }
        if self.packed {
            problem.packed()
        } else {
            problem
        }
    }
}

/// Replaces windows, row b's in slot b, by windows of `slots` slots with columns for `tokens` tokens. `places` has the slot and
/// column of each row's window.
fn widen(
    windows: &mut Array,
    tokens: usize,
    slots: usize,
    places: impl Iterator<Item = [usize; 2]>,
) {
    let [_, channels, inputs] = windows.dims[..] else {
        panic!("windows have three dims")
    };
    let columns = inputs - 1 + tokens;
    let mut wide = Array::unread(&[slots, channels, columns]).filled(f64::NAN);
    for (b, [slot, column]) in places.enumerate() {
        for c in 0..channels {
            let from = &windows.values[(b * channels + c) * inputs..][..inputs];
            let to = (slot * channels + c) * columns + column;
            wide.values[to..to + inputs].copy_from_slice(from);
        }
    }
    *windows = wide;
}

/// Results of a launch for one row.
struct Results {
    /// Bits of o, by token.
    o: Vec<Vec<u64>>,
    /// Bits of the state after each token, in each place that keeps it.
    states: Vec<Vec<Vec<u64>>>,
    /// Bits of the window after each token, in each place that keeps it.
    windows: Vec<Vec<Vec<u64>>>,
}

/// Results of each row of `plain` with `switches`.
fn results(backend: &Backend, plain: &Problem, switches: Switches, spec: &Spec) -> Vec<Results> {
    let problem = switches.of(plain);
    let before = problem.case(&spec.form);
    let after = run(backend, &problem, &spec.form);
    let of_row = |(b, row): (usize, gated_delta_test_support::rows::Row)| {
        let (tokens, live) = (row.tokens.unwrap(), row.live.unwrap());
        let state = |t| {
            let snapshot = after.snapshots.iter().map(move |_| (b, t));
            let stored = live.stores.iter().filter(move |store| store.0 == t);
            let snapshot = snapshot.map(|(b, t)| after.snapshot_bits(b, t));
            snapshot
                .chain(stored.map(|(_, slot)| after.slot_bits(*slot)))
                .collect()
        };
        let end = live.window.and_then(|window| window.end);
        let window = |t| {
            let stored = match problem.token_slots {
                Some(_) => end.map(|slot| after.window_bits_at(slot, t)),
                // A committed window precedes all new tokens.
                None => {
                    let last = end.filter(|_| t + 1 == tokens.len() && live.commit.is_none());
                    last.map(|slot| after.slot_window_bits(slot))
                }
            };
            let snapshot = window_snapshots(&after).map(|_| after.window_snapshot_bits(b, t));
            snapshot.into_iter().chain(stored).collect()
        };
        Results {
            states: (0..tokens.len()).map(state).collect(),
            windows: (0..tokens.len()).map(window).collect(),
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
    let turns = Turns::new(0);
    for_all("laws", 45, strategy, move |(mut spec, one, other)| {
        spec.tokens = spec.tokens.max(1);
        (spec.packed, spec.previous, spec.snapshots) = (false, None, None);
        (spec.slots, spec.update_state, spec.fresh) = (SlotChoice::NONE, true, false);
        spec.options.null_slot = None;
        spec.conv.iter_mut().for_each(|conv| conv.apart = false);
        // The problem must have room for one committed token more.
        spec.previous = Some(1);
        spec.fit();
        spec.previous = None;
        let plain = spec.problem();
        turns.next(|backend| {
            let [one, other] = [one, other].map(|switches| {
                let switches = switches.allowed(spec.options.formulation);
                results(backend, &plain, switches, &spec)
            });
            for (b, (one, other)) in one.iter().zip(&other).enumerate() {
                assert!(one.o == other.o, "o of row {b} differs");
                for (what, one, other) in [
                    ("state", &one.states, &other.states),
                    ("window", &one.windows, &other.windows),
                ] {
                    for (t, kept) in one.iter().zip(other).enumerate() {
                        let mut all = kept.0.iter().chain(kept.1);
                        let first = all.next();
                        assert!(
                            all.all(|other| Some(other) == first),
                            "the {what} of row {b} after token {t} differs"
                        );
                    }
                }
            }
        });
    });
}

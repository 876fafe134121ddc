//! What the tests share. Reading order: [`problem`] (values, whatever the memory), [`layout`] and [`case`] (the same in
//! memory, with NaN in every gap), [`rows`] (what each row does), [`backend`] (launches, in the simulator and on the GPU),
//! [`compare`] (what must have come out), [`choice`] (the formulation of who names none), [`spec`], [`slots`] and [`strategy`] (random problems), [`deferred`] (states that
//! wait for the tokens of a ring).

pub mod backend;
pub mod buffer;
pub mod case;
pub mod choice;
pub mod compare;
pub mod deferred;
pub mod layout;
pub mod problem;
pub mod rows;
pub mod slots;
pub mod spec;
pub mod strategy;
mod truth;

use std::fmt::Debug;
use std::path::Path;

use gated_delta::{DType, Entry, Formulation};
use gated_delta_kernels::constants::Element;
use gated_delta_kernels::launch;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, FailurePersistence, FileFailurePersistence, TestRunner};

use crate::backend::{Backend, Turns, simulator};
use crate::case::Case;
use crate::compare::check;
use crate::spec::Family;
use crate::strategy::specs;

/// Runs `test` on `cases` values of `strategy`, or on as many as `PROPTEST_CASES` says; panics with the smallest
/// value that fails. Seeds of failures are kept in `proptest-regressions/<subject>.txt`, where the sources are.
pub fn for_all<S: Strategy<Value: Debug>>(
    subject: &str,
    cases: u32,
    strategy: &S,
    test: impl Fn(S::Value),
) {
    let folder = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../proptest-regressions"
    ));
    let file = folder.join(subject).with_extension("txt");
    let failure_persistence = folder.is_dir().then(|| {
        let file = file.to_string_lossy().into_owned().leak();
        Box::new(FileFailurePersistence::Direct(file)) as Box<dyn FailurePersistence>
    });
    let mut config = Config {
        failure_persistence,
        ..Config::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    let ran = TestRunner::new(config).run(strategy, |value| {
        test(value);
        Ok(())
    });
    if let Err(failure) = ran {
        panic!("{failure}");
    }
}

/// Random problems through one entry, on every backend.
///
/// # Panics
/// Where a result is wrong, and where the entry is of no family.
pub fn differential(entry: Entry) {
    // What is launched around others has no cases but theirs.
    let own = entry.computes();
    let own = own.unwrap_or_else(|| panic!("an entry of no operator on states"));
    let chain_of = |per_channel: bool| {
        let is_wanted = |other: &&Entry| {
            let computes = other.computes();
            computes.is_some_and(|it| {
                it.family.is_chain() && (it.per_channel, it.k) == (Some(per_channel), own.k)
            })
        };
        Entry::ALL.iter().find(is_wanted).copied()
    };
    let chains = match (own.family.stage(), own.per_channel) {
        (Some(launch::Stage::Prepare), Some(per_channel)) => [chain_of(per_channel), None],
        (Some(_), None) => [false, true].map(chain_of),
        _ => [None; 2],
    };
    let own_families = Family::all_of(entry).into_iter();
    let mut families: Vec<_> = own_families.map(|family| (None, family)).collect();
    for chain in chains.into_iter().flatten() {
        let all = Family::all_of(chain).into_iter();
        // Of what knows no states those of one kind.
        let is_first = |family: &Family| {
            (family.layout, family.state) == (gated_delta::StateLayout::KLast, DType::Bf16)
        };
        let all = all.filter(|family| own.family.knows_states() || is_first(family));
        families.extend(all.map(|family| (Some(chain), family)));
    }
    assert!(!families.is_empty(), "an entry of no operator on states");
    for (last, family) in families {
        // f16 differs from bf16 in a conversion, but on tensor cores.
        let is_parallel = family.formulation == Formulation::Parallel;
        let share = match (family.state, is_parallel) {
            (DType::F16, false) => 3,
            (DType::F16, true) => 2,
            _ => 1,
        };
        of_family(entry, last, family, share);
    }
}

/// A part in `share` of the problems of one family.
fn of_family(entry: Entry, last: Option<Entry>, family: Family, share: u32) {
    let (cases, states) = match (family.dim, family.max_tokens()) {
        // Of pieces of 64 tokens.
        (64, _) if family.is_chunked() => (6, 4),
        _ if family.is_chunked() => (3, 2),
        (64, _) if family.layer => (12, 16),
        _ if family.layer => (4, 8),
        (64, 1) => (24, 24),
        (_, 1) => (9, 12),
        (64, _) => (18, 16),
        _ => (6, 8),
    };
    let turns = Turns::of_entry(entry);
    for_all(
        entry.operator(),
        cases / share,
        &specs(family, states),
        |mut spec| {
            if entry
                .computes()
                .is_some_and(|own| own.family.takes_singles())
            {
                spec.packed = true;
                (spec.prefill.singles, spec.prefill.unpromised) = (true, true);
            }
            let case = spec.case();
            // One dense token is a decode's; two tiles a warp take no resume of unaligned views; not every layer's kernel
            // has room for all value heads of a query/key head, nor for their tokens.
            let variant = last.unwrap_or(entry);
            turns.next(|backend| {
                if variants_on(backend, &case).contains(&variant) {
                    check(&case, &backend.run(&case, Some(variant)));
                }
            });
        },
    );
}

/// One entry of each kind of kernel text: by what it computes, the layout, and what it asks of the hardware. Of every other kind
/// it is one of f32 states, where there is one. What does not hang on sizes, as faults and races, is looked for in these.
#[must_use]
pub fn entries_of_each_kind() -> Vec<Entry> {
    let kind = |entry: Entry| {
        let computes = entry.computes();
        let computes = computes.map(|of| (of.family, of.states.map(|states| states.layout)));
        let name = computes.is_none().then(|| entry.name());
        (
            computes,
            name,
            entry.takes_clusters(),
            entry.takes_warpgroups(),
        )
    };
    let mut kinds: Vec<Vec<Entry>> = Vec::new();
    for &entry in Entry::ALL {
        match kinds.iter_mut().find(|of| kind(of[0]) == kind(entry)) {
            Some(of) => of.push(entry),
            None => kinds.push(vec![entry]),
        }
    }
    let is_f32 = |entry: &&Entry| {
        let computes = entry.computes();
        let states = computes.and_then(|of| of.states);
        states.is_some_and(|states| states.element == Element::F32)
    };
    let of_kinds = kinds.iter().enumerate().map(|(i, of)| {
        let wanted = of.iter().find(|entry| is_f32(entry) == (i % 2 == 1));
        *wanted.unwrap_or(&of[0])
    });
    of_kinds.collect()
}

/// The variants of a case.
///
/// # Panics
/// Where it is refused.
#[must_use]
pub fn variants(case: &Case) -> Vec<Entry> {
    variants_on(simulator(), case)
}

/// The variants of a case on a backend.
///
/// # Panics
/// Where it is refused.
#[must_use]
pub fn variants_on(backend: &Backend, case: &Case) -> Vec<Entry> {
    let (variants, _) = backend
        .with(case, |library, _, args| library.variants(&*args.work()?))
        .unwrap_or_else(|error| panic!("{error}"));
    variants.unwrap_or_else(|error| panic!("{error}"))
}

/// A [`differential`] test for each entry of an operator, for `for_each_entry!`.
#[macro_export]
macro_rules! differential_tests {
    ($operator:ident: $($entry:ident = $of:ident::$body:ident<$($parameter:tt),*>;)*) => {
        mod entries {
            $($crate::differential_tests!(@ $operator $of $entry);)*
        }
    };
    (@ gdn_decode gdn_decode $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ recurrent recurrent $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ gdn_mtp gdn_mtp $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ kda_recurrent kda_recurrent $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ layer layer $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ gdn_prefill gdn_prefill $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ kda_prefill kda_prefill $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ prefill prefill $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ layer_mtp layer_mtp $entry:ident) => { $crate::differential_tests!(@test $entry); };
    (@ $operator:ident $of:ident $entry:ident) => {};
    (@test $entry:ident) => {
        #[test]
        fn $entry() {
            $crate::differential(gated_delta::Entry::$entry);
        }
    };
}

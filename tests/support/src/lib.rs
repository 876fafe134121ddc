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

use std::env;
use std::fmt::Debug;
use std::path::Path;

use gated_delta::Entry;
use gated_delta_kernels::constants::Element;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, FailurePersistence, FileFailurePersistence, TestRunner};

use crate::backend::{Backend, simulator};
use crate::case::Case;

/// How many times the usual number of cases every random test has: `GATED_DELTA_DEPTH`, or 1.
///
/// # Panics
/// Where it is no number above 0.
#[must_use]
pub fn depth() -> u32 {
    env::var("GATED_DELTA_DEPTH").map_or(1, |depth| {
        let number = depth.parse().ok().filter(|depth| *depth > 0);
        number.unwrap_or_else(|| panic!("GATED_DELTA_DEPTH: wanted 1 or more, got {depth}"))
    })
}

/// Runs `test` on `cases` values of `strategy`, times [`depth`]; panics with the smallest value that fails. Seeds of failures are
/// kept in `proptest-regressions/<subject>.txt`, where the sources are.
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
    let config = Config {
        failure_persistence,
        cases: cases * depth(),
        ..Config::default()
    };
    let ran = TestRunner::new(config).run(strategy, |value| {
        test(value);
        Ok(())
    });
    if let Err(failure) = ran {
        panic!("{failure}");
    }
}

/// One entry of each kind of kernel text: by what it computes, the layout, and what it asks of the hardware. Of every other kind
/// it is one of f32 states, where there is one. What does not hang on sizes, as faults and races, is looked for in these.
#[must_use]
pub fn entries_of_each_kind() -> Vec<Entry> {
    let kind = |entry: Entry| {
        let computes = entry.computes();
        let computes = computes.map(|of| {
            let layout = of.states.map(|states| states.layout);
            (of.family, of.per_channel, layout)
        });
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

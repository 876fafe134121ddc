//! Support of the tests. Reading order: [`problem`] (values of a launch), [`layout`] and [`case`] (the same in memory, with NaN in
//! every gap), [`rows`] (tokens and slots of each row), [`backend`] (launches in the simulator and on the GPU), [`compare`] (checks
//! of results), [`choice`] (the expected formulation if none is named), [`spec`], [`slots`] and [`strategy`] (random problems),
//! [`deferred`] (deferred write-back).

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
use proptest::strategy::{BoxedStrategy, Strategy};
use proptest::test_runner::{
    Config, FailurePersistence, FileFailurePersistence, RngSeed, TestRunner,
};

use crate::backend::{Backend, simulator};
use crate::case::Case;

/// Factor of the number of cases of every random test: `GATED_DELTA_DEPTH`, 1 by default.
///
/// # Panics
/// If the variable is not a number above 0.
#[must_use]
pub fn depth() -> u32 {
    env::var("GATED_DELTA_DEPTH").map_or(1, |depth| {
        let number = depth.parse().ok().filter(|depth| *depth > 0);
        number.unwrap_or_else(|| panic!("GATED_DELTA_DEPTH: wanted 1 or more, got {depth}"))
    })
}

/// Seed of a random test. It is the same in every run of depth 1 with the same `GATED_DELTA_GPU_TURN`, so that a failure belongs to a
/// change, and new in each deeper run.
#[must_use]
pub fn seed(subject: &str) -> u64 {
    let turn = backend::first_turn() as u64;
    match depth() {
        1 => subject.bytes().fold(1 + turn, |seed: u64, byte| {
            seed.wrapping_mul(31).wrapping_add(byte.into())
        }),
        _ => rand::random(),
    }
}

/// Runs `test` on `cases` × [`depth`] values of `strategy`, and panics with the smallest failing value. Seeds of failures are kept
/// in `proptest-regressions/<subject>.txt`, next to the sources.
pub fn for_all<V: Debug>(
    subject: &str,
    cases: u32,
    strategy: impl Strategy<Value = V> + 'static,
    test: impl Fn(V),
) {
    run(subject, cases, &strategy.boxed(), &test);
}

/// [`for_all`], compiled once for each type of value rather than for each strategy and test.
fn run<V: Debug>(subject: &str, cases: u32, strategy: &BoxedStrategy<V>, test: &dyn Fn(V)) {
    let folder = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../proptest-regressions"
    ));
    let file = folder.join(subject).with_extension("txt");
    let failure_persistence = folder.is_dir().then(|| {
        let file = file.to_string_lossy().into_owned().leak();
        Box::new(FileFailurePersistence::Direct(file)) as Box<dyn FailurePersistence>
    });
    let usual = Config::default();
    let config = Config {
        failure_persistence,
        cases: cases * depth(),
        rng_seed: RngSeed::Fixed(seed(subject)),
        max_local_rejects: usual.max_local_rejects * depth(),
        max_global_rejects: usual.max_global_rejects * depth(),
        ..usual
    };
    let ran = TestRunner::new(config).run(strategy, |value| {
        test(value);
        Ok(())
    });
    if let Err(failure) = ran {
        panic!("{failure}");
    }
}

/// One entry of each kind of kernel text: by computation, layout of states, and hardware features. An entry of f32 states is taken
/// for every other kind that has one. Tests that do not depend on sizes, such as faults and races, run on these entries.
#[must_use]
pub fn entries_of_each_kind() -> Vec<Entry> {
    let kind = |entry: Entry| {
        let computes = entry.computes();
        let computes = computes.map(|of| (of.family, of.per_channel, of.layout));
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
        computes.is_some_and(|of| of.element == Some(Element::F32))
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
/// If the library refuses the case.
#[must_use]
pub fn variants(case: &Case) -> Vec<Entry> {
    variants_on(simulator(), case)
}

/// The variants of a case on a backend.
///
/// # Panics
/// If the library refuses the case.
#[must_use]
pub fn variants_on(backend: &Backend, case: &Case) -> Vec<Entry> {
    let (variants, _) = backend
        .with(case, |library, _, args| library.variants(&*args.work()?))
        .unwrap_or_else(|error| panic!("{error}"));
    variants.unwrap_or_else(|error| panic!("{error}"))
}

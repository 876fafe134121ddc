//! What the tests share. Reading order: [`problem`] (values, whatever the memory), [`layout`] and [`case`] (the same in
//! memory, with NaN in every gap), [`backend`] (the simulator and the GPU), [`compare`] (what must have come out),
//! [`spec`], [`slots`] and [`strategy`] (random problems).

pub mod backend;
pub mod buffer;
pub mod case;
pub mod compare;
pub mod layout;
pub mod problem;
pub mod slots;
pub mod spec;
pub mod strategy;

use std::fmt::Debug;
use std::path::Path;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, FailurePersistence, FileFailurePersistence, TestRunner};

/// Runs `test` on `cases` values of `strategy`, or on as many as `PROPTEST_CASES` says; panics with the smallest
/// value that fails. Seeds of failures are kept in `proptest-regressions/<subject>.txt`, where the sources are.
pub fn for_all<S: Strategy<Value: Debug>>(
    subject: &str,
    cases: u32,
    strategy: &S,
    test: impl Fn(S::Value),
) {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/proptest-regressions"));
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

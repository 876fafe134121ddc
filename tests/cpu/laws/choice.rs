//! A launch without a named formulation equals the launch that names the formulation of the library's choice.

use gated_delta::{Entry, Formulation};
use gated_delta_test_support::backend::simulator;
use gated_delta_test_support::case::Case;
use gated_delta_test_support::choice::chosen;
use gated_delta_test_support::spec::Family;
use gated_delta_test_support::strategy::any_specs;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use crate::laws::law_of;

fn families() -> Vec<Family> {
    let mut families = Family::all();
    families.extend(Family::prefills());
    families
}

/// The same case with this formulation named.
fn named(case: &Case, formulation: Formulation) -> Case {
    let mut case = case.clone();
    case.args.options = case.options.formulation(formulation);
    case
}

/// The formulation that the library chooses, the variants of the launch, and the selected one.
fn choice(case: &Case) -> (Formulation, Vec<Entry>, Entry) {
    let (found, _) = simulator()
        .with(case, |_, _, args| {
            let work = args.work()?;
            Ok::<_, gated_delta::Error>((work.formulation(), work.variants()?, work.selected()?))
        })
        .unwrap_or_else(|error| panic!("{error}"));
    found.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn what_is_chosen_is_the_launch_by_name() {
    law_of(
        families(),
        |_| {},
        |backend, spec| {
            let auto = named(&spec.case(), Formulation::Auto);
            let (formulation, variants, selected) = choice(&auto);
            assert_eq!(formulation, chosen(&auto), "another one is to be chosen");
            let by_name = named(&auto, formulation);
            assert_eq!(choice(&by_name), (formulation, variants, selected));
            assert!(
                backend.run(&auto, None) == backend.run(&by_name, None),
                "{formulation:?}, by name, differs"
            );
        },
    );
}

/// Random problems cover each formulation both named and chosen by the library.
#[test]
fn random_problems_name_a_formulation_or_none() {
    let mut runner = TestRunner::deterministic();
    for formulation in [
        Formulation::Recurrent,
        Formulation::Parallel,
        Formulation::Chunked,
    ] {
        let mut families = families();
        families.retain(|family| family.formulation == formulation);
        let specs = any_specs(families, 2);
        let [mut with_name, mut without] = [0, 0];
        for _ in 0..40 {
            let spec = specs.new_tree(&mut runner).expect("a problem").current();
            let case = spec.case();
            assert_eq!(case.formulation(), formulation);
            match case.options.formulation {
                Formulation::Auto => without += 1,
                _ => with_name += 1,
            }
        }
        assert!(
            with_name >= 4 && without >= 4,
            "{formulation:?}: {with_name} of 40 problems name it, {without} do not"
        );
    }
}

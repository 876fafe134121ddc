//! Every entry against the reference, over random problems of its family: what one entry makes of a problem is near the truth,
//! and what each other entry makes of the same problem has the same bits.

use gated_delta::{DType, Entry, Formulation};
use gated_delta_test_support::backend::{Backend, Turns, is_portable_chain, on_threads};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::{check, check_by, truth};
use gated_delta_test_support::spec::{Family, Spec};
use gated_delta_test_support::strategy::specs;
use gated_delta_test_support::{for_all, variants_on};

/// How many problems a family has, and the most states of one.
fn cases(family: Family) -> (u32, usize) {
    let (cases, states) = match (family.dim, family.max_tokens()) {
        // Of pieces of 64 tokens.
        (64, _) if family.is_chunked() => (8, 4),
        _ if family.is_chunked() => (4, 2),
        (64, _) if family.layer => (12, 16),
        _ if family.layer => (4, 8),
        (64, 1) => (24, 24),
        (_, 1) => (9, 12),
        (64, _) => (18, 16),
        _ => (6, 8),
    };
    // f16 differs from bf16 in a conversion, but on tensor cores.
    let share = match (family.state, family.formulation) {
        (DType::F16, Formulation::Parallel) => 2,
        (DType::F16, _) => 3,
        _ => 1,
    };
    (cases / share, states)
}

/// Problems of each of these families, made what they are to be by `adjust`.
fn differential(families: &[Family], adjust: impl Fn(&mut Spec) + Sync) {
    on_threads(families, |&family| {
        let (cases, states) = cases(family);
        let is_of_family = |entry: &Entry| Family::all_of(*entry).contains(&family);
        let entries: Vec<Entry> = Entry::ALL.iter().copied().filter(is_of_family).collect();
        // Chains for every GPU but Hopper run on others, in turn, all other entries on Hopper.
        let (portable, usual): (Vec<Entry>, Vec<Entry>) =
            (entries.iter()).partition(|entry| is_portable_chain(**entry));
        let groups = [usual, portable].into_iter().filter_map(|group| {
            let turns = Turns::of_entry(*group.first()?);
            Some((group, turns))
        });
        let groups: Vec<_> = groups.collect();
        for_all(
            entries[0].operator(),
            cases,
            &specs(family, states),
            |mut spec| {
                adjust(&mut spec);
                let case = spec.case();
                for (group, turns) in &groups {
                    turns.next(|backend| {
                        let mut entries = variants_on(backend, &case);
                        entries.retain(|entry| group.contains(entry));
                        check_entries(backend, &spec, &case, &entries);
                    });
                }
            },
        );
    });
}

/// Not every entry takes every problem: one dense token is a decode's, two tiles a warp take no resume of unaligned views, and not
/// every layer's kernel has room for all value heads of a query/key head, nor for their tokens.
fn check_entries(backend: &Backend, spec: &Spec, case: &Case, entries: &[Entry]) {
    // Each of them is the first now and then.
    let (behind, ahead) = entries.split_at(spec.seed as usize % entries.len().max(1));
    let mut entries = ahead.iter().chain(behind);
    let Some(&first) = entries.next() else {
        return;
    };
    let one = backend.run(case, Some(first));
    let truth = truth(case, Some(&one));
    check_by(&truth, case, &one);
    for &entry in entries {
        let other = backend.run(case, Some(entry));
        if spec.has_finite_squares() {
            assert!(
                one.is_same_but_for_the_workspace(&other),
                "{} differs from {}",
                entry.name(),
                first.name()
            );
        } else if case.has_previous() {
            // New tokens start from the states that this entry has stored.
            check(case, &other);
        } else {
            check_by(&truth, case, &other);
        }
    }
}

/// All families but prefills are of one of the following.
fn each(wanted: impl Fn(Family) -> bool) {
    differential(&Family::which(wanted), |_| {});
}

#[test]
fn decodes() {
    each(|family| family.decode && !family.layer);
}

#[test]
fn several_tokens() {
    each(|family| !family.decode && !family.layer && family.is_recurrent());
}

#[test]
fn several_tokens_at_once() {
    each(|family| !family.layer && !family.is_recurrent());
}

#[test]
fn layers_of_one_token() {
    each(|family| family.layer && family.decode);
}

#[test]
fn layers_of_several_tokens() {
    each(|family| family.layer && !family.decode && family.is_recurrent());
}

#[test]
fn layers_of_several_tokens_at_once() {
    each(|family| family.layer && !family.is_recurrent());
}

/// In every third draft most rows have one token: a launch of their own beside the chain takes these.
#[test]
fn prefills() {
    differential(&Family::prefills(), |spec| {
        if spec.seed.is_multiple_of(3) {
            spec.packed = true;
            (spec.prefill.singles, spec.prefill.unpromised) = (true, true);
        }
    });
}

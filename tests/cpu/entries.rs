//! Every entry on random problems of its family. The results of one entry are near the reference, and every other entry gives the
//! same bits.

use std::sync::Mutex;

use gated_delta::{DType, Entry, Formulation};
use gated_delta_test_support::backend::{Backend, Turns, is_portable_chain, on_threads};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::{check, check_by, truth};
use gated_delta_test_support::spec::{Family, Spec};
use gated_delta_test_support::strategy::specs;
use gated_delta_test_support::{for_all, variants_on};

/// Number of problems of a family, and the most states of a problem.
fn cases(family: Family) -> (u32, usize) {
    let (cases, states) = match (family.dim, family.max_tokens()) {
        // Chunks have 64 tokens.
        (64, _) if family.is_chunked() => (8, 4),
        _ if family.is_chunked() => (4, 2),
        (64, _) if family.layer => (12, 16),
        _ if family.layer => (4, 8),
        (64, 1) => (24, 24),
        (_, 1) => (9, 12),
        (64, _) => (18, 16),
        _ => (6, 8),
    };
    // Except on tensor cores, f16 differs from bf16 in a conversion only.
    let share = match (family.state, family.formulation) {
        (DType::F16, Formulation::Parallel) => 2,
        (DType::F16, _) => 3,
        _ => 1,
    };
    (cases / share, states)
}

/// Compares all entries of `families` on random problems that `adjust` has changed. An entry that takes none of a family's
/// problems gets an additional one, which [`Spec::fit_to`] fits to the entry. A GPU takes its share of the problems of
/// neighbouring families in turn. `gpu::sanitizer` ensures that each entry runs there.
///
/// # Panics
/// If an entry takes none of a family's problems.
fn differential(families: &[Family], adjust: impl Fn(&mut Spec) + Sync) {
    let families: Vec<_> = families.iter().copied().enumerate().collect();
    on_threads(&families, |&(i, family)| {
        let (cases, states) = cases(family);
        let is_of_family = |entry: &Entry| Family::all_of(*entry).contains(&family);
        let entries: Vec<Entry> = Entry::ALL.iter().copied().filter(is_of_family).collect();
        // Inter-chunk scans for other GPUs than Hopper run on three such machines in turn. All other entries run on Hopper.
        let (portable, usual): (Vec<Entry>, Vec<Entry>) =
            (entries.iter()).partition(|entry| is_portable_chain(**entry));
        let groups = [usual, portable].into_iter().filter_map(|group| {
            let turns = Turns::of_entry(*group.first()?, i);
            Some((group, turns))
        });
        let groups: Vec<_> = groups.collect();
        let operator = entries[0].operator();
        let problems = specs(family, states);
        let ran = Mutex::new(Vec::new());
        for_all(operator, cases, problems.clone(), |mut spec| {
            adjust(&mut spec);
            let case = spec.case();
            for (group, turns) in &groups {
                turns.next(|backend| {
                    let mut entries = variants_on(backend, &case);
                    entries.retain(|entry| group.contains(entry));
                    check_entries(backend, &spec, &case, &entries);
                    ran.lock().unwrap().extend(entries);
                });
            }
        });
        let ran = ran.into_inner().unwrap();
        let left = entries.iter().filter(|entry| !ran.contains(entry));
        for (j, &entry) in left.enumerate() {
            let turns = Turns::of_entry(entry, i + j);
            for_all(operator, 1, problems.clone(), |mut spec| {
                adjust(&mut spec);
                spec.fit_to(entry);
                let case = spec.case();
                turns.next(|backend| {
                    let variants = variants_on(backend, &case);
                    assert!(
                        variants.contains(&entry),
                        "{} does not take a problem that is made for it",
                        entry.name()
                    );
                    check_entries(backend, &spec, &case, &[entry]);
                });
            });
        }
    });
}

/// Checks all entries that take the problem. Layer kernels for decodes take one dense token only. Two tiles a warp take no resume with
/// unaligned views. Layer kernels may lack room for all value heads of a query/key head, or for their tokens.
fn check_entries(backend: &Backend, spec: &Spec, case: &Case, entries: &[Entry]) {
    // The seed decides which entry is the first, the one that is checked against the reference.
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

/// Compares the families that `wanted` accepts. Every family except prefills is in one of the tests below.
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

/// In every third draft most rows have one token. A launch of their own, concurrent with the scan, takes these rows.
#[test]
fn prefills() {
    differential(&Family::prefills(), |spec| {
        if spec.seed.is_multiple_of(3) {
            spec.packed = true;
            (spec.prefill.singles, spec.prefill.unpromised) = (true, true);
        }
    });
}

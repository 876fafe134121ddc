//! Tensors with arbitrary dims, strides and offsets.

use std::cell::Cell;

use gated_delta::{DType, Error, StateLayout};
use gated_delta_harness::arguments::Operator;
use gated_delta_test_support::backend::Turns;
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::check;
use gated_delta_test_support::for_all;
use gated_delta_test_support::spec::{Family, Magnitude};
use gated_delta_test_support::strategy::any_specs;
use proptest::prelude::{Just, Strategy, prop_oneof};
use proptest::sample::select;

/// A change of one tensor of a case.
#[derive(Clone, Debug)]
struct Change {
    tensor: usize,
    dim: usize,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Dim(usize),
    Stride(usize),
    Offset(usize),
    DropDim,
    /// Removes an optional tensor.
    Drop,
}

impl Change {
    fn apply(&self, case: &mut Case) {
        let mut views = case.args.tensors_mut();
        let i = self.tensor % views.len();
        let (name, view) = &mut views[i];
        let dim = self.dim % view.dims.len().max(1);
        match self.what {
            _ if view.dims.is_empty() => {}
            What::Dim(size) => view.dims[dim] = size,
            What::Stride(stride) => view.strides[dim] = stride,
            What::Offset(offset) => view.offset = offset,
            What::DropDim => {
                view.dims.remove(dim);
                view.strides.remove(dim);
            }
            What::Drop => match *name {
                "A_log" => case.a_log = None,
                "dt_bias" => case.dt_bias = None,
                "write_pool" => case.write_pool = None,
                "read_slots" => case.read_slots = None,
                "write_slots" => case.write_slots = None,
                "token_slots" => case.token_slots = None,
                "accepted" => case.accepted = None,
                "snapshots" => case.snapshots = None,
                "cu_seqlens" => case.packed = None,
                _ => {}
            },
        }
    }
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let sizes = vec![0, 1, 2, 3, 4, 5, 8, 63, 64, 65, 96, 128];
    let strides = vec![
        0,
        1,
        2,
        31,
        63,
        64,
        65,
        128,
        256,
        4096,
        1 << 31,
        1 << 32,
        usize::MAX / 2,
        usize::MAX,
    ];
    let what = prop_oneof![
        4 => select(sizes).prop_map(What::Dim),
        4 => select(strides).prop_map(What::Stride),
        2 => (0usize..40).prop_map(What::Offset),
        1 => Just(What::DropDim),
        1 => Just(What::Drop),
    ];
    let change =
        (0usize..21, 0usize..5, what).prop_map(|(tensor, dim, what)| Change { tensor, dim, what });
    proptest::collection::vec(change, 1..=3)
}

/// Whether the case keeps the caller's contract: no active row touches a slot or a token that another row writes.
fn is_lawful(case: &Case) -> bool {
    let in_place = case.write_pool.is_none();
    let rows = case.rows();
    let tokens = rows.iter().flat_map(|row| row.tokens.clone()).flatten();
    let live: Vec<_> = rows.iter().filter_map(|row| row.live.as_ref()).collect();
    let slots = live.iter().flat_map(|live| live.writes());
    let read_by_another = |i: usize, slot: usize| {
        let others = live.iter().enumerate().filter(|(j, _)| *j != i);
        in_place
            && others
                .into_iter()
                .any(|(_, other)| other.start == Some(slot))
    };
    let all_distinct = |mut all: Vec<usize>| {
        all.sort_unstable();
        all.windows(2).all(|two| two[0] != two[1])
    };
    let mut written = live.iter().enumerate();
    all_distinct(tokens.collect())
        && all_distinct(slots.collect())
        && written.all(|(i, live)| live.writes().all(|slot| !read_by_another(i, slot)))
}

/// Arbitrary dims, strides and offsets give an error without a launch, or the right result without an access outside of the
/// tensors. They never panic.
#[test]
fn arbitrary_views_are_refused_or_computed() {
    let (accepted, refused) = (Cell::new(0), Cell::new(0));
    let families = [
        Family::decode(StateLayout::KLast, DType::F32, 64),
        Family::new(Operator::Gdn, StateLayout::KLast, DType::F32, 64),
        Family::new(Operator::Gdn, StateLayout::VLast, DType::Bf16, 64),
        Family::new(Operator::Kda, StateLayout::KLast, DType::F32, 64),
    ];
    let turns = Turns::new(0);
    for_all(
        "bad_input",
        2500,
        (any_specs(families.to_vec(), 4), changes()),
        |(mut spec, changes)| {
            if matches!(spec.magnitude, Magnitude::Extreme) {
                // A view may show data of k as v, whose products would overflow f32 with other magnitudes.
                spec.magnitude = Magnitude::Usual;
            }
            spec.spread = false;
            let mut case = spec.case();
            changes.iter().for_each(|change| change.apply(&mut case));
            turns.next(|backend| {
                let launched = backend.with(&case, |library, stream, args| {
                    let work = args.work()?;
                    if work.selected().is_ok() && !is_lawful(&case) {
                        return Ok(false);
                    }
                    // SAFETY: every view lies in its buffer, as was checked. The buffer lives until `with` has waited. No two
                    // active rows write one slot.
                    unsafe { library.launch(stream, &*work) }.map(|()| true)
                });
                match launched {
                    Ok((Ok(true), after)) => {
                        accepted.set(accepted.get() + 1);
                        check(&case, &after);
                    }
                    Ok((Ok(false), _)) => {}
                    Ok((Err(fault @ Error::Fault { .. }), _)) => panic!("{fault}"),
                    Ok((Err(_), after)) => {
                        refused.set(refused.get() + 1);
                        assert!(after == case, "something was launched");
                    }
                    Err(_) => refused.set(refused.get() + 1),
                }
            });
        },
    );
    println!("{} launched, {} refused", accepted.get(), refused.get());
}

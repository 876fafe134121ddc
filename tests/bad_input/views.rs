//! Tensors with arbitrary dims, strides and offsets.

use std::cell::Cell;

use gated_delta::Error;
use gated_delta_tests::backend::backends;
use gated_delta_tests::buffer::View;
use gated_delta_tests::case::Case;
use gated_delta_tests::compare::check;
use gated_delta_tests::for_all;
use gated_delta_tests::strategy::specs;
use proptest::prelude::{Just, Strategy, prop_oneof};
use proptest::sample::select;

use crate::FAMILY;

/// A change to one tensor of a case.
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
    Drop,
}

impl Change {
    fn apply(&self, case: &mut Case) {
        let optional = [
            &mut case.write_pool,
            &mut case.read_slots,
            &mut case.write_slots,
        ];
        if let (What::Drop, 9..) = (&self.what, self.tensor) {
            *optional[self.tensor - 9] = None;
            return;
        }
        let [write_pool, read_slots, write_slots] = optional.map(Option::as_mut);
        let (a_log, dt_bias) = case
            .raw
            .as_mut()
            .map_or((None, None), |(a_log, dt_bias, _)| {
                (Some(a_log), Some(dt_bias))
            });
        let Case {
            q,
            k,
            v,
            a,
            b,
            o,
            pool,
            ..
        } = case;
        let mut views: [Option<&mut View>; 12] = [
            Some(q),
            Some(k),
            Some(v),
            Some(a),
            Some(b),
            a_log,
            dt_bias,
            Some(o),
            Some(pool),
            write_pool,
            read_slots,
            write_slots,
        ];
        let Some(view) = views[self.tensor]
            .as_mut()
            .filter(|view| !view.dims.is_empty())
        else {
            return;
        };
        let dim = self.dim % view.dims.len();
        match self.what {
            What::Dim(size) => view.dims[dim] = size,
            What::Stride(stride) => view.strides[dim] = stride,
            What::Offset(offset) => view.offset = offset,
            What::Drop => {
                view.dims.remove(dim);
                view.strides.remove(dim);
            }
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
        1 => Just(What::Drop),
    ];
    let change =
        (0usize..12, 0usize..4, what).prop_map(|(tensor, dim, what)| Change { tensor, dim, what });
    proptest::collection::vec(change, 1..=3)
}

/// Whether no live row touches a slot that another one writes, as the caller has to see to.
fn is_lawful(case: &Case) -> bool {
    let in_place = case.write_pool.is_none();
    let live: Vec<_> = case.live().into_iter().flatten().collect();
    let apart =
        |i: usize, j: usize| live[i].1 != live[j].1 && (!in_place || live[i].0 != live[j].1);
    let rows = 0..live.len();
    !case.options.update_state
        || rows
            .clone()
            .all(|i| rows.clone().all(|j| i == j || apart(i, j)))
}

/// Whatever dims, strides and offsets tensors have: an error and no launch, or the right result, with no access
/// outside of them. Never a panic.
#[test]
fn arbitrary_views_are_refused_or_computed() {
    let (accepted, refused) = (Cell::new(0), Cell::new(0));
    for_all(
        "bad_input",
        1500,
        &(specs(FAMILY, 6), changes()),
        |(spec, changes)| {
            let mut case = spec.case();
            changes.iter().for_each(|change| change.apply(&mut case));
            for backend in backends() {
                let launched = backend.with(&case, |library, stream, args| {
                    if args.selected().is_ok() && !is_lawful(&case) {
                        return Ok(false);
                    }
                    // SAFETY: every view is checked to lie in its buffer, which lives until `with` has waited, and no
                    // two live rows write one slot.
                    unsafe { library.gdn_decode(stream, args) }.map(|()| true)
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
            }
        },
    );
    println!("{} launched, {} refused", accepted.get(), refused.get());
}

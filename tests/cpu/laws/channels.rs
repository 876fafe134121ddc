//! Order of the key channels.

use gated_delta_harness::arguments::Operator;
use gated_delta_test_support::compare::assert_near;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Array, Change, Problem};

use crate::laws::{alone_recurrent, backwards, in_f32, law_of, run};

/// The problem with the K channels of all tensors in this order.
fn take_channels(problem: &Problem, order: &[usize]) -> Problem {
    let per_channel = problem.gates.operator() == Operator::Kda;
    problem.each(|name, array| match name {
        "q" | "k" | "previous k" | "pool" | "write_pool" | "snapshots" => {
            *array = of_channels(array, order)
        }
        "g" | "previous g" | "dt_bias" if per_channel => *array = of_channels(array, order),
        _ => {}
    })
}

fn of_channels(array: &Array, order: &[usize]) -> Array {
    array.take(array.dims.len() - 1, order)
}

/// The order of key channels changes the order of sums over K, and so results differ by rounding only.
#[test]
fn the_order_of_channels_matters_to_rounding_alone() {
    law_of(alone_recurrent(), in_f32, |backend, spec| {
        let problem = spec.problem();
        let order = backwards(spec.dim);
        let straight = run(backend, &problem, &spec.form);
        let mut permuted = run(backend, &take_channels(&problem, &order), &spec.form);
        let mut back = |view: gated_delta_test_support::buffer::View| {
            let view = permuted.as_klast(&view);
            let positions = view.positions();
            for row in positions.chunks(spec.dim) {
                let bits: Vec<u64> = row
                    .iter()
                    .map(|&i| permuted.buffers[view.buffer].bits(i))
                    .collect();
                for (&i, &from) in row.iter().zip(&order) {
                    permuted.buffers[view.buffer].set_bits(i, bits[from]);
                }
            }
        };
        back(straight.pool.clone());
        if let Some(view) = straight.write_pool.clone() {
            back(view);
        }
        if let Some(view) = straight.snapshots.clone() {
            back(view);
        }
        assert_near(&problem.case(&spec.form), &straight, &permuted);
    });
}

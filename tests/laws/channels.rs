//! The channels of K.

use gated_delta_tests::compare::assert_near;
use gated_delta_tests::problem::{Array, GateKind, Problem, Tokens};
use gated_delta_tests::spec::Family;

use crate::{all, backwards, in_f32, law_of, run};

/// The K channels of everything, in this order.
fn take_channels(problem: &Problem, order: &[usize]) -> Problem {
    let per_channel = matches!(problem.gates.kind, GateKind::Kda(..));
    let of_channels = |array: &Array| array.take(array.dims.len() - 1, order);
    let mut taken = problem.map_qk(of_channels);
    let gate = |tokens: &mut Tokens<Array>| {
        if per_channel {
            tokens.gate = of_channels(&tokens.gate);
        }
    };
    gate(&mut taken.tokens);
    if let Some(previous) = &mut taken.previous {
        gate(&mut previous.tokens);
    }
    if per_channel {
        taken.gates.dt_bias = taken.gates.dt_bias.as_ref().map(of_channels);
    }
    taken.pool = of_channels(&taken.pool);
    taken
}

/// Sums over K are added in another order, and nothing else is different.
#[test]
fn the_order_of_channels_matters_to_rounding_alone() {
    law_of(all(Family::recurrent), in_f32, |backend, spec| {
        let problem = spec.problem();
        let order = backwards(spec.dim);
        let straight = run(backend, &problem, &spec.form);
        let mut permuted = run(backend, &take_channels(&problem, &order), &spec.form);
        let mut back = |view: gated_delta_tests::buffer::View| {
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

//! The layer step with deferred write-back: a convolution, a norm or both.

use gated_delta::{Activation, DType};
use gated_delta_harness::arguments::Operator;
use gated_delta_test_support::backend::backends;
use gated_delta_test_support::deferred::{ConvSpec, NormSpec, Spec, entries, is_layer};
use proptest::prelude::*;
use proptest::sample::select;

use super::{differential, specs};

/// A convolution, a norm or both.
fn around() -> impl Strategy<Value = (Option<ConvSpec>, Option<NormSpec>)> {
    let dtypes = || select(vec![DType::Bf16, DType::F16, DType::F32]);
    let conv = (2usize..=4, any::<[bool; 3]>(), dtypes());
    let conv = conv.prop_map(|(taps, [bias, silu, by_input], weight)| ConvSpec {
        taps,
        bias,
        activation: if silu {
            Activation::Silu
        } else {
            Activation::None
        },
        weight,
        by_input,
    });
    let norm = (any::<bool>(), dtypes()).prop_map(|(silu, weight)| NormSpec {
        activation: if silu {
            Activation::Silu
        } else {
            Activation::Sigmoid
        },
        weight,
    });
    (conv, norm, 0..4).prop_map(|(conv, norm, which)| {
        let (has_conv, has_norm) = (which != 0, which != 1);
        (has_conv.then_some(conv), has_norm.then_some(norm))
    })
}

/// Random layers like `of`, with one token or drafts, and with more value heads of a query/key head.
fn layers(of: Spec) -> BoxedStrategy<Spec> {
    let ratio = select(vec![1usize, 2, 3, 4]);
    let of = (specs(of), around(), ratio);
    let layers = of.prop_map(|(mut spec, (conv, norm), ratio)| {
        if spec.heads[1] == 2 {
            spec.heads[1] = ratio;
        }
        spec.tokens = match (spec.parallel, conv) {
            (false, _) => 1,
            // A flush without windows is the same with and without a layer.
            (true, None) => spec.tokens.max(1),
            (true, Some(_)) => spec.tokens,
        };
        Spec { conv, norm, ..spec }
    });
    layers.boxed()
}

#[test]
fn every_entry_computes_what_the_reference_does() {
    let mut seen = 0;
    for entry in entries().filter(|&entry| is_layer(entry)) {
        differential("deferred_layer", entry, layers);
        seen += 1;
    }
    assert_eq!(seen, 8);
}

/// A rejected token leaves no trace in a layer either, if its window is restored.
#[test]
fn a_rejected_token_is_taken_back_with_its_window() {
    for backend in backends() {
        for (operator, state) in [(Operator::Gdn, DType::Bf16), (Operator::Kda, DType::F32)] {
            let spec = Spec::new(operator, state, 64, &[0, 3, 7, 1]).layer();
            let problem = spec.problem();
            let rejected = problem.run(backend, None);
            let mut again = problem.next(&rejected, 0, 99);
            let mut never = problem.next(&problem, 0, 99);
            for b in 0..spec.slots.len() {
                let [slot, ..] = spec.live(b).unwrap();
                assert!(rejected.window_bits(slot) != problem.window_bits(slot));
            }
            again.take_windows(&problem);
            let one = again.run(backend, None);
            never.forget_unpending();
            let other = never.run(backend, None);
            for b in 0..spec.slots.len() {
                let [slot, len, base] = never.spec.live(b).unwrap();
                assert_eq!(again.spec.live(b), Some([slot, len, base]));
                assert!(one.o_bits(b) == other.o_bits(b), "row {b} of {spec:?}");
                let entry = (base + len) % spec.ring[1];
                assert!(
                    one.entry_bits(slot, entry) == other.entry_bits(slot, entry)
                        && one.window_bits(slot) == other.window_bits(slot)
                );
            }
        }
    }
}

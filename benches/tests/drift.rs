//! Tests that rolled states stay as near to the exact ones as their dtype allows.

use gated_delta_benches::drift::{Stores, roll};
use gated_delta_harness::arguments::Operator;
use half::{bf16, f16};

#[test]
fn bf16_states_move_away_f16_states_an_eighth_of_that_and_f32_states_hardly() {
    for operator in [Operator::Gdn, Operator::Kda] {
        let rounded = roll::<bf16>(operator, 40, Stores::Each).unwrap();
        let (first, last) = (rounded[0], rounded[39]);
        // One rounding: a uniform error of at most 2⁻⁹, of a mantissa between 1 and 2.
        assert!(
            (1.4e-3..1.9e-3).contains(&first.all),
            "{operator:?} {first:?}"
        );
        assert!(
            (2.0..8.0).contains(&(last.slow / first.slow)),
            "{operator:?} {last:?}"
        );
        assert!(
            (1.1..3.0).contains(&(last.fast / first.fast)),
            "{operator:?} {last:?}"
        );
        // Three more bits of significand; values below the normal numbers do not matter.
        let halves = roll::<f16>(operator, 40, Stores::Each).unwrap();
        for (at, drift) in [(0, first), (39, last)] {
            for (half, rounded) in [
                (halves[at].all, drift.all),
                (halves[at].slow, drift.slow),
                (halves[at].fast, drift.fast),
            ] {
                let part = half / rounded;
                assert!(
                    (0.115..0.135).contains(&part),
                    "{operator:?}, token {at}: {part}"
                );
            }
        }
        let wide = roll::<f32>(operator, 40, Stores::Each).unwrap();
        assert!(
            (1e-8..5e-7).contains(&wide[39].all),
            "{operator:?} {:?}",
            wide[39]
        );
        // One rounding in eight tokens, and none before the first flush.
        let waiting = roll::<bf16>(operator, 40, Stores::Eighth).unwrap();
        assert!(waiting[7].all < 5e-7, "{operator:?} {:?}", waiting[7]);
        assert!(waiting[8].all > 1e-3, "{operator:?} {:?}", waiting[8]);
        assert!(
            waiting[39].slow < 0.6 * last.slow,
            "{operator:?} {:?}",
            waiting[39]
        );
        // Each u is rounded once too: a state that began with zeros consists of them.
        let waiting = roll::<bf16>(operator, 40, Stores::EighthOfBf16).unwrap();
        assert!(
            (1.4e-3..1.9e-3).contains(&waiting[7].all),
            "{operator:?} {:?}",
            waiting[7]
        );
        assert!(
            waiting[39].slow < 0.7 * last.slow,
            "{operator:?} {:?}",
            waiting[39]
        );
        let wide = roll::<f32>(operator, 40, Stores::Eighth).unwrap();
        assert!(wide[39].all < 5e-7, "{operator:?} {:?}", wide[39]);
    }
}

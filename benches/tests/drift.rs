//! The rolled states stay as near to the exact ones as their dtype lets them.

use gated_delta_benches::drift::{Decode, roll};
use half::bf16;

#[test]
fn bf16_states_move_away_and_f32_states_hardly() {
    for decode in [Decode::Gdn, Decode::Kda] {
        let rounded = roll::<bf16>(decode, 40).unwrap();
        let (first, last) = (rounded[0], rounded[39]);
        // One rounding: a uniform error of at most 2⁻⁹ of a mantissa between 1 and 2.
        assert!(
            (1.4e-3..1.9e-3).contains(&first.all),
            "{decode:?} {first:?}"
        );
        assert!(
            (2.0..8.0).contains(&(last.slow / first.slow)),
            "{decode:?} {last:?}"
        );
        assert!(
            (1.1..3.0).contains(&(last.fast / first.fast)),
            "{decode:?} {last:?}"
        );
        let wide = roll::<f32>(decode, 40).unwrap();
        assert!(
            (1e-8..5e-7).contains(&wide[39].all),
            "{decode:?} {:?}",
            wide[39]
        );
    }
}

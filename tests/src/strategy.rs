//! What proptest chooses of a problem.

use gated_delta::DType;
use gated_delta::ops::gdn_decode::GdnDecodeOptions;
use gated_delta::ops::{BetaScale, HeadMap, StateLayout};
use proptest::bool::weighted;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::select;

use crate::layout::{Form, Spacing};
use crate::slots::SlotChoice;
use crate::spec::{Family, Magnitude, Spec};

/// Problems of a family with at most `most` states, small ones first.
pub fn specs(family: Family, most: usize) -> impl Strategy<Value = Spec> {
    let mut shapes = Vec::new();
    for ratio in [1, 2, 3, 4, 8] {
        let of_heads = |heads| (1..=4).map(move |batch| (batch, heads, ratio));
        shapes.extend(
            (1..=4)
                .flat_map(of_heads)
                .filter(|(batch, heads, ratio)| batch * heads * ratio <= most),
        );
    }
    shapes.sort_by_key(|(batch, heads, ratio)| batch * heads * ratio);
    let memory = (select(shapes), forms(family.state), any::<u64>());
    let gates = prop_oneof![
        Just(Some(BetaScale::One)),
        Just(Some(BetaScale::Two)),
        Just(None)
    ];
    let magnitude = prop_oneof![4 => Just(Magnitude::Usual), 1 => Just(Magnitude::Tiny), 1 => Just(Magnitude::Large), 1 => Just(Magnitude::Zeros)];
    let values = (
        gates,
        magnitude,
        weighted(0.25),
        slot_choices(),
        options(family.layout),
    );
    (memory, values).prop_map(
        move |((shape, form, seed), (raw, magnitude, extreme_gates, mut slots, options))| {
            let (batch, heads, ratio) = shape;
            if !options.update_state {
                slots = SlotChoice {
                    write: false,
                    write_pool: None,
                    ..slots
                };
            }
            Spec {
                batch,
                heads,
                ratio,
                dim: family.dim,
                raw,
                magnitude,
                extreme_gates,
                slots,
                options,
                form,
                seed,
            }
        },
    )
}

/// Problems of any family with at most `most` states.
pub fn any_specs(most: usize) -> impl Strategy<Value = Spec> {
    select(Family::all().collect::<Vec<_>>()).prop_flat_map(move |family| specs(family, most))
}

fn forms(state: DType) -> impl Strategy<Value = Form> {
    let float = || select(vec![DType::F32, DType::Bf16, DType::F16]);
    let index = || select(vec![DType::I32, DType::I64, DType::U32]);
    let spacing = || select(vec![Spacing::Dense, Spacing::Aligned, Spacing::Odd]);
    let dtypes = (
        [float(), float(), float(), float()],
        [float(), float()],
        [index(), index()],
    );
    let spaces = (weighted(0.3), spacing(), spacing(), any::<u64>());
    (dtypes, spaces).prop_map(
        move |((mut qkvo, mut gates, slots), (packed, io, pools, seed))| {
            if packed {
                (qkvo[1], qkvo[2], gates[1]) = (qkvo[0], qkvo[0], gates[0]);
            }
            Form {
                state,
                qkvo,
                gates,
                slots,
                packed,
                io,
                pools,
                seed,
            }
        },
    )
}

fn slot_choices() -> impl Strategy<Value = SlotChoice> {
    let write_pool = prop_oneof![2 => Just(None), 1 => (-1isize..=2).prop_map(Some)];
    (
        any::<bool>(),
        any::<bool>(),
        write_pool,
        0usize..=3,
        any::<bool>(),
    )
        .prop_map(|(read, write, write_pool, spare, inactive)| SlotChoice {
            read,
            write,
            write_pool,
            spare,
            inactive,
        })
}

fn options(state_layout: StateLayout) -> impl Strategy<Value = GdnDecodeOptions> {
    let head_map = prop_oneof![Just(HeadMap::Grouped), Just(HeadMap::Tiled)];
    let scale = prop_oneof![3 => Just(None), 1 => Just(Some(1.0)), 1 => Just(Some(-0.3)), 1 => Just(Some(0.0))];
    let null_slot = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 1 => (1u32..8).prop_map(Some)];
    (head_map, any::<bool>(), scale, null_slot, weighted(0.8)).prop_map(
        move |(head_map, qk_l2norm, scale, null_slot, update_state)| GdnDecodeOptions {
            state_layout,
            head_map,
            qk_l2norm,
            scale,
            null_slot,
            update_state,
        },
    )
}

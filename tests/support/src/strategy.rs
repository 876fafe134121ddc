//! Proptest strategies for random problems.

use gated_delta::{Activation, BetaScale, DType, Formulation, HeadMap, KdaBeta, Options};
use gated_delta_harness::arguments::{DecayKind, GateKind, Operator};
use proptest::bool::weighted;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::select;
use proptest::strategy::BoxedStrategy;

use crate::layout::{Form, Spacing, TENSORS};
use crate::slots::SlotChoice;
use crate::spec::{ConvChoice, Family, Magnitude, NormChoice, Parameters, PrefillChoice, Spec};

/// Ways in which a launch keeps states.
#[derive(Clone, Copy, Debug)]
enum Keeping {
    Last,
    Nothing,
    /// States after each token, with accepted tokens (`true`) or without.
    EachToken(bool),
    /// A resume with this number of previous tokens.
    Resume(usize),
    Commit(usize),
}

/// Problems of a family with at most `most` states, small ones first, with all combinations of switches that the family allows.
/// Problems with many states have few tokens.
pub fn specs(family: Family, most: usize) -> BoxedStrategy<Spec> {
    let mut shapes = Vec::new();
    // A block of a layer kernel has all value heads of a query/key head.
    let of_block = family.layer && family.is_recurrent();
    // Layer kernels for several tokens together use a cluster of at most 8 blocks.
    let ratios: &[usize] = match (family.layer, family.operator) {
        (true, _) if of_block => &[1, 2, 3, 4, 8, 16],
        (true, Operator::Kda) => &[1, 2, 3, 4],
        _ => &[1, 2, 3, 4, 8],
    };
    for &ratio in ratios {
        if of_block && !family.takes_ratio(ratio) {
            continue;
        }
        let of_heads = |heads| (1..=4).map(move |batch| (batch, heads, ratio));
        shapes.extend(
            (1..=4)
                .flat_map(of_heads)
                .filter(|(batch, heads, ratio)| batch * heads * ratio <= most),
        );
    }
    shapes.sort_by_key(|(batch, heads, ratio)| batch * heads * ratio);
    let shape = (select(shapes), tokens(family));
    let memory = (shape, forms(family.state), any::<u64>());
    let states = (
        keepings(family),
        slot_choices(),
        prop_oneof![2 => Just(None), 1 => (0usize..=2).prop_map(Some)],
        (weighted(0.3), weighted(0.3)),
        around(family),
        prefills(),
    );
    let values = (
        gates(family.operator),
        magnitudes(),
        (weighted(0.3), weighted(0.25)),
        states,
        options(family),
    );
    let specs = (memory, values).prop_map(move |((shape, form, seed), values)| {
        let ((batch, heads, ratio), tokens) = shape;
        let ((gates, parameters), magnitude, (spread, extreme_gates), states, options) = values;
        let (keeping, slots, snapshots, (packed, fresh), (conv, norm), prefill) = states;
        let per_state = if family.is_chunked() { 100 } else { 3 };
        let fewer = |tokens: usize| tokens.min((per_state * most / (batch * heads * ratio)).max(1));
        let several = !family.decode;
        let mut spec = Spec {
            batch,
            tokens: fewer(tokens),
            heads,
            ratio,
            dim: family.dim,
            gates,
            parameters,
            magnitude,
            spread,
            extreme_gates,
            slots,
            snapshots: snapshots.filter(|_| several),
            packed: packed && several,
            previous: None,
            conv,
            norm,
            fresh,
            prefill: match family.is_chunked() {
                true => prefill,
                false => PrefillChoice::NONE,
            },
            update_state: true,
            options,
            form,
            seed,
        };
        spec.keep(keeping, fewer);
        if !family.is_recurrent() {
            spec.snapshots = None;
        }
        spec.fit();
        if !spec.options.qk_l2norm && matches!(magnitude, Magnitude::Large) && several {
            spec.magnitude = Magnitude::Usual;
        }
        // If the kernel does not normalise, the products of small q and k are below the range of f16 (docs/prefill.md, "What f16 does not hold").
        if family.is_chunked() && !spec.options.qk_l2norm && matches!(magnitude, Magnitude::Tiny) {
            spec.magnitude = Magnitude::Usual;
        }
        // The products of such a k with such a state overflow f32.
        spec.spread &= !matches!(magnitude, Magnitude::Extreme);
        // Such sizes overflow f16, and they overflow f32 without l2norm.
        let has_f16 = spec.form.qkvo[..3].contains(&DType::F16);
        if matches!(magnitude, Magnitude::Extreme) && (!spec.options.qk_l2norm || has_f16) {
            spec.magnitude = Magnitude::Usual;
        }
        spec
    });
    specs.boxed()
}

/// Problems of any of `families` with at most `most` states.
pub fn any_specs(families: Vec<Family>, most: usize) -> BoxedStrategy<Spec> {
    let specs = select(families).prop_flat_map(move |family| specs(family, most));
    specs.boxed()
}

impl Spec {
    /// Sets the way of keeping states, and drops the switches that contradict it.
    fn keep(&mut self, keeping: Keeping, fewer: impl Fn(usize) -> usize) {
        let reads_alone = SlotChoice {
            write: false,
            write_pool: None,
            ..self.slots
        };
        match keeping {
            Keeping::Last => {}
            Keeping::Nothing => {
                (self.update_state, self.slots) = (false, reads_alone);
            }
            Keeping::EachToken(accepted) => {
                self.slots = SlotChoice {
                    read: false,
                    write: false,
                    of_tokens: Some(accepted),
                    spare: 2 * self.slots.spare,
                    ..self.slots
                };
            }
            Keeping::Resume(previous) => {
                (self.previous, self.snapshots) = (Some(fewer(previous)), None);
            }
            Keeping::Commit(previous) => {
                (self.previous, self.snapshots) = (Some(fewer(previous)), None);
                (self.tokens, self.packed) = (0, false);
            }
        }
    }
}

/// A convolution, a norm or both, for families of layers.
fn around(family: Family) -> impl Strategy<Value = (Option<ConvChoice>, Option<NormChoice>)> {
    let more = prop_oneof![1 => Just(None), 2 => (0usize..=2).prop_map(Some)];
    let conv = (2usize..=4, any::<[bool; 3]>(), more);
    let conv = conv.prop_map(|(taps, [bias, silu, apart], window_snapshots)| {
        let activation = match silu {
            true => Activation::Silu,
            false => Activation::None,
        };
        ConvChoice {
            taps,
            bias,
            activation,
            apart,
            window_snapshots,
        }
    });
    let activation = select(vec![Activation::Silu, Activation::Sigmoid]);
    let norm = (select(vec![1e-6, 1e-5, 0.5]), activation)
        .prop_map(|(eps, activation)| NormChoice { eps, activation });
    (0..4, conv, norm).prop_map(move |(choice, conv, norm)| {
        // Kernels of a prefill have both, or neither.
        let has = |without| match family.is_chunked() {
            true => choice == 3 || choice == 2 - without,
            false => family.layer && choice != without,
        };
        (has(0).then_some(conv), has(1).then_some(norm))
    })
}

/// Switches of a prefill.
fn prefills() -> impl Strategy<Value = PrefillChoice> {
    let checkpoints = prop_oneof![1 => Just(None), 2 => ([1usize..=2, 0..=3]).prop_map(Some)];
    (any::<bool>(), checkpoints, weighted(0.3), weighted(0.3)).prop_map(
        |(positions, checkpoints, unpromised, singles)| PrefillChoice {
            positions,
            checkpoints,
            unpromised,
            singles,
        },
    )
}

fn tokens(family: Family) -> impl Strategy<Value = usize> + Clone {
    let counts: &[usize] = match family.is_chunked() {
        true => &[
            1, 2, 3, 15, 17, 31, 63, 64, 65, 66, 100, 127, 128, 129, 192, 200,
        ],
        false => &[1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16],
    };
    let counts: Vec<usize> = counts
        .iter()
        .copied()
        .filter(|&tokens| tokens <= family.max_tokens())
        .collect();
    select(counts)
}

fn keepings(family: Family) -> impl Strategy<Value = Keeping> {
    let choice = (0..10, any::<bool>(), tokens(family));
    choice.prop_map(move |(choice, accepted, previous)| match choice {
        _ if family.is_chunked() => Keeping::Last,
        3 => Keeping::Nothing,
        4 | 5 if family.is_recurrent() && !family.decode => Keeping::EachToken(accepted),
        6 | 7 if !family.decode => Keeping::Resume(previous),
        8 if !family.decode => Keeping::Commit(previous),
        9 => Keeping::Nothing,
        _ => Keeping::Last,
    })
}

fn gates(operator: Operator) -> impl Strategy<Value = (GateKind, Parameters)> {
    let gdn = vec![
        GateKind::Raw(BetaScale::One),
        GateKind::Raw(BetaScale::Two),
        GateKind::Given,
    ];
    let of_decay = |decay| [KdaBeta::Given, KdaBeta::Logit].map(|beta| GateKind::Kda(decay, beta));
    let decays = [
        DecayKind::Log,
        DecayKind::Softplus,
        DecayKind::LowerBound(-5.0),
        DecayKind::LowerBound(-0.25),
    ];
    let kinds = match operator {
        Operator::Kda => decays.into_iter().flat_map(of_decay).collect(),
        Operator::Gdn => gdn,
    };
    let parameters = (any::<bool>(), any::<bool>(), any::<bool>());
    (select(kinds), parameters).prop_map(|(kind, (a_log, dt_bias, of_h))| {
        let parameters = Parameters {
            a_log,
            dt_bias,
            of_h,
        };
        (kind, parameters)
    })
}

fn magnitudes() -> impl Strategy<Value = Magnitude> {
    prop_oneof![
        4 => Just(Magnitude::Usual),
        1 => Just(Magnitude::Tiny),
        1 => Just(Magnitude::Large),
        1 => Just(Magnitude::Zeros),
        1 => Just(Magnitude::Extreme),
    ]
}

fn forms(state: DType) -> impl Strategy<Value = Form> {
    let float = || select(vec![DType::F32, DType::Bf16, DType::F16]);
    let index = || select(vec![DType::I32, DType::I64, DType::U32]);
    let spacing = || select(vec![Spacing::Dense, Spacing::Aligned, Spacing::Odd]);
    let dtypes = (
        [float(), float(), float(), float()],
        [float(), float()],
        [index(), index(), index(), index(), index(), index()],
    );
    let tensor = prop_oneof![select(&TENSORS[..3]), select(&TENSORS[..])];
    let apart = prop_oneof![Just(None), (tensor, spacing()).prop_map(Some)];
    let spaces = (weighted(0.3), spacing(), spacing(), apart, any::<u64>());
    let around = (
        [float(), float()],
        [index(), index()],
        any::<bool>(),
        any::<bool>(),
    );
    (dtypes, spaces, around).prop_map(
        move |(
            (mut qkvo, mut gates, indices),
            spaces,
            (mut norm, [fresh, positions], token_major, unnamed),
        )| {
            let (packed, io, pools, apart, seed) = spaces;
            if packed {
                (qkvo[1], qkvo[2], gates[1]) = (qkvo[0], qkvo[0], gates[0]);
                norm[0] = qkvo[0];
            }
            Form {
                state,
                qkvo,
                gates,
                indices,
                norm,
                fresh,
                positions,
                token_major,
                packed,
                io,
                pools,
                apart,
                unnamed,
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
            of_tokens: None,
            spare,
            inactive,
        })
}

fn options(family: Family) -> impl Strategy<Value = Options> {
    let head_map = prop_oneof![Just(HeadMap::Grouped), Just(HeadMap::Tiled)];
    let scale = prop_oneof![3 => Just(None), 1 => Just(Some(1.0)), 1 => Just(Some(-0.3)), 1 => Just(Some(0.0))];
    let null_slot = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 1 => (1u32..8).prop_map(Some)];
    let chunked = family.formulation == Formulation::Chunked && family.dim == 128;
    let split = prop_oneof![1 => Just(None), u32::from(chunked) => (1u32..4).prop_map(|chunks| Some(64 * chunks))];
    (head_map, any::<bool>(), scale, null_slot, split).prop_map(
        move |(head_map, qk_l2norm, scale, null_slot, split)| {
            let mut options = Options::default()
                .state_layout(family.layout)
                .formulation(family.formulation)
                .head_map(head_map)
                .qk_l2norm(qk_l2norm);
            (options.scale, options.null_slot, options.split) = (scale, null_slot, split);
            options
        },
    )
}

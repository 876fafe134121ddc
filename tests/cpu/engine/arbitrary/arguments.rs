//! Random arguments whose tensors mostly have the right dims.

use gated_delta::{
    Activation, BetaScale, DType, Formulation, HeadMap, KdaBeta, Options, StateLayout, Tensor,
};
use gated_delta_harness::arguments::{
    Arguments, Checkpoints, Convolved, DecayKind, GateKind, GatedNorm, Kept, New, Operator, Packed,
    Pending, Tokens,
};
use proptest::option;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::select;

use super::tensors::{dtype, raw, size, wild};

/// The common dims of a set of arguments.
#[derive(Clone, Copy, Debug)]
pub struct Dims {
    rows: usize,
    tokens: usize,
    heads: usize,
    value_heads: usize,
    dim: usize,
    slots: usize,
}

fn dims() -> impl Strategy<Value = Dims> {
    let rows = prop_oneof![3 => 0usize..4, 1 => select(vec![65_535, 65_536])];
    let slots = prop_oneof![3 => 0usize..9, 1 => select(vec![1 << 20, u32::MAX as usize, 1 << 40])];
    let heads = prop_oneof![3 => 1usize..4, 1 => select(vec![65_535usize])];
    (
        rows,
        prop_oneof![6 => 1usize..=2, 1 => select(vec![0, 65, 300, u32::MAX as usize])],
        heads,
        1usize..=2,
        select(vec![64usize, 128]),
        slots,
    )
        .prop_map(|(rows, tokens, heads, ratio, dim, slots)| Dims {
            rows,
            tokens,
            heads,
            value_heads: heads.saturating_mul(ratio),
            dim,
            slots,
        })
}

/// Difference of a tensor from a valid one.
#[derive(Clone, Debug)]
pub enum Twist {
    None,
    /// The right number of strides, some of which are arbitrary.
    Strides([Option<usize>; 5]),
    Wild(Tensor<'static>),
}

fn twist() -> impl Strategy<Value = Twist> {
    let strides = [(); 5].map(|()| option::weighted(0.3, size()));
    prop_oneof![
        60 => Just(Twist::None),
        2 => strides.prop_map(Twist::Strides),
        1 => wild().prop_map(Twist::Wild),
    ]
}

/// Source of tensors, most of which have the right dims.
struct Tensors {
    twists: std::vec::IntoIter<Twist>,
    /// Dtypes of tokens, gates, states, indices, and parameters of gates.
    dtypes: [DType; 5],
}

impl Tensors {
    fn next(&mut self, dtype: usize, dims: &[usize]) -> Option<Tensor<'static>> {
        let dtype = self.dtypes[dtype];
        match self.twists.next()? {
            Twist::None => raw(0x1000, dtype, dims),
            Twist::Wild(tensor) => Some(tensor),
            Twist::Strides(wild) => {
                let tensor = raw(0x1000, dtype, dims)?;
                let strides = tensor.strides().iter().zip(wild);
                let strides: Vec<usize> = strides
                    .map(|(&stride, wild)| wild.unwrap_or(stride))
                    .collect();
                tensor.with_strides(&strides).ok()
            }
        }
    }
}

/// Random choices for one set of arguments.
pub type Draw = (
    Dims,
    GateKind,
    Vec<Twist>,
    [[bool; 24]; 2],
    [DType; 5],
    (Option<f32>, Option<u32>, usize),
);

pub fn draws() -> impl Strategy<Value = Draw> {
    let scale = option::weighted(0.2, select(vec![0.5, -0.5, f32::NAN, f32::INFINITY, -0.0]));
    let null_slot = option::weighted(0.2, select(vec![0, 7, u32::MAX]));
    let floats = || prop_oneof![19 => select(vec![DType::Bf16, DType::F32]), 1 => dtype()];
    let indices = prop_oneof![19 => Just(DType::I32), 1 => dtype()];
    let gates = vec![
        GateKind::Raw(BetaScale::Two),
        GateKind::Given,
        GateKind::Kda(DecayKind::Log, KdaBeta::Given),
        GateKind::Kda(DecayKind::Softplus, KdaBeta::Logit),
        GateKind::Kda(DecayKind::LowerBound(-5.0), KdaBeta::Logit),
        GateKind::Kda(DecayKind::LowerBound(f32::NAN), KdaBeta::Logit),
    ];
    (
        dims(),
        select(gates),
        proptest::collection::vec(twist(), 42),
        any::<[[bool; 24]; 2]>(),
        (floats(), floats(), floats(), indices).prop_map(|(a, b, c, d)| [a, b, c, d, DType::F32]),
        (scale, null_slot, prop_oneof![4 => 0usize..=2, 1 => size()]),
    )
}

/// A step, a commit or a flush of either operator.
pub fn arguments(
    (dims, gates, twists, flags, dtypes, (scale, null_slot, steps)): Draw,
) -> Option<Arguments<Tensor<'static>>> {
    let mut tensors = Tensors {
        twists: twists.into_iter(),
        dtypes,
    };
    let Dims {
        rows,
        tokens,
        heads,
        value_heads,
        dim,
        slots,
    } = dims;
    let mut flags = flags.into_iter().flatten();
    let mut flag = || flags.next().unwrap_or_default();
    let has_pending = flag() && (flag() || flag());
    let is_flush = has_pending && flag();
    // Mostly without switches that contradict deferred write-back.
    let waits = has_pending && (flag() || flag());
    let [is_packed, is_commit, of_tokens, with_previous] = [(); 4].map(|()| flag() && !waits);
    let [b, t] = if is_packed {
        [1, rows.saturating_mul(tokens)]
    } else {
        [rows, tokens]
    };
    let state = [slots, value_heads, dim, dim];
    let per_channel = gates.operator() == Operator::Kda;
    let mut of = |b, t| {
        let gate = [b, t, value_heads, dim];
        Some(Tokens {
            k: tensors.next(0, &[b, t, heads, dim])?,
            v: tensors.next(0, &[b, t, value_heads, dim])?,
            gate: tensors.next(1, &gate[..if per_channel { 4 } else { 3 }])?,
            beta: tensors.next(1, &[b, t, value_heads])?,
        })
    };
    let (new, previous) = (of(b, t)?, of(rows, steps)?);
    let new = New {
        q: tensors.next(0, &[b, t, heads, dim])?,
        tokens: new,
        o: tensors.next(0, &[b, t, value_heads, dim])?,
    };
    let keep = tensors.next(3, &[rows])?;
    let mut optional = |dtype: usize, dims: &[usize], is_there: bool| match is_there {
        true => tensors.next(dtype, dims).map(Some),
        false => Some(None),
    };
    let has_parameters = !matches!(gates, GateKind::Given | GateKind::Kda(DecayKind::Log, _));
    let dt_bias: &[usize] = &[value_heads, dim];
    let mut options = Options::default();
    options.state_layout = if flag() || waits {
        StateLayout::KLast
    } else {
        StateLayout::VLast
    };
    options.head_map = if flag() {
        HeadMap::Tiled
    } else {
        HeadMap::Grouped
    };
    if flag() {
        options.formulation = match [flag(), flag()] {
            [true, true] => Formulation::Parallel,
            [true, false] => Formulation::Chunked,
            [false, _] => Formulation::Recurrent,
        };
    }
    if waits {
        options.formulation = match [flag(), flag()] {
            [true, _] => Formulation::Parallel,
            [false, true] => Formulation::Recurrent,
            [false, false] => Formulation::Auto,
        };
    }
    (options.scale, options.null_slot) = (scale, null_slot);
    let entries = [slots, value_heads, steps.saturating_add(8), dim];
    let of_keys = [slots, heads, entries[2], dim];
    let is_parallel = options.formulation == Formulation::Parallel;
    let convolves = flag() && (waits || flag());
    let of_keys_dtype = if convolves { 4 } else { 0 };
    let [keys, updates] = [(of_keys_dtype, of_keys), (4, entries)]
        .map(|(dtype, dims)| optional(dtype, &dims, has_pending));
    let (keys, updates) = (keys?, updates?);
    let decays = optional(4, &entries[..if per_channel { 4 } else { 3 }], has_pending)?;
    let [len, base] = [
        optional(3, &[rows], has_pending)?,
        optional(3, &[rows], has_pending)?,
    ];
    // The write-back of windows is mostly deferred in the parallel formulation only.
    let windows_wait = (is_parallel && convolves) != (flag() && flag() && flag());
    let windows_wait = has_pending && windows_wait;
    let channels = (2 * heads + value_heads).saturating_mul(dim);
    let of_inputs = [slots, entries[2], channels];
    let inputs = optional(0, &of_inputs, windows_wait)?;
    let taps = 2 + usize::from(flag()) + usize::from(flag());
    let of_windows = [slots, channels, taps - 1];
    let windows = optional(0, &of_windows, is_flush && windows_wait)?;
    let rings = keys.zip(updates).zip(decays).zip(len).zip(base);
    let pending = rings.map(|((((keys, updates), decays), len), base)| Pending {
        keys,
        updates,
        decays,
        len,
        base,
        inputs,
        windows,
        most: steps,
    });
    let has_new = !is_commit && !is_flush;
    let convolved = match has_new && convolves {
        true => Some(Convolved {
            x: optional(0, &[b, t, channels], true)??,
            heads,
            gate: new.tokens.gate,
            beta: new.tokens.beta,
            o: new.o,
            weight: optional(0, &[channels, taps], true)??,
            bias: optional(0, &[channels], flag())?,
            activation: match flag() {
                true => Activation::Silu,
                false => Activation::None,
            },
            windows: optional(0, &of_windows, true)??,
            write_windows: optional(0, &of_windows, !waits && flag() && flag())?,
            window_snapshots: None,
        }),
        false => None,
    };
    let norm = match has_new && flag() && flag() {
        true => Some(GatedNorm {
            z: optional(0, &[b, t, value_heads, dim], true)??,
            weight: optional(4, &[dim], true)??,
            eps: 1e-6,
            activation: Activation::Silu,
        }),
        false => None,
    };
    Some(Arguments {
        gates,
        a_log: optional(4, &[value_heads], has_parameters)?,
        dt_bias: optional(4, &dt_bias[..1 + usize::from(per_channel)], has_parameters)?,
        new: (has_new && !convolves).then_some(new),
        previous: (((with_previous && !of_tokens) || is_commit) && !is_flush).then_some(Kept {
            tokens: previous,
            keep,
        }),
        previous_x: None,
        pool: optional(2, &state, true)??,
        write_pool: optional(2, &state, !waits && flag())?,
        read_slots: optional(3, &[rows], flag() && !of_tokens)?,
        write_slots: optional(3, &[rows], !waits && flag() && !of_tokens)?,
        token_slots: optional(3, &[rows, tokens], of_tokens)?,
        accepted: optional(3, &[rows], of_tokens && flag())?,
        snapshots: optional(
            2,
            &[rows, steps, value_heads, dim, dim],
            !waits && flag() && flag(),
        )?,
        packed: optional(3, &[rows + 1], is_packed)?.map(|cu_seqlens| Packed {
            cu_seqlens,
            max_tokens: tokens,
        }),
        convolved,
        norm,
        fresh: optional(3, &[rows], !is_flush && flag() && flag())?,
        positions: optional(3, &[rows], !waits && flag() && flag())?,
        checkpoints: optional(3, &[rows, steps], !waits && flag() && flag())?.map(|slots| {
            Checkpoints {
                every: 64usize.wrapping_mul(steps),
                slots,
            }
        }),
        workspace: optional(4, &[steps, dim], !waits && flag() && flag())?,
        pending,
        update_state: waits || flag() || flag(),
        options,
    })
}

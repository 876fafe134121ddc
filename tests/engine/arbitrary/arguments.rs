//! Arguments of tensors most of which have the right dims.

use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::gdn_mtp::{GdnCommit, GdnMtp};
use gated_delta::ops::kda_recurrent::{KdaBeta, KdaGate, KdaGates, KdaRecurrent};
use gated_delta::ops::recurrent::{Formulation, Packed, Previous, RecurrentOptions};
use gated_delta::ops::{BetaScale, GdnGates, HeadMap, StateLayout};
use gated_delta::{DType, Tensor};
use gated_delta_tests::args::Args;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::select;

use super::tensors::{dtype, raw, size, wild};

/// The dims that arguments agree on.
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
        1usize..=2,
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

/// How far from right a tensor is.
#[derive(Clone, Debug)]
pub enum Twist {
    None,
    /// Strides of the right number, of which some are wild.
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

/// Tensors of the right dims, most of them.
struct Tensors {
    twists: std::vec::IntoIter<Twist>,
    /// Of tokens, gates, states, indices, and the gates' parameters.
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

/// All that is drawn for one set of arguments.
pub type Draw = (
    Dims,
    Vec<Twist>,
    [bool; 10],
    [DType; 5],
    (Option<f32>, Option<u32>, usize),
);

pub fn draws() -> impl Strategy<Value = Draw> {
    let scale = option::weighted(0.2, select(vec![0.5, -0.5, f32::NAN, f32::INFINITY, -0.0]));
    let null_slot = option::weighted(0.2, select(vec![0, 7, u32::MAX]));
    let floats = || prop_oneof![19 => select(vec![DType::Bf16, DType::F32]), 1 => dtype()];
    let indices = prop_oneof![19 => Just(DType::I32), 1 => dtype()];
    (
        dims(),
        vec(twist(), 24),
        any::<[bool; 10]>(),
        (floats(), floats(), floats(), indices).prop_map(|(a, b, c, d)| [a, b, c, d, DType::F32]),
        (scale, null_slot, prop_oneof![4 => 0usize..=2, 1 => size()]),
    )
}

pub fn decode((dims, twists, flags, dtypes, (scale, null_slot, _)): Draw) -> Option<Args<'static>> {
    let mut tensors = Tensors {
        twists: twists.into_iter(),
        dtypes,
    };
    let Dims {
        rows,
        heads,
        value_heads,
        dim,
        slots,
        ..
    } = dims;
    let layout = if flags[0] {
        StateLayout::KLast
    } else {
        StateLayout::VLast
    };
    let state = [slots, value_heads, dim, dim];
    Some(Args::GdnDecode(GdnDecode {
        q: tensors.next(0, &[rows, 1, heads, dim])?,
        k: tensors.next(0, &[rows, 1, heads, dim])?,
        v: tensors.next(0, &[rows, 1, value_heads, dim])?,
        gates: GdnGates::Raw {
            a: tensors.next(1, &[rows, 1, value_heads])?,
            b: tensors.next(1, &[rows, 1, value_heads])?,
            a_log: tensors.next(4, &[value_heads])?,
            dt_bias: tensors.next(4, &[value_heads])?,
            beta_scale: BetaScale::Two,
        },
        o: tensors.next(0, &[rows, 1, value_heads, dim])?,
        pool: tensors.next(2, &state)?,
        write_pool: if flags[1] {
            Some(tensors.next(2, &state)?)
        } else {
            None
        },
        read_slots: if flags[2] {
            Some(tensors.next(3, &[rows])?)
        } else {
            None
        },
        write_slots: if flags[3] {
            Some(tensors.next(3, &[rows])?)
        } else {
            None
        },
        options: GdnDecodeOptions {
            state_layout: layout,
            head_map: if flags[4] {
                HeadMap::Tiled
            } else {
                HeadMap::Grouped
            },
            scale,
            null_slot,
            update_state: flags[5],
            ..GdnDecodeOptions::default()
        },
    }))
}

/// A verify, its commit, and a KDA of the same tensors.
pub fn recurrent(
    (dims, twists, flags, dtypes, (scale, null_slot, steps)): Draw,
) -> Option<[Args<'static>; 3]> {
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
    let is_packed = flags[9];
    let [b, t] = if is_packed {
        [1, rows * tokens]
    } else {
        [rows, tokens]
    };
    let state = [slots, value_heads, dim, dim];
    let keys = [b, t, heads, dim];
    let values = [b, t, value_heads, dim];
    let options = RecurrentOptions {
        state_layout: if flags[0] {
            StateLayout::KLast
        } else {
            StateLayout::VLast
        },
        scale,
        null_slot,
        update_state: flags[1],
        formulation: if flags[2] {
            Formulation::Parallel
        } else {
            Formulation::Recurrent
        },
        ..RecurrentOptions::default()
    };
    let (gate, beta) = (
        tensors.next(1, &[b, t, value_heads])?,
        tensors.next(1, &[b, t, value_heads])?,
    );
    let previous = Previous {
        k: tensors.next(0, &[rows, steps, heads, dim])?,
        v: tensors.next(0, &[rows, steps, value_heads, dim])?,
        gate: tensors.next(1, &[rows, steps, value_heads])?,
        beta: tensors.next(1, &[rows, steps, value_heads])?,
        keep: tensors.next(3, &[rows])?,
    };
    let token_slots = flags[3];
    let verify = GdnMtp {
        q: tensors.next(0, &keys)?,
        k: tensors.next(0, &keys)?,
        v: tensors.next(0, &values)?,
        gates: GdnGates::Given { g: gate, beta },
        o: tensors.next(0, &values)?,
        pool: tensors.next(2, &state)?,
        write_pool: if flags[4] {
            Some(tensors.next(2, &state)?)
        } else {
            None
        },
        read_slots: if flags[5] && !token_slots {
            Some(tensors.next(3, &[rows])?)
        } else {
            None
        },
        write_slots: if flags[6] && !token_slots {
            Some(tensors.next(3, &[rows])?)
        } else {
            None
        },
        token_slots: if token_slots {
            Some(tensors.next(3, &[rows, tokens])?)
        } else {
            None
        },
        accepted: if token_slots && flags[5] {
            Some(tensors.next(3, &[rows])?)
        } else {
            None
        },
        snapshots: if flags[7] {
            Some(tensors.next(2, &[rows, steps, value_heads, dim, dim])?)
        } else {
            None
        },
        packed: if is_packed {
            Some(Packed {
                cu_seqlens: tensors.next(3, &[rows.wrapping_add(1)])?,
                max_tokens: tokens,
            })
        } else {
            None
        },
        previous: if flags[8] && !token_slots {
            Some(previous)
        } else {
            None
        },
        options,
    };
    let commit = GdnCommit {
        k: previous.k,
        v: previous.v,
        gates: GdnGates::Given {
            g: previous.gate,
            beta: previous.beta,
        },
        keep: previous.keep,
        pool: verify.pool,
        write_pool: verify.write_pool,
        read_slots: verify.read_slots,
        write_slots: verify.write_slots,
        options,
    };
    let kda = KdaRecurrent {
        q: verify.q,
        k: verify.k,
        v: verify.v,
        gates: KdaGates {
            g: tensors.next(1, &[b, t, value_heads, dim])?,
            kind: KdaGate::LowerBound {
                lower_bound: scale.unwrap_or(-5.0),
                a_log: Some(tensors.next(4, &[heads])?),
                dt_bias: Some(tensors.next(4, &[heads, dim])?),
            },
            beta,
            beta_kind: KdaBeta::Logit,
        },
        o: verify.o,
        pool: verify.pool,
        write_pool: verify.write_pool,
        read_slots: verify.read_slots,
        write_slots: verify.write_slots,
        token_slots: verify.token_slots,
        accepted: verify.accepted,
        snapshots: verify.snapshots,
        packed: verify.packed,
        previous: None,
        options,
    };
    Some([
        Args::GdnMtp(verify),
        Args::GdnCommit(commit),
        Args::KdaRecurrent(kda),
    ])
}

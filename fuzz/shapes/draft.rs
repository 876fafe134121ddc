//! What the fuzzer's bytes say: an operation, its switches, and the form of every tensor, most of them as they should
//! be.

use std::collections::BTreeMap;

use gated_delta::DType;
use gated_delta::ops::kda_recurrent::KdaBeta;
use gated_delta::ops::recurrent::{Formulation, RecurrentOptions};
use gated_delta::ops::{BetaScale, HeadMap, StateLayout};
use gated_delta::tensor::MAX_DIMS;
use gated_delta_cli::operation::{GdnGate, KdaDecay, KdaGate, Operation};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};

use crate::form::Form;
use crate::sizes::{Sizes, draw_tokens};

/// An arbitrary problem without memory.
#[derive(Debug)]
pub struct Draft {
    /// What is computed.
    pub operation: Operation,
    /// What is fixed for the layer.
    pub options: RecurrentOptions,
    /// Most tokens of a packed row.
    pub max_tokens: Option<usize>,
    /// Tokens of a packed row where they all have as many.
    pub tokens: usize,
    /// The tensors under their names; `write state` is the other pool.
    pub forms: BTreeMap<&'static str, Form>,
    /// What index tensors are filled with, over and over; where there are none, with ascending numbers.
    pub indices: Vec<i64>,
    /// Which of the variants is launched.
    pub variant: u8,
}

/// How a launch keeps states.
#[derive(Clone, Copy, PartialEq)]
enum Keeping {
    InPlace,
    Slots,
    OtherPool,
    Snapshots,
    TokenSlots,
    Resume,
    Commit,
}

impl Keeping {
    const ALL: [Self; 7] = [
        Self::InPlace,
        Self::Slots,
        Self::OtherPool,
        Self::Snapshots,
        Self::TokenSlots,
        Self::Resume,
        Self::Commit,
    ];
}

/// True once in about `n` times; false where the bytes are used up.
pub fn rarely(u: &mut Unstructured<'_>, n: u8) -> Result<bool> {
    Ok(u.int_in_range(0..=n - 1)? == n - 1)
}

impl<'a> Arbitrary<'a> for Draft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let operation = operation(u)?;
        let keeping = *u.choose(&Keeping::ALL)?;
        let sizes = Sizes::draw(u, operation)?;
        let mut wanted = wanted(operation, keeping, &sizes, u)?;
        if rarely(u, 16)? {
            let all = [
                "snapshots",
                "token_slots",
                "keep",
                "write state",
                "g",
                "dt_bias",
            ];
            let name = u.choose(&all)?;
            if !wanted.contains(name) {
                wanted.push(name);
            }
        }
        if rarely(u, 16)? {
            wanted.swap_remove(u.choose_index(wanted.len())?);
        }
        let options = options(u, keeping, operation)?;
        let of_parallel = options.formulation == Formulation::Parallel && !rarely(u, 8)?;
        let state = match of_parallel {
            true => DType::Bf16,
            false => *u.choose(&[DType::F32, DType::Bf16])?,
        };
        let bent = if u.arbitrary()? {
            u.choose_index(wanted.len())?
        } else {
            wanted.len()
        };
        let mut forms = BTreeMap::new();
        for (position, name) in wanted.into_iter().enumerate() {
            let dims = sizes.dims(name, operation, u)?;
            let mut form = Form::draw(dtype(name, state, u)?, dims, free_dims(name), u)?;
            if position == bent {
                form.bend(u)?;
            }
            forms.insert(name, form);
        }
        Ok(Self {
            operation,
            options,
            max_tokens: if sizes.packed && u.arbitrary()? {
                Some(draw_tokens(u)?)
            } else {
                None
            },
            tokens: sizes.tokens,
            forms,
            indices: indices(u)?,
            variant: u.arbitrary()?,
        })
    }
}

fn operation(u: &mut Unstructured<'_>) -> Result<Operation> {
    let gdn = *u.choose(&[
        GdnGate::Raw(BetaScale::One),
        GdnGate::Raw(BetaScale::Two),
        GdnGate::Given,
    ])?;
    Ok(match u.int_in_range(0..=2)? {
        0 => Operation::GdnDecode(gdn),
        1 => Operation::GdnMtp(gdn),
        _ => Operation::KdaRecurrent(KdaGate {
            decay: match u.int_in_range(0..=3)? {
                0 => KdaDecay::Log,
                1 => KdaDecay::Softplus,
                2 => KdaDecay::LowerBound(-5.0),
                _ => KdaDecay::LowerBound(-u.arbitrary::<f32>()?.abs()),
            },
            beta: *u.choose(&[KdaBeta::Given, KdaBeta::Logit])?,
        }),
    })
}

fn options(
    u: &mut Unstructured<'_>,
    keeping: Keeping,
    operation: Operation,
) -> Result<RecurrentOptions> {
    let has_parallel = !matches!(operation, Operation::GdnDecode(_))
        && !matches!(keeping, Keeping::Snapshots | Keeping::TokenSlots);
    let parallel = rarely(u, if has_parallel { 2 } else { 32 })?;
    let v_last = rarely(u, if parallel { 16 } else { 2 })?;
    let reads_alone = matches!(keeping, Keeping::InPlace | Keeping::Snapshots);
    Ok(RecurrentOptions {
        state_layout: if v_last {
            StateLayout::VLast
        } else {
            StateLayout::KLast
        },
        head_map: *u.choose(&[HeadMap::Grouped, HeadMap::Tiled])?,
        qk_l2norm: u.arbitrary()?,
        scale: if rarely(u, 8)? {
            Some(u.arbitrary()?)
        } else {
            None
        },
        null_slot: if rarely(u, 4)? {
            Some(u.int_in_range(0..=4)?)
        } else {
            None
        },
        update_state: !rarely(u, if reads_alone { 3 } else { 32 })?,
        formulation: if parallel {
            Formulation::Parallel
        } else {
            Formulation::Recurrent
        },
    })
}

/// Names of the tensors that go together.
fn wanted(
    operation: Operation,
    keeping: Keeping,
    sizes: &Sizes,
    u: &mut Unstructured<'_>,
) -> Result<Vec<&'static str>> {
    let decode = matches!(operation, Operation::GdnDecode(_));
    let mut names = vec!["state"];
    match operation {
        Operation::GdnDecode(GdnGate::Raw(_)) | Operation::GdnMtp(GdnGate::Raw(_)) => {
            names.extend(["A_log", "dt_bias"]);
        }
        Operation::KdaRecurrent(KdaGate {
            decay: KdaDecay::Softplus,
            ..
        }) => {
            names.push("A_log");
        }
        _ => {}
    }
    if matches!(operation, Operation::KdaRecurrent(gate) if gate.decay != KdaDecay::Log)
        && u.arbitrary()?
    {
        names.push("dt_bias");
    }
    if keeping != Keeping::Commit || decode {
        names.extend(["q", "k", "v", "o"]);
        names.extend(operation.token_gates());
        if sizes.packed {
            names.push("cu_seqlens");
        }
    }
    if matches!(keeping, Keeping::Resume | Keeping::Commit) && !decode {
        names.extend(["prev.k", "prev.v", "keep"]);
        names.extend(operation.previous_gates());
    }
    match keeping {
        Keeping::InPlace => {}
        Keeping::Snapshots if !decode => names.push("snapshots"),
        Keeping::TokenSlots if !decode => {
            names.push("token_slots");
            if u.arbitrary()? {
                names.push("accepted");
            }
        }
        _ => {
            names.push("read_slots");
            if u.arbitrary()? {
                names.push("write_slots");
            }
        }
    }
    if keeping == Keeping::OtherPool || rarely(u, 4)? {
        names.push("write state");
    }
    Ok(names)
}

/// How many of a tensor's outermost dims have strides of their own.
fn free_dims(name: &str) -> usize {
    match name {
        "A_log" | "dt_bias" => 0,
        "state" | "write state" => 1,
        "snapshots" => 2,
        _ => MAX_DIMS,
    }
}

/// What index tensors are filled with: mostly nothing in particular.
fn indices(u: &mut Unstructured<'_>) -> Result<Vec<i64>> {
    let count = if rarely(u, 3)? {
        u.int_in_range(1..=8)?
    } else {
        0
    };
    let index = |u: &mut Unstructured<'_>| match rarely(u, 16)? {
        true => u.arbitrary(),
        false => u.int_in_range(-1..=6),
    };
    (0..count).map(|_| index(u)).collect()
}

/// One that the tensor of that name may have.
fn dtype(name: &str, state: DType, u: &mut Unstructured<'_>) -> Result<DType> {
    let (floats, indices) = (
        [DType::F32, DType::Bf16, DType::F16],
        [DType::I32, DType::I64, DType::U32],
    );
    let allowed = match name {
        "state" | "write state" | "snapshots" => &[state][..],
        "A_log" | "dt_bias" => &[DType::F32],
        "read_slots" | "write_slots" | "token_slots" | "accepted" | "cu_seqlens" | "keep" => {
            &indices
        }
        _ => &floats,
    };
    Ok(*u.choose(allowed)?)
}

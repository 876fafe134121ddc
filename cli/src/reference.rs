//! Runs problems with the reference, in f64.

use std::collections::BTreeMap;
use std::fmt::Debug;

use gated_delta::{DType, HeadMap, IndexReport, KdaBeta};
use gated_delta_harness::arguments::{DecayKind, GateKind};
use gated_delta_reference::conv::Conv;
use gated_delta_reference::deferred::{After, Deferred, Rings, deferred};
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::judge::{judge, judge_deferred};
use gated_delta_reference::kda::{self, KdaGates};
use gated_delta_reference::layer::{Layer, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrence::default_scale;
use gated_delta_reference::recurrent::{Checkpoints, Previous, Recurrent, TokenGates};
use gated_delta_reference::tolerance::{CONVOLVED, DType as Stored, Tolerance};

use crate::error::Error;
use crate::op::previous_gates;
use crate::problem::{Problem, RINGS};
use crate::tensor::HostTensor;
use crate::written::Written;

/// Exact results of a launch, not rounded. Elements that are not written keep their value.
#[derive(Clone, Debug, PartialEq)]
pub struct Truth {
    /// `[B, T, HV, V]`; empty for a commit and a flush.
    pub o: Vec<f64>,
    /// The whole pool after the launch.
    pub pool: Vec<f64>,
    /// The whole pool of windows after the launch, with a convolution.
    pub windows: Option<Vec<f64>>,
    /// All snapshots, if they are wanted.
    pub snapshots: Option<Vec<f64>>,
    /// All window snapshots, if they are wanted.
    pub window_snapshots: Option<Vec<f64>>,
    /// All rings after the launch, with deferred write-back: keys, updates, decays; if windows are deferred, inputs.
    pub rings: [Option<Vec<f64>>; 4],
}

/// Largest errors of results before they are rounded to their dtype, as norms of differences.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Allowed {
    /// `[B, T, HV]`: bound on o.
    pub o: Vec<f64>,
    /// `[P, HV]`: bound on the states.
    pub state: Vec<f64>,
    /// `[B, T, HV]`: bound on the snapshots.
    pub snapshots: Vec<f64>,
    /// Bounds on the rings: `[P, H, R]` for keys, `[P, HV, R]` for updates and decays; empty for inputs, which are copies.
    pub rings: [Vec<f64>; 4],
}

/// Exact results of a problem that [`Problem::validate`] has passed, from the values as they are stored.
///
/// # Errors
/// [`gated_delta::Error::MissingTensor`], or the errors of the reference.
pub fn truth(problem: &Problem) -> Result<Truth, Error> {
    Values::of(problem).with(problem, |step, values| {
        if problem.has_pending() {
            let after = deferred(
                &values.waiting(problem, step),
                &values.pools(),
                &values.rings(),
            )?;
            return Ok(of_rings(after));
        }
        let after = layer(&values.layer(problem, step), &values.pools())?;
        Ok(Truth {
            o: after.o,
            pool: after.states,
            windows: after.windows,
            snapshots: after.snapshots,
            window_snapshots: after.window_snapshots,
            rings: [const { None }; 4],
        })
    })
}

/// As [`truth`], with the bounds on a launch's errors. New tokens after committed or flushed ones start from the states of `stored`, the
/// pool after the launch; without `stored`, from the exact states, which are not rounded.
///
/// # Errors
/// The errors of [`truth`].
pub(crate) fn judged(problem: &Problem, stored: Option<&[f64]>) -> Result<(Truth, Allowed), Error> {
    let state = problem.tensor("state")?.dtype();
    let tolerance = Tolerance::from(problem.formulation()?).on(state.into());
    Values::of(problem).with(problem, |step, values| {
        if problem.has_pending() {
            let (after, allowed) = judge_deferred(
                &values.waiting(problem, step),
                &values.pools(),
                &values.rings(),
                stored,
                &tolerance,
                CONVOLVED,
            )?;
            let allowed = Allowed {
                o: allowed.o,
                state: allowed.states,
                snapshots: Vec::new(),
                rings: [allowed.keys, allowed.updates, allowed.decays, Vec::new()],
            };
            return Ok((of_rings(after), allowed));
        }
        let after = judge(
            &values.layer(problem, step),
            &values.pools(),
            stored,
            &tolerance,
            CONVOLVED,
        )?;
        let truth = Truth {
            o: after.o,
            pool: after.states,
            windows: after.windows,
            snapshots: after.snapshots,
            window_snapshots: after.window_snapshots,
            rings: [const { None }; 4],
        };
        let allowed = Allowed {
            o: after.allowed.o,
            state: after.allowed.states,
            snapshots: after.allowed.snapshots,
            rings: [const { Vec::new() }; 4],
        };
        Ok((truth, allowed))
    })
}

/// Length from which a key may be stored times a power of two: 2¹⁶.
const LONG: f64 = (1u64 << 16) as f64;

/// Multiplies the wanted keys of a ring, if they are [`LONG`], by the powers of two that `keys` were stored with, and divides the wanted
/// updates of the same tokens by them: S += u kᵀ is the same. Which power a kernel takes is its own choice. Their bounds change likewise.
pub(crate) fn scale_long_keys(
    problem: &Problem,
    [keys, updates]: [&HostTensor; 2],
    truth: &mut Truth,
    (of_keys, mut of_updates): (&mut [f64], [&mut Vec<f64>; 2]),
) {
    let (&[_, h, entries, dim], &[_, hv, _, width]) = (keys.dims(), updates.dims()) else {
        return;
    };
    let [Some(wanted), Some(wanted_updates), ..] = &mut truth.rings else {
        return;
    };
    if !problem.options.qk_l2norm || [h, hv, entries, dim, width].contains(&0) {
        return;
    }
    let got = keys.to_f64();
    let pairs = got.chunks(dim).zip(wanted.chunks(dim));
    let powers: Vec<f64> = pairs.map(|(got, exact)| power_of(got, exact)).collect();
    for (i, power) in powers.iter().enumerate() {
        wanted[i * dim..][..dim]
            .iter_mut()
            .for_each(|k| *k *= power);
        of_keys[i] *= power;
    }
    for (at, updates) in wanted_updates.chunks_mut(width).enumerate() {
        let (slot, value_head, entry) = (at / entries / hv, at / entries % hv, at % entries);
        let head = match problem.options.head_map {
            HeadMap::Grouped => value_head / (hv / h),
            HeadMap::Tiled => value_head % h,
        };
        let power = powers[(slot * h + head) * entries + entry];
        updates.iter_mut().for_each(|u| *u /= power);
        for bound in of_updates.iter_mut().filter_map(|of| of.get_mut(at)) {
            *bound /= power;
        }
    }
}

/// The power of two that key `exact` was stored with as `got`; 1 if the key is not [`LONG`], or `got` is no such multiple.
fn power_of(got: &[f64], exact: &[f64]) -> f64 {
    let len = exact.len() as f64;
    let pairs = got.iter().zip(exact);
    let Some((got, exact)) = pairs.max_by(|one, other| one.1.abs().total_cmp(&other.1.abs()))
    else {
        return 1.0;
    };
    let power = (got / exact).log2().round().exp2();
    let is_long = exact.is_finite() && exact.abs() * len.sqrt() >= LONG;
    if is_long && power.is_normal() {
        power
    } else {
        1.0
    }
}

/// Exact results of a launch with deferred write-back.
fn of_rings(after: After) -> Truth {
    Truth {
        o: after.o,
        pool: after.pool,
        windows: after.windows,
        snapshots: None,
        window_snapshots: None,
        rings: [
            Some(after.rings.keys),
            Some(after.rings.updates),
            Some(after.rings.decays),
            after.rings.inputs,
        ],
    }
}

/// Runs a problem that [`Problem::validate`] has passed, and rounds the results where a kernel stores them. Elements that no row writes
/// keep their bits.
pub(crate) fn run(problem: &Problem, rows: &IndexReport) -> Result<Problem, Error> {
    let truth = truth(problem)?;
    let mut after = problem.clone();
    let results = [
        ("o", Some(&truth.o)),
        ("state", Some(&truth.pool)),
        ("conv_state", truth.windows.as_ref()),
        ("snapshots", truth.snapshots.as_ref()),
        ("conv_snapshots", truth.window_snapshots.as_ref()),
    ];
    let rings = truth.rings.iter().map(Option::as_ref);
    let written = Written::of(problem, rows);
    for (name, values) in results.into_iter().chain(RINGS.into_iter().zip(rings)) {
        if let (Some(tensor), Some(values)) = (after.tensors.get_mut(name), values) {
            let is_state = matches!(name, "state" | "snapshots");
            let held: Vec<f64> = match tensor.dtype() {
                DType::F16 if is_state => values.iter().map(|&s| Stored::F16.held(s)).collect(),
                _ => values.clone(),
            };
            tensor.fill_units(&held, written.units(name))?;
        }
    }
    Ok(after)
}

/// Values of a problem's tensors as f64 and i64.
struct Values {
    floats: BTreeMap<&'static str, Vec<f64>>,
    indices: BTreeMap<&'static str, Vec<i64>>,
}

impl Values {
    fn of(problem: &Problem) -> Self {
        let mut values = Self {
            floats: BTreeMap::new(),
            indices: BTreeMap::new(),
        };
        for (&name, tensor) in &problem.tensors {
            match tensor.dtype() {
                DType::F32 | DType::Bf16 | DType::F16 => {
                    values.floats.insert(name, tensor.to_f64());
                }
                DType::I32 | DType::I64 | DType::U32 => {
                    values.indices.insert(name, tensor.to_i64());
                }
            }
        }
        values
    }

    fn optional(&self, name: &str) -> Option<&[f64]> {
        self.floats.get(name).map(Vec::as_slice)
    }

    /// Values of a float tensor; empty if there is none.
    fn floats(&self, name: &str) -> &[f64] {
        self.optional(name).unwrap_or_default()
    }

    fn indices(&self, name: &str) -> Option<&[i64]> {
        self.indices.get(name).map(Vec::as_slice)
    }

    /// Calls `of` with the problem in the reference's form.
    fn with<R>(
        &self,
        problem: &Problem,
        of: impl FnOnce(Recurrent<'_>, &Self) -> Result<R, Error>,
    ) -> Result<R, Error> {
        let heads = match problem.heads {
            Some(heads) => heads,
            None if problem.is_commit() => problem.dim("prev.k", 2),
            None if problem.is_flush() => problem.dim("pending.keys", 1),
            None => problem.dim("q", 2),
        };
        let (options, [key_dim, value_dim]) = (&problem.options, problem.state_dims());
        let previous = || {
            Ok::<_, Error>(Previous {
                tokens: problem.dim(problem.previous_tokens(), 1),
                k: self.floats("prev.k"),
                v: self.floats("prev.v"),
                gates: self.gates(problem.gates, previous_gates(problem.gates))?,
                keep: self.indices("keep").unwrap_or_default(),
            })
        };
        let previous = problem.has_previous().then(previous).transpose()?;
        let step = Recurrent {
            batch: problem.tokens().len(),
            tokens: problem.max_tokens(),
            heads,
            value_heads: problem.dim("state", 1),
            key_dim,
            value_dim,
            q: self.floats("q"),
            k: self.floats("k"),
            v: self.floats("v"),
            gates: self.gates(problem.gates, problem.gates.names())?,
            l2norm: options.qk_l2norm,
            scale: options
                .scale
                .map_or_else(|| default_scale(key_dim), f64::from),
            head_map: options.head_map.into(),
            layout: options.state_layout.into(),
            read_slots: self.indices("read_slots"),
            write_slots: self.indices("write_slots"),
            token_slots: self.indices("token_slots"),
            accepted: self.indices("accepted"),
            cu_seqlens: self.indices("cu_seqlens"),
            null_slot: options.null_slot.map(i64::from),
            update_state: problem.update_state,
            snapshot_steps: self
                .optional("snapshots")
                .map(|_| problem.dim("snapshots", 1)),
            previous,
            round_state: match problem.tensor("state")?.dtype() {
                DType::Bf16 => |s| Stored::Bf16.round_state(s),
                DType::F16 => |s| Stored::F16.round_state(s),
                _ => |s| f64::from(s as f32),
            },
        };
        of(step, self)
    }

    fn pools(&self) -> Pools<'_> {
        Pools {
            states: self.floats("state"),
            windows: self.optional("conv_state"),
            snapshots: self.optional("snapshots"),
            window_snapshots: self.optional("conv_snapshots"),
            ..Pools::default()
        }
    }

    fn rings(&self) -> Rings {
        let [keys, updates, decays, inputs] =
            RINGS.map(|name| self.optional(name).map(<[f64]>::to_vec));
        Rings {
            keys: keys.unwrap_or_default(),
            updates: updates.unwrap_or_default(),
            decays: decays.unwrap_or_default(),
            inputs,
        }
    }

    /// A step or a flush with deferred write-back, in the reference's form.
    fn waiting<'a>(&'a self, problem: &Problem, step: Recurrent<'a>) -> Deferred<'a> {
        Deferred {
            layer: self.layer(problem, step),
            most: problem.most_pending(),
            entries: problem.dim("pending.updates", 2),
            len: self.indices("pending.len").unwrap_or_default(),
            base: self.indices("pending.base").unwrap_or_default(),
        }
    }

    /// The layer around a recurrence, in the reference's form.
    fn layer<'a>(&'a self, problem: &Problem, step: Recurrent<'a>) -> Layer<'a> {
        let projection = problem.convolves().then(|| Projection {
            x: self.floats("x"),
            previous: self.optional("prev.x"),
            conv: Conv {
                channels: problem.dim("conv_weight", 0),
                width: problem.dim("conv_weight", 1),
                weight: self.floats("conv_weight"),
                bias: self.optional("conv_bias"),
                activation: problem.conv_activation.into(),
            },
        });
        let norm = self.optional("z").map(|z| GatedNorm {
            z,
            weight: self.floats("norm_weight"),
            eps: problem.norm_eps.unwrap_or(0.0).into(),
            activation: problem.norm_activation.into(),
        });
        Layer {
            step,
            projection,
            norm,
            fresh: self.indices("fresh"),
            checkpoints: self.indices("checkpoint_slots").map(|slots| Checkpoints {
                every: problem.checkpoint_every.unwrap_or(0),
                slots,
                positions: self.indices("positions"),
            }),
        }
    }

    /// Gates from the two gate tensors of these names.
    fn gates(&self, gates: GateKind, [first, second]: [&str; 2]) -> Result<TokenGates<'_>, Error> {
        let (first, second) = (self.floats(first), self.floats(second));
        Ok(match gates {
            GateKind::Raw(beta_scale) => TokenGates::Gdn(Gates::Raw {
                a: first,
                b: second,
                a_log: self.floats("A_log"),
                dt_bias: self.floats("dt_bias"),
                beta_scale: beta_scale.factor().into(),
            }),
            GateKind::Given => TokenGates::Gdn(Gates::Given {
                g: first,
                beta: second,
            }),
            GateKind::Kda(decay, beta) => TokenGates::Kda(KdaGates {
                g: first,
                kind: match decay {
                    DecayKind::Log => kda::KdaDecay::Log,
                    DecayKind::Softplus => kda::KdaDecay::Softplus {
                        a_log: self.floats("A_log"),
                        dt_bias: self.optional("dt_bias"),
                    },
                    DecayKind::LowerBound(lower_bound) => kda::KdaDecay::LowerBound {
                        lower_bound: lower_bound.into(),
                        a_log: self.optional("A_log"),
                        dt_bias: self.optional("dt_bias"),
                    },
                },
                beta: second,
                beta_kind: match beta {
                    KdaBeta::Given => kda::KdaBeta::Given,
                    KdaBeta::Logit => kda::KdaBeta::Logit,
                    other => return Err(not_taken(other)),
                },
            }),
        })
    }
}

/// Error for a kind of the library that the reference does not have.
fn not_taken(kind: impl Debug) -> Error {
    Error::Input(format!("reference: {kind:?} is not one of its own"))
}

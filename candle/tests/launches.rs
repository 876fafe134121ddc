//! Compares launches on the CPU, in the simulator and on a GPU with the reference in f64: every way of keeping states, dtypes, layouts,
//! views.

mod gpu;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_gated_delta::{
    Activation, BetaScale, Commit, Convolution, Flush, Formulation, Gates, GdnGates, HeadMap,
    Inputs, KdaBeta, KdaDecay, KdaGates, Keep, NO_SLOT, Norm, Options, Pending, Previous,
    StateLayout, States, Step, Stored, gdn as candle_gdn, gdn_varlen, kda as candle_kda,
    kda_varlen,
};
use gated_delta_reference::conv::Conv;
use gated_delta_reference::deferred::{Deferred, Rings, deferred};
use gated_delta_reference::gate::Activation as Act;
use gated_delta_reference::layer::{Layer, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Checkpoints, Layout, Recurrent, TokenGates};
use gated_delta_reference::tolerance::{self, relative_error_of};
use gated_delta_reference::{gdn, kda, recurrence, recurrent};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use gpu::gpu;

/// Head dims, K = V.
const K: usize = 64;
/// Slots, P.
const SLOTS: usize = 9;
/// Taps, W.
const TAPS: usize = 4;

/// States that a launch writes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The last state, in place.
    Update,
    /// The last state, to another slot.
    Fork,
    /// No state; the state after every token goes to snapshots.
    Snapshots,
    /// The state after every token, in a slot of its own.
    PerToken,
    /// The state after some of the previous tokens, which new tokens start from.
    Resume,
    /// The state after some of the previous tokens, without new ones.
    Commit,
}

/// A launch to test.
#[derive(Clone, Copy, Debug)]
struct Case {
    is_kda: bool,
    way: Way,
    /// Whether the launch has the convolution and the norm.
    whole: bool,
    /// Dtype of activations.
    dtype: DType,
    state: DType,
    /// Dtype of index tensors.
    index: DType,
    /// Heads, H and HV.
    heads: [usize; 2],
    tokens: usize,
    /// Lengths of packed rows. T is the longest.
    packed: Option<[usize; 4]>,
    /// Whether there are checkpoints every 64 tokens, for rows that continue from some position.
    checkpoints: bool,
    options: Options,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            is_kda: false,
            way: Way::Update,
            whole: false,
            dtype: DType::F32,
            state: DType::F32,
            index: DType::U32,
            heads: [2, 4],
            tokens: 1,
            packed: None,
            checkpoints: false,
            options: Options::default(),
        }
    }
}

/// Inputs of both the launch and the reference.
struct Given {
    /// `[rows, T, width]`, for packed rows `[1, total, width]`: x, z, b, and a or g, side by side.
    row: Tensor,
    /// The same for the previous tokens.
    last: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    pool: Tensor,
    /// `[P, D, W − 1]`, or with the columns that token slots need. In memory, D is the contiguous dim.
    windows: Tensor,
    slots: Vec<i64>,
    write_slots: Vec<i64>,
    token_slots: Vec<i64>,
    accepted: Vec<i64>,
    keep: Vec<i64>,
    fresh: Vec<i64>,
    cu_seqlens: Vec<i64>,
    positions: Vec<i64>,
    checkpoints: Vec<i64>,
}

/// Rows of every case: the second has a dead slot, the third is fresh, the others continue.
const ROWS: usize = 4;

/// Number of previous tokens, T'.
const LAST: usize = 3;

/// Number of checkpoints of each row, C.
const KEPT: usize = 2;

fn doubles(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor.to_device(&Device::Cpu)?;
    Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn rounding(dtype: DType) -> tolerance::DType {
    match dtype {
        DType::BF16 => tolerance::DType::Bf16,
        DType::F16 => tolerance::DType::F16,
        _ => tolerance::DType::F32,
    }
}

/// Part of [`Given::row`].
enum Part {
    X,
    Z,
    Beta,
    Gate,
}

impl Case {
    fn value_channels(&self) -> usize {
        self.heads[1] * K
    }

    fn channels(&self) -> usize {
        2 * self.heads[0] * K + self.value_channels()
    }

    /// Tolerance of the outputs. An element of a 16-bit state that is halfway between two numbers may be stored as either; if all elements
    /// were rounded wrongly, the error would be 1.7e-3.
    fn of_outputs(&self) -> f64 {
        match (self.dtype, self.state) {
            (DType::F32, DType::BF16 | DType::F16) => 5e-4,
            (dtype, _) => rounding(dtype).tolerance(),
        }
    }

    fn part(&self, row: &Tensor, part: Part) -> Result<Tensor> {
        let (d, values, hv) = (self.channels(), self.value_channels(), self.heads[1]);
        let (first, len) = match part {
            Part::X => (0, d),
            Part::Z => (d, values),
            Part::Beta => (d + values, hv),
            Part::Gate if self.is_kda => (d + values + hv, values),
            Part::Gate => (d + values + hv, hv),
        };
        Ok(row.narrow(2, first, len)?)
    }

    fn width(&self) -> usize {
        let gate = if self.is_kda {
            self.value_channels()
        } else {
            self.heads[1]
        };
        self.channels() + self.value_channels() + self.heads[1] + gate
    }

    fn longest(&self) -> usize {
        match self.packed {
            Some(lengths) => lengths.into_iter().max().unwrap_or(1),
            None => self.tokens,
        }
    }

    fn give(&self, seed: u64, device: &Device) -> Result<Given> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let mut random = |dims: &[usize], dtype: DType, low: f32, high: f32| -> Result<Tensor> {
            let len: usize = dims.iter().product();
            let values: Vec<f32> = (0..len).map(|_| rng.random_range(low..high)).collect();
            let tensor = Tensor::from_vec(values, dims, &Device::Cpu)?;
            Ok(tensor.to_dtype(dtype)?.to_device(device)?)
        };
        let [_, hv] = self.heads;
        let d = self.channels();
        let dims = match self.packed {
            // Two tokens belong to no row.
            Some(lengths) => [1, lengths.iter().sum::<usize>() + 2],
            None => [ROWS, self.tokens],
        };
        let row = random(&[dims[0], dims[1], self.width()], self.dtype, -1.0, 1.0)?;
        let last = random(&[ROWS, LAST, self.width()], self.dtype, -1.0, 1.0)?;
        let columns = match self.way {
            Way::PerToken => TAPS - 2 + self.tokens,
            _ => TAPS - 1,
        };
        let state_dims = [SLOTS, hv, K, K];
        // The state and the window of a fresh row are never read.
        let hole = |tensor: Tensor| -> Result<Tensor> {
            let nan = (Tensor::ones_like(&tensor.narrow(0, 7, 1)?)? * f64::NAN)?;
            let parts = [
                tensor.narrow(0, 0, 7)?,
                nan,
                tensor.narrow(0, 8, SLOTS - 8)?,
            ];
            Ok(Tensor::cat(&parts, 0)?)
        };
        let windows = hole(random(&[SLOTS, columns, d], self.dtype, -1.0, 1.0)?)?;
        let pool = hole(random(&state_dims, self.state, -0.3, 0.3)?)?;
        let mut cu_seqlens = vec![1];
        for length in self.packed.unwrap_or_default() {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + length as i64);
        }
        let dead = match self.index {
            DType::U32 => i64::from(NO_SLOT),
            _ => -1,
        };
        Ok(Given {
            weight: random(&[d, TAPS], self.dtype, -0.5, 0.5)?,
            bias: random(&[d], self.dtype, -0.2, 0.2)?,
            norm: random(&[K], self.dtype, 0.5, 1.5)?,
            a_log: random(&[hv], DType::F32, -2.0, 0.0)?,
            dt_bias: match self.is_kda {
                true => random(&[hv, K], DType::F32, -1.0, 0.0)?,
                false => random(&[hv], DType::F32, -1.0, 0.0)?,
            },
            row,
            last,
            pool,
            windows: windows.transpose(1, 2)?,
            slots: vec![4, dead, 7, 0],
            write_slots: vec![3, 6, 7, 5],
            // Two tokens: token slots are tested with T = 2.
            token_slots: vec![4, 3, dead, 6, 7, 8, 0, dead],
            accepted: vec![2, 1, 1, 1],
            keep: vec![2, 1, 3, 0],
            fresh: vec![0, 0, 1, 0],
            cu_seqlens,
            positions: vec![60, 0, 0, 64],
            checkpoints: vec![1, dead, dead, dead, 2, dead, 8, dead],
        })
    }

    fn indices(&self, values: &[i64], dims: &[usize], device: &Device) -> Result<Tensor> {
        let tensor = Tensor::from_slice(values, dims, &Device::Cpu)?;
        Ok(tensor.to_dtype(self.index)?.to_device(device)?)
    }

    /// Gates in candle's form.
    fn gates(&self, given: &Given, row: &Tensor) -> Result<Gates> {
        let (gate, beta) = (self.part(row, Part::Gate)?, self.part(row, Part::Beta)?);
        Ok(match self.is_kda {
            false => GdnGates::raw(&gate, &beta, &given.a_log, &given.dt_bias).into(),
            true => {
                let (b, t, _) = gate.dims3()?;
                let kind = KdaDecay::Softplus {
                    a_log: given.a_log.clone(),
                    dt_bias: Some(given.dt_bias.clone()),
                };
                let g = gate.reshape((b, t, self.heads[1], K))?;
                KdaGates::new(&g, kind, &beta, KdaBeta::Logit).into()
            }
        })
    }

    fn convolution(&self, given: &Given, row: &Tensor) -> Result<Convolution> {
        let x = self.part(row, Part::X)?;
        let mut conv = Convolution::new(&x, self.heads[0], &given.weight, &given.windows);
        conv.bias = Some(given.bias.clone());
        Ok(conv)
    }

    /// q, k and v, which are side by side in a convolution's x.
    fn qkv(&self, row: &Tensor) -> Result<[Tensor; 3]> {
        let keys = self.heads[0] * K;
        Ok([
            row.narrow(2, 0, keys)?,
            row.narrow(2, keys, keys)?,
            row.narrow(2, 2 * keys, self.value_channels())?,
        ])
    }

    fn states(&self, given: &Given) -> Result<States> {
        let indices =
            |values: &[i64], dims: &[usize]| self.indices(values, dims, given.row.device());
        let slots = indices(&given.slots, &[ROWS])?;
        Ok(match self.way {
            Way::Update | Way::Resume | Way::Commit => States::update(&given.pool, &slots),
            Way::Fork => {
                let to = indices(&given.write_slots, &[ROWS])?;
                States::update(&given.pool, &slots).write_slots(&to)
            }
            Way::Snapshots => States::read_only(&given.pool, &slots),
            Way::PerToken => {
                let slots = indices(&given.token_slots, &[ROWS, self.tokens])?;
                let accepted = indices(&given.accepted, &[ROWS])?;
                States::per_token(&given.pool, &slots, Some(&accepted))
            }
        })
    }

    /// The step, without snapshots and without previous tokens.
    fn step(&self, given: &Given) -> Result<Step> {
        let device = given.row.device();
        let indices = |values: &[i64], dims: &[usize]| self.indices(values, dims, device);
        let inputs = match self.whole {
            true => Inputs::Conv(self.convolution(given, &given.row)?),
            false => {
                let [q, k, v] = self.qkv(&given.row)?;
                Inputs::Qkv { q, k, v }
            }
        };
        let gates = self.gates(given, &given.row)?;
        let mut step = Step::new(inputs, gates, self.states(given)?)
            .options(self.options)
            .fresh(&indices(&given.fresh, &[ROWS])?);
        if self.whole {
            let z = self.part(&given.row, Part::Z)?;
            let norm = Norm::new(&z, &given.norm, 1e-6);
            step = step.norm(match self.is_kda {
                true => norm.activation(Activation::Sigmoid),
                false => norm,
            });
        }
        if self.packed.is_some() {
            let bounds = indices(&given.cu_seqlens, &[ROWS + 1])?;
            step = step.packed(&bounds, self.longest());
        }
        if self.checkpoints {
            step.positions = Some(indices(&given.positions, &[ROWS])?);
            let slots = indices(&given.checkpoints, &[ROWS, KEPT])?;
            step.checkpoints = Some((64, slots));
        }
        Ok(step)
    }

    /// Checks the case on every device ([`everywhere`]).
    fn check(&self, seed: u64) -> Result<()> {
        everywhere(|device, least| self.check_on(device, seed, least))
    }

    fn check_on(&self, device: &Device, seed: u64, least: f64) -> Result<()> {
        let given = self.give(seed, device)?;
        let wanted = self.wanted(&given)?;
        let keep = self.indices(&given.keep, &[ROWS], device)?;
        let (mut snapshots, mut window_snapshots) = (None, None);
        let mut o = None;
        if self.way == Way::Commit {
            let stored = match self.whole {
                true => Stored::Conv(self.convolution(&given, &given.last)?),
                false => {
                    let [_, k, v] = self.qkv(&given.last)?;
                    Stored::Kv { k, v }
                }
            };
            let gates = self.gates(&given, &given.last)?;
            let mut commit = Commit::new(stored, gates, &keep, self.states(&given)?);
            commit.fresh = Some(self.indices(&given.fresh, &[ROWS], device)?);
            commit.options = self.options;
            commit.run()?;
        } else {
            let mut step = self.step(&given)?;
            if self.way == Way::Snapshots {
                let dims = [ROWS, self.tokens, self.heads[1], K, K];
                let nan = |dims: &[usize], dtype| -> Result<Tensor> {
                    Ok((Tensor::ones(dims, dtype, device)? * f64::NAN)?)
                };
                snapshots = Some(nan(&dims, self.state)?);
                step.snapshots.clone_from(&snapshots);
                if let Inputs::Conv(conv) = &mut step.inputs {
                    let dims = [ROWS, self.tokens, self.channels(), TAPS - 1];
                    window_snapshots = Some(nan(&dims, self.dtype)?);
                    conv.window_snapshots.clone_from(&window_snapshots);
                }
            }
            if self.way == Way::Resume {
                let stored = match self.whole {
                    true => Stored::X(self.part(&given.last, Part::X)?),
                    false => {
                        let [_, k, v] = self.qkv(&given.last)?;
                        Stored::Kv { k, v }
                    }
                };
                let (gate, beta) = match self.gates(&given, &given.last)? {
                    Gates::Gdn(GdnGates::Raw { a, b, .. }) => (a, b),
                    Gates::Gdn(GdnGates::Given { g, beta }) => (g, beta),
                    Gates::Kda(KdaGates { g, beta, .. }) => (g, beta),
                };
                step.previous = Some(Previous {
                    stored,
                    gate,
                    beta,
                    keep,
                });
            }
            o = Some(step.run()?);
        }
        let close = |name: &str, got: &Tensor, wanted: &[f64], dtype| {
            let tolerance = rounding(dtype).tolerance().max(least);
            within(
                &format!("{self:?}: {name}"),
                &doubles(got)?,
                wanted,
                tolerance,
            )
        };
        if let Some(o) = o {
            within(
                &format!("{self:?}: o"),
                &doubles(&o)?,
                &wanted.o,
                self.of_outputs().max(least),
            )?;
        }
        close("states", &given.pool, &wanted.states, self.state)?;
        if let Some(windows) = wanted.windows {
            let got = doubles(&given.windows)?;
            let same = got
                .iter()
                .zip(&windows)
                .all(|(a, b)| a == b || a.is_nan() && b.is_nan());
            ensure!(
                same && got.len() == windows.len(),
                "{self:?}: windows are copies of inputs"
            );
        }
        for (got, wanted) in [
            (snapshots, wanted.snapshots),
            (window_snapshots, wanted.window_snapshots),
        ] {
            if let (Some(got), Some(wanted)) = (got, wanted) {
                close("snapshots", &got, &wanted, self.state)?;
            }
        }
        Ok(())
    }

    /// Results of the reference.
    fn wanted(&self, given: &Given) -> Result<gated_delta_reference::layer::LayerOutput> {
        let is_commit = self.way == Way::Commit;
        let (row, last) = (&given.row, &given.last);
        let (x, z, gate, beta) = (
            doubles(&self.part(row, Part::X)?)?,
            doubles(&self.part(row, Part::Z)?)?,
            doubles(&self.part(row, Part::Gate)?)?,
            doubles(&self.part(row, Part::Beta)?)?,
        );
        let (last_x, last_gate, last_beta) = (
            doubles(&self.part(last, Part::X)?)?,
            doubles(&self.part(last, Part::Gate)?)?,
            doubles(&self.part(last, Part::Beta)?)?,
        );
        let (a_log, dt_bias) = (doubles(&given.a_log)?, doubles(&given.dt_bias)?);
        let gates = |gate, beta| match self.is_kda {
            false => TokenGates::Gdn(gdn::Gates::Raw {
                a: gate,
                b: beta,
                a_log: &a_log,
                dt_bias: &dt_bias,
                beta_scale: 1.0,
            }),
            true => TokenGates::Kda(kda::KdaGates {
                g: gate,
                kind: kda::KdaDecay::Softplus {
                    a_log: &a_log,
                    dt_bias: Some(&dt_bias),
                },
                beta,
                beta_kind: kda::KdaBeta::Logit,
            }),
        };
        let of = |row: &Tensor| -> Result<[Vec<f64>; 3]> {
            let [q, k, v] = self.qkv(row)?;
            Ok([doubles(&q)?, doubles(&k)?, doubles(&v)?])
        };
        let ([q, k, v], [_, last_k, last_v]) = (of(row)?, of(last)?);
        let empty = Vec::new();
        let unless_whole = |values| if self.whole { &empty } else { values };
        let of_new = |values| {
            if is_commit {
                &empty
            } else {
                unless_whole(values)
            }
        };
        let tokens = if is_commit { 0 } else { self.longest() };
        let new_gates = if is_commit {
            gates(&empty, &empty)
        } else {
            gates(&gate, &beta)
        };
        let has_previous = matches!(self.way, Way::Resume | Way::Commit);
        let previous = recurrent::Previous {
            tokens: LAST,
            k: unless_whole(&last_k),
            v: unless_whole(&last_v),
            gates: gates(&last_gate, &last_beta),
            keep: &given.keep,
        };
        let per_token = self.way == Way::PerToken;
        // Inputs are rounded already; states are rounded to their dtype.
        let round_state = match self.state {
            DType::BF16 => |s| tolerance::DType::Bf16.round_state(s),
            DType::F16 => |s| tolerance::DType::F16.round_state(s),
            _ => |s| tolerance::DType::F32.round_state(s),
        };
        let step = Recurrent {
            q: of_new(&q),
            k: of_new(&k),
            v: of_new(&v),
            head_map: match self.options.head_map {
                HeadMap::Grouped => recurrent::HeadMap::Grouped,
                HeadMap::Tiled => recurrent::HeadMap::Tiled,
            },
            layout: match self.options.state_layout {
                StateLayout::KLast => Layout::KLast,
                StateLayout::VLast => Layout::VLast,
            },
            scale: self
                .options
                .scale
                .map_or(recurrence::default_scale(K), f64::from),
            read_slots: (!per_token).then_some(&given.slots[..]),
            write_slots: (self.way == Way::Fork).then_some(&given.write_slots[..]),
            token_slots: per_token.then_some(&given.token_slots[..]),
            accepted: per_token.then_some(&given.accepted[..]),
            cu_seqlens: self.packed.map(|_| &given.cu_seqlens[..]),
            update_state: self.way != Way::Snapshots,
            snapshot_steps: (self.way == Way::Snapshots).then_some(self.tokens),
            previous: has_previous.then_some(previous),
            round_state,
            ..Recurrent::new([ROWS, tokens], self.heads, [K, K], new_gates)
        };
        let (weight, bias, norm) = (
            doubles(&given.weight)?,
            doubles(&given.bias)?,
            doubles(&given.norm)?,
        );
        let problem = Layer {
            step,
            projection: self.whole.then_some(Projection {
                x: if is_commit { &empty } else { &x },
                previous: has_previous.then_some(&last_x[..]),
                conv: Conv {
                    channels: self.channels(),
                    width: TAPS,
                    weight: &weight,
                    bias: Some(&bias),
                    activation: Act::Silu,
                },
            }),
            norm: (self.whole && !is_commit).then_some(GatedNorm {
                z: &z,
                weight: &norm,
                eps: 1e-6,
                activation: if self.is_kda { Act::Sigmoid } else { Act::Silu },
            }),
            fresh: Some(&given.fresh),
            checkpoints: self.checkpoints.then_some(Checkpoints {
                every: 64,
                slots: &given.checkpoints,
                positions: Some(&given.positions),
            }),
        };
        let (states, windows) = (doubles(&given.pool)?, doubles(&given.windows)?);
        let nan = |len: usize| vec![f64::NAN; len];
        let snapshots = nan(ROWS * self.tokens * self.heads[1] * K * K);
        let window_snapshots = nan(ROWS * self.tokens * self.channels() * (TAPS - 1));
        let has_snapshots = self.way == Way::Snapshots;
        let pools = Pools {
            states: &states,
            windows: self.whole.then_some(&windows[..]),
            snapshots: has_snapshots.then_some(&snapshots[..]),
            window_snapshots: (has_snapshots && self.whole).then_some(&window_snapshots[..]),
            ..Pools::default()
        };
        Ok(layer(&problem, &pools)?)
    }
}

/// Calls `check` with the CPU, also in the simulator if there is one, and with the GPU if there is one. Its second argument is the least
/// tolerance, for the f16 products of the kernels' chunks and drafts.
fn everywhere(check: impl Fn(&Device, f64) -> Result<()>) -> Result<()> {
    #[cfg(feature = "simulator")]
    candle_gated_delta::on_simulator(|| check(&Device::Cpu, 5e-3))?;
    if let Some(gpu) = gpu()? {
        check(&gpu, 5e-3)?;
    }
    check(&Device::Cpu, 0.0)
}

/// Compares whole tensors of f32, within its rounding error, or `least`.
fn close(name: &str, got: &[f64], wanted: &[f64], least: f64) -> Result<()> {
    let tolerance = rounding(DType::F32).tolerance().max(least);
    within(name, got, wanted, tolerance)
}

/// Compares whole tensors: NaN has to meet NaN, and the rest has to be within `tolerance`.
fn within(name: &str, got: &[f64], wanted: &[f64], tolerance: f64) -> Result<()> {
    ensure!(
        got.len() == wanted.len(),
        "{name}: wanted {} elements, got {}",
        wanted.len(),
        got.len()
    );
    let pairs = || got.iter().copied().zip(wanted.iter().copied());
    let odd = pairs().position(|(got, wanted)| got.is_nan() != wanted.is_nan());
    ensure!(odd.is_none(), "{name}: NaN on one side at {odd:?}");
    let error = relative_error_of(pairs().filter(|(got, _)| !got.is_nan()));
    ensure!(
        error <= tolerance,
        "{name}: {error:.1e} off, wanted at most {tolerance:.1e}"
    );
    Ok(())
}

/// Checks both operators, with and without the layer around them.
fn all(case: Case) -> Result<()> {
    for (seed, (is_kda, whole)) in [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .enumerate()
    {
        Case {
            is_kda,
            whole,
            ..case
        }
        .check(seed as u64)?;
    }
    Ok(())
}

#[test]
fn a_decode_updates_slots_by_u32_i64_and_i32() -> Result<()> {
    for index in [DType::U32, DType::I64, DType::I32] {
        all(Case {
            index,
            ..Case::default()
        })?;
    }
    Ok(())
}

#[test]
fn activations_and_states_may_be_bf16_and_f16() -> Result<()> {
    for (dtype, state) in [
        (DType::BF16, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
    ] {
        all(Case {
            dtype,
            state,
            ..Case::default()
        })?;
    }
    Ok(())
}

#[test]
fn layouts_and_head_maps() -> Result<()> {
    let options = Options::default().state_layout(StateLayout::VLast);
    all(Case {
        options,
        tokens: 2,
        ..Case::default()
    })?;
    let options = Options::default().head_map(HeadMap::Tiled).scale(0.5);
    all(Case {
        options,
        ..Case::default()
    })
}

#[test]
fn rows_fork() -> Result<()> {
    all(Case {
        way: Way::Fork,
        tokens: 3,
        ..Case::default()
    })
}

#[test]
fn ragged_rows_have_their_own_lengths() -> Result<()> {
    let packed = Some([3, 2, 5, 0]);
    all(Case {
        packed,
        way: Way::Fork,
        ..Case::default()
    })
}

#[test]
fn checkpoints_of_a_prompt_are_kept() -> Result<()> {
    // KDA has a prefill with K = 128 only.
    let packed = Some([70, 3, 130, 1]);
    for whole in [false, true] {
        Case {
            packed,
            whole,
            checkpoints: true,
            ..Case::default()
        }
        .check(5)?;
    }
    Ok(())
}

#[test]
fn states_and_windows_after_every_token() -> Result<()> {
    all(Case {
        way: Way::Snapshots,
        tokens: 3,
        ..Case::default()
    })?;
    all(Case {
        way: Way::PerToken,
        tokens: 2,
        ..Case::default()
    })
}

#[test]
fn a_resume_commits_what_was_kept() -> Result<()> {
    for state in [DType::F32, DType::BF16] {
        all(Case {
            way: Way::Resume,
            tokens: 3,
            state,
            ..Case::default()
        })?;
        all(Case {
            way: Way::Commit,
            state,
            ..Case::default()
        })?;
    }
    Ok(())
}

/// Rings of a launch with deferred write-back.
struct Ring {
    pending: Pending,
    len: Vec<i64>,
    base: Vec<i64>,
}

/// A launch with deferred write-back: a step of `tokens` tokens, or a flush with 0.
#[derive(Clone, Copy, Debug)]
struct Waits {
    case: Case,
    most: usize,
    entries: usize,
}

impl Waits {
    fn rings(&self, seed: u64, device: &Device) -> Result<Ring> {
        let rng = &mut StdRng::seed_from_u64(seed + 100);
        let case = &self.case;
        let [h, hv] = case.heads;
        let r = self.entries;
        let mut random = |dims: &[usize], low: f32, high: f32, dtype: DType| -> Result<Tensor> {
            let len: usize = dims.iter().product();
            let values: Vec<f32> = (0..len).map(|_| rng.random_range(low..high)).collect();
            let tensor = Tensor::from_vec(values, dims, &Device::Cpu)?;
            Ok(tensor.to_dtype(dtype)?.to_device(device)?)
        };
        let decays: &[usize] = match case.is_kda {
            true => &[SLOTS, hv, r, K],
            false => &[SLOTS, hv, r],
        };
        let len = vec![3, 1, 5, self.most as i64];
        let base = vec![r as i64 - 2, 0, 3, 1];
        let indices = |values: &[i64]| case.indices(values, &[ROWS], device);
        let key_dtype = if case.whole { DType::F32 } else { case.dtype };
        let inputs = random(&[SLOTS, r, case.channels()], -1.0, 1.0, case.dtype)?;
        Ok(Ring {
            pending: Pending {
                keys: random(&[SLOTS, h, r, K], -1.0, 1.0, key_dtype)?,
                updates: random(&[SLOTS, hv, r, K], -0.1, 0.1, DType::F32)?,
                decays: random(decays, -0.3, 0.0, DType::F32)?,
                len: indices(&len)?,
                base: indices(&base)?,
                // Deferred windows go with drafts.
                inputs: (case.whole && self.most > 8).then_some(inputs),
                most: self.most,
            },
            len,
            base,
        })
    }

    /// Checks the case on every device ([`everywhere`]).
    fn check(&self, seed: u64) -> Result<()> {
        everywhere(|device, least| self.check_on(device, seed, least))
    }

    fn check_on(&self, device: &Device, seed: u64, least: f64) -> Result<()> {
        let case = &self.case;
        let (given, ring) = (case.give(seed, device)?, self.rings(seed, device)?);
        let is_flush = case.tokens == 0;
        let of_rings = |pending: &Pending| -> Result<Rings> {
            Ok(Rings {
                keys: doubles(&pending.keys)?,
                updates: doubles(&pending.updates)?,
                decays: doubles(&pending.decays)?,
                inputs: pending.inputs.as_ref().map(doubles).transpose()?,
            })
        };

        // The reference's inputs.
        let parts = [Part::X, Part::Z, Part::Gate, Part::Beta];
        let [x, z, gate, beta] = parts.map(|part| doubles(&case.part(&given.row, part)?));
        let (x, z, gate, beta) = (x?, z?, gate?, beta?);
        let (a_log, dt_bias) = (doubles(&given.a_log)?, doubles(&given.dt_bias)?);
        let gates = match case.is_kda {
            false => TokenGates::Gdn(gdn::Gates::Raw {
                a: &gate,
                b: &beta,
                a_log: &a_log,
                dt_bias: &dt_bias,
                beta_scale: 1.0,
            }),
            true => TokenGates::Kda(kda::KdaGates {
                g: &gate,
                kind: kda::KdaDecay::Softplus {
                    a_log: &a_log,
                    dt_bias: Some(&dt_bias),
                },
                beta: &beta,
                beta_kind: kda::KdaBeta::Logit,
            }),
        };
        let [q, k, v] = case.qkv(&given.row)?.map(|tensor| doubles(&tensor));
        let (q, k, v) = (q?, k?, v?);
        let empty = Vec::new();
        let unless_whole = |values| if case.whole { &empty } else { values };
        let round_state = match case.state {
            DType::BF16 => |s| tolerance::DType::Bf16.round_state(s),
            _ => |s| tolerance::DType::F32.round_state(s),
        };
        let step = Recurrent {
            q: unless_whole(&q),
            k: unless_whole(&k),
            v: unless_whole(&v),
            read_slots: Some(&given.slots),
            round_state,
            ..Recurrent::new([ROWS, case.tokens], case.heads, [K, K], gates)
        };
        let (weight, bias, norm) = (
            doubles(&given.weight)?,
            doubles(&given.bias)?,
            doubles(&given.norm)?,
        );
        let problem = Deferred {
            layer: Layer {
                step,
                projection: (case.whole && !is_flush).then_some(Projection {
                    x: &x,
                    previous: None,
                    conv: Conv {
                        channels: case.channels(),
                        width: TAPS,
                        weight: &weight,
                        bias: Some(&bias),
                        activation: Act::Silu,
                    },
                }),
                norm: (case.whole && !is_flush).then_some(GatedNorm {
                    z: &z,
                    weight: &norm,
                    eps: 1e-6,
                    activation: Act::Silu,
                }),
                fresh: (!is_flush).then_some(&given.fresh),
                checkpoints: None,
            },
            most: self.most,
            entries: self.entries,
            len: &ring.len,
            base: &ring.base,
        };
        let (pool, windows) = (doubles(&given.pool)?, doubles(&given.windows)?);
        let pools = Pools {
            states: &pool,
            windows: case.whole.then_some(&windows[..]),
            ..Pools::default()
        };
        let wanted = deferred(&problem, &pools, &of_rings(&ring.pending)?)?;

        let name = format!("{self:?}");
        let close = |name: &str, got: &[f64], wanted: &[f64], dtype| {
            within(name, got, wanted, rounding(dtype).tolerance().max(least))
        };
        if is_flush {
            let mut flush = Flush::new(case.states(&given)?, ring.pending.clone());
            flush.options = case.options;
            flush.windows = case.whole.then(|| given.windows.clone());
            flush.run()?;
        } else {
            let mut step = case.step(&given)?;
            step.pending = Some(ring.pending.clone());
            within(
                &format!("{name}: o"),
                &doubles(&step.run()?)?,
                &wanted.o,
                case.of_outputs().max(least),
            )?;
        }
        close(
            &format!("{name}: states"),
            &doubles(&given.pool)?,
            &wanted.pool,
            case.state,
        )?;
        if let Some(windows) = &wanted.windows {
            close(
                &format!("{name}: windows"),
                &doubles(&given.windows)?,
                windows,
                DType::F32,
            )?;
        }
        let (got, wanted) = (of_rings(&ring.pending)?, &wanted.rings);
        close(
            &format!("{name}: keys"),
            &got.keys,
            &wanted.keys,
            DType::F32,
        )?;
        close(
            &format!("{name}: updates"),
            &got.updates,
            &wanted.updates,
            case.state,
        )?;
        close(
            &format!("{name}: decays"),
            &got.decays,
            &wanted.decays,
            DType::F32,
        )?;
        if let (Some(got), Some(wanted)) = (&got.inputs, &wanted.inputs) {
            close(&format!("{name}: inputs"), got, wanted, DType::F32)?;
        }
        Ok(())
    }
}

#[test]
fn states_wait_and_are_flushed() -> Result<()> {
    for (seed, is_kda) in [false, true].into_iter().enumerate() {
        let seed = seed as u64;
        for tokens in [1, 0] {
            let case = Case {
                is_kda,
                tokens,
                ..Case::default()
            };
            Waits {
                case,
                most: 8,
                entries: 9,
            }
            .check(seed)?;
            if is_kda {
                // KDA has drafts with K = 128 only.
                continue;
            }
            // Drafts need bf16 states. A flush has no limit of its own on pending tokens: that many in a ring show that drafts may come.
            let case = Case {
                whole: true,
                tokens: 3 * tokens,
                state: DType::BF16,
                ..case
            };
            Waits {
                case,
                most: 12,
                entries: 16,
            }
            .check(seed)?;
        }
    }
    Ok(())
}

#[test]
fn what_is_wrong_is_named() -> Result<()> {
    for device in [Some(Device::Cpu), gpu()?].into_iter().flatten() {
        let device = &device;
        let q = Tensor::zeros((2, 1, 2, K), DType::F32, device)?;
        let v = Tensor::zeros((2, 1, 4, K), DType::F32, device)?;
        let a = Tensor::zeros((2, 1, 4), DType::F32, device)?;
        let rate = Tensor::zeros(4, DType::F32, device)?;
        let pool = Tensor::zeros((3, 4, K, K), DType::F32, device)?;
        let slots = Tensor::new(&[0u32, 1], device)?;
        let gates = GdnGates::raw(&a, &a, &rate, &rate);
        let run = |q: &Tensor, v: &Tensor, pool: &Tensor, slots: &Tensor, options| {
            let states = States::update(pool, slots);
            let result = candle_gated_delta::gdn(q, q, v, &gates, &states, options);
            result.map(drop).map_err(|error| error.to_string())
        };
        let options = Options::default();
        assert_eq!(run(&q, &v, &pool, &slots, options), Ok(()));
        let says = |result: std::result::Result<(), String>, texts: &[&str]| {
            let error = result.expect_err("an error");
            for text in texts {
                assert!(error.contains(text), "wanted {text} in: {error}");
            }
        };
        // Heads before tokens, states of another K, an unsupported dtype, slots of floats.
        says(
            run(&q.transpose(1, 2)?, &v, &pool, &slots, options),
            &["v", "[2, 2, 4, 64]", "[2, 1, 4, 64]"],
        );
        says(
            run(&q, &v, &pool.narrow(3, 0, 32)?, &slots, options),
            &["32"],
        );
        says(
            run(&q.to_dtype(DType::F64)?, &v, &pool, &slots, options),
            &["q", "f64"],
        );
        says(
            run(&q, &v, &pool, &a.flatten_all()?.narrow(0, 0, 2)?, options),
            &["read_slots", "f32"],
        );
        says(
            run(&q, &v, &pool, &slots, options.scale(f32::NAN)),
            &["scale", "NaN"],
        );
        if !device.is_cpu() {
            continue;
        }
        // Two rows on the same slot, and a row that reads a slot which another one writes.
        let same = Tensor::new(&[1u32, 1], device)?;
        says(
            run(&q, &v, &pool, &same, options),
            &["rows 0 and 1", "slot 1"],
        );
        let states = States::update(&pool, &slots).write_slots(&Tensor::new(&[1u32, 2], device)?);
        let error = candle_gated_delta::gdn(&q, &q, &v, &gates, &states, options);
        says(
            error.map(drop).map_err(|error| error.to_string()),
            &["row 1 reads slot 1"],
        );
        // A written tensor shares its storage with no other.
        let both = Tensor::zeros((2, 3, 4, K, K), DType::F32, device)?;
        let (one, other) = (both.get(0)?, both.get(1)?);
        let states = States::update(&one, &slots).write_pool(&other);
        let error = candle_gated_delta::gdn(&q, &q, &v, &gates, &states, options);
        says(
            error.map(drop).map_err(|error| error.to_string()),
            &["pool", "write_pool", "storage"],
        );
    }
    Ok(())
}

#[test]
fn rows_one_behind_the_other_are_rows_by_themselves() -> Result<()> {
    everywhere(rows_one_behind_the_other)
}

fn rows_one_behind_the_other(device: &Device, least: f64) -> Result<()> {
    let lengths = [3, 1, 2];
    for is_kda in [false, true] {
        let case = Case {
            is_kda,
            packed: Some([3, 1, 2, 0]),
            ..Case::default()
        };
        let given = case.give(3, device)?;
        let row = given.row.narrow(1, 0, 6)?;
        let [q, k, v] = case.qkv(&row)?.map(|tensor| tensor.squeeze(0));
        let (q, k, v) = (q?, k?, v?);
        let of = |start: usize, len: usize| case.gates(&given, &row.narrow(1, start, len)?);
        let options = case.options;
        let pool = given.pool.copy()?;
        let slots = Tensor::new(&[4u32, 2, 0], device)?;
        let cu_seqlens = Tensor::new(&[0u32, 3, 4, 6], device)?;
        let states = States::update(&pool, &slots);
        let together = match of(0, 6)? {
            Gates::Gdn(GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            }) => {
                let gates = GdnGates::raw(&a.squeeze(0)?, &b.squeeze(0)?, &a_log, &dt_bias);
                gdn_varlen(&q, &k, &v, &gates, &states, &cu_seqlens, 3, options)?
            }
            Gates::Kda(gates) => {
                let (g, beta) = (gates.g.squeeze(0)?, gates.beta.squeeze(0)?);
                let gates = KdaGates { g, beta, ..gates };
                kda_varlen(&q, &k, &v, &gates, &states, &cu_seqlens, 3, options)?
            }
            Gates::Gdn(GdnGates::Given { .. }) => unreachable!("raw gates"),
        };
        let mut first = 0;
        for (i, length) in lengths.into_iter().enumerate() {
            let part = |tensor: &Tensor| tensor.narrow(0, first, length)?.unsqueeze(0);
            let states = States::update(&given.pool, &slots.narrow(0, i, 1)?);
            let (q, k, v) = (part(&q)?, part(&k)?, part(&v)?);
            let alone = match of(first, length)? {
                Gates::Gdn(gates) => candle_gdn(&q, &k, &v, &gates, &states, options)?,
                Gates::Kda(gates) => candle_kda(&q, &k, &v, &gates, &states, options)?,
            };
            let got = doubles(&part(&together)?)?;
            close("o", &got, &doubles(&alone)?, least)?;
            first += length;
        }
        close("states", &doubles(&pool)?, &doubles(&given.pool)?, least)?;
    }
    Ok(())
}

#[test]
fn keys_of_96_and_values_of_192() -> Result<()> {
    everywhere(keys_of_96)
}

fn keys_of_96(device: &Device, least: f64) -> Result<()> {
    let (h, k, v) = (2, 96, 192);
    let random = |dims: &[usize], scale| Tensor::randn(0f32, scale, dims, device);
    let [query, key] = [random(&[2, 1, h, k], 1.)?, random(&[2, 1, h, k], 1.)?];
    let (value, pool) = (random(&[2, 1, h, v], 1.)?, random(&[3, h, v, k], 0.3)?);
    let [a, b] = [random(&[2, 1, h], 1.)?, random(&[2, 1, h], 1.)?];
    let [a_log, dt_bias] = [random(&[h], 0.5)?, random(&[h], 0.5)?];
    let parameters = [&a, &b, &a_log, &dt_bias].map(doubles);
    let [of_a, of_b, of_a_log, of_dt_bias] = parameters;
    let (of_a, of_b, of_a_log, of_dt_bias) = (of_a?, of_b?, of_a_log?, of_dt_bias?);
    // OLMo-Hybrid has betas up to 2.
    let gates = TokenGates::Gdn(gdn::Gates::Raw {
        a: &of_a,
        b: &of_b,
        a_log: &of_a_log,
        dt_bias: &of_dt_bias,
        beta_scale: 2.0,
    });
    let (of_q, of_k, of_v) = (doubles(&query)?, doubles(&key)?, doubles(&value)?);
    let slots = [2, 0];
    let problem = Recurrent {
        q: &of_q,
        k: &of_k,
        v: &of_v,
        read_slots: Some(&slots),
        ..Recurrent::new([2, 1], [h, h], [k, v], gates)
    };
    let wanted = recurrent::recurrent(&problem, &doubles(&pool)?, None, None)?;
    let states = States::update(&pool, &Tensor::new(&slots, device)?);
    let gates = GdnGates::raw(&a, &b, &a_log, &dt_bias).beta_scale(BetaScale::Two);
    let o = candle_gdn(&query, &key, &value, &gates, &states, Options::default())?;
    close("o", &doubles(&o)?, &wanted.o, least)?;
    close("states", &doubles(&pool)?, &wanted.pool, least)
}

#[test]
fn keeping_nothing_leaves_pools_as_they_are() -> Result<()> {
    everywhere(keeping_nothing)
}

fn keeping_nothing(device: &Device, _: f64) -> Result<()> {
    let case = Case::default();
    let given = case.give(1, device)?;
    let before = doubles(&given.pool)?;
    let [q, k, v] = case.qkv(&given.row)?;
    let keep = Keep::None {
        slots: Some(case.indices(&given.slots, &[ROWS], device)?),
    };
    let states = States::new(&given.pool, keep);
    let step = Step::new(
        Inputs::Qkv { q, k, v },
        case.gates(&given, &given.row)?,
        states,
    );
    let options = Options::default().formulation(Formulation::Recurrent);
    step.options(options).run()?;
    close("pool", &doubles(&given.pool)?, &before, 0.0)
}

/// Captures launches on a stream of their own and on the thread's default stream, and compares replays with launches.
#[cfg(feature = "cuda")]
fn replay(case: Case) -> Result<()> {
    use candle_core::cuda_backend::cudarc::driver::sys::{
        CUgraphInstantiate_flags, CUstreamCaptureMode,
    };
    if gpu()?.is_none() {
        return Ok(());
    }
    let own = Device::new_cuda_with_stream(0)?;
    // SAFETY: all work of the device is on its one stream.
    unsafe { own.as_cuda_device()?.disable_event_tracking() };
    for (device, has_workspace) in [(own, false), (Device::new_cuda(0)?, true)] {
        let stream = device.as_cuda_device()?.cuda_stream();
        let (launched, replayed) = (case.give(7, &device)?, case.give(7, &device)?);
        let step = case.step(&launched)?;
        let wanted = step.run()?;
        for _ in 0..2 {
            step.run_into(&wanted)?;
        }
        let mut step = case.step(&replayed)?;
        let o = wanted.zeros_like()?;
        let elements = step.workspace_elements()?;
        if has_workspace && elements > 0 {
            step.workspace = Some(Tensor::zeros(elements, DType::F32, &device)?);
        }
        step.prewarm()?;
        device.synchronize()?;
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let captured = step.run_into(&o);
        let graph = stream.end_capture(CUgraphInstantiate_flags(0));
        captured?;
        let graph = graph?.ok_or_else(|| anyhow::anyhow!("nothing was captured"))?;
        let untouched = doubles(&replayed.pool)?;
        let before = case.give(7, &Device::Cpu)?;
        within("a capture", &untouched, &doubles(&before.pool)?, 0.0)?;
        for _ in 0..3 {
            graph.launch()?;
        }
        for (name, got, wanted) in [
            ("o", &o, &wanted),
            ("states", &replayed.pool, &launched.pool),
            ("windows", &replayed.windows, &launched.windows),
        ] {
            let name = format!("{case:?}: {name} of replays");
            within(&name, &doubles(got)?, &doubles(wanted)?, 0.0)?;
        }
    }
    Ok(())
}

#[cfg(feature = "cuda")]
#[test]
fn captured_decodes_are_replayed() -> Result<()> {
    for is_kda in [false, true] {
        replay(Case {
            is_kda,
            whole: true,
            tokens: 3,
            dtype: DType::BF16,
            ..Case::default()
        })?;
    }
    Ok(())
}

/// The workspace is allocated in the graph, or before.
#[cfg(feature = "cuda")]
#[test]
fn captured_prompts_are_replayed() -> Result<()> {
    replay(Case {
        whole: true,
        packed: Some([70, 3, 130, 1]),
        ..Case::default()
    })
}

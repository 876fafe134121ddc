//! Compares the results of a launch in the first and the last row with the reference.

use anyhow::{Context as _, Result, ensure};
use gated_delta::{DType, Entry, Library, StreamRef};
use gated_delta_harness::arguments::{DecayKind, Operator};
use gated_delta_reference::conv::Conv;
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::kda::{KdaBeta, KdaDecay, KdaGates};
use gated_delta_reference::layer::{Layer, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Previous, Recurrent, TokenGates, recurrent};
use gated_delta_reference::tolerance::{DType as Stored, relative_error};
use half::{bf16, f16};

use crate::buffers::Buffers;
use crate::cell::{Cell, Mode};
use crate::inputs::{Around, DISTINCT_SLOTS, EPS, Inputs, TAPS, Tokens};
use crate::slab::Slab;

/// Exact results of the rows that are checked.
pub struct Truth {
    rows: Vec<usize>,
    /// Outputs, `[rows, T, HV, V]`
    o: Vec<f64>,
    /// States of the rows' slots: T states of a row with token slots, else one.
    pool: Vec<f64>,
    /// Snapshots, `[rows, T, HV, V, K]`
    snapshots: Vec<f64>,
    /// Windows, `[rows, D, W − 1]`
    windows: Vec<f64>,
    /// Window snapshots, `[rows, T, D, W − 1]`
    window_snapshots: Vec<f64>,
}

/// Values of some rows' tokens, as f64.
struct Wide {
    k: Vec<f64>,
    v: Vec<f64>,
    gate: Vec<f64>,
    beta: Vec<f64>,
}

impl Wide {
    fn of(tokens: &Tokens, rows: &[usize], batch: usize) -> Self {
        Self {
            k: wide(&tokens.k, rows, batch),
            v: wide(&tokens.v, rows, batch),
            gate: wide(&tokens.gate, rows, batch),
            beta: wide(&tokens.beta, rows, batch),
        }
    }

    fn gates<'a>(&'a self, cell: &Cell, a_log: &'a [f64], dt_bias: &'a [f64]) -> TokenGates<'a> {
        if cell.op.operator() == Operator::Gdn {
            return TokenGates::Gdn(Gates::Raw {
                a: &self.gate,
                b: &self.beta,
                a_log,
                dt_bias,
                beta_scale: cell.model.beta.factor().into(),
            });
        }
        TokenGates::Kda(KdaGates {
            g: &self.gate,
            kind: match cell.gate {
                DecayKind::Log => KdaDecay::Log,
                DecayKind::Softplus => KdaDecay::Softplus {
                    a_log,
                    dt_bias: Some(dt_bias),
                },
                DecayKind::LowerBound(lower_bound) => KdaDecay::LowerBound {
                    lower_bound: lower_bound.into(),
                    a_log: Some(a_log),
                    dt_bias: Some(dt_bias),
                },
            },
            beta: &self.beta,
            beta_kind: KdaBeta::Given,
        })
    }
}

/// Computes the exact results of the first and the last row of a cell, after a launch on new buffers.
pub fn truth(cell: &Cell, inputs: &Inputs) -> Result<Truth> {
    Given { cell, inputs }.truth()
}

/// Cell and inputs of a launch.
struct Given<'a> {
    cell: &'a Cell,
    inputs: &'a Inputs,
}

impl Given<'_> {
    fn truth(&self) -> Result<Truth> {
        let Cell {
            mode,
            model,
            dim,
            batch,
            tokens,
            state,
            ..
        } = *self.cell;
        let inputs = self.inputs;
        let mut rows = vec![0, batch - 1];
        rows.dedup();
        let new = Wide::of(&inputs.tokens, &rows, batch);
        let old = inputs
            .previous
            .as_ref()
            .map(|previous| Wide::of(previous, &rows, batch));
        let [a_log, dt_bias] = [&inputs.a_log, &inputs.dt_bias].map(|values| f64s(values));
        let indices = |values: &[i32]| -> Vec<i64> {
            rows.iter().map(|&row| i64::from(values[row])).collect()
        };
        let (keep, accepted) = (indices(&inputs.keep), indices(&inputs.accepted));
        let commit = mode == Mode::Commit;
        let previous = if commit { Some(&new) } else { old.as_ref() };
        let previous = previous.map(|wide| Previous {
            tokens,
            k: &wide.k,
            v: &wide.v,
            gates: wide.gates(self.cell, &a_log, &dt_bias),
            keep: &keep,
        });
        let slots = self.slots_of(&rows);
        let row_elements = model.value_heads * dim * self.cell.value_dim();
        let start: Vec<f64> = slots
            .iter()
            .flat_map(|&slot| {
                f64s(&inputs.states[slot % DISTINCT_SLOTS * row_elements..][..row_elements])
            })
            .collect();
        let local: Vec<i64> = (0..slots.len() as i64).collect();
        let snapshots = vec![f64::NAN; rows.len() * tokens * row_elements];
        let empty = Wide {
            k: Vec::new(),
            v: Vec::new(),
            gate: Vec::new(),
            beta: Vec::new(),
        };
        let (q, new) = if commit {
            (Vec::new(), &empty)
        } else {
            (wide(&inputs.q, &rows, batch), &new)
        };
        let token_slots = mode == Mode::TokenSlots;
        let has_snapshots = mode == Mode::Snapshots;
        let problem = Recurrent {
            q: &q,
            k: &new.k,
            v: &new.v,
            layout: self.cell.layout.into(),
            token_slots: token_slots.then_some(&local[..]),
            accepted: token_slots.then_some(&accepted[..]),
            update_state: mode.updates(),
            snapshot_steps: has_snapshots.then_some(tokens),
            previous,
            round_state: match state {
                DType::Bf16 => |x| Stored::Bf16.round_state(x),
                DType::F16 => |x| Stored::F16.round_state(x),
                _ => |x| f64::from(x as f32),
            },
            ..Recurrent::new(
                [rows.len(), if commit { 0 } else { tokens }],
                [model.heads, model.value_heads],
                [dim, self.cell.value_dim()],
                new.gates(self.cell, &a_log, &dt_bias),
            )
        };
        if let Some(around) = &inputs.around {
            let snapshots = has_snapshots.then_some(&snapshots[..]);
            return self.layer_truth(rows, &problem, around, (&start, snapshots));
        }
        let output = recurrent(
            &problem,
            &start,
            None,
            has_snapshots.then_some(&snapshots[..]),
        )?;
        Ok(Truth {
            rows,
            o: output.o,
            pool: output.pool,
            snapshots: output.snapshots.unwrap_or_default(),
            windows: Vec::new(),
            window_snapshots: Vec::new(),
        })
    }

    /// Exact results of a layer step.
    fn layer_truth(
        &self,
        rows: Vec<usize>,
        step: &Recurrent<'_>,
        around: &Around,
        (start, snapshots): (&[f64], Option<&[f64]>),
    ) -> Result<Truth> {
        let cell = self.cell;
        let (batch, channels) = (cell.batch, cell.channels());
        let projection = wide(&around.projection, &rows, batch);
        let token = projection.len() / rows.len() / cell.tokens;
        let (mut x, mut z) = (Vec::new(), Vec::new());
        for projection in projection.chunks(token) {
            let (of_x, of_z) = projection.split_at(channels);
            x.extend(of_x);
            z.extend(of_z);
        }
        let before = channels * (TAPS - 1);
        let windows: Vec<f64> = self
            .slots_of(&rows)
            .iter()
            .flat_map(|slot| &around.windows[slot % DISTINCT_SLOTS * before..][..before])
            .map(|x| x.to_f64())
            .collect();
        let [conv_weight, norm_weight] = [&around.conv_weight, &around.norm_weight]
            .map(|values| values.iter().map(|x| x.to_f64()).collect::<Vec<_>>());
        let previous_x = wide(&around.previous_x, &rows, batch);
        let window_snapshots = vec![f64::NAN; rows.len() * cell.tokens * before];
        let problem = Layer {
            step: Recurrent {
                q: &[],
                k: &[],
                v: &[],
                previous: step.previous.map(|previous| Previous {
                    k: &[],
                    v: &[],
                    ..previous
                }),
                ..*step
            },
            projection: Some(Projection {
                x: &x,
                previous: step.previous.map(|_| &previous_x[..]),
                conv: Conv {
                    channels,
                    width: TAPS,
                    weight: &conv_weight,
                    bias: None,
                    activation: Activation::Silu,
                },
            }),
            norm: Some(GatedNorm {
                z: &z,
                weight: &norm_weight,
                eps: EPS.into(),
                activation: cell.model.norm.into(),
            }),
            fresh: None,
            checkpoints: None,
        };
        let pools = Pools {
            states: start,
            windows: Some(&windows),
            snapshots,
            window_snapshots: snapshots.map(|_| &window_snapshots[..]),
            ..Pools::default()
        };
        let output = layer(&problem, &pools)?;
        Ok(Truth {
            rows,
            o: output.o,
            pool: output.states,
            snapshots: output.snapshots.unwrap_or_default(),
            windows: output.windows.unwrap_or_default(),
            window_snapshots: output.window_snapshots.unwrap_or_default(),
        })
    }

    /// Slots of the pool that `rows` read or write.
    fn slots_of(&self, rows: &[usize]) -> Vec<usize> {
        let tokens = self.cell.tokens;
        let slots = |row: &usize| match self.cell.mode {
            Mode::TokenSlots => &self.inputs.token_slots[row * tokens..][..tokens],
            _ => &self.inputs.slots[*row..=*row],
        };
        rows.iter()
            .flat_map(slots)
            .map(|&slot| slot as usize)
            .collect()
    }
}

impl Buffers {
    /// Exact results for these buffers, see [`truth`].
    pub fn truth(&self) -> Result<Truth> {
        truth(&self.cell, &self.inputs)
    }

    fn slots_of(&self, rows: &[usize]) -> Vec<usize> {
        let (cell, inputs) = (&self.cell, &self.inputs);
        Given { cell, inputs }.slots_of(rows)
    }

    /// Launches `variant` once on the first set, with its initial values, and compares the results with the exact ones. Returns the largest
    /// of the relative errors of o, the states and the snapshots.
    pub fn check(
        &mut self,
        library: &Library,
        stream: StreamRef<'_>,
        variant: Entry,
        truth: &Truth,
    ) -> Result<f64> {
        self.renew()?;
        // SAFETY: the buffers live until the launch is waited for.
        unsafe { library.launch_with(stream, &*self.work(0)?, variant) }?;
        if let Some(context) = library.context() {
            context.synchronize()?;
        }
        let Cell {
            tokens,
            state,
            batch,
            ..
        } = self.cell;
        let row_bytes = self.cell.row_bytes();
        let o_bytes = size_of_val(&self.inputs.tokens.v[..]) / batch;
        // Reads these slots of a slab, `bytes` in each.
        let read = |slab: &Slab, slots: &[usize], bytes: usize, dtype| -> Result<Vec<f64>> {
            let mut values = Vec::new();
            for slot in slots {
                values.extend(decoded(dtype, &slab.read(slot * bytes, bytes)?));
            }
            Ok(values)
        };
        let states = |slab: &Slab, slots: &[usize]| read(slab, slots, row_bytes, state);
        let of_tokens = |row: &usize| row * tokens..(row + 1) * tokens;
        let steps: Vec<usize> = truth.rows.iter().flat_map(of_tokens).collect();
        let mut worst = 0f64;
        let mut compare = |what: &str, dtype: DType, got: Vec<f64>, truth: &[f64]| {
            let (error, tolerance) = (relative_error(&got, truth), Stored::from(dtype).tolerance());
            worst = worst.max(error);
            ensure!(
                error <= tolerance,
                "relative error of {what} {error:.1e}, at most {tolerance:.0e} wanted"
            );
            Ok(())
        };
        let mut gate = || -> Result<()> {
            if !truth.o.is_empty() {
                let mut got = Vec::new();
                for row in &truth.rows {
                    got.extend(decoded(DType::Bf16, &self.o.read(row * o_bytes, o_bytes)?));
                }
                compare("o", DType::Bf16, got, &truth.o)?;
            }
            let got = states(&self.pool, &self.slots_of(&truth.rows))?;
            compare("the states", state, got, &truth.pool)?;
            if let Some(around) = &self.around {
                let bytes = size_of::<bf16>() * self.cell.channels() * (TAPS - 1);
                let windows = |slab: &Slab, slots: &[usize]| read(slab, slots, bytes, DType::Bf16);
                let got = windows(&around.windows, &self.slots_of(&truth.rows))?;
                ensure!(
                    got == truth.windows,
                    "the windows are not bit for bit the inputs"
                );
                if !truth.window_snapshots.is_empty() {
                    let got = windows(&around.window_snapshots, &steps)?;
                    ensure!(
                        got == truth.window_snapshots,
                        "the snapshots of windows are not bit for bit the inputs"
                    );
                }
            }
            if !truth.snapshots.is_empty() {
                let got = states(&self.snapshots, &steps)?;
                compare("the snapshots", state, got, &truth.snapshots)?;
            }
            Ok(())
        };
        gate().with_context(|| variant.name())?;
        Ok(worst)
    }
}

/// Values of some rows out of `batch`, as f64.
fn wide(values: &[bf16], rows: &[usize], batch: usize) -> Vec<f64> {
    let width = values.len() / batch;
    rows.iter()
        .flat_map(|row| &values[row * width..(row + 1) * width])
        .map(|x| x.to_f64())
        .collect()
}

fn f64s(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::Bf16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&x| bf16::from_ne_bytes(x).to_f64())
            .collect(),
        DType::F16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&x| f16::from_ne_bytes(x).to_f64())
            .collect(),
        _ => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&x| f32::from_ne_bytes(x).into())
            .collect(),
    }
}

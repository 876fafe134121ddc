//! Tensors of a launch.

use super::LOWER_BOUND;
use super::buffer::Buffer;
use super::cases::{
    ACCEPTED, Case, FRESH, GateKind, Keep, PACKED, READ_SLOTS, ROWS, SLOTS, TAPS, WRITE_SLOTS,
};
use super::values::{self, Values};
use crate::driver::Context;
use crate::error::Error;
use crate::step::{Convolution, GdnGates, KdaBeta, KdaDecay, KdaGates, Norm};
use crate::tensor::{DType, Tensor};

/// Tensors that a launch reads.
pub struct Inputs {
    q: Buffer,
    pub tokens: Tokens,
    pub previous: Tokens,
    a_log: Buffer,
    dt_bias: Buffer,
    pub keep: Buffer,
    read_slots: Buffer,
    write_slots: Buffer,
    pub token_slots: Option<Buffer>,
    pub accepted: Buffer,
    /// Bounds of packed rows.
    cu_seqlens: Buffer,
    pub around: Around,
}

/// Tensors of a convolution, a norm and fresh rows; empty if the case has none of these.
pub struct Around {
    x: Buffer,
    previous_x: Buffer,
    conv_weight: Buffer,
    conv_bias: Buffer,
    z: Buffer,
    norm_weight: Buffer,
    fresh: Buffer,
}

/// Tensors of the new or the previous tokens.
pub struct Tokens {
    /// Outer dims: `[B, T]`, `[B, T']`, or `[1, total]` of packed rows.
    dims: [usize; 2],
    k: Buffer,
    v: Buffer,
    gate: Buffer,
    beta: Buffer,
}

/// Tensors that a launch writes.
pub struct Outputs {
    /// `[B, T, HV, V]`.
    pub o: Buffer,
    /// `[P, HV, V, K]` or `[P, HV, K, V]`.
    pub pool: Buffer,
    /// `[B, T + 1, HV, V, K]` or `[B, T + 1, HV, K, V]`.
    pub snapshots: Option<Buffer>,
    /// `[P, D, W - 1]`, with token slots `[P, D, W - 2 + T]`.
    pub windows: Option<Buffer>,
    /// `[B, T + 1, D, W - 1]`.
    pub window_snapshots: Option<Buffer>,
    /// Workspace of a prefill whose rows may have more than 64 tokens.
    workspace: Option<Buffer>,
}

/// Views of all written tensors.
pub struct Views<'a> {
    pub o: Tensor<'a>,
    pub pool: Tensor<'a>,
    pub snapshots: Option<Tensor<'a>>,
    pub windows: Option<Tensor<'a>>,
    pub window_snapshots: Option<Tensor<'a>>,
    pub workspace: Option<Tensor<'a>>,
}

/// `cu_seqlens` of rows of one token each, at the start of the packed tensor.
const BOUNDS: [i32; ROWS + 1] = [0, 1, 2, 3];

/// The values of the tokens. For packed rows, NaN fills the tensor up to [`PACKED`] tokens; no row reads these.
fn padded(case: &Case, values: &[f64]) -> Vec<f64> {
    let mut padded = values.to_vec();
    if case.way.packed {
        padded.resize(values.len() / ROWS * PACKED, f64::NAN);
    }
    padded
}

impl Around {
    fn new(context: Option<&Context>, case: &Case, values: &values::Around) -> Result<Self, Error> {
        Ok(Self {
            x: Buffer::floats(context, DType::Bf16, &padded(case, &values.x))?,
            previous_x: Buffer::floats(context, DType::Bf16, &values.previous_x)?,
            conv_weight: Buffer::floats(context, DType::Bf16, &values.conv_weight)?,
            conv_bias: Buffer::floats(context, DType::F32, &values.conv_bias)?,
            z: Buffer::floats(context, DType::Bf16, &padded(case, &values.z))?,
            norm_weight: Buffer::floats(context, DType::F32, &values.norm_weight)?,
            fresh: Buffer::indices(context, &FRESH)?,
        })
    }

    /// The convolution of the new tokens, in a commit of the previous tokens. It reads and writes `windows`.
    pub fn convolution<'a>(
        &'a self,
        case: &Case,
        windows: Tensor<'a>,
    ) -> Result<Convolution<'a>, Error> {
        let channels = case.channels();
        let x = match case.way.tokens {
            0 => self.previous_x(case)?,
            _ => {
                let [rows, tokens] = case.token_dims();
                self.x.tensor(&[rows, tokens, channels])?
            }
        };
        let weight = self.conv_weight.tensor(&[channels, TAPS])?;
        let conv = Convolution::new(x, case.heads().0, weight, windows);
        Ok(conv.bias(self.conv_bias.tensor(&[channels])?))
    }

    pub fn previous_x(&self, case: &Case) -> Result<Tensor<'_>, Error> {
        let dims = [ROWS, case.way.previous, case.channels()];
        self.previous_x.tensor(&dims)
    }

    pub fn norm(&self, case: &Case) -> Result<Norm<'_>, Error> {
        let (_, hv) = case.heads();
        let [rows, tokens] = case.token_dims();
        let z = self.z.tensor(&[rows, tokens, hv, case.value_dim()])?;
        let weight = self.norm_weight.tensor(&[case.value_dim()])?;
        Ok(Norm::new(z, weight, values::EPS))
    }

    pub fn fresh(&self) -> Result<Tensor<'_>, Error> {
        self.fresh.tensor(&[ROWS])
    }
}

impl Tokens {
    fn new(
        context: Option<&Context>,
        case: &Case,
        dims: [usize; 2],
        values: &values::Tokens,
    ) -> Result<Self, Error> {
        let floats = |dtype, values: &[f64]| Buffer::floats(context, dtype, &padded(case, values));
        Ok(Self {
            dims,
            k: floats(DType::Bf16, &values.k)?,
            v: floats(DType::Bf16, &values.v)?,
            gate: floats(DType::F32, &values.gate)?,
            beta: floats(DType::F32, &values.beta)?,
        })
    }

    pub fn k(&self, case: &Case) -> Result<Tensor<'_>, Error> {
        let [rows, tokens] = self.dims;
        self.k
            .tensor(&[rows, tokens, case.heads().0, case.key_dim()])
    }

    pub fn v(&self, case: &Case) -> Result<Tensor<'_>, Error> {
        let [rows, tokens] = self.dims;
        self.v
            .tensor(&[rows, tokens, case.heads().1, case.value_dim()])
    }

    pub fn beta(&self, case: &Case) -> Result<Tensor<'_>, Error> {
        let [rows, tokens] = self.dims;
        self.beta.tensor(&[rows, tokens, case.heads().1])
    }

    pub fn gate(&self, case: &Case) -> Result<Tensor<'_>, Error> {
        let [rows, tokens] = self.dims;
        let dims = [rows, tokens, case.heads().1, case.key_dim()];
        let per_channel = case.kind.per_channel;
        self.gate.tensor(&dims[..if per_channel { 4 } else { 3 }])
    }
}

impl Inputs {
    pub fn new(context: Option<&Context>, case: &Case, values: &Values) -> Result<Self, Error> {
        let indices = |values: &[i32]| Buffer::indices(context, values);
        let (new, previous) = (case.token_dims(), [ROWS, case.way.previous]);
        Ok(Self {
            q: Buffer::floats(context, DType::Bf16, &padded(case, &values.q))?,
            tokens: Tokens::new(context, case, new, &values.tokens)?,
            previous: Tokens::new(context, case, previous, &values.previous)?,
            a_log: Buffer::floats(context, DType::F32, &values.a_log)?,
            dt_bias: Buffer::floats(context, DType::F32, &values.dt_bias)?,
            keep: indices(&case.keep().map(|keep| keep as i32))?,
            read_slots: indices(&READ_SLOTS)?,
            write_slots: indices(&WRITE_SLOTS)?,
            token_slots: match case.token_slots() {
                Some(slots) => Some(indices(slots.as_flattened())?),
                None => None,
            },
            accepted: indices(&ACCEPTED)?,
            cu_seqlens: indices(&BOUNDS)?,
            around: Around::new(context, case, &values.around)?,
        })
    }

    pub fn q(&self, case: &Case) -> Result<Tensor<'_>, Error> {
        let [rows, tokens] = case.token_dims();
        self.q
            .tensor(&[rows, tokens, case.heads().0, case.key_dim()])
    }

    /// `[B + 1]`.
    pub fn cu_seqlens(&self) -> Result<Tensor<'_>, Error> {
        self.cu_seqlens.tensor(&[BOUNDS.len()])
    }

    pub fn read_slots(&self) -> Result<Option<Tensor<'_>>, Error> {
        match self.token_slots {
            Some(_) => Ok(None),
            None => self.read_slots.tensor(&[ROWS]).map(Some),
        }
    }

    pub fn write_slots(&self, case: &Case) -> Result<Option<Tensor<'_>>, Error> {
        match case.way.keep {
            Keep::Elsewhere => self.write_slots.tensor(&[ROWS]).map(Some),
            _ => Ok(None),
        }
    }

    pub fn gdn_gates<'a>(&'a self, case: &Case, tokens: &'a Tokens) -> Result<GdnGates<'a>, Error> {
        let (gate, beta) = (tokens.gate(case)?, tokens.beta(case)?);
        let parameters = [case.heads().1];
        Ok(match case.gates {
            GateKind::GdnRaw => {
                let a_log = self.a_log.tensor(&parameters)?;
                GdnGates::raw(gate, beta, a_log, self.dt_bias.tensor(&parameters)?)
            }
            _ => GdnGates::given(gate, beta),
        })
    }

    pub fn kda_gates<'a>(&'a self, case: &Case, tokens: &'a Tokens) -> Result<KdaGates<'a>, Error> {
        let rows = case.heads().1;
        let a_log = self.a_log.tensor(&[rows])?;
        let dt_bias = Some(self.dt_bias.tensor(&[rows, case.key_dim()])?);
        let (kind, beta_kind) = match case.gates {
            GateKind::KdaSoftplus => (KdaDecay::Softplus { a_log, dt_bias }, KdaBeta::Logit),
            GateKind::KdaLowerBound => (
                KdaDecay::LowerBound {
                    lower_bound: LOWER_BOUND,
                    a_log: Some(a_log),
                    dt_bias,
                },
                KdaBeta::Logit,
            ),
            _ => (KdaDecay::Log, KdaBeta::Given),
        };
        Ok(KdaGates {
            g: tokens.gate(case)?,
            kind,
            beta: tokens.beta(case)?,
            beta_kind,
        })
    }
}

impl Outputs {
    /// Tensors full of NaN, except for the states and windows that rows start from.
    pub fn new(context: Option<&Context>, case: &Case, values: &Values) -> Result<Self, Error> {
        let (_, hv) = case.heads();
        let [rows, tokens] = case.token_dims();
        let nan = |dtype, len| Buffer::floats(context, dtype, &vec![f64::NAN; len]);
        let state = case.state();
        Ok(Self {
            o: nan(DType::F32, rows * tokens * hv * case.value_dim())?,
            pool: Buffer::floats(context, case.kind.state, &values.pool)?,
            snapshots: if case.way.snapshots {
                Some(nan(case.kind.state, ROWS * (case.way.tokens + 1) * state)?)
            } else {
                None
            },
            windows: if case.way.conv {
                let windows = &values.around.windows;
                Some(Buffer::floats(context, DType::Bf16, windows)?)
            } else {
                None
            },
            window_snapshots: if case.way.conv && case.way.snapshots {
                let of_row = (case.way.tokens + 1) * case.channels() * (TAPS - 1);
                Some(nan(DType::Bf16, ROWS * of_row)?)
            } else {
                None
            },
            workspace: match case.workspace_elements() {
                0 => None,
                elements => Some(nan(DType::F32, elements)?),
            },
        })
    }

    pub fn views(&mut self, case: &Case) -> Result<Views<'_>, Error> {
        let ((_, hv), [outer, inner], tokens) = (case.heads(), case.state_dims(), case.way.tokens);
        let [rows, of_row] = case.token_dims();
        Ok(Views {
            o: self.o.tensor_mut(&[rows, of_row, hv, case.value_dim()])?,
            pool: self.pool.tensor_mut(&[SLOTS, hv, outer, inner])?,
            snapshots: match &mut self.snapshots {
                Some(buffer) => Some(buffer.tensor_mut(&[ROWS, tokens + 1, hv, outer, inner])?),
                None => None,
            },
            windows: match &mut self.windows {
                Some(buffer) => {
                    let dims = [SLOTS, case.channels(), case.window_inputs()];
                    Some(buffer.tensor_mut(&dims)?)
                }
                None => None,
            },
            window_snapshots: match &mut self.window_snapshots {
                Some(buffer) => {
                    let dims = [ROWS, tokens + 1, case.channels(), TAPS - 1];
                    Some(buffer.tensor_mut(&dims)?)
                }
                None => None,
            },
            workspace: match &mut self.workspace {
                Some(buffer) => Some(buffer.tensor_mut(&[case.workspace_elements()])?),
                None => None,
            },
        })
    }

    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        [&mut self.o, &mut self.pool]
            .into_iter()
            .chain(&mut self.snapshots)
            .chain(&mut self.windows)
            .chain(&mut self.window_snapshots)
    }
}

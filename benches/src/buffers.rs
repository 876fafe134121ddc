//! Buffer sets of a cell, to rotate over, and the arguments of a launch on them.

use anyhow::Result;
use gated_delta::{Activation, DType, Error, Library, Options, Tensor, Work};
use gated_delta_harness::arguments::{
    Arguments, Convolved, GatedNorm, Kept, KeptX, New, Operator, Tokens,
};

use crate::cell::{Cell, Mode};
use crate::inputs::{self, Inputs};
use crate::shapes::Model;
use crate::slab::{Slab, sets_for, upload};

/// Buffer sets of a cell, and their initial values.
pub struct Buffers {
    pub(crate) cell: Cell,
    pub(crate) inputs: Inputs,
    sets: usize,
    q: Slab,
    tokens: TokenSlabs,
    previous: Option<TokenSlabs>,
    a_log: Slab,
    dt_bias: Slab,
    keep: Slab,
    slots: Slab,
    token_slots: Slab,
    accepted: Slab,
    pub(crate) o: Slab,
    pub(crate) pool: Slab,
    pub(crate) snapshots: Slab,
    pub(crate) around: Option<AroundSlabs>,
}

/// Buffers of a layer's convolution and norm.
pub(crate) struct AroundSlabs {
    projection: Slab,
    previous_x: Slab,
    conv_weight: Slab,
    norm_weight: Slab,
    /// Windows, `[B, D, W − 1]`
    pub(crate) windows: Slab,
    /// Window snapshots, `[B, T, D, W − 1]`, in a cell with snapshots.
    pub(crate) window_snapshots: Slab,
}

impl AroundSlabs {
    fn new(library: &Library, sets: usize, cell: &Cell, around: &inputs::Around) -> Result<Self> {
        let windows = bytemuck::cast_slice(&around.windows);
        let bytes = cell.batch * windows.len() / inputs::DISTINCT_SLOTS;
        let snapshots = match cell.mode {
            Mode::Snapshots => cell.tokens * bytes,
            _ => 0,
        };
        Ok(Self {
            projection: upload(library, sets, &around.projection)?,
            previous_x: upload(library, sets, &around.previous_x)?,
            conv_weight: upload(library, sets, &around.conv_weight)?,
            norm_weight: upload(library, sets, &around.norm_weight)?,
            windows: Slab::filled(library, sets, bytes, windows)?,
            window_snapshots: Slab::new(library, sets, snapshots)?,
        })
    }
}

struct TokenSlabs {
    k: Slab,
    v: Slab,
    gate: Slab,
    beta: Slab,
}

impl TokenSlabs {
    fn new(library: &Library, sets: usize, tokens: &inputs::Tokens) -> Result<Self> {
        Ok(Self {
            k: upload(library, sets, &tokens.k)?,
            v: upload(library, sets, &tokens.v)?,
            gate: upload(library, sets, &tokens.gate)?,
            beta: upload(library, sets, &tokens.beta)?,
        })
    }
}

impl Buffers {
    /// Allocates and fills every set, on the device of `library`.
    pub fn new(library: &Library, cell: Cell) -> Result<Self> {
        Self::with(library, cell, Inputs::of(&cell))
    }

    /// As [`new`](Self::new), with inputs that have been drawn before.
    pub fn with(library: &Library, cell: Cell, inputs: Inputs) -> Result<Self> {
        let state_bytes = cell.pool_bytes() + cell.snapshot_bytes();
        let sets = match cell.cold {
            true => sets_for(library, state_bytes),
            false => 1,
        };
        let states = inputs.state_bytes(cell.state);
        let o_bytes = size_of_val(&inputs.tokens.v[..]);
        let previous = inputs.previous.as_ref();
        Ok(Self {
            sets,
            q: upload(library, sets, &inputs.q)?,
            tokens: TokenSlabs::new(library, sets, &inputs.tokens)?,
            previous: previous
                .map(|tokens| TokenSlabs::new(library, sets, tokens))
                .transpose()?,
            a_log: upload(library, 1, &inputs.a_log)?,
            dt_bias: upload(library, 1, &inputs.dt_bias)?,
            keep: upload(library, sets, &inputs.keep)?,
            slots: upload(library, sets, &inputs.slots)?,
            token_slots: upload(library, sets, &inputs.token_slots)?,
            accepted: upload(library, sets, &inputs.accepted)?,
            o: Slab::new(library, sets, o_bytes)?,
            pool: Slab::filled(library, sets, cell.pool_bytes(), &states)?,
            snapshots: Slab::new(library, sets, cell.snapshot_bytes())?,
            around: (inputs.around.as_ref())
                .map(|around| AroundSlabs::new(library, sets, &cell, around))
                .transpose()?,
            cell,
            inputs,
        })
    }

    /// Number of sets.
    #[must_use]
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// The cell that the buffers are for.
    #[must_use]
    pub fn cell(&self) -> &Cell {
        &self.cell
    }

    /// Restores the initial values of the first set.
    pub fn renew(&mut self) -> Result<()> {
        self.pool
            .refill(&self.inputs.state_bytes(self.cell.state))?;
        if let (Some(slabs), Some(around)) = (&mut self.around, &self.inputs.around) {
            slabs
                .windows
                .refill(bytemuck::cast_slice(&around.windows))?;
            slabs.window_snapshots.spoil()?;
        }
        self.o.spoil()?;
        self.snapshots.spoil()
    }

    /// States of a set in the form that the floor takes: f32 words.
    pub fn words(&self, set: usize) -> Result<Tensor<'_>, Error> {
        self.pool
            .tensor(set, DType::F32, &[self.cell.pool_bytes() / 4])
    }

    /// The launch of a layer step on a set.
    fn layer<'s>(
        &'s self,
        around: &'s AroundSlabs,
        set: usize,
    ) -> Result<Box<dyn Work + 's>, Error> {
        let cell = &self.cell;
        let Model {
            heads, value_heads, ..
        } = cell.model;
        let (batch, tokens, channels) = (cell.batch, cell.tokens, cell.channels());
        let before = inputs::TAPS - 1;
        let values = value_heads * cell.value_dim();
        let projection =
            self.floats(&around.projection, set, &[batch, tokens, channels + values])?;
        let [a_log, dt_bias] = self.parameters()?;
        let has_snapshots = cell.mode == Mode::Snapshots;
        let window_snapshots = [batch, tokens, channels, before];
        let previous_x = match &self.previous {
            Some(previous) => Some(KeptX {
                x: self.floats(&around.previous_x, set, &[batch, tokens, channels])?,
                gate: self.floats(&previous.gate, set, &self.gate_dims())?,
                beta: self.floats(&previous.beta, set, &self.beta_dims())?,
                keep: self.keep.tensor(set, DType::I32, &[batch])?,
                conv: None,
            }),
            None => None,
        };
        Arguments {
            a_log,
            dt_bias,
            convolved: Some(Convolved {
                x: projection.narrow(2, 0, channels)?,
                heads,
                gate: self.floats(&self.tokens.gate, set, &self.gate_dims())?,
                beta: self.floats(&self.tokens.beta, set, &self.beta_dims())?,
                o: self.floats(&self.o, set, &self.value_dims())?,
                weight: self.floats(&around.conv_weight, set, &[channels, inputs::TAPS])?,
                bias: None,
                activation: Activation::Silu,
                windows: self.floats(&around.windows, set, &[batch, channels, before])?,
                write_windows: None,
                window_snapshots: has_snapshots
                    .then(|| self.floats(&around.window_snapshots, set, &window_snapshots))
                    .transpose()?,
            }),
            previous_x,
            norm: Some(GatedNorm {
                z: projection
                    .narrow(2, channels, values)?
                    .split(2, cell.value_dim())?,
                weight: self.floats(&around.norm_weight, set, &[cell.value_dim()])?,
                eps: inputs::EPS,
                activation: cell.model.norm,
            }),
            read_slots: self.read_slots(set)?,
            snapshots: self.snapshots(set)?,
            update_state: cell.mode.updates(),
            options: Options::default()
                .state_layout(cell.layout)
                .formulation(cell.formulation),
            ..Arguments::new(cell.gates(), self.states(set)?)
        }
        .work()
    }

    /// The launch of the cell on a set.
    pub fn work(&self, set: usize) -> Result<Box<dyn Work + '_>, Error> {
        if let Some(around) = &self.around {
            return self.layer(around, set);
        }
        let Cell {
            mode,
            batch,
            tokens,
            ..
        } = self.cell;
        let kept = |slabs| {
            Ok::<_, Error>(Kept {
                tokens: self.tokens(slabs, set)?,
                keep: self.keep.tensor(set, DType::I32, &[batch])?,
            })
        };
        let (new, previous) = match (mode, &self.previous) {
            (Mode::Commit, _) => (None, Some(kept(&self.tokens)?)),
            (_, previous) => {
                let new = New {
                    q: self.floats(&self.q, set, &self.key_dims())?,
                    tokens: self.tokens(&self.tokens, set)?,
                    o: self.floats(&self.o, set, &self.value_dims())?,
                };
                (Some(new), previous.as_ref().map(kept).transpose()?)
            }
        };
        let only = |wanted: Mode, slab, dtype, dims: &[usize]| {
            let tensor = (mode == wanted).then(|| Slab::tensor(slab, set, dtype, dims));
            tensor.transpose()
        };
        let [a_log, dt_bias] = self.parameters()?;
        Arguments {
            a_log,
            dt_bias,
            new,
            previous,
            read_slots: self.read_slots(set)?,
            token_slots: only(
                Mode::TokenSlots,
                &self.token_slots,
                DType::I32,
                &[batch, tokens],
            )?,
            accepted: only(Mode::TokenSlots, &self.accepted, DType::I32, &[batch])?,
            snapshots: self.snapshots(set)?,
            update_state: mode.updates(),
            options: Options::default()
                .state_layout(self.cell.layout)
                .formulation(self.cell.formulation),
            ..Arguments::new(self.cell.gates(), self.states(set)?)
        }
        .work()
    }

    /// Key, value and gate tensors of a set.
    fn tokens<'s>(&self, slabs: &'s TokenSlabs, set: usize) -> Result<Tokens<Tensor<'s>>, Error> {
        Ok(Tokens {
            k: self.floats(&slabs.k, set, &self.key_dims())?,
            v: self.floats(&slabs.v, set, &self.value_dims())?,
            gate: self.floats(&slabs.gate, set, &self.gate_dims())?,
            beta: self.floats(&slabs.beta, set, &self.beta_dims())?,
        })
    }

    /// The gate parameters `A_log` and `dt_bias`, if there are any.
    fn parameters(&self) -> Result<[Option<Tensor<'_>>; 2], Error> {
        let Cell { model, dim, .. } = self.cell;
        let of_channels = [model.value_heads, dim];
        let bias_dims = match self.cell.op.operator() {
            Operator::Gdn => &of_channels[..1],
            Operator::Kda => &of_channels[..],
        };
        let a_log = self.a_log.tensor(0, DType::F32, &of_channels[..1])?;
        let dt_bias = self.dt_bias.tensor(0, DType::F32, bias_dims)?;
        Ok([Some(a_log), Some(dt_bias)])
    }

    fn floats<'s>(&self, slab: &'s Slab, set: usize, dims: &[usize]) -> Result<Tensor<'s>, Error> {
        slab.tensor(set, DType::Bf16, dims)
    }

    fn states(&self, set: usize) -> Result<Tensor<'_>, Error> {
        let Cell { model, state, .. } = self.cell;
        let [outer, inner] = self.cell.state_dims();
        let slots = self.cell.pool_bytes() / self.cell.row_bytes();
        self.pool
            .tensor(set, state, &[slots, model.value_heads, outer, inner])
    }

    /// Snapshots `[B, T, HV, V, K]`, in a cell with snapshots.
    fn snapshots(&self, set: usize) -> Result<Option<Tensor<'_>>, Error> {
        let Cell {
            mode,
            model,
            batch,
            tokens,
            state,
            ..
        } = self.cell;
        let [outer, inner] = self.cell.state_dims();
        let dims = [batch, tokens, model.value_heads, outer, inner];
        (mode == Mode::Snapshots)
            .then(|| self.snapshots.tensor(set, state, &dims))
            .transpose()
    }

    fn read_slots(&self, set: usize) -> Result<Option<Tensor<'_>>, Error> {
        self.cell
            .slots
            .then(|| self.slots.tensor(set, DType::I32, &[self.cell.batch]))
            .transpose()
    }

    fn key_dims(&self) -> [usize; 4] {
        let Cell {
            batch,
            tokens,
            model,
            dim,
            ..
        } = self.cell;
        [batch, tokens, model.heads, dim]
    }

    fn value_dims(&self) -> [usize; 4] {
        let Cell {
            batch,
            tokens,
            model,
            ..
        } = self.cell;
        [batch, tokens, model.value_heads, self.cell.value_dim()]
    }

    fn beta_dims(&self) -> [usize; 3] {
        let [batch, tokens, value_heads, _] = self.value_dims();
        [batch, tokens, value_heads]
    }

    /// Dims of the gate tensor: `[B, T, HV]`, KDA `[B, T, HV, K]`.
    fn gate_dims(&self) -> Vec<usize> {
        match self.cell.op.operator() {
            Operator::Gdn => self.beta_dims().to_vec(),
            Operator::Kda => {
                let [batch, tokens, value_heads] = self.beta_dims();
                vec![batch, tokens, value_heads, self.cell.dim]
            }
        }
    }
}

//! Rotating buffers of a cell, and the arguments of a launch on them.

use anyhow::Result;
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::kda_recurrent::{KdaBeta, KdaGate, KdaGates};
use gated_delta::ops::recurrent::{Commit, Previous, Recurrent, RecurrentOptions};
use gated_delta::ops::{BetaScale, GdnGates};
use gated_delta::{DType, Error, Library, Tensor};
use gated_delta_harness::args::Args;
use gated_delta_harness::timing::cold_sets;

use crate::cell::{Cell, Gate, Mode, Operator};
use crate::inputs::{Inputs, LOWER_BOUND, Tokens};
use crate::slab::{Slab, upload};

/// Buffer sets of a cell, and what they started from.
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
}

struct TokenSlabs {
    k: Slab,
    v: Slab,
    gate: Slab,
    beta: Slab,
}

impl TokenSlabs {
    fn new(library: &Library, sets: usize, tokens: &Tokens) -> Result<Self> {
        Ok(Self {
            k: upload(library, sets, &tokens.k)?,
            v: upload(library, sets, &tokens.v)?,
            gate: upload(library, sets, &tokens.gate)?,
            beta: upload(library, sets, &tokens.beta)?,
        })
    }
}

impl Buffers {
    /// Allocates and fills every set where `library` runs.
    pub fn new(library: &Library, cell: Cell) -> Result<Self> {
        let inputs = Inputs::of(&cell);
        let state_bytes = cell.pool_bytes() + cell.snapshot_bytes();
        let sets = if cell.cold { cold_sets(state_bytes) } else { 1 };
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
            cell,
            inputs,
        })
    }

    /// Number of sets.
    #[must_use]
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// What is measured.
    #[must_use]
    pub fn cell(&self) -> &Cell {
        &self.cell
    }

    /// Makes the first set what it was when it was new.
    pub fn renew(&mut self) -> Result<()> {
        self.pool
            .refill(&self.inputs.state_bytes(self.cell.state))?;
        self.o.spoil()?;
        self.snapshots.spoil()
    }

    /// The states of a set as the floor takes them: f32 words.
    pub fn words(&self, set: usize) -> Result<Tensor<'_>, Error> {
        self.pool
            .tensor(set, DType::F32, &[self.cell.pool_bytes() / 4])
    }

    /// Arguments of the launch on a set.
    pub fn args(&self, set: usize) -> Result<Args<'_>, Error> {
        let commit = self.cell.mode == Mode::Commit;
        Ok(match (self.cell.operator, commit) {
            (Operator::GdnDecode, _) => Args::GdnDecode(self.decode(set)?),
            (Operator::GdnMtp, false) => Args::GdnMtp(self.recurrent(set, self.gdn(set)?)?),
            (Operator::GdnMtp, true) => Args::GdnCommit(self.commit(set, self.gdn(set)?)?),
            (Operator::KdaRecurrent, false) => {
                Args::KdaRecurrent(self.recurrent(set, self.kda(set)?)?)
            }
            (Operator::KdaRecurrent, true) => Args::KdaCommit(self.commit(set, self.kda(set)?)?),
        })
    }

    /// A GDN decode of a set.
    pub fn decode(&self, set: usize) -> Result<GdnDecode<'_>, Error> {
        let options = self.options();
        Ok(GdnDecode {
            q: self.floats(&self.q, set, &self.key_dims())?,
            k: self.floats(&self.tokens.k, set, &self.key_dims())?,
            v: self.floats(&self.tokens.v, set, &self.value_dims())?,
            gates: self.gdn(set)?,
            o: self.floats(&self.o, set, &self.value_dims())?,
            pool: self.states(set)?,
            write_pool: None,
            read_slots: self.read_slots(set)?,
            write_slots: None,
            options: GdnDecodeOptions {
                state_layout: options.state_layout,
                update_state: options.update_state,
                ..GdnDecodeOptions::default()
            },
        })
    }

    fn recurrent<G>(&self, set: usize, gates: G) -> Result<Recurrent<'_, G>, Error> {
        let Cell {
            mode,
            model,
            dim,
            batch,
            tokens,
            state,
            ..
        } = self.cell;
        let only = |wanted: Mode, slab, dtype, dims: &[usize]| {
            (mode == wanted)
                .then(|| Slab::tensor(slab, set, dtype, dims))
                .transpose()
        };
        let snapshots = [batch, tokens, model.value_heads, dim, dim];
        let previous = self.previous.as_ref().map(|previous| {
            Ok::<_, Error>(Previous {
                k: self.floats(&previous.k, set, &self.key_dims())?,
                v: self.floats(&previous.v, set, &self.value_dims())?,
                gate: self.floats(&previous.gate, set, &self.gate_dims())?,
                beta: self.floats(&previous.beta, set, &self.beta_dims())?,
                keep: self.keep.tensor(set, DType::I32, &[batch])?,
            })
        });
        Ok(Recurrent {
            q: self.floats(&self.q, set, &self.key_dims())?,
            k: self.floats(&self.tokens.k, set, &self.key_dims())?,
            v: self.floats(&self.tokens.v, set, &self.value_dims())?,
            gates,
            o: self.floats(&self.o, set, &self.value_dims())?,
            pool: self.states(set)?,
            write_pool: None,
            read_slots: self.read_slots(set)?,
            write_slots: None,
            token_slots: only(
                Mode::TokenSlots,
                &self.token_slots,
                DType::I32,
                &[batch, tokens],
            )?,
            accepted: only(Mode::TokenSlots, &self.accepted, DType::I32, &[batch])?,
            snapshots: only(Mode::Snapshots, &self.snapshots, state, &snapshots)?,
            packed: None,
            previous: previous.transpose()?,
            options: self.options(),
        })
    }

    fn commit<G>(&self, set: usize, gates: G) -> Result<Commit<'_, G>, Error> {
        Ok(Commit {
            k: self.floats(&self.tokens.k, set, &self.key_dims())?,
            v: self.floats(&self.tokens.v, set, &self.value_dims())?,
            gates,
            keep: self.keep.tensor(set, DType::I32, &[self.cell.batch])?,
            pool: self.states(set)?,
            write_pool: None,
            read_slots: self.read_slots(set)?,
            write_slots: None,
            options: self.options(),
        })
    }

    fn gdn(&self, set: usize) -> Result<GdnGates<'_>, Error> {
        let value_heads = [self.cell.model.value_heads];
        Ok(GdnGates::Raw {
            a: self.floats(&self.tokens.gate, set, &self.gate_dims())?,
            b: self.floats(&self.tokens.beta, set, &self.beta_dims())?,
            a_log: self.a_log.tensor(0, DType::F32, &value_heads)?,
            dt_bias: self.dt_bias.tensor(0, DType::F32, &value_heads)?,
            beta_scale: BetaScale::One,
        })
    }

    fn kda(&self, set: usize) -> Result<KdaGates<'_>, Error> {
        let Cell { model, dim, .. } = self.cell;
        let a_log = self.a_log.tensor(0, DType::F32, &[model.value_heads])?;
        let dt_bias = self
            .dt_bias
            .tensor(0, DType::F32, &[model.value_heads, dim])?;
        Ok(KdaGates {
            g: self.floats(&self.tokens.gate, set, &self.gate_dims())?,
            kind: match self.cell.gate {
                Gate::Log => KdaGate::Log,
                Gate::Softplus => KdaGate::Softplus {
                    a_log,
                    dt_bias: Some(dt_bias),
                },
                Gate::LowerBound => KdaGate::LowerBound {
                    lower_bound: LOWER_BOUND,
                    a_log: Some(a_log),
                    dt_bias: Some(dt_bias),
                },
            },
            beta: self.floats(&self.tokens.beta, set, &self.beta_dims())?,
            beta_kind: KdaBeta::Given,
        })
    }

    fn options(&self) -> RecurrentOptions {
        RecurrentOptions {
            state_layout: self.cell.layout,
            update_state: !matches!(self.cell.mode, Mode::Verify | Mode::Snapshots),
            formulation: self.cell.formulation,
            ..RecurrentOptions::default()
        }
    }

    fn floats<'s>(&self, slab: &'s Slab, set: usize, dims: &[usize]) -> Result<Tensor<'s>, Error> {
        slab.tensor(set, DType::Bf16, dims)
    }

    fn states(&self, set: usize) -> Result<Tensor<'_>, Error> {
        let Cell {
            model, dim, state, ..
        } = self.cell;
        let slots = self.cell.pool_bytes() / self.cell.row_bytes();
        self.pool
            .tensor(set, state, &[slots, model.value_heads, dim, dim])
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
            dim,
            ..
        } = self.cell;
        [batch, tokens, model.value_heads, dim]
    }

    fn beta_dims(&self) -> [usize; 3] {
        let [batch, tokens, value_heads, _] = self.value_dims();
        [batch, tokens, value_heads]
    }

    /// `[B, T, HV]`, KDA `[B, T, HV, K]`.
    fn gate_dims(&self) -> Vec<usize> {
        match self.cell.operator {
            Operator::KdaRecurrent => self.value_dims().to_vec(),
            _ => self.beta_dims().to_vec(),
        }
    }
}

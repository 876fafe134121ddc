//! Random problems: the values and slots that follow from a shape, some choices and a seed.

use gated_delta::ops::kda_recurrent::KdaBeta;
use gated_delta::ops::recurrent::{Formulation, MAX_TOKENS, RecurrentOptions};
use gated_delta::ops::{BetaScale, StateLayout};
use gated_delta::{DType, Entry};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::case::Case;
use crate::layout::Form;
use crate::problem::{Array, GateKind, Gates, KdaDecay, Kept, Operator, Packed, Problem, Tokens};
use crate::slots::SlotChoice;

/// Which kernels compute a problem: all entries of one operator, formulation, layout, state dtype and K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// Whose kernels.
    pub operator: Operator,
    /// How they compute.
    pub formulation: Formulation,
    /// Which dim of a state is contiguous.
    pub layout: StateLayout,
    /// Element of the pools.
    pub state: DType,
    /// K = V.
    pub dim: usize,
}

impl Family {
    /// The family that computes token by token.
    #[must_use]
    pub const fn new(operator: Operator, layout: StateLayout, state: DType, dim: usize) -> Self {
        Self {
            operator,
            formulation: Formulation::Recurrent,
            layout,
            state,
            dim,
        }
    }

    /// All families of `operator`, in the order of the entries.
    pub fn all(operator: Operator) -> Vec<Self> {
        let mut families = Vec::new();
        for family in Entry::ALL.iter().filter_map(|entry| Self::of(*entry)) {
            if family.operator == operator && !families.contains(&family) {
                families.push(family);
            }
        }
        families
    }

    /// All families whose tokens are computed one by one, so that there is a state after each.
    pub fn recurrent(operator: Operator) -> Vec<Self> {
        let mut families = Self::all(operator);
        families.retain(|family| family.formulation == Formulation::Recurrent);
        families
    }

    /// The family of an entry, unless it is of no operator on states.
    ///
    /// # Panics
    /// Where its name is not of the form `gdn_decode_klast_bf16_k128_tile32`.
    #[must_use]
    pub fn of(entry: Entry) -> Option<Self> {
        let name = entry.name();
        let operators = [
            ("gdn_decode_", Operator::GdnDecode, Formulation::Recurrent),
            ("gdn_mtp_parallel_", Operator::GdnMtp, Formulation::Parallel),
            ("gdn_mtp_", Operator::GdnMtp, Formulation::Recurrent),
            (
                "kda_recurrent_parallel_",
                Operator::KdaRecurrent,
                Formulation::Parallel,
            ),
            (
                "kda_recurrent_",
                Operator::KdaRecurrent,
                Formulation::Recurrent,
            ),
        ];
        let (rest, operator, formulation) = operators.iter().find_map(|of| {
            let rest = name.strip_prefix(of.0)?;
            Some((rest, of.1, of.2))
        })?;
        let mut words = rest.split('_');
        let layout = match words.next() {
            Some("klast") => StateLayout::KLast,
            Some("vlast") => StateLayout::VLast,
            _ => panic!("{name}: of no layout"),
        };
        let state = match words.next() {
            Some("f32") => DType::F32,
            Some("bf16") => DType::Bf16,
            _ => panic!("{name}: of no state"),
        };
        let dim = words
            .next()
            .and_then(|word| word.strip_prefix('k')?.parse().ok());
        Some(Self {
            operator,
            formulation,
            layout,
            state,
            dim: dim.unwrap_or_else(|| panic!("{name}: of no K")),
        })
    }

    /// Most tokens, new or previous.
    #[must_use]
    pub fn max_tokens(self) -> usize {
        match (self.operator, self.formulation) {
            (Operator::GdnDecode, _) => 1,
            (_, Formulation::Parallel) => 8,
            (_, Formulation::Recurrent) => MAX_TOKENS,
        }
    }
}

/// How large q and k are.
#[derive(Clone, Copy, Debug)]
pub enum Magnitude {
    /// Of elements around 1, or of unit norm where the kernel does not normalise.
    Usual,
    /// Σk² around the 1e-6 of the norm.
    Tiny,
    /// A hundred times the usual.
    Large,
    /// Some heads are all zero.
    Zeros,
}

/// Which parameters gates of KDA have, where they may do without.
#[derive(Clone, Copy, Debug)]
pub struct Parameters {
    /// There is an A_log.
    pub a_log: bool,
    /// There is a dt_bias.
    pub dt_bias: bool,
    /// They have H rows, not HV.
    pub of_h: bool,
}

/// A random problem and its form.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Whose kernels compute it.
    pub operator: Operator,
    /// B
    pub batch: usize,
    /// T; 0 for a commit.
    pub tokens: usize,
    /// H
    pub heads: usize,
    /// HV / H
    pub ratio: usize,
    /// K = V
    pub dim: usize,
    /// Of the operator.
    pub gates: GateKind,
    /// Of KDA's gates.
    pub parameters: Parameters,
    /// Of q and k.
    pub magnitude: Magnitude,
    /// Gates at the ends of their range.
    pub extreme_gates: bool,
    /// Of slots.
    pub slots: SlotChoice,
    /// There are snapshots, of so many steps more than T.
    pub snapshots: Option<usize>,
    /// Rows of different lengths, up to T.
    pub packed: bool,
    /// There are T' previous tokens.
    pub previous: Option<usize>,
    /// Of the layer.
    pub options: RecurrentOptions,
    /// In memory.
    pub form: Form,
    /// Of the values.
    pub seed: u64,
}

impl Spec {
    /// An ordinary problem: two rows of three tokens, or of one to decode, gates computed in the kernel, dense, bf16
    /// but for the state.
    #[must_use]
    pub fn plain(family: Family) -> Self {
        Self {
            operator: family.operator,
            batch: 2,
            tokens: family.max_tokens().min(3),
            heads: 2,
            ratio: 2,
            dim: family.dim,
            gates: match family.operator {
                Operator::KdaRecurrent => GateKind::Kda(KdaDecay::Softplus, KdaBeta::Logit),
                _ => GateKind::Raw(BetaScale::One),
            },
            parameters: Parameters {
                a_log: true,
                dt_bias: true,
                of_h: false,
            },
            magnitude: Magnitude::Usual,
            extreme_gates: false,
            slots: SlotChoice::NONE,
            snapshots: None,
            packed: false,
            previous: None,
            options: RecurrentOptions {
                state_layout: family.layout,
                formulation: family.formulation,
                ..RecurrentOptions::default()
            },
            form: Form {
                state: family.state,
                qkvo: [DType::Bf16; 4],
                gates: [DType::Bf16; 2],
                ..Form::PLAIN
            },
            seed: 1,
        }
    }

    /// HV
    #[must_use]
    pub fn value_heads(&self) -> usize {
        self.heads * self.ratio
    }

    /// Laid out.
    #[must_use]
    pub fn case(&self) -> Case {
        self.problem().case(&self.form)
    }

    /// Its values. What no live row reads is NaN.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let (pool_slots, write_pool_slots) = self.pool_slots();
        let (packed, rows) = if self.packed {
            let (cu_seqlens, total) = self.draw_lengths(&mut rng);
            let max_tokens = self.tokens;
            (
                Some(Packed {
                    cu_seqlens,
                    max_tokens,
                }),
                [1, total],
            )
        } else {
            (None, [self.batch, self.tokens])
        };
        let slots = self.draw_slots(&mut rng);
        let (hv, dim) = (self.value_heads(), self.dim);
        let q = self.draw_qk(rows, &mut rng);
        let tokens = self.draw_tokens(rows, &mut rng);
        let previous = self.previous.map(|most| Kept {
            tokens: self.draw_tokens([self.batch, most], &mut rng),
            keep: self.draw_keep(most, &mut rng),
        });
        let states = |slots| [slots, hv, dim, dim];
        let mut problem = Problem {
            operator: self.operator,
            batch: self.batch,
            q,
            tokens,
            previous,
            gates: self.draw_parameters(&mut rng),
            pool: Array::new(&states(pool_slots), || unit(&mut rng)),
            write_pool: write_pool_slots.map(|slots| Array::new(&states(slots), || f32::NAN)),
            read_slots: slots.read,
            write_slots: slots.write,
            token_slots: slots.of_tokens,
            accepted: slots.accepted,
            snapshot_steps: self.snapshots.map(|more| self.tokens + more),
            packed,
            options: self.options,
        };
        problem.forget_the_unread();
        problem
    }

    /// P of the pool and of the write pool.
    pub(crate) fn pool_slots(&self) -> (usize, Option<usize>) {
        let slots = self.batch + self.slots.spare;
        (
            slots,
            self.slots
                .write_pool
                .map(|more| slots.saturating_add_signed(more).max(1)),
        )
    }

    /// `[rows, tokens, H, K]`
    fn draw_qk(&self, [rows, tokens]: [usize; 2], rng: &mut StdRng) -> Array {
        let size = match self.magnitude {
            Magnitude::Tiny => 1e-3 / (self.dim as f32).sqrt(),
            Magnitude::Large => 100.0,
            _ => 1.0,
        };
        let size = match self.options.qk_l2norm {
            true => size,
            false => size / (self.dim as f32).sqrt(),
        };
        let dims = [rows, tokens, self.heads, self.dim];
        let mut array = Array::new(&dims, || size * unit(rng));
        if matches!(self.magnitude, Magnitude::Zeros) {
            let heads = array.values.chunks_mut(self.dim);
            heads
                .filter(|_| rng.random())
                .for_each(|head| head.fill(0.0));
        }
        array
    }

    fn draw_tokens(&self, [rows, tokens]: [usize; 2], rng: &mut StdRng) -> Tokens<Array> {
        let (hv, dim) = (self.value_heads(), self.dim);
        let k = self.draw_qk([rows, tokens], rng);
        let v = Array::new(&[rows, tokens, hv, dim], || unit(rng));
        let (per_head, per_channel) = ([rows, tokens, hv], [rows, tokens, hv, dim]);
        let raw = ([-4.0, 4.0], &[1e4, -1e4][..]);
        let log_decay = ([-3.0, 0.0], &[0.0, -1e4][..]);
        let beta = ([0.0, 2.0], &[0.0, 1.0, 2.0][..]);
        let (gate_dims, gate, beta) = match self.gates {
            GateKind::Given => (&per_head[..], log_decay, beta),
            GateKind::Raw(_) => (&per_head[..], raw, raw),
            GateKind::Kda(decay, kind) => (
                &per_channel[..],
                if decay == KdaDecay::Log {
                    log_decay
                } else {
                    raw
                },
                if kind == KdaBeta::Given { beta } else { raw },
            ),
        };
        Tokens {
            k,
            v,
            gate: self.draw_gate(gate_dims, gate, rng),
            beta: self.draw_gate(&per_head, beta, rng),
        }
    }

    fn draw_gate(
        &self,
        dims: &[usize],
        (usual, ends): ([f32; 2], &[f32]),
        rng: &mut StdRng,
    ) -> Array {
        Array::new(dims, || match rng.random_range(0..4) {
            0 => rng.random_range(usual[0]..usual[1]),
            _ if !self.extreme_gates => rng.random_range(usual[0]..usual[1]),
            _ => ends[rng.random_range(0..ends.len())],
        })
    }

    /// A_log and dt_bias.
    fn draw_parameters(&self, rng: &mut StdRng) -> Gates<Array> {
        let Parameters {
            a_log,
            dt_bias,
            of_h,
        } = self.parameters;
        let heads = if of_h { self.heads } else { self.value_heads() };
        let (a_log, dt_bias) = match self.gates {
            GateKind::Given | GateKind::Kda(KdaDecay::Log, _) => (None, None),
            GateKind::Raw(_) => (
                Some(vec![self.value_heads()]),
                Some(vec![self.value_heads()]),
            ),
            GateKind::Kda(decay, _) => (
                (a_log || decay == KdaDecay::Softplus).then(|| vec![heads]),
                dt_bias.then(|| vec![heads, self.dim]),
            ),
        };
        let mut draw = |dims: Option<Vec<usize>>, usual, ends: &[f32]| {
            dims.map(|dims| self.draw_gate(&dims, (usual, ends), rng))
        };
        Gates {
            kind: self.gates,
            a_log: draw(a_log, [0.0, 16f32.ln()], &[100.0, -100.0]),
            dt_bias: draw(dt_bias, [-2.0, 1.0], &[0.0]),
        }
    }
}

impl Problem {
    /// What no live row reads becomes NaN.
    fn forget_the_unread(&mut self) {
        let rows = self.rows();
        let mut tokens = vec![false; self.q.dims[0] * self.q.dims[1]];
        let mut slots = vec![false; self.pool.dims[0]];
        let mut kept = vec![0; self.batch];
        for (b, row) in rows.iter().enumerate() {
            if let (Some(own), Some(live)) = (&row.tokens, &row.live) {
                tokens[own.clone()].fill(true);
                slots[live.start] = true;
                kept[b] = live.commit.map_or(0, |(keep, _)| keep);
            }
        }
        for i in (0..tokens.len()).filter(|&i| !tokens[i]) {
            self.q.entry_mut(2, i).fill(f32::NAN);
            for array in self.tokens.each_mut() {
                array.entry_mut(2, i).fill(f32::NAN);
            }
        }
        for i in (0..slots.len()).filter(|&i| !slots[i]) {
            self.pool.entry_mut(1, i).fill(f32::NAN);
        }
        if let Some(previous) = &mut self.previous {
            let most = previous.tokens.k.dims[1];
            for i in (0..self.batch * most).filter(|i| i % most >= kept[i / most]) {
                for array in previous.tokens.each_mut() {
                    array.entry_mut(2, i).fill(f32::NAN);
                }
            }
        }
    }
}

/// Around 0, of variance 1.
fn unit(rng: &mut StdRng) -> f32 {
    rng.random_range(-1.0..1.0) * 3f32.sqrt()
}

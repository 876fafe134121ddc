//! What a verify, a resume and a commit of either operator come down to.

use gated_delta_kernels::recurrent::{Gate, RecurrentConstants};

use super::gates::{GateParts, Gates};
use super::{Commit, Recurrent, RecurrentOptions, RecurrentParams};
use crate::Entry;
use crate::error::Error;
use crate::plan::Problem;
use crate::select::Operator;
use crate::shapes::{Named, named, optional};

/// Tensors of some tokens.
#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub k: Named<'a>,
    pub v: Named<'a>,
    pub gate: Named<'a>,
    pub beta: Named<'a>,
}

/// Tokens that are read from the state.
#[derive(Clone, Copy)]
pub(super) struct New<'a> {
    pub q: Named<'a>,
    pub tokens: Tokens<'a>,
    pub o: Named<'a>,
}

/// Tokens of which the first ones are committed.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    pub tokens: Tokens<'a>,
    pub keep: Named<'a>,
}

/// Most tensors of a launch.
pub(crate) const TENSORS: usize = 21;

/// See [`Request::switches`].
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Switches {
    options: RecurrentOptions,
    operator: Operator,
    gate: Gate,
    lower_bound: Option<f32>,
    beta_logit: bool,
    beta_scale: f32,
    max_tokens: usize,
    variant: Option<Entry>,
}

/// New tokens, previous ones or both, and where their states are.
pub(crate) struct Request<'a> {
    pub(super) new: Option<New<'a>>,
    pub(super) previous: Option<Kept<'a>>,
    pub(super) gates: GateParts<'a>,
    pub(super) pool: Named<'a>,
    pub(super) write_pool: Option<Named<'a>>,
    pub(super) read_slots: Option<Named<'a>>,
    pub(super) write_slots: Option<Named<'a>>,
    pub(super) token_slots: Option<Named<'a>>,
    pub(super) accepted: Option<Named<'a>>,
    pub(super) snapshots: Option<Named<'a>>,
    pub(super) cu_seqlens: Option<Named<'a>>,
    /// T where there are `cu_seqlens`.
    pub(super) max_tokens: usize,
    pub(super) options: &'a RecurrentOptions,
}

impl<G: Gates> Recurrent<'_, G> {
    pub(crate) fn request(&self) -> Request<'_> {
        let gates = self.gates.parts();
        let packed = self.packed.as_ref();
        Request {
            new: Some(New {
                q: named("q", &self.q),
                tokens: Tokens {
                    k: named("k", &self.k),
                    v: named("v", &self.v),
                    gate: gates.gate,
                    beta: gates.beta,
                },
                o: named("o", &self.o),
            }),
            previous: self.previous.as_ref().map(|previous| Kept {
                tokens: Tokens {
                    k: named("previous k", &previous.k),
                    v: named("previous v", &previous.v),
                    gate: named(gates.previous_names[0], &previous.gate),
                    beta: named(gates.previous_names[1], &previous.beta),
                },
                keep: named("keep", &previous.keep),
            }),
            gates,
            pool: named("state", &self.pool),
            write_pool: optional("write state", &self.write_pool),
            read_slots: optional("read_slots", &self.read_slots),
            write_slots: optional("write_slots", &self.write_slots),
            token_slots: optional("token_slots", &self.token_slots),
            accepted: optional("accepted", &self.accepted),
            snapshots: optional("snapshots", &self.snapshots),
            cu_seqlens: packed.map(|packed| named("cu_seqlens", &packed.cu_seqlens)),
            max_tokens: packed.map_or(0, |packed| packed.max_tokens),
            options: &self.options,
        }
    }
}

impl<G: Gates> Commit<'_, G> {
    pub(crate) fn request(&self) -> Request<'_> {
        let gates = self.gates.parts();
        Request {
            new: None,
            previous: Some(Kept {
                tokens: Tokens {
                    k: named("k", &self.k),
                    v: named("v", &self.v),
                    gate: gates.gate,
                    beta: gates.beta,
                },
                keep: named("keep", &self.keep),
            }),
            gates,
            pool: named("state", &self.pool),
            write_pool: optional("write state", &self.write_pool),
            read_slots: optional("read_slots", &self.read_slots),
            write_slots: optional("write_slots", &self.write_slots),
            token_slots: None,
            accepted: None,
            snapshots: None,
            cu_seqlens: None,
            max_tokens: 0,
            options: &self.options,
        }
    }
}

impl<'a> Request<'a> {
    /// B; the check has seen every rank.
    pub fn batch(&self) -> u32 {
        let rows = match (self.cu_seqlens, self.new, self.previous) {
            (Some(cu_seqlens), ..) => cu_seqlens.tensor.dims()[0].saturating_sub(1),
            (None, Some(new), _) => new.q.tensor.dims()[0],
            (None, None, Some(previous)) => previous.tokens.k.tensor.dims()[0],
            (None, None, None) => 0,
        };
        rows as u32
    }

    /// Tokens of the `[1, total, …]` tensors, where there are `cu_seqlens`.
    pub(super) fn total(&self) -> Option<usize> {
        let q = self.new?.q.tensor;
        self.cu_seqlens.and(q.dims().get(1).copied())
    }

    /// The pool that is written.
    fn written_pool(&self) -> Named<'a> {
        self.write_pool.unwrap_or(self.pool)
    }

    /// All but the tensors that [`Request::check`] and the choice of a variant look at.
    pub(super) fn switches(&self, variant: Option<Entry>) -> Switches {
        let gates = &self.gates;
        Switches {
            options: *self.options,
            operator: gates.operator,
            gate: gates.kind,
            lower_bound: gates.lower_bound,
            beta_logit: gates.beta_logit,
            beta_scale: gates.beta_scale,
            max_tokens: self.max_tokens,
            variant,
        }
    }

    /// Every tensor under its name, where there is one.
    pub fn tensors(&self) -> [Option<Named<'a>>; TENSORS] {
        let new = self.new.as_ref();
        let previous = self.previous.as_ref();
        [
            new.map(|new| new.tokens.k),
            new.map(|new| new.tokens.v),
            new.map(|new| new.tokens.gate),
            new.map(|new| new.tokens.beta),
            previous.map(|previous| previous.tokens.k),
            previous.map(|previous| previous.tokens.v),
            previous.map(|previous| previous.tokens.gate),
            previous.map(|previous| previous.tokens.beta),
            new.map(|new| new.q),
            new.map(|new| new.o),
            previous.map(|previous| previous.keep),
            self.gates.a_log,
            self.gates.dt_bias,
            Some(self.pool),
            self.write_pool,
            self.read_slots,
            self.write_slots,
            self.token_slots,
            self.accepted,
            self.snapshots,
            self.cu_seqlens,
        ]
    }

    /// Whether the tensor of this name is written.
    pub(crate) fn writes(&self, problem: &Problem<RecurrentConstants>, name: &str) -> bool {
        match name {
            "o" | "snapshots" => true,
            "state" | "write state" => {
                let pool = problem.writes_final() || self.token_slots.is_some();
                pool && name == self.written_pool().name
            }
            _ => false,
        }
    }

    /// The variant that a launch takes.
    pub(super) fn selected(&self) -> Result<Entry, Error> {
        self.check()?.entry(self.batch())
    }

    /// Bytes that a launch must move where every row is active and full.
    pub(super) fn bytes(&self) -> Result<u64, Error> {
        let problem = self.check()?;
        let rows = u64::from(self.batch());
        let tokens = match self.total() {
            Some(total) => total as u64,
            None => rows * u64::from(problem.constants.tokens),
        };
        let of_each_token = [self.snapshots, self.token_slots];
        let written = if problem.writes_final() { rows } else { 0 }
            + tokens * of_each_token.into_iter().flatten().count() as u64;
        let others: u64 = self
            .tensors()
            .into_iter()
            .flatten()
            .filter(|named| !matches!(named.name, "state" | "write state" | "snapshots"))
            .map(|named| {
                let elements: usize = named.tensor.dims().iter().product();
                (elements * named.tensor.dtype().size_of()) as u64
            })
            .sum();
        let states = (rows + written).saturating_mul(problem.state_bytes());
        Ok(states.saturating_add(others))
    }

    /// Addresses and sizes, as a launch takes them.
    pub(crate) fn params(&self) -> RecurrentParams {
        let address = |named: Option<Named<'_>>| named.map_or(0, |named| named.tensor.address());
        let slots = |named: Named<'_>| named.tensor.dims().first().map_or(0, |&slots| slots as u32);
        let new = self.new.map(|new| new.tokens);
        let previous = self.previous.map(|previous| previous.tokens);
        RecurrentParams {
            q: address(self.new.map(|new| new.q)),
            k: address(new.map(|tokens| tokens.k)),
            v: address(new.map(|tokens| tokens.v)),
            g: address(new.map(|tokens| tokens.gate)),
            b: address(new.map(|tokens| tokens.beta)),
            o: address(self.new.map(|new| new.o)),
            previous_k: address(previous.map(|tokens| tokens.k)),
            previous_v: address(previous.map(|tokens| tokens.v)),
            previous_g: address(previous.map(|tokens| tokens.gate)),
            previous_b: address(previous.map(|tokens| tokens.beta)),
            keep: address(self.previous.map(|previous| previous.keep)),
            a_log: address(self.gates.a_log),
            dt_bias: address(self.gates.dt_bias),
            read_pool: self.pool.tensor.address(),
            write_pool: self.written_pool().tensor.address(),
            snapshots: address(self.snapshots),
            read_slots: address(self.read_slots),
            write_slots: address(self.write_slots),
            token_slots: address(self.token_slots),
            accepted: address(self.accepted),
            cu_seqlens: address(self.cu_seqlens),
            read_pool_slots: slots(self.pool),
            write_pool_slots: slots(self.written_pool()),
            total_tokens: self.total().unwrap_or(0) as u32,
            reserved: 0,
        }
    }
}

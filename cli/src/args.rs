//! The library's arguments of a problem, whatever its operator.

use gated_delta::Tensor;
use gated_delta::ops::GdnGates;
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::kda_recurrent::{self, KdaGates};
use gated_delta::ops::recurrent::{Commit, Gates, Packed, Previous, Recurrent, RecurrentOptions};
use gated_delta_harness::args::Args;

use crate::operation::{GdnGate, KdaDecay, KdaGate, Operation};
use crate::problem::{Problem, Views};

impl Problem {
    /// The library's arguments, from views of the problem's tensors.
    ///
    /// # Errors
    /// [`gated_delta::Error::MissingTensor`]; [`gated_delta::Error::Contradiction`] for tensors of other gates, and for
    /// new tokens in a commit.
    pub fn args<'a>(&self, views: &Views<'a>) -> Result<Args<'a>, gated_delta::Error> {
        self.check_excluded()?;
        let tensors = Tensors {
            problem: self,
            views,
        };
        let gates = if self.is_commit() {
            self.operation.previous_gates()
        } else {
            self.operation.token_gates()
        };
        Ok(match self.operation {
            Operation::GdnDecode(gate) => {
                Args::GdnDecode(tensors.decode(tensors.gdn(gate, gates)?)?)
            }
            Operation::GdnMtp(gate) => {
                let gates = tensors.gdn(gate, gates)?;
                if self.is_commit() {
                    Args::GdnCommit(tensors.commit(gates)?)
                } else {
                    Args::GdnMtp(tensors.recurrent(gates)?)
                }
            }
            Operation::KdaRecurrent(gate) => {
                let gates = tensors.kda(gate, gates)?;
                if self.is_commit() {
                    Args::KdaCommit(tensors.commit(gates)?)
                } else {
                    Args::KdaRecurrent(tensors.recurrent(gates)?)
                }
            }
        })
    }
}

/// A problem's views, by name.
struct Tensors<'p, 'a> {
    problem: &'p Problem,
    views: &'p Views<'a>,
}

impl<'a> Tensors<'_, 'a> {
    fn optional(&self, name: &str) -> Option<Tensor<'a>> {
        self.views.get(name).copied()
    }

    fn needed(&self, name: &'static str) -> Result<Tensor<'a>, gated_delta::Error> {
        self.optional(name)
            .ok_or_else(|| self.problem.missing(name))
    }

    fn gdn(
        &self,
        gate: GdnGate,
        [first, second]: [&'static str; 2],
    ) -> Result<GdnGates<'a>, gated_delta::Error> {
        Ok(match gate {
            GdnGate::Raw(beta_scale) => GdnGates::Raw {
                a: self.needed(first)?,
                b: self.needed(second)?,
                a_log: self.needed("A_log")?,
                dt_bias: self.needed("dt_bias")?,
                beta_scale,
            },
            GdnGate::Given => GdnGates::Given {
                g: self.needed(first)?,
                beta: self.needed(second)?,
            },
        })
    }

    fn kda(
        &self,
        gate: KdaGate,
        [g, beta]: [&'static str; 2],
    ) -> Result<KdaGates<'a>, gated_delta::Error> {
        Ok(KdaGates {
            g: self.needed(g)?,
            kind: match gate.decay {
                KdaDecay::Log => kda_recurrent::KdaGate::Log,
                KdaDecay::Softplus => kda_recurrent::KdaGate::Softplus {
                    a_log: self.needed("A_log")?,
                    dt_bias: self.optional("dt_bias"),
                },
                KdaDecay::LowerBound(lower_bound) => kda_recurrent::KdaGate::LowerBound {
                    lower_bound,
                    a_log: self.optional("A_log"),
                    dt_bias: self.optional("dt_bias"),
                },
            },
            beta: self.needed(beta)?,
            beta_kind: gate.beta,
        })
    }

    fn decode(&self, gates: GdnGates<'a>) -> Result<GdnDecode<'a>, gated_delta::Error> {
        let RecurrentOptions {
            state_layout,
            head_map,
            qk_l2norm,
            scale,
            null_slot,
            update_state,
            formulation: _,
        } = self.problem.options;
        Ok(GdnDecode {
            q: self.needed("q")?,
            k: self.needed("k")?,
            v: self.needed("v")?,
            gates,
            o: self.needed("o")?,
            pool: self.needed("state")?,
            write_pool: None,
            read_slots: self.optional("read_slots"),
            write_slots: self.optional("write_slots"),
            options: GdnDecodeOptions {
                state_layout,
                head_map,
                qk_l2norm,
                scale,
                null_slot,
                update_state,
            },
        })
    }

    fn recurrent<G: Gates>(&self, gates: G) -> Result<Recurrent<'a, G>, gated_delta::Error> {
        let packed = self.optional("cu_seqlens").map(|cu_seqlens| Packed {
            cu_seqlens,
            max_tokens: self.problem.max_tokens(),
        });
        let previous = if self.problem.has_previous() {
            let [gate, beta] = self.problem.operation.previous_gates();
            Some(Previous {
                k: self.needed("prev.k")?,
                v: self.needed("prev.v")?,
                gate: self.needed(gate)?,
                beta: self.needed(beta)?,
                keep: self.needed("keep")?,
            })
        } else {
            None
        };
        Ok(Recurrent {
            q: self.needed("q")?,
            k: self.needed("k")?,
            v: self.needed("v")?,
            gates,
            o: self.needed("o")?,
            pool: self.needed("state")?,
            write_pool: None,
            read_slots: self.optional("read_slots"),
            write_slots: self.optional("write_slots"),
            token_slots: self.optional("token_slots"),
            accepted: self.optional("accepted"),
            snapshots: self.optional("snapshots"),
            packed,
            previous,
            options: self.problem.options,
        })
    }

    fn commit<G: Gates>(&self, gates: G) -> Result<Commit<'a, G>, gated_delta::Error> {
        Ok(Commit {
            k: self.needed("prev.k")?,
            v: self.needed("prev.v")?,
            gates,
            keep: self.needed("keep")?,
            pool: self.needed("state")?,
            write_pool: None,
            read_slots: self.optional("read_slots"),
            write_slots: self.optional("write_slots"),
            options: self.problem.options,
        })
    }
}

//! The library's arguments of a problem, whatever its operator.

use gated_delta::ops::GdnGates;
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::gdn_mtp::{GdnCommit, GdnMtp};
use gated_delta::ops::kda_recurrent::{self, KdaCommit, KdaGates, KdaRecurrent};
use gated_delta::ops::recurrent::{Commit, Gates, Packed, Previous, Recurrent, RecurrentOptions};
use gated_delta::{Entry, KernelResources, Library, StreamRef, Tensor};

use crate::operation::{GdnGate, KdaDecay, KdaGate, Operation};
use crate::problem::{Problem, Views};

/// Arguments of a launch.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, a handful of them at a time"
)]
#[derive(Clone, Copy, Debug)]
pub enum Args<'a> {
    /// One token per row.
    GdnDecode(GdnDecode<'a>),
    /// Tokens of each row; perhaps previous ones first.
    GdnMtp(GdnMtp<'a>),
    /// Previous tokens alone.
    GdnCommit(GdnCommit<'a>),
    /// Tokens of each row; perhaps previous ones first.
    KdaRecurrent(KdaRecurrent<'a>),
    /// Previous tokens alone.
    KdaCommit(KdaCommit<'a>),
}

/// `$body` for whatever the arguments are of.
macro_rules! each {
    ($self:expr, $args:ident => $body:expr) => {
        match $self {
            Args::GdnDecode($args) => $body,
            Args::GdnMtp($args) => $body,
            Args::GdnCommit($args) => $body,
            Args::KdaRecurrent($args) => $body,
            Args::KdaCommit($args) => $body,
        }
    };
}

impl Args<'_> {
    /// The variant that the library selects.
    ///
    /// # Errors
    /// Whatever the arguments break of the operator's rules.
    pub fn selected(&self) -> Result<Entry, gated_delta::Error> {
        each!(self, args => args.selected())
    }

    /// Bytes that a launch must move where every row is active and full.
    ///
    /// # Errors
    /// As [`Args::selected`]'s.
    pub fn bytes(&self) -> Result<u64, gated_delta::Error> {
        each!(self, args => args.bytes())
    }

    /// Registers and memory of the variants that compute the arguments, compiled for them; those of a commit are those
    /// of its operator's other launches.
    ///
    /// # Errors
    /// As [`Args::selected`]'s; what the driver finds.
    pub fn resources(
        &self,
        library: &Library,
    ) -> Result<Vec<(Entry, KernelResources)>, gated_delta::Error> {
        match self {
            Self::GdnDecode(args) => library.gdn_decode_resources(args),
            Self::GdnMtp(args) => library.gdn_mtp_resources(args),
            Self::KdaRecurrent(args) => library.kda_recurrent_resources(args),
            Self::GdnCommit(_) | Self::KdaCommit(_) => Ok(Vec::new()),
        }
    }

    /// Enqueues a launch of that variant.
    ///
    /// # Errors
    /// As [`Args::selected`]'s; a variant of another kind; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, what is written is used by nobody else, and no two
    /// live rows write one slot.
    pub unsafe fn launch(
        &self,
        library: &Library,
        stream: StreamRef<'_>,
        variant: Entry,
    ) -> Result<(), gated_delta::Error> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::GdnDecode(args) => library.gdn_decode_with(stream, args, variant),
                Self::GdnMtp(args) => library.gdn_mtp_with(stream, args, variant),
                Self::GdnCommit(args) => library.gdn_commit_with(stream, args, variant),
                Self::KdaRecurrent(args) => library.kda_recurrent_with(stream, args, variant),
                Self::KdaCommit(args) => library.kda_commit_with(stream, args, variant),
            }
        }
    }
}

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

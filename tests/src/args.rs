//! The arguments of a case, whichever its operator.

use gated_delta::ops::GdnGates;
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions, GdnDecodePlan};
use gated_delta::ops::gdn_mtp::{GdnCommit, GdnMtp};
use gated_delta::ops::kda_recurrent::{KdaCommit, KdaGate, KdaGates, KdaRecurrent};
use gated_delta::ops::recurrent::{Commit, Packed, Previous, Recurrent, RecurrentPlan};
use gated_delta::{Entry, Error, Library, StreamRef, Tensor};

use crate::buffer::View;
use crate::case::Case;
use crate::problem::{self, GateKind, Gates, KdaDecay, Operator, Tokens};

/// Arguments of any operator.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, of which a test has one at a time"
)]
#[derive(Clone, Copy, Debug)]
pub enum Args<'a> {
    /// Of [`Library::gdn_decode`].
    GdnDecode(GdnDecode<'a>),
    /// Of [`Library::gdn_mtp`].
    GdnMtp(GdnMtp<'a>),
    /// Of [`Library::gdn_commit`].
    GdnCommit(GdnCommit<'a>),
    /// Of [`Library::kda_recurrent`].
    KdaRecurrent(KdaRecurrent<'a>),
    /// Of [`Library::kda_commit`].
    KdaCommit(KdaCommit<'a>),
}

/// A plan of any operator.
pub enum Plan {
    /// Of a decode.
    Decode(GdnDecodePlan),
    /// Of anything else.
    Recurrent(RecurrentPlan),
}

macro_rules! each {
    ($args:expr, $one:ident => $result:expr) => {
        match $args {
            Args::GdnDecode($one) => $result,
            Args::GdnMtp($one) => $result,
            Args::GdnCommit($one) => $result,
            Args::KdaRecurrent($one) => $result,
            Args::KdaCommit($one) => $result,
        }
    };
}

impl Args<'_> {
    /// Enqueues the launch, with the variant that the library selects or with `variant`.
    ///
    /// # Errors
    /// The operator's.
    ///
    /// # Safety
    /// The operator's.
    pub unsafe fn launch(
        &self,
        library: &Library,
        stream: StreamRef<'_>,
        variant: Option<Entry>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe {
            match (self, variant) {
                (Self::GdnDecode(args), None) => library.gdn_decode(stream, args),
                (Self::GdnDecode(args), Some(entry)) => {
                    library.gdn_decode_with(stream, args, entry)
                }
                (Self::GdnMtp(args), None) => library.gdn_mtp(stream, args),
                (Self::GdnMtp(args), Some(entry)) => library.gdn_mtp_with(stream, args, entry),
                (Self::GdnCommit(args), None) => library.gdn_commit(stream, args),
                (Self::GdnCommit(args), Some(entry)) => {
                    library.gdn_commit_with(stream, args, entry)
                }
                (Self::KdaRecurrent(args), None) => library.kda_recurrent(stream, args),
                (Self::KdaRecurrent(args), Some(entry)) => {
                    library.kda_recurrent_with(stream, args, entry)
                }
                (Self::KdaCommit(args), None) => library.kda_commit(stream, args),
                (Self::KdaCommit(args), Some(entry)) => {
                    library.kda_commit_with(stream, args, entry)
                }
            }
        }
    }

    /// Compiles the kernels.
    ///
    /// # Errors
    /// The operator's.
    pub fn prewarm(&self, library: &Library) -> Result<(), Error> {
        match self {
            Self::GdnDecode(args) => library.prewarm_gdn_decode(args),
            Self::GdnMtp(args) => library.prewarm_gdn_mtp(args),
            Self::GdnCommit(args) => library.prewarm_gdn_commit(args),
            Self::KdaRecurrent(args) => library.prewarm_kda_recurrent(args),
            Self::KdaCommit(args) => library.prewarm_kda_commit(args),
        }
    }

    /// Makes a plan.
    ///
    /// # Errors
    /// The operator's.
    pub fn plan(&self, library: &Library) -> Result<Plan, Error> {
        Ok(match self {
            Self::GdnDecode(args) => Plan::Decode(library.plan_gdn_decode(args)?),
            Self::GdnMtp(args) => Plan::Recurrent(library.plan_gdn_mtp(args)?),
            Self::GdnCommit(args) => Plan::Recurrent(library.plan_gdn_commit(args)?),
            Self::KdaRecurrent(args) => Plan::Recurrent(library.plan_kda_recurrent(args)?),
            Self::KdaCommit(args) => Plan::Recurrent(library.plan_kda_commit(args)?),
        })
    }

    /// The compiled variants.
    ///
    /// # Errors
    /// The operator's.
    pub fn variants(&self) -> Result<Vec<Entry>, Error> {
        each!(self, args => args.variants())
    }

    /// The selected variant.
    ///
    /// # Errors
    /// The operator's.
    pub fn selected(&self) -> Result<Entry, Error> {
        each!(self, args => args.selected())
    }

    /// Bytes that a launch must move.
    ///
    /// # Errors
    /// The operator's.
    pub fn bytes(&self) -> Result<u64, Error> {
        each!(self, args => args.bytes())
    }
}

impl Plan {
    /// Enqueues the planned launch on the addresses of `args`.
    ///
    /// # Errors
    /// The plan's.
    ///
    /// # Safety
    /// The plan's; it is a plan of such arguments.
    ///
    /// # Panics
    /// Where it is a plan of another operator.
    pub unsafe fn launch(
        &self,
        stream: StreamRef<'_>,
        batch: usize,
        args: &Args<'_>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe {
            match (self, args) {
                (Self::Decode(plan), Args::GdnDecode(args)) => {
                    plan.launch(stream, batch, &args.params())
                }
                (Self::Recurrent(plan), Args::GdnMtp(args)) => {
                    plan.launch(stream, batch, &args.params())
                }
                (Self::Recurrent(plan), Args::GdnCommit(args)) => {
                    plan.launch(stream, batch, &args.params())
                }
                (Self::Recurrent(plan), Args::KdaRecurrent(args)) => {
                    plan.launch(stream, batch, &args.params())
                }
                (Self::Recurrent(plan), Args::KdaCommit(args)) => {
                    plan.launch(stream, batch, &args.params())
                }
                _ => panic!("a plan of another operator"),
            }
        }
    }
}

impl Case {
    /// The arguments, given all elements of every buffer.
    ///
    /// # Errors
    /// Where a view leaves its buffer.
    ///
    /// # Panics
    /// Where the gates are not the operator's.
    pub fn args<'a>(&self, bases: &[Tensor<'a>]) -> Result<Args<'a>, Error> {
        let parameter = |view: &Option<View>| optional(view, bases);
        let gates = Gates {
            kind: self.gates.kind,
            a_log: parameter(&self.gates.a_log)?,
            dt_bias: parameter(&self.gates.dt_bias)?,
        };
        let tokens = match &self.previous {
            Some(previous) if self.is_commit() => &previous.tokens,
            _ => &self.tokens,
        };
        let tokens = of(tokens, bases)?;
        match (self.operator, self.is_commit()) {
            (Operator::GdnDecode, _) => self.decode(bases, gdn(tokens, gates)).map(Args::GdnDecode),
            (Operator::GdnMtp, false) => self
                .recurrent(bases, tokens, gdn(tokens, gates))
                .map(Args::GdnMtp),
            (Operator::GdnMtp, true) => self
                .commit(bases, tokens, gdn(tokens, gates))
                .map(Args::GdnCommit),
            (Operator::KdaRecurrent, false) => self
                .recurrent(bases, tokens, kda(tokens, gates))
                .map(Args::KdaRecurrent),
            (Operator::KdaRecurrent, true) => self
                .commit(bases, tokens, kda(tokens, gates))
                .map(Args::KdaCommit),
        }
    }

    fn decode<'a>(
        &self,
        bases: &[Tensor<'a>],
        gates: GdnGates<'a>,
    ) -> Result<GdnDecode<'a>, Error> {
        let options = self.options;
        Ok(GdnDecode {
            q: self.q.of(bases)?,
            k: self.tokens.k.of(bases)?,
            v: self.tokens.v.of(bases)?,
            gates,
            o: self.o.of(bases)?,
            pool: self.pool.of(bases)?,
            write_pool: optional(&self.write_pool, bases)?,
            read_slots: optional(&self.read_slots, bases)?,
            write_slots: optional(&self.write_slots, bases)?,
            options: GdnDecodeOptions {
                state_layout: options.state_layout,
                head_map: options.head_map,
                qk_l2norm: options.qk_l2norm,
                scale: options.scale,
                null_slot: options.null_slot,
                update_state: options.update_state,
            },
        })
    }

    fn recurrent<'a, G>(
        &self,
        bases: &[Tensor<'a>],
        tokens: Tokens<Tensor<'a>>,
        gates: G,
    ) -> Result<Recurrent<'a, G>, Error> {
        let packed = |packed: &problem::Packed<View>| {
            Ok::<_, Error>(Packed {
                cu_seqlens: packed.cu_seqlens.of(bases)?,
                max_tokens: packed.max_tokens,
            })
        };
        let previous = |previous: &problem::Kept<View, View>| {
            let Tokens { k, v, gate, beta } = of(&previous.tokens, bases)?;
            let keep = previous.keep.of(bases)?;
            Ok::<_, Error>(Previous {
                k,
                v,
                gate,
                beta,
                keep,
            })
        };
        Ok(Recurrent {
            q: self.q.of(bases)?,
            k: tokens.k,
            v: tokens.v,
            gates,
            o: self.o.of(bases)?,
            pool: self.pool.of(bases)?,
            write_pool: optional(&self.write_pool, bases)?,
            read_slots: optional(&self.read_slots, bases)?,
            write_slots: optional(&self.write_slots, bases)?,
            token_slots: optional(&self.token_slots, bases)?,
            accepted: optional(&self.accepted, bases)?,
            snapshots: optional(&self.snapshots, bases)?,
            packed: self.packed.as_ref().map(packed).transpose()?,
            previous: self.previous.as_ref().map(previous).transpose()?,
            options: self.options,
        })
    }

    fn commit<'a, G>(
        &self,
        bases: &[Tensor<'a>],
        tokens: Tokens<Tensor<'a>>,
        gates: G,
    ) -> Result<Commit<'a, G>, Error> {
        let previous = self
            .previous
            .as_ref()
            .expect("a commit has previous tokens");
        Ok(Commit {
            k: tokens.k,
            v: tokens.v,
            gates,
            keep: previous.keep.of(bases)?,
            pool: self.pool.of(bases)?,
            write_pool: optional(&self.write_pool, bases)?,
            read_slots: optional(&self.read_slots, bases)?,
            write_slots: optional(&self.write_slots, bases)?,
            options: self.options,
        })
    }
}

fn optional<'a>(view: &Option<View>, bases: &[Tensor<'a>]) -> Result<Option<Tensor<'a>>, Error> {
    view.as_ref().map(|view| view.of(bases)).transpose()
}

fn of<'a>(tokens: &Tokens<View>, bases: &[Tensor<'a>]) -> Result<Tokens<Tensor<'a>>, Error> {
    Ok(Tokens {
        k: tokens.k.of(bases)?,
        v: tokens.v.of(bases)?,
        gate: tokens.gate.of(bases)?,
        beta: tokens.beta.of(bases)?,
    })
}

fn gdn<'a>(tokens: Tokens<Tensor<'a>>, gates: Gates<Tensor<'a>>) -> GdnGates<'a> {
    match gates {
        Gates {
            kind: GateKind::Raw(beta_scale),
            a_log: Some(a_log),
            dt_bias: Some(dt_bias),
        } => GdnGates::Raw {
            a: tokens.gate,
            b: tokens.beta,
            a_log,
            dt_bias,
            beta_scale,
        },
        Gates {
            kind: GateKind::Given,
            ..
        } => GdnGates::Given {
            g: tokens.gate,
            beta: tokens.beta,
        },
        gates => panic!("no gates of GDN: {gates:?}"),
    }
}

fn kda<'a>(tokens: Tokens<Tensor<'a>>, gates: Gates<Tensor<'a>>) -> KdaGates<'a> {
    let GateKind::Kda(decay, beta_kind) = gates.kind else {
        panic!("no gates of KDA: {gates:?}")
    };
    let (a_log, dt_bias) = (gates.a_log, gates.dt_bias);
    let kind = match (decay, a_log) {
        (KdaDecay::Log, _) => KdaGate::Log,
        (KdaDecay::Softplus, Some(a_log)) => KdaGate::Softplus { a_log, dt_bias },
        (KdaDecay::Softplus, None) => panic!("softplus wants A_log"),
        (KdaDecay::LowerBound(lower_bound), a_log) => KdaGate::LowerBound {
            lower_bound,
            a_log,
            dt_bias,
        },
    };
    KdaGates {
        g: tokens.gate,
        kind,
        beta: tokens.beta,
        beta_kind,
    }
}

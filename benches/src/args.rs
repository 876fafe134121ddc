//! A launch of any operator.

use gated_delta::ops::gdn_decode::GdnDecode;
use gated_delta::ops::gdn_mtp::{GdnCommit, GdnMtp};
use gated_delta::ops::kda_recurrent::{KdaCommit, KdaRecurrent};
use gated_delta::{Entry, Error, Library, StreamRef};

/// Arguments of a launch.
#[allow(
    clippy::large_enum_variant,
    reason = "made once a launch and matched at once"
)]
pub enum Args<'a> {
    /// One token of GDN.
    GdnDecode(GdnDecode<'a>),
    /// Tokens of GDN.
    GdnMtp(GdnMtp<'a>),
    /// A commit of GDN.
    GdnCommit(GdnCommit<'a>),
    /// Tokens of KDA.
    KdaRecurrent(KdaRecurrent<'a>),
    /// A commit of KDA.
    KdaCommit(KdaCommit<'a>),
}

macro_rules! each {
    ($args:expr, $inner:ident => $body:expr) => {
        match $args {
            Args::GdnDecode($inner) => $body,
            Args::GdnMtp($inner) => $body,
            Args::GdnCommit($inner) => $body,
            Args::KdaRecurrent($inner) => $body,
            Args::KdaCommit($inner) => $body,
        }
    };
}

impl Args<'_> {
    /// Every variant that computes them.
    pub fn variants(&self) -> Result<Vec<Entry>, Error> {
        each!(self, args => args.variants())
    }

    /// The variant that a launch takes.
    pub fn selected(&self) -> Result<Entry, Error> {
        each!(self, args => args.selected())
    }

    /// Bytes that a launch must move.
    pub fn bytes(&self) -> Result<u64, Error> {
        each!(self, args => args.bytes())
    }

    /// Enqueues `variant`.
    ///
    /// # Safety
    /// The tensors stay valid, and what is written is used by nobody else, until `stream` has passed the launch.
    pub unsafe fn launch(
        &self,
        library: &Library,
        stream: StreamRef<'_>,
        variant: Entry,
    ) -> Result<(), Error> {
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

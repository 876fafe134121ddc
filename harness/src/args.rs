//! Arguments of any operator.

use gated_delta::ops::gdn_decode::GdnDecode;
use gated_delta::ops::gdn_mtp::{GdnCommit, GdnMtp};
use gated_delta::ops::kda_recurrent::{KdaCommit, KdaRecurrent};
use gated_delta::{Entry, Error, KernelResources, Library, StreamRef};

/// Arguments of a launch.
#[allow(
    clippy::large_enum_variant,
    reason = "borrowed views, a handful of them at a time"
)]
#[derive(Clone, Copy, Debug)]
pub enum Args<'a> {
    /// GDN, one token per row.
    GdnDecode(GdnDecode<'a>),
    /// GDN, tokens of each row; perhaps previous ones first.
    GdnMtp(GdnMtp<'a>),
    /// GDN, previous tokens alone.
    GdnCommit(GdnCommit<'a>),
    /// KDA, tokens of each row; perhaps previous ones first.
    KdaRecurrent(KdaRecurrent<'a>),
    /// KDA, previous tokens alone.
    KdaCommit(KdaCommit<'a>),
}

/// `$body` for whatever the arguments are of.
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
    ///
    /// # Errors
    /// Whatever the arguments break of the operator's rules.
    pub fn variants(&self) -> Result<Vec<Entry>, Error> {
        each!(self, args => args.variants())
    }

    /// The variant that a launch takes.
    ///
    /// # Errors
    /// As [`Args::variants`]'s.
    pub fn selected(&self) -> Result<Entry, Error> {
        each!(self, args => args.selected())
    }

    /// Bytes that a launch must move where every row is active and full.
    ///
    /// # Errors
    /// As [`Args::variants`]'s.
    pub fn bytes(&self) -> Result<u64, Error> {
        each!(self, args => args.bytes())
    }

    /// Registers and memory of the variants that compute the arguments, compiled for them; those of a commit are those
    /// of its operator's other launches.
    ///
    /// # Errors
    /// As [`Args::variants`]'s; what the driver finds.
    pub fn resources(&self, library: &Library) -> Result<Vec<(Entry, KernelResources)>, Error> {
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
    /// As [`Args::variants`]'s; a variant of another kind; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, what is written is used by nobody else, and no two
    /// live rows write one slot.
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

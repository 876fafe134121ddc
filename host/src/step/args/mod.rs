//! The arguments of a launch, as a caller builds them.

pub(super) mod gates;
pub(super) mod layer;
pub(super) mod options;
pub mod pending;
pub(super) mod states;
pub(super) mod step;

pub use gates::{BetaScale, Gates, GdnGates, KdaBeta, KdaDecay, KdaGates, Operator};
pub use layer::{Activation, Convolution, Norm};
pub use options::{Formulation, HeadMap, Options, StateLayout};
pub use pending::{Flush, MAX_PENDING, MAX_PENDING_DRAFTS, Pending};
pub use states::{PerToken, ReadOnly, States, Update};
pub use step::{
    Checkpoints, Commit, Gdn, GdnCommit, Inputs, Kda, KdaCommit, MAX_TOKENS, Packed, Previous,
    Step, Stored,
};

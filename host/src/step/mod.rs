//! A step of a layer: the new tokens of every sequence, the states that they start from, and the places to write their states to.
//!
//! [`Gdn`] and [`Kda`] are the steps of the two kinds of layer. [`GdnCommit`] and [`KdaCommit`] advance states and have no output. A decode
//! is a step of one token. T and the options decide which kernels compute a step, unless a [`Formulation`] is named.
//!
//! | states | start and end of a row's state |
//! |---|---|
//! | [`States::update`] | row b starts from slot b; its state after the last token is written back to slot b |
//! | `.slots`, `.write_slots`, `.write_pool` | as above, with other slots, or another pool to write |
//! | [`States::read_only`] | no state is written |
//! | [`States::per_token`] | the row starts from one of its token slots; the state after each token is written to its own slot |
//!
//! | option of a step | effect |
//! |---|---|
//! | [`Step::snapshots`] | the state after every token is also written to a separate tensor |
//! | [`Step::packed`] | rows have different lengths, and their tokens are concatenated |
//! | [`Step::previous`] | the accepted tokens of the last step are committed before the new tokens are verified: a *resume* |
//! | [`Inputs::conv`] | q, k and v are computed from the layer's projection by its short convolution |
//! | [`Step::norm`] | the outputs pass an RMS norm and are gated by z |
//! | [`Step::fresh`] | some rows start from a state of zeros, whatever their slots hold |
//! | [`Step::pending`] | deferred write-back: recent tokens stay in a ring, and a decode writes a state once in eight steps |
//!
//! Each of these options except the last works with any T and with every way of keeping states. A convolution's windows are kept
//! in the same way as the states: see [`Convolution`].
//!
//! A *prefill* is a step whose rows may have more than 16 tokens. It requires [`States::update`], and takes no snapshots and no
//! previous tokens. Three options belong to prefills alone. Each of them makes a step a prefill:
//!
//! | option of a prefill | effect |
//! |---|---|
//! | [`Step::positions`] | the number of tokens of the sequence before each row |
//! | [`Step::checkpoints`] | the state (and window) after every `every` tokens is written to its own slot, for prefix caching |
//! | [`Step::workspace`] | scratch memory, needed by rows of more than 64 tokens (on GPUs other than Hopper: of more than one) |
//!
//! After a verify that wrote no state, an engine continues in one of two ways. A [`Commit`] replays the accepted tokens into the
//! pool. Or the next step is a resume, which reads and writes each state once, whatever T is.
//!
//! An example on the simulator: a verify of two drafted tokens, then a commit of the first.
//!
//! ```
//! use gated_delta::{Gdn, GdnCommit, GdnGates, Inputs, Library, Options, States, Stored, StreamRef, Tensor};
//!
//! let mut first_channel = [0.0f32; 2 * 64];
//! (first_channel[0], first_channel[64]) = (1.0, 1.0);
//! let k = Tensor::from_slice(&first_channel, &[1, 2, 1, 64])?;
//! let values: [f32; 2 * 64] = std::array::from_fn(|i| if i < 64 { 0.5 } else { 2.0 });
//! let v = Tensor::from_slice(&values, &[1, 2, 1, 64])?;
//! let (no_decay, all) = ([0.0f32; 2], [1.0f32; 2]);
//! let gates = GdnGates::given(
//!     Tensor::from_slice(&no_decay, &[1, 2, 1])?,
//!     Tensor::from_slice(&all, &[1, 2, 1])?,
//! );
//! let options = Options::default().scale(1.0).qk_l2norm(false);
//! let (mut output, mut states) = ([f32::NAN; 2 * 64], vec![0.0f32; 64 * 64]);
//! let (library, stream) = (Library::simulator(), StreamRef::default_stream());
//!
//! let o = Tensor::from_slice_mut(&mut output, &[1, 2, 1, 64])?;
//! let pool = Tensor::from_slice(&states, &[1, 1, 64, 64])?;
//! let verify = Gdn::new(Inputs::qkv(k, k, v), gates, o, States::read_only(pool)).options(options);
//! // SAFETY: a simulated launch is done when it returns.
//! unsafe { library.launch(stream, &verify) }?;
//! assert_eq!((output[0], output[64]), (0.5, 2.0)); // what each token stored at its key
//!
//! let accepted = [1i32];
//! let pool = Tensor::from_slice_mut(&mut states, &[1, 1, 64, 64])?;
//! let keep = Tensor::from_slice(&accepted, &[1])?;
//! let commit = GdnCommit::new(Stored::kv(k, v), gates, keep, States::update(pool)).options(options);
//! // SAFETY: as above.
//! unsafe { library.launch(stream, &commit) }?;
//! assert_eq!(states[..2], [0.5, 0.0]); // the first token's, and nothing of the second
//! # Ok::<(), gated_delta::Error>(())
//! ```

// The modules are the stages of a launch in order, from its arguments on. A file names nothing of a later stage (`tests/stages.rs`).

mod args;

mod argument;

mod request;

mod choice;

mod given;

mod gpu;

mod kind;

mod problem;

mod shape;

mod lengths;

mod select;

mod schedule;

mod settle;

mod work;

mod plan;

mod launch;

#[cfg(test)]
mod tests;

pub use args::{
    Activation, BetaScale, Checkpoints, Commit, Convolution, Flush, Formulation, Gates, Gdn,
    GdnCommit, GdnGates, HeadMap, Inputs, Kda, KdaBeta, KdaCommit, KdaDecay, KdaGates, MAX_PENDING,
    MAX_PENDING_DRAFTS, MAX_TOKENS, Norm, Operator, Options, Packed, Pending, PerToken, Previous,
    ReadOnly, StateLayout, States, Step, Stored, Update, pending,
};
pub(crate) use argument::{Argument, TENSORS, Unit};
pub(crate) use gpu::{Gpu, MEASURED_ON, serves};
#[cfg(feature = "self-test")]
pub(crate) use kind::{Kind, Mode};
pub use plan::Plan;
pub(crate) use request::{Request, SWITCHES, Sort, Switches};
pub(crate) use schedule::{Launches, Parameter, Sequence, WHOLE_BYTES};
#[cfg(feature = "self-test")]
pub(crate) use select::takes_splits;
pub use shape::MAX_BATCH;
pub use work::Work;

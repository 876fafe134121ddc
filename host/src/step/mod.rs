//! A step of a layer: new tokens of every sequence, where their states start and where they go.
//!
//! [`Gdn`] and [`Kda`] are the steps of the two kinds of layer, [`GdnCommit`] and [`KdaCommit`] advance states alone. A
//! decode is a step of one token; which kernels compute a step follows from T and the options, unless a [`Formulation`] is named.
//!
//! | states | where they start and go |
//! |---|---|
//! | [`States::update`] | row b starts from slot b, its state after the last token goes back there |
//! | `.slots`, `.write_slots`, `.write_pool` | other slots, another pool |
//! | [`States::read_only`] | no state is written |
//! | [`States::per_token`] | the state after each token goes to a slot of its own, the row starts from one of them |
//!
//! | option of a step | |
//! |---|---|
//! | [`Step::snapshots`] | besides, the state after every token goes to a tensor of its own |
//! | [`Step::packed`] | rows of different lengths |
//! | [`Step::previous`] | the accepted part of the last step is committed first, the new tokens are verified: a *resume* |
//! | [`Inputs::conv`] | q, k and v are what the layer's short convolution makes of its projection |
//! | [`Step::norm`] | the outputs are normed, and gated by z |
//! | [`Step::fresh`] | rows that start from zeros, whatever their slots hold |
//! | [`Step::pending`] | states wait, the tokens since are in a ring: decodes that write a state once in eight |
//!
//! Each of them but the last is for any T and goes with every way of keeping states. Where there is a convolution, windows are
//! kept as states are: see [`Convolution`].
//!
//! A *prefill* is a step of rows that may have more than 16 tokens, from slot to slot ([`States::update`]); snapshots and previous
//! tokens it has not. It has options of its own, which make a prefill of any step:
//!
//! | option of a prefill | |
//! |---|---|
//! | [`Step::positions`] | how many tokens of its sequence came before each row |
//! | [`Step::checkpoints`] | the state (and window) after every so many tokens goes to a slot of its own: prefix caching |
//! | [`Step::workspace`] | memory that rows of more than 64 tokens take |
//!
//! After a verify without states written, either a [`Commit`] replays the accepted tokens into the pool, or the next
//! step resumes: one state read and one written, whatever T is.
//!
//! Two drafted tokens, of which the first is accepted, on the simulator:
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

// The stages of a launch, from its arguments on: a file names none of a later stage (`tests/stages.rs`).

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
    MAX_PENDING_DRAFTS, MAX_TOKENS, Norm, Options, Packed, Pending, PerToken, Previous, ReadOnly,
    StateLayout, States, Step, Stored, Update, pending,
};
pub(crate) use argument::{Argument, TENSORS, Unit};
pub(crate) use gpu::{Gpu, MEASURED_ON, serves};
#[cfg(feature = "self-test")]
pub(crate) use kind::{Kind, Mode};
pub use plan::Plan;
pub(crate) use request::{Request, SWITCHES, Sort, Switches};
pub(crate) use schedule::{Launches, Parameter, WHOLE_BYTES};
pub use shape::MAX_BATCH;
pub use work::Work;

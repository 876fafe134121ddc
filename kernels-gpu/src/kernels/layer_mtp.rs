//! The layer step of several tokens, of GDN and of KDA by the load-time constant `per_channel`: drafted ones to be verified, or the
//! accepted ones of the last step to be committed.
//!
//! [`super::layer`]'s (a) to (c), for each token t in order; the previous tokens that are kept first, of which (a), (b) and
//! (1) to (4) alone. Nothing is rounded between them but the state after the previous tokens, which is stored and gone on from.
//!
//! Windows  after the previous tokens, else after the last token where that state is written; besides after every token; with
//!          token slots one window of W − 2 + T inputs in the slot of the row's first token, read from `accepted − 1` on
//! Shapes   x [B, T, D]   z, o [B, T, HV, V]   KDA's g [B, T, HV, K]   previous x [B, T', D]   windows [P, D, W − 1]; else as
//!          there
//! Grid     x = tile, y = h, z = b; a block has one tile of all value heads of h, a cluster all tiles; tile = V: no cluster
//! Threads  a thread walks a channel of the convolution through all tokens: its part of q and k for the cluster, v of its tile
//!          K-last: groups of K/8 lanes own rows; V-last: teams of K/ROWS · LANES threads own columns; a slice of the block's
//!          states after the other, each through all tokens in registers
//! Padding  an inactive row zeroes o and touches no state and no window; a row without tokens carries both to where it
//!          writes; o of packed tokens that are no row's is zero
//! Cost     (states read + states written) · V · K · size_of(S) bytes per (b, hv): memory-bound
//! Truth    reference::layer; tests/cpu/entries.rs, tests/cpu/laws

pub use crate::layer::{MtpKLast as KLast, MtpVLast as VLast, Parallel};

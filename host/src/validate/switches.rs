//! The index tensors of a launch, and what their numbers are of.

use crate::error::Error;
use crate::shapes::Named;
use crate::step::{Argument, Request};

/// Everything that says where states start and go; `I` is an index tensor, or its numbers.
pub struct Switches<'a, I> {
    /// B
    pub(super) rows: usize,
    /// T; 0 for a commit.
    pub(super) tokens: usize,
    /// Tokens of packed tensors.
    pub(super) total: usize,
    /// T'
    pub(super) previous_tokens: usize,
    /// Whether the state after a row's last, or last kept, token goes to the write slot.
    pub(super) writes_final: bool,
    pub(super) null_slot: Option<u32>,
    pub(super) pool: Named<'a>,
    /// The pool that is written.
    pub(super) write_pool: Named<'a>,
    pub(super) snapshots: Option<Named<'a>>,
    /// The windows of a convolution, and those that are written: of as many slots as the pools.
    pub(super) windows: Option<[Named<'a>; 2]>,
    /// The windows after every token.
    pub(super) window_snapshots: Option<Named<'a>>,
    pub(super) read_slots: Option<I>,
    pub(super) write_slots: Option<I>,
    pub(super) token_slots: Option<I>,
    pub(super) accepted: Option<I>,
    pub(super) cu_seqlens: Option<I>,
    pub(super) keep: Option<I>,
    pub(super) fresh: Option<I>,
    /// Of a prefill.
    pub(super) positions: Option<I>,
    /// `[B, C]`, and tokens from one checkpoint to the next.
    pub(super) checkpoint_slots: Option<I>,
    pub(super) every: usize,
    /// Of states that wait: how many tokens are pending, and where.
    pub(super) pending_len: Option<I>,
    pub(super) pending_base: Option<I>,
    /// The most tokens that are pending, and entries of a ring.
    pub(super) ring: [usize; 2],
}

impl<'a, I> Switches<'a, I> {
    /// With what `read` makes of the indices.
    pub fn map<J>(self, read: impl Fn(I) -> Result<J, Error>) -> Result<Switches<'a, J>, Error> {
        let read = |indices: Option<I>| indices.map(&read).transpose();
        Ok(Switches {
            rows: self.rows,
            tokens: self.tokens,
            total: self.total,
            previous_tokens: self.previous_tokens,
            writes_final: self.writes_final,
            null_slot: self.null_slot,
            pool: self.pool,
            write_pool: self.write_pool,
            snapshots: self.snapshots,
            windows: self.windows,
            window_snapshots: self.window_snapshots,
            read_slots: read(self.read_slots)?,
            write_slots: read(self.write_slots)?,
            token_slots: read(self.token_slots)?,
            accepted: read(self.accepted)?,
            cu_seqlens: read(self.cu_seqlens)?,
            keep: read(self.keep)?,
            fresh: read(self.fresh)?,
            positions: read(self.positions)?,
            checkpoint_slots: read(self.checkpoint_slots)?,
            every: self.every,
            pending_len: read(self.pending_len)?,
            pending_base: read(self.pending_base)?,
            ring: self.ring,
        })
    }
}

impl<'a> Switches<'a, Named<'a>> {
    /// Of `request`, which is checked as a launch would.
    pub fn of(request: &Request<'a>) -> Result<Self, Error> {
        let problem = request.check()?;
        problem.check_workspace(&request.lengths(), request.get(Argument::Workspace))?;
        let total = request.total().unwrap_or(0);
        let tokens = match (problem.is_chunked(), request.get(Argument::CuSeqlens)) {
            (false, _) => problem.constants.tokens as usize,
            (true, None) => request.most_tokens(),
            // More than there are say nothing.
            (true, Some(_)) => request.most_tokens().min(total),
        };
        Ok(Switches {
            rows: request.batch() as usize,
            tokens,
            total,
            previous_tokens: problem.constants.previous_tokens as usize,
            writes_final: problem.writes_final(),
            null_slot: request.options.null_slot,
            pool: request.pool(),
            write_pool: request.written_pool(),
            snapshots: request.get(Argument::Snapshots),
            windows: request.windows(),
            window_snapshots: request.get(Argument::WindowSnapshots),
            read_slots: request.get(Argument::ReadSlots),
            write_slots: request.get(Argument::WriteSlots),
            token_slots: request.get(Argument::TokenSlots),
            accepted: request.get(Argument::Accepted),
            cu_seqlens: request.get(Argument::CuSeqlens),
            keep: request.get(Argument::Keep),
            fresh: request.get(Argument::Fresh),
            positions: request.get(Argument::Positions),
            checkpoint_slots: request.get(Argument::CheckpointSlots),
            every: request.checkpoint_every(),
            pending_len: request.get(Argument::PendingLen),
            pending_base: request.get(Argument::PendingBase),
            ring: [problem.constants.pending, problem.constants.ring].map(|n| n as usize),
        })
    }
}

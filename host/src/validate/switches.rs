//! The index tensors of every operator's arguments, and what their numbers are of.

use crate::error::Error;
use crate::ops::gdn_decode::GdnDecode;
use crate::ops::recurrent::{Commit, Gates, Recurrent};
use crate::shapes::{Named, named};
use crate::tensor::Tensor;

/// Arguments of an operator, whose indices [`Library::validate`](crate::Library::validate) checks: those of GDN
/// decode, of GDN MTP verify, of recurrent KDA, and of commits.
pub trait Indexed: sealed::Indexed {}

impl Indexed for GdnDecode<'_> {}
impl<G: Gates> Indexed for Recurrent<'_, G> {}
impl<G: Gates> Indexed for Commit<'_, G> {}

pub(crate) mod sealed {
    use super::{Error, Switches, Tensor};

    /// Says where the indices are.
    pub trait Indexed {
        /// Checks the arguments as a launch does.
        fn switches(&self) -> Result<Switches<'_, &Tensor<'_>>, Error>;
    }
}

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
    pub(super) read_slots: Option<I>,
    pub(super) write_slots: Option<I>,
    pub(super) token_slots: Option<I>,
    pub(super) accepted: Option<I>,
    pub(super) cu_seqlens: Option<I>,
    pub(super) keep: Option<I>,
}

impl<'a, I> Switches<'a, I> {
    /// With what `read` makes of the indices.
    pub fn map<J>(
        self,
        read: impl Fn(&'static str, I) -> Result<J, Error>,
    ) -> Result<Switches<'a, J>, Error> {
        let read = |name, indices: Option<I>| match indices {
            Some(indices) => read(name, indices).map(Some),
            None => Ok(None),
        };
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
            read_slots: read("read_slots", self.read_slots)?,
            write_slots: read("write_slots", self.write_slots)?,
            token_slots: read("token_slots", self.token_slots)?,
            accepted: read("accepted", self.accepted)?,
            cu_seqlens: read("cu_seqlens", self.cu_seqlens)?,
            keep: read("keep", self.keep)?,
        })
    }
}

fn optional<'a>(name: &'static str, tensor: &'a Option<Tensor<'a>>) -> Option<Named<'a>> {
    tensor.as_ref().map(|tensor| named(name, tensor))
}

impl sealed::Indexed for GdnDecode<'_> {
    fn switches(&self) -> Result<Switches<'_, &Tensor<'_>>, Error> {
        self.check()?;
        let pool = named("state", &self.pool);
        Ok(Switches {
            rows: self.q.dims()[0],
            tokens: 1,
            total: 0,
            previous_tokens: 0,
            writes_final: self.options.update_state,
            null_slot: self.options.null_slot,
            pool,
            write_pool: optional("write state", &self.write_pool).unwrap_or(pool),
            snapshots: None,
            read_slots: self.read_slots.as_ref(),
            write_slots: self.write_slots.as_ref(),
            token_slots: None,
            accepted: None,
            cu_seqlens: None,
            keep: None,
        })
    }
}

impl<G: Gates> sealed::Indexed for Recurrent<'_, G> {
    fn switches(&self) -> Result<Switches<'_, &Tensor<'_>>, Error> {
        let request = self.request();
        let problem = request.check()?;
        let pool = named("state", &self.pool);
        let packed = self.packed.as_ref();
        let previous = self.previous.as_ref();
        Ok(Switches {
            rows: request.batch() as usize,
            tokens: problem.constants.tokens as usize,
            total: packed.map_or(0, |_| self.q.dims()[1]),
            previous_tokens: problem.constants.previous_tokens as usize,
            writes_final: problem.writes_final(),
            null_slot: self.options.null_slot,
            pool,
            write_pool: optional("write state", &self.write_pool).unwrap_or(pool),
            snapshots: optional("snapshots", &self.snapshots),
            read_slots: self.read_slots.as_ref(),
            write_slots: self.write_slots.as_ref(),
            token_slots: self.token_slots.as_ref(),
            accepted: self.accepted.as_ref(),
            cu_seqlens: packed.map(|packed| &packed.cu_seqlens),
            keep: previous.map(|previous| &previous.keep),
        })
    }
}

impl<G: Gates> sealed::Indexed for Commit<'_, G> {
    fn switches(&self) -> Result<Switches<'_, &Tensor<'_>>, Error> {
        let request = self.request();
        let problem = request.check()?;
        let pool = named("state", &self.pool);
        Ok(Switches {
            rows: request.batch() as usize,
            tokens: 0,
            total: 0,
            previous_tokens: problem.constants.previous_tokens as usize,
            writes_final: true,
            null_slot: self.options.null_slot,
            pool,
            write_pool: optional("write state", &self.write_pool).unwrap_or(pool),
            snapshots: None,
            read_slots: self.read_slots.as_ref(),
            write_slots: self.write_slots.as_ref(),
            token_slots: None,
            accepted: None,
            cu_seqlens: None,
            keep: Some(&self.keep),
        })
    }
}

//! Pools of states: the slots that the rows of a launch read and write.

use crate::tensor::Tensor;

/// States that a launch reads, and the slots that it writes. A pool of states is `[P, HV, V, K]` (K-last) or `[P, HV, K, V]`
/// (V-last), bf16, f16 or f32. Index tensors are i32, i64 or u32.
///
/// A row is inactive if its slot is negative, not below P, or the null slot.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum States<'a> {
    /// The state after a row's last token is written.
    Update(Update<'a>),
    /// No state is written.
    ReadOnly(ReadOnly<'a>),
    /// The state after each token is written to a slot of its own.
    PerToken(PerToken<'a>),
}

/// States that are read and updated. The state after a row's last token (or last kept one) is written in place, or to another slot or pool.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Update<'a> {
    /// Pool that states are read from. It is updated unless `write_pool` is given.
    pub pool: Tensor<'a>,
    /// Pool that states are written to instead, with the same dtype and dims, except P.
    pub write_pool: Option<Tensor<'a>>,
    /// Slot `[B]` that row b starts from. Default: slot b.
    pub read_slots: Option<Tensor<'a>>,
    /// Slot `[B]` that row b's state is written to. Default: the read slot.
    pub write_slots: Option<Tensor<'a>>,
}

/// States that are read and never written.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ReadOnly<'a> {
    /// Pool that states are read from.
    pub pool: Tensor<'a>,
    /// Slot `[B]` that row b starts from. Default: slot b.
    pub read_slots: Option<Tensor<'a>>,
}

/// States that are written after each token, each to a slot of its own.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PerToken<'a> {
    /// Pool that states are read from. It is written unless `write_pool` is given.
    pub pool: Tensor<'a>,
    /// Pool that states are written to instead, with the same dtype and dims, except P.
    pub write_pool: Option<Tensor<'a>>,
    /// Slots `[B, T]` for the states after each token. An entry that is out of range or the null slot skips its store. The row starts from
    /// slot `token_slots[b, accepted[b] - 1]`, and is inactive if that entry is out of range or null. With a convolution, the row's window
    /// is in slot `token_slots[b, 0]`; the row is also inactive if this entry is out of range or null.
    pub token_slots: Tensor<'a>,
    /// Number of accepted tokens `[B]` of the last step, in 1..=T. Default: 1.
    pub accepted: Option<Tensor<'a>>,
}

impl<'a> States<'a> {
    /// States that are updated in `pool`, or written to another slot or pool.
    #[must_use]
    pub fn update(pool: Tensor<'a>) -> Update<'a> {
        Update {
            pool,
            write_pool: None,
            read_slots: None,
            write_slots: None,
        }
    }

    /// States that are read from `pool` and not written.
    #[must_use]
    pub fn read_only(pool: Tensor<'a>) -> ReadOnly<'a> {
        ReadOnly {
            pool,
            read_slots: None,
        }
    }

    /// States that are written after each token, to the slots `token_slots` `[B, T]`.
    #[must_use]
    pub fn per_token(pool: Tensor<'a>, token_slots: Tensor<'a>) -> PerToken<'a> {
        PerToken {
            pool,
            write_pool: None,
            token_slots,
            accepted: None,
        }
    }
}

impl<'a> Update<'a> {
    /// Row b reads (and by default writes) slot `slots[b]`.
    #[must_use]
    pub fn slots(mut self, slots: Tensor<'a>) -> Self {
        self.read_slots = Some(slots);
        self
    }

    /// Row b writes its state to slot `slots[b]`.
    #[must_use]
    pub fn write_slots(mut self, slots: Tensor<'a>) -> Self {
        self.write_slots = Some(slots);
        self
    }

    /// Writes states to another pool.
    #[must_use]
    pub fn write_pool(mut self, pool: Tensor<'a>) -> Self {
        self.write_pool = Some(pool);
        self
    }
}

impl<'a> ReadOnly<'a> {
    /// Row b starts from slot `slots[b]`.
    #[must_use]
    pub fn slots(mut self, slots: Tensor<'a>) -> Self {
        self.read_slots = Some(slots);
        self
    }
}

impl<'a> PerToken<'a> {
    /// Sets the number of accepted tokens of the last step, `[B]`.
    #[must_use]
    pub fn accepted(mut self, accepted: Tensor<'a>) -> Self {
        self.accepted = Some(accepted);
        self
    }

    /// Writes states to another pool.
    #[must_use]
    pub fn write_pool(mut self, pool: Tensor<'a>) -> Self {
        self.write_pool = Some(pool);
        self
    }
}

impl<'a> From<Update<'a>> for States<'a> {
    fn from(states: Update<'a>) -> Self {
        Self::Update(states)
    }
}

impl<'a> From<ReadOnly<'a>> for States<'a> {
    fn from(states: ReadOnly<'a>) -> Self {
        Self::ReadOnly(states)
    }
}

impl<'a> From<PerToken<'a>> for States<'a> {
    fn from(states: PerToken<'a>) -> Self {
        Self::PerToken(states)
    }
}

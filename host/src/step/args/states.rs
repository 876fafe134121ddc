//! Where the states of a launch start and go.

use crate::tensor::Tensor;

/// Where states start and go. A pool of states is `[P, HV, V, K]` or `[P, HV, K, V]`, bf16, f16 or f32; index tensors are
/// i32, i64 or u32.
///
/// A row is inactive where its slot is negative, not below P, or the null slot.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum States<'a> {
    /// The state after a row's last token is written.
    Update(Update<'a>),
    /// No state is written.
    ReadOnly(ReadOnly<'a>),
    /// The state after each token goes to a slot of its own.
    PerToken(PerToken<'a>),
}

/// The state after a row's last token, or last kept one, goes back to where it came from, or to another slot or pool.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Update<'a> {
    /// Pool that states start from; updated unless `write_pool` is given.
    pub pool: Tensor<'a>,
    /// Pool that states are written to instead, of the same dtype and dims but P.
    pub write_pool: Option<Tensor<'a>>,
    /// `[B]`: slot that row b starts from; without it, slot b.
    pub read_slots: Option<Tensor<'a>>,
    /// `[B]`: slot that row b's state goes to; without it, the read slot.
    pub write_slots: Option<Tensor<'a>>,
}

/// States that are read and not written.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ReadOnly<'a> {
    /// Pool that states start from.
    pub pool: Tensor<'a>,
    /// `[B]`: slot that row b starts from; without it, slot b.
    pub read_slots: Option<Tensor<'a>>,
}

/// The state after each token goes to a slot of its own.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PerToken<'a> {
    /// Pool that states start from; written unless `write_pool` is given.
    pub pool: Tensor<'a>,
    /// Pool that states are written to instead, of the same dtype and dims but P.
    pub write_pool: Option<Tensor<'a>>,
    /// `[B, T]`: slot that the state after each token goes to. An entry that is out of range or the null slot skips
    /// that store alone; the row starts from slot `token_slots[b, accepted[b] - 1]`, and is inactive where that is one. With
    /// a convolution its window is in slot `token_slots[b, 0]`, without which it is inactive too.
    pub token_slots: Tensor<'a>,
    /// `[B]`, in 1..=T: tokens of the last step that were accepted; without it, 1.
    pub accepted: Option<Tensor<'a>>,
}

impl<'a> States<'a> {
    /// States updated in `pool`, or written to another slot or pool.
    #[must_use]
    pub fn update(pool: Tensor<'a>) -> Update<'a> {
        Update {
            pool,
            write_pool: None,
            read_slots: None,
            write_slots: None,
        }
    }

    /// States read from `pool`, and not written.
    #[must_use]
    pub fn read_only(pool: Tensor<'a>) -> ReadOnly<'a> {
        ReadOnly {
            pool,
            read_slots: None,
        }
    }

    /// A slot for the state after each token: `token_slots` `[B, T]`.
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
    /// Row b has slot `slots[b]`.
    #[must_use]
    pub fn slots(mut self, slots: Tensor<'a>) -> Self {
        self.read_slots = Some(slots);
        self
    }

    /// Row b's state goes to slot `slots[b]`.
    #[must_use]
    pub fn write_slots(mut self, slots: Tensor<'a>) -> Self {
        self.write_slots = Some(slots);
        self
    }

    /// States go to another pool.
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
    /// Tokens of the last step that were accepted, `[B]`.
    #[must_use]
    pub fn accepted(mut self, accepted: Tensor<'a>) -> Self {
        self.accepted = Some(accepted);
        self
    }

    /// States go to another pool.
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

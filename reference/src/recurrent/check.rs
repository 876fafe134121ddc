//! Checks the shapes of a problem and its switches.

use super::{Previous, Recurrent, TokenGates};
use crate::error::{Error, Tokens, check_length, elements};
use crate::heads::Heads;

impl Recurrent<'_> {
    /// The leading dimensions of `q`.
    pub(crate) fn token_dims(&self) -> Result<Tokens, Error> {
        self.sizes().check()?;
        let (letters, count) = match self.cu_seqlens {
            None => ("B, T", elements(&[self.batch, self.tokens])),
            Some(_) => {
                let token = elements(&[self.heads, self.key_dim]);
                (
                    "total",
                    Error::check_multiple("q", "one token, H*K", token, self.q.len())?,
                )
            }
        };
        Ok(Tokens { letters, count })
    }

    pub(crate) fn check_switches(&self, write_pool: bool, snapshots: bool) -> Result<(), Error> {
        let previous = self.previous.is_some();
        let token_slots = self.token_slots.is_some();
        let frozen = !self.update_state;
        let commit_only = self.tokens == 0;
        if commit_only && !previous {
            return Err(Error::Zero { name: "tokens" });
        }
        let contradictions = [
            (token_slots && previous, "token_slots", "previous"),
            (
                token_slots && self.read_slots.is_some(),
                "token_slots",
                "read_slots",
            ),
            (
                token_slots && self.write_slots.is_some(),
                "token_slots",
                "write_slots",
            ),
            (token_slots && frozen, "token_slots", "update_state = false"),
            (previous && frozen, "previous", "update_state = false"),
            (
                self.write_slots.is_some() && frozen,
                "write_slots",
                "update_state = false",
            ),
            (write_pool && frozen, "write_pool", "update_state = false"),
            (snapshots && previous, "snapshots", "previous"),
            (
                self.snapshot_steps.is_some() && previous,
                "snapshot_steps",
                "previous",
            ),
            (
                self.cu_seqlens.is_some() && commit_only,
                "cu_seqlens",
                "tokens = 0",
            ),
        ];
        if let Some(&(_, name, with)) = contradictions.iter().find(|(both, ..)| *both) {
            return Err(Error::Contradiction { name, with });
        }
        let needs = [
            (
                self.accepted.is_some() && !token_slots,
                "token_slots",
                "accepted",
            ),
            (
                snapshots && self.snapshot_steps.is_none(),
                "snapshot_steps",
                "snapshots",
            ),
            (
                !snapshots && self.snapshot_steps.is_some(),
                "snapshots",
                "snapshot_steps",
            ),
        ];
        match needs.iter().find(|(lacks, ..)| *lacks) {
            Some(&(_, name, with)) => Err(Error::Missing { name, with }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_shapes(
        &self,
        tokens: Tokens,
        snapshots: Option<&[f64]>,
    ) -> Result<(), Error> {
        let sizes = self.sizes();
        sizes.check()?;
        let Heads {
            heads,
            value_heads,
            key_dim,
            value_dim,
            ..
        } = sizes;
        tokens.check("q", "H, K", &[heads, key_dim], self.q.len())?;
        tokens.check("k", "H, K", &[heads, key_dim], self.k.len())?;
        tokens.check("v", "HV, V", &[value_heads, value_dim], self.v.len())?;
        self.gates.check(tokens, &sizes)?;
        if let Some(previous) = &self.previous {
            previous
                .check(self.batch, &sizes)
                .map_err(|error| Error::Previous(Box::new(error)))?;
        }
        for (name, letters, dims, indices) in [
            ("read_slots", "[B]", &[self.batch][..], self.read_slots),
            ("write_slots", "[B]", &[self.batch], self.write_slots),
            (
                "token_slots",
                "[B, T]",
                &[self.batch, self.tokens],
                self.token_slots,
            ),
            ("accepted", "[B]", &[self.batch], self.accepted),
            (
                "cu_seqlens",
                "[B + 1]",
                &[self.batch.saturating_add(1)],
                self.cu_seqlens,
            ),
        ] {
            if let Some(indices) = indices {
                check_length(name, letters, dims, indices.len())?;
            }
        }
        if let (Some(steps), Some(snapshots)) = (self.snapshot_steps, snapshots) {
            let tokens = self.tokens;
            if steps < tokens {
                return Err(Error::Steps { tokens, steps });
            }
            check_length(
                "snapshots",
                "[B, steps, HV, K*V]",
                &[self.batch, steps, value_heads, key_dim, value_dim],
                snapshots.len(),
            )?;
        }
        Ok(())
    }
}

impl Previous<'_> {
    fn check(&self, batch: usize, sizes: &Heads) -> Result<(), Error> {
        if self.tokens == 0 {
            return Err(Error::Zero { name: "tokens" });
        }
        let tokens = Tokens {
            letters: "B, T'",
            count: elements(&[batch, self.tokens]),
        };
        let value = [sizes.value_heads, sizes.value_dim];
        tokens.check("k", "H, K", &[sizes.heads, sizes.key_dim], self.k.len())?;
        tokens.check("v", "HV, V", &value, self.v.len())?;
        self.gates.check(tokens, sizes)?;
        check_length("keep", "[B]", &[batch], self.keep.len())
    }
}

impl TokenGates<'_> {
    fn check(&self, tokens: Tokens, sizes: &Heads) -> Result<(), Error> {
        match self {
            Self::Gdn(gates) => gates.check(tokens, sizes),
            Self::Kda(gates) => gates.check(tokens, sizes),
        }
    }
}

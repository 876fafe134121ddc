//! One launch in memory: buffers, and which views of them are its tensors.

use gated_delta::ops::StateLayout;
use gated_delta::ops::recurrent::RecurrentOptions;

use crate::buffer::{Buffer, View};
use crate::problem::{Gates, Kept, Operator, Packed, Tokens};
use crate::rows::{Row, Switches};

/// A launch in memory; after it, the same with the buffers as they are then.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Whose kernels compute it.
    pub operator: Operator,
    /// What the views are of.
    pub buffers: Vec<Buffer>,
    /// `[B, T, H, K]`; `[1, total, …]` with packed rows, T = 0 for a commit.
    pub q: View,
    /// Of `[B, T]`.
    pub tokens: Tokens<View>,
    /// `[B, T, HV, V]`, written.
    pub o: View,
    /// Tokens to commit.
    pub previous: Option<Kept<View, View>>,
    /// Of new and previous tokens.
    pub gates: Gates<View>,
    /// `[P, HV, V, K]` or `[P, HV, K, V]`.
    pub pool: View,
    /// As `pool`.
    pub write_pool: Option<View>,
    /// `[B]`
    pub read_slots: Option<View>,
    /// `[B]`
    pub write_slots: Option<View>,
    /// `[B, T]`
    pub token_slots: Option<View>,
    /// `[B]`
    pub accepted: Option<View>,
    /// `[B, steps, HV, V, K]` or `[B, steps, HV, K, V]`, written.
    pub snapshots: Option<View>,
    /// Rows of different lengths.
    pub packed: Option<Packed<View>>,
    /// What is fixed for a layer.
    pub options: RecurrentOptions,
}

impl Case {
    /// B
    #[must_use]
    pub fn batch(&self) -> usize {
        match (&self.packed, &self.previous) {
            (Some(packed), _) => packed.cu_seqlens.dims[0].saturating_sub(1),
            (None, Some(previous)) if self.is_commit() => previous.tokens.k.dims[0],
            (None, _) => self.q.dims[0],
        }
    }

    /// T; with packed rows the most that one may have, for a commit 0.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.packed
            .as_ref()
            .map_or(self.q.dims[1], |packed| packed.max_tokens)
    }

    /// Whether there are previous tokens and no other.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        self.previous.is_some() && self.packed.is_none() && self.q.dims.get(1) == Some(&0)
    }

    /// The pool that new states go to.
    #[must_use]
    pub fn written_pool(&self) -> &View {
        self.write_pool.as_ref().unwrap_or(&self.pool)
    }

    /// Whether the launch writes something in `buffer`.
    #[must_use]
    pub fn writes(&self, buffer: usize) -> bool {
        let snapshots = self.snapshots.as_ref();
        (!self.is_commit() && buffer == self.o.buffer)
            || snapshots.is_some_and(|snapshots| buffer == snapshots.buffer)
            || (self.options.update_state && buffer == self.written_pool().buffer)
    }

    /// Values of a float tensor, in the order of its dims.
    #[must_use]
    pub fn floats(&self, view: &View) -> Vec<f64> {
        view.positions()
            .into_iter()
            .map(|i| self.buffers[view.buffer].float(i))
            .collect()
    }

    /// Bits of a tensor's elements, in the order of its dims.
    #[must_use]
    pub fn bits(&self, view: &View) -> Vec<u64> {
        view.positions()
            .into_iter()
            .map(|i| self.buffers[view.buffer].bits(i))
            .collect()
    }

    /// Values of an index tensor.
    #[must_use]
    pub fn indices(&self, view: &View) -> Vec<i64> {
        view.positions()
            .into_iter()
            .map(|i| self.buffers[view.buffer].index(i))
            .collect()
    }

    /// A pool, or snapshots, as `[…, HV, V, K]` whatever the layout.
    #[must_use]
    pub fn as_klast(&self, states: &View) -> View {
        let mut view = states.clone();
        if self.options.state_layout == StateLayout::VLast {
            let [v, k] = [view.dims.len() - 2, view.dims.len() - 1];
            view.dims.swap(v, k);
            view.strides.swap(v, k);
        }
        view
    }

    /// Row and token of `token` among those of all rows.
    #[must_use]
    pub fn token(&self, token: usize) -> [usize; 2] {
        let of_row = self.q.dims[1];
        [token / of_row, token % of_row]
    }

    /// Bits of o, `[B, T, HV, V]`.
    #[must_use]
    pub fn o_bits(&self) -> Vec<u64> {
        self.bits(&self.o)
    }

    /// Bits of the pool that is written, `[P, HV, V, K]`.
    #[must_use]
    pub fn state_bits(&self) -> Vec<u64> {
        self.bits(&self.as_klast(self.written_pool()))
    }

    /// Bits of slot `slot` of the written pool, `[HV, V, K]`.
    #[must_use]
    pub fn slot_bits(&self, slot: usize) -> Vec<u64> {
        self.bits(&self.as_klast(self.written_pool()).entry(&[slot]))
    }

    /// Bits of the state after token `t` of row `b`, as the snapshots have it, `[HV, V, K]`.
    ///
    /// # Panics
    /// Without snapshots.
    #[must_use]
    pub fn snapshot_bits(&self, b: usize, t: usize) -> Vec<u64> {
        let snapshots = self.snapshots.as_ref().expect("there are snapshots");
        self.bits(&self.as_klast(snapshots).entry(&[b, t]))
    }

    /// What each row does.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let indices = |view: &Option<View>| view.as_ref().map(|view| self.indices(view));
        let switches = Switches {
            batch: self.batch(),
            max_tokens: self.max_tokens(),
            total: self.q.dims[1],
            pool: self.pool.dims[0],
            write_pool: self.written_pool().dims[0],
            read_slots: indices(&self.read_slots),
            write_slots: indices(&self.write_slots),
            token_slots: indices(&self.token_slots),
            accepted: indices(&self.accepted),
            cu_seqlens: self
                .packed
                .as_ref()
                .map(|packed| self.indices(&packed.cu_seqlens)),
            previous: self.previous.as_ref().map(|previous| {
                let most = previous.tokens.k.dims[1];
                (most, self.indices(&previous.keep))
            }),
            null_slot: self.options.null_slot,
            update_state: self.options.update_state,
        };
        switches.rows()
    }

    /// The tensors that lie in `buffer`, for messages.
    #[must_use]
    pub fn names_of(&self, buffer: usize) -> String {
        let of_tokens = |names: [&'static str; 4], tokens: &Tokens<View>| {
            let views = [&tokens.k, &tokens.v, &tokens.gate, &tokens.beta];
            names.into_iter().zip(views.map(View::clone))
        };
        let mut tensors = vec![
            ("q", self.q.clone()),
            ("o", self.o.clone()),
            ("state", self.pool.clone()),
        ];
        tensors.extend(of_tokens(["k", "v", "a or g", "b or beta"], &self.tokens));
        if let Some(previous) = &self.previous {
            let names = [
                "previous k",
                "previous v",
                "previous a or g",
                "previous b or beta",
            ];
            tensors.extend(of_tokens(names, &previous.tokens));
            tensors.push(("keep", previous.keep.clone()));
        }
        let optional = [
            ("A_log", &self.gates.a_log),
            ("dt_bias", &self.gates.dt_bias),
            ("write state", &self.write_pool),
            ("read_slots", &self.read_slots),
            ("write_slots", &self.write_slots),
            ("token_slots", &self.token_slots),
            ("accepted", &self.accepted),
            ("snapshots", &self.snapshots),
        ];
        let given = optional
            .into_iter()
            .filter_map(|(name, view)| Some((name, view.clone()?)));
        tensors.extend(given);
        tensors.extend(
            self.packed
                .as_ref()
                .map(|packed| ("cu_seqlens", packed.cu_seqlens.clone())),
        );
        let inside = tensors.iter().filter(|(_, view)| view.buffer == buffer);
        inside.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    }
}

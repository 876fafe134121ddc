//! One launch in memory: buffers, and the views of them that are its tensors.

use std::ops::{Deref, DerefMut};

use gated_delta::{StateLayout, Tensor, Work};
use gated_delta_harness::arguments::Arguments;

use crate::buffer::{Buffer, View};
use crate::problem::{Sizes, conv, window_snapshots};
use crate::rows::{Row, rows, tokens_of_no_row};

/// The memory and the arguments of a launch, before or after it. States have the layout of the options.
#[derive(Clone, Debug)]
pub struct Case {
    /// Buffers that the views point into.
    pub buffers: Vec<Buffer>,
    /// Arguments of the launch, with a view for each tensor.
    pub args: Arguments<View>,
}

impl Deref for Case {
    type Target = Arguments<View>;

    fn deref(&self) -> &Self::Target {
        &self.args
    }
}

impl DerefMut for Case {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.args
    }
}

/// Cases are equal if all bytes of all buffers are equal.
impl PartialEq for Case {
    fn eq(&self, other: &Self) -> bool {
        self.buffers == other.buffers
    }
}

impl Case {
    /// Calls `body` with the arguments at addresses without memory.
    ///
    /// # Panics
    /// If the arguments are none.
    pub fn nowhere<R>(&self, body: impl FnOnce(&dyn Work) -> R) -> R {
        let buffers = self.buffers.iter().enumerate();
        let base = |(i, buffer): (usize, &Buffer)| {
            let address = 0x10_0000_0000 * (i as u64 + 1);
            // SAFETY: nothing is launched.
            unsafe { Tensor::from_raw(address, buffer.dtype, &[buffer.len()]) }.unwrap()
        };
        let bases: Vec<_> = buffers.map(base).collect();
        let args = self.args.map(&|view| view.of(&bases)).unwrap();
        body(&*args.work().unwrap())
    }

    /// Whether the launch writes to `buffer`.
    #[must_use]
    pub fn writes(&self, buffer: usize) -> bool {
        let windows = self.windows().map(|[_, written]| written);
        let updated = [Some(self.written_pool()), windows];
        let updated = updated.into_iter().filter(|_| self.update_state);
        let snapshots = [self.snapshots.as_ref(), window_snapshots(self)];
        let written = updated.chain(snapshots);
        let written = written.chain([self.outputs(), self.workspace.as_ref()]);
        let pending = self.pending.as_ref();
        let rings = pending.map(|it| [&it.keys, &it.updates, &it.decays].map(Some));
        let of_windows = pending.map(|it| [it.inputs.as_ref(), it.windows.as_ref()]);
        let written = written.chain(rings.into_iter().flatten());
        let mut written = written.chain(of_windows.into_iter().flatten());
        written.any(|view| view.is_some_and(|view| buffer == view.buffer))
    }

    /// Whether all bytes except those of the workspace are equal.
    #[must_use]
    pub fn is_same_but_for_the_workspace(&self, other: &Self) -> bool {
        let of_workspace = self.workspace.as_ref().map(|view| view.buffer);
        let mut places = 0..self.buffers.len();
        places.all(|i| Some(i) == of_workspace || self.buffers[i] == other.buffers[i])
    }

    /// The output o, `[B, T, HV, V]`, or `[1, total, HV, V]` if rows are packed.
    ///
    /// # Panics
    /// If the launch is a commit, which has no output.
    #[must_use]
    pub fn o(&self) -> &View {
        self.outputs().expect("there are new tokens")
    }

    /// Values of a float tensor, in the order of its dims.
    #[must_use]
    pub fn floats(&self, view: &View) -> Vec<f64> {
        self.buffers[view.buffer].floats_of(view)
    }

    /// Bits of a tensor's elements, in the order of its dims.
    #[must_use]
    pub fn bits(&self, view: &View) -> Vec<u64> {
        self.buffers[view.buffer].bits_of(view)
    }

    /// Values of an index tensor.
    #[must_use]
    pub fn indices(&self, view: &View) -> Vec<i64> {
        let buffer = &self.buffers[view.buffer];
        view.each(|i| buffer.index(i))
    }

    /// A pool or snapshots as `[…, HV, V, K]`, in either layout.
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

    /// Row and token within the row of token `token` of all rows.
    #[must_use]
    pub fn token(&self, token: usize) -> [usize; 2] {
        let of_row = self.o().dims[1];
        [token / of_row, token % of_row]
    }

    /// Bits of o, `[B, T, HV, V]`. Empty for a commit.
    #[must_use]
    pub fn o_bits(&self) -> Vec<u64> {
        self.outputs().map_or(Vec::new(), |o| self.bits(o))
    }

    /// Bits of the written pool, `[P, HV, V, K]`.
    #[must_use]
    pub fn state_bits(&self) -> Vec<u64> {
        self.bits(&self.as_klast(self.written_pool()))
    }

    /// Bits of the written windows, `[P, D, columns]`. Empty without a convolution.
    #[must_use]
    pub fn window_bits(&self) -> Vec<u64> {
        self.windows()
            .map_or(Vec::new(), |[_, written]| self.bits(written))
    }

    /// Bits of slot `slot` of the written windows, `[D, columns]`. Empty without a convolution.
    #[must_use]
    pub fn slot_window_bits(&self, slot: usize) -> Vec<u64> {
        self.windows().map_or(Vec::new(), |[_, written]| {
            self.bits(&written.entry(&[slot]))
        })
    }

    /// Bits of slot `slot` of the written pool, `[HV, V, K]`.
    #[must_use]
    pub fn slot_bits(&self, slot: usize) -> Vec<u64> {
        self.bits(&self.as_klast(self.written_pool()).entry(&[slot]))
    }

    /// Bits of the snapshot of the state after token `t` of row `b`, `[HV, V, K]`.
    ///
    /// # Panics
    /// Without snapshots.
    #[must_use]
    pub fn snapshot_bits(&self, b: usize, t: usize) -> Vec<u64> {
        let snapshots = self.snapshots.as_ref().expect("there are snapshots");
        self.bits(&self.as_klast(snapshots).entry(&[b, t]))
    }

    /// Bits of the snapshot of the window after token `t` of row `b`, `[D, W − 1]`. Empty without snapshots of windows.
    #[must_use]
    pub fn window_snapshot_bits(&self, b: usize, t: usize) -> Vec<u64> {
        window_snapshots(self).map_or(Vec::new(), |view| self.bits(&view.entry(&[b, t])))
    }

    /// Bits of the window that starts at column `column` of slot `slot` of the written windows, `[D, W − 1]`. Empty without a
    /// convolution.
    #[must_use]
    pub fn window_bits_at(&self, slot: usize, column: usize) -> Vec<u64> {
        let (Some(conv), Some([_, written])) = (conv(self), self.windows()) else {
            return Vec::new();
        };
        let inputs = conv.weight.dims[1] - 1;
        self.bits(&written.entry(&[slot]).narrow(1, column, inputs))
    }

    /// The tokens and the slots that each row reads and writes.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        rows(&self.args, |view| self.indices(view))
    }

    /// Packed tokens that belong to no row.
    #[must_use]
    pub fn tokens_of_no_row(&self) -> Vec<usize> {
        tokens_of_no_row(&self.args, |view| self.indices(view))
    }

    /// Names of the tensors in `buffer`, for messages.
    #[must_use]
    pub fn names_of(&self, buffer: usize) -> String {
        let mut args = self.args.clone();
        let inside = args.tensors_mut().into_iter();
        let inside = inside.filter(|(_, view)| view.buffer == buffer);
        inside.map(|(name, _)| name).collect::<Vec<_>>().join(", ")
    }
}

//! One launch in memory: buffers, and which views of them are its tensors.

use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::{BetaScale, GdnGates, StateLayout};
use gated_delta::{Error, Tensor};

use crate::buffer::{Buffer, View};

/// A GDN decode in memory; after a launch, the same with the buffers as they are then.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// What the views are of.
    pub buffers: Vec<Buffer>,
    /// `[B, 1, H, K]`
    pub q: View,
    /// `[B, 1, H, K]`
    pub k: View,
    /// `[B, 1, HV, V]`
    pub v: View,
    /// `[B, 1, HV]`: raw gate `a`, or the given log decay.
    pub a: View,
    /// `[B, 1, HV]`: raw `b`, or the given beta.
    pub b: View,
    /// Raw gates: `A_log` and `dt_bias`, `[HV]`, and the factor of sigmoid(b).
    pub raw: Option<(View, View, BetaScale)>,
    /// `[B, 1, HV, V]`, written.
    pub o: View,
    /// `[P, HV, V, K]` or `[P, HV, K, V]`.
    pub pool: View,
    /// As `pool`.
    pub write_pool: Option<View>,
    /// `[B]`
    pub read_slots: Option<View>,
    /// `[B]`
    pub write_slots: Option<View>,
    /// What is fixed for a layer.
    pub options: GdnDecodeOptions,
}

impl Case {
    /// The arguments, given all elements of every buffer.
    ///
    /// # Errors
    /// Where a view leaves its buffer.
    pub fn args<'a>(&self, bases: &[Tensor<'a>]) -> Result<GdnDecode<'a>, Error> {
        let optional = |view: &Option<View>| view.as_ref().map(|view| view.of(bases)).transpose();
        let (a, b) = (self.a.of(bases)?, self.b.of(bases)?);
        Ok(GdnDecode {
            q: self.q.of(bases)?,
            k: self.k.of(bases)?,
            v: self.v.of(bases)?,
            gates: match &self.raw {
                Some((a_log, dt_bias, beta_scale)) => {
                    let (a_log, dt_bias) = (a_log.of(bases)?, dt_bias.of(bases)?);
                    GdnGates::Raw {
                        a,
                        b,
                        a_log,
                        dt_bias,
                        beta_scale: *beta_scale,
                    }
                }
                None => GdnGates::Given { g: a, beta: b },
            },
            o: self.o.of(bases)?,
            pool: self.pool.of(bases)?,
            write_pool: optional(&self.write_pool)?,
            read_slots: optional(&self.read_slots)?,
            write_slots: optional(&self.write_slots)?,
            options: self.options,
        })
    }

    /// The pool that new states go to.
    #[must_use]
    pub fn written_pool(&self) -> &View {
        self.write_pool.as_ref().unwrap_or(&self.pool)
    }

    /// Whether the launch writes something in `buffer`.
    #[must_use]
    pub fn writes(&self, buffer: usize) -> bool {
        buffer == self.o.buffer
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

    /// A pool, or anything shaped like it, as `[P, HV, V, K]` whatever the layout.
    #[must_use]
    pub fn as_klast(&self, pool: &View) -> View {
        let mut view = pool.clone();
        if self.options.state_layout == StateLayout::VLast {
            view.dims.swap(2, 3);
            view.strides.swap(2, 3);
        }
        view
    }

    /// Bits of o, `[B, HV, V]`.
    #[must_use]
    pub fn o_bits(&self) -> Vec<u64> {
        self.bits(&self.o)
    }

    /// Bits of the pool that is written, `[P, HV, V, K]`.
    #[must_use]
    pub fn state_bits(&self) -> Vec<u64> {
        self.bits(&self.as_klast(self.written_pool()))
    }

    /// Read and write slot of each row; `None` where it is inactive.
    #[must_use]
    pub fn live(&self) -> Vec<Option<(usize, usize)>> {
        let slots = |view: &Option<View>| view.as_ref().map(|view| self.indices(view));
        let (reads, writes) = (slots(&self.read_slots), slots(&self.write_slots));
        let live = |slot: i64, pool: &View| {
            let slot = usize::try_from(slot)
                .ok()
                .filter(|&slot| slot < pool.dims[0])?;
            (self.options.null_slot.map(|null| null as usize) != Some(slot)).then_some(slot)
        };
        let row = |b: usize| {
            let read = reads.as_ref().map_or(b as i64, |slots| slots[b]);
            let write = writes.as_ref().map_or(read, |slots| slots[b]);
            Some((live(read, &self.pool)?, live(write, self.written_pool())?))
        };
        (0..self.q.dims[0]).map(row).collect()
    }

    /// The tensors that lie in `buffer`, for messages.
    #[must_use]
    pub fn names_of(&self, buffer: usize) -> String {
        let tensors = [
            ("q", Some(&self.q)),
            ("k", Some(&self.k)),
            ("v", Some(&self.v)),
            ("a", Some(&self.a)),
            ("b", Some(&self.b)),
            ("A_log", self.raw.as_ref().map(|raw| &raw.0)),
            ("dt_bias", self.raw.as_ref().map(|raw| &raw.1)),
            ("o", Some(&self.o)),
            ("state", Some(&self.pool)),
            ("write state", self.write_pool.as_ref()),
            ("read_slots", self.read_slots.as_ref()),
            ("write_slots", self.write_slots.as_ref()),
        ];
        let inside = tensors
            .iter()
            .filter(|(_, view)| view.is_some_and(|view| view.buffer == buffer));
        inside.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    }
}

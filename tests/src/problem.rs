//! A GDN decode as values.

use gated_delta::ops::BetaScale;
use gated_delta::ops::gdn_decode::GdnDecodeOptions;

/// A dense row-major array. NaN stands for what nobody may read.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Dims, outermost first.
    pub dims: Vec<usize>,
    /// Elements.
    pub values: Vec<f32>,
}

impl Array {
    /// An array of what `value` returns, element after element.
    pub fn new(dims: &[usize], mut value: impl FnMut() -> f32) -> Self {
        Self {
            dims: dims.to_vec(),
            values: (0..dims.iter().product()).map(|_| value()).collect(),
        }
    }

    /// As [`take`].
    #[must_use]
    pub fn take(&self, axis: usize, order: &[usize]) -> Self {
        let mut dims = self.dims.clone();
        dims[axis] = order.len();
        Self {
            values: take(&self.values, &self.dims, axis, order),
            dims,
        }
    }

    /// Entry `i` of the outermost dim.
    pub fn entry_mut(&mut self, i: usize) -> &mut [f32] {
        let len: usize = self.dims[1..].iter().product();
        &mut self.values[i * len..][..len]
    }
}

/// The entries `order` of `axis` of a dense array, in this order; an entry may come twice, or not at all.
#[must_use]
pub fn take<T: Copy>(values: &[T], dims: &[usize], axis: usize, order: &[usize]) -> Vec<T> {
    let inner: usize = dims[axis + 1..].iter().product();
    let outer: usize = dims[..axis].iter().product();
    let runs = (0..outer).flat_map(|i| {
        order
            .iter()
            .map(move |entry| (i * dims[axis] + entry) * inner)
    });
    runs.flat_map(|start| &values[start..start + inner])
        .copied()
        .collect()
}

/// What raw gates need besides a and b.
#[derive(Clone, Debug, PartialEq)]
pub struct Raw {
    /// `[HV]`
    pub a_log: Array,
    /// `[HV]`
    pub dt_bias: Array,
    /// Factor of sigmoid(b).
    pub beta_scale: BetaScale,
}

/// Values of a GDN decode.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// `[B, H, K]`
    pub q: Array,
    /// `[B, H, K]`
    pub k: Array,
    /// `[B, HV, V]`
    pub v: Array,
    /// `[B, HV]`: raw gate `a`, or the given log decay.
    pub a: Array,
    /// `[B, HV]`: raw `b`, or the given beta.
    pub b: Array,
    /// Present with raw gates.
    pub raw: Option<Raw>,
    /// `[P, HV, V, K]`
    pub pool: Array,
    /// As `pool`, but for P.
    pub write_pool: Option<Array>,
    /// `[B]`
    pub read_slots: Option<Vec<i64>>,
    /// `[B]`
    pub write_slots: Option<Vec<i64>>,
    /// What is fixed for a layer.
    pub options: GdnDecodeOptions,
}

impl Problem {
    /// B
    #[must_use]
    pub fn batch(&self) -> usize {
        self.q.dims[0]
    }

    /// The same rows, in the order `rows`; pools as they are.
    ///
    /// # Panics
    /// Without read slots, which then depend on the order.
    #[must_use]
    pub fn take_rows(&self, rows: &[usize]) -> Self {
        let pick = |slots: &Vec<i64>| rows.iter().map(|&b| slots[b]).collect();
        assert!(
            self.read_slots.is_some(),
            "without read slots row b has slot b"
        );
        Self {
            q: self.q.take(0, rows),
            k: self.k.take(0, rows),
            v: self.v.take(0, rows),
            a: self.a.take(0, rows),
            b: self.b.take(0, rows),
            read_slots: self.read_slots.as_ref().map(pick),
            write_slots: self.write_slots.as_ref().map(pick),
            ..self.clone()
        }
    }

    /// The value heads `heads`, in this order; q and k as they are.
    #[must_use]
    pub fn take_value_heads(&self, heads: &[usize]) -> Self {
        let raw = self.raw.as_ref().map(|raw| Raw {
            a_log: raw.a_log.take(0, heads),
            dt_bias: raw.dt_bias.take(0, heads),
            beta_scale: raw.beta_scale,
        });
        Self {
            v: self.v.take(1, heads),
            a: self.a.take(1, heads),
            b: self.b.take(1, heads),
            raw,
            pool: self.pool.take(1, heads),
            write_pool: self.write_pool.as_ref().map(|pool| pool.take(1, heads)),
            ..self.clone()
        }
    }

    /// The slots `order` of both pools, with every valid index changed to where its slot went.
    #[must_use]
    pub fn take_slots(&self, order: &[usize]) -> Self {
        let moved = |slot: &i64| {
            order
                .iter()
                .position(|&from| from as i64 == *slot)
                .map_or(*slot, |to| to as i64)
        };
        let pick = |slots: &Vec<i64>| slots.iter().map(moved).collect();
        Self {
            pool: self.pool.take(0, order),
            write_pool: self.write_pool.as_ref().map(|pool| pool.take(0, order)),
            read_slots: self.read_slots.as_ref().map(pick),
            write_slots: self.write_slots.as_ref().map(pick),
            ..self.clone()
        }
    }
}

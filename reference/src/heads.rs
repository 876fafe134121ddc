//! Heads of a layer, and the layout of their states.

use crate::error::{Error, elements};

/// Query/key head that value head `hv` reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadMap {
    /// `hv / (HV/H)`
    #[default]
    Grouped,
    /// `hv % H`, the GGUF order.
    Tiled,
}

/// Layout of a pool slot in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// `[HV, V, K]`
    #[default]
    KLast,
    /// `[HV, K, V]`
    VLast,
}

/// Sizes of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    /// Query/key heads, H.
    pub heads: usize,
    /// Value heads, HV.
    pub value_heads: usize,
    /// Head dim of q and k, K.
    pub key_dim: usize,
    /// Head dim of v, V.
    pub value_dim: usize,
    pub head_map: HeadMap,
    pub layout: Layout,
}

impl Heads {
    pub fn check(&self) -> Result<(), Error> {
        let Self {
            heads, value_heads, ..
        } = *self;
        let dims = [
            ("heads", heads),
            ("value_heads", value_heads),
            ("key_dim", self.key_dim),
            ("value_dim", self.value_dim),
        ];
        if let Some(&(name, _)) = dims.iter().find(|(_, dim)| *dim == 0) {
            return Err(Error::Zero { name });
        }
        if !value_heads.is_multiple_of(heads) {
            return Err(Error::Heads { heads, value_heads });
        }
        Ok(())
    }

    /// The query/key head of value head `hv`.
    pub fn of(&self, hv: usize) -> usize {
        match self.head_map {
            HeadMap::Grouped => hv / (self.value_heads / self.heads),
            HeadMap::Tiled => hv % self.heads,
        }
    }

    /// Number of slots P of `pool`.
    pub fn slots_of(&self, name: &'static str, pool: &[f64]) -> Result<usize, Error> {
        Error::check_multiple(
            name,
            "one slot, HV*K*V",
            elements(&[self.value_heads, self.value_dim, self.key_dim]),
            pool.len(),
        )
    }

    /// The state `[V, K]` of value head `hv` in a slot, in either layout of the pool.
    pub fn load(&self, pool: &[f64], slot: usize, hv: usize) -> Vec<f64> {
        self.indices(slot, hv).map(|index| pool[index]).collect()
    }

    /// Stores the state `[V, K]` in the layout of the pool.
    pub fn store(&self, pool: &mut [f64], slot: usize, hv: usize, state: &[f64]) {
        for (index, s) in self.indices(slot, hv).zip(state) {
            pool[index] = *s;
        }
    }

    /// Positions in the pool of the elements of the state `[V, K]`, in order.
    fn indices(&self, slot: usize, hv: usize) -> impl Iterator<Item = usize> + use<> {
        let (key_dim, value_dim, layout) = (self.key_dim, self.value_dim, self.layout);
        let base = (slot * self.value_heads + hv) * value_dim * key_dim;
        (0..value_dim * key_dim).map(move |i| {
            let (v, k) = (i / key_dim, i % key_dim);
            base + match layout {
                Layout::KLast => v * key_dim + k,
                Layout::VLast => k * value_dim + v,
            }
        })
    }
}

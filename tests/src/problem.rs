//! A launch as values.

use gated_delta::ops::BetaScale;
use gated_delta::ops::kda_recurrent::KdaBeta;
use gated_delta::ops::recurrent::RecurrentOptions;

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

    /// The same elements under other dims.
    ///
    /// # Panics
    /// Where these are for more or fewer elements.
    #[must_use]
    pub fn reshape(self, dims: &[usize]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), self.values.len());
        Self {
            dims: dims.to_vec(),
            ..self
        }
    }

    /// Entry `i` of the `outer` outermost dims, taken as one.
    pub fn entry_mut(&mut self, outer: usize, i: usize) -> &mut [f32] {
        let len: usize = self.dims[outer..].iter().product();
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

/// Whose kernels compute a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operator {
    /// One token with GDN's gates, by the kernels for that alone.
    GdnDecode,
    /// GDN's gates.
    GdnMtp,
    /// KDA's gates.
    KdaRecurrent,
}

/// Tensors of tokens, which advance a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens<T> {
    /// `[B, T, H, K]`
    pub k: T,
    /// `[B, T, HV, V]`
    pub v: T,
    /// GDN `[B, T, HV]`, KDA `[B, T, HV, K]`: `a` or `g`.
    pub gate: T,
    /// `[B, T, HV]`: `b` or `beta`.
    pub beta: T,
}

/// Tokens of the last step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept<T, I> {
    /// Of `[B, T']`.
    pub tokens: Tokens<T>,
    /// `[B]`: how many of them are committed.
    pub keep: I,
}

/// Rows of different lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed<I> {
    /// `[B + 1]`
    pub cu_seqlens: I,
    /// T
    pub max_tokens: usize,
}

/// What the gates of tokens are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateKind {
    /// GDN: log decay and β.
    Given,
    /// GDN: `a`, `b` and the factor of sigmoid(b).
    Raw(BetaScale),
    /// KDA.
    Kda(KdaDecay, KdaBeta),
}

/// What KDA's `g` is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KdaDecay {
    /// The log decay.
    Log,
    /// Log decay −exp(A_log) · softplus(g + dt_bias).
    Softplus,
    /// Log decay of this bound · sigmoid(exp(A_log) · (g + dt_bias)).
    LowerBound(f32),
}

/// Gates, and the parameters that they want besides tensors of the tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Gates<T> {
    /// What they are made of.
    pub kind: GateKind,
    /// GDN `[HV]`, KDA `[HV]` or `[H]`.
    pub a_log: Option<T>,
    /// GDN `[HV]`, KDA `[HV, K]` or `[H, K]`.
    pub dt_bias: Option<T>,
}

/// Values of a launch; with `packed`, `[B, T, …]` is `[1, total, …]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Whose kernels compute it.
    pub operator: Operator,
    /// B
    pub batch: usize,
    /// `[B, T, H, K]`, T = 0 for a commit.
    pub q: Array,
    /// Of `[B, T]`.
    pub tokens: Tokens<Array>,
    /// Tokens to commit.
    pub previous: Option<Kept<Array, Vec<i64>>>,
    /// Of new and previous tokens.
    pub gates: Gates<Array>,
    /// `[P, HV, V, K]`
    pub pool: Array,
    /// As `pool`, but for P.
    pub write_pool: Option<Array>,
    /// `[B]`
    pub read_slots: Option<Vec<i64>>,
    /// `[B]`
    pub write_slots: Option<Vec<i64>>,
    /// `[B, T]`
    pub token_slots: Option<Vec<i64>>,
    /// `[B]`
    pub accepted: Option<Vec<i64>>,
    /// Steps of the snapshots.
    pub snapshot_steps: Option<usize>,
    /// Rows of different lengths.
    pub packed: Option<Packed<Vec<i64>>>,
    /// What is fixed for a layer.
    pub options: RecurrentOptions,
}

impl<T> Tokens<T> {
    /// `change` of each tensor.
    pub fn map<U>(&self, mut change: impl FnMut(&T) -> U) -> Tokens<U> {
        Tokens {
            k: change(&self.k),
            v: change(&self.v),
            gate: change(&self.gate),
            beta: change(&self.beta),
        }
    }

    /// Each tensor.
    pub fn each_mut(&mut self) -> [&mut T; 4] {
        [&mut self.k, &mut self.v, &mut self.gate, &mut self.beta]
    }
}

impl<T> Gates<T> {
    /// `change` of each parameter.
    pub fn map<U>(&self, mut change: impl FnMut(&T) -> U) -> Gates<U> {
        Gates {
            kind: self.kind,
            a_log: self.a_log.as_ref().map(&mut change),
            dt_bias: self.dt_bias.as_ref().map(change),
        }
    }
}

impl Problem {
    /// T; with packed rows the most that one may have, for a commit 0.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.packed
            .as_ref()
            .map_or(self.q.dims[1], |packed| packed.max_tokens)
    }

    /// The same rows, in the order `rows`; pools as they are.
    ///
    /// # Panics
    /// Where slots depend on the order of rows, and where the rows are packed.
    #[must_use]
    pub fn take_rows(&self, rows: &[usize]) -> Self {
        let slots = self.read_slots.is_some() || self.token_slots.is_some();
        assert!(slots, "without read slots row b has slot b");
        assert!(self.packed.is_none(), "packed rows are not of one length");
        let of_row = |values: &Vec<i64>| {
            let dims = [self.batch, values.len() / self.batch.max(1)];
            take(values, &dims, 0, rows)
        };
        let tokens = |tokens: &Tokens<Array>| tokens.map(|array| array.take(0, rows));
        Self {
            batch: rows.len(),
            q: self.q.take(0, rows),
            tokens: tokens(&self.tokens),
            previous: self.previous.as_ref().map(|previous| Kept {
                tokens: tokens(&previous.tokens),
                keep: of_row(&previous.keep),
            }),
            read_slots: self.read_slots.as_ref().map(of_row),
            write_slots: self.write_slots.as_ref().map(of_row),
            token_slots: self.token_slots.as_ref().map(of_row),
            accepted: self.accepted.as_ref().map(of_row),
            ..self.clone()
        }
    }

    /// The tokens `order` of every row, in this order; states and previous tokens as they are.
    ///
    /// # Panics
    /// Where there are token slots, which are of all tokens.
    #[must_use]
    pub fn take_tokens(&self, order: &[usize]) -> Self {
        assert!(self.token_slots.is_none(), "slots are of all tokens");
        Self {
            q: self.q.take(1, order),
            tokens: self.tokens.map(|array| array.take(1, order)),
            ..self.clone()
        }
    }

    /// The same rows one behind the other, each of all its tokens.
    #[must_use]
    pub fn packed(&self) -> Self {
        let [rows, tokens] = [self.q.dims[0], self.q.dims[1]];
        let pack = |array: &Array| {
            let dims = [&[1, rows * tokens], &array.dims[2..]].concat();
            array.clone().reshape(&dims)
        };
        Self {
            q: pack(&self.q),
            tokens: self.tokens.map(pack),
            packed: Some(Packed {
                cu_seqlens: (0..=rows).map(|b| (b * tokens) as i64).collect(),
                max_tokens: tokens,
            }),
            ..self.clone()
        }
    }

    /// The value heads `heads`, in this order; q and k as they are, and parameters of query/key heads.
    #[must_use]
    pub fn take_value_heads(&self, heads: &[usize]) -> Self {
        let value_heads = self.pool.dims[1];
        let tokens = |tokens: &Tokens<Array>| Tokens {
            k: tokens.k.clone(),
            v: tokens.v.take(2, heads),
            gate: tokens.gate.take(2, heads),
            beta: tokens.beta.take(2, heads),
        };
        let parameter = |array: &Array| match array.dims[0] == value_heads {
            true => array.take(0, heads),
            false => array.clone(),
        };
        Self {
            tokens: tokens(&self.tokens),
            previous: self.previous.as_ref().map(|previous| Kept {
                tokens: tokens(&previous.tokens),
                keep: previous.keep.clone(),
            }),
            gates: self.gates.map(parameter),
            pool: self.pool.take(1, heads),
            write_pool: self.write_pool.as_ref().map(|pool| pool.take(1, heads)),
            ..self.clone()
        }
    }

    /// The same with another q and other keys for each head.
    #[must_use]
    pub fn map_qk(&self, mut change: impl FnMut(&Array) -> Array) -> Self {
        let mut problem = self.clone();
        problem.q = change(&self.q);
        problem.tokens.k = change(&self.tokens.k);
        if let Some(previous) = &mut problem.previous {
            previous.tokens.k = change(&previous.tokens.k);
        }
        problem
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
            token_slots: self.token_slots.as_ref().map(pick),
            ..self.clone()
        }
    }
}

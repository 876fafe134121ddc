//! Values of a launch, without their placement in memory.

use gated_delta::{Activation, Entry, Formulation};
use gated_delta_harness::arguments::{
    Arguments, Convolved, GatedNorm, Kept, KeptX, New, Operator, Packed, Tokens,
};
use gated_delta_kernels::launch::{Family, Stage};
use gated_delta_kernels::prefill;
use gated_delta_kernels::prefill::workspace::{carried_bytes, tokens_bytes};

use crate::buffer::View;
use crate::choice::is_prefill;

/// A dense row-major array of floats or integers. NaN marks an element that no kernel may read.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Dims, outermost first.
    pub dims: Vec<usize>,
    /// Values of the elements. Empty if all of them are NaN.
    pub values: Vec<f64>,
}

/// Values of a launch. With `packed`, `[B, T, …]` is `[1, total, …]`. States are `[…, V, K]` in both layouts.
pub type Problem = Arguments<Array>;

impl Array {
    /// An array whose elements are successive results of `value`.
    pub fn new(dims: &[usize], mut value: impl FnMut() -> f64) -> Self {
        Self {
            dims: dims.to_vec(),
            values: (0..dims.iter().product()).map(|_| value()).collect(),
        }
    }

    /// An array of NaN, which no kernel may read.
    #[must_use]
    pub fn unread(dims: &[usize]) -> Self {
        Self {
            dims: dims.to_vec(),
            values: Vec::new(),
        }
    }

    /// An array with the same dims and `value` in every element.
    #[must_use]
    pub fn filled(self, value: f64) -> Self {
        let len = self.dims.iter().product();
        Self {
            values: vec![value; len],
            ..self
        }
    }

    /// An array of one dim. Values near the ends of the range of i64 become the ends.
    pub fn indices(values: impl IntoIterator<Item = i64>) -> Self {
        let values: Vec<f64> = values.into_iter().map(|value| value as f64).collect();
        Self {
            dims: vec![values.len()],
            values,
        }
    }

    /// The elements as integers.
    #[must_use]
    pub fn integers(&self) -> Vec<i64> {
        self.values.iter().map(|value| *value as i64).collect()
    }

    /// The method form of [`take`].
    #[must_use]
    pub fn take(&self, axis: usize, order: &[usize]) -> Self {
        let mut dims = self.dims.clone();
        dims[axis] = order.len();
        let values = match self.values.is_empty() {
            true => Vec::new(),
            false => take(&self.values, &self.dims, axis, order),
        };
        Self { dims, values }
    }

    /// The same elements with other dims of equal size.
    #[must_use]
    pub fn reshape(self, dims: &[usize]) -> Self {
        Self {
            dims: dims.to_vec(),
            ..self
        }
    }

    /// The elements of entry `i` of the `outer` outermost dims, counted as one dim.
    pub fn entry_mut(&mut self, outer: usize, i: usize) -> &mut [f64] {
        let len: usize = self.dims[outer..].iter().product();
        &mut self.values[i * len..][..len]
    }
}

/// The entries `order` of dim `axis` of a dense array, in this order. An entry may occur several times, or not at all.
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

/// A tensor or array with dims.
pub trait Shaped {
    /// Dims, outermost first.
    fn dims(&self) -> &[usize];
}

impl Shaped for Array {
    fn dims(&self) -> &[usize] {
        &self.dims
    }
}

impl Shaped for View {
    fn dims(&self) -> &[usize] {
        &self.dims
    }
}

/// Sizes of a launch.
pub trait Sizes<T> {
    /// B.
    fn batch(&self) -> usize;
    /// T. The largest possible length of packed rows; 0 for a commit.
    fn max_tokens(&self) -> usize;
    /// HV.
    fn value_heads(&self) -> usize;
    /// The pool that final states are written to.
    fn written_pool(&self) -> &T;
    /// The output o. `None` for a commit.
    fn outputs(&self) -> Option<&T>;
    /// The windows that are read and the windows that are written. `None` without a convolution.
    fn windows(&self) -> Option<[&T; 2]>;
    /// T'. `None` without previous tokens.
    fn previous_tokens(&self) -> Option<usize>;
}

impl<T: Shaped> Sizes<T> for Arguments<T> {
    fn batch(&self) -> usize {
        match (&self.packed, self.outputs(), &self.previous) {
            (Some(packed), ..) => packed.cu_seqlens.dims()[0].saturating_sub(1),
            (None, Some(o), _) => o.dims()[0],
            (None, None, Some(previous)) => previous.tokens.k.dims()[0],
            (None, None, None) => self.previous_x.as_ref().map_or(0, |kept| kept.x.dims()[0]),
        }
    }

    fn max_tokens(&self) -> usize {
        let tokens = self.outputs().map_or(0, |o| o.dims()[1]);
        self.packed.as_ref().map_or(tokens, |packed| {
            let is_chunked = match self.options.formulation {
                Formulation::Auto => is_prefill(self),
                named => named == Formulation::Chunked,
            };
            if !is_chunked {
                return packed.max_tokens;
            }
            // A row has at most all tokens, and at most 64 if the caller promises short rows.
            let most = match packed.max_tokens {
                0..=64 => 64,
                _ => usize::MAX,
            };
            tokens.min(most).max(1)
        })
    }

    fn value_heads(&self) -> usize {
        self.pool.dims()[1]
    }

    fn written_pool(&self) -> &T {
        self.write_pool.as_ref().unwrap_or(&self.pool)
    }

    fn outputs(&self) -> Option<&T> {
        let convolved = self.convolved.as_ref().map(|convolved| &convolved.o);
        self.new.as_ref().map(|new| &new.o).or(convolved)
    }

    fn windows(&self) -> Option<[&T; 2]> {
        let conv = conv(self)?;
        Some([conv.windows, conv.write_windows.unwrap_or(conv.windows)])
    }

    fn previous_tokens(&self) -> Option<usize> {
        let k = self.previous.as_ref().map(|kept| &kept.tokens.k);
        let x = self.previous_x.as_ref().map(|kept| &kept.x);
        Some(k.or(x)?.dims()[1])
    }
}

/// The convolution of new and previous tokens, without its inputs x.
#[derive(Debug)]
pub struct Conv<'a, T> {
    /// H.
    pub heads: usize,
    /// Taps, `[D, W]`.
    pub weight: &'a T,
    /// Bias of the sums, `[D]`.
    pub bias: Option<&'a T>,
    /// Activation of the sums.
    pub activation: Activation,
    /// Windows that are read.
    pub windows: &'a T,
    /// Windows that are written, if they are other ones.
    pub write_windows: Option<&'a T>,
}

/// The convolution of a launch or a commit. `None` without one.
pub fn conv<T>(args: &Arguments<T>) -> Option<Conv<'_, T>> {
    if let Some(convolved) = &args.convolved {
        return Some(Conv {
            heads: convolved.heads,
            weight: &convolved.weight,
            bias: convolved.bias.as_ref(),
            activation: convolved.activation,
            windows: &convolved.windows,
            write_windows: convolved.write_windows.as_ref(),
        });
    }
    let conv = args.previous_x.as_ref()?.conv.as_ref()?;
    Some(Conv {
        heads: conv.heads,
        weight: &conv.weight,
        bias: conv.bias.as_ref(),
        activation: conv.activation,
        windows: &conv.windows,
        write_windows: conv.write_windows.as_ref(),
    })
}

/// The windows that are read, and the separate windows that are written. `None` without a convolution.
pub fn windows_mut<T>(args: &mut Arguments<T>) -> Option<(&mut T, &mut Option<T>)> {
    if let Some(convolved) = &mut args.convolved {
        return Some((&mut convolved.windows, &mut convolved.write_windows));
    }
    let conv = args.previous_x.as_mut()?.conv.as_mut()?;
    Some((&mut conv.windows, &mut conv.write_windows))
}

/// The snapshots of windows, one after each token.
pub fn window_snapshots<T>(args: &Arguments<T>) -> Option<&T> {
    args.convolved.as_ref()?.window_snapshots.as_ref()
}

/// The number of kept previous tokens of each row.
pub fn keep<T>(args: &Arguments<T>) -> Option<&T> {
    let x = args.previous_x.as_ref().map(|kept| &kept.keep);
    args.previous.as_ref().map(|kept| &kept.keep).or(x)
}

/// The tensors of tokens.
pub fn of_tokens<T>(tokens: &mut Tokens<T>) -> [&mut T; 4] {
    [
        &mut tokens.k,
        &mut tokens.v,
        &mut tokens.gate,
        &mut tokens.beta,
    ]
}

/// A workspace that is large enough on any GPU, one with v and o of single tokens included. `None` if the launch takes none.
#[must_use]
pub fn workspace(problem: &Problem) -> Option<Array> {
    let o = problem.outputs()?;
    if problem.options.formulation != Formulation::Chunked {
        return None;
    }
    let (rows, v_dim) = (problem.batch(), o.dims[3]);
    let total = o.dims[0] * o.dims[1];
    let heads = match (&problem.new, &problem.convolved) {
        (Some(new), _) => new.q.dims[2],
        (None, Some(convolved)) => convolved.heads,
        (None, None) => return None,
    };
    let ratio = (problem.value_heads() / heads) as u32;
    let per_channel = Some(problem.gates.operator() == Operator::Kda);
    let wanted = (Family::chunked(Stage::Prepare), per_channel, v_dim as u32);
    let prepares = |entry: &&Entry| {
        let computes = entry.computes();
        computes.is_some_and(|it| (it.family, it.per_channel, it.v) == wanted)
    };
    let entry = Entry::ALL.iter().find(prepares)?;
    let units = prefill::units(total as u64, rows as u64, problem.positions.is_some());
    let mut bytes =
        units as usize * heads * entry.workspace_bytes_per_unit(ratio, true, true) as usize;
    bytes += tokens_bytes(rows as u32, problem.value_heads() as u32, v_dim as u32) as usize;
    if units >= 32 {
        // The state that a segment leaves for the next one.
        let k_dim = entry.computes()?.k;
        bytes += carried_bytes(problem.value_heads() as u32, k_dim, v_dim as u32) as usize;
    }
    if let Some(split) = problem.options.split {
        let states = prefill::split::states(total as u64, rows as u64, split);
        let of_state = prefill::split::bytes_of_state(problem.value_heads() as u32, v_dim as u32);
        bytes += (states * of_state) as usize;
    }
    Some(Array::unread(&[bytes.div_ceil(4)]))
}

/// Problems derived from a problem.
pub trait Change {
    /// The problem with each tensor changed. `change` takes the name that errors use.
    #[must_use]
    fn each(&self, change: impl FnMut(&'static str, &mut Array)) -> Problem;
    /// The problem with each tensor of `[B, T, …]` changed.
    #[must_use]
    fn each_new(&self, change: impl Fn(&mut Array)) -> Problem;
    /// The rows `rows`, in this order. Pools and weights are unchanged. The problem must name the slots of its rows, and may not be
    /// packed.
    #[must_use]
    fn take_rows(&self, rows: &[usize]) -> Problem;
    /// The tokens `order` of every row, in this order. States and previous tokens are unchanged. Token slots are dropped, since
    /// they belong to all tokens.
    #[must_use]
    fn take_tokens(&self, order: &[usize]) -> Problem;
    /// The problem with its rows packed, each with all of its tokens.
    #[must_use]
    fn packed(&self) -> Problem;
    /// The value heads `heads`, in this order. q, k and the parameters of query/key heads are unchanged.
    #[must_use]
    fn take_value_heads(&self, heads: &[usize]) -> Problem;
    /// The problem with q and k changed in each query/key head.
    #[must_use]
    fn map_qk(&self, change: impl Fn(&Array) -> Array) -> Problem;
    /// The slots `order` of all pools. Valid indices follow their slots.
    #[must_use]
    fn take_slots(&self, order: &[usize]) -> Problem;
    /// The problem with the gates of new and previous tokens changed: the inputs of decays, and betas.
    #[must_use]
    fn map_gates(&self, change: impl FnMut(&mut Array, &mut Array)) -> Problem;
}

impl Change for Problem {
    fn each(&self, mut change: impl FnMut(&'static str, &mut Array)) -> Problem {
        let mut problem = self.clone();
        for (name, array) in problem.tensors_mut() {
            change(name, array);
        }
        problem
    }

    fn each_new(&self, change: impl Fn(&mut Array)) -> Problem {
        let mut problem = self.clone();
        if let Some(New { q, tokens, o }) = &mut problem.new {
            of_tokens(tokens)
                .into_iter()
                .chain([q, o])
                .for_each(&change);
        }
        if let Some(Convolved {
            x, gate, beta, o, ..
        }) = &mut problem.convolved
        {
            [x, gate, beta, o].into_iter().for_each(&change);
        }
        if let Some(GatedNorm { z, .. }) = &mut problem.norm {
            change(z);
        }
        problem
    }

    fn take_rows(&self, rows: &[usize]) -> Problem {
        let slots = self.read_slots.is_some() || self.token_slots.is_some();
        assert!(slots, "without read slots row b has slot b");
        assert!(self.packed.is_none(), "packed rows are not of one length");
        self.each(|name, array| match name {
            "pool" | "write_pool" | "A_log" | "dt_bias" => {}
            "windows" | "write_windows" | "conv_weight" | "conv_bias" | "norm_weight" => {}
            _ => *array = array.take(0, rows),
        })
    }

    fn take_tokens(&self, order: &[usize]) -> Problem {
        assert!(self.token_slots.is_none(), "slots are of all tokens");
        self.each_new(|array| *array = array.take(1, order))
    }

    fn packed(&self) -> Problem {
        let [rows, tokens] = [self.batch(), self.max_tokens()];
        let mut problem = self.each_new(|array| {
            array.dims.splice(..2, [1, rows * tokens]);
        });
        problem.packed = Some(Packed {
            cu_seqlens: Array::indices((0..=rows).map(|b| (b * tokens) as i64)),
            max_tokens: tokens,
        });
        problem
    }

    fn take_value_heads(&self, heads: &[usize]) -> Problem {
        let value_heads = self.value_heads();
        self.each(|name, array| match name {
            "v" | "a" | "b" | "g" | "beta" | "o" | "snapshots" => *array = array.take(2, heads),
            "previous v" | "previous a" | "previous b" | "previous g" | "previous beta" => {
                *array = array.take(2, heads);
            }
            "pool" | "write_pool" => *array = array.take(1, heads),
            "A_log" | "dt_bias" if array.dims[0] == value_heads => *array = array.take(0, heads),
            _ => {}
        })
    }

    fn map_qk(&self, change: impl Fn(&Array) -> Array) -> Problem {
        self.each(|name, array| {
            if matches!(name, "q" | "k" | "previous k") {
                *array = change(array);
            }
        })
    }

    fn take_slots(&self, order: &[usize]) -> Problem {
        let moved = |slot: i64| {
            let to = order.iter().position(|&from| from as i64 == slot);
            to.map_or(slot, |to| to as i64)
        };
        self.each(|name, array| match name {
            "pool" | "write_pool" | "windows" | "write_windows" => *array = array.take(0, order),
            "read_slots" | "write_slots" | "token_slots" | "checkpoint_slots" => {
                let slots = array.integers().into_iter().map(moved);
                *array = Array::indices(slots).reshape(&array.dims);
            }
            _ => {}
        })
    }

    fn map_gates(&self, mut change: impl FnMut(&mut Array, &mut Array)) -> Problem {
        let mut problem = self.clone();
        if let Some(New { tokens, .. }) = &mut problem.new {
            change(&mut tokens.gate, &mut tokens.beta);
        }
        if let Some(Convolved { gate, beta, .. }) = &mut problem.convolved {
            change(gate, beta);
        }
        if let Some(Kept { tokens, .. }) = &mut problem.previous {
            change(&mut tokens.gate, &mut tokens.beta);
        }
        if let Some(KeptX { gate, beta, .. }) = &mut problem.previous_x {
            change(gate, beta);
        }
        problem
    }
}

//! A launch as values.

use gated_delta_harness::arguments::{Arguments, Convolved, Kept, New, Packed, Tokens};

use crate::buffer::View;

/// A dense row-major array of floats, or of integers. NaN stands for what nobody may read.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Dims, outermost first.
    pub dims: Vec<usize>,
    /// Elements; none where all of them are NaN.
    pub values: Vec<f64>,
}

/// Values of a launch; with `packed`, `[B, T, …]` is `[1, total, …]`. States are `[…, V, K]` whatever the layout.
pub type Problem = Arguments<Array>;

impl Array {
    /// An array of what `value` returns, element after element.
    pub fn new(dims: &[usize], mut value: impl FnMut() -> f64) -> Self {
        Self {
            dims: dims.to_vec(),
            values: (0..dims.iter().product()).map(|_| value()).collect(),
        }
    }

    /// An array of what nobody may read.
    #[must_use]
    pub fn unread(dims: &[usize]) -> Self {
        Self {
            dims: dims.to_vec(),
            values: Vec::new(),
        }
    }

    /// An array of one dim. A value near the ends of an i64 becomes the end.
    pub fn indices(values: impl IntoIterator<Item = i64>) -> Self {
        let values: Vec<f64> = values.into_iter().map(|value| value as f64).collect();
        Self {
            dims: vec![values.len()],
            values,
        }
    }

    /// The elements of an array of integers.
    #[must_use]
    pub fn integers(&self) -> Vec<i64> {
        self.values.iter().map(|value| *value as i64).collect()
    }

    /// As [`take`].
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

    /// The same elements under other dims, as many.
    #[must_use]
    pub fn reshape(self, dims: &[usize]) -> Self {
        Self {
            dims: dims.to_vec(),
            ..self
        }
    }

    /// Entry `i` of the `outer` outermost dims, taken as one.
    pub fn entry_mut(&mut self, outer: usize, i: usize) -> &mut [f64] {
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

/// What has dims.
pub trait Shaped {
    /// Outermost first.
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
    /// B
    fn batch(&self) -> usize;
    /// T; with packed rows the most that one may have, for a commit 0.
    fn max_tokens(&self) -> usize;
    /// HV
    fn value_heads(&self) -> usize;
    /// The pool that new states go to.
    fn written_pool(&self) -> &T;
    /// o, which a commit has not.
    fn outputs(&self) -> Option<&T>;
    /// The windows that are read, and those that are written, of a convolution.
    fn windows(&self) -> Option<[&T; 2]>;
}

impl<T: Shaped> Sizes<T> for Arguments<T> {
    fn batch(&self) -> usize {
        match (&self.packed, self.outputs(), &self.previous) {
            (Some(packed), ..) => packed.cu_seqlens.dims()[0].saturating_sub(1),
            (None, Some(o), _) => o.dims()[0],
            (None, None, Some(previous)) => previous.tokens.k.dims()[0],
            (None, None, None) => 0,
        }
    }

    fn max_tokens(&self) -> usize {
        let tokens = self.outputs().map_or(0, |o| o.dims()[1]);
        self.packed
            .as_ref()
            .map_or(tokens, |packed| packed.max_tokens)
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
        let Convolved {
            windows,
            write_windows,
            ..
        } = self.convolved.as_ref()?;
        Some([windows, write_windows.as_ref().unwrap_or(windows)])
    }
}

/// Each tensor.
pub fn of_tokens<T>(tokens: &mut Tokens<T>) -> [&mut T; 4] {
    [
        &mut tokens.k,
        &mut tokens.v,
        &mut tokens.gate,
        &mut tokens.beta,
    ]
}

/// Other problems that follow from one.
pub trait Change {
    /// The same with each tensor, by its name in errors, changed.
    #[must_use]
    fn each(&self, change: impl FnMut(&'static str, &mut Array)) -> Problem;
    /// The same with each tensor of `[B, T, …]` changed.
    #[must_use]
    fn each_new(&self, change: impl Fn(&mut Array)) -> Problem;
    /// The same rows, in the order `rows`; pools and weights as they are. Each row has to say where its states are, and rows not
    /// to be packed.
    #[must_use]
    fn take_rows(&self, rows: &[usize]) -> Problem;
    /// The tokens `order` of every row, in this order; states and previous tokens as they are, and without token
    /// slots, which are of all tokens.
    #[must_use]
    fn take_tokens(&self, order: &[usize]) -> Problem;
    /// The same rows one behind the other, each of all its tokens.
    #[must_use]
    fn packed(&self) -> Problem;
    /// The value heads `heads`, in this order; q and k as they are, and parameters of query/key heads.
    #[must_use]
    fn take_value_heads(&self, heads: &[usize]) -> Problem;
    /// The same with another q and other keys for each head.
    #[must_use]
    fn map_qk(&self, change: impl Fn(&Array) -> Array) -> Problem;
    /// The slots `order` of all pools, with every valid index changed to where its slot went.
    #[must_use]
    fn take_slots(&self, order: &[usize]) -> Problem;
    /// The same with the gates of new and of previous tokens changed.
    #[must_use]
    fn map_tokens(&self, change: impl FnMut(&mut Tokens<Array>)) -> Problem;
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
            of_tokens(tokens).into_iter().chain([q, o]).for_each(change);
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
            "read_slots" | "write_slots" | "token_slots" => {
                let slots = array.integers().into_iter().map(moved);
                *array = Array::indices(slots).reshape(&array.dims);
            }
            _ => {}
        })
    }

    fn map_tokens(&self, mut change: impl FnMut(&mut Tokens<Array>)) -> Problem {
        let mut problem = self.clone();
        if let Some(New { tokens, .. }) = &mut problem.new {
            change(tokens);
        }
        if let Some(Kept { tokens, .. }) = &mut problem.previous {
            change(tokens);
        }
        problem
    }
}

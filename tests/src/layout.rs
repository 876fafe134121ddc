//! How a problem lies in memory.

use gated_delta::DType;
use gated_delta::ops::StateLayout;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::buffer::{Buffer, View};
use crate::case::Case;
use crate::problem::{Array, Kept, Packed, Problem, Tokens};

/// Gaps between the rows, heads and slots of a tensor, and before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spacing {
    /// None.
    Dense,
    /// Multiples of 16 bytes, or none.
    Aligned,
    /// Any number of elements, and heads may lie outside of rows; never 16-byte aligned.
    Odd,
}

/// How a problem lies in memory.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// Element of the pools.
    pub state: DType,
    /// Elements of q, k, v and o.
    pub qkvo: [DType; 4],
    /// Elements of a or g, and of b or beta.
    pub gates: [DType; 2],
    /// Elements of the read, write and token slots, of accepted, cu_seqlens and keep.
    pub indices: [DType; 6],
    /// q, k and v are slices of one buffer where their dtypes are the same, and so are the gates.
    pub packed: bool,
    /// Gaps of all tensors but the pools.
    pub io: Spacing,
    /// Gaps of the pools.
    pub pools: Spacing,
    /// Of the gaps' sizes.
    pub seed: u64,
}

impl Form {
    /// Everything f32, i32 and dense.
    pub const PLAIN: Self = Self {
        state: DType::F32,
        qkvo: [DType::F32; 4],
        gates: [DType::F32; 2],
        indices: [DType::I32; 6],
        packed: false,
        io: Spacing::Dense,
        pools: Spacing::Dense,
        seed: 0,
    };
}

impl Problem {
    /// Lays it out.
    #[must_use]
    pub fn case(&self, form: &Form) -> Case {
        let mut memory = Memory {
            buffers: Vec::new(),
            rng: StdRng::seed_from_u64(form.seed),
            spacing: form.io,
        };
        let (q, tokens) = memory.tokens(form, &self.q, &self.tokens);
        let previous = self.previous.as_ref().map(|previous| {
            let no_q = Array::new(&previous.tokens.k.dims, || f32::NAN);
            Kept {
                tokens: memory.tokens(form, &no_q, &previous.tokens).1,
                keep: memory.indices(form.indices[5], &[self.batch], &previous.keep),
            }
        });
        let gates = self.gates.map(|array| {
            let view = memory.tensor(DType::F32, &array.dims, array.dims.len());
            memory.write(&view, array);
            view
        });
        let max_tokens = self.max_tokens();
        let mut indices = |values: &Option<Vec<i64>>, dtype: usize, dims: &[usize]| {
            let values = values.as_ref()?;
            Some(memory.indices(form.indices[dtype], dims, values))
        };
        let read_slots = indices(&self.read_slots, 0, &[self.batch]);
        let write_slots = indices(&self.write_slots, 1, &[self.batch]);
        let token_slots = indices(&self.token_slots, 2, &[self.batch, max_tokens]);
        let accepted = indices(&self.accepted, 3, &[self.batch]);
        let packed = self.packed.as_ref().map(|packed| Packed {
            cu_seqlens: memory.indices(form.indices[4], &[self.batch + 1], &packed.cu_seqlens),
            max_tokens,
        });
        let o = memory.tensor(form.qkvo[3], &self.tokens.v.dims, 1);

        memory.spacing = form.pools;
        let layout = self.options.state_layout;
        let pool = memory.pool(form.state, layout, &self.pool);
        let write_pool = self
            .write_pool
            .as_ref()
            .map(|array| memory.pool(form.state, layout, array));
        let snapshots = self.snapshot_steps.map(|steps| {
            let dims = [&[self.batch, steps], &self.pool.dims[1..]].concat();
            memory.tensor(form.state, &dims, 3)
        });
        Case {
            operator: self.operator,
            buffers: memory.buffers,
            q,
            tokens,
            o,
            previous,
            gates,
            pool,
            write_pool,
            read_slots,
            write_slots,
            token_slots,
            accepted,
            snapshots,
            packed,
            options: self.options,
        }
    }
}

/// Buffers under construction.
struct Memory {
    buffers: Vec<Buffer>,
    rng: StdRng,
    spacing: Spacing,
}

impl Memory {
    /// Elements to leave out.
    fn gap(&mut self) -> usize {
        match self.spacing {
            Spacing::Dense => 0,
            Spacing::Aligned => 8 * self.rng.random_range(0..=2),
            Spacing::Odd => self.rng.random_range(1..=3),
        }
    }

    /// A tensor in a buffer of its own, its `inner` innermost dims without gaps.
    fn tensor(&mut self, dtype: DType, dims: &[usize], inner: usize) -> View {
        let outer = dims.len() - inner;
        let sizes: Vec<usize> = dims.iter().map(|&dim| dim.max(1)).collect();
        let mut order: Vec<usize> = (0..outer).rev().collect();
        if self.spacing == Spacing::Odd {
            order.shuffle(&mut self.rng);
        }
        let mut strides = vec![1; dims.len()];
        for dim in (outer..dims.len() - 1).rev() {
            strides[dim] = strides[dim + 1] * sizes[dim + 1];
        }
        let mut extent = sizes[outer..].iter().product();
        for dim in order {
            strides[dim] = extent + self.gap();
            extent = sizes[dim] * strides[dim];
        }
        let offset = self.gap();
        let len = offset + extent + self.gap();
        self.buffers.push(Buffer::new(dtype, len));
        View {
            buffer: self.buffers.len() - 1,
            offset,
            dims: dims.to_vec(),
            strides,
        }
    }

    /// Slices of one buffer, side by side in every token.
    fn packed<const N: usize>(&mut self, dtype: DType, arrays: [&Array; N]) -> [View; N] {
        let widths = arrays.map(|array| array.dims[2..].iter().product::<usize>());
        let [rows, tokens] = [arrays[0].dims[0], arrays[0].dims[1]];
        let whole = self.tensor(dtype, &[rows, tokens, widths.iter().sum()], 1);
        let mut offset = whole.offset;
        std::array::from_fn(|i| {
            let inner = &arrays[i].dims[2..];
            let mut view = View {
                offset,
                dims: arrays[i].dims.clone(),
                ..whole.clone()
            };
            view.strides.truncate(2);
            view.strides
                .extend((0..inner.len()).map(|dim| inner[dim + 1..].iter().product::<usize>()));
            offset += widths[i];
            self.write(&view, arrays[i]);
            view
        })
    }

    /// An array in a buffer of its own.
    fn array(&mut self, dtype: DType, array: &Array) -> View {
        let view = self.tensor(dtype, &array.dims, 1);
        self.write(&view, array);
        view
    }

    /// q, and the other tensors of its tokens.
    fn tokens(&mut self, form: &Form, q: &Array, tokens: &Tokens<Array>) -> (View, Tokens<View>) {
        let [q_type, k_type, v_type, _] = form.qkvo;
        let [gate_type, beta_type] = form.gates;
        let Tokens { k, v, gate, beta } = tokens;
        let [q, k, v] = if form.packed && q_type == k_type && k_type == v_type {
            self.packed(q_type, [q, k, v])
        } else {
            [(q_type, q), (k_type, k), (v_type, v)].map(|(dtype, array)| self.array(dtype, array))
        };
        let [beta, gate] = if form.packed && gate_type == beta_type {
            self.packed(gate_type, [beta, gate])
        } else {
            [(beta_type, beta), (gate_type, gate)].map(|(dtype, array)| self.array(dtype, array))
        };
        (q, Tokens { k, v, gate, beta })
    }

    /// Integers, the innermost dim without gaps.
    fn indices(&mut self, dtype: DType, dims: &[usize], values: &[i64]) -> View {
        let view = self.tensor(dtype, dims, 1);
        for (i, value) in view.positions().into_iter().zip(values) {
            self.buffers[view.buffer].set_bits(i, *value as u64);
        }
        view
    }

    /// `array` is `[P, HV, V, K]`.
    fn pool(&mut self, dtype: DType, layout: StateLayout, array: &Array) -> View {
        let view = self.tensor(dtype, &array.dims, 3);
        let mut logical = view.clone();
        if layout == StateLayout::VLast {
            logical.strides.swap(2, 3);
        }
        self.write(&logical, array);
        view
    }

    /// Writes all values that are not NaN.
    fn write(&mut self, view: &View, array: &Array) {
        for (i, &value) in view
            .positions()
            .into_iter()
            .zip(&array.values)
            .filter(|(_, value)| !value.is_nan())
        {
            self.buffers[view.buffer].set_float(i, value);
        }
    }
}

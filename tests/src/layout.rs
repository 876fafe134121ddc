//! How a problem lies in memory.

use gated_delta::DType;
use gated_delta::ops::StateLayout;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::buffer::{Buffer, View};
use crate::case::Case;
use crate::problem::{Array, Problem};

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
    /// Elements of a and b.
    pub gates: [DType; 2],
    /// Elements of the read and write slots.
    pub slots: [DType; 2],
    /// q, k and v are slices of one buffer where their dtypes are the same, and so are b and a.
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
        slots: [DType::I32; 2],
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
        let [q_type, k_type, v_type, o_type] = form.qkvo;
        let [q, k, v] = if form.packed && q_type == k_type && k_type == v_type {
            memory.packed(q_type, [&self.q, &self.k, &self.v])
        } else {
            [(q_type, &self.q), (k_type, &self.k), (v_type, &self.v)].map(|(dtype, array)| {
                let view = memory.activations(dtype, &array.dims);
                memory.write(&view, array);
                view
            })
        };
        let [a_type, b_type] = form.gates;
        let [b, a] = if form.packed && a_type == b_type {
            memory.packed(a_type, [&self.b, &self.a])
        } else {
            [(b_type, &self.b), (a_type, &self.a)]
                .map(|(dtype, array)| memory.packed(dtype, [array])[0].clone())
        };
        let raw = self.raw.as_ref().map(|raw| {
            let [a_log, dt_bias] = [&raw.a_log, &raw.dt_bias].map(|array| {
                let view = memory.vector(DType::F32, array.dims[0]);
                memory.write(&view, array);
                view
            });
            (a_log, dt_bias, raw.beta_scale)
        });
        let mut slots = |slots: &Option<Vec<i64>>, dtype| {
            slots.as_ref().map(|slots| {
                let view = memory.vector(dtype, slots.len());
                for (i, slot) in view.positions().into_iter().zip(slots) {
                    memory.buffers[view.buffer].set_bits(i, *slot as u64);
                }
                view
            })
        };
        let read_slots = slots(&self.read_slots, form.slots[0]);
        let write_slots = slots(&self.write_slots, form.slots[1]);
        let o = memory.activations(o_type, &self.v.dims);

        memory.spacing = form.pools;
        let layout = self.options.state_layout;
        let pool = memory.pool(form.state, layout, &self.pool);
        let write_pool = self
            .write_pool
            .as_ref()
            .map(|array| memory.pool(form.state, layout, array));
        let options = self.options;
        Case {
            buffers: memory.buffers,
            q,
            k,
            v,
            a,
            b,
            raw,
            o,
            pool,
            write_pool,
            read_slots,
            write_slots,
            options,
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

    /// A view of a buffer of its own.
    fn view(&mut self, dtype: DType, dims: &[usize], strides: &[usize]) -> View {
        let offset = self.gap();
        let span: usize = dims
            .iter()
            .zip(strides)
            .map(|(&dim, stride)| dim.saturating_sub(1) * stride)
            .sum();
        let len = offset + span + dims[dims.len() - 1] + self.gap();
        self.buffers.push(Buffer::new(dtype, len));
        View {
            buffer: self.buffers.len() - 1,
            offset,
            dims: dims.to_vec(),
            strides: strides.to_vec(),
        }
    }

    /// `[B, 1, heads, width]`
    fn activations(&mut self, dtype: DType, dims: &[usize]) -> View {
        let [batch, heads, width] = [dims[0], dims[1], dims[2]];
        let (row, head) = if self.spacing == Spacing::Odd && self.rng.random() {
            let row = width + self.gap();
            (row, batch * row + self.gap())
        } else {
            let head = width + self.gap();
            (heads * head + self.gap(), head)
        };
        self.view(dtype, &[batch, 1, heads, width], &[row, row, head, 1])
    }

    /// Slices of one buffer, side by side in every row.
    fn packed<const N: usize>(&mut self, dtype: DType, arrays: [&Array; N]) -> [View; N] {
        let widths = arrays.map(|array| array.dims[1..].iter().product::<usize>());
        let (batch, width) = (arrays[0].dims[0], widths.iter().sum());
        let row = width + self.gap();
        let whole = self.view(dtype, &[batch, width], &[row, 1]);
        let mut offset = whole.offset;
        std::array::from_fn(|i| {
            let inner = &arrays[i].dims[1..];
            let mut view = View {
                offset,
                dims: [&[batch, 1], inner].concat(),
                ..whole.clone()
            };
            view.strides = vec![row, row];
            view.strides
                .extend((0..inner.len()).map(|dim| inner[dim + 1..].iter().product::<usize>()));
            offset += widths[i];
            self.write(&view, arrays[i]);
            view
        })
    }

    fn vector(&mut self, dtype: DType, len: usize) -> View {
        self.view(dtype, &[len], &[1])
    }

    /// `array` is `[P, HV, V, K]`.
    fn pool(&mut self, dtype: DType, layout: StateLayout, array: &Array) -> View {
        let [slots, heads, width, _] = [array.dims[0], array.dims[1], array.dims[2], array.dims[3]];
        let slot = heads * width * width + self.gap();
        let view = self.view(
            dtype,
            &[slots, heads, width, width],
            &[slot, width * width, width, 1],
        );
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

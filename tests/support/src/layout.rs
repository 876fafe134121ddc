//! Placement of a problem in memory.

use gated_delta::{DType, StateLayout};
use gated_delta_harness::arguments::{
    Arguments, Checkpoints, CommitConvolution, Convolved, GatedNorm, Kept, KeptX, New, Packed,
    Tokens,
};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::buffer::{Buffer, View};
use crate::case::Case;
use crate::problem::{Array, Problem, workspace};

/// Gaps before a tensor, and between its rows, heads and slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spacing {
    /// No gaps.
    Dense,
    /// Gaps of 0 or a multiple of 16 bytes.
    Aligned,
    /// Gaps of any number of elements. Heads may lie outside of rows. Addresses are never 16-byte aligned.
    Odd,
}

/// Dtypes and gaps of the tensors of a problem in memory.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// Dtype of the pools.
    pub state: DType,
    /// Dtypes of q, k, v and o. With a convolution: of x and the windows, of its weight, of its bias, and of o.
    pub qkvo: [DType; 4],
    /// Dtypes of a or g, and of b or beta.
    pub gates: [DType; 2],
    /// Dtypes of the read, write and token slots, of accepted, cu_seqlens and keep.
    pub indices: [DType; 6],
    /// Dtypes of z and of the norm's weight.
    pub norm: [DType; 2],
    /// Dtype of `fresh`.
    pub fresh: DType,
    /// Dtype of `positions`.
    pub positions: DType,
    /// Whether windows are `[P, W − 1, D]` in memory, and the windows after each token `[B, steps, W − 1, D]`.
    pub token_major: bool,
    /// Whether tensors share a buffer if their dtypes are the same: q, k and v; x and z; the gates.
    pub packed: bool,
    /// Gaps of all tensors except the pools, the windows and the snapshots.
    pub io: Spacing,
    /// Gaps of the pools, the windows and the snapshots.
    pub pools: Spacing,
    /// Gaps of one of the [`TENSORS`] by name, in place of its usual ones.
    pub apart: Option<(&'static str, Spacing)>,
    /// Whether the formulation is left to the library, if it would choose the one in the options.
    pub unnamed: bool,
    /// Seed of the sizes of gaps.
    pub seed: u64,
}

impl Form {
    /// f32 and i32 everywhere, without gaps.
    pub const PLAIN: Self = Self {
        state: DType::F32,
        qkvo: [DType::F32; 4],
        gates: [DType::F32; 2],
        indices: [DType::I32; 6],
        norm: [DType::F32; 2],
        fresh: DType::I32,
        positions: DType::I32,
        token_major: false,
        packed: false,
        io: Spacing::Dense,
        pools: Spacing::Dense,
        apart: None,
        unnamed: false,
        seed: 0,
    };

    /// Gaps of the tensor with this name.
    fn spacing(&self, name: &str) -> Spacing {
        match (self.apart, name) {
            (Some((apart, spacing)), _) if apart == name => spacing,
            (_, "pool" | "write_pool" | "snapshots") => self.pools,
            (_, "windows" | "write_windows" | "window_snapshots") => self.pools,
            _ => self.io,
        }
    }
}

/// Names of the tensors that a launch may have, those of states first.
pub const TENSORS: [&str; 33] = [
    "pool",
    "write_pool",
    "snapshots",
    "q",
    "k",
    "v",
    "gate",
    "beta",
    "o",
    "previous k",
    "previous v",
    "previous gate",
    "previous beta",
    "A_log",
    "dt_bias",
    "read_slots",
    "write_slots",
    "token_slots",
    "accepted",
    "cu_seqlens",
    "keep",
    "x",
    "conv_weight",
    "conv_bias",
    "windows",
    "write_windows",
    "window_snapshots",
    "previous x",
    "z",
    "norm_weight",
    "fresh",
    "positions",
    "checkpoint_slots",
];

/// Placement of values in memory.
pub trait Layout {
    /// The problem in memory of this form.
    #[must_use]
    fn case(&self, form: &Form) -> Case;
}

impl Layout for Problem {
    fn case(&self, form: &Form) -> Case {
        let mut memory = Memory {
            buffers: Vec::new(),
            rng: SmallRng::seed_from_u64(form.seed),
            form,
        };
        let new = self.new.as_ref().map(|New { q, tokens, o }| {
            let (q, tokens) = memory.tokens(["q", "k", "v", "gate", "beta"], q, tokens);
            let o = memory.array("o", form.qkvo[3], o, 1);
            New { q, tokens, o }
        });
        let (convolved, norm) = memory.around(self.convolved.as_ref(), self.norm.as_ref());
        let previous = self.previous.as_ref().map(|Kept { tokens, keep }| {
            let names = [
                "",
                "previous k",
                "previous v",
                "previous gate",
                "previous beta",
            ];
            let no_q = Array::unread(&tokens.k.dims);
            Kept {
                tokens: memory.tokens(names, &no_q, tokens).1,
                keep: memory.array("keep", form.indices[5], keep, 1),
            }
        });
        let previous_x = self.previous_x.as_ref().map(|kept| memory.previous_x(kept));
        let packed = self.packed.as_ref().map(|packed| Packed {
            cu_seqlens: memory.array("cu_seqlens", form.indices[4], &packed.cu_seqlens, 1),
            max_tokens: packed.max_tokens,
        });
        // Parameters of gates have no gaps, indices have none within a row.
        let mut optional = |name, dtype: DType, array: &Option<Array>| {
            let array = array.as_ref()?;
            let inner = match dtype {
                DType::F32 => array.dims.len(),
                _ => 1,
            };
            Some(memory.array(name, dtype, array, inner))
        };
        let [read, write, of_tokens, accepted, ..] = form.indices;
        let a_log = optional("A_log", DType::F32, &self.a_log);
        let dt_bias = optional("dt_bias", DType::F32, &self.dt_bias);
        let read_slots = optional("read_slots", read, &self.read_slots);
        let write_slots = optional("write_slots", write, &self.write_slots);
        let token_slots = optional("token_slots", of_tokens, &self.token_slots);
        let accepted = optional("accepted", accepted, &self.accepted);
        let fresh = optional("fresh", form.fresh, &self.fresh);
        let positions = optional("positions", form.positions, &self.positions);
        let checkpoints = self.checkpoints.as_ref().and_then(|checkpoints| {
            let slots = Some(checkpoints.slots.clone());
            Some(Checkpoints {
                every: checkpoints.every,
                slots: optional("checkpoint_slots", write, &slots)?,
            })
        });
        let workspace = self.workspace.clone().or_else(|| workspace(self));
        let workspace = workspace.map(|array| memory.dense(DType::F32, &array));
        let layout = self.options.state_layout;
        let mut states = |name, array: &Array| memory.states(name, layout, array);
        let args = Arguments {
            gates: self.gates,
            a_log,
            dt_bias,
            new,
            previous,
            previous_x,
            pool: states("pool", &self.pool),
            write_pool: self
                .write_pool
                .as_ref()
                .map(|pool| states("write_pool", pool)),
            read_slots,
            write_slots,
            token_slots,
            accepted,
            snapshots: self
                .snapshots
                .as_ref()
                .map(|array| states("snapshots", array)),
            packed,
            convolved,
            norm,
            fresh,
            positions,
            checkpoints,
            workspace,
            pending: None,
            update_state: self.update_state,
            options: self.options,
        };
        let case = Case {
            buffers: memory.buffers,
            args,
        };
        match form.unnamed {
            true => case.unnamed(),
            false => case,
        }
    }
}

/// Buffers under construction.
struct Memory<'a> {
    buffers: Vec<Buffer>,
    rng: SmallRng,
    form: &'a Form,
}

impl Memory<'_> {
    /// Random number of unused elements before a tensor or a dim.
    fn gap(&mut self, spacing: Spacing) -> usize {
        match spacing {
            Spacing::Dense => 0,
            Spacing::Aligned => 8 * self.rng.random_range(0..=2),
            Spacing::Odd => self.rng.random_range(1..=3),
        }
    }

    /// Places an array in its own buffer, without gaps.
    fn dense(&mut self, dtype: DType, array: &Array) -> View {
        let len = array.dims.iter().product();
        self.buffers.push(Buffer::new(dtype, len));
        View {
            buffer: self.buffers.len() - 1,
            offset: 0,
            dims: vec![len],
            strides: vec![1],
        }
    }

    /// Places a tensor in its own buffer. Its `inner` innermost dims have no gaps.
    fn tensor(&mut self, name: &str, dtype: DType, dims: &[usize], inner: usize) -> View {
        let order = (0..dims.len() - inner).rev().collect();
        self.ordered(name, dtype, dims, order)
    }

    /// Like `tensor`, with the outer dims in memory in the order `order`, innermost first. Odd gaps override the order.
    fn ordered(&mut self, name: &str, dtype: DType, dims: &[usize], mut order: Vec<usize>) -> View {
        let spacing = self.form.spacing(name);
        let outer = order.len();
        let sizes: Vec<usize> = dims.iter().map(|&dim| dim.max(1)).collect();
        if spacing == Spacing::Odd {
            order.shuffle(&mut self.rng);
        }
        let mut strides = vec![1; dims.len()];
        for dim in (outer..dims.len().saturating_sub(1)).rev() {
            strides[dim] = strides[dim + 1] * sizes[dim + 1];
        }
        let mut extent = sizes[outer..].iter().product();
        for dim in order {
            strides[dim] = extent + self.gap(spacing);
            extent = sizes[dim] * strides[dim];
        }
        let offset = self.gap(spacing);
        let len = offset + extent + self.gap(spacing);
        self.buffers.push(Buffer::new(dtype, len));
        View {
            buffer: self.buffers.len() - 1,
            offset,
            dims: dims.to_vec(),
            strides,
        }
    }

    /// Places tensors as slices of one buffer, next to each other in every token.
    fn packed<const N: usize>(
        &mut self,
        name: &str,
        dtype: DType,
        arrays: [&Array; N],
    ) -> [View; N] {
        let widths = arrays.map(|array| array.dims[2..].iter().product::<usize>());
        let [rows, tokens] = [arrays[0].dims[0], arrays[0].dims[1]];
        let whole = self.tensor(name, dtype, &[rows, tokens, widths.iter().sum()], 1);
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

    /// Places an array in its own buffer. Its `inner` innermost dims have no gaps.
    fn array(&mut self, name: &str, dtype: DType, array: &Array, inner: usize) -> View {
        let view = self.tensor(name, dtype, &array.dims, inner);
        self.write(&view, array);
        view
    }

    /// Places q, k, v and the gates of tokens.
    fn tokens(
        &mut self,
        names: [&str; 5],
        q: &Array,
        tokens: &Tokens<Array>,
    ) -> (View, Tokens<View>) {
        let [q_type, k_type, v_type, _] = self.form.qkvo;
        let Tokens { k, v, gate, beta } = tokens;
        let [q_name, k_name, v_name, gate_name, beta_name] = names;
        let [q, k, v] = if self.form.packed && q_type == k_type && k_type == v_type {
            self.packed(k_name, q_type, [q, k, v])
        } else {
            [
                (q_name, q_type, q),
                (k_name, k_type, k),
                (v_name, v_type, v),
            ]
            .map(|(name, dtype, array)| self.array(name, dtype, array, 1))
        };
        let [gate, beta] = self.gates([gate_name, beta_name], [gate, beta]);
        (q, Tokens { k, v, gate, beta })
    }

    /// Places the gate and beta of tokens.
    fn gates(&mut self, [gate_name, beta_name]: [&str; 2], [gate, beta]: [&Array; 2]) -> [View; 2] {
        let [gate_type, beta_type] = self.form.gates;
        let [beta, gate] = if self.form.packed && gate_type == beta_type {
            self.packed(gate_name, gate_type, [beta, gate])
        } else {
            [(beta_name, beta_type, beta), (gate_name, gate_type, gate)]
                .map(|(name, dtype, array)| self.array(name, dtype, array, 1))
        };
        [gate, beta]
    }

    /// Places the tensors of a convolution and a norm. x and z may be slices of one projection, in either order.
    fn around(
        &mut self,
        convolved: Option<&Convolved<Array>>,
        norm: Option<&GatedNorm<Array>>,
    ) -> (Option<Convolved<View>>, Option<GatedNorm<View>>) {
        let [x_type, weight_type, bias_type, o_type] = self.form.qkvo;
        let [z_type, norm_type] = self.form.norm;
        let (x, z) = match (convolved, norm) {
            (Some(Convolved { x, .. }), Some(GatedNorm { z, .. }))
                if self.form.packed && x_type == z_type =>
            {
                let [x, z] = match self.rng.random() {
                    true => self.packed("x", x_type, [x, z]),
                    false => {
                        let [z, x] = self.packed("x", x_type, [z, x]);
                        [x, z]
                    }
                };
                (Some(x), Some(z))
            }
            _ => (
                convolved.map(|convolved| self.array("x", x_type, &convolved.x, 1)),
                norm.map(|norm| self.array("z", z_type, &norm.z, 1)),
            ),
        };
        let convolved = x.zip(convolved).map(|(x, convolved)| {
            let [gate, beta] = self.gates(["gate", "beta"], [&convolved.gate, &convolved.beta]);
            let mut optional = |name, array: &Option<Array>| {
                let array = array.as_ref()?;
                Some(self.windows(name, array))
            };
            let write_windows = optional("write_windows", &convolved.write_windows);
            let window_snapshots = optional("window_snapshots", &convolved.window_snapshots);
            Convolved {
                x,
                heads: convolved.heads,
                gate,
                beta,
                windows: self.windows("windows", &convolved.windows),
                write_windows,
                window_snapshots,
                o: self.array("o", o_type, &convolved.o, 1),
                weight: self.array("conv_weight", weight_type, &convolved.weight, 1),
                bias: (convolved.bias.as_ref())
                    .map(|bias| self.array("conv_bias", bias_type, bias, 1)),
                activation: convolved.activation,
            }
        });
        let norm = z.zip(norm).map(|(z, norm)| GatedNorm {
            z,
            weight: self.array("norm_weight", norm_type, &norm.weight, 1),
            eps: norm.eps,
            activation: norm.activation,
        });
        (convolved, norm)
    }

    /// Places x of the previous tokens of a convolution, or of a commit.
    fn previous_x(&mut self, kept: &KeptX<Array>) -> KeptX<View> {
        let [x_type, weight_type, bias_type, _] = self.form.qkvo;
        let names = ["previous gate", "previous beta"];
        let [gate, beta] = self.gates(names, [&kept.gate, &kept.beta]);
        let conv = kept.conv.as_ref().map(|conv| CommitConvolution {
            heads: conv.heads,
            weight: self.array("conv_weight", weight_type, &conv.weight, 1),
            bias: (conv.bias.as_ref()).map(|bias| self.array("conv_bias", bias_type, bias, 1)),
            activation: conv.activation,
            windows: self.windows("windows", &conv.windows),
            write_windows: (conv.write_windows.as_ref())
                .map(|array| self.windows("write_windows", array)),
        });
        KeptX {
            x: self.array("previous x", x_type, &kept.x, 1),
            gate,
            beta,
            keep: self.array("keep", self.form.indices[5], &kept.keep, 1),
            conv,
        }
    }

    /// Places windows, `[…, D, inputs]`.
    fn windows(&mut self, name: &str, array: &Array) -> View {
        let inner = array.dims.len() - 1;
        let order = match self.form.token_major {
            true => vec![inner - 1, inner],
            false => vec![inner, inner - 1],
        };
        let order = order.into_iter().chain((0..inner - 1).rev()).collect();
        let view = self.ordered(name, self.form.qkvo[0], &array.dims, order);
        self.write(&view, array);
        view
    }

    /// Places states, `[…, HV, V, K]`, in this layout.
    fn states(&mut self, name: &str, layout: StateLayout, array: &Array) -> View {
        let mut dims = array.dims.clone();
        let [v, k] = [dims.len() - 2, dims.len() - 1];
        if layout == StateLayout::VLast {
            dims.swap(v, k);
        }
        let view = self.tensor(name, self.form.state, &dims, 3);
        let mut logical = view.clone();
        if layout == StateLayout::VLast {
            logical.dims.swap(v, k);
            logical.strides.swap(v, k);
        }
        self.write(&logical, array);
        view
    }

    /// Writes all values of an array that are not NaN.
    fn write(&mut self, view: &View, array: &Array) {
        self.buffers[view.buffer].write(view, &array.values);
    }
}

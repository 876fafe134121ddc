//! What a layer computes around its recurrence: the convolution before it, the norm after it.

use std::fmt;

use gated_delta_kernels::step::Activation as Code;

use crate::shapes::{Named, named, optional};
use crate::tensor::Tensor;

/// What becomes of a sum of the convolution, and of the z of the norm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// x
    None,
    /// x · sigmoid(x)
    #[default]
    Silu,
    /// sigmoid(x)
    Sigmoid,
}

impl Activation {
    /// The kernels' code of it.
    pub(crate) fn code(self) -> u32 {
        (match self {
            Self::None => Code::None,
            Self::Silu => Code::Silu,
            Self::Sigmoid => Code::Sigmoid,
        }) as u32
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Silu => "silu",
            Self::Sigmoid => "sigmoid",
        })
    }
}

/// What q, k and v are made of: the projection of a layer, and the short causal convolution of each of its channels.
///
/// ```text
/// y_t[c] = act(bias[c] + Σ_j weight[c, j] · x_{t−W+1+j}[c])    j = 0 … W − 1
/// ```
///
/// D = 2·H·K + HV·V channels, those of q, of k and of v, each head by head; W taps. Nothing is rounded between: q, k and v
/// are f32. K and V are those of the states and of `o`.
///
/// The W − 1 inputs before a row's first token are its *window*, as they come, the oldest first. Windows are kept as states
/// are, in pools of as many slots:
///
/// | states | a slot of `windows` | read | written |
/// |---|---|---|---|
/// | [`States::update`](super::States::update) | `[D, W − 1]` | in the slot to read | in the slot to write: the window after the row's last token |
/// | the same, where the states [wait](super::Step::pending) | `[D, W − 1]` | in the slot to read | there: the window after the token, whether its state is written or not; with [`inputs`](super::Pending::inputs) where a state is written, the window before the step's tokens |
/// | the same, with previous tokens, and a [`Commit`](super::Commit) | `[D, W − 1]` | in the slot to read | in the slot to write: the window after the `keep` kept tokens |
/// | [`States::read_only`](super::States::read_only) | `[D, W − 1]` | in the slot to read | nothing |
/// | [`States::per_token`](super::States::per_token) | `[D, W − 2 + T]` | in slot `token_slots[b, 0]`: columns `a − 1 .. a + W − 2`, where a is `accepted[b]` | the same slot: columns `0 .. W − 2 + n` |
///
/// With token slots, the columns that a row of n tokens leaves are its window without the oldest input, then x of its tokens;
/// those behind stay as they were. A row whose first token slot is dead is inactive, whatever its others are. Besides, the
/// window after every token may go to [`window_snapshots`](Self::window_snapshots), as states go to
/// [`Step::snapshots`](super::Step::snapshots). A row that is fresh starts from a window of zeros.
///
/// Of any T. A block has all value heads of a query/key head: HV/H is at most 16, and less where its tokens, T + T', do not
/// fit shared memory beside that. With [`Formulation::Parallel`](super::Formulation::Parallel), which [`Formulation::Auto`] is for
/// 2 to 8 tokens on 16-bit K-last states, a cluster of blocks has them: HV/H is at most 8, of KDA 4, and above 1 it takes a GPU of
/// compute capability 9.0. On an older one [`Formulation::Auto`] goes token by token.
///
/// [`Formulation::Auto`]: super::Formulation::Auto
///
/// A decode of an engine that keeps its windows token by token, `[P, W − 1, D]`, and whose projection has z behind x:
///
/// ```
/// use gated_delta::{Convolution, DType, Gdn, GdnGates, Inputs, Norm, States, Tensor, Work};
///
/// let (rows, h, hv, k, slots) = (4, 16, 32, 128, 64);
/// let (d, z_width) = ((2 * h + hv) * k, hv * k);
/// // SAFETY: nothing is launched here.
/// let tensor = |dtype, dims: &[usize]| unsafe { Tensor::from_raw(0x7f00_0000_0000, dtype, dims) };
/// let projection = tensor(DType::Bf16, &[rows, 1, d + z_width])?;
/// let (x, z) = (projection.narrow(2, 0, d)?, projection.narrow(2, d, z_width)?.split(2, k)?);
/// let windows = tensor(DType::Bf16, &[slots, d, 3])?.with_strides(&[3 * d, 1, d])?;
/// let conv = Convolution::new(x, h, tensor(DType::Bf16, &[d, 4])?, windows);
/// let gate = tensor(DType::F32, &[rows, 1, hv])?;
/// let states = States::update(tensor(DType::Bf16, &[slots, hv, k, k])?).slots(tensor(DType::I32, &[rows])?);
/// let o = tensor(DType::Bf16, &[rows, 1, hv, k])?;
/// let step = Gdn::new(Inputs::conv(conv), GdnGates::given(gate, gate), o, states)
///     .norm(Norm::new(z, tensor(DType::Bf16, &[k])?, 1e-6))
///     .fresh(tensor(DType::I32, &[rows])?);
/// println!("{} bytes", step.bytes()?);
/// # Ok::<(), gated_delta::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Convolution<'a> {
    /// `[B, T, D]`, in a commit `[B, T', D]`, bf16, f16 or f32: q, k and v side by side, before the convolution. Strides of
    /// rows and tokens are free.
    pub x: Tensor<'a>,
    /// H.
    pub heads: usize,
    /// `[D, W]`, bf16, f16 or f32, the oldest token's tap first; W in 2..=4. The stride of channels is free.
    pub weight: Tensor<'a>,
    /// `[D]`, bf16, f16 or f32; without it, 0.
    pub bias: Option<Tensor<'a>>,
    /// Of the sum: [`Activation::Silu`] or [`Activation::None`].
    pub activation: Activation,
    /// `[P, D, W − 1]`, with token slots `[P, D, W − 2 + T]`, the oldest input first, of the dtype of `x`; P is the pool's.
    /// Written where states are, unless `write_windows` is given. All strides are free, so that `[P, W − 1, D]` is a view of
    /// it, but what is written must not overlap itself.
    pub windows: Tensor<'a>,
    /// Where windows are written instead, of the same dtype and dims but P: that of the pool that is written.
    pub write_windows: Option<Tensor<'a>>,
    /// `[B, steps, D, W − 1]` with steps ≥ T, of the dtype of `x`, written: the window after every token. Wants
    /// [`Step::snapshots`](super::Step::snapshots). All strides are free, but it must not overlap itself.
    pub window_snapshots: Option<Tensor<'a>>,
}

impl<'a> Convolution<'a> {
    /// Of x `[B, T, D]` with H = `heads`, by `weight` `[D, W]`, after the inputs in `windows` `[P, D, W − 1]`, with token slots
    /// `[P, D, W − 2 + T]`. Without a bias, with SiLU; windows are updated where they are.
    #[must_use]
    pub fn new(x: Tensor<'a>, heads: usize, weight: Tensor<'a>, windows: Tensor<'a>) -> Self {
        Self {
            x,
            heads,
            weight,
            bias: None,
            activation: Activation::Silu,
            windows,
            write_windows: None,
            window_snapshots: None,
        }
    }

    /// With a bias, `[D]`.
    #[must_use]
    pub fn bias(mut self, bias: Tensor<'a>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// With another activation than SiLU: none.
    #[must_use]
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// Windows go to another pool of them.
    #[must_use]
    pub fn write_windows(mut self, windows: Tensor<'a>) -> Self {
        self.write_windows = Some(windows);
        self
    }

    /// With the window after every token written to a tensor besides, `[B, steps, D, W − 1]`, as
    /// [`Step::snapshots`](super::Step::snapshots) are.
    #[must_use]
    pub fn window_snapshots(mut self, snapshots: Tensor<'a>) -> Self {
        self.window_snapshots = Some(snapshots);
        self
    }

    /// What it is of, by what, and after which inputs.
    pub(crate) fn named(&'a self) -> [Named<'a>; 3] {
        [self.named_x(), self.named_weight(), self.named_windows()]
    }

    pub(crate) fn named_x(&'a self) -> Named<'a> {
        named("x", &self.x)
    }

    pub(crate) fn named_weight(&'a self) -> Named<'a> {
        named("conv_weight", &self.weight)
    }

    pub(crate) fn named_bias(&'a self) -> Option<Named<'a>> {
        optional("conv_bias", &self.bias)
    }

    pub(crate) fn named_windows(&'a self) -> Named<'a> {
        named("windows", &self.windows)
    }

    pub(crate) fn named_write_windows(&'a self) -> Option<Named<'a>> {
        optional("write_windows", &self.write_windows)
    }

    pub(crate) fn named_window_snapshots(&'a self) -> Option<Named<'a>> {
        optional("window_snapshots", &self.window_snapshots)
    }
}

/// What becomes of the outputs: a root mean square norm of each token's value heads, gated by z.
///
/// ```text
/// o = weight · o / √(mean(o²) + eps) · act(z)
/// ```
///
/// in f32, of the output before it is rounded. Of any T, with the limits of [`Convolution`]; a commit has no outputs.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Norm<'a> {
    /// `[B, T, HV, V]`, bf16, f16 or f32. Strides of rows, tokens and heads are free.
    pub z: Tensor<'a>,
    /// `[V]`, bf16, f16 or f32.
    pub weight: Tensor<'a>,
    /// What is added to the mean: finite, above 0.
    pub eps: f32,
    /// Of z: [`Activation::Silu`] or [`Activation::Sigmoid`].
    pub activation: Activation,
}

impl<'a> Norm<'a> {
    /// By `weight` `[V]`, gated by z `[B, T, HV, V]` with SiLU.
    #[must_use]
    pub fn new(z: Tensor<'a>, weight: Tensor<'a>, eps: f32) -> Self {
        Self {
            z,
            weight,
            eps,
            activation: Activation::Silu,
        }
    }

    /// With another activation than SiLU: a sigmoid.
    #[must_use]
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    pub(crate) fn named_z(&'a self) -> Named<'a> {
        named("z", &self.z)
    }

    pub(crate) fn named_weight(&'a self) -> Named<'a> {
        named("norm_weight", &self.weight)
    }
}

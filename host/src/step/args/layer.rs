//! The convolution before a layer's recurrence, and the norm after it.

use std::fmt;

use gated_delta_kernels::step::Activation as Code;

use crate::tensor::Tensor;
use crate::tensor_checks::{Named, named, optional};

/// Activation function of a convolution's sum, or of the z of a norm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// x, unchanged.
    None,
    /// x · sigmoid(x).
    #[default]
    Silu,
    /// sigmoid(x).
    Sigmoid,
}

impl Activation {
    /// The kernels' code of the activation.
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

/// A layer's projection x and its short causal convolution. Each channel is convolved separately. The results are q, k and v.
///
/// ```text
/// y_t[c] = act(bias[c] + Σ_j weight[c, j] · x_{t−W+1+j}[c])    j = 0 … W − 1
/// ```
///
/// The projection has D = 2·H·K + HV·V channels: those of q, then k, then v, each head by head. The convolution has W taps. q, k
/// and v stay in f32, without rounding. K and V are the dims of the states and of `o`.
///
/// The *window* of a row holds the last W − 1 inputs x before its first token, oldest first. Windows are kept as states are, in a
/// tensor with as many slots as the pool:
///
/// | states | shape of a slot of `windows` | read | written |
/// |---|---|---|---|
/// | [`States::update`](super::States::update) | `[D, W − 1]` | the read slot | the write slot: the window after the row's last token |
/// | the same, with [deferred write-back](super::Step::pending) | `[D, W − 1]` | the read slot | the same slot: the window after the token, in every step. With [`inputs`](super::Pending::inputs): only if the state is written, the window before the step's tokens |
/// | the same, with previous tokens, and a [`Commit`](super::Commit) | `[D, W − 1]` | the read slot | the write slot: the window after the first `keep` tokens |
/// | [`States::read_only`](super::States::read_only) | `[D, W − 1]` | the read slot | nothing |
/// | [`States::per_token`](super::States::per_token) | `[D, W − 2 + T]` | slot `token_slots[b, 0]`: columns `a − 1 .. a + W − 2`, where a is `accepted[b]` | the same slot: columns `0 .. W − 2 + n` |
///
/// With token slots, a row of n tokens writes its window without the oldest input, then x of its tokens; later columns keep their
/// values. A row whose first token slot is out of range or null is inactive, whatever its other slots are. The window after every
/// token may also be written to [`window_snapshots`](Self::window_snapshots), as states are to
/// [`Step::snapshots`](super::Step::snapshots). A fresh row starts from a window of zeros.
///
/// T is any number that the formulation takes. A block computes all value heads of a query/key head, so HV/H is at most 16, and
/// less if T + T' tokens need too much shared memory. With [`Formulation::Parallel`](super::Formulation::Parallel), a cluster of
/// blocks computes them: HV/H is at most 8 (KDA: 4), and HV/H above 1 needs a GPU of compute capability 9.0.
/// [`Formulation::Auto`] is `Parallel` for 2 to 8 tokens (f32 states: 3 to 8), except with 16-bit V-last states. On a GPU that
/// lacks the clusters or the shared memory for this, it is `Recurrent`.
///
/// [`Formulation::Auto`]: super::Formulation::Auto
///
/// A decode of an engine that stores its windows token by token, `[P, W − 1, D]`. Its projection has z after x:
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
    /// Projection `[B, T, D]` (commit: `[B, T', D]`), bf16, f16 or f32: the inputs of q, k and v, in this order along D. Strides
    /// of rows and tokens are free.
    pub x: Tensor<'a>,
    /// H, the number of query/key heads.
    pub heads: usize,
    /// Taps `[D, W]`, bf16, f16 or f32, the oldest token's tap first, with W in 2..=4. The stride of channels is free.
    pub weight: Tensor<'a>,
    /// Bias `[D]`, bf16, f16 or f32. Default: 0.
    pub bias: Option<Tensor<'a>>,
    /// Activation of the sum: [`Activation::Silu`] or [`Activation::None`].
    pub activation: Activation,
    /// Windows `[P, D, W − 1]` (token slots: `[P, D, W − 2 + T]`), oldest input first, of the dtype of `x`, with the pool's P. Written
    /// where states are, unless `write_windows` is given. All strides are free, so that a tensor `[P, W − 1, D]` can be passed as a view.
    /// Written elements must not overlap.
    pub windows: Tensor<'a>,
    /// Windows to write instead of `windows`, with the same dtype and dims, except P: the P of the written pool.
    pub write_windows: Option<Tensor<'a>>,
    /// Tensor for the window after every token, `[B, steps, D, W − 1]` with steps ≥ T, of the dtype of `x`, written. Requires
    /// [`Step::snapshots`](super::Step::snapshots). All strides are free, but elements must not overlap.
    pub window_snapshots: Option<Tensor<'a>>,
}

impl<'a> Convolution<'a> {
    /// Creates a convolution of x `[B, T, D]` with H = `heads` and taps `weight` `[D, W]`. The previous inputs are in `windows`
    /// `[P, D, W − 1]`, with token slots `[P, D, W − 2 + T]`, which are updated in place. It has no bias, and SiLU as activation.
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

    /// Sets a bias `[D]`.
    #[must_use]
    pub fn bias(mut self, bias: Tensor<'a>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Sets the activation: [`Activation::None`] instead of SiLU.
    #[must_use]
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// Writes windows to another tensor.
    #[must_use]
    pub fn write_windows(mut self, windows: Tensor<'a>) -> Self {
        self.write_windows = Some(windows);
        self
    }

    /// Also writes the window after every token to a tensor `[B, steps, D, W − 1]`, as [`Step::snapshots`](super::Step::snapshots) does
    /// with states.
    #[must_use]
    pub fn window_snapshots(mut self, snapshots: Tensor<'a>) -> Self {
        self.window_snapshots = Some(snapshots);
        self
    }

    /// The projection, the weight and the windows with their names.
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

/// Root mean square norm of the outputs of each value head, gated by z. The mean is over the V channels of the head.
///
/// ```text
/// o = weight · o / √(mean(o²) + eps) · act(z)
/// ```
///
/// The computation is in f32, on the output before rounding. T is any number that the formulation takes; the limits of
/// [`Convolution`] hold. A commit has no outputs, and therefore no norm.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Norm<'a> {
    /// Gate `[B, T, HV, V]`, bf16, f16 or f32. Strides of rows, tokens and heads are free.
    pub z: Tensor<'a>,
    /// Weight `[V]`, bf16, f16 or f32.
    pub weight: Tensor<'a>,
    /// Number that is added to the mean of squares: finite, above 0.
    pub eps: f32,
    /// Activation of z: [`Activation::Silu`] or [`Activation::Sigmoid`].
    pub activation: Activation,
}

impl<'a> Norm<'a> {
    /// Creates a norm with `weight` `[V]`, gated by z `[B, T, HV, V]` with SiLU.
    #[must_use]
    pub fn new(z: Tensor<'a>, weight: Tensor<'a>, eps: f32) -> Self {
        Self {
            z,
            weight,
            eps,
            activation: Activation::Silu,
        }
    }

    /// Sets the activation of z: [`Activation::Sigmoid`] instead of SiLU.
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

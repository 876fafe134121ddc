//! Tests that different launches are distinguished. On a stand-in for the driver, a test launches arguments, then arguments that
//! differ in one field. A field that is compiled in leads to one more compilation; any other field leads to none.
#![cfg(all(feature = "cust", target_os = "linux"))]

mod fixtures;

use std::collections::HashSet;
use std::ffi::{CString, c_char};
use std::process::Command;
use std::{env, fs, path::PathBuf};

use gated_delta::DType::{self, Bf16, F16, F32, I32, I64, U32};
use gated_delta::layer::{GdnParameters, KdaParameters, Parameters, Projection, Rows, Weights};
use gated_delta::step::Update;
use gated_delta::step::pending::Rings;
use gated_delta::{
    Activation, BetaScale, Commit, Context, Convolution, Device, Error, Flush, Formulation, Gates,
    Gdn, GdnCommit, GdnGates, HeadMap, Inputs, Kda, KdaBeta, KdaCommit, KdaDecay, KdaGates, Layer,
    Library, Norm, Options, Pending, Previous, StateLayout, States, Step, Stored, StreamRef,
    Tensor, Work,
};

/// Set in the process that has the stand-in as its driver.
const ON_STAND_IN: &str = "GATED_DELTA_ON_STAND_IN";

/// Makes the stand-in a GPU with clusters of blocks.
const HAS_CLUSTERS: &str = "FIXTURE_HAS_CLUSTERS";

/// The stand-in for the driver, loaded in this process.
struct StandIn {
    library: libloading::Library,
    context: Context,
}

impl StandIn {
    fn new() -> Self {
        // SAFETY: the stand-in has no initialisers.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
        let context = Context::primary(Device::get(0).unwrap()).unwrap();
        Self { library, context }
    }

    /// Number of compilations so far.
    fn compiled(&self) -> u32 {
        let calls = |name: &str| {
            let name = CString::new(name).unwrap();
            // SAFETY: the function has this type, and the text is terminated.
            unsafe {
                let calls = self
                    .library
                    .get::<unsafe extern "C" fn(*const c_char) -> u32>("stand_in_calls");
                calls.unwrap()(name.as_ptr())
            }
        };
        calls("cuModuleLoadDataEx") + calls("cuLibraryLoadData")
    }

    /// Launches `one`, then `other`. Asserts that the second launch compiles `wanted` kernels, and that neither is compiled
    /// again.
    #[track_caller]
    fn flip(&self, what: &str, one: &dyn Work, other: &dyn Work, wanted: u32) {
        let library = Library::new(&self.context);
        let launch = |work: &dyn Work| {
            let before = self.compiled();
            launch(&library, work).unwrap_or_else(|error| panic!("{what}: {error}"));
            self.compiled() - before
        };
        let compiled = [one, other, one, other].map(launch);
        assert_eq!(compiled, [1, wanted, 0, 0], "{what}");
    }

    /// Launches `one`, and asserts that `other` is refused and not confused with it.
    #[track_caller]
    fn refused(&self, what: &str, one: &dyn Work, other: &dyn Work) {
        let library = Library::new(&self.context);
        launch(&library, one).unwrap();
        assert!(launch(&library, other).is_err(), "{what}");
    }
}

fn launch(library: &Library, work: &dyn Work) -> Result<(), Error> {
    // SAFETY: the stand-in runs nothing.
    unsafe { library.launch(StreamRef::default_stream(), work) }
}

/// Runs the test of this name in a process whose driver is the stand-in. Returns `None` in that process.
fn elsewhere(test: &str) -> Option<()> {
    elsewhere_with(test, &[])
}

/// Like [`elsewhere`], with environment variables set to 1.
fn elsewhere_with(test: &str, variables: &[&str]) -> Option<()> {
    if env::var_os(ON_STAND_IN).is_some() {
        return None;
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{test}"));
    fs::create_dir_all(&folder).unwrap();
    let library = fixtures::path("libfixture_driver.so");
    fs::copy(library, folder.join("libcuda.so.1")).unwrap();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env(ON_STAND_IN, test)
        .env("LD_LIBRARY_PATH", folder)
        .envs(variables.iter().map(|name| (name, "1")))
        .output()
        .unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(
        output.status.success() && text[0].contains("1 passed"),
        "{}\n{}",
        output.status,
        text.concat()
    );
    Some(())
}

/// Sizes that make up the dims of tensors; K = V.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    tokens: usize,
    /// T'.
    previous: usize,
    heads: usize,
    value_heads: usize,
    dim: usize,
    slots: usize,
    /// Dim 1 of snapshots.
    steps: usize,
}

const SIZES: Sizes = Sizes {
    rows: 2,
    tokens: 2,
    previous: 3,
    heads: 2,
    value_heads: 4,
    dim: 64,
    slots: 5,
    steps: 4,
};

/// K = V = 128, where KDA has all formulations.
const WIDE: Sizes = Sizes { dim: 128, ..SIZES };

const DECODE: Sizes = Sizes { tokens: 1, ..SIZES };

/// Gap between the entries of a dim, in elements.
const GAP: usize = 64;

fn tensor(dtype: DType, dims: &[usize]) -> Tensor<'static> {
    // SAFETY: the stand-in accesses no address.
    unsafe { Tensor::from_raw(0x1_0000, dtype, dims) }.unwrap()
}

/// A tensor with gaps between the entries of the `free` outermost dims.
fn apart(dtype: DType, dims: &[usize], free: usize) -> Tensor<'static> {
    let mut strides = vec![1; dims.len()];
    for dim in (0..dims.len() - 1).rev() {
        let gap = if dim < free { GAP } else { 0 };
        strides[dim] = strides[dim + 1] * dims[dim + 1] + gap;
    }
    tensor(dtype, dims).with_strides(&strides).unwrap()
}

/// Options that name `Recurrent`, because the choice of `Auto` would change with the fields that a test changes.
fn recurrent() -> Options {
    Options::default().formulation(Formulation::Recurrent)
}

impl Sizes {
    fn keys(&self, tokens: usize) -> Tensor<'static> {
        apart(Bf16, &[self.rows, tokens, self.heads, self.dim], 3)
    }

    fn values(&self, tokens: usize) -> Tensor<'static> {
        apart(Bf16, &[self.rows, tokens, self.value_heads, self.dim], 3)
    }

    fn per_head(&self, tokens: usize) -> Tensor<'static> {
        apart(Bf16, &[self.rows, tokens, self.value_heads], 2)
    }

    fn rows(&self) -> Tensor<'static> {
        tensor(I32, &[self.rows])
    }

    fn pool(&self) -> Tensor<'static> {
        apart(Bf16, &[self.slots, self.value_heads, self.dim, self.dim], 1)
    }

    fn snapshots(&self) -> Tensor<'static> {
        let state = [self.value_heads, self.dim, self.dim];
        apart(Bf16, &[&[self.rows, self.steps], &state[..]].concat(), 2)
    }

    fn update(&self) -> Update<'static> {
        let (states, slots) = (States::update(self.pool()), self.rows());
        states
            .slots(slots)
            .write_slots(slots)
            .write_pool(self.pool())
    }

    fn raw(&self, tokens: usize) -> GdnGates<'static> {
        let (gate, parameter) = (self.per_head(tokens), tensor(F32, &[self.value_heads]));
        GdnGates::raw(gate, gate, parameter, parameter)
    }

    fn kda(&self, tokens: usize, kind: KdaDecay<'static>) -> KdaGates<'static> {
        KdaGates::new(
            self.values(tokens),
            kind,
            self.per_head(tokens),
            KdaBeta::Logit,
        )
    }

    fn softplus(&self) -> KdaDecay<'static> {
        KdaDecay::Softplus {
            a_log: tensor(F32, &[self.value_heads]),
            dt_bias: Some(tensor(F32, &[self.value_heads, self.dim])),
        }
    }

    fn lower_bound(&self) -> KdaDecay<'static> {
        let KdaDecay::Softplus { a_log, dt_bias, .. } = self.softplus() else {
            unreachable!("it is")
        };
        KdaDecay::LowerBound {
            lower_bound: -5.0,
            a_log: Some(a_log),
            dt_bias,
        }
    }

    fn step<G>(&self, gates: G, states: impl Into<States<'static>>) -> Step<'static, G> {
        let (qk, v) = (self.keys(self.tokens), self.values(self.tokens));
        Step::new(Inputs::qkv(qk, qk, v), gates, v, states).options(recurrent())
    }

    fn stored(&self) -> Stored<'static> {
        Stored::kv(self.keys(self.previous), self.values(self.previous))
    }

    fn gdn(&self) -> Gdn<'static> {
        self.step(self.raw(self.tokens), self.update())
    }

    fn gdn_snapshots(&self) -> Gdn<'static> {
        self.gdn().snapshots(self.snapshots())
    }

    fn gdn_per_token(&self) -> Gdn<'static> {
        let slots = apart(I32, &[self.rows, self.tokens], 1);
        let states = States::per_token(self.pool(), slots).accepted(self.rows());
        self.step(self.raw(self.tokens), states.write_pool(self.pool()))
    }

    fn gdn_packed(&self) -> Gdn<'static> {
        let one = Sizes { rows: 1, ..*self };
        let gate = one.per_head(one.tokens);
        let states = States::read_only(self.pool()).slots(self.rows());
        one.step(GdnGates::given(gate, gate), states)
            .packed(tensor(I32, &[self.rows + 1]), 2)
    }

    fn gdn_resume(&self) -> Gdn<'static> {
        let gate = self.per_head(self.previous);
        let previous = Previous::new(self.stored(), gate, gate, self.rows());
        self.gdn().previous(previous)
    }

    fn gdn_parallel(&self) -> Gdn<'static> {
        let parallel = Options::default().formulation(Formulation::Parallel);
        self.gdn_resume().options(parallel)
    }

    fn gdn_commit(&self) -> GdnCommit<'static> {
        let gates = self.raw(self.previous);
        Commit::new(self.stored(), gates, self.rows(), self.update()).options(recurrent())
    }

    /// D, the number of channels.
    fn channels(&self) -> usize {
        (2 * self.heads + self.value_heads) * self.dim
    }

    /// Windows with `inputs` columns.
    fn windows(&self, inputs: usize) -> Tensor<'static> {
        let channels = self.channels();
        let windows = tensor(Bf16, &[self.slots, channels, inputs]);
        let channel = inputs * GAP;
        windows
            .with_strides(&[2 * channel * channels, channel, 1])
            .unwrap()
    }

    /// Snapshots of windows, `[B, steps, D, W - 1]`.
    fn window_snapshots(&self) -> Tensor<'static> {
        let channels = self.channels();
        let windows = tensor(Bf16, &[self.rows, self.steps, channels, 3]);
        let channel = 3 * GAP;
        let token = 2 * channel * channels;
        let strides = [2 * token * self.steps, token, channel, 1];
        windows.with_strides(&strides).unwrap()
    }

    /// x, `[B, tokens, D]`.
    fn projection(&self, tokens: usize) -> Tensor<'static> {
        apart(Bf16, &[self.rows, tokens, self.channels()], 2)
    }

    fn convolution(&self, taps: usize) -> Convolution<'static> {
        self.convolution_of(self.projection(self.tokens), taps, taps - 1)
    }

    fn convolution_of(
        &self,
        x: Tensor<'static>,
        taps: usize,
        inputs: usize,
    ) -> Convolution<'static> {
        let channels = self.channels();
        let weight = apart(F32, &[channels, taps], 1);
        Convolution::new(x, self.heads, weight, self.windows(inputs))
            .bias(tensor(F32, &[channels]))
            .write_windows(self.windows(inputs))
    }

    fn norm(&self) -> Norm<'static> {
        Norm::new(self.values(self.tokens), tensor(F32, &[self.dim]), 1e-6)
    }

    /// The step with a convolution, a norm and fresh rows.
    fn around<G>(&self, step: Step<'static, G>) -> Step<'static, G> {
        let mut step = step.norm(self.norm()).fresh(self.rows());
        step.inputs = Inputs::conv(self.convolution(4));
        step
    }

    fn gdn_layer(&self) -> Gdn<'static> {
        self.around(self.gdn())
    }

    fn kda_layer(&self) -> Kda<'static> {
        self.around(self.kda_lower_bound())
    }

    fn layer_snapshots(&self) -> Gdn<'static> {
        let mut step = self.around(self.gdn_snapshots());
        let conv = self.convolution(4);
        step.inputs = Inputs::conv(conv.window_snapshots(self.window_snapshots()));
        step
    }

    fn layer_per_token(&self) -> Gdn<'static> {
        let mut step = self.around(self.gdn_per_token());
        let x = self.projection(self.tokens);
        step.inputs = Inputs::conv(self.convolution_of(x, 4, 2 + self.tokens));
        step
    }

    fn layer_packed(&self) -> Gdn<'static> {
        let one = Sizes { rows: 1, ..*self };
        let mut step = one.around(self.gdn_packed()).fresh(self.rows());
        let conv = one.convolution(4);
        step.inputs = Inputs::conv(with(conv, |conv| conv.write_windows = None));
        step
    }

    fn layer_resume(&self) -> Gdn<'static> {
        let mut step = self.around(self.gdn_resume());
        let x = self.projection(self.previous);
        step.previous = step
            .previous
            .map(|previous| with(previous, |kept| kept.stored = Stored::x(x)));
        step
    }

    fn layer_commit(&self) -> GdnCommit<'static> {
        let x = self.projection(self.previous);
        let gates = self.raw(self.previous);
        let stored = Stored::conv(self.convolution_of(x, 4, 3));
        Commit::new(stored, gates, self.rows(), self.update())
            .fresh(self.rows())
            .options(recurrent())
    }

    fn kda_softplus(&self) -> Kda<'static> {
        let gates = self.kda(self.tokens, self.softplus());
        self.step(gates, self.update()).snapshots(self.snapshots())
    }

    fn kda_lower_bound(&self) -> Kda<'static> {
        self.step(self.kda(self.tokens, self.lower_bound()), self.update())
    }

    fn kda_resume(&self) -> Kda<'static> {
        let (g, beta) = (self.values(self.previous), self.per_head(self.previous));
        let previous = Previous::new(self.stored(), g, beta, self.rows());
        self.kda_lower_bound().previous(previous)
    }

    fn kda_parallel(&self) -> Kda<'static> {
        let parallel = Options::default().formulation(Formulation::Parallel);
        self.kda_lower_bound().options(parallel)
    }

    fn kda_commit(&self) -> KdaCommit<'static> {
        let gates = self.kda(self.previous, self.lower_bound());
        Commit::new(self.stored(), gates, self.rows(), self.update()).options(recurrent())
    }
}

/// Properties of a tensor that are compiled into a kernel.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    /// Dtype, strides and alignment: q, k, v, o, and g of a KDA layer.
    Channels,
    /// Dtype and strides.
    PerHead,
    /// None: a parameter of the gates per head.
    Parameter,
    /// Alignment: a parameter of the gates per channel.
    ChannelParameter,
    /// Dtype, which all states share, strides and alignment.
    States,
    /// Dtype, and the stride between rows.
    Indices,
    /// Dtype and the strides of this number of outer dims: a tensor that is read element by element.
    Elements(usize),
    /// Like [`Self::Elements`], for tensors that share a dtype.
    Projection(usize),
    /// Dtype, the stride between channels, and alignment: a weight with several taps.
    Taps,
}

/// Name, role and place of each tensor in the arguments.
type Tensors<'b> = Vec<(&'static str, Role, &'b mut Tensor<'static>)>;

trait HasTensors: Work + Copy {
    fn tensors(&mut self) -> Tensors<'_>;
    fn options(&mut self) -> &mut Options;
}

trait HasGates: Gates + Copy {
    const ROLE: Role;
    fn tensors(&mut self) -> Tensors<'_>;
}

impl HasGates for GdnGates<'static> {
    const ROLE: Role = Role::PerHead;

    fn tensors(&mut self) -> Tensors<'_> {
        match self {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            } => vec![
                ("gate", Role::PerHead, a),
                ("beta", Role::PerHead, b),
                ("A_log", Role::Parameter, a_log),
                ("dt_bias", Role::Parameter, dt_bias),
            ],
            GdnGates::Given { g, beta, .. } => {
                vec![("gate", Role::PerHead, g), ("beta", Role::PerHead, beta)]
            }
            _ => unreachable!("other gates"),
        }
    }
}

impl HasGates for KdaGates<'static> {
    const ROLE: Role = Role::Channels;

    fn tensors(&mut self) -> Tensors<'_> {
        let mut tensors = vec![
            ("gate", Role::Channels, &mut self.g),
            ("beta", Role::PerHead, &mut self.beta),
        ];
        let (a_log, dt_bias) = match &mut self.kind {
            KdaDecay::Log => (None, None),
            KdaDecay::Softplus { a_log, dt_bias } => (Some(a_log), dt_bias.as_mut()),
            KdaDecay::LowerBound { a_log, dt_bias, .. } => (a_log.as_mut(), dt_bias.as_mut()),
            _ => unreachable!("other gates"),
        };
        tensors.extend(a_log.map(|tensor| ("A_log", Role::Parameter, tensor)));
        tensors.extend(dt_bias.map(|tensor| ("dt_bias", Role::ChannelParameter, tensor)));
        tensors
    }
}

fn stored<'b>(stored: &'b mut Stored<'static>) -> Tensors<'b> {
    match stored {
        Stored::Kv { k, v, .. } => vec![("k", Role::Channels, k), ("v", Role::Channels, v)],
        Stored::X { x, .. } => vec![("x", Role::Projection(2), x)],
        Stored::Conv(conv) => convolution(conv),
        _ => unreachable!("other inputs"),
    }
}

fn convolution<'b>(conv: &'b mut Convolution<'static>) -> Tensors<'b> {
    let mut tensors = vec![
        ("x", Role::Projection(2), &mut conv.x),
        ("conv_weight", Role::Taps, &mut conv.weight),
        ("windows", Role::Projection(3), &mut conv.windows),
    ];
    let (windows, snapshots) = (&mut conv.write_windows, &mut conv.window_snapshots);
    let others = [
        ("conv_bias", Role::Elements(0), &mut conv.bias),
        ("write_windows", Role::Projection(3), windows),
        ("window_snapshots", Role::Projection(4), snapshots),
    ];
    tensors.extend(others.into_iter().filter_map(given));
    tensors
}

fn update<'b>(states: &'b mut Update<'static>) -> Tensors<'b> {
    let mut tensors = vec![("pool", Role::States, &mut states.pool)];
    let others = [
        ("write_pool", Role::States, &mut states.write_pool),
        ("read_slots", Role::Indices, &mut states.read_slots),
        ("write_slots", Role::Indices, &mut states.write_slots),
    ];
    tensors.extend(others.into_iter().filter_map(given));
    tensors
}

fn given<'b>(
    (name, role, tensor): (&'static str, Role, &'b mut Option<Tensor<'static>>),
) -> Option<(&'static str, Role, &'b mut Tensor<'static>)> {
    Some((name, role, tensor.as_mut()?))
}

impl<G: HasGates> HasTensors for Step<'static, G>
where
    Self: Work,
{
    fn tensors(&mut self) -> Tensors<'_> {
        let mut tensors = match &mut self.inputs {
            Inputs::Qkv { q, k, v, .. } => vec![
                ("q", Role::Channels, q),
                ("k", Role::Channels, k),
                ("v", Role::Channels, v),
            ],
            Inputs::Conv(conv) => convolution(conv),
            _ => unreachable!("other inputs"),
        };
        tensors.push(("o", Role::Channels, &mut self.o));
        if let Some(norm) = &mut self.norm {
            tensors.push(("z", Role::Elements(3), &mut norm.z));
            tensors.push(("norm_weight", Role::Elements(0), &mut norm.weight));
        }
        tensors.extend(given(("fresh", Role::Indices, &mut self.fresh)));
        tensors.extend(self.gates.tensors());
        if let Some(previous) = &mut self.previous {
            tensors.extend(stored(&mut previous.stored));
            tensors.extend([
                ("gate", G::ROLE, &mut previous.gate),
                ("beta", Role::PerHead, &mut previous.beta),
                ("keep", Role::Indices, &mut previous.keep),
            ]);
        }
        match &mut self.states {
            States::Update(states) => tensors.extend(update(states)),
            States::ReadOnly(states) => {
                tensors.push(("pool", Role::States, &mut states.pool));
                let slots = ("read_slots", Role::Indices, &mut states.read_slots);
                tensors.extend(given(slots));
            }
            States::PerToken(states) => {
                tensors.push(("pool", Role::States, &mut states.pool));
                tensors.push(("token_slots", Role::Indices, &mut states.token_slots));
                let others = [
                    ("write_pool", Role::States, &mut states.write_pool),
                    ("accepted", Role::Indices, &mut states.accepted),
                ];
                tensors.extend(others.into_iter().filter_map(given));
            }
            _ => unreachable!("other states"),
        }
        tensors.extend(given(("snapshots", Role::States, &mut self.snapshots)));
        if let Some(packed) = &mut self.packed {
            tensors.push(("cu_seqlens", Role::Indices, &mut packed.cu_seqlens));
        }
        tensors
    }

    fn options(&mut self) -> &mut Options {
        &mut self.options
    }
}

impl<G: HasGates> HasTensors for Commit<'static, G>
where
    Self: Work,
{
    fn tensors(&mut self) -> Tensors<'_> {
        let mut tensors = stored(&mut self.stored);
        tensors.extend(self.gates.tensors());
        tensors.push(("keep", Role::Indices, &mut self.keep));
        tensors.extend(given(("fresh", Role::Indices, &mut self.fresh)));
        tensors.extend(update(&mut self.states));
        tensors
    }

    fn options(&mut self) -> &mut Options {
        &mut self.options
    }
}

fn with<W: Copy>(work: W, change: impl FnOnce(&mut W)) -> W {
    let mut changed = work;
    change(&mut changed);
    changed
}

/// The same tensor with its address moved by `past` bytes, and another dtype.
fn at(tensor: Tensor<'static>, past: usize, dtype: DType) -> Tensor<'static> {
    // SAFETY: the stand-in accesses no address.
    let moved = unsafe { Tensor::from_raw(tensor.address() + past as u64, dtype, tensor.dims()) };
    moved.unwrap().with_strides(tensor.strides()).unwrap()
}

/// Changes the address, alignment, dtype and strides of every tensor. `dtypes_of_states` says whether the kernels take f32 and
/// bf16 states.
fn flip_tensors<W: HasTensors>(stand_in: &StandIn, what: &str, work: W, dtypes_of_states: bool) {
    let all = with(work, |_| {}).tensors().len();
    for index in 0..all {
        let mut original = work;
        let (name, role, tensor) = original.tensors().swap_remove(index);
        let (tensor, what) = (*tensor, format!("{what}: {name}"));
        let changed = |tensor: Tensor<'static>| {
            with(work, |work| *work.tensors().swap_remove(index).2 = tensor)
        };
        let flip = |field: &str, other: &W, wanted: bool| {
            stand_in.flip(&format!("{what}, {field}"), &work, other, u32::from(wanted));
        };

        flip("address", &changed(at(tensor, 4096, tensor.dtype())), false);
        let wide = matches!(
            role,
            Role::Channels | Role::ChannelParameter | Role::States | Role::Taps
        );
        let past = tensor.dtype().size_of();
        flip(
            "alignment",
            &changed(at(tensor, past, tensor.dtype())),
            wide,
        );

        let free = match role {
            Role::Channels => 3,
            Role::PerHead => 2,
            Role::Parameter | Role::ChannelParameter => 0,
            Role::States => tensor.dims().len() - 3,
            Role::Indices => tensor.dims().len() - 1,
            Role::Elements(free) | Role::Projection(free) => free,
            Role::Taps => 1,
        };
        for dim in 0..free {
            let mut strides = tensor.strides().to_vec();
            strides[dim] += GAP / 2;
            let strided = changed(tensor.with_strides(&strides).unwrap());
            flip(
                &format!("stride of dim {dim}"),
                &strided,
                tensor.dims()[dim] > 1,
            );
        }

        let dtypes: &[DType] = match role {
            Role::Channels | Role::PerHead => &[F16, F32],
            Role::Projection(_) if name == "x" => &[F16, F32],
            Role::Elements(_) | Role::Taps if tensor.dtype() == F32 => &[Bf16, F16],
            Role::Elements(_) => &[F16, F32],
            Role::Indices => &[I64, U32],
            Role::States if dtypes_of_states && name == "pool" => &[F32],
            _ => &[],
        };
        for &dtype in dtypes {
            // Previous tokens have the dtypes of the new tokens, all states the pool's dtype, and all windows the dtype of x.
            let in_common = |other: Role| match role {
                Role::States => other == Role::States,
                Role::Projection(_) => matches!(other, Role::Projection(_)),
                _ => false,
            };
            let other = with(work, |work| {
                for (other, other_role, tensor) in work.tensors() {
                    if other == name || in_common(other_role) {
                        *tensor = at(*tensor, 0, dtype);
                    }
                }
            });
            flip(&format!("dtype {dtype}"), &other, true);
        }
    }
}

/// Changes every option. A commit has no scale of q.
fn flip_options<W: HasTensors>(stand_in: &StandIn, what: &str, work: W, has_q: bool) {
    let flip = |field: &str, from: fn(&mut Options), to: fn(&mut Options), wanted: bool| {
        let (one, other) = (
            with(work, |work| from(work.options())),
            with(work, |work| to(work.options())),
        );
        stand_in.flip(&format!("{what}: {field}"), &one, &other, wanted.into());
    };
    if with(work, |_| {}).options().formulation == Formulation::Recurrent {
        flip(
            "layout",
            |_| {},
            |o| o.state_layout = StateLayout::VLast,
            true,
        );
    }
    flip("head map", |_| {}, |o| o.head_map = HeadMap::Tiled, true);
    flip("norm", |_| {}, |o| o.qk_l2norm = false, true);
    flip("scale", |_| {}, |o| o.scale = Some(0.0), has_q);
    flip(
        "bits of the scale",
        |o| o.scale = Some(0.5),
        |o| o.scale = Some(0.5f32.next_up()),
        has_q,
    );
    flip(
        "sign of the scale",
        |o| o.scale = Some(0.0),
        |o| o.scale = Some(-0.0),
        has_q,
    );
    flip("null slot", |_| {}, |o| o.null_slot = Some(0), true);
    flip(
        "other null slot",
        |o| o.null_slot = Some(0),
        |o| o.null_slot = Some(1),
        true,
    );
    // A step that is no prefill has no splits: the option compiles nothing, but the arguments are checked again.
    flip("splits", |_| {}, |o| o.split = Some(64), false);
}

fn flip_formulation<W: HasTensors>(stand_in: &StandIn, what: &str, work: W) {
    let parallel = with(work, |work| {
        work.options().formulation = Formulation::Parallel;
    });
    stand_in.flip(&format!("{what}: formulation"), &work, &parallel, 1);
}

/// Every tensor and every option, for every way to keep states.
#[test]
fn every_field_of_every_tensor_and_option_is_told_apart() {
    if elsewhere("every_field_of_every_tensor_and_option_is_told_apart").is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    fn flip<W: HasTensors>(stand_in: &StandIn, what: &str, work: W, has_q: bool) {
        let formulation = with(work, |_| {}).options().formulation;
        flip_tensors(stand_in, what, work, formulation == Formulation::Recurrent);
        flip_options(stand_in, what, work, has_q);
    }
    flip(stand_in, "decode", DECODE.gdn(), true);
    flip(stand_in, "snapshots", SIZES.gdn_snapshots(), true);
    flip(stand_in, "token slots", SIZES.gdn_per_token(), true);
    flip(stand_in, "packed", SIZES.gdn_packed(), true);
    flip(stand_in, "resume", SIZES.gdn_resume(), true);
    flip(stand_in, "parallel", SIZES.gdn_parallel(), true);
    flip(stand_in, "commit", SIZES.gdn_commit(), false);
    flip(stand_in, "KDA decode", DECODE.kda_lower_bound(), true);
    flip(stand_in, "KDA snapshots", SIZES.kda_softplus(), true);
    flip(stand_in, "KDA resume", SIZES.kda_resume(), true);
    flip(stand_in, "KDA parallel", WIDE.kda_parallel(), true);
    flip(stand_in, "KDA commit", SIZES.kda_commit(), false);

    flip_formulation(stand_in, "decode", DECODE.gdn());
    flip_formulation(stand_in, "resume", SIZES.gdn_resume());
    flip_formulation(stand_in, "commit", SIZES.gdn_commit());
    flip_formulation(stand_in, "KDA verify", WIDE.kda_lower_bound());
    flip_formulation(stand_in, "KDA commit", WIDE.kda_commit());
}

/// Without clusters, `Auto` computes a layer's drafts, but `Parallel` by name is refused, also after a launch with `Auto`.
#[test]
fn a_choice_without_clusters_is_no_launch_by_name() {
    if elsewhere("a_choice_without_clusters_is_no_launch_by_name").is_some() {
        return;
    }
    let of = |formulation| {
        with(SIZES.gdn_layer(), |work| {
            work.options().formulation = formulation;
        })
    };
    let (auto, named) = (of(Formulation::Auto), of(Formulation::Parallel));
    assert_eq!(auto.formulation(), named.formulation());
    StandIn::new().refused("tokens at once without clusters", &auto, &named);
}

/// A launch that names the formulation chosen by `Auto` is the same launch. A launch that names any other formulation is not.
#[test]
fn a_choice_is_the_launch_by_name() {
    if elsewhere_with("a_choice_is_the_launch_by_name", &[HAS_CLUSTERS]).is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    fn flip<W: HasTensors>(stand_in: &StandIn, what: &str, work: W, chosen: Formulation) {
        let of = |formulation| with(work, |work| work.options().formulation = formulation);
        let auto = of(Formulation::Auto);
        assert_eq!(auto.formulation(), chosen, "{what}");
        for named in [Formulation::Recurrent, Formulation::Parallel] {
            let compiled = u32::from(named != chosen);
            stand_in.flip(&format!("{what}: {named:?}"), &auto, &of(named), compiled);
        }
    }
    flip(stand_in, "decode", DECODE.gdn(), Formulation::Recurrent);
    flip(stand_in, "verify", SIZES.gdn(), Formulation::Parallel);
    flip(
        stand_in,
        "resume",
        SIZES.gdn_resume(),
        Formulation::Parallel,
    );
    flip(
        stand_in,
        "commit",
        SIZES.gdn_commit(),
        Formulation::Parallel,
    );
    flip(stand_in, "layer", SIZES.gdn_layer(), Formulation::Parallel);
    flip(stand_in, "KDA", WIDE.kda_resume(), Formulation::Parallel);

    // A prefill. Its plan also launches prefills of fewer tokens.
    let chosen = |tokens| Sizes { tokens, ..SIZES }.gdn().options(Options::default());
    let named = Options::default().formulation(Formulation::Chunked);
    stand_in.flip("prefill", &chosen(17), &chosen(17).options(named), 0);
    stand_in.flip("verify", &chosen(8), &chosen(17), 1);
    let library = Library::new(&stand_in.context);
    let plan = library.plan(&chosen(17)).unwrap();
    let before = stand_in.compiled();
    for step in [chosen(17), chosen(3), chosen(1)] {
        // SAFETY: the stand-in runs nothing.
        unsafe { plan.launch(StreamRef::default_stream(), &step) }.unwrap();
    }
    assert_eq!(stand_in.compiled(), before);
}

/// Fresh rows, for kernels without a convolution or a norm.
#[test]
fn fresh_rows_are_told_apart() {
    if elsewhere("fresh_rows_are_told_apart").is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    let fresh = |work: Gdn<'static>| work.fresh(DECODE.rows());
    flip_tensors(stand_in, "fresh", fresh(DECODE.gdn()), true);
    flip_options(stand_in, "fresh", fresh(DECODE.gdn()), true);
    stand_in.flip("fresh", &DECODE.gdn(), &fresh(DECODE.gdn()), 1);
    let kda = DECODE.kda_lower_bound();
    stand_in.flip("KDA fresh", &kda, &kda.fresh(DECODE.rows()), 1);
    for (what, step) in [
        ("verify", SIZES.gdn()),
        ("token slots", SIZES.gdn_per_token()),
        ("packed", SIZES.gdn_packed()),
        ("resume", SIZES.gdn_resume()),
    ] {
        let fresh = step.fresh(SIZES.rows());
        flip_tensors(stand_in, &format!("fresh {what}"), fresh, true);
        stand_in.flip(&format!("fresh {what}"), &step, &fresh, 1);
    }
    let commit = SIZES.gdn_commit();
    let fresh = commit.fresh(SIZES.rows());
    flip_tensors(stand_in, "fresh commit", fresh, true);
    stand_in.flip("fresh commit", &commit, &fresh, 1);
}

/// Every compiled-in property of pending tokens.
#[test]
fn deferred_steps_are_told_apart() {
    if elsewhere("deferred_steps_are_told_apart").is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    let (b, h, hv, dim) = (DECODE.rows, DECODE.heads, DECODE.value_heads, DECODE.dim);
    let k = DECODE.gdn().inputs;
    let Inputs::Qkv { k, .. } = k else {
        unreachable!("it is")
    };
    let rings = |entries: usize| Rings {
        keys: apart(k.dtype(), &[DECODE.slots, h, entries, dim], 1),
        updates: apart(F32, &[DECODE.slots, hv, entries, dim], 1),
        decays: apart(F32, &[DECODE.slots, hv, entries], 1),
        len: DECODE.rows(),
        base: DECODE.rows(),
    };
    let pending = Pending::new(rings(9));
    let states = || States::update(DECODE.pool()).slots(DECODE.rows());
    let plain = DECODE.step(DECODE.raw(1), states());
    let step = plain.pending(pending);
    stand_in.flip("pending", &plain, &step, 1);
    type Change = fn(&mut Pending<'static>);
    let changes: [(&str, Change); 6] = [
        ("most", |it| it.most = 7),
        ("slots of keys", |it| {
            it.keys = apart(it.keys.dtype(), &[5, 2, 9, 64], 0);
        }),
        ("slots of updates", |it| {
            it.updates = apart(F32, &[5, 4, 9, 64], 0)
        }),
        ("slots of decays", |it| {
            it.decays = apart(F32, &[5, 4, 9], 0)
        }),
        ("dtype of len", |it| it.len = tensor(I64, &[2])),
        ("dtype of base", |it| it.base = tensor(U32, &[2])),
    ];
    for (what, change) in changes {
        let other = with(pending, change);
        stand_in.flip(what, &step, &plain.pending(other), 1);
        let flush = |pending| Flush::new(states(), pending).options(recurrent());
        stand_in.flip(what, &flush(pending), &flush(other), 1);
    }
    let longer = Pending::new(rings(10));
    stand_in.flip("R", &step, &plain.pending(longer), 1);
    let flush = Flush::new(states(), pending).options(recurrent());
    stand_in.flip("flush", &step, &flush, 1);
    stand_in.refused("too many pending", &step, &plain.pending(pending.most(9)));
    assert_eq!([b, h, hv, dim], [2, 2, 4, 64]);
}

/// Every tensor and option of a layer step of several tokens, and which optional tensors it has.
#[test]
fn everything_around_several_tokens_is_told_apart() {
    let name = "everything_around_several_tokens_is_told_apart";
    if elsewhere_with(name, &[HAS_CLUSTERS]).is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    for (what, step) in [
        ("verify", SIZES.gdn_layer()),
        ("snapshots", SIZES.layer_snapshots()),
        ("token slots", SIZES.layer_per_token()),
        ("packed", SIZES.layer_packed()),
        ("resume", SIZES.layer_resume()),
    ] {
        flip_tensors(stand_in, what, step, true);
        flip_options(stand_in, what, step, true);
        let flip = |field: &str, change: &dyn Fn(&mut Gdn<'static>)| {
            let other = with(step, |work| change(work));
            stand_in.flip(&format!("{what}: {field}"), &step, &other, 1);
        };
        flip("no fresh rows", &|work| work.fresh = None);
        flip("no norm", &|work| work.norm = None);
    }
    let kda = SIZES.around(SIZES.kda_lower_bound());
    flip_tensors(stand_in, "KDA verify", kda, true);
    flip_options(stand_in, "KDA verify", kda, true);
    let commit = SIZES.layer_commit();
    flip_tensors(stand_in, "commit", commit, true);
    flip_options(stand_in, "commit", commit, false);
    let no_fresh = with(commit, |work| work.fresh = None);
    stand_in.flip("commit: no fresh rows", &commit, &no_fresh, 1);

    let with_windows = |work: Gdn<'static>, windows: Option<Tensor<'static>>| {
        with(work, |work| match &mut work.inputs {
            Inputs::Conv(conv) => conv.window_snapshots = windows,
            _ => unreachable!("other inputs"),
        })
    };
    let snapshots = SIZES.layer_snapshots();
    let of_states = with_windows(snapshots, None);
    stand_in.flip("window_snapshots", &snapshots, &of_states, 1);
    let fewer = tensor(Bf16, &[2, 3, SIZES.channels(), 3]);
    let fewer = fewer.with_strides(SIZES.window_snapshots().strides());
    let of_fewer = with_windows(snapshots, Some(fewer.unwrap()));
    stand_in.flip("steps of window_snapshots", &snapshots, &of_fewer, 0);
    let (verify, resume) = (SIZES.gdn_layer(), SIZES.layer_resume());
    stand_in.flip("previous x", &verify, &resume, 1);
    let of = |sizes: Sizes| Box::new(sizes.layer_resume()) as Box<dyn Work>;
    for (what, sizes, wanted) in [
        ("B", Sizes { rows: 3, ..SIZES }, 0),
        ("P", Sizes { slots: 6, ..SIZES }, 0),
        ("T", Sizes { tokens: 3, ..SIZES }, 1),
        (
            "T'",
            Sizes {
                previous: 4,
                ..SIZES
            },
            1,
        ),
    ] {
        stand_in.flip(&format!("resume: {what}"), &*of(SIZES), &*of(sizes), wanted);
    }

    // Refused arguments are not confused with launched arguments of the same tensors.
    let other_x = with(resume, |work| {
        let x = SIZES.projection(SIZES.previous);
        let stored = Stored::conv(SIZES.convolution_of(x, 4, 3));
        work.previous.as_mut().unwrap().stored = stored;
    });
    stand_in.refused(
        "a convolution of the previous tokens' own",
        &resume,
        &other_x,
    );
    let x = with(commit, |work| {
        work.stored = Stored::x(SIZES.projection(SIZES.previous));
    });
    stand_in.refused("x without its convolution", &commit, &x);
    let kv = with(resume, |work| {
        work.previous.as_mut().unwrap().stored = SIZES.stored();
    });
    stand_in.refused("k and v of previous tokens", &resume, &kv);
    let no_states = with(snapshots, |work| work.snapshots = None);
    stand_in.refused("windows without states", &snapshots, &no_states);
    let parallel = Options::default().formulation(Formulation::Parallel);
    for one in [verify, resume, SIZES.gdn().fresh(SIZES.rows())] {
        stand_in.flip("parallel", &one, &one.options(parallel), 1);
    }
    stand_in.flip("parallel", &commit, &commit.options(parallel), 1);
    stand_in.refused("parallel", &snapshots, &snapshots.options(parallel));
}

/// Every tensor and option of a convolution, a norm and fresh rows, every size, and which of these three a step has.
#[test]
fn everything_around_a_recurrence_is_told_apart() {
    let name = "everything_around_a_recurrence_is_told_apart";
    if elsewhere_with(name, &[HAS_CLUSTERS]).is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    let (one, kda) = (DECODE.gdn_layer(), DECODE.kda_layer());
    flip_tensors(stand_in, "layer", one, true);
    flip_options(stand_in, "layer", one, true);
    flip_tensors(stand_in, "KDA layer", kda, true);
    flip_options(stand_in, "KDA layer", kda, true);

    let flip = |what: &str, wanted: bool, change: &dyn Fn(&mut Gdn<'static>)| {
        let other = with(one, |work| change(work));
        stand_in.flip(&format!("layer: {what}"), &one, &other, wanted.into());
    };
    let of = |sizes: Sizes| move |work: &mut Gdn<'static>| *work = sizes.gdn_layer();
    flip("B", false, &of(Sizes { rows: 3, ..DECODE }));
    flip("P", false, &of(Sizes { slots: 6, ..DECODE }));
    let heads = |heads, value_heads| Sizes {
        heads,
        value_heads,
        ..DECODE
    };
    flip("H", true, &of(heads(4, 4)));
    flip("HV", true, &of(heads(2, 8)));
    flip("K", true, &of(Sizes { dim: 128, ..DECODE }));
    for taps in [2, 3] {
        flip("W", true, &|work| {
            work.inputs = Inputs::conv(DECODE.convolution(taps));
        });
    }
    let conv = |change: fn(&mut Convolution<'static>)| {
        move |work: &mut Gdn<'static>| match &mut work.inputs {
            Inputs::Conv(conv) => change(conv),
            _ => unreachable!("other inputs"),
        }
    };
    flip("bias", true, &conv(|conv| conv.bias = None));
    // A kernel gets only the address of these windows, as of the written pool.
    flip(
        "write_windows",
        false,
        &conv(|conv| conv.write_windows = None),
    );
    flip(
        "activation",
        true,
        &conv(|conv| conv.activation = Activation::None),
    );
    let norm = |change: fn(&mut Norm<'static>)| {
        move |work: &mut Gdn<'static>| change(work.norm.as_mut().unwrap())
    };
    flip(
        "bits of eps",
        true,
        &norm(|norm| norm.eps = norm.eps.next_up()),
    );
    flip(
        "activation of z",
        true,
        &norm(|norm| norm.activation = Activation::Sigmoid),
    );
    flip("no norm", true, &|work| work.norm = None);
    flip("no fresh rows", true, &|work| work.fresh = None);
    flip("no convolution", true, &|work| {
        work.inputs = DECODE.gdn().inputs
    });
    let read_only = States::read_only(DECODE.pool()).slots(DECODE.rows());
    flip("read-only", true, &|work| {
        conv(|conv| conv.write_windows = None)(work);
        work.states = read_only.into();
    });

    // Refused arguments are not confused with launched arguments of the same tensors.
    let refused = |what: &str, change: &dyn Fn(&mut Gdn<'static>)| {
        stand_in.refused(what, &one, &with(one, |work| change(work)));
    };
    refused("heads", &conv(|conv| conv.heads = 1));
    refused("heads", &conv(|conv| conv.heads = 1 << 32 | 2));
    refused(
        "a sigmoid",
        &conv(|conv| conv.activation = Activation::Sigmoid),
    );
    refused(
        "no activation",
        &norm(|norm| norm.activation = Activation::None),
    );
    refused("an eps of 0", &norm(|norm| norm.eps = 0.0));
}

/// Kernels with clusters are refused and not selected on a GPU without clusters.
#[test]
fn a_gpu_without_clusters_gets_no_kernel_in_clusters() {
    let name = "a_gpu_without_clusters_gets_no_kernel_in_clusters";
    if elsewhere(name).is_some() {
        return;
    }
    let stand_in = StandIn::new();
    let (library, layer) = (Library::new(&stand_in.context), DECODE.gdn_layer());
    let by_name = |error: Error| {
        let message = error.to_string();
        let parts = [
            "compute capability with ",
            " = 8.6 is not supported: 9.0 or newer",
        ];
        assert!(
            message.starts_with(parts[0]) && message.contains(parts[1]),
            "{message}"
        );
    };
    let mut variants = layer.variants().unwrap();
    variants.retain(|variant| variant.takes_clusters());
    for variant in variants {
        // SAFETY: the stand-in runs nothing.
        let launched = unsafe { library.launch_with(StreamRef::default_stream(), &layer, variant) };
        by_name(launched.unwrap_err());
    }
    assert_eq!(stand_in.compiled(), 0);
    match library.selected(&layer) {
        Ok(selected) => {
            assert_eq!(selected.cluster(), 1);
            launch(&library, &layer).unwrap();
            library.plan(&layer).unwrap();
        }
        Err(error) => {
            by_name(error);
            by_name(launch(&library, &layer).unwrap_err());
            by_name(library.plan(&layer).unwrap_err());
        }
    }
}

/// Every size is compiled in, except B, P and the steps of snapshots.
#[test]
fn every_size_but_b_and_p_is_told_apart() {
    if elsewhere("every_size_but_b_and_p_is_told_apart").is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    let flip = |what: &str, of: &dyn Fn(Sizes) -> Box<dyn Work>, wanted: [bool; 7]| {
        let s = SIZES;
        let sizes = [
            ("B", Sizes { rows: 3, ..s }, wanted[0]),
            ("P", Sizes { slots: 6, ..s }, wanted[1]),
            ("T", Sizes { tokens: 3, ..s }, wanted[2]),
            ("T'", Sizes { previous: 4, ..s }, wanted[3]),
            ("H", Sizes { heads: 4, ..s }, wanted[4]),
            (
                "HV",
                Sizes {
                    value_heads: 8,
                    ..s
                },
                wanted[5],
            ),
            ("K", Sizes { dim: 128, ..s }, wanted[6]),
        ];
        for (size, sizes, wanted) in sizes {
            let what = format!("{what}: {size}");
            stand_in.flip(&what, &*of(s), &*of(sizes), wanted.into());
        }
    };
    let (y, n) = (true, false);
    flip("update", &|s| Box::new(s.gdn()), [n, n, y, n, y, y, y]);
    flip(
        "resume",
        &|s| Box::new(s.gdn_resume()),
        [n, n, y, y, y, y, y],
    );
    flip(
        "commit",
        &|s| Box::new(s.gdn_commit()),
        [n, n, n, y, y, y, y],
    );
    // For packed rows T is `max_tokens`.
    flip(
        "packed",
        &|s| Box::new(s.gdn_packed()),
        [n, n, n, n, y, y, y],
    );
    flip("KDA", &|s| Box::new(s.kda_resume()), [n, n, y, y, y, y, y]);

    let longer = |work: &mut Gdn<'_>| work.packed.as_mut().unwrap().max_tokens = 3;
    let packed = SIZES.gdn_packed();
    stand_in.flip("max_tokens", &packed, &with(packed, longer), 1);
    let dims = [2, 3, 4, 64, 64];
    let fewer = tensor(Bf16, &dims).with_strides(SIZES.snapshots().strides());
    let other = SIZES.gdn().snapshots(fewer.unwrap());
    stand_in.flip("steps", &SIZES.gdn_snapshots(), &other, 0);
}

/// Optional tensors, kinds of gates, destinations of states, and variants.
#[test]
fn every_choice_is_told_apart() {
    if elsewhere("every_choice_is_told_apart").is_some() {
        return;
    }
    let stand_in = &StandIn::new();
    for (what, sizes) in [("decode", DECODE), ("verify", SIZES)] {
        let one = sizes.gdn();
        let flip = |field: &str, states: States<'static>| {
            let states = with(one, |work| work.states = states);
            stand_in.flip(&format!("{what}: {field}"), &one, &states, 1);
        };
        let (full, plain) = (sizes.update(), States::update(sizes.pool()));
        flip("read_slots", with(full, |s| s.read_slots = None).into());
        flip("write_slots", with(full, |s| s.write_slots = None).into());
        let read_only = States::read_only(sizes.pool()).slots(sizes.rows());
        flip("read-only", read_only.into());
        // Both have the same tensors.
        let [updated, read] = [plain.slots(sizes.rows()).into(), read_only.into()]
            .map(|states: States<'static>| with(one, |work| work.states = states));
        stand_in.flip("update", &read, &updated, 1);
        // A kernel gets only the address of the written pool.
        let in_place = with(one, |work| {
            work.states = with(full, |states| states.write_pool = None).into();
        });
        stand_in.flip(&format!("{what}: write_pool"), &one, &in_place, 0);
        let raw = |scale| with(one, |work| work.gates = work.gates.beta_scale(scale));
        stand_in.flip("beta_scale", &raw(BetaScale::One), &raw(BetaScale::Two), 1);
        let gate = sizes.per_head(sizes.tokens);
        let given = with(one, |work| work.gates = GdnGates::given(gate, gate));
        stand_in.flip("given gates", &one, &given, 1);
        stand_in.flip("snapshots", &one, &one.snapshots(sizes.snapshots()), 1);

        let library = Library::new(&stand_in.context);
        launch(&library, &one).unwrap();
        let (selected, before) = (one.selected().unwrap(), stand_in.compiled());
        let mut variants = one.variants().unwrap();
        variants.retain(|&variant| variant != selected);
        for variant in &variants {
            // SAFETY: the stand-in runs nothing.
            unsafe { library.launch_with(StreamRef::default_stream(), &one, *variant) }.unwrap();
        }
        assert_eq!(stand_in.compiled() - before, variants.len() as u32);
    }
    let per_token = SIZES.gdn_per_token();
    let no_accepted = with(per_token, |work| {
        let States::PerToken(states) = &mut work.states else {
            unreachable!("they are");
        };
        states.accepted = None;
    });
    stand_in.flip("accepted", &per_token, &no_accepted, 1);
    let one = Sizes { rows: 1, ..SIZES };
    let packed = one.gdn_packed();
    let dense = with(packed, |work| work.packed = None);
    stand_in.flip("packed", &packed, &dense, 1);
    stand_in.flip("previous", &SIZES.gdn(), &SIZES.gdn_resume(), 1);

    // Both launches have the same tensors, if the kinds have them.
    let of = |kind| SIZES.step(SIZES.kda(2, kind), SIZES.update());
    let (softplus, bounded) = (of(SIZES.softplus()), of(SIZES.lower_bound()));
    let of_bound = |lower_bound, a_log, dt_bias| {
        of(KdaDecay::LowerBound {
            lower_bound,
            a_log,
            dt_bias,
        })
    };
    let KdaDecay::Softplus { a_log, dt_bias, .. } = SIZES.softplus() else {
        unreachable!("it is")
    };
    let by_heads = of_bound(-5.0, Some(tensor(F32, &[2])), Some(tensor(F32, &[2, 64])));
    let flip = |what: &str, one: &Kda<'_>, other: &Kda<'_>| stand_in.flip(what, one, other, 1);
    flip("lower bound", &softplus, &bounded);
    flip("softplus", &bounded, &softplus);
    flip("log", &of(KdaDecay::Log), &of_bound(-5.0, None, None));
    flip(
        "bits of the bound",
        &bounded,
        &of_bound((-5.0f32).next_up(), Some(a_log), dt_bias),
    );
    flip("A_log", &bounded, &of_bound(-5.0, None, dt_bias));
    flip("dt_bias", &bounded, &of_bound(-5.0, Some(a_log), None));
    flip("rows of the parameters", &bounded, &by_heads);
    flip(
        "dt_bias of softplus",
        &softplus,
        &of(KdaDecay::Softplus {
            a_log,
            dt_bias: None,
        }),
    );
    let given = with(bounded, |work| work.gates.beta_kind = KdaBeta::Given);
    flip("beta", &bounded, &given);

    // Refused arguments are not confused with launched arguments of the same tensors.
    let gate = SIZES.per_head(2);
    let gdn = SIZES.step(GdnGates::given(gate, gate), SIZES.update());
    let kda = SIZES.step(
        KdaGates::new(gate, KdaDecay::Log, gate, KdaBeta::Given),
        SIZES.update(),
    );
    stand_in.refused("a KDA layer with a decay per head", &gdn, &kda);
    stand_in.refused(
        "a bound of 0",
        &softplus,
        &of_bound(0.0, Some(a_log), dt_bias),
    );
    stand_in.refused(
        "a bound of NaN",
        &bounded,
        &of_bound(f32::NAN, Some(a_log), dt_bias),
    );
    let options = Options::default().null_slot(u32::MAX);
    stand_in.refused("a null slot", &SIZES.gdn(), &SIZES.gdn().options(options));
    let options = Options::default().scale(f32::NAN);
    stand_in.refused("a scale", &SIZES.gdn(), &SIZES.gdn().options(options));
}

/// A serving loop compiles nothing after its layer is prewarmed, for any batch size and any prompt.
#[test]
fn a_prewarmed_layer_compiles_nothing() {
    let name = "a_prewarmed_layer_compiles_nothing";
    if elsewhere_with(name, &[HAS_CLUSTERS]).is_some() {
        // The same test on a GPU without clusters, which has other kernels.
        elsewhere(name);
        return;
    }
    let stand_in = &StandIn::new();
    let (h, hv, k, slots) = (16, 32, 128, 64);
    let d = (2 * h + hv) * k;
    let f32s = |dims: &[usize]| tensor(F32, dims);
    let kind = KdaDecay::LowerBound {
        lower_bound: -5.0,
        a_log: Some(f32s(&[hv])),
        dt_bias: None,
    };
    let mut most_kernels = 0;
    for dtype in [Bf16, F32] {
        let (pool, windows) = (
            tensor(dtype, &[slots, hv, k, k]),
            tensor(Bf16, &[slots, d, 3]),
        );
        let (conv, norm) = (tensor(Bf16, &[d, 4]), tensor(Bf16, &[k]));
        let gdn = GdnParameters::new(f32s(&[hv]), f32s(&[hv]));
        let gdn = Weights::new(h, conv, gdn, norm, 1e-6);
        let gdn = Layer::new(gdn, pool, windows, Options::default()).unwrap();
        let row = |dims: [usize; 2]| {
            let row = tensor(Bf16, &[&dims[..], &[d + hv * k + 2 * hv]].concat());
            Ok((
                gdn.projection(row)?,
                tensor(Bf16, &[&dims[..], &[hv, k]].concat()),
            ))
        };
        most_kernels = most_kernels.max(serves_prewarmed(stand_in, &gdn, row));
        let kda = Weights::new(h, conv, KdaParameters::new(kind), norm, 1e-6);
        let kda = Layer::new(kda, pool, windows, Options::default()).unwrap();
        let of_kda = serves_prewarmed(stand_in, &kda, |dims| {
            let (of, o) = row(dims)?;
            Ok((Projection::new(of.x, [o, of.beta], of.z), o))
        });
        most_kernels = most_kernels.max(of_kda);
    }
    assert!(most_kernels > 1, "no batch size has another kernel");
}

/// Prewarms a layer, serves `tokens` with it, and returns the number of kernels of its decodes.
fn serves_prewarmed<P: Parameters<'static>>(
    stand_in: &StandIn,
    layer: &Layer<'static, P>,
    tokens: impl Fn([usize; 2]) -> Result<(Projection<'static>, Tensor<'static>), Error>,
) -> usize {
    const DRAFTS: [usize; 2] = [2, 5];
    let library = Library::new(&stand_in.context);
    let of_rows = |rows: usize| Rows::new(tensor(I64, &[rows])).fresh(tensor(I32, &[rows]));
    let prompts = |rows: usize, longest: usize| {
        of_rows(rows)
            .packed(tensor(U32, &[rows + 1]), longest)
            .positions(tensor(I64, &[rows]))
            .checkpoints(64, tensor(I64, &[rows, 2]))
            .workspace(tensor(F32, &[1 << 32]))
    };
    let keep = |rows: usize| tensor(U32, &[rows]);
    let drafts = Some((&DRAFTS[..], keep(1)));
    layer
        .prewarm_all(&library, &of_rows(1), Some(&prompts(1, 1)), drafts, &tokens)
        .unwrap();
    let prewarmed = library.compiled();

    let mut decoded = HashSet::new();
    for batch in 1..=40 {
        let (rows, keep) = (of_rows(batch), keep(batch));
        let step = |t: usize| tokens([batch, t]).unwrap();
        let (one, o) = step(1);
        let decode = layer.decode(&one, &rows, o);
        decoded.insert(library.selected(&decode).unwrap().name());
        launch(&library, &decode).unwrap();
        for t in DRAFTS {
            let (new, o) = step(t);
            launch(&library, &layer.verify(&new, &rows, o)).unwrap();
            launch(&library, &layer.commit(&new, keep, &rows)).unwrap();
            for before in DRAFTS {
                let (last, _) = step(before);
                launch(&library, &layer.resume(&new, &last, keep, &rows, o)).unwrap();
            }
        }
        for (total, longest) in [
            (batch, 1),
            (3 * batch, 7),
            (70 * batch, 70),
            (3000 + batch, 3000),
        ] {
            let (prompt, o) = tokens([1, total]).unwrap();
            launch(
                &library,
                &layer.prefill(&prompt, &prompts(batch, longest), o),
            )
            .unwrap();
        }
    }
    assert_eq!(library.compiled(), prewarmed);

    // Other numbers of drafts are compiled at their first launch.
    let (other, o) = tokens([1, 3]).unwrap();
    launch(&library, &layer.verify(&other, &of_rows(1), o)).unwrap();
    assert_eq!(library.compiled(), prewarmed + 1);
    decoded.len()
}

//! Kernels without this crate's launcher: the PTX text, and what a launch of it takes.
//!
//! An engine that compiles and launches by itself asks its arguments for a [`Recipe`]
//! ([`Work::recipe`](crate::Work::recipe)), which is checked as a launch would be, and then
//!
//! 1. compiles [`Kernel::ptx`] (`cuModuleLoadData`, cudarc's `Ptx::from_src`) and gets the function
//!    [`Kernel::symbol`], once for each [`Kernel`], which is the key of such a cache;
//! 2. lets the function have [`LaunchShape::shared_bytes`] of dynamic shared memory
//!    (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`) where they are more than 48 KiB;
//! 3. launches it (`cuLaunchKernel`) on [`LaunchShape::grid`], with blocks of ([`LaunchShape::block`], 1, 1), these
//!    shared bytes, and one parameter: [`Recipe::params`] by value, 8-byte aligned.
//!
//! With a convolution or a norm, blocks may run in clusters of [`LaunchShape::cluster`]. The PTX asks for them, so that such a
//! launch is as any other. None is selected for a GPU below compute capability 9.0.
//!
//! A prefill may be several such launches, one after the other on one stream: [`Recipe::launches`], of which each has its
//! kernel, its shape and its parameter. Where [`LaunchShape::overlaps`] is set, a launch may be given the attribute
//! `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION` (`cuLaunchKernelEx`): it may begin while the one before it ends, or
//! beside it, and waits itself. Without the attribute it begins behind it, and the results are the same; a long prompt takes
//! longer then. All others are launched without it.
//!
//! Nothing but [`Recipe::params`] differs between launches of the same [`Kernel`] and B; of a prefill the shape too,
//! which is of its lengths. Nothing is launched where the grid is empty, as for B = 0. What is promised to a launch of
//! this crate is promised to such a launch: tensors stay valid until the stream has passed it, what is written is used
//! by nobody else, and no two live rows write one slot.
//!
//! ```
//! use gated_delta::{DType, Gdn, GdnGates, Inputs, States, Tensor, Work};
//!
//! // 4 sequences, 16 query/key heads, 32 value heads, at addresses of the engine's own.
//! // SAFETY: nothing is launched here.
//! let tensor = |dtype, dims: &[usize]| unsafe { Tensor::from_raw(0x7f00_0000_0000, dtype, dims) };
//! let qk = tensor(DType::Bf16, &[4, 1, 16, 128])?;
//! let vo = tensor(DType::Bf16, &[4, 1, 32, 128])?;
//! let gate = tensor(DType::F32, &[4, 1, 32])?;
//! let states = States::update(tensor(DType::Bf16, &[64, 32, 128, 128])?).slots(tensor(DType::I32, &[4])?);
//! let step = Gdn::new(Inputs::qkv(qk, qk, vo), GdnGates::given(gate, gate), vo, states);
//! let recipe = step.recipe()?;
//! let text = recipe.kernel.ptx()?;
//! assert!(text.contains(&format!(".entry {}(", recipe.kernel.symbol())));
//! assert_eq!(recipe.shape.grid[2], 4);
//! assert_eq!(recipe.parameter().len(), size_of::<gated_delta::raw::StepParams>());
//! # Ok::<(), gated_delta::Error>(())
//! ```

pub use gated_delta_kernels::launch::LaunchShape;
pub use gated_delta_kernels::step::{DeferredParams, LayerParams, PrefillParams, StepParams};

pub use crate::kernel::{Kernel, template};
use crate::step::{Launches, Parameter};

/// What a launch is made of, or several, one after the other.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Recipe {
    /// What is compiled: all, or of several launches that which has variants.
    pub kernel: Kernel,
    /// Grid, block and dynamic shared memory of its launch.
    pub shape: LaunchShape,
    /// The one parameter, passed by value: a `#[repr(C)]` struct of addresses and pool sizes. A kernel takes all of it, or
    /// the [`LayerParams`] or the [`StepParams`] that it begins with; the driver knows, and copies no more than that. Launches of
    /// a prompt in segments differ in [`PrefillParams::first_chunk`] and what follows it: [`Launch::params`].
    pub params: PrefillParams,
    /// That of a kernel whose states wait ([`Step::pending`](crate::Step::pending)), in place of `params`.
    pub deferred: Option<DeferredParams>,
    launches: Launches<Kernel>,
}

/// One of the launches of a [`Recipe`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Launch {
    /// What is compiled.
    pub kernel: Kernel,
    /// Grid, block and dynamic shared memory of the launch, and whether it may overlap the one before.
    pub shape: LaunchShape,
    /// As [`Recipe::params`].
    pub params: PrefillParams,
    /// As [`Recipe::deferred`].
    pub deferred: Option<DeferredParams>,
}

impl Recipe {
    pub(crate) fn new(launches: Launches<Kernel>, parameter: Parameter) -> Self {
        let (kernel, shape) = launches.main;
        let mut recipe = Self {
            kernel,
            shape,
            params: bytemuck::Zeroable::zeroed(),
            deferred: None,
            launches,
        };
        match parameter {
            Parameter::Layer(layer) => recipe.params.layer = layer,
            Parameter::Prefill(params) => recipe.params = params,
            Parameter::Deferred(deferred) => {
                (recipe.params.layer, recipe.deferred) = (deferred.layer, Some(deferred));
            }
        }
        recipe
    }

    /// Every kernel of the call in stream order: one where T is at most 16, and for short rows of a prefill. Else, each part where there
    /// is one, \[convolution\], then \[preparation, chain\] once for each segment of a long prompt, up to eight, then
    /// \[rows of one token\], then \[norm and windows\].
    pub fn launches(&self) -> impl Iterator<Item = Launch> {
        let Self {
            params, deferred, ..
        } = *self;
        self.launches.in_order().into_iter().map(move |launch| {
            let mut params = params;
            launch.say(&mut params);
            Launch {
                kernel: launch.of,
                shape: launch.shape,
                params,
                deferred,
            }
        })
    }

    /// The bytes of the parameter of the only launch, for a launch that takes no Rust struct; of several, each has its own:
    /// [`Launch::parameter`].
    #[must_use]
    pub fn parameter(&self) -> &[u8] {
        bytes_of(&self.kernel, &self.params, self.deferred.as_ref())
    }
}

impl Launch {
    /// The bytes of the parameter, for a launch that takes no Rust struct.
    #[must_use]
    pub fn parameter(&self) -> &[u8] {
        bytes_of(&self.kernel, &self.params, self.deferred.as_ref())
    }
}

fn bytes_of<'a>(
    kernel: &Kernel,
    params: &'a PrefillParams,
    deferred: Option<&'a DeferredParams>,
) -> &'a [u8] {
    match deferred {
        Some(deferred) => bytemuck::bytes_of(deferred),
        None => &bytemuck::bytes_of(params)[..kernel.entry().parameter_bytes()],
    }
}

//! The PTX text and the launch parameters, for launching kernels without this crate's launcher.
//!
//! An engine with a launcher of its own asks its arguments for a [`Recipe`] ([`Work::recipe`](crate::Work::recipe)). The recipe
//! is checked like a launch. The engine then
//!
//! 1. compiles [`Kernel::ptx`] (`cuModuleLoadData`, cudarc's `Ptx::from_src`) and gets the function
//!    [`Kernel::symbol`], once for each [`Kernel`], which is the key for a cache of functions;
//! 2. allows the function [`LaunchShape::shared_bytes`] of dynamic shared memory
//!    (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`) if they are more than 48 KiB;
//! 3. launches it (`cuLaunchKernel`) on [`LaunchShape::grid`], with blocks of ([`LaunchShape::block`], 1, 1), these
//!    shared bytes, and one parameter: [`Recipe::params`] by value, 8-byte aligned.
//!
//! With a convolution or a norm, blocks may run in clusters of [`LaunchShape::cluster`]. The PTX itself requests the clusters, so
//! the launch needs no attribute for them. No kernel with clusters is selected for a GPU below compute capability 9.0.
//!
//! A prefill may take several such launches, one after the other on one stream: [`Recipe::launches`]. Each has its own kernel,
//! shape and parameter. If [`LaunchShape::overlaps`] is set, the launch may have the attribute
//! `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION` (`cuLaunchKernelEx`): it may then begin while the previous launch
//! ends, or run concurrently with it, and waits in the kernel. Without the attribute the launch begins after the previous one.
//! The results are the same, but a long prompt takes longer. All other launches must not have the attribute.
//!
//! Launches of the same [`Kernel`] and B differ only in [`Recipe::params`]. Launches of a prefill also differ in their shape,
//! which depends on the lengths. If the grid is empty, as for B = 0, launch nothing. A launch from a recipe needs the same
//! promises as a launch of this crate: tensors stay valid until the stream has passed it, nobody else uses memory that it writes,
//! and no two live rows write one slot.
//!
//! ```
//! use gated_delta::{DType, Gdn, GdnGates, Inputs, States, Tensor, Work};
//!
//! // 4 sequences, 16 query/key heads, 32 value heads.
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

pub use crate::specialise::{Kernel, template};
use crate::step::{Launches, Parameter};

/// A launch, or several launches, one after the other.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Recipe {
    /// The kernel. If there are several launches, the kernel of the launch that has variants.
    pub kernel: Kernel,
    /// Grid, block and dynamic shared memory of that kernel's launch.
    pub shape: LaunchShape,
    /// The only parameter, passed by value: a `#[repr(C)]` struct of addresses and pool sizes. A kernel takes the whole struct,
    /// or only the [`LayerParams`] or the [`StepParams`] at its start; the driver knows the size of the parameter, and copies no
    /// more. The launches of a prompt in segments differ in [`PrefillParams::first_chunk`] and the fields after it:
    /// [`Launch::params`].
    pub params: PrefillParams,
    /// The parameter, in place of `params`, of a kernel with deferred write-back ([`Step::pending`](crate::Step::pending)).
    pub deferred: Option<DeferredParams>,
    launches: Launches<Kernel>,
}

/// One of the launches of a [`Recipe`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Grid, block and dynamic shared memory of the launch, and whether it may overlap the previous one.
    pub shape: LaunchShape,
    /// The parameter: see [`Recipe::params`].
    pub params: PrefillParams,
    /// The parameter of a kernel with deferred write-back: see [`Recipe::deferred`].
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

    /// Every launch, in order. Most recipes have one. A prefill of rows of more than 64 tokens (on GPUs other than Hopper: of
    /// more than one token) has an intra-chunk pass and a scan; a single long prompt has up to eight pairs of these. If rows are
    /// on average at most half as long as the longest one, the rows of one token have a launch of their own. A convolution adds
    /// one launch before these, a convolution or a norm one after.
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

    /// The bytes of the parameter of a recipe with one launch, for a launch function without Rust structs. If there are several
    /// launches, each has its own: [`Launch::parameter`].
    #[must_use]
    pub fn parameter(&self) -> &[u8] {
        bytes_of(&self.kernel, &self.params, self.deferred.as_ref())
    }
}

impl Launch {
    /// The bytes of the parameter, for a launch function without Rust structs.
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

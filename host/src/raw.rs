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
//! A prefill may be several such launches, one after the other: [`Recipe::launches`]. Of rows of more than 64 tokens
//! there are one or two before the kernel's, with a convolution or a norm one behind it. Recipes say
//! [`LaunchShape::overlaps`] of none: what [`Library::launch`](crate::Library::launch) lets overlap takes more shared memory too.
//!
//! Nothing but [`Recipe::params`] differs between launches of the same [`Kernel`] and B; of a prefill the grid too,
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
use crate::step::Beside;

/// What a launch is made of.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Recipe {
    /// What is launched before, the first one first, on the same stream with the same parameter: of a prefill of rows of more
    /// than 64 tokens, the convolution, where there is one, and the preparation.
    pub before: [Option<(Kernel, LaunchShape)>; 2],
    /// What is compiled.
    pub kernel: Kernel,
    /// Grid, block and dynamic shared memory of the launch.
    pub shape: LaunchShape,
    /// What is launched behind, likewise: of a prefill with a convolution.
    pub after: Option<(Kernel, LaunchShape)>,
    /// The one parameter, passed by value: a `#[repr(C)]` struct of addresses and pool sizes. A kernel takes all of it, or
    /// the [`LayerParams`] or the [`StepParams`] that it begins with; the driver knows, and copies no more than that.
    pub params: PrefillParams,
    /// That of a kernel whose states wait ([`Step::pending`](crate::Step::pending)), in place of `params`.
    pub deferred: Option<DeferredParams>,
}

impl Recipe {
    /// Every launch, in order: one, of a prefill one to four.
    pub fn launches(&self) -> impl Iterator<Item = (Kernel, LaunchShape)> {
        let Self { before, after, .. } = *self;
        Beside { before, after }.with((self.kernel, self.shape))
    }

    /// The bytes of the parameter, for a launch that takes no Rust struct.
    #[must_use]
    pub fn parameter(&self) -> &[u8] {
        match &self.deferred {
            Some(deferred) => bytemuck::bytes_of(deferred),
            None => &bytemuck::bytes_of(&self.params)[..self.kernel.entry().parameter_bytes()],
        }
    }
}

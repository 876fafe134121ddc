//! Kernels without this crate's launcher: the PTX text, and what a launch of it takes.
//!
//! An engine that compiles and launches by itself asks its arguments for a [`Recipe`]
//! ([`GdnDecode::recipe`], [`Recurrent::recipe`], [`Commit::recipe`]), which is checked as a launch would be, and then
//!
//! 1. compiles [`Kernel::ptx`] (`cuModuleLoadData`, cudarc's `Ptx::from_src`) and gets the function
//!    [`Kernel::symbol`], once for each [`Kernel`], which is the key of such a cache;
//! 2. lets the function have [`LaunchShape::shared_bytes`] of dynamic shared memory
//!    (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`) where they are more than 48 KiB;
//! 3. launches it (`cuLaunchKernel`) on [`LaunchShape::grid`], with blocks of ([`LaunchShape::block`], 1, 1), these
//!    shared bytes, and one parameter: [`Recipe::params`] by value, 8-byte aligned.
//!
//! Nothing but [`Recipe::params`] differs between launches of the same [`Kernel`] and B. Nothing is launched for B = 0,
//! where the grid is empty. What is promised to a launch of this crate is promised to such a launch: tensors stay valid
//! until the stream has passed it, what is written is used by nobody else, and no two live rows write one slot.
//!
//! ```
//! use gated_delta::ops::GdnGates;
//! use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
//! use gated_delta::{DType, Tensor};
//!
//! // 4 sequences, 16 query/key heads, 32 value heads, at addresses of the engine's own.
//! // SAFETY: nothing is launched here.
//! let tensor = |dtype, dims: &[usize]| unsafe { Tensor::from_raw(0x7f00_0000_0000, dtype, dims) };
//! let args = GdnDecode {
//!     q: tensor(DType::Bf16, &[4, 1, 16, 128])?,
//!     k: tensor(DType::Bf16, &[4, 1, 16, 128])?,
//!     v: tensor(DType::Bf16, &[4, 1, 32, 128])?,
//!     gates: GdnGates::Given {
//!         g: tensor(DType::F32, &[4, 1, 32])?,
//!         beta: tensor(DType::F32, &[4, 1, 32])?,
//!     },
//!     o: tensor(DType::Bf16, &[4, 1, 32, 128])?,
//!     pool: tensor(DType::Bf16, &[64, 32, 128, 128])?,
//!     write_pool: None,
//!     read_slots: Some(tensor(DType::I32, &[4])?),
//!     write_slots: None,
//!     options: GdnDecodeOptions::default(),
//! };
//! let recipe = args.recipe()?;
//! let text = recipe.kernel.ptx()?;
//! assert!(text.contains(&format!(".entry {}(", recipe.kernel.symbol())));
//! assert_eq!(recipe.shape.grid[2], 4);
//! assert_eq!(recipe.parameter().len(), size_of_val(&recipe.params));
//! # Ok::<(), gated_delta::Error>(())
//! ```

use std::ffi::CString;

use bytemuck::Pod;
pub use gated_delta_kernels::kernels::gdn_decode::GdnDecodeParams;
pub use gated_delta_kernels::launch::LaunchShape;
pub use gated_delta_kernels::recurrent::RecurrentParams;

use crate::Entry;
use crate::error::Error;
use crate::library::{OperatorConstants, check_memory};
use crate::module_cache::specialise;
use crate::ops::gdn_decode::GdnDecode;
use crate::ops::recurrent::{Commit, Gates, Recurrent};
use crate::plan::{LayerConstants, Problem};
use crate::ptx;
use crate::shapes::Named;
use crate::tensor::Memory;

/// What a launch is made of.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Recipe<P> {
    /// What is compiled.
    pub kernel: Kernel,
    /// Grid, block and dynamic shared memory of the launch.
    pub shape: LaunchShape,
    /// The one parameter, passed by value: a `#[repr(C)]` struct of addresses and pool sizes.
    pub params: P,
}

impl<P: Pod> Recipe<P> {
    /// The bytes of the parameter, for a launch that takes no Rust struct.
    #[must_use]
    pub fn parameter(&self) -> &[u8] {
        bytemuck::bytes_of(&self.params)
    }
}

/// An entry with the load-time constants of a layer: everything that is compiled in, and so the key of a cache of
/// compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    entry: Entry,
    constants: OperatorConstants,
}

impl Kernel {
    pub(crate) const fn new(entry: Entry, constants: OperatorConstants) -> Self {
        Self { entry, constants }
    }

    /// The variant.
    #[must_use]
    pub fn entry(&self) -> Entry {
        self.entry
    }

    /// Name of the function in the PTX.
    #[must_use]
    pub fn symbol(&self) -> &'static str {
        self.entry.name()
    }

    /// The PTX, with the constants written into it.
    ///
    /// # Errors
    /// [`Error::Specialise`] where a constant has no value: a defect of this library.
    pub fn ptx(&self) -> Result<String, Error> {
        let text = text(self.entry, self.constants.words())?.into_string();
        text.map_err(|_| Error::Specialise("the PTX is no UTF-8".to_owned()))
    }

    /// Name and value of every load-time constant; an f32 is given by its bits.
    pub fn constants(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let symbols = self.entry.symbols().iter().copied();
        symbols.zip(self.constants.words().iter().copied())
    }
}

/// The PTX of `entry` with `constants` written into it, terminated.
pub(crate) fn text(entry: Entry, constants: &[u32]) -> Result<CString, Error> {
    let text =
        template(entry).ok_or_else(|| Error::Specialise(format!("no PTX for {}", entry.name())))?;
    specialise(text, entry.symbols(), constants)
}

/// The PTX of `entry` before the constants are written into it: each is a symbol, of [`Entry::symbols`], and the text
/// compiles only when all are replaced by numbers. `None` for an entry newer than this library.
#[must_use]
pub fn template(entry: Entry) -> Option<&'static str> {
    ptx::text(entry)
}

impl GdnDecode<'_> {
    /// Checks the arguments, and says how to launch them by other means than [`Library`](crate::Library).
    ///
    /// # Errors
    /// As [`Library::gdn_decode`](crate::Library::gdn_decode)'s, but for the launch; [`Error::Memory`] for a tensor in
    /// host memory.
    pub fn recipe(&self) -> Result<Recipe<GdnDecodeParams>, Error> {
        let problem = self.check()?;
        let batch = self.q.dims().first().map_or(0, |&rows| rows as u32);
        let pool = match self.write_pool {
            Some(_) => "write state",
            None => "state",
        };
        let written = |name: &str| name == "o" || (self.options.update_state && name == pool);
        recipe(&problem, batch, &self.tensors(), written, self.params())
    }
}

impl<G: Gates> Recurrent<'_, G> {
    /// Checks the arguments, and says how to launch them by other means than [`Library`](crate::Library).
    ///
    /// # Errors
    /// Those of a launch, but for the launch itself; [`Error::Memory`] for a tensor in host memory.
    pub fn recipe(&self) -> Result<Recipe<RecurrentParams>, Error> {
        let request = self.request();
        let problem = request.check()?;
        let written = |name: &str| request.writes(&problem, name);
        recipe(
            &problem,
            request.batch(),
            &request.tensors(),
            written,
            request.params(),
        )
    }
}

impl<G: Gates> Commit<'_, G> {
    /// Checks the arguments, and says how to launch them by other means than [`Library`](crate::Library).
    ///
    /// # Errors
    /// Those of a launch, but for the launch itself; [`Error::Memory`] for a tensor in host memory.
    pub fn recipe(&self) -> Result<Recipe<RecurrentParams>, Error> {
        let request = self.request();
        let problem = request.check()?;
        let written = |name: &str| request.writes(&problem, name);
        recipe(
            &problem,
            request.batch(),
            &request.tensors(),
            written,
            request.params(),
        )
    }
}

fn recipe<C: LayerConstants, P>(
    problem: &Problem<C>,
    batch: u32,
    tensors: &[Option<Named<'_>>],
    written: impl Fn(&str) -> bool,
    params: P,
) -> Result<Recipe<P>, Error> {
    check_memory(Memory::Device, tensors, written)?;
    let entry = problem.entry(batch)?;
    Ok(Recipe {
        kernel: Kernel::new(entry, problem.constants.of_operator()),
        shape: problem.shape(entry, batch),
        params,
    })
}

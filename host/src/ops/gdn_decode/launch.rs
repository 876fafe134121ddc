//! Launches: through the cache, with a chosen variant, and through a plan.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::kernels::gdn_decode::GdnDecodeConstants;

use super::{GdnDecode, GdnDecodeParams, LaunchShape};
use crate::Entry;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::library::{KernelResources, Library};
use crate::ops::checks::{aligned, one_of};
use crate::plan::Planned;
use crate::stream::StreamRef;

/// A GDN decode with its kernels compiled: everything but addresses, B and P is settled.
///
/// Cheap to clone and to launch; it holds its [`Library`] alive.
///
/// ```no_run
/// use gated_delta::{Error, GdnDecode, GdnDecodePlan, Library, StreamRef};
///
/// /// Once for a layer.
/// fn plan(library: &Library, first: &GdnDecode<'_>) -> Result<GdnDecodePlan, Error> {
///     library.plan_gdn_decode(first)
/// }
///
/// /// Every step, for the same shapes, strides and dtypes, but any B, P and addresses.
/// fn step(plan: &GdnDecodePlan, stream: StreamRef<'_>, batch: usize, args: &GdnDecode<'_>) -> Result<(), Error> {
///     // SAFETY: the tensors outlive the step, and no two rows of it write one slot.
///     unsafe { plan.launch(stream, batch, &args.params()) }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct GdnDecodePlan(Planned<GdnDecodeConstants>);

impl Library {
    /// Enqueues a GDN decode: checks the arguments, looks the compiled kernel up (or compiles it, the first
    /// time), launches. Nothing is allocated or synchronised after the first time.
    ///
    /// # Errors
    /// Whatever the arguments break of [`GdnDecode`]'s rules, named; compile and launch failures.
    ///
    /// # Safety
    /// Until `stream` has passed the launch, the tensors stay valid, `o` and the written slots are used by
    /// nobody else, and no two live rows write one slot.
    pub unsafe fn gdn_decode(
        &self,
        stream: StreamRef<'_>,
        args: &GdnDecode<'_>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_gdn_decode(stream, args, None) }
    }

    /// As [`Library::gdn_decode`], with a variant of the caller's choice, for tuning and tests.
    ///
    /// # Errors
    /// As [`Library::gdn_decode`]'s, and [`Error::Unsupported`] for a variant that is not one of
    /// [`GdnDecode::variants`].
    ///
    /// # Safety
    /// As [`Library::gdn_decode`]'s.
    pub unsafe fn gdn_decode_with(
        &self,
        stream: StreamRef<'_>,
        args: &GdnDecode<'_>,
        variant: Entry,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_gdn_decode(stream, args, Some(variant)) }
    }

    /// Checks and enqueues `args`, with `variant` or the selected one.
    ///
    /// # Safety
    /// As [`Library::gdn_decode`]'s.
    unsafe fn launch_gdn_decode(
        &self,
        stream: StreamRef<'_>,
        args: &GdnDecode<'_>,
        variant: Option<Entry>,
    ) -> Result<(), Error> {
        let (switches, tensors) = (args.switches(variant), args.tensors());
        let params = args.params();
        let bytes = bytemuck::bytes_of(&params);
        if let Some((function, shape)) = self.last_decode().recall(&switches, &tensors) {
            // SAFETY: the caller's promise; the function was compiled for these layouts.
            return unsafe { self.launch_function(stream, function, shape, bytes) };
        }
        let problem = args.check()?;
        let batch = args.q.dims()[0] as u32;
        let entry = match variant {
            Some(variant) => one_of(problem.kind.variants(), variant)?,
            None => problem.entry(batch)?,
        };
        let written_pool = if args.write_pool.is_some() {
            "write state"
        } else {
            "state"
        };
        self.check_memory(&tensors, |name| {
            name == "o" || (args.options.update_state && name == written_pool)
        })?;
        if batch == 0 {
            return Ok(());
        }
        let (constants, shape) = (problem.constants.words(), problem.shape(entry, batch));
        // SAFETY: the caller's promise; the parameters are those of the entry's operator.
        let launched = unsafe { self.launch(stream, entry, constants, shape, bytes, &tensors) }?;
        if let Some(function) = launched {
            self.last_decode()
                .remember(switches, &tensors, function, shape);
        }
        Ok(())
    }

    /// Compiles every kernel that `args` may be launched with at any batch size, so that no later launch of
    /// such arguments compiles, as graph capture requires.
    ///
    /// # Errors
    /// As [`Library::gdn_decode`]'s, but for the launch.
    pub fn prewarm_gdn_decode(&self, args: &GdnDecode<'_>) -> Result<(), Error> {
        match self.context() {
            Some(_) => self.plan_gdn_decode(args).map(drop),
            None => args.check().map(drop),
        }
    }

    /// Registers and memory of every variant of `args`, compiled for them.
    ///
    /// # Errors
    /// As [`Library::plan_gdn_decode`]'s.
    pub fn gdn_decode_resources(
        &self,
        args: &GdnDecode<'_>,
    ) -> Result<Vec<(Entry, KernelResources)>, Error> {
        self.variant_resources(&args.check()?)
    }

    /// Checks `args` and compiles their kernels; the plan is then launched with other addresses, B and P.
    ///
    /// # Errors
    /// As [`Library::gdn_decode`]'s; [`Error::Unsupported`] on the simulator, which has nothing to compile.
    pub fn plan_gdn_decode(&self, args: &GdnDecode<'_>) -> Result<GdnDecodePlan, Error> {
        Ok(GdnDecodePlan(self.plan(args.check()?)?))
    }
}

impl GdnDecodePlan {
    /// The compiled function for `batch` rows and its launch shape, for an engine that launches by itself: one
    /// parameter, a [`GdnDecodeParams`] by value.
    ///
    /// # Errors
    /// [`Error::Range`] for B.
    pub fn raw(&self, batch: usize) -> Result<(RawFunction, LaunchShape), Error> {
        self.0.raw(batch)
    }

    /// Enqueues the planned decode on other addresses: no check but B's and alignment's, no look-up.
    ///
    /// # Errors
    /// [`Error::Range`] for B, [`Error::Alignment`] for an address that is less aligned than the planned one;
    /// launch failures.
    ///
    /// # Safety
    /// As [`Library::gdn_decode`]'s, for tensors of the planned shapes, strides and dtypes at `params`.
    pub unsafe fn launch(
        &self,
        stream: StreamRef<'_>,
        batch: usize,
        params: &GdnDecodeParams,
    ) -> Result<(), Error> {
        if batch == 0 {
            return Ok(());
        }
        let c = &self.0.problem.constants;
        if c.wide_io != 0 {
            aligned([
                ("q", params.q),
                ("k", params.k),
                ("v", params.v),
                ("o", params.o),
            ])?;
        }
        if c.wide_state != 0 {
            aligned([
                ("state", params.read_pool),
                ("write state", params.write_pool),
            ])?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(stream, batch, bytemuck::bytes_of(params)) }
    }
}

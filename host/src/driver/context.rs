//! GPUs and their contexts.

use std::{
    ffi::{CStr, c_void},
    marker::PhantomData,
    sync::Arc,
};

use super::{Driver, RawContext, attribute, code, driver};
use crate::error::Error;

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    ordinal: i32,
    raw: i32,
}

impl Device {
    /// Number of GPUs.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], [`Error::Driver`].
    pub fn count() -> Result<i32, Error> {
        let mut count = 0;
        // SAFETY: `count` is written.
        unsafe { driver()?.device_get_count(&raw mut count) }?;
        Ok(count)
    }

    /// The GPU with the number `ordinal`, from 0.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`]; [`Error::Driver`] if there are fewer GPUs.
    pub fn get(ordinal: i32) -> Result<Self, Error> {
        let mut raw = 0;
        // SAFETY: `raw` is written.
        unsafe { driver()?.device_get(&raw mut raw, ordinal) }?;
        Ok(Self { ordinal, raw })
    }

    /// The GPU with the `CUdevice` handle `raw`.
    fn of_handle(raw: i32) -> Result<Self, Error> {
        for ordinal in 0..Self::count()? {
            let device = Self::get(ordinal)?;
            if device.raw == raw {
                return Ok(device);
            }
        }
        Err(Error::NoDevice)
    }

    /// Number of the GPU, from 0.
    #[must_use]
    pub const fn ordinal(self) -> i32 {
        self.ordinal
    }

    /// Name of the GPU: `NVIDIA H200`.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn name(self) -> Result<String, Error> {
        let mut name = [0; 256];
        // SAFETY: the name is written, at most as long as the array.
        unsafe { driver()?.device_get_name(name.as_mut_ptr(), name.len() as i32, self.raw) }?;
        // SAFETY: the driver terminates the name.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned())
    }

    /// Value of a device attribute: see [`attribute`].
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn attribute(self, attribute: i32) -> Result<i32, Error> {
        let mut value = 0;
        // SAFETY: `value` is written.
        unsafe { driver()?.device_get_attribute(&raw mut value, attribute, self.raw) }?;
        Ok(value)
    }

    /// Compute capability, major and minor: (9, 0) for sm_90.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn compute_capability(self) -> Result<(u32, u32), Error> {
        let major = self.attribute(attribute::COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(attribute::COMPUTE_CAPABILITY_MINOR)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Size of the GPU's memory, in bytes.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn total_memory(self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: `bytes` is written.
        unsafe { driver()?.device_total_mem(&raw mut bytes, self.raw) }?;
        Ok(bytes)
    }
}

/// A CUDA context: the retained primary context of a GPU, or an engine's borrowed one.
#[derive(Clone, Debug)]
pub struct Context(Arc<Held>);

#[derive(Debug)]
struct Held {
    driver: &'static Driver,
    device: Device,
    raw: RawContext,
    /// Whether dropping releases a primary context.
    is_retained: bool,
    /// The context's id, which is unique in the process; `None` in drivers older than CUDA 12.
    id: Option<u64>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_retained {
            // SAFETY: retained once, released once. A failure leaves nothing to do.
            let _ = unsafe { self.driver.device_primary_ctx_release(self.device.raw) };
        }
    }
}

impl Context {
    /// Retains the primary context of a GPU, which `cust`, cudarc and the CUDA runtime use too.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], [`Error::Driver`].
    pub fn primary(device: Device) -> Result<Self, Error> {
        let driver = driver()?;
        let mut raw = RawContext::NULL;
        // SAFETY: `raw` is written.
        unsafe { driver.device_primary_ctx_retain(&raw mut raw, device.raw) }?;
        let mut held = Held {
            driver,
            device,
            raw,
            is_retained: true,
            id: None,
        };
        // SAFETY: the context is retained. If this fails, dropping `held` releases the context.
        held.id = unsafe { driver.id_of(raw) }?;
        Ok(Self(Arc::new(held)))
    }

    /// Wraps an engine's own `CUcontext`, for example cudarc's `CudaContext::cu_ctx()`. This library never destroys or releases
    /// it, and asks the driver for its GPU.
    ///
    /// ```no_run
    /// use std::ffi::c_void;
    ///
    /// use gated_delta::{Context, Error, Library};
    ///
    /// fn load(engine_context: *mut c_void) -> Result<Library, Error> {
    ///     // SAFETY: the engine drops the library before its context.
    ///     Ok(Library::new(&unsafe { Context::from_raw(engine_context) }?))
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::Range`] for a null handle, [`Error::NoDriver`], [`Error::NoDevice`]; [`Error::Driver`] if the driver knows that
    /// the handle is no context.
    ///
    /// # Safety
    /// The handle is a context of this process's driver. The context outlives everything that was made with it: this value and
    /// its clones, their libraries, plans and memory, and graphs that captured their launches.
    pub unsafe fn from_raw(context: *mut c_void) -> Result<Self, Error> {
        let raw = RawContext(context);
        if raw == RawContext::NULL {
            return Err(Error::Range {
                what: "CUcontext",
                wanted: "a live context".to_owned(),
                got: "null".to_owned(),
            });
        }
        let driver = driver()?;
        // SAFETY: the context is live, by the caller's promise.
        let _current = unsafe { Current::push(driver, raw) }?;
        let mut handle = 0;
        // SAFETY: a context is current, and `handle` is written.
        unsafe { driver.ctx_get_device(&raw mut handle) }?;
        let device = Device::of_handle(handle)?;
        // SAFETY: the context is live, by the caller's promise.
        let id = unsafe { driver.id_of(raw) }?;
        Ok(Self(Arc::new(Held {
            driver,
            device,
            raw,
            is_retained: false,
            id,
        })))
    }

    /// GPU of the context.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// The `CUcontext`.
    #[must_use]
    pub fn raw(&self) -> RawContext {
        self.0.raw
    }

    /// The driver that the context belongs to.
    #[inline]
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.0.driver
    }

    /// Makes the context current on the calling thread until the guard is dropped.
    ///
    /// If other code resets (`cuDevicePrimaryCtxReset`) or destroys a context, its modules, functions, streams and memory are
    /// gone, but the driver still follows their handles. Therefore this method asks the driver whether the context is still the
    /// one that this value was made with. A primary context that was created again has the same handle, but another id
    /// (`cuCtxGetId`, CUDA 12 and newer). Older drivers only tell whether a context exists, not whether it was created again. If
    /// the context is current already, this check is the only driver call.
    ///
    /// # Errors
    /// [`Error::Driver`]; `CUDA_ERROR_CONTEXT_IS_DESTROYED` for a context that was destroyed, or created again.
    #[inline]
    pub fn enter(&self) -> Result<Current<'_>, Error> {
        let Held { driver, id, .. } = *self.0;
        match id {
            Some(id) if driver.is_current(id) => Ok(Current::UNPUSHED),
            _ => self.push(),
        }
    }

    /// [`Context::enter`] of a context that is not current, or has no id.
    #[cold]
    fn push(&self) -> Result<Current<'_>, Error> {
        let Held {
            driver, raw, id, ..
        } = *self.0;
        let Some(id) = id else {
            // SAFETY: the context is retained, or live by the promise to `from_raw`, for as long as the guard borrows it.
            let current = unsafe { Current::push(driver, raw) }?;
            let mut version = 0;
            // SAFETY: `version` is written; the driver recognises the handle of a destroyed context.
            unsafe { driver.ctx_get_api_version(raw, &raw mut version) }?;
            return Ok(current);
        };
        // SAFETY: as above.
        let current = unsafe { Current::push_anew(driver, raw) }?;
        // SAFETY: a null handle stands for the calling thread's context.
        match unsafe { driver.id_of(RawContext::NULL) }? {
            Some(now) if now == id => Ok(current),
            _ => Err(driver
                .error("cuCtxGetId", code::CONTEXT_IS_DESTROYED)
                .into()),
        }
    }

    /// Waits for all work of the context.
    ///
    /// # Errors
    /// [`Error::Driver`]: of this call, or of an earlier kernel that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { self.0.driver.ctx_synchronize() }
    }
}

/// Guard of a context that is current on this thread. Dropping the guard makes the previous context current again.
#[must_use = "the context is current for as long as this lives"]
#[derive(Debug)]
pub struct Current<'a> {
    /// The driver, if dropping pops the context; `None` if the context was current already.
    pushed_by: Option<&'static Driver>,
    thread: PhantomData<(&'a (), *const ())>,
}

impl Current<'_> {
    /// Guard of a context that is current already.
    const UNPUSHED: Self = Self {
        pushed_by: None,
        thread: PhantomData,
    };

    /// Makes `context` current, unless it is current already.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The context is not destroyed while the guard lives.
    pub unsafe fn push(driver: &'static Driver, context: RawContext) -> Result<Self, Error> {
        let mut current = RawContext::NULL;
        // SAFETY: `current` is written.
        unsafe { driver.ctx_get_current(&raw mut current) }?;
        if current == context {
            return Ok(Self::UNPUSHED);
        }
        // SAFETY: the caller's promise.
        unsafe { Self::push_anew(driver, context) }
    }

    /// Pushes `context`, even if it is current already.
    ///
    /// # Safety
    /// As for [`Current::push`].
    unsafe fn push_anew(driver: &'static Driver, context: RawContext) -> Result<Self, Error> {
        // SAFETY: the context is live, by the caller's promise.
        unsafe { driver.ctx_push_current(context) }?;
        Ok(Self {
            pushed_by: Some(driver),
            ..Self::UNPUSHED
        })
    }
}

impl Drop for Current<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(driver) = self.pushed_by {
            pop(driver);
        }
    }
}

/// Pops the context that was pushed last.
#[cold]
fn pop(driver: &Driver) {
    let mut popped = RawContext::NULL;
    // SAFETY: the guard of the pushed context is dropped. A failure leaves nothing to do.
    let _ = unsafe { driver.ctx_pop_current(&raw mut popped) };
}

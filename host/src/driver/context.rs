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

    /// The GPU of that number, from 0.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`]; [`Error::Driver`] where there are fewer.
    pub fn get(ordinal: i32) -> Result<Self, Error> {
        let mut raw = 0;
        // SAFETY: `raw` is written.
        unsafe { driver()?.device_get(&raw mut raw, ordinal) }?;
        Ok(Self { ordinal, raw })
    }

    /// The GPU of a `CUdevice`.
    fn of_handle(raw: i32) -> Result<Self, Error> {
        for ordinal in 0..Self::count()? {
            let device = Self::get(ordinal)?;
            if device.raw == raw {
                return Ok(device);
            }
        }
        Err(Error::NoDevice)
    }

    /// Its number.
    #[must_use]
    pub const fn ordinal(self) -> i32 {
        self.ordinal
    }

    /// Its name, `NVIDIA H200`.
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

    /// A number about it: see [`attribute`].
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn attribute(self, attribute: i32) -> Result<i32, Error> {
        let mut value = 0;
        // SAFETY: `value` is written.
        unsafe { driver()?.device_get_attribute(&raw mut value, attribute, self.raw) }?;
        Ok(value)
    }

    /// Its compute capability, (9, 0) for sm_90.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn compute_capability(self) -> Result<(u32, u32), Error> {
        let major = self.attribute(attribute::COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(attribute::COMPUTE_CAPABILITY_MINOR)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Bytes of its memory.
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

/// A context of a GPU: its primary one, retained, or an engine's, borrowed.
#[derive(Clone, Debug)]
pub struct Context(Arc<Held>);

#[derive(Debug)]
struct Held {
    driver: &'static Driver,
    device: Device,
    raw: RawContext,
    /// Whether dropping releases a primary context.
    is_retained: bool,
    /// The context's id, which no other context of the process ever has; `None` in drivers older than CUDA 12.
    id: Option<u64>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_retained {
            // SAFETY: retained once, released once. A failure leaves nothing to be done.
            let _ = unsafe { self.driver.device_primary_ctx_release(self.device.raw) };
        }
    }
}

impl Context {
    /// Retains the primary context of a GPU: the same one that `cust`, cudarc and CUDA's runtime use.
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
        // SAFETY: the context is retained. On a failure `held` gives it back.
        held.id = unsafe { driver.id_of(raw) }?;
        Ok(Self(Arc::new(held)))
    }

    /// An engine's own `CUcontext`, for example cudarc's `CudaContext::cu_ctx()`; never destroyed or released from
    /// here. Its GPU is asked of the driver.
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
    /// [`Error::Range`] for a null handle, [`Error::NoDriver`], [`Error::NoDevice`]; [`Error::Driver`] for a context
    /// that the driver knows to be none.
    ///
    /// # Safety
    /// The handle is a context of this process's driver, which is not destroyed before everything that was made with
    /// it: this value and its clones, the libraries, plans and memory of it, and graphs that captured their launches.
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

    /// Its GPU.
    #[must_use]
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// The `CUcontext`.
    #[must_use]
    pub fn raw(&self) -> RawContext {
        self.0.raw
    }

    /// The driver that it is of.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.0.driver
    }

    /// Makes it the calling thread's context until the guard is dropped.
    ///
    /// A context that others have reset (`cuDevicePrimaryCtxReset`) or destroyed takes its modules, functions, streams and
    /// memory along, and the driver follows their handles all the same. So the driver is asked whether the context is still
    /// the one that this value was made with: a primary context that was made again has the same handle, but another id
    /// (`cuCtxGetId`, in drivers of CUDA 12 and newer; older ones tell a context that is gone from one that is there, and
    /// not one that was made again). Where the context is current already, that is the one call.
    ///
    /// # Errors
    /// [`Error::Driver`]; `CUDA_ERROR_CONTEXT_IS_DESTROYED` for a context that is gone, or was made again.
    pub fn enter(&self) -> Result<Current<'_>, Error> {
        let Held {
            driver, raw, id, ..
        } = *self.0;
        let Some(id) = id else {
            // SAFETY: the context is retained, or live by the promise to `from_raw`, for as long as the guard borrows it.
            let current = unsafe { Current::push(driver, raw) }?;
            let mut version = 0;
            // SAFETY: `version` is written; the driver knows the handle of a context that is no more.
            unsafe { driver.ctx_get_api_version(raw, &raw mut version) }?;
            return Ok(current);
        };
        if driver.current_id() == Some(id) {
            return Ok(Current::unpushed(driver));
        }
        // SAFETY: as above.
        let current = unsafe { Current::push_anew(driver, raw) }?;
        // SAFETY: no handle is the calling thread's context.
        match unsafe { driver.id_of(RawContext::NULL) }? {
            Some(now) if now == id => Ok(current),
            _ => Err(driver
                .error("cuCtxGetId", code::CONTEXT_IS_DESTROYED)
                .into()),
        }
    }

    /// Waits for all of its work.
    ///
    /// # Errors
    /// [`Error::Driver`]: of this call, or of a kernel that failed before.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: the context is current.
        unsafe { self.0.driver.ctx_synchronize() }
    }
}

/// A context that is current on this thread; the one before is current again when this is dropped.
#[must_use = "the context is current for as long as this lives"]
#[derive(Debug)]
pub struct Current<'a> {
    driver: &'static Driver,
    /// Whether dropping pops: not where the context was current already.
    pushed: bool,
    thread: PhantomData<(&'a (), *const ())>,
}

impl Current<'_> {
    /// Makes `context` current, where it is not.
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
            return Ok(Self::unpushed(driver));
        }
        // SAFETY: the caller's promise.
        unsafe { Self::push_anew(driver, context) }
    }

    /// Makes `context` current, whatever is.
    ///
    /// # Safety
    /// As [`Current::push`]'s.
    unsafe fn push_anew(driver: &'static Driver, context: RawContext) -> Result<Self, Error> {
        // SAFETY: the context is live, by the caller's promise.
        unsafe { driver.ctx_push_current(context) }?;
        Ok(Self {
            pushed: true,
            ..Self::unpushed(driver)
        })
    }

    /// The guard of a context that is current already.
    const fn unpushed(driver: &'static Driver) -> Self {
        Self {
            driver,
            pushed: false,
            thread: PhantomData,
        }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = RawContext::NULL;
            // SAFETY: what was pushed is popped. A failure leaves nothing to be done.
            let _ = unsafe { self.driver.ctx_pop_current(&raw mut popped) };
        }
    }
}

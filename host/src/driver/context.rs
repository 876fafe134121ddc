//! GPUs and their primary contexts.

use std::{ffi::CStr, marker::PhantomData, sync::Arc};

use super::{Driver, RawContext, attribute, driver};
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

/// The primary context of a GPU, retained: the same one that `cust`, cudarc and CUDA's runtime use.
#[derive(Clone, Debug)]
pub struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    driver: &'static Driver,
    device: Device,
    raw: RawContext,
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. A failure leaves nothing to be done.
        let _ = unsafe { self.driver.device_primary_ctx_release(self.device.raw) };
    }
}

impl Context {
    /// Retains the primary context of a GPU.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], [`Error::Driver`].
    pub fn primary(device: Device) -> Result<Self, Error> {
        let driver = driver()?;
        let mut raw = RawContext::NULL;
        // SAFETY: `raw` is written.
        unsafe { driver.device_primary_ctx_retain(&raw mut raw, device.raw) }?;
        Ok(Self(Arc::new(Retained {
            driver,
            device,
            raw,
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
    /// # Errors
    /// [`Error::Driver`].
    pub fn enter(&self) -> Result<Current<'_>, Error> {
        // SAFETY: the context is retained for as long as the guard borrows it.
        unsafe { Current::push(self.0.driver, self.0.raw) }
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
        let pushed = current != context;
        if pushed {
            // SAFETY: the context is live.
            unsafe { driver.ctx_push_current(context) }?;
        }
        Ok(Self {
            driver,
            pushed,
            thread: PhantomData,
        })
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

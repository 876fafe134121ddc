//! Properties of a GPU, for reports.

use gated_delta::Error;
use gated_delta::driver::{Device, attribute, driver};

/// Properties of a GPU and its driver.
#[derive(Clone, Debug)]
pub struct Properties {
    /// Name of the GPU.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: i32,
    /// Largest shared memory of a block in bytes.
    pub shared_bytes: i32,
    /// Bytes of L2.
    pub l2_bytes: i32,
    /// CUDA version of the driver, `MAJOR.MINOR`.
    pub driver: String,
}

impl Properties {
    /// The properties of `device`.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn of(device: Device) -> Result<Self, Error> {
        let mut version = 0;
        // SAFETY: `version` is written.
        unsafe { driver()?.driver_get_version(&raw mut version) }?;
        Ok(Self {
            name: device.name()?,
            compute_capability: device.compute_capability()?,
            multiprocessors: device.attribute(attribute::MULTIPROCESSOR_COUNT)?,
            shared_bytes: device.attribute(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: device.attribute(attribute::L2_CACHE_SIZE)?,
            driver: format!("{}.{}", version / 1000, version % 1000 / 10),
        })
    }
}

//! The GPU of the tests.

use std::sync::OnceLock;

use candle_core::{Device, Result};
use candle_gated_delta::gated_delta;

/// The first GPU, with a stream of its own for all threads. `None` without one, or without the feature `cuda`.
///
/// # Panics
/// If there is none and `GATED_DELTA_REQUIRE_GPU=1`.
pub fn gpu() -> Result<Option<Device>> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    if let Some(gpu) = GPU.get() {
        return Ok(gpu.clone());
    }
    let is_there = cfg!(feature = "cuda") && gated_delta::Device::get(0).is_ok();
    let is_required = std::env::var_os("GATED_DELTA_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(
        is_there || !is_required,
        "GATED_DELTA_REQUIRE_GPU=1, and there is no GPU, or no feature `cuda`"
    );
    let gpu = match is_there {
        true => Some(Device::new_cuda_with_stream(0)?),
        false => None,
    };
    Ok(GPU.get_or_init(|| gpu).clone())
}

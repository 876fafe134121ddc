//! PTX only: a decode without this crate's launcher. `Work::recipe` checks the arguments and returns the text to compile and the
//! launch parameters. The driver calls are those that an engine with its own launcher makes.

mod common;

use std::ffi::{CString, c_void};
use std::ptr;

use anyhow::{Context as _, Result};
use common::engine::Engine;
use common::layer::Layer;
use common::{Inputs, Rows, Shape};
use gated_delta::Work;
use gated_delta::driver::{Driver, RawFunction, RawModule, attribute};
use gated_delta::raw::{Kernel, LaunchShape};

/// Shape of Qwen3-Next's layers.
const SHAPE: Shape = Shape {
    batch: 4,
    tokens: 1,
    heads: 16,
    value_heads: 32,
    dim: 128,
    slots: 8,
};

/// Slot of each row; the first row is padding.
const SLOTS: [i32; 4] = [-1, 6, 1, 2];

/// Dynamic shared memory that any function may use, in bytes. More needs an attribute.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

fn main() -> Result<()> {
    let Some(device) = common::gpu_or_skip()? else {
        return Ok(());
    };
    let engine = Engine::on(device)?;
    let stream = engine
        .gpu_stream()
        .context("an engine on a GPU has a stream")?;
    let driver = stream.context().driver();
    let _current = stream.context().enter()?;

    let (inputs, rows) = (Inputs::random(SHAPE, 5), Rows::decoded(&SLOTS));
    let mut layer = Layer::new(&engine, &inputs, &rows)?;
    let recipe = layer.step()?.recipe()?;
    println!(
        "{} on {:?}, {} bytes of parameters",
        recipe.kernel.symbol(),
        recipe.shape,
        recipe.parameter().len()
    );

    let function = compile(driver, &recipe.kernel, recipe.shape)?;
    let mut params = recipe.params;
    let mut parameters = [(&raw mut params).cast::<c_void>()];
    let LaunchShape {
        grid: [x, y, z],
        block,
        shared_bytes,
        ..
    } = recipe.shape;
    // SAFETY: the function is the recipe's and its context is current; the driver copies the parameter before it
    // returns, and the layer outlives the wait below.
    unsafe {
        let (parameters, extra) = (parameters.as_mut_ptr(), ptr::null_mut());
        driver.launch_kernel(
            function,
            x,
            y,
            z,
            block,
            1,
            1,
            shared_bytes,
            stream.raw(),
            parameters,
            extra,
        )
    }?;
    stream.synchronize()?;
    inputs.check(
        &inputs.states,
        &rows,
        &layer.o.read()?,
        &layer.states.read()?,
    )
}

/// Compiles and loads `kernel` in the current context. An engine does this once per kernel. Nothing is unloaded.
fn compile(driver: &Driver, kernel: &Kernel, shape: LaunchShape) -> Result<RawFunction> {
    let (text, symbol) = (CString::new(kernel.ptx()?)?, CString::new(kernel.symbol())?);
    let (mut module, mut function) = (RawModule::NULL, RawFunction::NULL);
    // SAFETY: both texts are terminated, and the handles are written.
    unsafe {
        driver.module_load_data_ex(
            &raw mut module,
            text.as_ptr().cast(),
            0,
            ptr::null_mut(),
            ptr::null_mut(),
        )?;
        driver.module_get_function(&raw mut function, module, symbol.as_ptr())?;
    }
    if shape.shared_bytes > DEFAULT_SHARED_BYTES {
        let (which, bytes) = (
            attribute::FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            i32::try_from(shape.shared_bytes)?,
        );
        // SAFETY: the function was loaded above.
        unsafe { driver.func_set_attribute(function, which, bytes) }?;
    }
    Ok(function)
}

//! Errors. Every message names the wanted value and the given one.

use crate::tensor::{DType, Dims};

/// Any failure of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong dims.
    #[error("{tensor}: wanted shape {wanted}, got {got}")]
    Shape {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The wanted dims, by name and number: `[B, HV, V] = [4, 32, 128]`.
        wanted: String,
        /// The dims of the given tensor.
        got: Dims,
    },

    /// A tensor has a dtype that the operator does not take.
    #[error("{tensor}: wanted {wanted}, got {got}")]
    DType {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The accepted dtypes: `bf16, f16 or f32`.
        wanted: &'static str,
        /// The dtype of the given tensor.
        got: DType,
    },

    /// The kernels cannot address a tensor with these strides.
    #[error("{tensor}: wanted {wanted}, got strides {got} (in elements)")]
    Stride {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The rule that the strides break: `a contiguous innermost dim`.
        wanted: &'static str,
        /// The strides of the given tensor, in elements.
        got: Dims,
    },

    /// A tensor's address or strides are not aligned enough.
    #[error("{tensor}: wanted an alignment of {wanted} bytes, got {got}")]
    Alignment {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The wanted alignment, in bytes.
        wanted: usize,
        /// The alignment of the given tensor, in bytes.
        got: usize,
    },

    /// A number is out of range: a batch size, an offset, a scale, a view that exceeds its storage.
    #[error("{what}: wanted {wanted}, got {got}")]
    Range {
        /// Name of the number.
        what: &'static str,
        /// The accepted range: `1..=65535`.
        wanted: String,
        /// The given number.
        got: String,
    },

    /// A tensor that the chosen options need is missing.
    #[error("{tensor} is missing: {needed_by} need it")]
    MissingTensor {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The options that need the tensor, in the plural: `raw gates`.
        needed_by: &'static str,
    },

    /// Two options, or an option and a tensor, exclude each other.
    #[error("{one} and {other} exclude each other: {why}")]
    Contradiction {
        /// The first of the two.
        one: &'static str,
        /// The second.
        other: &'static str,
        /// The reason why they exclude each other.
        why: &'static str,
    },

    /// No kernel is compiled for a value.
    #[error("{what} = {got} is not supported: {allowed}")]
    Unsupported {
        /// Name of the value: `K`, `state dtype`, `HV / H`.
        what: &'static str,
        /// The given value.
        got: String,
        /// The supported values: `64, 96 or 128`.
        allowed: &'static str,
    },

    /// A tensor that the operator writes was built from a shared borrow.
    #[error("{tensor} is written, but was built from a shared borrow: build it from a mutable one")]
    ReadOnly {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
    },

    /// A tensor is in host memory but the launch runs on a GPU, or the other way round.
    #[error("{tensor}: wanted {wanted} memory, got {got} memory")]
    Memory {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// Kind of memory that the launch uses: `host` or `device`.
        wanted: &'static str,
        /// Kind of memory that the tensor is in.
        got: &'static str,
    },

    /// The driver's library cannot be loaded.
    #[error("no CUDA driver: {reason}")]
    NoDriver {
        /// The message of the dynamic loader.
        reason: String,
    },

    /// The driver is installed, but finds no GPU.
    #[error("no CUDA device: the driver is installed, but finds no GPU")]
    NoDevice,

    /// The driver's library is too old to have a function.
    #[error("the CUDA driver has no {symbol}: it is too old, or the library is not NVIDIA's")]
    MissingSymbol {
        /// Name of the function.
        symbol: &'static str,
    },

    /// The PTX ISA version is too new for the driver.
    #[error(
        "PTX ISA {isa} needs {needed} or newer, the driver is for CUDA {present}: update the driver"
    )]
    PtxTooNew {
        /// The `.version` of the PTX: `7.4`.
        isa: String,
        /// The first CUDA release and driver that accept it: `CUDA 11.4 (driver 470)`.
        needed: String,
        /// The newest CUDA version that the installed driver supports: `11.2`.
        present: String,
    },

    /// The PTX targets a newer or another architecture than the device's.
    #[error(
        "no kernel image for this GPU: the PTX targets {target}, the device is sm_{major}{minor}"
    )]
    NoImageForArch {
        /// The `.target` of the PTX.
        target: String,
        /// Compute capability of the device, major.
        major: u32,
        /// Compute capability of the device, minor.
        minor: u32,
    },

    /// The driver's compiler refused the PTX.
    #[error("the driver could not compile the PTX of {entry}: {error}: {log}")]
    Compile {
        /// The entry's name.
        entry: String,
        /// The driver's error.
        error: DriverError,
        /// The message of ptxas, on one line.
        log: String,
    },

    /// A load-time constant is left in the PTX text, or is not a symbol of the entry.
    #[error("load-time constants of the PTX: {0}")]
    Specialise(String),

    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),

    /// A kernel computes another result than the reference: see [`Library::self_test`](crate::Library::self_test).
    #[error("self-test of {entry}, {case}: {reason}")]
    SelfTest {
        /// The entry's name.
        entry: &'static str,
        /// The launch that failed: `a resume`.
        case: &'static str,
        /// The wrong result, and its deviation.
        reason: String,
    },

    /// An index tensor has an invalid number: see [`Library::validate`](crate::Library::validate).
    #[error("{tensor}[{position}]: wanted {wanted}, got {got}")]
    Index {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// Position of the number in the tensor.
        position: usize,
        /// The accepted numbers.
        wanted: String,
        /// The number in the tensor.
        got: i64,
    },

    /// Two accesses of a launch to one state or window have no defined order: see
    /// [`Library::validate`](crate::Library::validate).
    #[error("{one}, and {other}: nothing orders them")]
    Hazard {
        /// The first use: `row 0 writes slot 2 of state`.
        one: String,
        /// The second use.
        other: String,
    },

    /// The simulator stopped a kernel: an invalid access, a race, a divergent barrier.
    #[error("simulated kernel {entry}: {fault}")]
    Fault {
        /// The entry's name.
        entry: &'static str,
        /// The fault that the simulator found.
        fault: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct DriverError {
    /// The driver's `CUresult`.
    pub code: i32,
    /// Name of the code: `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub name: String,
    /// The driver function that returned the code.
    pub call: &'static str,
}

/// Refuses `one` together with any of `others`.
///
/// # Errors
/// [`Error::Contradiction`] with `one` and the first given one of `others`.
#[doc(hidden)]
#[inline]
pub fn excludes(
    one: (bool, &'static str),
    others: &[(bool, &'static str)],
    why: &'static str,
) -> Result<(), Error> {
    match others.iter().find(|&&(given, _)| one.0 && given) {
        Some(&(_, other)) => Err(Error::Contradiction {
            one: one.1,
            other,
            why,
        }),
        None => Ok(()),
    }
}

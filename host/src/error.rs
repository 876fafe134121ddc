//! What can go wrong: every message names what was wanted and what came.

use crate::tensor::{DType, Dims};

/// Any failure of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's dims are not those of the operator.
    #[error("{tensor}: wanted shape {wanted}, got {got}")]
    Shape {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The dims wanted, by name and number: `[B, HV, V] = [4, 32, 128]`.
        wanted: String,
        /// The dims that came.
        got: Dims,
    },

    /// A tensor's dtype is not one that the operator takes.
    #[error("{tensor}: wanted {wanted}, got {got}")]
    DType {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The dtypes taken: `bf16, f16 or f32`.
        wanted: &'static str,
        /// The dtype that came.
        got: DType,
    },

    /// A tensor's strides are not ones that the kernels can address.
    #[error("{tensor}: wanted {wanted}, got strides {got} (in elements)")]
    Stride {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The rule that is broken: `a contiguous innermost dim`.
        wanted: &'static str,
        /// The strides that came, in elements.
        got: Dims,
    },

    /// A tensor's address or strides are not aligned enough.
    #[error("{tensor}: wanted an alignment of {wanted} bytes, got {got}")]
    Alignment {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// Bytes wanted.
        wanted: usize,
        /// Bytes that address and strides are multiples of.
        got: usize,
    },

    /// A number is out of its range: a batch size, an offset, a scale, a view past its storage.
    #[error("{what}: wanted {wanted}, got {got}")]
    Range {
        /// What the number is.
        what: &'static str,
        /// The range: `1..=65535`.
        wanted: String,
        /// The number that came.
        got: String,
    },

    /// A tensor that the chosen options need was not given.
    #[error("{tensor} is missing: {needed_by} need it")]
    MissingTensor {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// What needs it, plural: `raw gates`.
        needed_by: &'static str,
    },

    /// Two options, or an option and a tensor, exclude each other.
    #[error("{one} and {other} exclude each other: {why}")]
    Contradiction {
        /// The one.
        one: &'static str,
        /// The other.
        other: &'static str,
        /// Why they cannot go together.
        why: &'static str,
    },

    /// No kernel is compiled for this value.
    #[error("{what} = {got} is not supported: {allowed}")]
    Unsupported {
        /// What the value is of: `K`, `state dtype`, `HV / H`.
        what: &'static str,
        /// The value that came.
        got: String,
        /// The values that are supported: `64, 96 or 128`.
        allowed: &'static str,
    },

    /// A tensor that the operator writes was built from shared memory.
    #[error("{tensor} is written, but was built from a shared borrow: build it from a mutable one")]
    ReadOnly {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
    },

    /// A tensor lies in host memory where the GPU must reach it, or the other way round.
    #[error("{tensor}: wanted {wanted} memory, got {got} memory")]
    Memory {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// Where the launch reads and writes: `host` or `device`.
        wanted: &'static str,
        /// Where the tensor lies.
        got: &'static str,
    },

    /// The driver's library is not there.
    #[error("no CUDA driver: {reason}")]
    NoDriver {
        /// What the dynamic loader says.
        reason: String,
    },

    /// The driver is there, a GPU is not.
    #[error("no CUDA device: the driver is installed, but finds no GPU")]
    NoDevice,

    /// The driver's library is too old to have a function.
    #[error("the CUDA driver has no {symbol}: it is too old, or the library is not NVIDIA's")]
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },

    /// The driver cannot compile PTX as new as ours.
    #[error(
        "PTX ISA {isa} needs {needed} or newer, the driver is for CUDA {present}: update the driver"
    )]
    PtxTooNew {
        /// The `.version` of the PTX, `7.4`.
        isa: String,
        /// The first release that takes it, `CUDA 11.4 (driver 470)`.
        needed: String,
        /// The newest CUDA that the installed driver supports, `11.2`.
        present: String,
    },

    /// The PTX is for a newer or another architecture than the device's.
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
        /// What ptxas says, on one line.
        log: String,
    },

    /// A load-time constant is left in the PTX text, or is not a symbol of its operator.
    #[error("load-time constants of the PTX: {0}")]
    Specialise(String),

    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),

    /// A kernel computes something else than the reference: see [`Library::self_test`](crate::Library::self_test).
    #[error("self-test of {entry}, {case}: {reason}")]
    SelfTest {
        /// The entry's name.
        entry: &'static str,
        /// What was launched: `a resume`.
        case: &'static str,
        /// What is wrong, and by how much.
        reason: String,
    },

    /// A number in an index tensor that no launch has a use for: see [`Library::validate`](crate::Library::validate).
    #[error("{tensor}[{position}]: wanted {wanted}, got {got}")]
    Index {
        /// The tensor's name in the operator's arguments.
        tensor: &'static str,
        /// The number's place in it.
        position: usize,
        /// The numbers that may be there.
        wanted: String,
        /// The number that is there.
        got: i64,
    },

    /// Two uses of a state that a launch does not order: see [`Library::validate`](crate::Library::validate).
    #[error("{one}, and {other}: nothing orders them")]
    Hazard {
        /// The one: `row 0 writes slot 2 of state`.
        one: String,
        /// The other.
        other: String,
    },

    /// The simulator stopped a kernel: a bad access, a race, a divergent barrier.
    #[error("simulated kernel {entry}: {fault}")]
    Fault {
        /// The entry's name.
        entry: &'static str,
        /// What the simulator found.
        fault: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct DriverError {
    /// The driver's `CUresult`.
    pub code: i32,
    /// Its name, `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub name: String,
    /// The function that returned it.
    pub call: &'static str,
}

/// Two of the arguments exclude each other where both are given.
///
/// # Errors
/// [`Error::Contradiction`] of the one and the first of the others.
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

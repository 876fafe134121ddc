//! PTX text, compiled by the driver.

use std::{
    ffi::{CStr, CString, c_void},
    ptr,
};

use super::{Context, RawFunction, RawKernel, RawLibrary, RawModule, attribute, code};
use crate::error::{DriverError, Error};

/// Size of the buffer for ptxas messages, in bytes.
const LOG_BYTES: usize = 8192;

/// A loaded module. Dropping the value unloads the module, which must not happen while a captured graph has its kernels.
#[derive(Debug)]
pub struct Module {
    context: Context,
    image: Image,
}

/// The driver's handle of the compiled text.
#[derive(Debug)]
enum Image {
    /// A library: compiled under a lock of its own, so that several threads compile at the same time.
    Library(RawLibrary),
    /// A module: compiled under the context's lock.
    Module(RawModule),
}

impl Module {
    /// Compiles PTX text for the context's GPU. `entry` is the name of its kernel, also for errors.
    ///
    /// Several threads compile at the same time if the driver has libraries (`cuLibraryLoadData`, CUDA 12.0 and newer), otherwise
    /// one after the other. If the driver refuses the text as a library, the text is loaded as a module, because that call
    /// reports the reason of a refusal.
    ///
    /// Only text is accepted. The driver would also load a binary, and would trust any offset in it. A text is either compiled or
    /// refused, and compiled code runs only by an unsafe launch.
    ///
    /// # Errors
    /// [`Error::Range`] for a text that does not begin with `.version` after comments; [`Error::PtxTooNew`],
    /// [`Error::NoImageForArch`], [`Error::Compile`] with the message of ptxas, [`Error::Driver`].
    pub fn load(context: &Context, entry: &str, ptx: &CStr) -> Result<Self, Error> {
        check_text(ptx)?;
        let _current = context.enter()?;
        Self::load_library(context, entry, ptx)
            .or_else(|_refused| Self::load_module(context, entry, ptx))
    }

    /// Loads the text as a library, and the code of the kernel `entry` into the current context. Which of the calls loads the
    /// code, and so which call refuses a text, depends on the driver and its settings. No log is requested, because the driver
    /// might write to the log after the first call.
    fn load_library(context: &Context, entry: &str, ptx: &CStr) -> Result<Self, Error> {
        let mut library = RawLibrary::NULL;
        let none = ptr::null_mut();
        // SAFETY: the text is terminated, and copied by the driver; there are no options.
        unsafe {
            context.driver().library_load_data(
                &raw mut library,
                ptx.as_ptr().cast(),
                none,
                none.cast(),
                0,
                none,
                none.cast(),
                0,
            )
        }?;
        let module = Self {
            context: context.clone(),
            image: Image::Library(library),
        };
        let name = CString::new(entry).unwrap_or_default();
        let function = module.function(&name)?;
        function.attribute(attribute::FUNCTION_NUM_REGS)?;
        Ok(module)
    }

    /// Loads the text as a module of `context`, which is current.
    fn load_module(context: &Context, entry: &str, ptx: &CStr) -> Result<Self, Error> {
        const ERROR_LOG_BUFFER: i32 = 5;
        const ERROR_LOG_BUFFER_SIZE_BYTES: i32 = 6;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [
            log.as_mut_ptr().cast::<c_void>(),
            ptr::without_provenance_mut(LOG_BYTES),
        ];
        let mut raw = RawModule::NULL;
        // SAFETY: the text is terminated, each option has its value, and the log outlives the call.
        let loaded = unsafe {
            context.driver().module_load_data_ex(
                &raw mut raw,
                ptx.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        match loaded {
            Ok(()) => Ok(Self {
                context: context.clone(),
                image: Image::Module(raw),
            }),
            Err(Error::Driver(error)) => Err(explain(context, entry, ptx, &log, error)),
            Err(error) => Err(error),
        }
    }

    /// Kernel `name` of the module, with its code loaded.
    ///
    /// # Errors
    /// [`Error::Driver`] if there is no kernel with this name.
    pub fn function(&self, name: &CStr) -> Result<Function<'_>, Error> {
        let _current = self.context.enter()?;
        let driver = self.context.driver();
        let mut raw = RawFunction::NULL;
        match self.image {
            Image::Library(library) => {
                let mut kernel = RawKernel::NULL;
                // SAFETY: the library is live, the name terminated, and `kernel` is written; then the kernel is live, a context
                // is current, and `raw` is written.
                unsafe {
                    driver.library_get_kernel(&raw mut kernel, library, name.as_ptr())?;
                    driver.kernel_get_function(&raw mut raw, kernel)
                }
            }
            // SAFETY: the module is live, the name terminated, and `raw` is written.
            Image::Module(module) => unsafe {
                driver.module_get_function(&raw mut raw, module, name.as_ptr())
            },
        }?;
        Ok(Function { module: self, raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let current = self.context.enter();
        match self.image {
            // A library belongs to no context, and survives the destruction of one.
            // SAFETY: loaded once, unloaded once. A failure leaves nothing to do.
            Image::Library(library) => drop(unsafe { driver.library_unload(library) }),
            Image::Module(module) if current.is_ok() => {
                // SAFETY: as above.
                let _ = unsafe { driver.module_unload(module) };
            }
            Image::Module(_) => {}
        }
    }
}

/// A kernel of a loaded module. The kernel borrows the module, so that the module cannot be unloaded meanwhile.
///
/// ```no_run
/// # use gated_delta::driver::{Context, Device, Module, attribute};
/// # let context = Context::primary(Device::get(0)?)?;
/// # let ptx = c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry empty() { ret; }\n";
/// let module = Module::load(&context, "empty", ptx)?;
/// let function = module.function(c"empty")?;
/// println!("{} registers", function.attribute(attribute::FUNCTION_NUM_REGS)?);
/// drop(module);
/// # Ok::<(), gated_delta::Error>(())
/// ```
///
/// ```compile_fail,E0505
/// # use gated_delta::driver::{Context, Device, Module, attribute};
/// # let context = Context::primary(Device::get(0)?)?;
/// # let ptx = c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry empty() { ret; }\n";
/// let module = Module::load(&context, "empty", ptx)?;
/// let function = module.function(c"empty")?;
/// drop(module);
/// println!("{} registers", function.attribute(attribute::FUNCTION_NUM_REGS)?);
/// # Ok::<(), gated_delta::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Function<'module> {
    module: &'module Module,
    raw: RawFunction,
}

impl Function<'_> {
    /// The `CUfunction`, valid while its module is loaded.
    #[must_use]
    pub const fn raw(self) -> RawFunction {
        self.raw
    }

    /// Value of a function attribute: see [`super::attribute`].
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn attribute(self, attribute: i32) -> Result<i32, Error> {
        let context = &self.module.context;
        let _current = context.enter()?;
        let mut value = 0;
        // SAFETY: `value` is written; the function belongs to the borrowed module, in the current context.
        unsafe {
            context
                .driver()
                .func_get_attribute(&raw mut value, attribute, self.raw)
        }?;
        Ok(value)
    }

    /// Allows launches of the function up to `bytes` bytes of dynamic shared memory per block.
    ///
    /// # Errors
    /// [`Error::Driver`] if the GPU has less.
    pub fn set_shared_bytes(self, bytes: u32) -> Result<(), Error> {
        let context = &self.module.context;
        let _current = context.enter()?;
        let which = attribute::FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to the borrowed module, in the current context.
        unsafe {
            context
                .driver()
                .func_set_attribute(self.raw, which, bytes as i32)
        }
    }
}

/// Accepts PTX text, and refuses binaries, which do not begin with `.version`.
fn check_text(ptx: &CStr) -> Result<(), Error> {
    const SHOWN: usize = 16;
    if without_comments(ptx.to_bytes()).starts_with(b".version") {
        return Ok(());
    }
    let start = &ptx.to_bytes()[..ptx.count_bytes().min(SHOWN)];
    Err(Error::Range {
        what: "PTX text",
        wanted: ".version first".to_owned(),
        got: format!("\"{}\"", start.escape_ascii()),
    })
}

/// The text after its leading white space and comments.
fn without_comments(text: &[u8]) -> &[u8] {
    let behind = |text: &'_ [u8], end: &[u8]| {
        let found = text.windows(end.len()).position(|window| window == end);
        found.map_or(text.len(), |at| at + end.len())
    };
    let mut rest = text.trim_ascii_start();
    loop {
        let comment = match rest {
            [b'/', b'/', ..] => behind(rest, b"\n"),
            [b'/', b'*', inside @ ..] => 2 + behind(inside, b"*/"),
            _ => return rest,
        };
        rest = rest[comment..].trim_ascii_start();
    }
}

/// The error for a text that the driver refused, with a hint on what to do.
fn explain(context: &Context, entry: &str, ptx: &CStr, log: &[u8], error: DriverError) -> Error {
    let text = ptx.to_string_lossy();
    match error.code {
        code::UNSUPPORTED_PTX_VERSION => too_new(context, directive(&text, ".version")),
        code::NO_BINARY_FOR_GPU => match context.device().compute_capability() {
            Ok((major, minor)) => {
                let target = directive(&text, ".target").to_owned();
                Error::NoImageForArch {
                    target,
                    major,
                    minor,
                }
            }
            Err(error) => error,
        },
        _ => {
            let log = CStr::from_bytes_until_nul(log)
                .unwrap_or_default()
                .to_string_lossy();
            if log.trim().is_empty() {
                return error.into();
            }
            let log = log.lines().map(str::trim).filter(|line| !line.is_empty());
            Error::Compile {
                entry: entry.to_owned(),
                error,
                log: log.collect::<Vec<_>>().join("; "),
            }
        }
    }
}

fn too_new(context: &Context, isa: &str) -> Error {
    let mut version = 0;
    // SAFETY: `version` is written.
    if let Err(error) = unsafe { context.driver().driver_get_version(&raw mut version) } {
        return error;
    }
    let present = format!("{}.{}", version / 1000, version % 1000 / 10);
    Error::PtxTooNew {
        isa: isa.to_owned(),
        needed: release(isa),
        present,
    }
}

/// The word after a directive; empty if the text does not have the directive.
fn directive<'a>(ptx: &'a str, name: &str) -> &'a str {
    let line = ptx
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(name));
    line.and_then(|rest| rest.split([' ', '\t', ',']).find(|word| !word.is_empty()))
        .unwrap_or("")
}

/// The first CUDA release that accepts the PTX ISA version `isa`, and its driver.
fn release(isa: &str) -> String {
    const RELEASES: [(&str, &str, u32); 19] = [
        ("7.0", "11.0", 450),
        ("7.1", "11.1", 455),
        ("7.2", "11.2", 460),
        ("7.3", "11.3", 465),
        ("7.4", "11.4", 470),
        ("7.5", "11.5", 495),
        ("7.6", "11.6", 510),
        ("7.7", "11.7", 515),
        ("7.8", "11.8", 520),
        ("8.0", "12.0", 525),
        ("8.1", "12.1", 530),
        ("8.2", "12.2", 535),
        ("8.3", "12.3", 545),
        ("8.4", "12.4", 550),
        ("8.5", "12.5", 555),
        ("8.6", "12.7", 565),
        ("8.7", "12.8", 570),
        ("8.8", "12.9", 575),
        ("9.0", "13.0", 580),
    ];
    match RELEASES.iter().find(|(known, ..)| *known == isa) {
        Some((_, cuda, driver)) => format!("CUDA {cuda} (driver {driver})"),
        None => "the CUDA release of that ISA".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{check_text, directive, release};

    #[test]
    fn a_text_is_told_from_a_binary() {
        for text in [
            c".version 7.4",
            c"\n//\n// Generated by NVVM\n//\n\n.version 8.0",
            c"/* of\n * many // lines */ // and one\n\t.version 7.4",
            c"/*/ not closed yet */.version 7.4",
        ] {
            assert!(check_text(text).is_ok(), "{text:?}");
        }
        for (binary, start) in [
            (
                c"\x7fELF\x02\x01\x01 .version 7.4",
                "\\x7fELF\\x02\\x01\\x01 .version",
            ),
            (c"\x50\xed\x55\xba\x01", "P\\xedU\\xba\\x01"),
            (c"!<arch>\n.version", "!<arch>\\n.version"),
            (c"", ""),
            (c"// .version 7.4", "// .version 7.4"),
            (c"/* .version 7.4", "/* .version 7.4"),
            (c"/", "/"),
        ] {
            let refused = check_text(binary).unwrap_err().to_string();
            assert_eq!(
                refused,
                format!("PTX text: wanted .version first, got \"{start}\"")
            );
        }
    }

    #[test]
    fn directives_are_read() {
        let ptx = "// GDN\n.version 7.4\n.target sm_80, debug\n.address_size 64\n";
        assert_eq!(
            (directive(ptx, ".version"), directive(ptx, ".target")),
            ("7.4", "sm_80")
        );
        assert_eq!(directive(ptx, ".pragma"), "");
        assert_eq!(release("7.4"), "CUDA 11.4 (driver 470)");
    }
}

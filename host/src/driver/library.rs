//! The driver's shared library, opened once and never closed.

use std::{ffi::c_void, sync::OnceLock};

use libloading::{AsSymbolName, Library};

#[cfg(not(windows))]
const NAME: &str = "libcuda.so.1";
#[cfg(windows)]
const NAME: &str = "nvcuda.dll";

/// The driver's library, or the dynamic loader's error message.
fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    // SAFETY: the driver's library may be loaded at any time; it has no unsound initialisers.
    let library = LIBRARY.get_or_init(|| unsafe { Library::new(NAME) }.map_err(describe));
    library.as_ref().map_err(String::as_str)
}

/// The dynamic loader's message, which libloading keeps in the error's source.
fn describe(error: libloading::Error) -> String {
    match std::error::Error::source(&error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// Opens the driver's library.
pub(super) fn open() -> Result<(), &'static str> {
    library().map(|_| ())
}

/// Address of a driver function; `None` if the library is missing, or too old to have the function.
pub(super) fn symbol(name: impl AsSymbolName) -> Option<*mut c_void> {
    // SAFETY: a symbol of any type may be looked at as an address.
    let symbol = unsafe { library().ok()?.get::<*mut c_void>(name) };
    symbol
        .ok()
        .map(|symbol| *symbol)
        .filter(|address| !address.is_null())
}

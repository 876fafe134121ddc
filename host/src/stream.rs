//! The engine's stream, borrowed for a launch.

use std::{ffi::c_void, marker::PhantomData};

use crate::driver::RawStream;

/// A borrowed CUDA stream. This library never destroys or synchronises it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRef<'a> {
    raw: RawStream,
    borrow: PhantomData<&'a ()>,
}

impl<'a> StreamRef<'a> {
    /// Wraps a `CUstream`, for example cudarc's `CudaStream::cu_stream()`. The driver's constants 0 (default stream), 1 (legacy
    /// default stream) and 2 (default stream of the calling thread) are accepted too.
    ///
    /// ```
    /// use gated_delta::StreamRef;
    ///
    /// // SAFETY: the driver's constants are always there.
    /// let of_this_thread = unsafe { StreamRef::from_raw(std::ptr::without_provenance_mut(2)) };
    /// assert_ne!(of_this_thread, StreamRef::default_stream());
    /// ```
    ///
    /// # Safety
    /// During `'a` the handle is 0, 1, 2, or a stream that is not destroyed.
    #[must_use]
    pub const unsafe fn from_raw(stream: *mut c_void) -> Self {
        Self {
            raw: RawStream(stream),
            borrow: PhantomData,
        }
    }

    /// The default stream of the current context.
    #[must_use]
    pub const fn default_stream() -> Self {
        Self {
            raw: RawStream::NULL,
            borrow: PhantomData,
        }
    }

    /// The `CUstream`.
    #[must_use]
    pub const fn raw(self) -> RawStream {
        self.raw
    }
}

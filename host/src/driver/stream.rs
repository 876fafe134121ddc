//! Streams and events.

use super::{Context, RawEvent, RawStream};
use crate::{error::Error, stream::StreamRef};

/// An owned stream. It does not wait for the default stream.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: RawStream,
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(context: &Context) -> Result<Self, Error> {
        const NON_BLOCKING: u32 = 1;
        let _current = context.enter()?;
        let mut raw = RawStream::NULL;
        // SAFETY: `raw` is written.
        unsafe { context.driver().stream_create(&raw mut raw, NON_BLOCKING) }?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// The stream, borrowed for a launch.
    #[must_use]
    pub const fn as_ref(&self) -> StreamRef<'_> {
        // SAFETY: the borrow keeps the stream from being dropped.
        unsafe { StreamRef::from_raw(self.raw.0) }
    }

    /// The `CUstream`.
    #[must_use]
    pub const fn raw(&self) -> RawStream {
        self.raw
    }

    /// Context of the stream.
    #[must_use]
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// Waits for all work on the stream.
    ///
    /// # Errors
    /// [`Error::Driver`]: of this call, or of an earlier kernel that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: the stream is live.
        unsafe { self.context.driver().stream_synchronize(self.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created once, destroyed once. A failure leaves nothing to do.
            let _ = unsafe { self.context.driver().stream_destroy(self.raw) };
        }
    }
}

/// An owned event that can be used for timing.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: RawEvent,
}

impl Event {
    /// Creates an event.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(context: &Context) -> Result<Self, Error> {
        let _current = context.enter()?;
        let mut raw = RawEvent::NULL;
        // SAFETY: `raw` is written.
        unsafe { context.driver().event_create(&raw mut raw, 0) }?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// Records the event after all work already enqueued on `stream`.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: both are live.
        unsafe { self.context.driver().event_record(self.raw, stream.raw) }
    }

    /// Waits until the event has happened.
    ///
    /// # Errors
    /// [`Error::Driver`]: of this call, or of an earlier kernel that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: the event is live.
        unsafe { self.context.driver().event_synchronize(self.raw) }
    }

    /// Time from `start` to this event in milliseconds, with a resolution of half a microsecond. Both events must have happened.
    ///
    /// # Errors
    /// [`Error::Driver`] if one has not happened.
    pub fn milliseconds_since(&self, start: &Self) -> Result<f32, Error> {
        let _current = self.context.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are live, and the result is written.
        unsafe {
            self.context
                .driver()
                .event_elapsed_time(&raw mut milliseconds, start.raw, self.raw)
        }?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created once, destroyed once. A failure leaves nothing to do.
            let _ = unsafe { self.context.driver().event_destroy(self.raw) };
        }
    }
}

//! CUDA graphs: launches that are captured once and replayed.

use std::mem::ManuallyDrop;

use super::{Context, Driver, RawGraph, RawGraphExec, Stream};
use crate::error::Error;

/// An instantiated graph. The driver does not lock it, so only one thread at a time may launch it: a launch takes `&mut self`.
/// Launches of the same graph run one after the other, on any streams.
///
/// ```no_run
/// # use gated_delta::{Error, driver::{Graph, Stream}};
/// unsafe fn replay(graph: &mut Graph, stream: &Stream) -> Result<(), Error> {
///     // SAFETY: the caller's promise.
///     unsafe { graph.launch(stream) }
/// }
/// ```
///
/// ```compile_fail,E0596
/// # use gated_delta::{Error, driver::{Graph, Stream}};
/// unsafe fn replay(graph: &Graph, stream: &Stream) -> Result<(), Error> {
///     // SAFETY: the caller's promise.
///     unsafe { graph.launch(stream) }
/// }
/// ```
#[derive(Debug)]
pub struct Graph {
    context: Context,
    exec: RawGraphExec,
}

impl Graph {
    /// Captures the launches that `enqueue` enqueues on `stream`, instead of running them. The capture always ends, even if
    /// `enqueue` returns an error or panics.
    ///
    /// # Errors
    /// The errors of `enqueue`; [`Error::Driver`] if something cannot be captured.
    ///
    /// # Safety
    /// All memory that the captured work reads and writes is valid whenever the graph runs.
    pub unsafe fn capture(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Self, Error> {
        const THIS_THREAD: i32 = 1;
        let context = stream.context();
        let driver = context.driver();
        let _current = context.enter()?;
        // SAFETY: the stream is live.
        unsafe { driver.stream_begin_capture(stream.raw(), THIS_THREAD) }?;
        let capture = Capture { stream };
        enqueue()?;
        let captured = capture.end()?;
        let mut exec = RawGraphExec::NULL;
        // SAFETY: the graph is live, and `exec` is written.
        unsafe { driver.graph_instantiate(&raw mut exec, captured.raw, 0) }?;
        Ok(Self {
            context: context.clone(),
            exec,
        })
    }

    /// Enqueues the captured work.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// As for [`Graph::capture`].
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: both are live; the work is the caller's promise.
        unsafe { self.context.driver().graph_launch(self.exec, stream.raw()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: created once, destroyed once. A failure leaves nothing to do.
            let _ = unsafe { self.context.driver().graph_exec_destroy(self.exec) };
        }
    }
}

/// A running capture on this thread, in a current context. Dropping it ends the capture.
struct Capture<'a> {
    stream: &'a Stream,
}

impl Capture<'_> {
    /// Ends the capture and returns its graph.
    fn end(self) -> Result<Captured, Error> {
        ManuallyDrop::new(self).end_once()
    }

    /// Ends the capture by reference, for `drop` too; called once.
    fn end_once(&self) -> Result<Captured, Error> {
        let driver = self.stream.context().driver();
        let mut captured = Captured {
            driver,
            raw: RawGraph::NULL,
        };
        // SAFETY: the stream is live, its capture began on this thread, and `raw` is written.
        unsafe { driver.stream_end_capture(self.stream.raw(), &raw mut captured.raw) }?;
        Ok(captured)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // The captured graph is dropped. A failure leaves nothing to do.
        drop(self.end_once());
    }
}

/// A captured graph, which is not needed after instantiation.
struct Captured {
    driver: &'static Driver,
    raw: RawGraph,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if self.raw != RawGraph::NULL {
            // SAFETY: captured once, destroyed once. A failure leaves nothing to do.
            let _ = unsafe { self.driver.graph_destroy(self.raw) };
        }
    }
}

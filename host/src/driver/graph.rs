//! CUDA graphs: launches captured once and replayed.

use std::mem::ManuallyDrop;

use super::{Context, Driver, RawGraph, RawGraphExec, Stream};
use crate::error::Error;

/// An instantiated graph. The driver does not lock it: one thread at a time launches it, which is why a launch wants it
/// mutable. Launches of it run one after the other, on whichever streams.
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
    /// Captures what `enqueue` enqueues on `stream`, instead of running it. However `enqueue` ends, by an error or a
    /// panic too, the stream no longer captures.
    ///
    /// # Errors
    /// What `enqueue` returns; [`Error::Driver`] where something cannot be captured.
    ///
    /// # Safety
    /// What the captured work reads and writes is there whenever the graph runs.
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
    /// As promised to [`Graph::capture`].
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), Error> {
        let _current = self.context.enter()?;
        // SAFETY: both are live; the work is the caller's promise.
        unsafe { self.context.driver().graph_launch(self.exec, stream.raw()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: made once, destroyed once. A failure leaves nothing to be done.
            let _ = unsafe { self.context.driver().graph_exec_destroy(self.exec) };
        }
    }
}

/// A capture under way on this thread, in a context that is current; ended when dropped.
struct Capture<'a> {
    stream: &'a Stream,
}

impl Capture<'_> {
    /// Ends it.
    fn end(self) -> Result<Captured, Error> {
        ManuallyDrop::new(self).end_once()
    }

    /// Ends it; called once.
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
        // What was captured goes. A failure leaves nothing to be done.
        drop(self.end_once());
    }
}

/// A graph as captured; not needed once instantiated.
struct Captured {
    driver: &'static Driver,
    raw: RawGraph,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if self.raw != RawGraph::NULL {
            // SAFETY: captured once, destroyed once. A failure leaves nothing to be done.
            let _ = unsafe { self.driver.graph_destroy(self.raw) };
        }
    }
}

//! CUDA graphs: launches captured once and replayed.

use super::{Context, Driver, RawGraph, RawGraphExec, Stream};
use crate::error::Error;

/// An instantiated graph.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    exec: RawGraphExec,
}

impl Graph {
    /// Captures what `enqueue` enqueues on `stream`, instead of running it.
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
        let enqueued = enqueue();
        let mut captured = Captured {
            driver,
            raw: RawGraph::NULL,
        };
        // SAFETY: the capture began above; it is ended whether or not the closure failed.
        let ended = unsafe { driver.stream_end_capture(stream.raw(), &raw mut captured.raw) };
        enqueued.and(ended)?;
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
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), Error> {
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

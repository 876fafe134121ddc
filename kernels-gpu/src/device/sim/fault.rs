//! Faults, which end a launch, and how one leaves the fiber that found it.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic;
use std::sync::Once;

/// The check that found a [`Fault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The launch itself: an invalid shape or region.
    Launch,
    /// An access that is misaligned or outside the tensors and shared memory, a store to a read-only
    /// tensor, or a load of shared memory that was never written.
    Memcheck,
    /// Two accesses that no barrier orders, at least one of them a store; or a load through the read-only path of data that the
    /// launch wrote.
    Racecheck,
    /// A collective that not all of its lanes reach, or that names lanes that do not exist.
    Synccheck,
    /// An instruction that the GPU lacks.
    Machine,
    /// The body panicked.
    Panic,
}

/// The error that ended a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The check that found it.
    pub kind: FaultKind,
    /// The kernel.
    pub kernel: &'static str,
    /// Index of the block, `[x, y, z]`; zero for [`FaultKind::Launch`].
    pub block: [u32; 3],
    /// Index of the thread in the block; zero for [`FaultKind::Launch`].
    pub thread: u32,
    /// What happened, and to which tensor.
    pub message: String,
}

impl Fault {
    pub(super) fn of_launch(kernel: &'static str, message: String) -> Self {
        Self {
            kind: FaultKind::Launch,
            kernel,
            block: [0; 3],
            thread: 0,
            message,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            kernel,
            block: [x, y, z],
            thread,
            message,
        } = self;
        match kind {
            FaultKind::Launch => write!(f, "{message}; kernel {kernel}"),
            _ => write!(
                f,
                "{message}; block ({x}, {y}, {z}), thread {thread}, kernel {kernel}"
            ),
        }
    }
}

impl std::error::Error for Fault {}

/// A fault without its kernel, block and thread.
#[derive(Debug)]
pub struct Problem {
    pub kind: FaultKind,
    pub message: String,
}

impl Problem {
    fn new(kind: FaultKind, message: String) -> Box<Self> {
        Box::new(Self { kind, message })
    }

    pub fn memory(message: String) -> Box<Self> {
        Self::new(FaultKind::Memcheck, message)
    }

    pub fn race(message: String) -> Box<Self> {
        Self::new(FaultKind::Racecheck, message)
    }

    pub fn sync(message: String) -> Box<Self> {
        Self::new(FaultKind::Synccheck, message)
    }

    pub fn machine(message: String) -> Box<Self> {
        Self::new(FaultKind::Machine, message)
    }

    /// Unwinds the fiber with `self`, without a message.
    pub fn raise(self: Box<Self>) -> ! {
        panic::resume_unwind(self)
    }

    /// The problem that unwound a fiber: a raised one, or a panic of the body.
    pub fn of_unwinding(payload: Box<dyn Any + Send>) -> Box<Self> {
        payload.downcast::<Self>().unwrap_or_else(|payload| {
            let text = payload.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
            let text = text.unwrap_or("no message");
            let place = PANIC_PLACE.take().unwrap_or_default();
            Self::new(FaultKind::Panic, format!("panic at {place}: {text}"))
        })
    }
}

thread_local! {
    static PANIC_PLACE: Cell<Option<String>> = const { Cell::new(None) };
}

/// Installs a panic hook, once: a panic in a fiber is not printed; its place is kept for [`Problem::of_unwinding`].
pub fn keep_panics_of_fibers_silent(in_fiber: fn() -> bool) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if in_fiber() {
                PANIC_PLACE.set(info.location().map(ToString::to_string));
            } else {
                previous(info);
            }
        }));
    });
}

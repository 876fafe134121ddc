//! Runs the kernels' own source on the CPU, on request.

use std::cell::Cell;
use std::sync::OnceLock;

use gated_delta::Library;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`. Meanwhile, this thread's launches on CPU tensors run in the simulator. The simulator runs the kernels' own
/// source, with one fiber for each GPU thread, and stops at the first invalid access or race. It is slow, and meant for tests of
/// small shapes.
///
/// ```no_run
/// # fn decode() -> candle_core::Result<()> { Ok(()) }
/// candle_gated_delta::on_simulator(decode)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn on_simulator<R>(work: impl FnOnce() -> R) -> R {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            IS_ON.set(self.0);
        }
    }
    let _back = Back(IS_ON.replace(true));
    work()
}

pub(crate) fn is_on() -> bool {
    IS_ON.get()
}

pub(crate) fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(Library::simulator)
}

//! A lock without waiting.

use std::cell::UnsafeCell;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// A value that one thread at a time uses. A thread that finds the value in use continues without it.
///
/// A [`Mutex`](std::sync::Mutex) does the same in more instructions, which count in a launch, because it may have waiting threads
/// and records panics.
#[repr(C)]
#[derive(Default)]
pub(crate) struct TryLock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `with` gives the value to one thread at a time.
unsafe impl<T: Send> Sync for TryLock<T> {}

impl<T> TryLock<T> {
    /// Applies `f` to the value. `None` if the value is in use.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.taken.swap(true, Ordering::Acquire) {
            return None;
        }
        let taken = Taken(&self.taken);
        // SAFETY: `taken` was false, so that nobody else has the value until it is false again.
        let result = f(unsafe { &mut *self.value.get() });
        drop(taken);
        Some(result)
    }
}

/// Gives the value back, also if `f` panics.
struct Taken<'a>(&'a AtomicBool);

impl Drop for Taken<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<T> fmt::Debug for TryLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TryLock").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::TryLock;

    #[test]
    fn a_value_in_use_is_left_alone() {
        let lock = TryLock::<u32>::default();
        let nested = lock.with(|value| {
            *value = 1;
            lock.with(|value| *value = 2)
        });
        assert_eq!((nested, lock.with(|value| *value)), (Some(None), Some(1)));
        let panics = || lock.with(|_| panic!("on purpose"));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert_eq!(lock.with(|value| *value), Some(1));
    }
}

//! The module cache under racing threads and failing compilations, and the PTX specialiser.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use gated_delta::module_cache::ModuleCache;
use gated_delta::specialise::specialise;

const THREADS: usize = 16;

#[test]
fn racing_threads_compile_once() {
    let cache = ModuleCache::<u32, usize>::default();
    let compilations = AtomicUsize::new(0);
    let start = Barrier::new(THREADS);
    let compile = || {
        thread::sleep(Duration::from_millis(20));
        Ok::<_, ()>(compilations.fetch_add(1, Ordering::Relaxed))
    };
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                start.wait();
                assert_eq!(cache.get_or_compile(&7, compile), Ok(0));
            });
        }
    });
    assert_eq!(compilations.into_inner(), 1);
}

#[test]
fn a_failure_is_returned_and_tried_again() {
    let cache = ModuleCache::<&str, u32>::default();
    assert_eq!(cache.get_or_compile(&"key", || Err("ptxas")), Err("ptxas"));
    assert_eq!((cache.get(&"key"), cache.compiled()), (None, 0));
    assert_eq!(cache.get_or_compile(&"key", || Ok::<_, &str>(1)), Ok(1));
    assert_eq!(cache.compiled(), 1);
    assert_eq!(cache.get_or_compile(&"key", || Err("not called")), Ok(1));
}

#[test]
fn racing_threads_try_again_one_by_one() {
    let cache = ModuleCache::<u32, usize>::default();
    let attempts = AtomicUsize::new(0);
    let start = Barrier::new(THREADS);
    let third_time = || match attempts.fetch_add(1, Ordering::Relaxed) {
        attempt @ 0..2 => Err(attempt),
        attempt => Ok(attempt),
    };
    let results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    cache.get_or_compile(&7, third_time)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(attempts.into_inner(), 3);
    assert_eq!(
        results.iter().filter(|result| **result == Ok(2)).count(),
        THREADS - 2
    );
}

#[test]
fn a_panic_is_forgotten() {
    let cache = ModuleCache::<u32, u32>::default();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        cache.get_or_compile(&7, || -> Result<_, ()> { panic!() })
    }));
    assert!(panicked.is_err());
    assert_eq!(cache.get_or_compile(&7, || Ok::<_, ()>(1)), Ok(1));
}

#[test]
fn other_keys_go_on_while_one_compiles() {
    let cache = ModuleCache::<u32, u32>::default();
    let (started, has_started) = mpsc::channel();
    let (finish, may_finish) = mpsc::channel();
    let cache = &cache;
    thread::scope(|scope| {
        scope.spawn(move || {
            cache.get_or_compile(&1, || {
                started.send(()).unwrap();
                may_finish.recv_timeout(Duration::from_secs(10)).map(|()| 1)
            })
        });
        has_started.recv().unwrap();
        assert_eq!(cache.get_or_compile(&2, || Ok::<_, ()>(2)), Ok(2));
        assert_eq!((cache.get(&2), cache.get(&1)), (Some(2), None));
        finish.send(()).unwrap();
    });
    assert_eq!(cache.get(&1), Some(1));
}

#[test]
fn whole_words_are_replaced() {
    let ptx = "mov.u32 %r1, GD_H;\nmul.lo.u32 %r2, GD_HEAD, GD_H;// not_GD_H\n$L_GD_H: GD_H";
    let text = specialise(ptx, &["GD_H", "GD_HEAD"], &[16, u32::MAX]).unwrap();
    assert_eq!(
        text.to_str().unwrap(),
        "mov.u32 %r1, 16;\nmul.lo.u32 %r2, 4294967295, 16;// not_GD_H\n$L_GD_H: 16"
    );
}

#[test]
fn text_that_is_not_fully_specialised_is_refused() {
    let message = |ptx, symbols: &[&str], words: &[u32]| {
        specialise(ptx, symbols, words).unwrap_err().to_string()
    };
    assert_eq!(
        message("mov.u32 %r1, GD_HEADS;", &["GD_H"], &[1]),
        "load-time constants of the PTX: no value for GD_HEADS"
    );
    assert_eq!(
        message("", &["GD_H"], &[]),
        "load-time constants of the PTX: 0 values for 1 symbols"
    );
    assert_eq!(
        message("\0", &[], &[]),
        "load-time constants of the PTX: the PTX text has a NUL"
    );
}

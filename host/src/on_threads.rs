//! Compilation on all cores: the driver takes tens of milliseconds per kernel.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::error::Error;

/// Calls `f` for every job and returns the results in the order of the jobs. The jobs run on as many threads as there are cores,
/// including the caller's thread; a single job runs on the caller's thread. If threads cannot be spawned, the existing ones do
/// the work.
///
/// # Errors
/// The error of the first job that fails. Some jobs after it are not started.
///
/// # Panics
/// If `f` panics.
pub(crate) fn on_threads<J: Sync, R: Send>(
    jobs: &[J],
    f: impl Fn(&J) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(at) else { break };
            if at > failed.load(Ordering::Relaxed) {
                break;
            }
            let result = f(job);
            if result.is_err() {
                failed.fetch_min(at, Ordering::Relaxed);
            }
            done.push((at, result));
        }
        done
    };
    let mut done = thread::scope(|scope| {
        let others: Vec<_> = (1..cores.min(jobs.len()))
            .map_while(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        let mut done = work();
        for other in others {
            done.extend(
                other
                    .join()
                    .unwrap_or_else(|payload| resume_unwind(payload)),
            );
        }
        done
    });
    // Jobs are taken in order, so all jobs before the first failed one are done.
    done.sort_unstable_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::panic::catch_unwind;
    use std::sync::{Barrier, Mutex};
    use std::time::Duration;

    use super::*;

    fn failure(job: usize) -> Error {
        Error::Specialise(job.to_string())
    }

    #[test]
    fn results_come_in_order_from_all_cores() {
        let cores = thread::available_parallelism().unwrap().get();
        let jobs: Vec<usize> = (0..cores + 50).collect();
        let threads = Mutex::new(HashSet::new());
        // The first job of each thread waits for the first jobs of all others.
        let all = Barrier::new(cores);
        let results = on_threads(&jobs, |&job| {
            let is_first = threads.lock().unwrap().insert(thread::current().id());
            if is_first {
                all.wait();
            }
            Ok(10 * job)
        });
        assert_eq!(
            results.unwrap(),
            jobs.iter().map(|job| 10 * job).collect::<Vec<_>>()
        );
        let threads = threads.into_inner().unwrap();
        assert_eq!(threads.len(), cores);
        assert!(threads.contains(&thread::current().id()));
    }

    #[test]
    fn one_job_or_none_needs_no_thread() {
        let caller = thread::current().id();
        let of_one = on_threads(&[7], |&job| Ok((job, thread::current().id())));
        assert_eq!(of_one.unwrap(), [(7, caller)]);
        assert_eq!(on_threads(&[], |&job: &i32| Ok(job)).unwrap(), []);
    }

    #[test]
    fn the_first_error_is_the_first_by_order_and_jobs_behind_it_rest() {
        let jobs: Vec<usize> = (0..10_000).collect();
        let begun = AtomicUsize::new(0);
        let result = on_threads(&jobs, |&job| {
            begun.fetch_add(1, Ordering::Relaxed);
            match job {
                3 => {
                    thread::sleep(Duration::from_millis(20));
                    Err(failure(job))
                }
                4.. => Err(failure(job)),
                _ => Ok(job),
            }
        });
        assert_eq!(result.unwrap_err().to_string(), failure(3).to_string());
        assert!(begun.into_inner() < jobs.len());
    }

    #[test]
    fn a_panic_goes_through() {
        let jobs: Vec<usize> = (0..20).collect();
        for bad in [0, 1, 19] {
            let caught = catch_unwind(|| {
                on_threads(&jobs, |&job| {
                    thread::sleep(Duration::from_millis(1));
                    assert_ne!(job, bad, "the job's own words");
                    Ok(job)
                })
            });
            let payload = caught.unwrap_err();
            let words = payload.downcast_ref::<String>().unwrap();
            assert!(words.contains("the job's own words"), "{words}");
        }
    }
}

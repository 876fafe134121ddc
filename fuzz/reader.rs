//! Fuzzes the reader of the command's files: any bytes have to give an error or a problem, and a problem has to run.
//!
//! An input that begins with `{` is the header of a safetensors file; zeros follow as far as the header says. Any other input is a whole
//! file.
#![no_main]

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::LazyLock;

use gated_delta_cli::backend::Choice;
use gated_delta_cli::check::check;
use gated_delta_cli::{Backend, Problem, file};
use libfuzzer_sys::fuzz_target;
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::Value;

/// Memory limit of this process, in bytes. A file that asks for more has to be an error.
const MEMORY: u64 = 1 << 30;
/// Most bytes after a header.
const MOST_BYTES: u64 = 1 << 20;
/// Most state updates (states times tokens) of a problem that is run, so that a run takes some milliseconds.
const MOST_STEPS: usize = 16;

static FILE: LazyLock<File> =
    LazyLock::new(|| tempfile::tempfile().expect("a temporary file can be made"));
static SIMULATOR: LazyLock<Backend> =
    LazyLock::new(|| Backend::pick(Choice::Sim).expect("the simulator is everywhere"));

fuzz_target!(init: limit_memory(), |input: &[u8]| {
    let path = write(input).expect("a temporary file can be written");
    let Ok((problem, expected)) = file::read_with_expected(&path) else {
        return;
    };
    if steps(&problem) <= MOST_STEPS {
        let checked = check(&SIMULATOR, &problem, &expected, None);
        checked.unwrap_or_else(|error| panic!("what was read does not run: {error}"));
    }
});

fn limit_memory() {
    let limit = Rlimit {
        current: Some(MEMORY),
        maximum: Some(MEMORY),
    };
    setrlimit(Resource::As, limit).expect("a limit may be lowered");
}

/// Writes the file of an input and returns its path.
fn write(input: &[u8]) -> io::Result<PathBuf> {
    let mut file = &*FILE;
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    if input.starts_with(b"{") {
        file.write_all(&(input.len() as u64).to_le_bytes())?;
    }
    file.write_all(input)?;
    if input.starts_with(b"{") {
        file.set_len(8 + input.len() as u64 + data_bytes(input))?;
    }
    Ok(format!("/proc/self/fd/{}", file.as_raw_fd()).into())
}

/// Bytes of tensors after a header: up to the end of the last tensor, at most [`MOST_BYTES`].
fn data_bytes(header: &[u8]) -> u64 {
    let header = serde_json::from_slice(header).unwrap_or(Value::Null);
    let tensors = header.as_object().into_iter().flat_map(|map| map.values());
    let ends = tensors.filter_map(|tensor| tensor["data_offsets"][1].as_u64());
    ends.max().unwrap_or(0).min(MOST_BYTES)
}

/// Number of state updates: states times tokens. With K = V = 128 each counts as four.
fn steps(problem: &Problem) -> usize {
    let rows = problem.tokens().len();
    let of_state = |dim| {
        let state = problem.tensors.get("state");
        state
            .and_then(|state| state.dims().get(dim))
            .map_or(0, |&size| size)
    };
    let previous = problem.tensors.get("prev.k").map_or(0, |k| k.dims()[1]);
    let tokens = problem.max_tokens() + previous;
    (rows * of_state(1) * tokens).saturating_mul((of_state(3) / 64).pow(2))
}

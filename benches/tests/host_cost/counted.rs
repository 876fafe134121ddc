//! The test itself: the process that counts, and the process that launches.

use std::ffi::{c_int, c_long, c_void};
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::time::Instant;
use std::{env, fs, io};

use anyhow::{Context as _, Result, bail, ensure};
use gated_delta::driver::{Context, Device, Driver};
use gated_delta::{Error, Library, StreamRef};
use gated_delta_benches::host_cost::{Bare, Case, cases};

/// Environment variable of the process that launches: the number of a case.
const CASE: &str = "GATED_DELTA_HOST_COST";

/// Instructions of a launch per kernel, over a bare launch, when they last changed: with a plan, and through the cache. A change that makes
/// launches cheaper updates these numbers.
const MEASURED: [(&str, [u32; 2]); 6] = [
    ("decode", [275, 685]),
    ("layer, T = 1", [304, 783]),
    ("KDA layer, T = 1", [317, 791]),
    ("layer, 4 drafts after 4", [339, 945]),
    ("layer, deferred write-back", [389, 1024]),
    ("prefill of a layer", [148, 236]),
];

/// Ways to launch: bare, with a plan, through the cache.
const WAYS: usize = 3;

/// Launches between two marks. The launches before the first mark have compiled.
const LAUNCHES: u32 = 8;

unsafe extern "C" {
    fn ptrace(request: c_long, process: c_int, address: *mut c_void, data: *mut c_void) -> c_long;
    fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn raise(signal: c_int) -> c_int;
}

const TRACE_ME: c_long = 0;
const CONTINUE: c_long = 7;
const SINGLE_STEP: c_long = 9;
/// `EPERM` and `ENOSYS`: errors of `ptrace` in a sandbox that forbids it.
const NOT_PERMITTED: c_int = 1;
const NOT_THERE: c_int = 38;
/// `SIGUSR1` on Linux.
const MARK: c_int = 10;

pub fn main() -> Result<()> {
    // A filter that does not match leaves this test out, as it does others. The list of tests is empty.
    let is_left_out = |argument: String| match argument.strip_prefix('-') {
        Some(option) => matches!(option, "-list" | "-ignored"),
        None => !"host_cost".contains(&*argument),
    };
    if env::args().skip(1).any(is_left_out) {
        return Ok(());
    }
    match env::var(CASE) {
        Ok(case) => launch(case.parse()?),
        Err(_) => count_all(),
    }
}

/// Launches a case, with a mark before and after the counted launches. Prints its number of kernels, and the ns of each way.
fn launch(case: usize) -> Result<()> {
    // The stand-in reads no memory at these addresses.
    let (cases, _) = cases(0x1_0000)?;
    let Case { work, .. } = &cases[case];
    let work = &**work;
    let context = Context::primary(Device::get(0)?)?;
    let library = Library::new(&context);
    let stream = StreamRef::default_stream();
    let plan = library.plan(work)?;
    let bare = Bare::new(&context, stream, work)?;
    let _current = context.enter()?;
    let ways: [&dyn Fn() -> Result<(), Error>; WAYS] = [
        // SAFETY: the stand-in runs no kernel.
        &|| unsafe { bare.launch() },
        // SAFETY: as above.
        &|| unsafe { plan.launch(stream, work) },
        // SAFETY: as above.
        &|| unsafe { library.launch(stream, work) },
    ];
    let lengths = bare.parameter_bytes();
    let [wanted, planned, cached] = ways.map(|way| noted(context.driver(), &lengths, way));
    let wanted = wanted?;
    ensure!(planned? == wanted, "a plan launches something else");
    ensure!(cached? == wanted, "the first launch is of something else");
    ensure!(
        noted(context.driver(), &lengths, ways[2])? == wanted,
        "the cache launches something else"
    );
    let mut nanos = [f64::INFINITY; WAYS];
    for _ in 0..ROUNDS {
        for (way, nanos) in ways.iter().zip(&mut nanos) {
            let start = Instant::now();
            for _ in 0..LAUNCHES {
                way()?;
            }
            let round = start.elapsed().as_nanos() as f64 / f64::from(LAUNCHES);
            *nanos = nanos.min(round);
        }
    }
    // Between the first two marks are the instructions of a mark itself.
    mark()?;
    mark()?;
    for way in ways {
        for _ in 0..LAUNCHES {
            way()?;
        }
        mark()?;
    }
    let [bare_nanos, plan_nanos, cached_nanos] = nanos;
    println!(
        "{} {bare_nanos} {plan_nanos} {cached_nanos}",
        bare.kernels()
    );
    Ok(())
}

/// The launches of `way` as the stand-in notes them. Their parameters have these lengths.
fn noted(
    driver: &Driver,
    lengths: &[usize],
    way: &dyn Fn() -> Result<(), Error>,
) -> Result<Vec<u8>> {
    const MOST: usize = 1 << 14;
    type Note = unsafe extern "C" fn(*const usize, usize);
    type Noted = unsafe extern "C" fn(*mut u8, usize) -> usize;
    // SAFETY: the stand-in has functions of these types.
    let (note, noted) = unsafe {
        (
            driver.optional::<Note>("idle_note"),
            driver.optional::<Noted>("idle_noted"),
        )
    };
    let (note, noted) = note.zip(noted).context("the driver is another one")?;
    let mut bytes = vec![0; MOST];
    // SAFETY: there are that many lengths.
    unsafe { note(lengths.as_ptr(), lengths.len()) };
    way()?;
    // SAFETY: there is room for that many bytes.
    let count = unsafe { noted(bytes.as_mut_ptr(), MOST) };
    ensure!((1..MOST).contains(&count), "{count} bytes are noted");
    bytes.truncate(count);
    Ok(bytes)
}

/// Number of rounds, of which the fastest counts.
const ROUNDS: usize = 2000;

fn mark() -> io::Result<()> {
    // SAFETY: the process that traces this one takes the signal away.
    match unsafe { raise(MARK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Counts every case, and compares the numbers.
fn count_all() -> Result<()> {
    let folder = stand_in()?;
    let (cases, _) = cases(0)?;
    ensure!(cases.len() == MEASURED.len(), "a case without a number");
    let mut grown = Vec::new();
    println!(
        "instructions of a launch over a bare one, for each of its kernels (ns; before: instructions)"
    );
    for (index, (case, (name, before))) in cases.iter().zip(MEASURED).enumerate() {
        ensure!(case.name == name, "{name}: the case is {}", case.name);
        let counted = count(&folder, index).with_context(|| name.to_owned())?;
        let Some(counted) = counted else {
            println!("the system allows no ptrace: nothing is counted");
            return Ok(());
        };
        let Counted {
            kernels,
            instructions: [bare, ways @ ..],
            nanos: [bare_nanos, ways_nanos @ ..],
        } = counted;
        let mut line = format!("{name}, {kernels} kernel(s):");
        for (way, (what, before)) in ["plan", "cache"].into_iter().zip(before).enumerate() {
            let launches = kernels * LAUNCHES;
            let over = ways[way].saturating_sub(bare).div_ceil(launches);
            let nanos = (ways_nanos[way] - bare_nanos) / f64::from(kernels);
            line += &format!(" {what} {over} ({nanos:.0} ns; {before})");
            if 2 * over > 3 * before {
                grown.push(format!(
                    "{name}, {what}: {before} instructions before, {over} now"
                ));
            }
        }
        println!("{line}");
    }
    ensure!(
        grown.is_empty(),
        "a launch costs the host half as much again:\n{}",
        grown.join("\n")
    );
    Ok(())
}

/// The folder of the stand-in for `libcuda.so.1`.
fn stand_in() -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("idle-driver");
    fs::create_dir_all(&folder)?;
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/idle_driver.rs");
    let built = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition=2024", "--crate-type=cdylib", "-O", source, "-o"])
        .arg(folder.join("libcuda.so.1"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .context("rustc")?;
    ensure!(
        built.success(),
        "the stand-in for the driver does not build"
    );
    Ok(folder)
}

/// Counts of a case.
struct Counted {
    kernels: u32,
    /// Instructions of all launches, for each way.
    instructions: [u32; WAYS],
    /// Time of a launch in ns, for each way.
    nanos: [f64; WAYS],
}

/// Steps a child process through the launches of a case. `None` if the system does not allow it.
fn count(folder: &Path, case: usize) -> Result<Option<Counted>> {
    let mut command = Command::new(env::current_exe()?);
    command
        .env(CASE, case.to_string())
        .env("LD_LIBRARY_PATH", folder)
        .stdout(Stdio::piped());
    // SAFETY: the call is a system call, and allocates nothing.
    unsafe {
        command.pre_exec(|| match ptrace(TRACE_ME, 0, null_mut(), null_mut()) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    };
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) if matches!(error.raw_os_error(), Some(NOT_PERMITTED | NOT_THERE)) => {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    // The child has stopped after its exec.
    ensure!(
        wait(&child)?.is_some(),
        "the child ended before its launches"
    );
    until_mark(&child)?;
    let mut between = [0; 1 + WAYS];
    for count in &mut between {
        *count = steps_until_mark(&child)?;
    }
    go_on(&child, CONTINUE)?;
    ensure!(
        wait(&child)?.is_none(),
        "the child did not end behind its launches"
    );
    let mut text = String::new();
    child
        .stdout
        .take()
        .context("no output")?
        .read_to_string(&mut text)?;
    let mut words = text.split_whitespace();
    let mut word = || {
        words
            .next()
            .with_context(|| format!("the child printed {text:?}"))
    };
    let kernels = word()?.parse()?;
    let mut nanos = [0.0; WAYS];
    for nanos in &mut nanos {
        *nanos = word()?.parse()?;
    }
    let [of_mark, ways @ ..] = between;
    Ok(Some(Counted {
        kernels,
        instructions: ways.map(|count| count - of_mark),
        nanos,
    }))
}

fn go_on(child: &Child, how: c_long) -> Result<()> {
    // SAFETY: this thread traces the child, which has stopped; it continues without a signal.
    let result = unsafe { ptrace(how, child.id() as c_int, null_mut(), null_mut()) };
    ensure!(result == 0, "ptrace: {}", io::Error::last_os_error());
    Ok(())
}

/// The signal that the child has stopped at; `None` if it has ended successfully.
fn wait(child: &Child) -> Result<Option<c_int>> {
    let mut status = 0;
    // SAFETY: `waitpid` writes `status`.
    let waited = unsafe { waitpid(child.id() as c_int, &raw mut status, 0) };
    ensure!(waited > 0, "waitpid: {}", io::Error::last_os_error());
    match (status & 0x7f, status >> 8 & 0xff) {
        (0x7f, signal) => Ok(Some(signal)),
        (0, 0) => Ok(None),
        (signal, code) => bail!("the child ended by signal {signal} or with {code}"),
    }
}

/// Lets the child run to its next mark.
fn until_mark(child: &Child) -> Result<()> {
    go_on(child, CONTINUE)?;
    let stopped = wait(child)?;
    ensure!(stopped == Some(MARK), "the child stopped at {stopped:?}");
    Ok(())
}

/// Counts the instructions to the child's next mark.
fn steps_until_mark(child: &Child) -> Result<u32> {
    const TRAP: c_int = 5;
    let mut steps = 0;
    loop {
        go_on(child, SINGLE_STEP)?;
        match wait(child)? {
            Some(TRAP) => steps += 1,
            Some(MARK) => return Ok(steps),
            other => bail!("the child stopped at {other:?} instead of a mark"),
        }
    }
}

//! Finds the kernel compiler and the CUDA assemblers, or fetches them under `target/`.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{debian, shell, wheels};

/// Oldest stable release whose PTX backend compiles the kernels.
pub const OLDEST: Release = Release {
    major: 1,
    minor: 96,
    patch: 0,
};

/// Version of a stable rustc.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// Major number, 1.
    pub major: u32,
    /// Minor number, of a six-week release.
    pub minor: u32,
    /// Patch number.
    pub patch: u32,
}

impl Release {
    /// Parses a version such as `1.96.0`. `None` for a beta or a nightly.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        let release = Self {
            major: numbers.next()??,
            minor: numbers.next()??,
            patch: numbers.next()??,
        };
        numbers.next().is_none().then_some(release)
    }
}

/// A rustc whose sysroot has the sources of `core`.
pub struct Compiler {
    /// Path of the program.
    pub rustc: PathBuf,
    /// Search path of shared libraries that rustc needs and the system lacks.
    pub libraries: Option<OsString>,
    /// Version line of rustc and version of its LLVM, which together decide the generated code.
    pub identity: String,
    /// Place where the program was found, for messages.
    pub origin: String,
    release: Option<Release>,
}

impl Compiler {
    /// Asks the program at `rustc` for its version and checks that `core` can be built with it.
    pub fn probe(rustc: PathBuf, libraries: Option<OsString>, origin: String) -> Result<Self> {
        let ask = |question| {
            let mut command = Command::new(&rustc);
            set_library_path(&mut command, libraries.as_deref());
            shell::stdout(command.arg(question))
        };
        let version = ask("-vV")?;
        let field = |name: &str| {
            version
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let title = version.lines().next().unwrap_or_default();
        let llvm = field("LLVM version:")
            .with_context(|| format!("{} does not use LLVM", rustc.display()))?;
        let release = field("release:").and_then(Release::parse);

        let sysroot = ask("--print=sysroot")?;
        let library = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library");
        if !library.join("core").is_dir() {
            bail!(
                "{} has no library sources at {} (component rust-src)",
                rustc.display(),
                library.display()
            );
        }
        Ok(Self {
            identity: format!("{title}, LLVM {llvm}"),
            rustc,
            libraries,
            origin,
            release,
        })
    }

    /// Makes `command`, a cargo, compile with this compiler, unstable features included.
    pub fn configure(&self, command: &mut Command) {
        for inherited in [
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTFLAGS",
            "RUSTUP_TOOLCHAIN",
        ] {
            command.env_remove(inherited);
        }
        command
            .env("RUSTC", &self.rustc)
            .env("RUSTC_BOOTSTRAP", "1");
        set_library_path(command, self.libraries.as_deref());
    }
}

fn set_library_path(command: &mut Command, libraries: Option<&OsStr>) {
    if let Some(libraries) = libraries {
        let mut value = libraries.to_owned();
        if let Some(inherited) =
            env::var_os("LD_LIBRARY_PATH").filter(|inherited| !inherited.is_empty())
        {
            value.push(":");
            value.push(inherited);
        }
        command.env("LD_LIBRARY_PATH", value);
    }
}

/// Finds the kernel compiler, or fetches it.
pub fn compiler() -> Result<Compiler> {
    if let Some(rustc) = env::var_os("GATED_DELTA_RUSTC") {
        return Compiler::probe(rustc.into(), None, "GATED_DELTA_RUSTC".into())
            .context("GATED_DELTA_RUSTC");
    }
    if let Some(compiler) = from_rustup() {
        return Ok(compiler);
    }
    let prefix = debian::compiler_prefix().with_context(|| {
        let Release { major, minor, patch } = OLDEST;
        format!(
            "found no stable rustc from {major}.{minor} on with library sources, and could not unpack Debian's; \
             `rustup toolchain install {major}.{minor}.{patch} --component rust-src` gives one"
        )
    })?;
    let libraries = debian::library_path(&prefix)?;
    Compiler::probe(
        prefix.join("usr/bin/rustc"),
        Some(libraries),
        "Debian's rustc-web".into(),
    )
}

/// The oldest toolchain of rustup that serves.
fn from_rustup() -> Option<Compiler> {
    let list = shell::stdout(Command::new("rustup").args(["toolchain", "list"])).ok()?;
    list.lines()
        .filter_map(|line| {
            let name = line.split_whitespace().next()?;
            let mut which = Command::new("rustup");
            which.args(["which", "rustc", "--toolchain", name]);
            let rustc = shell::stdout(&mut which).ok()?;
            Compiler::probe(rustc.trim().into(), None, format!("rustup, {name}")).ok()
        })
        .filter(|compiler| compiler.release.is_some_and(|release| release >= OLDEST))
        .min_by_key(|compiler| compiler.release)
}

/// NVIDIA's offline tools.
pub struct CudaTools {
    /// Assembler.
    pub ptxas: PathBuf,
    /// Disassembler.
    pub nvdisasm: PathBuf,
}

/// Finds the CUDA assemblers, or fetches them.
pub fn cuda_tools() -> Result<CudaTools> {
    let directory = match env::var_os("GATED_DELTA_CUDA_BIN") {
        Some(directory) => PathBuf::from(directory),
        None => wheels::cuda_bin()?,
    };
    let tool = |name: &str| {
        let path = directory.join(name);
        if path.is_file() {
            Ok(path)
        } else {
            bail!("no {name} in {}", directory.display())
        }
    };
    Ok(CudaTools {
        ptxas: tool("ptxas")?,
        nvdisasm: tool("nvdisasm")?,
    })
}

/// `cargo xtask toolchain`.
pub fn print() -> Result<()> {
    let compiler = compiler()?;
    println!(
        "rustc     {}\n          {} ({})",
        compiler.identity,
        compiler.rustc.display(),
        compiler.origin
    );
    let tools = cuda_tools()?;
    for (name, path) in [("ptxas", &tools.ptxas), ("nvdisasm", &tools.nvdisasm)] {
        let text = shell::stdout(Command::new(path).arg("--version"))?;
        let version = text
            .lines()
            .find(|line| line.contains("release"))
            .unwrap_or("unknown version");
        println!("{name:9} {version}\n          {}", path.display());
    }
    Ok(())
}

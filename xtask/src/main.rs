//! Build tool of the workspace: `cargo xtask --help`.
//!
//! The library itself builds with plain `cargo build`, since the PTX that it embeds is committed. This tool makes and checks that
//! PTX, disassembles it, and packs the tests for a GPU host.

mod assemble;
mod bundle;
mod compile;
mod debian;
mod entries;
mod hash;
mod known;
mod manifest;
mod module;
mod profiles;
mod ptx;
mod same;
mod sass;
mod shell;
mod text;
mod toolchain;
mod wheels;

use std::process::ExitCode;

use assemble::Selection;
use clap::Parser;

/// Build tool of the workspace.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Find or fetch the kernel compiler and the CUDA assemblers, and print their versions and paths.
    ///
    /// The compiler is $GATED_DELTA_RUSTC, an installed stable toolchain of rustup from 1.96 on with
    /// rust-src, or Debian's rustc-web, unpacked under target/. The assemblers are those in
    /// $GATED_DELTA_CUDA_BIN or NVIDIA's wheels, unpacked under target/.
    Toolchain,
    /// Compile kernels-gpu to host/ptx, one packed file per entry and a manifest, and assemble each entry for every architecture.
    Ptx {
        /// Write nothing; fail if the committed files differ from the output of these sources, and assemble each entry with a quarter
        /// of its profiles, each for one architecture.
        #[arg(long)]
        check: bool,
        /// Compile only the entries whose name contains this text, and assemble them for sm_90 and sm_90a only: a quick look while
        /// writing a kernel.
        #[arg(long, conflicts_with = "check")]
        only: Option<String>,
        /// Write nothing; compile, compare with host/ptx of a revision, and fail if more than the symbol of a text has changed. `--only`
        /// limits this to the entries whose name contains the text.
        #[arg(long, value_name = "REVISION", conflicts_with = "check")]
        same: Option<String>,
    },
    /// Assemble the committed texts for other architectures than `ptx` does, and fail on a spill.
    ///
    /// Without options this takes long, and nothing calls it: run it before a release, or with --only and --profile after a change.
    Assemble {
        /// Architectures. Default: sm_86, sm_89, sm_103, sm_121.
        #[arg(long, value_name = "sm_XY", value_delimiter = ',')]
        arch: Vec<String>,
        /// Assemble only the entries whose name contains one of these texts.
        #[arg(long, value_name = "TEXT", value_delimiter = ',')]
        only: Vec<String>,
        /// Assemble only with these profiles, such as canonical.
        #[arg(long, value_name = "NAME", value_delimiter = ',')]
        profile: Vec<String>,
    },
    /// Print the PTX of an entry, or of a file like those in host/ptx. With `git config diff.ptx.textconv "cargo xtask text"` git shows
    /// the differences of texts.
    Text {
        /// Name of an entry in kernels-gpu/src/entries.rs, or a path.
        of: String,
    },
    /// Print the machine code of an entry.
    Sass(sass::Options),
    /// Pack tests, bench, command line and fixtures into target/gpu-bundle.tar.xz, for a host without Rust.
    GpuBundle,
}

fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Toolchain => toolchain::print(),
        Task::Ptx { check: true, .. } => ptx::check(),
        Task::Ptx {
            same: Some(revision),
            only,
            ..
        } => same::compare_with(&revision, only.as_deref()),
        Task::Ptx { only, .. } => ptx::write(only.as_deref()),
        Task::Assemble {
            arch,
            only,
            profile,
        } => {
            let selection = Selection {
                entries: &only,
                profiles: &profile,
            };
            assemble::on(&arch, selection)
        }
        Task::Text { of } => ptx::print(&of),
        Task::Sass(options) => sass::print(&options),
        Task::GpuBundle => bundle::build(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

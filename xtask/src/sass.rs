//! `cargo xtask sass`: prints the machine code of an entry.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::assemble::{assemble, substitute};
use crate::profiles::{self, PROFILES, values};
use crate::{entries, ptx, shell, toolchain};

/// Arguments of `cargo xtask sass`.
#[derive(clap::Args)]
pub struct Options {
    /// Name of an entry in kernels-gpu/src/entries.rs.
    entry: String,
    /// Architecture to assemble for.
    #[arg(long, default_value = "sm_90")]
    arch: String,
    /// Column of xtask/src/profiles.rs that gives the load-time constants.
    #[arg(long, default_value = PROFILES[0])]
    profile: String,
    /// Load-time constants that differ from the profile: SYMBOL=VALUE, decimal or 0x….
    #[arg(value_parser = assignment)]
    constants: Vec<(String, u32)>,
}

/// Assembles the committed PTX and prints its disassembly.
pub fn print(options: &Options) -> Result<()> {
    let entry = entries::find(&options.entry)?;
    let profile = profiles::find(entry, &options.profile)?;
    let mut values = values(entry, &profile, &options.arch)?;
    for (symbol, value) in &options.constants {
        match values.iter_mut().find(|pair| pair.0 == symbol) {
            Some(pair) => pair.1 = *value,
            None => bail!(
                "{} has no load-time constant {symbol}; it has {}",
                entry.name(),
                entry.symbols().join(" ")
            ),
        }
    }
    let tools = toolchain::cuda_tools()?;
    let directory = tempfile::tempdir()?;
    let text = substitute(&ptx::read(entry)?, &values, &options.arch);
    let (object, printed) = assemble(&tools, &text, &options.arch, directory.path())?;
    eprint!("{printed}");
    shell::run(
        Command::new(&tools.nvdisasm)
            .arg("--print-code")
            .arg(object),
    )
}

fn assignment(text: &str) -> Result<(String, u32)> {
    let (symbol, number) = text.split_once('=').context("want SYMBOL=VALUE")?;
    let value = match number.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => number.parse(),
    };
    Ok((
        symbol.to_owned(),
        value.with_context(|| format!("{number} is no 32-bit unsigned number"))?,
    ))
}

//! The `gated-delta` command. Exit status: 0 success, 1 a failed check, 2 bad input, with one line on stderr.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use gated_delta::Entry;
use gated_delta_benches::latency::{self, Outcome};
use gated_delta_benches::options::{Options, capability};
use gated_delta_cli::demo::Demo;
use gated_delta_cli::model::Model;
use gated_delta_cli::{Backend, Choice, Error, Report, check, file, info, note};
use serde_json::json;

/// Style of errors and failures.
const ERROR: Style = AnsiColor::Red.on_default().bold();

/// GPU kernels of the gated delta rule: check a layer dumped from another framework, run it, or try the demo
#[derive(Parser)]
#[command(name = "gated-delta", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    demo: DemoArgs,
    /// Print a JSON object instead of text
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Prefill a random prompt of a model's layer, convolution and norm included, then decode tokens and verify drafts,
    /// each step checked against the reference (the default)
    Demo(DemoArgs),
    /// Run the layer of a safetensors file (docs/files.md) and write its results
    Run {
        /// Inputs and options of the layer
        input: PathBuf,
        /// File to write `o`, `state` and `snapshots` to
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
        #[command(flatten)]
        how: How,
    },
    /// Compare the layer of a safetensors file (docs/files.md) with its expected.* tensors, or with the reference
    Check {
        /// Inputs, options and expected results of the layer
        input: PathBuf,
        #[command(flatten)]
        how: How,
    },
    /// Show the device, the kernels, and the kernels selected for a model's layer
    Info,
    /// Time the kernels on the GPU, next to the ceilings of the same run; each row is checked first
    Bench(Box<Options>),
    /// Print a completion script for a shell
    Completions {
        /// Shell to complete the command in
        shell: Shell,
    },
}

#[derive(Args)]
struct DemoArgs {
    /// Model to take the layer from
    #[arg(long, value_enum, default_value_t)]
    model: Model,
    /// Sequences [default: 8; fewer on the simulator]
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u16).range(1..=256))]
    batch: Option<u16>,
    /// Tokens of each sequence's prompt, 0 for none [default: 2048; less on the simulator, for one sequence]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=131072))]
    prompt: Option<u32>,
    /// Tokens to decode in each sequence [default: 32; less on the simulator]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    steps: Option<u16>,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Backend to run on
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
}

#[derive(Args)]
struct How {
    /// Backend to run on
    #[arg(long, value_enum, default_value_t)]
    backend: Choice,
    /// Kernel to run instead of the selected one, by its name in `gated-delta info`
    #[arg(long, value_name = "ENTRY", value_parser = entry)]
    variant: Option<Entry>,
    /// Use the kernels and the shared memory of a GPU of this compute capability: sm_80, sm_89
    #[arg(long, value_name = "sm_XY", value_parser = capability)]
    machine: Option<(u32, u32)>,
}

fn entry(name: &str) -> Result<Entry, String> {
    let known = Entry::ALL.iter().find(|entry| entry.name() == name);
    known
        .copied()
        .ok_or_else(|| "wanted an entry of `gated-delta info`".to_owned())
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            complain(&one_line(&usage_line(&error)));
            return ExitCode::from(2);
        }
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let as_json = cli.json;
    let (report, exit_code) = match run(cli) {
        Ok(Report { json, passed, .. }) if as_json => (format!("{json:#}\n"), u8::from(!passed)),
        Ok(Report { text, passed, .. }) => (coloured(&text), u8::from(!passed)),
        Err(error) => {
            complain(&one_line(&error.to_string()));
            return ExitCode::from(error.exit_code());
        }
    };
    match anstream::stdout().lock().write_all(report.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            complain(&format!("stdout: {error}"));
            ExitCode::from(2)
        }
        _ => ExitCode::from(exit_code),
    }
}

fn run(cli: Cli) -> Result<Report, Error> {
    match cli.command.unwrap_or(Command::Demo(cli.demo)) {
        Command::Demo(DemoArgs {
            model,
            batch,
            prompt,
            steps,
            seed,
            backend,
        }) => {
            let backend = pick(backend, None)?;
            Demo {
                model,
                batch: batch.map(usize::from),
                prompt: prompt.map(|tokens| tokens as usize),
                steps: steps.map(usize::from),
                seed,
            }
            .run(&backend)
        }
        Command::Run { input, output, how } => {
            let problem = file::read(&input)?;
            let output = file::output_path(&input, &output)?;
            let outputs = pick(how.backend, how.machine)?.run(&problem, how.variant)?;
            file::write(&output, &problem, &outputs)?;
            let mut json = outputs.json();
            json["output"] = json!(output.to_string_lossy());
            Ok(Report {
                text: outputs.summary(),
                json,
                passed: true,
            })
        }
        Command::Check { input, how } => {
            let (problem, expected) = file::read_with_expected(&input)?;
            check::check(
                &pick(how.backend, how.machine)?,
                &problem,
                &expected,
                how.variant,
            )
        }
        Command::Info => info::info(),
        Command::Bench(options) => bench(&options),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "gated-delta", &mut script);
            let text = String::from_utf8_lossy(&script).into_owned();
            Ok(Report {
                json: json!({ "completions": text }),
                text,
                passed: true,
            })
        }
    }
}

/// Runs the bench as `cargo bench` does.
fn bench(options: &Options) -> Result<Report, Error> {
    let measured = latency::run(options, &["bench"]);
    let Outcome {
        text,
        rows,
        failures,
    } = measured.map_err(|error| Error::Input(format!("{error:#}")))?;
    Ok(Report {
        text,
        passed: failures.is_empty(),
        json: json!({ "rows": rows, "failures": failures }),
    })
}

/// Opens the chosen backend and tells the user which one it is.
fn pick(choice: Choice, machine: Option<(u32, u32)>) -> Result<Backend, Error> {
    let backend = Backend::pick_as(choice, machine)?;
    let machine = machine.map(|(major, minor)| format!(", as sm_{major}{minor}"));
    note(&format!(
        "backend: {backend}{}",
        machine.unwrap_or_default()
    ));
    Ok(backend)
}

/// Colours the word FAILED. The writer removes colours if the output is no terminal or colours are off.
fn coloured(text: &str) -> String {
    text.replace("FAILED", &format!("{ERROR}FAILED{ERROR:#}"))
}

/// Prints an error as one line on stderr, coloured on a terminal.
fn complain(message: &str) {
    note(&format!("{ERROR}error{ERROR:#}: {message}"));
}

/// The message of a clap error without its usage text, on one line.
fn usage_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:"));
    let line = lines
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

/// Escapes control characters: names from a file may contain anything.
fn one_line(message: &str) -> String {
    message
        .chars()
        .fold(String::with_capacity(message.len()), |mut line, c| {
            if c.is_control() {
                line.extend(c.escape_default())
            } else {
                line.push(c)
            }
            line
        })
}

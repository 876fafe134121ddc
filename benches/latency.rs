//! `cargo bench`: latency tables. Each row is checked against the reference before it is timed.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use gated_delta::driver::{Context, Device};
use gated_delta::ops::StateLayout;
use gated_delta::{DType, Library};
use gated_delta_benches::gdn_decode::{Buffers, Cell};
use gated_delta_benches::host_cost::host_cost;
use gated_delta_benches::shapes;
use gated_delta_benches::timing::{Timer, copy_ceiling};
use indicatif::{ProgressBar, ProgressStyle};

/// Latency of GDN decode on the GPU, beside the ceilings of the same run.
#[derive(Parser)]
struct Options {
    /// Models: qwen3-next, qwen3.5-397b, qwen3.5-27b.
    #[arg(long, value_delimiter = ',', default_value = "qwen3-next")]
    model: Vec<String>,
    /// K = V: 64 or 128.
    #[arg(long, default_value_t = 128)]
    dim: usize,
    /// Batch sizes.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32,64,128,256,512"
    )]
    batch: Vec<usize>,
    /// State dtypes: bf16, f32.
    #[arg(long, value_delimiter = ',', default_value = "bf16,f32")]
    state: Vec<String>,
    /// State layouts: k_last, v_last.
    #[arg(long, value_delimiter = ',', default_value = "k_last,v_last")]
    layout: Vec<String>,
    /// Leave level-2 cache warm: one set of buffers instead of a rotation.
    #[arg(long)]
    warm: bool,
    /// Measure every variant of a cell, not only the selected one.
    #[arg(long)]
    tune: bool,
    /// Write the rows to a CSV file.
    #[arg(long)]
    save: Option<PathBuf>,
    /// Passed by `cargo bench`; without meaning.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let device = match Device::get(0) {
        Ok(device) => device,
        Err(error) => {
            println!("{error}: nothing to time");
            return Ok(());
        }
    };
    let context = Context::primary(device)?;
    let library = Library::new(&context);
    let timer = Timer::new(&library, &context)?;
    let cells = cells(&options)?;
    let ceiling = copy_ceiling(&context)?;
    println!(
        "{}: copy ceiling {ceiling:.0} GB/s (2 GiB, bytes read + written)",
        device.name()?
    );

    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let head = [
        "model",
        "K",
        "state",
        "layout",
        "B",
        "variant",
        "µs",
        "p10–p90",
        "floor µs",
        "÷ floor",
        "GB/s",
        "% copy",
        "error",
    ];
    table.set_header(head);
    let mut csv = options
        .save
        .as_ref()
        .map(csv::Writer::from_path)
        .transpose()?;
    if let Some(csv) = &mut csv {
        csv.write_record([
            "model",
            "k_dim",
            "state",
            "layout",
            "B",
            "l2",
            "variant",
            "us",
            "p10_us",
            "p90_us",
            "floor_us",
            "bytes",
            "copy_gb_s",
            "error",
        ])?;
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}")?;
    let progress = ProgressBar::new(cells.len() as u64).with_style(style);
    for cell in &cells {
        let layout = cell.layout;
        progress.set_message(format!(
            "{} {} {layout} B={}",
            cell.model.name, cell.state, cell.batch
        ));
        let buffers = Buffers::new(&context, *cell)?;
        let args = buffers.args(0)?;
        let bytes = args.bytes()?;
        let launches = buffers
            .sets()
            .max(40.min((20_000_000_000 / bytes.max(1)) as usize))
            .next_multiple_of(buffers.sets());
        let selected = args.selected()?;
        let variants = if options.tune {
            args.variants()?
        } else {
            vec![selected]
        };
        // SAFETY: the buffers outlive the timing, which waits for all launches.
        let floor = timer.graph(launches, |i| unsafe {
            library.state_floor(timer.stream.as_ref(), buffers.words(i)?, 1.0)
        })?;
        for variant in variants {
            // Timing has changed the states of `buffers`: the check brings its own.
            let fresh = Buffers::new(
                &context,
                Cell {
                    cold: false,
                    ..*cell
                },
            )?;
            let error = fresh.check(&library, &timer.stream, variant)?;
            drop(fresh);
            // SAFETY: as above.
            let micros = timer.graph(launches, |i| unsafe {
                library.gdn_decode_with(timer.stream.as_ref(), &buffers.args(i)?, variant)
            })?;
            let rate = bytes as f64 / micros.median / 1e3;
            let mark = if variant == selected {
                ""
            } else {
                " (not selected)"
            };
            table.add_row([
                cell.model.name.to_owned(),
                cell.dim.to_string(),
                cell.state.to_string(),
                layout.to_string(),
                cell.batch.to_string(),
                format!("{}{mark}", variant.name().trim_start_matches("gdn_decode_")),
                format!("{:.2}", micros.median),
                format!("{:.2}–{:.2}", micros.p10, micros.p90),
                format!("{:.2}", floor.median),
                format!("{:.2}", micros.median / floor.median),
                format!("{rate:.0}"),
                format!("{:.1}", 100.0 * rate / ceiling),
                format!("{error:.1e}"),
            ]);
            if let Some(csv) = &mut csv {
                csv.write_record([
                    cell.model.name,
                    &cell.dim.to_string(),
                    &cell.state.to_string(),
                    &layout.to_string(),
                    &cell.batch.to_string(),
                    if cell.cold { "cold" } else { "warm" },
                    variant.name(),
                    &format!("{:.3}", micros.median),
                    &format!("{:.3}", micros.p10),
                    &format!("{:.3}", micros.p90),
                    &format!("{:.3}", floor.median),
                    &bytes.to_string(),
                    &format!("{ceiling:.0}"),
                    &format!("{error:.2e}"),
                ])?;
            }
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    if let Some(csv) = &mut csv {
        csv.flush()?;
    }
    println!("{table}");

    let cell = Cell {
        model: shapes::GDN[0],
        dim: 128,
        batch: 1,
        state: DType::Bf16,
        layout: StateLayout::KLast,
        cold: false,
    };
    let cost = host_cost(
        &library,
        &timer.stream,
        &Buffers::new(&context, cell)?,
        cell.batch,
    )?;
    println!(
        "host: cuLaunchKernel {:.0} ns, plan + {:.0} ns, cache + {:.0} ns",
        cost.bare,
        cost.plan - cost.bare,
        cost.cached - cost.bare
    );
    Ok(())
}

fn cells(options: &Options) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for model in &options.model {
        let known = shapes::GDN.iter().find(|known| known.name == model);
        let model = *known.with_context(|| format!("--model: no model {model}"))?;
        for state in &options.state {
            let state = match state.as_str() {
                "bf16" => DType::Bf16,
                "f32" => DType::F32,
                _ => anyhow::bail!("--state: wanted bf16 or f32, got {state}"),
            };
            for layout in &options.layout {
                let layout = match layout.as_str() {
                    "k_last" => StateLayout::KLast,
                    "v_last" => StateLayout::VLast,
                    _ => anyhow::bail!("--layout: wanted k_last or v_last, got {layout}"),
                };
                for &batch in &options.batch {
                    ensure!(batch > 0, "--batch: wanted at least 1, got 0");
                    cells.push(Cell {
                        model,
                        dim: options.dim,
                        batch,
                        state,
                        layout,
                        cold: !options.warm,
                    });
                }
            }
        }
    }
    Ok(cells)
}

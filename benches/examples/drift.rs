//! `cargo run --release -p gated-delta-benches --example drift`: runs 2000 decode steps of GDN and KDA in the simulator, prints the
//! relative errors of the states, and draws docs/figures/drift.svg.

use std::path::Path;

use anyhow::Result;
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use gated_delta_benches::chart::{Axis, Marks, Panel, Picture, Series, draw};
use gated_delta_benches::drift::{Drift, Stores, roll};
use gated_delta_harness::arguments::Operator;
use half::{bf16, f16};
use plotters::style::RGBColor;

/// Name of a part of the state, and its error.
type Part = (&'static str, fn(&Drift) -> f64);

const STEPS: usize = 2000;
const NOTE: &str = "against the f64 recurrence of the same inputs · K = V = 128, 4 heads · log decays −0.002 to 0 (slow, a \
                    quarter) and −0.5 to −0.05 (fast)";
const SHOWN: [usize; 5] = [1, 10, 100, 1000, STEPS];

fn main() -> Result<()> {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    let head = ["state".to_owned(), "part".to_owned()];
    table.set_header(head.into_iter().chain(SHOWN.map(|step| step.to_string())));
    let mut panels = Vec::new();
    for (name, operator) in [("GDN", Operator::Gdn), ("KDA", Operator::Kda)] {
        let mut curves = Vec::new();
        for (state, color, drifts) in [
            (
                "bf16",
                RGBColor(213, 94, 0),
                roll::<bf16>(operator, STEPS, Stores::Each)?,
            ),
            (
                "bf16 deferred",
                RGBColor(230, 159, 0),
                roll::<bf16>(operator, STEPS, Stores::Eighth)?,
            ),
            (
                "bf16 deferred, u in bf16",
                RGBColor(204, 121, 167),
                roll::<bf16>(operator, STEPS, Stores::EighthOfBf16)?,
            ),
            (
                "f16",
                RGBColor(0, 158, 115),
                roll::<f16>(operator, STEPS, Stores::Each)?,
            ),
            (
                "f32",
                RGBColor(0, 114, 178),
                roll::<f32>(operator, STEPS, Stores::Each)?,
            ),
            (
                "f32 deferred",
                RGBColor(86, 180, 233),
                roll::<f32>(operator, STEPS, Stores::Eighth)?,
            ),
        ] {
            let parts: [Part; 3] = [
                ("all", |drift| drift.all),
                ("slow", |drift| drift.slow),
                ("fast", |drift| drift.fast),
            ];
            for (part, of) in parts {
                let errors: Vec<f64> = drifts.iter().map(of).collect();
                let shown = SHOWN.map(|step| format!("{:.1e}", errors[step - 1]));
                let head = [format!("{name} {state}"), part.to_owned()];
                table.add_row(head.into_iter().chain(shown));
                if part != "all" {
                    curves.push(Series {
                        name: format!("{state}, {part}"),
                        color,
                        marks: match part {
                            "slow" => Marks::Bold,
                            _ => Marks::Thin,
                        },
                        points: thinned(&errors),
                    });
                }
            }
        }
        panels.push(panel(name, curves));
    }
    println!("{table}");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/figures");
    std::fs::create_dir_all(&folder)?;
    let picture = Picture {
        title: "Relative error of the state over decode steps".to_owned(),
        note: NOTE.to_owned(),
        panels,
    };
    draw(&folder.join("drift.svg"), &picture)
}

fn panel(operator: &str, series: Vec<Series>) -> Panel {
    let scientific = |x: f64| format!("1e{}", x.log10().round());
    let steps = [1.0, STEPS as f64].into_iter();
    Panel {
        x: Axis::log(&format!("{operator}: decode steps"), steps, |x| {
            format!("{x}")
        }),
        y: Axis::log("relative error", [1e-8, 2e-2].into_iter(), scientific),
        series,
    }
}

/// Pairs of step and error, about 40 for each factor of ten in steps.
fn thinned(errors: &[f64]) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (step, &error) in (1..).zip(errors) {
        if points
            .last()
            .is_none_or(|last| f64::from(step) >= 1.06 * last.0)
            || step == STEPS as i32
        {
            points.push((step.into(), error));
        }
    }
    points
}

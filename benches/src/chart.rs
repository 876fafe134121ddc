//! Line charts as SVG, on a white background, readable on light and dark pages alike.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;

const PANEL: (u32, u32) = (520, 380);
const HEAD: u32 = 78;
/// Height of a line of the legend, in pixels.
const LEGEND_LINE: i32 = 20;
const INK: RGBColor = RGBColor(40, 44, 52);
const FAINT: RGBColor = RGBColor(226, 229, 234);
const FONT: &str = "Helvetica, Arial, sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// A picture: panels side by side, below a title, a note and a common legend.
pub struct Picture {
    /// Title, in the first line.
    pub title: String,
    /// Note, in the second line, smaller.
    pub note: String,
    /// Panels, from left to right.
    pub panels: Vec<Panel>,
}

/// Curves over the same axes.
pub struct Panel {
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Curves, in drawing order.
    pub series: Vec<Series>,
}

/// A curve. Curves with the same name share a line of the legend.
#[derive(Clone)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Color of the line and marks.
    pub color: RGBColor,
    /// Style of the points.
    pub marks: Marks,
    /// Points (x, y), in the order of x.
    pub points: Vec<(f64, f64)>,
}

/// Style of a curve's points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// Discs on a bold line.
    Filled,
    /// Rings on a thin line.
    Hollow,
    /// No marks, a bold line.
    Bold,
    /// No marks, a thin line.
    Thin,
}

/// A scale with its ticks.
#[derive(Clone)]
pub struct Axis {
    /// Label of the axis.
    pub label: String,
    /// First and last value.
    pub range: Range<f64>,
    /// Whether the scale is logarithmic.
    pub log: bool,
    /// Values with a grid line and a number.
    pub ticks: Vec<f64>,
    /// Formats the number at a tick.
    pub text: fn(f64) -> String,
}

impl Axis {
    /// A logarithmic axis that contains `values`, with ticks at 1, 2 and 5 of every decade, or at 1 only if there are many decades.
    #[must_use]
    pub fn log(label: &str, values: impl Iterator<Item = f64>, text: fn(f64) -> String) -> Self {
        let (low, high) = values
            .filter(|value| value.is_finite() && *value > 0.0)
            .fold((f64::INFINITY, 0.0f64), |(low, high), value| {
                (low.min(value), high.max(value))
            });
        let range = match low.is_finite() {
            true => low * 0.8..high * 1.25,
            false => 1.0..10.0,
        };
        let decades = range.start.log10().floor() as i32..=range.end.log10().ceil() as i32;
        let steps: &[f64] = match decades.clone().count() {
            ..6 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let ticks =
            decades.flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
        Self {
            label: label.to_owned(),
            ticks: ticks.filter(|tick| range.contains(tick)).collect(),
            range,
            log: true,
            text,
        }
    }

    fn place(&self, value: f64) -> f64 {
        let scale = |x: f64| if self.log { x.ln() } else { x };
        let Range { start, end } = self.range;
        (scale(value) - scale(start)) / (scale(end) - scale(start))
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (start, end): (i32, i32)) -> i32 {
        (f64::from(start) + f64::from(end - start) * self.place(*value)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        (self.text)(*value)
    }
}

/// Draws a picture into a file.
pub fn draw(path: &Path, picture: &Picture) -> Result<()> {
    let panels = picture.panels.len();
    let width = PANEL.0 * panels as u32;
    let legend = legend(picture, width as i32);
    let lines = legend.last().map_or(0, |&(_, (_, line))| line);
    let head = HEAD + (lines * LEGEND_LINE) as u32;
    let size = (width, PANEL.1 + head);
    let paper = SVGBackend::new(path, size).into_drawing_area();
    let drawn = || -> Drawn {
        paper.fill(&WHITE)?;
        let (head, body) = paper.split_vertically(head);
        draw_head(&head, picture, &legend)?;
        for (area, panel) in body.split_evenly((1, panels)).iter().zip(&picture.panels) {
            draw_panel(area, panel)?;
        }
        paper.present()
    };
    drawn().map_err(|error| anyhow!("{}: {error}", path.display()))
}

/// Each name of the legend once: a curve with that name, and the entry's x in pixels and line. A line that `width` ends is continued
/// below.
fn legend(picture: &Picture, width: i32) -> Vec<(&Series, (i32, i32))> {
    const MARGIN: i32 = 16;
    let mut entries: Vec<(&Series, (i32, i32))> = Vec::new();
    let (mut x, mut line) = (MARGIN, 0);
    for series in picture.panels.iter().flat_map(|panel| &panel.series) {
        if entries.iter().any(|(known, _)| known.name == series.name) {
            continue;
        }
        let entry = 55 + 7 * series.name.chars().count() as i32;
        if x > MARGIN && x + entry > width {
            (x, line) = (MARGIN, line + 1);
        }
        entries.push((series, (x, line)));
        x += entry;
    }
    entries
}

fn draw_head(area: &Area<'_>, picture: &Picture, legend: &[(&Series, (i32, i32))]) -> Drawn {
    area.draw(&Text::new(picture.title.as_str(), (16, 12), text(17)))?;
    area.draw(&Text::new(picture.note.as_str(), (16, 35), text(12)))?;
    for &(series, (x, line_of_legend)) in legend {
        let y = 64 + line_of_legend * LEGEND_LINE;
        area.draw(&PathElement::new(vec![(x, y), (x + 26, y)], line(series)))?;
        for mark in marks(series, (x + 13, y)) {
            area.draw(&mark)?;
        }
        area.draw(&Text::new(series.name.as_str(), (x + 33, y - 7), text(13)))?;
    }
    Ok(())
}

fn draw_panel(area: &Area<'_>, panel: &Panel) -> Drawn {
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(24)
        .x_label_area_size(42)
        .y_label_area_size(62)
        .build_cartesian_2d(panel.x.clone(), panel.y.clone())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_desc(panel.x.label.as_str())
        .y_desc(panel.y.label.as_str())
        .label_style(text(13))
        .axis_desc_style(text(14))
        .draw()?;
    for series in &panel.series {
        let points = series.points.iter().copied();
        chart.draw_series(LineSeries::new(points.clone(), line(series)))?;
        chart.draw_series(points.flat_map(|point| marks(series, point)))?;
    }
    Ok(())
}

fn text(size: u32) -> TextStyle<'static> {
    (FONT, size).into_font().color(&INK)
}

fn line(series: &Series) -> ShapeStyle {
    let width = match series.marks {
        Marks::Filled | Marks::Bold => 2,
        Marks::Hollow | Marks::Thin => 1,
    };
    series.color.stroke_width(width)
}

fn marks<C>(series: &Series, at: C) -> Vec<Circle<C, i32>>
where
    C: Clone,
{
    let circle = |style: ShapeStyle| Circle::new(at.clone(), 4, style);
    match series.marks {
        Marks::Filled => vec![circle(series.color.filled())],
        Marks::Hollow => vec![circle(WHITE.filled()), circle(series.color.stroke_width(1))],
        Marks::Bold | Marks::Thin => Vec::new(),
    }
}

//! The latency bench. [`options`] select cells, and [`suite`] selects everything for a release. A [`cell`] is the launch that a row
//! measures, [`buffers`] are its memory, and [`check`] compares its results with the reference. A [`record`] is a file of rows, [`peers`]
//! are times of other libraries, [`report`] shows rows as tables, [`figures`] draws them, and [`tune`] advises which variants to select.
//! Prefills have a table of their own, [`prefill`], as have steps with deferred write-back, [`deferred`]. [`best`] compares a run with all
//! records of its GPU, and [`untimed`] finds cells for kernels without a record. [`latency`] puts these together, for `cargo bench` and
//! for the command.

pub mod best;
pub mod buffers;
pub mod cell;
pub mod chart;
pub mod check;
pub mod deferred;
pub mod drift;
pub mod figures;
pub mod host_cost;
pub mod host_parts;
pub mod inputs;
pub mod latency;
pub mod options;
pub mod peers;
pub mod prefill;
pub mod prewarm;
pub mod record;
pub mod report;
pub mod shapes;
pub mod slab;
pub mod suite;
pub mod sweep;
pub mod timed;
pub mod tune;
pub mod untimed;

//! What the latency bench is made of: [`options`] ask for cells, [`suite`] for all that a release shows; a [`cell`] says
//! what a row measures, [`buffers`] hold it, [`check`] compares it with the reference. A [`record`] keeps rows, [`peers`]
//! are what others took, [`report`] shows rows as tables, [`figures`] draws them, [`tune`] says which variants to take.
//! Prefills have a table of their own, [`prefill`], and so have states that wait, [`deferred`]. [`best`] compares a run with all
//! records of its GPU, [`untimed`] finds cells for kernels that these lack. [`latency`] is all of it, for
//! `cargo bench` and the command.

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

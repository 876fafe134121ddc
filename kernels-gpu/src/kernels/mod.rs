//! One file per operator: its header (formulas, shapes, grid, threads, cost). The bodies are in [`recurrent`](crate::recurrent),
//! `layer`, `deferred` and [`prefill`](crate::prefill), and are re-exported here.
//!
//! # Safety
//! `run` of a kernel requires: `params` and the load-time constants describe live tensors, and a thread owns the memory that it
//! stores to. An unsafe function here without a `# Safety` section requires the same, and that its operands in shared memory have
//! been stored there.
#![allow(unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

pub mod deferred;
pub mod device_contract;
pub mod gdn_mtp;
pub mod gdn_prefill;
pub mod kda_prefill;
pub mod kda_recurrent;
pub mod layer;
pub mod layer_mtp;
pub mod prefill;
pub mod recurrent;
pub mod state_floor;

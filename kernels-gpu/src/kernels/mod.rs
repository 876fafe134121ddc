//! One file per operator: header (math, shapes, threads, cost), parameters, launch shape, body.
//!
//! # Safety
//! `run` of a kernel relies on this: `params` and the load-time constants describe live tensors, and what a thread stores to is its
//! own. So does an unsafe function here whose doc says nothing else, and on what it loads from shared memory having been stored there.
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

//! One file per operator: header (math, shapes, threads, cost), parameters, launch shape, body.

pub mod device_contract;
pub mod gdn_decode;
pub mod gdn_deferred;
pub mod gdn_layer;
pub mod gdn_layer_mtp;
pub mod gdn_mtp;
pub mod gdn_prefill;
pub mod kda_deferred;
pub mod kda_layer;
pub mod kda_layer_mtp;
pub mod kda_prefill;
pub mod kda_recurrent;
pub mod state_floor;

//! What runs in the simulator, and on the GPU too where there is one. `gpu` has what only a GPU shows, `ptx` what is true of
//! the kernels' text.

mod bad_input;
mod deferred;
mod engine;
mod families;
mod gdn_decode;
mod gdn_mtp;
mod kda_recurrent;
mod laws;
mod layer;
mod models;
mod prefill;
mod recurrent;
mod select;
mod slots;

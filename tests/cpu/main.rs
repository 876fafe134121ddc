//! Tests that run in the simulator, and on the GPU too if there is one. `gpu` has properties that only a GPU shows, `ptx`
//! properties of the kernels' text.

mod bad_input;
mod deferred;
mod engine;
mod entries;
mod families;
mod laws;
mod models;
mod prefill;
mod prefixes;
mod select;
mod slots;

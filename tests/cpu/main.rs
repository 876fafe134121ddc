//! What runs in the simulator, and on the GPU too where there is one. `gpu` has what only a GPU shows, `ptx` what is true of
//! the kernels' text.

mod bad_input;
mod deferred;
mod engine;
mod entries;
mod families;
mod laws;
mod models;
mod prefill;
mod select;
mod slots;

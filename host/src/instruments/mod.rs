//! Kernels that measure and prove, and compute no layer: for the benches and the tests of this workspace.

mod device_contract;
mod state_floor;

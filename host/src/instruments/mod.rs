//! Kernels that measure or verify, and compute no layer. The benches and the tests of this workspace use them.

mod device_contract;
mod state_floor;

//! The kernels. Read in this order: [`kernels`] (one file per operator: math, parameters, body), [`math`] and [`state`] (what
//! bodies are made of), [`device`] (the machine's instructions, and their simulator), [`entries`] (every compiled variant, one
//! line each).
//!
//! All operators share [`step`] (arguments of a launch), [`row`] (row, head and tile of a block), `pending` (pending tokens of
//! deferred states) and [`recurrent`] (tokens and ways of keeping states).
//!
//! Notation: `B` sequences, `T` tokens per sequence in a launch, `H` query/key heads, `HV` value heads, `K` and `V` head dims,
//! `P` pool slots. `S` is one head's state, `[V, K]`.
//!
//! On a GPU every function that a kernel calls is inlined into the kernel, by `cfg_attr(target_arch = "nvptx64",
//! inline(always))`. For the simulator the compiler decides, because entries then share compiled functions: a build takes a sixth
//! of the time.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features))]

pub mod constants;
pub mod deferred;
pub mod device;
pub mod entries;
pub mod kernels;
pub mod launch;
pub mod layer;
pub mod machine;
pub mod math;
pub(crate) mod pending;
pub mod prefill;
pub mod recurrent;
pub mod row;
pub mod state;
pub mod step;

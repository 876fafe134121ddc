//! GDN decode: one token per sequence, read and write of every state once.
//!
//! Per value head hv with query/key head h and state S: [V, K] (Gated DeltaNet, arXiv 2412.06464):
//!     k̂ = k rsqrt(Σk² + 1e-6)    q̂ = q rsqrt(Σq² + 1e-6) scale    (1)
//!     S ← α S                                                     (2) decay
//!     δ = β (v − S k̂)                                             (3) from the decayed S
//!     S ← S + δ k̂ᵀ                                                (4)
//!     o = S q̂                                                     (5) from the written S
//! Both products are taken from the loaded S with the raw k and q, so that no load waits for another and
//! one reduction serves all: S k̂ = α rk (S k), o = α rq (S q) + δ (k̂·q̂) with rk, rq the factors of (1).
//!
//! Shapes   q, k [B, 1, H, K]   v, o [B, 1, HV, V]   pool [P, HV, V, K] (K-last), [P, HV, K, V] (V-last)
//! Grid     x = tile + TILES · r, y, z = b; hv = y · HV/H + r (grouped, y = h) or r · H + y (tiled)
//! Threads  K-last: block = groups of K/8 lanes; a group owns whole rows (one v), a lane 8 channels
//!          V-last: block = groups of LANES lanes; a group owns ROWS rows (one k each), a lane 8 columns, and
//!          a thread of some warps a column
//! Padding  an inactive row zeroes o and touches no state
//! Cost     2 · V · K · size_of(S) bytes per (b, hv): memory-bound
//! Truth    reference::gdn::decode; tests/gdn_decode.rs

mod klast;
mod row;
mod vlast;

pub use klast::KLast;
pub use vlast::VLast;

use crate::constants::constants;

/// Pointers and sizes of one launch. Addresses are device addresses; 0 where a tensor is absent.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct GdnDecodeParams {
    /// `[B, T, H, K]`
    pub q: u64,
    /// `[B, T, H, K]`
    pub k: u64,
    /// `[B, T, HV, V]`
    pub v: u64,
    /// `[B, T, HV]`: raw gate `a`, or the given log decay `g`.
    pub a: u64,
    /// `[B, T, HV]`: raw `b`, or the given `beta`.
    pub b: u64,
    /// `[HV]` f32, raw gates only.
    pub a_log: u64,
    /// `[HV]` f32, raw gates only.
    pub dt_bias: u64,
    /// `[B, T, HV, V]`, written.
    pub o: u64,
    /// `[P, HV, V, K]` (K-last) or `[P, HV, K, V]` (V-last), start states.
    pub read_pool: u64,
    /// As `read_pool`, written; the same address as `read_pool` when updated in place.
    pub write_pool: u64,
    /// `[B]` i32, i64 or u32.
    pub read_slots: u64,
    /// `[B]` i32, i64 or u32.
    pub write_slots: u64,
    /// P of `read_pool`.
    pub read_pool_slots: u32,
    /// P of `write_pool`.
    pub write_pool_slots: u32,
}

constants! {
    /// What is fixed for a layer: compiled into the kernel when it is loaded.
    pub struct GdnDecodeConstants {
        /// Query/key heads, H.
        h = "GD_H",
        /// HV / H.
        ratio = "GD_RATIO",
        /// 1: query/key head of hv is `hv % H` (tiled); 0: `hv / ratio` (grouped).
        tiled = "GD_TILED",
        /// 1: normalise q and k.
        l2norm = "GD_L2NORM",
        /// Bits of the f32 scale of q.
        scale = "GD_SCALE",
        /// 1: `a` is the log decay and `b` is beta; 0: raw gates.
        given_gates = "GD_GIVEN_GATES",
        /// Bits of the f32 factor of sigmoid(b): 1 or 2.
        beta_scale = "GD_BETA_SCALE",
        /// 1: the new state is written.
        update_state = "GD_UPDATE_STATE",
        /// Slot that makes a row inactive besides the out-of-range ones; u32::MAX for none.
        null_slot = "GD_NULL_SLOT",
        /// [`crate::constants::Index`] of `read_slots`.
        read_index = "GD_READ_INDEX",
        /// [`crate::constants::Index`] of `write_slots`.
        write_index = "GD_WRITE_INDEX",
        /// [`crate::constants::Element`] of q.
        q_element = "GD_Q_ELEMENT",
        /// Element of k.
        k_element = "GD_K_ELEMENT",
        /// Element of v.
        v_element = "GD_V_ELEMENT",
        /// Element of o.
        o_element = "GD_O_ELEMENT",
        /// Element of `a` (or `g`).
        a_element = "GD_A_ELEMENT",
        /// Element of `b` (or `beta`).
        b_element = "GD_B_ELEMENT",
        /// 1: every address and stride of q, k, v and o is a multiple of 16 bytes.
        wide_io = "GD_WIDE_IO",
        /// 1: every address and stride of the pools is a multiple of 16 bytes.
        wide_state = "GD_WIDE_STATE",
        /// Elements between rows b of q.
        q_row = "GD_Q_ROW",
        /// Elements between heads of q.
        q_head = "GD_Q_HEAD",
        /// Elements between rows b of k.
        k_row = "GD_K_ROW",
        /// Elements between heads of k.
        k_head = "GD_K_HEAD",
        /// Elements between rows b of v.
        v_row = "GD_V_ROW",
        /// Elements between heads of v.
        v_head = "GD_V_HEAD",
        /// Elements between rows b of o.
        o_row = "GD_O_ROW",
        /// Elements between heads of o.
        o_head = "GD_O_HEAD",
        /// Elements between rows b of `a`.
        a_row = "GD_A_ROW",
        /// Elements between rows b of `b`.
        b_row = "GD_B_ROW",
        /// Elements between slots of `read_pool`.
        read_slot = "GD_READ_SLOT",
        /// Elements between slots of `write_pool`.
        write_slot = "GD_WRITE_SLOT",
    }
}

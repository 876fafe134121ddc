//! Every primitive of the facade once: the GPU and the simulator must give the same answers.
//!
//! [`EveryPrimitive`], but for those of clusters:
//!
//! Shapes   input `[BLOCK]` f32   output `[RESULTS, BLOCK]` 32-bit words, written
//! Threads  one block
//!
//! [`Cluster`]:
//!
//! Shapes   input `[CLUSTER_BLOCKS, BLOCK]` 32-bit words
//!          output `[CLUSTER_RESULTS, CLUSTER_BLOCKS, BLOCK]` 32-bit words, written
//! Grid     x = CLUSTER_BLOCKS
//!
//! Truth    tests/device_contract.rs

use crate::constants::constants;
use crate::device::{cluster, float, global, shared, thread, warp};
use crate::launch::Kernel;

/// Addresses of one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct DeviceContractParams {
    /// 16-byte aligned.
    pub input: u64,
    /// 16-byte aligned, written.
    pub output: u64,
}

constants! {
    /// One load-time constant, to be read back.
    pub struct DeviceContractConstants {
        /// Any number.
        number = "GD_NUMBER",
    }
}

/// What each row of the output holds, in order.
pub const RESULTS: [&str; 39] = [
    "thread_idx_x",
    "block_idx_x + block_idx_y + block_idx_z",
    "lane_id",
    "warp_shuffle_xor 5",
    "warp_shuffle_idx 3",
    "fma(x, x, 1.5)",
    "exp2",
    "log2",
    "reciprocal",
    "rsqrt",
    "pack_bf16x2(x, -x)",
    "pack_f16x2(x, -x)",
    "f16_to_f32",
    "shared b32 of the next thread",
    "shared b64 of the next thread",
    "shared b128 of the next thread",
    "copy_async_b128",
    "load_b16",
    "load_b64",
    "load_b128",
    "load_state_b16",
    "load_state_b32",
    "load_state_b128",
    "load-time constant",
    "mma_m16n8k16_bf16 [r, 2c]",
    "mma_m16n8k16_bf16 [r, 2c+1]",
    "mma_m16n8k16_bf16 [r+8, 2c]",
    "mma_m16n8k16_bf16 [r+8, 2c+1]",
    "load_matrices 0",
    "load_matrices 1",
    "load_matrices 2",
    "load_matrices 3",
    "load_matrices_transposed 0",
    "load_matrices_transposed 1",
    "load_matrices_transposed 2",
    "load_matrices_transposed 3",
    "shared b16 of the next thread",
    "minimum(x, 1)",
    "maximum(x, 1)",
];

/// Element [row, column] of each matrix that is multiplied: sums of their products are exact.
pub fn matrix_element(row: u32, column: u32) -> f32 {
    ((3 * row + 5 * column + row * column) % 31) as f32 - 15.0
}

/// The kernel, for one block of `BLOCK` threads.
pub struct EveryPrimitive<const BLOCK: u32>;

impl<const BLOCK: u32> Kernel for EveryPrimitive<BLOCK> {
    type Params = DeviceContractParams;
    type Constants = DeviceContractConstants;
    const BLOCK: u32 = BLOCK;
    const TILES: u32 = 1;
    const SHARED_BYTES: u32 = 48 * BLOCK;

    #[inline(always)]
    unsafe fn run(params: &DeviceContractParams) {
        let id = thread::thread_idx_x();
        let next = (id + 1) % BLOCK;
        let base = shared::dynamic_shared_mem();
        let word = params.input + 4 * id as u64;
        let pair = params.input + 8 * (id / 2) as u64;
        let quad = params.input + 16 * (id / 4) as u64;
        let put = |row: u32, value: u32| {
            // SAFETY: a word of the output for each row and thread.
            unsafe { global::store_b32(params.output + 4 * (row * BLOCK + id) as u64, value) }
        };
        // SAFETY: the input has BLOCK words and the shared memory 48 bytes for each thread, in three parts.
        unsafe {
            let x = f32::from_bits(global::load_b32(word));
            put(0, id);
            put(
                1,
                thread::block_idx_x() + thread::block_idx_y() + thread::block_idx_z(),
            );
            put(2, warp::lane_id());
            put(3, warp::warp_shuffle_xor(x, 5).to_bits());
            put(4, warp::warp_shuffle_idx(x, 3).to_bits());
            put(5, float::fma(x, x, 1.5).to_bits());
            put(6, float::exp2(x).to_bits());
            put(7, float::log2(x).to_bits());
            put(8, float::reciprocal(x).to_bits());
            put(9, float::rsqrt(x).to_bits());
            put(37, float::minimum(x, 1.0).to_bits());
            put(38, float::maximum(x, 1.0).to_bits());
            let (bf16, f16) = (float::pack_bf16x2(x, -x), float::pack_f16x2(x, -x));
            put(10, bf16);
            put(11, f16);
            put(12, float::f16_to_f32(f16 as u16).to_bits());

            let (words, pairs, quads) = (base, base + 4 * BLOCK, base + 16 * BLOCK);
            shared::store_shared_b32(words + 4 * id, x.to_bits());
            shared::store_shared_b64(pairs + 8 * id, [id, x.to_bits()]);
            shared::store_shared_b128(quads + 16 * id, [id, id + 1, id + 2, x.to_bits()]);
            let copied = base + 32 * BLOCK + 16 * id;
            shared::copy_async_b128(copied, quad);
            shared::copy_async_commit();
            thread::sync_threads();
            put(13, shared::load_shared_b32(words + 4 * next));
            put(14, sum(shared::load_shared_b64(pairs + 8 * next)));
            put(15, sum(shared::load_shared_b128(quads + 16 * next)));
            shared::copy_async_wait::<0>();
            warp::sync_warp(warp::FULL_MASK);
            put(16, sum(shared::load_shared_b128(copied)));

            put(17, global::load_b16(word) as u32);
            put(18, sum(global::load_b64(pair)));
            put(19, sum(global::load_b128(quad)));
            put(20, global::load_state_b16(word + 2, true) as u32);
            put(21, global::load_state_b32(word, true));
            put(22, sum(global::load_state_b128(quad, true)));
            put(23, DeviceContractConstants::get().number);

            shared::store_shared_b16(copied, id as u16);
            if id < 32 {
                thread::arrive_at_barrier(1, BLOCK);
                thread::sync_barrier(2, BLOCK);
            } else {
                thread::sync_barrier(1, BLOCK);
                thread::arrive_at_barrier(2, BLOCK);
            }
            let of_next = base + 32 * BLOCK + 16 * next;
            put(36, shared::load_shared_b16(of_next) as u32);

            let products = multiply();
            let (rows, columns) = (
                shared::load_matrices(quads + 16 * id),
                shared::load_matrices_transposed(quads + 16 * id),
            );
            let mut i = 0;
            while i < 4 {
                put(24 + i as u32, products[i].to_bits());
                put(28 + i as u32, rows[i]);
                put(32 + i as u32, columns[i]);
                i += 1;
            }
        }
    }
}

/// Blocks of a launch of [`Cluster`]: two clusters.
pub const CLUSTER_BLOCKS: u32 = 8;

/// What each `[CLUSTER_BLOCKS, BLOCK]` of the output of [`Cluster`] holds, in order.
pub const CLUSTER_RESULTS: [&str; 7] = [
    "block_idx_x",
    "b32 of the block before",
    "b128 of the block across",
    "b32 of the block itself",
    "b32 of the block after",
    "b32 sent by the block before",
    "b32 sent by the block itself",
];

/// Stores to the shared memory of other blocks, and the barrier and the mailbox that order them, for blocks of `BLOCK` threads.
pub struct Cluster<const BLOCK: u32>;

impl<const BLOCK: u32> Kernel for Cluster<BLOCK> {
    type Params = DeviceContractParams;
    type Constants = DeviceContractConstants;
    const BLOCK: u32 = BLOCK;
    const TILES: u32 = 1;
    const SHARED_BYTES: u32 = 32 * BLOCK + cluster::MAILBOX_BYTES;
    const CLUSTER: u32 = 4;

    #[inline(always)]
    unsafe fn run(params: &DeviceContractParams) {
        let (id, block) = (thread::thread_idx_x(), thread::block_idx_x());
        let next = (id + 1) % BLOCK;
        let rank = block % Self::CLUSTER;
        let further = |blocks: u32| (rank + blocks) % Self::CLUSTER;
        let base = shared::dynamic_shared_mem();
        let (words, kept, quads) = (base, base + 4 * BLOCK, base + 8 * BLOCK);
        let (sent, mailbox) = (base + 24 * BLOCK, base + 32 * BLOCK);
        let thread = block * BLOCK + id;
        let put = |row: u32, value: u32| {
            let place = row * CLUSTER_BLOCKS * BLOCK + thread;
            // SAFETY: a word of the output for each result and thread.
            unsafe { global::store_b32(params.output + 4 * place as u64, value) }
        };
        // SAFETY: the input has a word and the shared memory 32 bytes for each thread, in four parts, and a mailbox behind; all
        // blocks have started and opened it at the first wait, and none ends before the last.
        unsafe {
            let x = global::load_b32(params.input + 4 * thread as u64);
            if id == 0 {
                cluster::open_mailbox(mailbox, 8 * BLOCK);
            }
            cluster::arrive_relaxed();
            put(0, block);
            cluster::wait();
            cluster::send_b32(sent + 8 * id, further(1), x, mailbox);
            cluster::send_b32(sent + 8 * id + 4, rank, !x, mailbox);
            cluster::store_shared_b32_at(words + 4 * id, further(1), x);
            cluster::store_shared_b128_at(quads + 16 * id, further(2), [x, !x, id, block]);
            cluster::store_shared_b32_at(kept + 4 * id, rank, x);
            cluster::arrive();
            cluster::wait();
            put(1, shared::load_shared_b32(words + 4 * next));
            put(2, sum(shared::load_shared_b128(quads + 16 * next)));
            put(3, shared::load_shared_b32(kept + 4 * next));
            cluster::arrive();
            cluster::wait();
            let number = DeviceContractConstants::get().number;
            cluster::store_shared_b32_at(words + 4 * id, further(Self::CLUSTER - 1), x ^ number);
            cluster::arrive();
            cluster::wait();
            put(4, shared::load_shared_b32(words + 4 * next));
            cluster::wait_mailbox(mailbox);
            put(5, shared::load_shared_b32(sent + 8 * next));
            put(6, shared::load_shared_b32(sent + 8 * next + 4));
        }
    }
}

/// A B + C, all with the elements of [`matrix_element`].
#[inline(always)]
fn multiply() -> [f32; 4] {
    let (r, c) = (warp::lane_id() / 4, warp::lane_id() % 4);
    let at = matrix_element;
    let a = |row: u32, column: u32| float::pack_bf16x2(at(row, column), at(row, column + 1));
    let b = |row: u32| float::pack_bf16x2(at(row, r), at(row + 1, r));
    warp::mma_m16n8k16_bf16(
        [
            a(r, 2 * c),
            a(r + 8, 2 * c),
            a(r, 2 * c + 8),
            a(r + 8, 2 * c + 8),
        ],
        [b(2 * c), b(2 * c + 8)],
        [
            at(r, 2 * c),
            at(r, 2 * c + 1),
            at(r + 8, 2 * c),
            at(r + 8, 2 * c + 1),
        ],
    )
}

/// Wrapping sum of words.
#[inline(always)]
fn sum<const N: usize>(words: [u32; N]) -> u32 {
    let mut total = 0u32;
    let mut i = 0;
    while i < N {
        total = total.wrapping_add(words[i]);
        i += 1;
    }
    total
}

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
//! [`Warpgroup`]:
//!
//! Shapes   output `[WARPGROUP_RESULTS, BLOCK]` 32-bit words, written
//! Threads  one block of a warpgroup
//!
//! Truth    tests/gpu/device_contract.rs; of [`Warpgroup`] kernels-gpu/tests/prefill.rs

use crate::constants::constants;
use crate::device::shared::COUNTER_BYTES;
use crate::device::warpgroup::TRIANGLE_BYTES;
use crate::device::{cluster, float, global, shared, thread, warp, warpgroup};
use crate::launch::{Description, Kernel, Shared};
use crate::math::each::each;

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

/// The rows of the output, in order.
pub const RESULTS: [&str; 61] = [
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
    "multiply_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5))",
    "mma_m16n8k16_f16 [r, 2c]",
    "mma_m16n8k16_f16 [r, 2c+1]",
    "mma_m16n8k16_f16 [r+8, 2c]",
    "mma_m16n8k16_f16 [r+8, 2c+1]",
    "pack_b16x2(x, -x), bf16",
    "pack_b16x2(x, -x), f16",
    "b16x2_to_f32, bf16, low",
    "b16x2_to_f32, bf16, high",
    "b16x2_to_f32, f16, low",
    "b16x2_to_f32, f16, high",
    "mma_m16n8k16_b16, bf16 [r, 2c]",
    "mma_m16n8k16_b16, bf16 [r, 2c+1]",
    "mma_m16n8k16_b16, bf16 [r+8, 2c]",
    "mma_m16n8k16_b16, bf16 [r+8, 2c+1]",
    "mma_m16n8k16_b16, f16 [r, 2c]",
    "mma_m16n8k16_b16, f16 [r, 2c+1]",
    "mma_m16n8k16_b16, f16 [r+8, 2c]",
    "mma_m16n8k16_b16, f16 [r+8, 2c+1]",
    "larger_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5))",
    "add_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5))",
    "fma_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5), pack_f16x2(x, -x))",
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
    const DESCRIPTION: Description = Description {
        shared: Shared::of_block(48 * BLOCK),
        ..Description::new(BLOCK)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
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
            put(44, float::pack_b16x2(x, -x, false));
            put(45, float::pack_b16x2(x, -x, true));
            let (of_bf16, of_f16) = (
                float::b16x2_to_f32(bf16, false),
                float::b16x2_to_f32(f16, true),
            );
            put(46, of_bf16[0].to_bits());
            put(47, of_bf16[1].to_bits());
            put(48, of_f16[0].to_bits());
            put(49, of_f16[1].to_bits());
            put(39, float::multiply_f16x2(f16, float::pack_f16x2(x, 1.5)));
            let other = float::pack_f16x2(x, 1.5);
            put(58, float::larger_f16x2(f16, other));
            put(59, float::add_f16x2(f16, other));
            put(60, float::fma_f16x2(f16, other, f16));

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

            let products = multiply(float::pack_bf16x2, warp::mma_m16n8k16_bf16);
            let of_f16 = multiply(float::pack_f16x2, warp::mma_m16n8k16_f16);
            let of_either = [
                multiply(float::pack_bf16x2, |a, b, c| {
                    warp::mma_m16n8k16_b16(a, b, c, false)
                }),
                multiply(float::pack_f16x2, |a, b, c| {
                    warp::mma_m16n8k16_b16(a, b, c, true)
                }),
            ];
            let (rows, columns) = (
                shared::load_matrices(quads + 16 * id),
                shared::load_matrices_transposed(quads + 16 * id),
            );
            each!(i in 0..4 => {
                put(24 + i as u32, products[i].to_bits());
                put(40 + i as u32, of_f16[i].to_bits());
                put(50 + i as u32, of_either[0][i].to_bits());
                put(54 + i as u32, of_either[1][i].to_bits());
                put(28 + i as u32, rows[i]);
                put(32 + i as u32, columns[i]);
            });
        }
    }
}

/// Blocks of a cluster of [`Cluster`].
const CLUSTER: u32 = 4;

/// Blocks of a launch of [`Cluster`]: two clusters.
pub const CLUSTER_BLOCKS: u32 = 8;

/// The parts `[CLUSTER_BLOCKS, BLOCK]` of the output of [`Cluster`], in order.
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
    const DESCRIPTION: Description = Description {
        cluster: CLUSTER,
        shared: Shared::of_block(32 * BLOCK + cluster::MAILBOX_BYTES),
        ..Description::new(BLOCK)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &DeviceContractParams) {
        let (id, block) = (thread::thread_idx_x(), thread::block_idx_x());
        let next = (id + 1) % BLOCK;
        let rank = block % CLUSTER;
        let further = |blocks: u32| (rank + blocks) % CLUSTER;
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
            cluster::store_shared_b32_at(words + 4 * id, further(CLUSTER - 1), x ^ number);
            cluster::arrive();
            cluster::wait();
            put(4, shared::load_shared_b32(words + 4 * next));
            cluster::wait_mailbox(mailbox);
            put(5, shared::load_shared_b32(sent + 8 * next));
            put(6, shared::load_shared_b32(sent + 8 * next + 4));
        }
    }
}

/// Results of [`Warpgroup`]: 64 sums of `by_both` with K = 128, 32 of `by_triangle`, 64 and 32 of `add`, 4 words that `store_matrices_transposed` stored, 2 of `load_state_b64` of what
/// `store_state_b64` stored, the input's 16 bytes for each thread, by bulk copies, and those for the last thread but so many, once as
/// copies bring them and once handed back.
pub const WARPGROUP_RESULTS: u32 = 64 + 32 + 64 + 32 + 4 + 2 + 4 + 8;

/// Products of a warpgroup, all of the elements of [`matrix_element`]: A `[64, 128]`, the image `[128, 128]`, and the
/// triangle `[64, 64]`; sums that are added to are 1.
pub struct Warpgroup<const BLOCK: u32>;

impl<const BLOCK: u32> Kernel for Warpgroup<BLOCK> {
    type Params = DeviceContractParams;
    type Constants = DeviceContractConstants;
    const DESCRIPTION: Description = Description {
        warpgroups: true,
        shared: Shared::of_block(
            32_768 + 2 * TRIANGLE_BYTES + 16 * BLOCK + 2 * COUNTER_BYTES + 128,
        ),
        ..Description::new(BLOCK)
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &DeviceContractParams) {
        let id = thread::thread_idx_x();
        let image = shared::dynamic_shared_mem().next_multiple_of(128);
        let triangles = [image + 32_768, image + 32_768 + TRIANGLE_BYTES];
        let tile = image + 32_768 + 2 * TRIANGLE_BYTES;
        let counter = tile + 16 * BLOCK;
        let at = matrix_element;
        let place = |row: u32| params.output + 4 * (row * BLOCK + id) as u64;
        // SAFETY: a word of the output for each result and thread; shared memory has the matrices, and 16 bytes a thread.
        unsafe {
            let mut word = id;
            while word < 8192 {
                let byte = 4 * word;
                let token = byte % 2048 / 128 * 8 + byte % 128 / 16;
                let channel = byte / 2048 * 8 + byte % 16 / 2;
                let pair = float::pack_f16x2(at(token, channel), at(token, channel + 1));
                shared::store_shared_b32(image + byte, pair);
                word += BLOCK;
            }
            word = id;
            while word < TRIANGLE_BYTES / 4 {
                let byte = 4 * word;
                let low = (byte >= 2048) as u32;
                let first = (byte - 2048 * low) / 1024 * 16 + byte % 256 / 128 * 8;
                let second = 32 * low + byte % 1024 / 256 * 8;
                let (row, column) = (byte % 128 / 16, byte % 16 / 2);
                let element = |s: u32, t: u32| if s <= t { at(s, t) } else { 0.0 };
                let (s, t) = (first + row, second + column);
                let pair = float::pack_f16x2(element(s, t), element(s, t + 1));
                shared::store_shared_b32(triangles[0] + byte, pair);
                let (s, t) = (first + column, second + row);
                let pair = float::pack_f16x2(element(s, t), element(s + 1, t));
                shared::store_shared_b32(triangles[1] + byte, pair);
                word += BLOCK;
            }
            warpgroup::fence_shared();
            thread::sync_threads();
            let (r, c) = (id / 32 * 16 + id % 32 / 4, id % 4 * 2);
            let mut a = [0; 32];
            each!(i in 0..32 => {
                let (row, column) = (
                    r + i as u32 % 2 * 8,
                    16 * (i as u32 / 4) + i as u32 / 2 % 2 * 8 + c,
                );
                a[i] = float::pack_f16x2(at(row, column), at(row, column + 1));
            });
            let mut x = [0; 16];
            each!(i in 0..16 => x[i] = a[i]);
            let put = |first: u32, sums: &[f32]| {
                each!(i in 0..sums.len() => {
                    global::store_b32(place(first + i as u32), sums[i].to_bits());
                });
            };
            // Each product is stored before the next, so that no register waits for it.
            let (first, second) = warpgroup::first(warpgroup::by_both::<128>(&a, image));
            put(0, &first);
            let [triangle, second] =
                warpgroup::both(warpgroup::by_triangle(&x, triangles[0], second));
            put(32, &second);
            put(64, &triangle);
            let mut d = [1.0; 32];
            let sums =
                warpgroup::add::<128, 128>([1.0; 64], (&x, image), &mut d, (&x, triangles[1]));
            put(96, &warpgroup::settle::<128>(sums));
            put(160, &d);
            let own = tile + 16 * id;
            shared::store_matrices_transposed(own, [a[0], a[1], a[2], a[3]]);
            let words = shared::load_shared_b128(own);
            each!(i in 0..4 => global::store_b32(place(192 + i as u32), words[i]));
            // Two groups of bulk copies, the second half of the input in the second.
            warpgroup::fence_shared();
            thread::sync_threads();
            if id == 0 {
                let half = 8 * BLOCK;
                shared::open_counter(counter, 1);
                shared::copy_bulk(tile, params.input, half - 16, counter);
                shared::copy_bulk(
                    tile + half - 16,
                    params.input + (half - 16) as u64,
                    16,
                    counter,
                );
                shared::copy_bulk_commit(counter);
                shared::copy_bulk_wait(counter, 0);
                shared::copy_bulk(tile + half, params.input + half as u64, half - 16, counter);
                shared::copy_bulk_commit(counter);
                shared::copy_bulk_wait(counter, 1);
                let last = 2 * half - 16;
                shared::copy_bulk(tile + last, params.input + last as u64, 16, counter);
                shared::copy_bulk_commit(counter);
                shared::copy_bulk_wait(counter, 2);
            }
            thread::sync_threads();
            let words = shared::load_shared_b128(own);
            each!(i in 0..4 => global::store_b32(place(198 + i as u32), words[i]));
            // Warps come to a counter, with copies of both kinds; then when these are read, and when they are handed back.
            let met = counter + COUNTER_BYTES;
            if id == 0 {
                shared::open_counter(met, BLOCK);
            }
            warpgroup::fence_shared();
            thread::sync_threads();
            if id == 0 {
                shared::copy_bulk(tile, params.input, 16 * 32, met);
            } else if id >= 32 {
                shared::copy_async_b128(own, params.input + 16 * id as u64);
            }
            shared::arrive_at_counter_behind_copies(met);
            let other = tile + 16 * (BLOCK - 1 - id);
            each!(i in 0..2 => {
                shared::wait_for_counter(met, 2 * i as u32);
                let words = shared::load_shared_b128(other);
                each!(word in 0..4 => {
                    let row = 202 + 4 * i as u32 + word as u32;
                    global::store_b32(place(row), words[word]);
                });
                if i == 0 {
                    shared::arrive_at_counter(met);
                    shared::wait_for_counter(met, 1);
                    shared::store_shared_b128(own, words);
                    shared::arrive_at_counter(met);
                }
            });
            let pair = params.output + 4 * (196 * BLOCK + 2 * id) as u64;
            global::store_state_b64(pair, [id, !id]);
            let [low, high] = global::load_state_b64(pair, true);
            global::store_state_b64(pair, [high, low]);
        }
    }
}

/// A B + C, all with the elements of [`matrix_element`], of which `pack` makes words.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply(
    pack: impl Fn(f32, f32) -> u32,
    product: impl Fn([u32; 4], [u32; 2], [f32; 4]) -> [f32; 4],
) -> [f32; 4] {
    let (r, c) = (warp::lane_id() / 4, warp::lane_id() % 4);
    let at = matrix_element;
    let a = |row: u32, column: u32| pack(at(row, column), at(row, column + 1));
    let b = |row: u32| pack(at(row, r), at(row + 1, r));
    product(
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
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn sum<const N: usize>(words: [u32; N]) -> u32 {
    let mut total = 0u32;
    each!(i in 0..N => total = total.wrapping_add(words[i]));
    total
}

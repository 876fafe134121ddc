//! No machine: the functions that kernels compile against when the target is not a GPU and the feature `simulator` is off.
//! Nothing calls them.

macro_rules! absent {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(pub fn $name($($argument: $type),*) $(-> $result)? {
            let _ = ($($argument,)*);
            nothing_runs()
        })*
    };
}

macro_rules! absent_memory {
    ($address:ty: $($load:ident $(, $live:ident)? / $store:ident: $type:ty;)*) => {
        $(
            pub unsafe fn $load(address: $address $(, $live: bool)?) -> $type {
                let _ = (address, $($live)?);
                nothing_runs()
            }

            pub unsafe fn $store(address: $address, value: $type) {
                let _ = (address, value);
                nothing_runs()
            }
        )*
    };
}

fn nothing_runs() -> ! {
    unreachable!("kernels run on a GPU, or with the feature `simulator`")
}

absent! {
    thread_idx_x() -> u32;
    block_idx_x() -> u32;
    grid_dim_x() -> u32;
    block_idx_y() -> u32;
    block_idx_z() -> u32;
    sync_threads();
    sync_barrier(barrier: u32, threads: u32);
    sync_barrier_any(barrier: u32, threads: u32, is: bool) -> bool;
    arrive_at_barrier(barrier: u32, threads: u32);
    lane_id() -> u32;
    sync_warp(mask: u32);
    warp_ballot(is: bool) -> u32;
    warp_shuffle_xor(value: f32, lane_mask: u32) -> f32;
    warp_shuffle_idx(value: f32, source: u32) -> f32;
    mma_m16n8k16_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];
    mma_m16n8k16_f16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4];
    mma_m16n8k16_b16(a: [u32; 4], b: [u32; 2], c: [f32; 4], is_f16: bool) -> [f32; 4];
    fence_shared();
    let_next_begin();
    wait_for_previous();
    store_bulk_wait();
    dynamic_shared_mem() -> u32;
    copy_async_commit();
    cluster_arrive_relaxed();
    cluster_arrive();
    cluster_wait();
    fma(a: f32, b: f32, c: f32) -> f32;
    exp2(x: f32) -> f32;
    log2(x: f32) -> f32;
    reciprocal(x: f32) -> f32;
    rsqrt(x: f32) -> f32;
    minimum(a: f32, b: f32) -> f32;
    maximum(a: f32, b: f32) -> f32;
    pack_bf16x2(low: f32, high: f32) -> u32;
    pack_f16x2(low: f32, high: f32) -> u32;
    pack_b16x2(low: f32, high: f32, is_f16: bool) -> u32;
    b16x2_to_f32(word: u32, is_f16: bool) -> [f32; 2];
    multiply_f16x2(a: u32, b: u32) -> u32;
    add_f16x2(a: u32, b: u32) -> u32;
    fma_f16x2(a: u32, b: u32, c: u32) -> u32;
    larger_f16x2(a: u32, b: u32) -> u32;
    f16_to_f32(bits: u16) -> f32;
}

absent_memory! {
    u64:
    load_b16 / store_b16: u16;
    load_b32 / store_b32: u32;
    load_b64 / store_b64: [u32; 2];
    load_b128 / store_b128: [u32; 4];
    load_state_b16, live / store_state_b16: u16;
    load_state_b32, live / store_state_b32: u32;
    load_state_b64, live / store_state_b64: [u32; 2];
    load_state_b128, live / store_state_b128: [u32; 4];
}

absent_memory! {
    u32:
    load_shared_b16 / store_shared_b16: u16;
    load_shared_b32 / store_shared_b32: u32;
    load_shared_b64 / store_shared_b64: [u32; 2];
    load_shared_b128 / store_shared_b128: [u32; 4];
}

pub unsafe fn load_matrices(address: u32) -> [u32; 4] {
    let _ = address;
    nothing_runs()
}

pub unsafe fn load_matrices_transposed(address: u32) -> [u32; 4] {
    let _ = address;
    nothing_runs()
}

pub unsafe fn store_shared_b32_at(address: u32, rank: u32, value: u32) {
    let _ = (address, rank, value);
    nothing_runs()
}

pub unsafe fn store_shared_b128_at(address: u32, rank: u32, value: [u32; 4]) {
    let _ = (address, rank, value);
    nothing_runs()
}

pub unsafe fn open_mailbox(mailbox: u32, bytes: u32) {
    let _ = (mailbox, bytes);
    nothing_runs()
}

pub unsafe fn send_b32(address: u32, rank: u32, value: u32, mailbox: u32) {
    let _ = (address, rank, value, mailbox);
    nothing_runs()
}

pub unsafe fn wait_mailbox(mailbox: u32) {
    let _ = mailbox;
    nothing_runs()
}

pub unsafe fn copy_async_b128(shared_address: u32, global_address: u64) {
    let _ = (shared_address, global_address);
    nothing_runs()
}

pub unsafe fn copy_async_b128_or_zeros(shared_address: u32, global_address: u64, is_there: bool) {
    let _ = (shared_address, global_address, is_there);
    nothing_runs()
}

pub fn copy_async_wait<const PENDING: u32>() {
    nothing_runs()
}

pub fn take_registers<const REGISTERS: u32>() {
    nothing_runs()
}

pub fn leave_registers<const REGISTERS: u32>() {
    nothing_runs()
}

pub fn prefetch(address: u64) {
    let _ = address;
    nothing_runs()
}

pub unsafe fn prefetch_bulk(address: u64, bytes: u32) {
    let _ = (address, bytes);
    nothing_runs()
}

pub unsafe fn open_counter(counter: u32, threads: u32) {
    let _ = (counter, threads);
    nothing_runs()
}

pub unsafe fn arrive_at_counter(counter: u32) {
    let _ = counter;
    nothing_runs()
}

pub unsafe fn arrive_at_counter_behind_copies(counter: u32) {
    let _ = counter;
    nothing_runs()
}

pub unsafe fn wait_for_counter(counter: u32, phase: u32) {
    let _ = (counter, phase);
    nothing_runs()
}

pub unsafe fn copy_bulk(shared_address: u32, global_address: u64, bytes: u32, counter: u32) {
    let _ = (shared_address, global_address, bytes, counter);
    nothing_runs()
}

pub unsafe fn store_bulk(global_address: u64, shared_address: u32, bytes: u32) {
    let _ = (global_address, shared_address, bytes);
    nothing_runs()
}

pub unsafe fn copy_bulk_commit(counter: u32) {
    let _ = counter;
    nothing_runs()
}

pub unsafe fn copy_bulk_wait(counter: u32, group: u32) {
    let _ = (counter, group);
    nothing_runs()
}

/// Hands `f` the words of the load-time constants.
pub fn load_time_constants<R>(_: impl FnOnce(&[u32]) -> R) -> R {
    nothing_runs()
}

pub unsafe fn store_matrices_transposed(address: u32, matrices: [u32; 4]) {
    let _ = (address, matrices);
    nothing_runs()
}

pub unsafe fn warpgroup_by_both<const K: u32>(a: &[u32; 32], image: u32) -> [[f32; 32]; 2] {
    let _ = (a, image);
    nothing_runs()
}

pub unsafe fn warpgroup_by_first<const K: u32>(a: &[u32; 32], image: u32) -> [f32; 32] {
    let _ = (a, image);
    nothing_runs()
}

pub fn warpgroup_settle_only(sums: &mut [f32; 32]) {
    let _ = sums;
    nothing_runs()
}

pub unsafe fn warpgroup_add_alone<const K: u32, const TOKENS: u32>(
    sums: &mut [f32; 64],
    product: (&[u32; 16], u32),
) {
    let _ = (sums, product);
    nothing_runs()
}

pub unsafe fn warpgroup_by_triangle(a: &[u32; 16], triangle: u32) -> [f32; 32] {
    let _ = (a, triangle);
    nothing_runs()
}

pub fn warpgroup_settle_two(sums: &mut [[f32; 32]; 2]) {
    let _ = sums;
    nothing_runs()
}

pub fn warpgroup_settle_first(sums: &mut [f32; 32]) {
    let _ = sums;
    nothing_runs()
}

pub fn warpgroup_settle<const K: u32>(sums: &mut [f32; 64]) {
    let _ = sums;
    nothing_runs()
}

pub unsafe fn warpgroup_add<const K: u32, const TOKENS: u32>(
    sums: &mut [f32; 64],
    product: (&[u32; 16], u32),
    d: &mut [f32; 32],
    other: (&[u32; 16], u32),
) {
    let _ = (sums, product, d, other);
    nothing_runs()
}

//! The facade as PTX: the only `asm!` and LLVM intrinsics of the kernels.
//!
//! Every warp or block collective is an LLVM intrinsic, because intrinsics are convergent: an `asm!` shuffle may be sunk into a
//! branch. `asm!` that reads memory is never `pure`. The threads of a cluster arrive at its barrier one by one: the forms without
//! `.aligned`. An instruction that not all machines have is on a line of its own, prefixed by a word of [`crate::machine`].

use core::arch::{asm, global_asm, nvptx};

#[path = "ptx_warpgroup.rs"]
mod warpgroup;
pub use warpgroup::{
    warpgroup_add, warpgroup_add_alone, warpgroup_by_both, warpgroup_by_first,
    warpgroup_by_triangle, warpgroup_settle, warpgroup_settle_first, warpgroup_settle_only,
    warpgroup_settle_two,
};

global_asm!(".extern .shared .align 16 .b8 dynamic_shared_memory[];");

unsafe extern "C" {
    #[link_name = "llvm.nvvm.shfl.sync.bfly.f32"]
    fn shuffle_bfly(mask: u32, value: f32, lane_mask: u32, clamp: u32) -> f32;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn ballot(mask: u32, is: bool) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.f32"]
    fn shuffle_idx(mask: u32, value: f32, source: u32, clamp: u32) -> f32;
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_sync(barrier: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn barrier_arrive(barrier: u32, threads: u32);
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.fma.f32"]
    fn llvm_fma(a: f32, b: f32, c: f32) -> f32;
    #[link_name = "llvm.minimum.f32"]
    fn llvm_minimum(a: f32, b: f32) -> f32;
    #[link_name = "llvm.maximum.f32"]
    fn llvm_maximum(a: f32, b: f32) -> f32;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: `trap` has no precondition; it ends the launch with an error.
    unsafe { nvptx::trap() }
}

macro_rules! index {
    ($($name:ident = $intrinsic:ident;)*) => {$(
        #[inline(always)]
        pub fn $name() -> u32 {
            // SAFETY: reads a special register.
            unsafe { nvptx::$intrinsic() as u32 }
        }
    )*};
}

index! {
    thread_idx_x = _thread_idx_x;
    block_idx_x = _block_idx_x;
    grid_dim_x = _grid_dim_x;
    block_idx_y = _block_idx_y;
    block_idx_z = _block_idx_z;
}

#[inline(always)]
pub fn sync_threads() {
    // SAFETY: convergent; the kernel must ensure that every thread of the block comes here (synccheck).
    unsafe { nvptx::_syncthreads() }
}

#[inline(always)]
pub fn sync_barrier(barrier: u32, threads: u32) {
    // SAFETY: convergent; the kernel must ensure that whole warps come here, `threads` threads in all (synccheck).
    unsafe { barrier_sync(barrier, threads) }
}

#[inline(always)]
pub fn sync_barrier_any(barrier: u32, threads: u32, is: bool) -> bool {
    let any: u32;
    // SAFETY: as above.
    unsafe {
        asm!(
            "{{ .reg .pred own, any;",
            "setp.ne.b32 own, {is}, 0;",
            "bar.red.or.pred any, {barrier}, {threads}, own;",
            "selp.b32 {any}, 1, 0, any; }}",
            any = out(reg32) any,
            is = in(reg32) is as u32,
            barrier = in(reg32) barrier,
            threads = in(reg32) threads,
            options(nostack)
        );
    }
    any != 0
}

#[inline(always)]
pub fn arrive_at_barrier(barrier: u32, threads: u32) {
    // SAFETY: as above.
    unsafe { barrier_arrive(barrier, threads) }
}

#[inline(always)]
pub fn lane_id() -> u32 {
    thread_idx_x() % 32
}

#[inline(always)]
pub fn sync_warp(mask: u32) {
    // SAFETY: convergent; the kernel must ensure that every lane of `mask` comes here (synccheck).
    unsafe { bar_warp_sync(mask) }
}

#[inline(always)]
pub fn unknown(x: u32) -> u32 {
    let y;
    // SAFETY: a copy.
    unsafe {
        asm!("mov.b32 {}, {};", out(reg32) y, in(reg32) x, options(nomem, nostack, preserves_flags))
    };
    y
}

#[inline(always)]
pub fn warp_ballot(is: bool) -> u32 {
    // SAFETY: convergent; the kernel must ensure that the whole warp comes here (synccheck).
    unsafe { ballot(u32::MAX, is) }
}

#[inline(always)]
pub fn warp_shuffle_xor(value: f32, lane_mask: u32) -> f32 {
    // SAFETY: convergent; the kernel must ensure that the whole warp comes here (synccheck).
    unsafe { shuffle_bfly(u32::MAX, value, lane_mask, 31) }
}

#[inline(always)]
pub fn warp_shuffle_idx(value: f32, source: u32) -> f32 {
    // SAFETY: convergent; the kernel must ensure that the whole warp comes here (synccheck).
    unsafe { shuffle_idx(u32::MAX, value, source, 31) }
}

/// `asm!` rather than LLVM's intrinsic, which is not convergent either; not `pure`, so that LLVM does not move it.
macro_rules! multiply_matrices {
    ($($name:ident = $op:literal;)*) => {$(
        #[inline(always)]
        pub fn $name(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
            let [mut x, mut y, mut z, mut w] = c;
            // SAFETY: arithmetic; the kernel must ensure that the whole warp comes here (synccheck).
            unsafe {
                asm!(
                    $op,
                    "{{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
                    inout(reg32) x, inout(reg32) y, inout(reg32) z, inout(reg32) w,
                    in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
                    options(nomem, nostack)
                )
            };
            [x, y, z, w]
        }
    )*};
}

multiply_matrices! {
    mma_m16n8k16_bf16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32";
    mma_m16n8k16_f16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32";
}

// Straight-line code, as in `pack_b16x2`: the assembler drops the instruction that is not chosen.
#[inline(always)]
pub fn mma_m16n8k16_b16(a: [u32; 4], b: [u32; 2], c: [f32; 4], is_f16: bool) -> [f32; 4] {
    let [mut x, mut y, mut z, mut w] = c;
    // SAFETY: arithmetic; the kernel must ensure that the whole warp comes here (synccheck).
    unsafe {
        asm!(
            "{{ .reg .pred is_f16;",
            "setp.ne.u32 is_f16, {10}, 0;",
            "@!is_f16 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
            "{{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}};",
            "@is_f16 mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
            "{{{0}, {1}, {2}, {3}}}, {{{4}, {5}, {6}, {7}}}, {{{8}, {9}}}, {{{0}, {1}, {2}, {3}}}; }}",
            inout(reg32) x, inout(reg32) y, inout(reg32) z, inout(reg32) w,
            in(reg32) a[0], in(reg32) a[1], in(reg32) a[2], in(reg32) a[3], in(reg32) b[0], in(reg32) b[1],
            in(reg32) is_f16 as u32, options(nomem, nostack)
        )
    };
    [x, y, z, w]
}

macro_rules! load_matrices {
    ($($name:ident = $op:literal;)*) => {$(
        #[inline(always)]
        pub unsafe fn $name(address: u32) -> [u32; 4] {
            let (x, y, z, w): (u32, u32, u32, u32);
            // SAFETY: the caller's promise; the kernel must ensure that the whole warp comes here (synccheck).
            unsafe {
                asm!(concat!($op, " {{{}, {}, {}, {}}}, [{}];"),
                    out(reg32) x, out(reg32) y, out(reg32) z, out(reg32) w, in(reg32) address, options(nostack))
            };
            [x, y, z, w]
        }
    )*};
}

load_matrices! {
    load_matrices = "ldmatrix.sync.aligned.m8n8.x4.shared.b16";
    load_matrices_transposed = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16";
}

#[inline(always)]
pub unsafe fn store_matrices_transposed(address: u32, [x, y, z, w]: [u32; 4]) {
    // SAFETY: the caller's promise; the kernel must ensure that the whole warp comes here (synccheck).
    unsafe {
        asm!("GD_SM90 stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{}], {{{}, {}, {}, {}}};",
            in(reg32) address, in(reg32) x, in(reg32) y, in(reg32) z, in(reg32) w, options(nostack))
    };
}

/// Defines functions without a result, each of one or several instructions.
macro_rules! effects {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty, $class:ident);*) = $($op:literal)*;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name($($argument: $type),*) {
            // SAFETY: accesses no memory of the program; the kernel must call it in the right order (the simulator checks).
            unsafe { asm!($($op,)* $($argument = in($class) $argument,)* options(nostack)) };
        }
    )*};
    ($($(#[$doc:meta])* unsafe $name:ident($($argument:ident: $type:ty, $class:ident);*) = $($op:literal)*;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub unsafe fn $name($($argument: $type),*) {
            // SAFETY: the caller's promise.
            unsafe { asm!($($op,)* $($argument = in($class) $argument,)* options(nostack)) };
        }
    )*};
}

effects! {
    let_next_begin() = "GD_SM90 griddepcontrol.launch_dependents;";
    wait_for_previous() = "GD_SM90 griddepcontrol.wait;";
    fence_shared() = "GD_SM90 fence.proxy.async.shared::cta;";
    copy_async_commit() = "cp.async.commit_group;";
    store_bulk_wait() = "GD_SM90 cp.async.bulk.wait_group.read 0;";
    cluster_arrive_relaxed() = "barrier.cluster.arrive.relaxed;";
    cluster_arrive() = "barrier.cluster.arrive.release;";
    cluster_wait() = "barrier.cluster.wait.acquire;";
    prefetch(address: u64, reg64) = "prefetch.global.L2 [{address}];";
}

effects! {
    unsafe copy_async_b128(to: u32, reg32; from: u64, reg64) = "cp.async.cg.shared.global [{to}], [{from}], 16;";
    unsafe prefetch_bulk(address: u64, reg64; bytes: u32, reg32) =
        "GD_SM90 cp.async.bulk.prefetch.L2.global [{address}], {bytes};";
    unsafe open_counter(counter: u32, reg32; threads: u32, reg32) =
        "mbarrier.init.shared.b64 [{counter}], {threads};"
        "GD_SM90 fence.mbarrier_init.release.cluster;";
    unsafe arrive_at_counter(counter: u32, reg32) = "mbarrier.arrive.shared.b64 _, [{counter}];";
    unsafe arrive_at_counter_behind_copies(counter: u32, reg32) = "cp.async.mbarrier.arrive.noinc.shared.b64 [{counter}];";
    unsafe copy_bulk(to: u32, reg32; from: u64, reg64; bytes: u32, reg32; counter: u32, reg32) =
        "GD_SM90 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{counter}], {bytes};"
        "GD_SM90 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [{from}], {bytes}, [{counter}];";
    unsafe copy_bulk_commit(counter: u32, reg32) = "mbarrier.arrive.shared.b64 _, [{counter}];";
    unsafe store_bulk(to: u64, reg64; from: u32, reg32; bytes: u32, reg32) =
        "GD_SM90 cp.async.bulk.global.shared::cta.bulk_group [{to}], [{from}], {bytes};"
        "GD_SM90 cp.async.bulk.commit_group;";
    /// Because of the fence, a relaxed arrival suffices to make the mailbox known to the cluster.
    unsafe open_mailbox(mailbox: u32, reg32; bytes: u32, reg32) =
        "mbarrier.init.shared.b64 [{mailbox}], 1;"
        "fence.mbarrier_init.release.cluster;"
        "mbarrier.arrive.expect_tx.shared.b64 _, [{mailbox}], {bytes};";
    unsafe send_b32(address: u32, reg32; rank: u32, reg32; value: u32, reg32; mailbox: u32, reg32) =
        "{{ .reg .b32 there, mailbox;"
        "mapa.shared::cluster.u32 there, {address}, {rank};"
        "mapa.shared::cluster.u32 mailbox, {mailbox}, {rank};"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], {value}, [mailbox]; }}";
}

macro_rules! memory {
    ($($kind:tt $load:ident($load_op:literal) $store:ident($store_op:literal): $address:ty, $class:ident;)*) => {$(
        memory!(@$kind $load $load_op $store $store_op $address, $class);
    )*};
    (@u16 $load:ident $load_op:literal $store:ident $store_op:literal $address:ty, $class:ident) => {
        #[inline(always)]
        pub unsafe fn $load(address: $address) -> u16 {
            let value: u16;
            // SAFETY: the caller's promise.
            unsafe { asm!(concat!($load_op, ".b16 {}, [{}];"), out(reg16) value, in($class) address, options(nostack)) };
            value
        }
        #[inline(always)]
        pub unsafe fn $store(address: $address, value: u16) {
            // SAFETY: the caller's promise.
            unsafe { asm!(concat!($store_op, ".b16 [{}], {};"), in($class) address, in(reg16) value, options(nostack)) };
        }
    };
    (@u32 $load:ident $load_op:literal $store:ident $store_op:literal $address:ty, $class:ident) => {
        #[inline(always)]
        pub unsafe fn $load(address: $address) -> u32 {
            let value: u32;
            // SAFETY: the caller's promise.
            unsafe { asm!(concat!($load_op, ".b32 {}, [{}];"), out(reg32) value, in($class) address, options(nostack)) };
            value
        }
        #[inline(always)]
        pub unsafe fn $store(address: $address, value: u32) {
            // SAFETY: the caller's promise.
            unsafe { asm!(concat!($store_op, ".b32 [{}], {};"), in($class) address, in(reg32) value, options(nostack)) };
        }
    };
    (@x2 $load:ident $load_op:literal $store:ident $store_op:literal $address:ty, $class:ident) => {
        #[inline(always)]
        pub unsafe fn $load(address: $address) -> [u32; 2] {
            let (x, y): (u32, u32);
            // SAFETY: the caller's promise.
            unsafe { asm!(concat!($load_op, ".v2.b32 {{{}, {}}}, [{}];"), out(reg32) x, out(reg32) y, in($class) address, options(nostack)) };
            [x, y]
        }
        #[inline(always)]
        pub unsafe fn $store(address: $address, value: [u32; 2]) {
            // SAFETY: the caller's promise.
            unsafe { asm!(concat!($store_op, ".v2.b32 [{}], {{{}, {}}};"), in($class) address, in(reg32) value[0], in(reg32) value[1], options(nostack)) };
        }
    };
    (@x4 $load:ident $load_op:literal $store:ident $store_op:literal $address:ty, $class:ident) => {
        #[inline(always)]
        pub unsafe fn $load(address: $address) -> [u32; 4] {
            let (x, y, z, w): (u32, u32, u32, u32);
            // SAFETY: the caller's promise.
            unsafe {
                asm!(concat!($load_op, ".v4.b32 {{{}, {}, {}, {}}}, [{}];"),
                    out(reg32) x, out(reg32) y, out(reg32) z, out(reg32) w, in($class) address, options(nostack))
            };
            [x, y, z, w]
        }
        #[inline(always)]
        pub unsafe fn $store(address: $address, value: [u32; 4]) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(concat!($store_op, ".v4.b32 [{}], {{{}, {}, {}, {}}};"),
                    in($class) address, in(reg32) value[0], in(reg32) value[1], in(reg32) value[2], in(reg32) value[3], options(nostack))
            };
        }
    };
}

memory! {
    u16 load_b16("ld.global.nc") store_b16("st.global"): u64, reg64;
    u32 load_b32("ld.global.nc") store_b32("st.global"): u64, reg64;
    x2 load_b64("ld.global.nc") store_b64("st.global"): u64, reg64;
    x4 load_b128("ld.global.nc") store_b128("st.global"): u64, reg64;
    u16 load_shared_b16("ld.shared") store_shared_b16("st.shared"): u32, reg32;
    u32 load_shared_b32("ld.shared") store_shared_b32("st.shared"): u32, reg32;
    x2 load_shared_b64("ld.shared") store_shared_b64("st.shared"): u32, reg32;
    x4 load_shared_b128("ld.shared") store_shared_b128("st.shared"): u32, reg32;
}

macro_rules! load_state {
    ($op:literal, $address:ident, $live:ident, $class:ident, $list:literal, $($value:ident)*) => {
        // SAFETY: the caller's promise; the predicate suppresses a load that is not `live`.
        unsafe {
            asm!(
                "{{ .reg .pred live;",
                "setp.ne.u32 live, {live}, 0;",
                concat!("@live ld.global.L1::no_allocate", $op, " ", $list, ", [{address}]; }}"),
                live = in(reg32) $live as u32, address = in(reg64) $address, $($value = out($class) $value,)* options(nostack)
            )
        }
    };
}

#[inline(always)]
pub unsafe fn load_state_b16(address: u64, live: bool) -> u16 {
    let x: u16;
    load_state!(".b16", address, live, reg16, "{x}", x);
    x
}

#[inline(always)]
pub unsafe fn load_state_b32(address: u64, live: bool) -> u32 {
    let x: u32;
    load_state!(".b32", address, live, reg32, "{x}", x);
    x
}

#[inline(always)]
pub unsafe fn load_state_b64(address: u64, live: bool) -> [u32; 2] {
    let (x, y): (u32, u32);
    load_state!(".v2.b32", address, live, reg32, "{{{x}, {y}}}", x y);
    [x, y]
}

#[inline(always)]
pub unsafe fn load_state_b128(address: u64, live: bool) -> [u32; 4] {
    let (x, y, z, w): (u32, u32, u32, u32);
    load_state!(".v4.b32", address, live, reg32, "{{{x}, {y}, {z}, {w}}}", x y z w);
    [x, y, z, w]
}

macro_rules! store_state {
    ($op:literal, $address:ident, $class:ident, $list:literal, $($value:ident)*) => {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(concat!("st.global.L1::no_allocate", $op, " [{address}], ", $list, ";"),
                address = in(reg64) $address, $($value = in($class) $value,)* options(nostack))
        }
    };
}

#[inline(always)]
pub unsafe fn store_state_b16(address: u64, x: u16) {
    store_state!(".b16", address, reg16, "{x}", x);
}

#[inline(always)]
pub unsafe fn store_state_b32(address: u64, x: u32) {
    store_state!(".b32", address, reg32, "{x}", x);
}

#[inline(always)]
pub unsafe fn store_state_b64(address: u64, [x, y]: [u32; 2]) {
    store_state!(".v2.b32", address, reg32, "{{{x}, {y}}}", x y);
}

#[inline(always)]
pub unsafe fn store_state_b128(address: u64, [x, y, z, w]: [u32; 4]) {
    store_state!(".v4.b32", address, reg32, "{{{x}, {y}, {z}, {w}}}", x y z w);
}

#[inline(always)]
pub fn dynamic_shared_mem() -> u32 {
    let address: u32;
    // SAFETY: takes the address of the module's shared array.
    unsafe {
        asm!("mov.u32 {}, dynamic_shared_memory;", out(reg32) address, options(pure, nomem, nostack))
    };
    address
}

#[inline(always)]
pub fn take_registers<const REGISTERS: u32>() {
    // SAFETY: the kernel must ensure that the whole warpgroup comes here, and that other warpgroups release as many registers.
    unsafe {
        asm!("setmaxnreg.inc.sync.aligned.u32 {};", const REGISTERS, options(nostack));
    };
}

#[inline(always)]
pub fn leave_registers<const REGISTERS: u32>() {
    // SAFETY: the kernel must ensure that the whole warpgroup comes here.
    unsafe {
        asm!("setmaxnreg.dec.sync.aligned.u32 {};", const REGISTERS, options(nostack));
    };
}

#[inline(always)]
pub unsafe fn copy_async_b128_or_zeros(shared_address: u32, global_address: u64, is_there: bool) {
    let bytes = 16 * is_there as u32;
    // SAFETY: the caller's promise; with 0 source bytes nothing is read.
    unsafe {
        asm!("cp.async.cg.shared.global [{}], [{}], 16, {};", in(reg32) shared_address, in(reg64) global_address,
            in(reg32) bytes, options(nostack))
    };
}

#[inline(always)]
pub fn copy_async_wait<const PENDING: u32>() {
    // SAFETY: waits for this thread's own copies.
    unsafe { asm!("cp.async.wait_group {};", const PENDING, options(nostack)) };
}

macro_rules! store_shared_at {
    ($op:literal, $address:ident, $rank:ident, $list:literal, $($value:ident)*) => {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "{{ .reg .b32 there;",
                "mapa.shared::cluster.u32 there, {address}, {rank};",
                concat!("st.shared::cluster", $op, " [there], ", $list, "; }}"),
                address = in(reg32) $address, rank = in(reg32) $rank, $($value = in(reg32) $value,)* options(nostack)
            )
        }
    };
}

#[inline(always)]
pub unsafe fn store_shared_b32_at(address: u32, rank: u32, x: u32) {
    store_shared_at!(".b32", address, rank, "{x}", x);
}

#[inline(always)]
pub unsafe fn store_shared_b128_at(address: u32, rank: u32, [x, y, z, w]: [u32; 4]) {
    store_shared_at!(".v4.b32", address, rank, "{{{x}, {y}, {z}, {w}}}", x y z w);
}

/// The loop is inside the `asm!`: its label is local to the braces, however often it is inlined. The wait acquires at block
/// scope: cluster scope would invalidate L1, which holds nothing of shared memory.
#[allow(named_asm_labels)]
#[inline(always)]
pub unsafe fn wait_mailbox(mailbox: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .pred complete;",
            "waiting: mbarrier.try_wait.parity.shared.b64 complete, [{mailbox}], 0;",
            "@!complete bra waiting; }}",
            mailbox = in(reg32) mailbox, options(nostack)
        )
    };
}

#[inline(always)]
pub unsafe fn wait_for_counter(counter: u32, phase: u32) {
    // SAFETY: the caller's promise.
    unsafe { copy_bulk_wait(counter, phase) }
}

/// The loop is inside the `asm!`, as in [`wait_mailbox`].
#[allow(named_asm_labels)]
#[inline(always)]
pub unsafe fn copy_bulk_wait(counter: u32, group: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "{{ .reg .pred complete;",
            "waiting:",
            "GD_SM90 mbarrier.try_wait.parity.shared.b64 complete, [{counter}], {parity};",
            "GD_SM80 mbarrier.test_wait.parity.shared.b64 complete, [{counter}], {parity};",
            "@!complete bra waiting; }}",
            counter = in(reg32) counter, parity = in(reg32) group % 2, options(nostack)
        )
    };
}

#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { llvm_fma(a, b, c) }
}

#[inline(always)]
pub fn minimum(a: f32, b: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { llvm_minimum(a, b) }
}

#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    // SAFETY: arithmetic.
    unsafe { llvm_maximum(a, b) }
}

macro_rules! arithmetic {
    ($($name:ident($($argument:ident: $type:ty, $class:ident);*) -> $result:ty = $op:literal;)*) => {$(
        #[inline(always)]
        pub fn $name($($argument: $type),*) -> $result {
            let result: $result;
            // SAFETY: arithmetic.
            unsafe {
                asm!(concat!($op, " {result}", $(", {", stringify!($argument), "}",)* ";"),
                    result = out(reg32) result, $($argument = in($class) $argument,)* options(pure, nomem, nostack))
            };
            result
        }
    )*};
}

arithmetic! {
    exp2(x: f32, reg32) -> f32 = "ex2.approx.ftz.f32";
    log2(x: f32, reg32) -> f32 = "lg2.approx.ftz.f32";
    reciprocal(x: f32, reg32) -> f32 = "rcp.approx.ftz.f32";
    rsqrt(x: f32, reg32) -> f32 = "rsqrt.approx.ftz.f32";
    multiply_f16x2(a: u32, reg32; b: u32, reg32) -> u32 = "mul.rn.f16x2";
    add_f16x2(a: u32, reg32; b: u32, reg32) -> u32 = "add.rn.f16x2";
    fma_f16x2(a: u32, reg32; b: u32, reg32; c: u32, reg32) -> u32 = "fma.rn.f16x2";
    f16_to_f32(bits: u16, reg16) -> f32 = "cvt.f32.f16";
}

macro_rules! pack {
    ($($name:ident = $op:literal;)*) => {$(
        #[inline(always)]
        pub fn $name(low: f32, high: f32) -> u32 {
            let bits: u32;
            // SAFETY: arithmetic.
            unsafe { asm!(concat!($op, " {}, {}, {};"), out(reg32) bits, in(reg32) high, in(reg32) low, options(pure, nomem, nostack)) };
            bits
        }
    )*};
}

pack! {
    pack_bf16x2 = "cvt.rn.bf16x2.f32";
    pack_f16x2 = "cvt.rn.f16x2.f32";
}

// Straight-line code that computes both results: `is_f16` is a load-time constant, and the assembler drops the result that is not
// chosen.
#[inline(always)]
pub fn pack_b16x2(low: f32, high: f32, is_f16: bool) -> u32 {
    let bits: u32;
    // SAFETY: arithmetic.
    unsafe {
        asm!(
            "{{ .reg .pred is_f16; .reg .b32 bf16, f16;",
            "setp.ne.u32 is_f16, {is_f16}, 0;",
            "cvt.rn.bf16x2.f32 bf16, {high}, {low};",
            "cvt.rn.f16x2.f32 f16, {high}, {low};",
            "min.NaN.f16x2 f16, f16, {most};",
            "max.NaN.f16x2 f16, f16, {least};",
            "selp.b32 {bits}, f16, bf16, is_f16; }}",
            bits = out(reg32) bits, low = in(reg32) low, high = in(reg32) high, is_f16 = in(reg32) is_f16 as u32,
            most = in(reg32) 0x7bff_7bffu32, least = in(reg32) 0xfbff_fbffu32, options(pure, nomem, nostack)
        )
    };
    bits
}

#[inline(always)]
pub fn b16x2_to_f32(word: u32, is_f16: bool) -> [f32; 2] {
    let (low, high): (f32, f32);
    // SAFETY: arithmetic.
    unsafe {
        asm!(
            "{{ .reg .pred is_f16; .reg .b16 l, h; .reg .b32 bl, bh, fl, fh;",
            "setp.ne.u32 is_f16, {is_f16}, 0;",
            "shl.b32 bl, {word}, 16;",
            "and.b32 bh, {word}, 0xffff0000;",
            "mov.b32 {{l, h}}, {word};",
            "cvt.f32.f16 fl, l;",
            "cvt.f32.f16 fh, h;",
            "selp.b32 {low}, fl, bl, is_f16;",
            "selp.b32 {high}, fh, bh, is_f16; }}",
            low = out(reg32) low, high = out(reg32) high, word = in(reg32) word, is_f16 = in(reg32) is_f16 as u32,
            options(pure, nomem, nostack)
        )
    };
    [low, high]
}

#[inline(always)]
pub fn larger_f16x2(a: u32, b: u32) -> u32 {
    let larger: u32;
    // SAFETY: arithmetic.
    unsafe {
        asm!("abs.f16x2 {x}, {a};", "abs.f16x2 {y}, {b};", "max.NaN.f16x2 {larger}, {x}, {y};",
            a = in(reg32) a, b = in(reg32) b, x = out(reg32) _, y = out(reg32) _, larger = out(reg32) larger,
            options(pure, nomem, nostack))
    };
    larger
}

/// A number that the host writes into the PTX text before the driver compiles it.
macro_rules! load_time_constant {
    ($symbol:expr) => {{
        let value: u32;
        // SAFETY: a register move of a literal.
        unsafe { core::arch::asm!(concat!("mov.u32 {}, ", $symbol, ";"), out(reg32) value, options(pure, nomem, nostack)) };
        value
    }};
}
pub(crate) use load_time_constant;

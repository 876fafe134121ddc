//! Linker symbols for the driver functions that `cust` calls. With these symbols, a program links on a machine without CUDA, and
//! starts on a machine without a driver.
//!
//! Each symbol is a jump through a slot. [`resolve`] first fills an empty slot, like a dynamic linker's lazy binding: the
//! argument registers are kept, and the jump then enters the driver with all arguments unchanged. The symbols are hidden: a
//! shared library that contains them exports none, and does not replace the real driver in a process that has both. The symbols
//! are weak, for a program with two versions of this crate. No function here takes a floating-point argument.

use std::{
    arch::global_asm,
    ffi::{CStr, c_char, c_void},
    sync::atomic::{AtomicPtr, Ordering},
};

use super::{code, library};

/// The slot of a forwarder: the address that it jumps to. The function's name follows the slot as a NUL-terminated string.
#[repr(C)]
struct Slot {
    target: AtomicPtr<c_void>,
    name: [c_char; 0],
}

/// Fills a slot.
///
/// # Safety
/// `slot` is one of the slots in the assembly below, with its name after it.
unsafe extern "C" fn resolve(slot: *const Slot) -> *mut c_void {
    // SAFETY: the name is terminated and, like the slot, never freed.
    let (target, name) = unsafe {
        (
            &(*slot).target,
            CStr::from_ptr((&raw const (*slot).name).cast()),
        )
    };
    let found = library::symbol(name).unwrap_or_else(|| {
        if name == c"cuGetErrorString" {
            no_driver_text as *mut c_void
        } else {
            no_driver as *mut c_void
        }
    });
    target.store(found, Ordering::Release);
    found
}

/// Replaces a function that is missing: returns an error code.
extern "C" fn no_driver() -> i32 {
    code::NO_DEVICE
}

/// Replaces `cuGetErrorString`, because `Display` of cust's errors would panic if that function failed.
extern "C" fn no_driver_text(_code: i32, text: &mut *const c_char) -> i32 {
    *text = c"no CUDA driver".as_ptr();
    code::SUCCESS
}

/// Makes every program with this crate link the object file with the forwarders.
#[used]
static KEEP: unsafe extern "C" fn(*const Slot) -> *mut c_void = resolve;

/// A forwarder: jumps to the address in its slot or, if the slot is empty, to `gated_delta_bind` with the slot's address.
#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "
        mov r11, qword ptr [rip + .Lgated_delta_slot_\\name]
        test r11, r11
        jz 2f
        jmp r11
    2:
        lea r11, [rip + .Lgated_delta_slot_\\name]
        jmp gated_delta_bind
        "
    };
}

/// `gated_delta_bind`: fills the slot, keeping the argument registers, and jumps to the address in it.
#[cfg(target_arch = "x86_64")]
macro_rules! bind {
    () => {
        "
        push rdi
        push rsi
        push rdx
        push rcx
        push r8
        push r9
        sub rsp, 8
        .cfi_def_cfa_offset 64
        mov rdi, r11
        call {resolve}
        mov r11, rax
        add rsp, 8
        pop r9
        pop r8
        pop rcx
        pop rdx
        pop rsi
        pop rdi
        .cfi_def_cfa_offset 8
        jmp r11
        "
    };
}

/// A forwarder: jumps to the address in its slot or, if the slot is empty, to `gated_delta_bind` with the slot's address.
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "
        adrp x9, .Lgated_delta_slot_\\name
        add x9, x9, :lo12:.Lgated_delta_slot_\\name
        ldar x16, [x9]
        cbz x16, 2f
        br x16
    2:
        b gated_delta_bind
        "
    };
}

/// `gated_delta_bind`: fills the slot, keeping the argument registers, and jumps to the address in it.
#[cfg(target_arch = "aarch64")]
macro_rules! bind {
    () => {
        "
        stp x29, x30, [sp, #-80]!
        .cfi_def_cfa_offset 80
        .cfi_offset x29, -80
        .cfi_offset x30, -72
        stp x0, x1, [sp, #16]
        stp x2, x3, [sp, #32]
        stp x4, x5, [sp, #48]
        stp x6, x7, [sp, #64]
        mov x0, x9
        bl {resolve}
        mov x16, x0
        ldp x0, x1, [sp, #16]
        ldp x2, x3, [sp, #32]
        ldp x4, x5, [sp, #48]
        ldp x6, x7, [sp, #64]
        ldp x29, x30, [sp], #80
        .cfi_restore x29
        .cfi_restore x30
        .cfi_def_cfa_offset 0
        br x16
        "
    };
}

macro_rules! forward {
    ($($name:ident,)*) => {
        global_asm!(
            ".pushsection .text.gated_delta_bind, \"ax\", @progbits",
            ".balign 16",
            ".type gated_delta_bind, @function",
            "gated_delta_bind:",
            ".cfi_startproc",
            bind!(),
            ".cfi_endproc",
            ".size gated_delta_bind, . - gated_delta_bind",
            ".popsection",

            ".macro gated_delta_forward name",
            ".pushsection .data.gated_delta_\\name, \"aw\", @progbits",
            ".balign 8",
            ".Lgated_delta_slot_\\name:",
            ".quad 0",
            ".asciz \"\\name\"",
            ".popsection",
            ".pushsection .text.\\name, \"ax\", @progbits",
            ".balign 16",
            ".weak \\name",
            ".hidden \\name",
            ".type \\name, @function",
            "\\name:",
            ".cfi_startproc",
            jump!(),
            ".cfi_endproc",
            ".size \\name, . - \\name",
            ".popsection",
            ".endm",
            $(concat!("gated_delta_forward ", stringify!($name)),)*
            ".purgem gated_delta_forward",
            resolve = sym resolve,
        );
    };
}

// Every function that cust 0.3.2 calls.
forward! {
    cuArray3DCreate_v2, cuArray3DGetDescriptor_v2, cuArrayDestroy, cuCtxCreate_v2, cuCtxDestroy_v2,
    cuCtxGetApiVersion, cuCtxGetCacheConfig, cuCtxGetCurrent, cuCtxGetDevice, cuCtxGetFlags,
    cuCtxGetLimit, cuCtxGetSharedMemConfig, cuCtxGetStreamPriorityRange, cuCtxPopCurrent_v2,
    cuCtxPushCurrent_v2, cuCtxSetCacheConfig, cuCtxSetCurrent, cuCtxSetLimit,
    cuCtxSetSharedMemConfig, cuCtxSynchronize, cuDestroyExternalMemory, cuDeviceGet,
    cuDeviceGetAttribute, cuDeviceGetCount, cuDeviceGetName, cuDevicePrimaryCtxRelease_v2,
    cuDevicePrimaryCtxReset_v2, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxSetFlags_v2,
    cuDeviceTotalMem_v2, cuDriverGetVersion, cuEventCreate, cuEventDestroy_v2, cuEventElapsedTime,
    cuEventQuery, cuEventRecord, cuEventSynchronize, cuExternalMemoryGetMappedBuffer,
    cuFuncGetAttribute, cuFuncSetCacheConfig, cuFuncSetSharedMemConfig, cuGetErrorString,
    cuGraphAddKernelNode, cuGraphCreate, cuGraphDebugDotPrint, cuGraphDestroy, cuGraphGetEdges,
    cuGraphGetNodes, cuGraphKernelNodeGetParams, cuGraphNodeGetType, cuImportExternalMemory, cuInit,
    cuLaunchHostFunc, cuLaunchKernel, cuLinkAddData_v2, cuLinkComplete, cuLinkCreate_v2,
    cuLinkDestroy, cuMemAdvise, cuMemAllocAsync, cuMemAllocHost_v2, cuMemAllocManaged,
    cuMemAlloc_v2, cuMemFreeAsync, cuMemFreeHost, cuMemFree_v2, cuMemGetInfo_v2, cuMemPrefetchAsync,
    cuMemcpy2D_v2, cuMemcpyAtoH_v2, cuMemcpyDtoDAsync_v2, cuMemcpyDtoD_v2, cuMemcpyDtoHAsync_v2,
    cuMemcpyDtoH_v2, cuMemcpyHtoA_v2, cuMemcpyHtoDAsync_v2, cuMemcpyHtoD_v2, cuMemsetD16Async,
    cuMemsetD16_v2, cuMemsetD32Async, cuMemsetD32_v2, cuMemsetD8Async, cuMemsetD8_v2,
    cuModuleGetFunction, cuModuleGetGlobal_v2, cuModuleLoad, cuModuleLoadData, cuModuleLoadDataEx,
    cuModuleUnload, cuOccupancyAvailableDynamicSMemPerBlock,
    cuOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxPotentialBlockSize,
    cuStreamCreateWithPriority, cuStreamDestroy_v2, cuStreamGetFlags, cuStreamGetPriority,
    cuStreamSynchronize, cuStreamWaitEvent, cuSurfObjectCreate, cuSurfObjectDestroy,
    cuSurfObjectGetResourceDesc, cuTexObjectCreate, cuTexObjectDestroy, cuTexObjectGetResourceDesc,
    cuTexObjectGetResourceViewDesc,
}

//! Stores of the intra-chunk pass's operands: to the workspace, or to the shared memory of the block that uses them.

use crate::device::global::{store_b32, store_b128};
use crate::device::shared::{store_shared_b32, store_shared_b128};

/// Destination of operands.
pub trait Sink: Copy {
    /// The place `bytes` bytes after this one. Stores near it use its address as the base, with constant offsets.
    fn behind(self, bytes: u32) -> Self;
    /// Stores a word `byte` bytes after the base.
    ///
    /// # Safety
    /// The bytes are this thread's to write.
    unsafe fn store_b32(self, byte: u32, word: u32);
    /// Stores 16 bytes `byte` bytes after the base.
    ///
    /// # Safety
    /// The bytes are this thread's to write.
    unsafe fn store_b128(self, byte: u32, words: [u32; 4]);
}

/// The workspace, from this address on.
#[derive(Clone, Copy)]
pub struct GlobalSink(pub u64);

/// Shared memory of the block that uses the operands, from this address on.
#[derive(Clone, Copy)]
pub struct SharedSink(pub u32);

impl Sink for GlobalSink {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn behind(self, bytes: u32) -> Self {
        Self(self.0 + bytes as u64)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_b32(self, byte: u32, word: u32) {
        store_b32(self.0 + byte as u64, word);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_b128(self, byte: u32, words: [u32; 4]) {
        store_b128(self.0 + byte as u64, words);
    }
}

impl Sink for SharedSink {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn behind(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_b32(self, byte: u32, word: u32) {
        store_shared_b32(self.0 + byte, word);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn store_b128(self, byte: u32, words: [u32; 4]) {
        store_shared_b128(self.0 + byte, words);
    }
}

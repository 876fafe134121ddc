//! Matrix products of the scan: by warpgroups on Hopper, by warps on every machine.
//!
//! Both keep rows 16 w .. 16 w + 16 of a matrix in warp w's registers, and operands in shared memory in the same order
//! ([`crate::device::warpgroup`]): a core of 8 · 8 elements is what `ldmatrix` loads.

use crate::device::shared::{load_matrices, load_matrices_transposed};
use crate::device::warp::{lane_id, mma_m16n8k16_f16};
use crate::device::warpgroup::{self, Pending};
use crate::math::each::each;

/// Bytes of a core.
const CORE: u32 = 128;
/// Byte stride in an image of 128 tokens between groups of 8 channels.
const CHANNELS: u32 = 2048;
/// Byte offset in an image of tokens 64 to 127.
const SECOND: u32 = 1024;

/// Parts of the scan that differ between machines. The products are those of [`crate::device::warpgroup`], with the same
/// contracts. A machine without asynchronous products completes them in the call.
pub trait Machine {
    /// The same machine for rows in splits ([`super::super::split`]): a body of its own, so that the other body keeps its
    /// registers. `Self` on a machine that does not support splits.
    type InSplits: Machine;
    /// Whether rows are in splits.
    const SPLITS: bool;
    /// Whether products are by warpgroups, which also trade registers.
    const WARPGROUPS: bool;
    /// Whether blocks that share a head's state form a cluster, for the norm of a chunk of one token.
    const CLUSTERS: bool;
    /// Whether some operands have a buffer apart from the stages ([`super::memory::Apart`]). Products are then complete when their
    /// call returns, so that a buffer is free after it.
    const APART: bool;

    /// [`warpgroup::by_both`]
    ///
    /// # Safety
    /// As for the linked function.
    unsafe fn by_both<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]>;

    /// [`warpgroup::by_first`]
    ///
    /// # Safety
    /// As for the linked function.
    unsafe fn by_first<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]>;

    /// [`warpgroup::only`]
    fn only(products: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2];

    /// [`warpgroup::first`]
    fn first(products: Pending<[[f32; 32]; 2]>) -> ([f32; 32], Pending<[f32; 32]>);

    /// [`warpgroup::by_triangle`]
    ///
    /// # Safety
    /// As for the linked function.
    unsafe fn by_triangle(
        a: &[u32; 16],
        triangle: u32,
        pending: Pending<[f32; 32]>,
    ) -> Pending<[[f32; 32]; 2]>;

    /// [`warpgroup::both`]
    fn both(products: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2];

    /// [`warpgroup::add`]. Calls `read` between the products if they complete in the call: the triangle has been read then.
    ///
    /// # Safety
    /// As for the linked function.
    unsafe fn add<const K: u32, const TOKENS: u32>(
        sums: [f32; 64],
        product: (&[u32; 16], u32),
        d: &mut [f32; 32],
        other: (&[u32; 16], u32),
        read: impl FnOnce(),
    ) -> Pending<[f32; 64]>;

    /// [`warpgroup::add_alone`]
    ///
    /// # Safety
    /// As for the linked function.
    unsafe fn add_alone<const K: u32, const TOKENS: u32>(
        sums: [f32; 64],
        product: (&[u32; 16], u32),
    ) -> Pending<[f32; 64]>;

    /// [`warpgroup::settle`]
    fn settle<const K: u32>(sums: Pending<[f32; 64]>) -> [f32; 64];
}

/// Compute capability 9.0: asynchronous products of warpgroups (`wgmma`).
pub struct Hopper<const SPLITS: bool = false>;

impl<const SPLITS: bool> Machine for Hopper<SPLITS> {
    type InSplits = Hopper<true>;
    const SPLITS: bool = SPLITS;
    const WARPGROUPS: bool = true;
    const CLUSTERS: bool = true;
    const APART: bool = false;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn by_both<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]> {
        warpgroup::by_both::<K>(a, image)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn by_first<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]> {
        warpgroup::by_first::<K>(a, image)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn only(products: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2] {
        warpgroup::only(products)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first(products: Pending<[[f32; 32]; 2]>) -> ([f32; 32], Pending<[f32; 32]>) {
        warpgroup::first(products)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn by_triangle(
        a: &[u32; 16],
        triangle: u32,
        pending: Pending<[f32; 32]>,
    ) -> Pending<[[f32; 32]; 2]> {
        warpgroup::by_triangle(a, triangle, pending)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn both(products: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2] {
        warpgroup::both(products)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn add<const K: u32, const TOKENS: u32>(
        sums: [f32; 64],
        product: (&[u32; 16], u32),
        d: &mut [f32; 32],
        other: (&[u32; 16], u32),
        _: impl FnOnce(),
    ) -> Pending<[f32; 64]> {
        warpgroup::add::<K, TOKENS>(sums, product, d, other)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn add_alone<const K: u32, const TOKENS: u32>(
        sums: [f32; 64],
        product: (&[u32; 16], u32),
    ) -> Pending<[f32; 64]> {
        warpgroup::add_alone::<K, TOKENS>(sums, product)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn settle<const K: u32>(sums: Pending<[f32; 64]>) -> [f32; 64] {
        warpgroup::settle::<K>(sums)
    }
}

/// Compute capability 8.0 and newer: products by warps (`mma.sync`), each complete when its instruction is.
pub struct Portable;

impl Machine for Portable {
    type InSplits = Self;
    const SPLITS: bool = false;
    const WARPGROUPS: bool = false;
    const CLUSTERS: bool = false;
    const APART: bool = true;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn by_both<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]> {
        let mut d = [[0.0; 32]; 2];
        // SAFETY: the caller's promise.
        unsafe {
            by_channels::<K>(a, image, &mut d[0]);
            by_channels::<K>(a, image + SECOND, &mut d[1]);
        }
        warpgroup::pending(d)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn by_first<const K: u32>(a: &[u32; 32], image: u32) -> Pending<[[f32; 32]; 2]> {
        let mut d = [[0.0; 32]; 2];
        // SAFETY: the caller's promise.
        unsafe { by_channels::<K>(a, image, &mut d[0]) };
        warpgroup::pending(d)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn only(products: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2] {
        warpgroup::done(products)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn first(products: Pending<[[f32; 32]; 2]>) -> ([f32; 32], Pending<[f32; 32]>) {
        let [first, second] = warpgroup::done(products);
        (first, warpgroup::pending(second))
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn by_triangle(
        a: &[u32; 16],
        triangle: u32,
        pending: Pending<[f32; 32]>,
    ) -> Pending<[[f32; 32]; 2]> {
        let mut d = [0.0; 32];
        times_triangle::<false>(a, triangle, &mut d);
        warpgroup::pending([d, warpgroup::done(pending)])
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn both(products: Pending<[[f32; 32]; 2]>) -> [[f32; 32]; 2] {
        warpgroup::done(products)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn add<const K: u32, const TOKENS: u32>(
        mut sums: [f32; 64],
        (a, image): (&[u32; 16], u32),
        d: &mut [f32; 32],
        (x, triangle): (&[u32; 16], u32),
        read: impl FnOnce(),
    ) -> Pending<[f32; 64]> {
        // SAFETY: the caller's promise.
        unsafe {
            times_triangle::<true>(x, triangle, d);
            read();
            by_tokens::<K, TOKENS>(a, image, &mut sums);
        }
        warpgroup::pending(sums)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn add_alone<const K: u32, const TOKENS: u32>(
        mut sums: [f32; 64],
        (a, image): (&[u32; 16], u32),
    ) -> Pending<[f32; 64]> {
        // SAFETY: the caller's promise.
        unsafe { by_tokens::<K, TOKENS>(a, image, &mut sums) };
        warpgroup::pending(sums)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn settle<const K: u32>(sums: Pending<[f32; 64]>) -> [f32; 64] {
        warpgroup::done(sums)
    }
}

/// Words 4 i .. 4 i + 4 of a left factor, which are columns 16 i .. 16 i + 16.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn columns(a: &[u32], i: usize) -> [u32; 4] {
    [a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]]
}

/// Adds the product of a left factor and two blocks of 8 columns, `b[0]` and `b[1]`, to sums 8 `j` .. 8 `j` + 8.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn add_two(d: &mut [f32], j: usize, a: [u32; 4], b: [[u32; 2]; 2]) {
    each!(half in 0..2 => {
        let at = 8 * j + 4 * half;
        let sums = [d[at], d[at + 1], d[at + 2], d[at + 3]];
        let sums = mma_m16n8k16_f16(a, b[half], sums);
        each!(i in 0..4 => d[at + i] = sums[i]);
    });
}

/// Adds A Bᵀ to `d`, where A is `[64, K]` and B the 64 tokens of an image from address `tokens` on.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn by_channels<const K: u32>(a: &[u32; 32], tokens: u32, d: &mut [f32; 32]) {
    let (matrix, line) = (lane_id() / 8, lane_id() % 8);
    // Lane address: two blocks of 8 channels, for 8 tokens and for the next 8.
    let lane = tokens + matrix % 2 * CHANNELS + matrix / 2 * CORE + line * 16;
    each!(i in 0..K as usize / 16 => {
        let factor = columns(a, i);
        each!(j in 0..4 => {
            let byte = i as u32 * 2 * CHANNELS + j as u32 * 2 * CORE;
            let [x, y, z, w] = load_matrices(lane + byte);
            add_two(d, j, factor, [[x, y], [z, w]]);
        });
    });
}

/// Adds A B to `d`, where A is `[64, 64]` over s and B a triangle. For [`warpgroup::add`] (`T_IS_ROW`), the tokens t are the
/// cores' rows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn times_triangle<const T_IS_ROW: bool>(a: &[u32; 16], triangle: u32, d: &mut [f32; 32]) {
    // Four cores are contiguous: 16 tokens s, for 8 tokens t and for the next 8.
    let lane = triangle + lane_id() * 16;
    each!(i in 0..4 => {
        let factor = columns(a, i);
        // Blocks with s > t are zero.
        let mut j = i;
        while j < 4 {
            let byte = j as u32 / 2 * 2048 + i as u32 * 1024 + j as u32 % 2 * 4 * CORE;
            // SAFETY: the caller's promise.
            let [x, y, z, w] = unsafe {
                if T_IS_ROW {
                    load_matrices(lane + byte)
                } else {
                    load_matrices_transposed(lane + byte)
                }
            };
            add_two(d, j, factor, [[x, y], [z, w]]);
            j += 1;
        }
    });
}

/// Adds A B to `sums`, where A is `[64, 64]` over tokens and B the first 64 tokens of an image of `TOKENS` tokens and K channels.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn by_tokens<const K: u32, const TOKENS: u32>(
    a: &[u32; 16],
    image: u32,
    sums: &mut [f32; 64],
) {
    let channels = 16 * TOKENS;
    let (matrix, line) = (lane_id() / 8, lane_id() % 8);
    // Lane address: 8 tokens and the next 8, for two blocks of 8 channels.
    let lane = image + matrix % 2 * CORE + matrix / 2 * channels + line * 16;
    each!(i in 0..4 => {
        let factor = columns(a, i);
        each!(j in 0..K as usize / 16 => {
            let byte = i as u32 * 2 * CORE + j as u32 * 2 * channels;
            let [x, y, z, w] = load_matrices_transposed(lane + byte);
            add_two(sums, j, factor, [[x, y], [z, w]]);
        });
    });
}

//! Warpgroup products. All k-steps of one product are in a single `asm!`, with the fence before and the wait after it. Sums that
//! are still in flight then are operands of the next `asm!`, which waits for them. `mod.rs` states what they compute.

use core::arch::asm;

/// `{a}, {b}, …` in braces, of named operands.
macro_rules! list {
    ($first:ident $($rest:ident)*) => {
        concat!("{{{", stringify!($first), "}", $(", {", stringify!($rest), "}",)* "}}")
    };
}

/// Groups of products, one after the other. `apart` is the distance between the operand's cores along the product's columns, in
/// 16 bytes. Each line is `shape [D] accumulates [A] operand + offset / 16, transposed`, with operands `name = array[index]`. The
/// last `pending` groups are still in flight afterwards.
macro_rules! multiply {
    (
        $(group $apart:literal {
            $($shape:literal [$($d:ident)*] $accumulates:literal [$($a:ident)*] $b:ident + $offset:literal $transposed:literal;)*
        })*
        pending $pending:literal
        $(out $out:ident [$($out_name:ident $out_index:literal)*])*
        $(inout $sum:ident [$($sum_name:ident $sum_index:literal)*])*
        $(in $in:ident [$($in_name:ident $in_index:literal)*])*
        $(shared $operand:ident)*
        $(constant $constant:ident $value:expr)?
    ) => {
        // SAFETY: the caller's promise; the kernel must ensure that the whole warpgroup comes here (synccheck).
        unsafe {
            asm!(
                "{{ .reg .pred from_zero, on; .reg .b32 low; .reg .b64 at;",
                "setp.ne.b32 from_zero, 0, 0;",
                "setp.eq.b32 on, 0, 0;",
                "wgmma.fence.sync.aligned;",
                $($(
                    concat!("add.u32 low, {", stringify!($b), "}, ", stringify!($offset), ";"),
                    concat!("mov.b64 at, {{low, ", $apart, "}};"),
                    concat!(
                        "wgmma.mma_async.sync.aligned.", $shape, ".f32.f16.f16 ", list!($($d)*), ", ", list!($($a)*),
                        ", at, ", $accumulates, ", 1, 1, ", stringify!($transposed), ";"
                    ),
                )*
                "wgmma.commit_group.sync.aligned;",)*
                concat!("wgmma.wait_group.sync.aligned ", stringify!($pending), "; }}"),
                concat!("// " $(, list!($($sum_name)*))*),
                $($($out_name = out(reg32) $out[$out_index],)*)*
                $($($sum_name = inout(reg32) $sum[$sum_index],)*)*
                $($($in_name = in(reg32) $in[$in_index],)*)*
                $($operand = in(reg32) $operand,)*
                $($constant = const $value,)?
                options(nostack)
            )
        }
    };
}

/// Waits for all but the `pending` newest groups of products; the operands are the sums of the finished ones.
macro_rules! settle {
    (pending $pending:literal $($sum:ident [$($name:ident $index:literal)*])*) => {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                concat!("wgmma.wait_group.sync.aligned ", stringify!($pending), ";"),
                concat!("// " $(, list!($($name)*))*),
                $($($name = inout(reg32) $sum[$index],)*)*
                options(nostack)
            )
        }
    };
}

/// Defines `by_both` for one K: products of `a` with both halves of an image. Each step of 16 channels is `accumulates, offset of
/// the first half, of the second, words`. Also defines the product with the first half alone.
macro_rules! by_both {
    ($name:ident $first_name:ident $words:literal $($steps:tt)*) => {
        by_both! {
            @lists $name $first_name $words
            [
                d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16 16 d17
                17 d18 18 d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31 31
            ]
            [
                q0 0 q1 1 q2 2 q3 3 q4 4 q5 5 q6 6 q7 7 q8 8 q9 9 q10 10 q11 11 q12 12 q13 13 q14 14 q15 15 q16 16 q17
                17 q18 18 q19 19 q20 20 q21 21 q22 22 q23 23 q24 24 q25 25 q26 26 q27 27 q28 28 q29 29 q30 30 q31 31
            ]
            $($steps)*
        }
    };
    (
        @lists $name:ident $first_name:ident $words:literal [$($d:ident $di:literal)*] [$($q:ident $qi:literal)*]
        $($accumulates:literal $first:literal $second:literal [$($a:ident $ai:literal)*];)*
    ) => {
        by_both! {
            @products $name $first_name $words [$($d)*] [$($q)*] [$($d $di)*] [$($q $qi)*] [$($($a $ai)*)*]
            $($accumulates $first $second [$($a)*];)*
        }
    };
    (
        @products $name:ident $first_name:ident $words:literal $d:tt $q:tt $of_d:tt $of_q:tt $of_a:tt
        $($accumulates:literal $first:literal $second:literal $a:tt;)*
    ) => {
        #[inline(always)]
        unsafe fn $name(a: [u32; $words], b: u32) -> [[f32; 32]; 2] {
            let (mut d, mut q) = ([0.0f32; 32], [0.0f32; 32]);
            multiply! {
                group "8" { $("m64n64k16" $d $accumulates $a b + $first 0;)* }
                group "8" { $("m64n64k16" $q $accumulates $a b + $second 0;)* }
                pending 2
                out d $of_d
                out q $of_q
                in a $of_a
                shared b
            }
            [d, q]
        }

        #[inline(always)]
        unsafe fn $first_name(a: [u32; $words], b: u32) -> [f32; 32] {
            let mut d = [0.0f32; 32];
            multiply! {
                group "8" { $("m64n64k16" $d $accumulates $a b + $first 0;)* }
                pending 1
                out d $of_d
                in a $of_a
                shared b
            }
            d
        }
    };
}

by_both! {
    both_k128 first_k128 32
    "from_zero" 0 64 [a0 0 a1 1 a2 2 a3 3];
    "on" 256 320 [a4 4 a5 5 a6 6 a7 7];
    "on" 512 576 [a8 8 a9 9 a10 10 a11 11];
    "on" 768 832 [a12 12 a13 13 a14 14 a15 15];
    "on" 1024 1088 [a16 16 a17 17 a18 18 a19 19];
    "on" 1280 1344 [a20 20 a21 21 a22 22 a23 23];
    "on" 1536 1600 [a24 24 a25 25 a26 26 a27 27];
    "on" 1792 1856 [a28 28 a29 29 a30 30 a31 31];
}

by_both! {
    both_k96 first_k96 24
    "from_zero" 0 64 [a0 0 a1 1 a2 2 a3 3];
    "on" 256 320 [a4 4 a5 5 a6 6 a7 7];
    "on" 512 576 [a8 8 a9 9 a10 10 a11 11];
    "on" 768 832 [a12 12 a13 13 a14 14 a15 15];
    "on" 1024 1088 [a16 16 a17 17 a18 18 a19 19];
    "on" 1280 1344 [a20 20 a21 21 a22 22 a23 23];
}

by_both! {
    both_k64 first_k64 16
    "from_zero" 0 64 [a0 0 a1 1 a2 2 a3 3];
    "on" 256 320 [a4 4 a5 5 a6 6 a7 7];
    "on" 512 576 [a8 8 a9 9 a10 10 a11 11];
    "on" 768 832 [a12 12 a13 13 a14 14 a15 15];
}

#[inline(always)]
#[rustfmt::skip]
unsafe fn multiply_triangle(a: [u32; 16], b: u32) -> [f32; 32] {
    let mut d = [0.0f32; 32];
    multiply! {
        group "16" {
        "m64n32k16" [d0 d1 d2 d3 d4 d5 d6 d7 d8 d9 d10 d11 d12 d13 d14 d15] "from_zero" [a0 a1 a2 a3] b + 0 1;
        "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "from_zero" [a0 a1 a2 a3]
        b + 128 1;
        "m64n32k16" [d0 d1 d2 d3 d4 d5 d6 d7 d8 d9 d10 d11 d12 d13 d14 d15] "on" [a4 a5 a6 a7] b + 64 1;
        "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "on" [a4 a5 a6 a7] b + 192
        1;
        "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "on" [a8 a9 a10 a11] b +
        256 1;
        "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "on" [a12 a13 a14 a15] b +
        320 1;
        }
        pending 2
        out d [d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16
        16 d17 17 d18 18 d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31
        31]
        in a [a0 0 a1 1 a2 2 a3 3 a4 4 a5 5 a6 6 a7 7 a8 8 a9 9 a10 10 a11 11 a12 12 a13 13 a14 14 a15 15]
        shared b
    }
    d
}

/// Defines, for one K: the product of tokens with an image, added to `sums`, with and without a product with a triangle; and the
/// wait after which no product is in flight.
macro_rules! accumulate {
    ($name:ident $alone:ident $settle:ident $count:literal $shape:literal [$($s:ident $i:literal)*]) => {
        accumulate! { @products $name $alone $settle $count $shape [$($s)*] [$($s $i)*] }
    };
    (@products $name:ident $alone:ident $settle:ident $count:literal $shape:literal $s:tt $of_s:tt) => {
        #[inline(always)]
        unsafe fn $name<const TOKENS: u32>(
            sums: &mut [f32; $count],
            (a, b): ([u32; 16], u32),
            d: &mut [f32; 32],
            (x, triangle): ([u32; 16], u32),
        ) {
            multiply! {
                group "16" {
                "m64n32k16" [d0 d1 d2 d3 d4 d5 d6 d7 d8 d9 d10 d11 d12 d13 d14 d15] "on" [x0 x1 x2 x3] triangle + 0 0;
                "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "on" [x0 x1 x2 x3]
                triangle + 128 0;
                "m64n32k16" [d0 d1 d2 d3 d4 d5 d6 d7 d8 d9 d10 d11 d12 d13 d14 d15] "on" [x4 x5 x6 x7] triangle + 64 0;
                "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "on" [x4 x5 x6 x7]
                triangle + 192 0;
                "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "on" [x8 x9 x10 x11]
                triangle + 256 0;
                "m64n32k16" [d16 d17 d18 d19 d20 d21 d22 d23 d24 d25 d26 d27 d28 d29 d30 d31] "on" [x12 x13 x14 x15]
                triangle + 320 0;
                }
                group "{apart}" {
                    $shape $s "on" [a0 a1 a2 a3] b + 0 1;
                    $shape $s "on" [a4 a5 a6 a7] b + 16 1;
                    $shape $s "on" [a8 a9 a10 a11] b + 32 1;
                    $shape $s "on" [a12 a13 a14 a15] b + 48 1;
                }
                pending 1
                inout sums $of_s
                inout d [d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16
                16 d17 17 d18 18 d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31
                31]
                in a [a0 0 a1 1 a2 2 a3 3 a4 4 a5 5 a6 6 a7 7 a8 8 a9 9 a10 10 a11 11 a12 12 a13 13 a14 14 a15 15]
                in x [x0 0 x1 1 x2 2 x3 3 x4 4 x5 5 x6 6 x7 7 x8 8 x9 9 x10 10 x11 11 x12 12 x13 13 x14 14 x15 15]
                shared b shared triangle
                constant apart TOKENS
            }
        }

        #[inline(always)]
        unsafe fn $alone<const TOKENS: u32>(sums: &mut [f32; $count], (a, b): ([u32; 16], u32)) {
            multiply! {
                group "{apart}" {
                    $shape $s "on" [a0 a1 a2 a3] b + 0 1;
                    $shape $s "on" [a4 a5 a6 a7] b + 16 1;
                    $shape $s "on" [a8 a9 a10 a11] b + 32 1;
                    $shape $s "on" [a12 a13 a14 a15] b + 48 1;
                }
                pending 1
                inout sums $of_s
                in a [a0 0 a1 1 a2 2 a3 3 a4 4 a5 5 a6 6 a7 7 a8 8 a9 9 a10 10 a11 11 a12 12 a13 13 a14 14 a15 15]
                shared b
                constant apart TOKENS
            }
        }

        #[inline(always)]
        unsafe fn $settle(sums: &mut [f32; $count]) {
            settle! { pending 0 sums $of_s }
        }
    };
}

accumulate! {
    accumulate_k128 add_k128 settle_k128 64 "m64n128k16" [
        s0 0 s1 1 s2 2 s3 3 s4 4 s5 5 s6 6 s7 7 s8 8 s9 9 s10 10 s11 11 s12 12 s13 13 s14 14 s15 15 s16 16 s17 17 s18
        18 s19 19 s20 20 s21 21 s22 22 s23 23 s24 24 s25 25 s26 26 s27 27 s28 28 s29 29 s30 30 s31 31 s32 32 s33 33
        s34 34 s35 35 s36 36 s37 37 s38 38 s39 39 s40 40 s41 41 s42 42 s43 43 s44 44 s45 45 s46 46 s47 47 s48 48 s49
        49 s50 50 s51 51 s52 52 s53 53 s54 54 s55 55 s56 56 s57 57 s58 58 s59 59 s60 60 s61 61 s62 62 s63 63
    ]
}

accumulate! {
    accumulate_k96 add_k96 settle_k96 48 "m64n96k16" [
        s0 0 s1 1 s2 2 s3 3 s4 4 s5 5 s6 6 s7 7 s8 8 s9 9 s10 10 s11 11 s12 12 s13 13 s14 14 s15 15 s16 16 s17 17 s18
        18 s19 19 s20 20 s21 21 s22 22 s23 23 s24 24 s25 25 s26 26 s27 27 s28 28 s29 29 s30 30 s31 31 s32 32 s33 33
        s34 34 s35 35 s36 36 s37 37 s38 38 s39 39 s40 40 s41 41 s42 42 s43 43 s44 44 s45 45 s46 46 s47 47
    ]
}

accumulate! {
    accumulate_k64 add_k64 settle_k64 32 "m64n64k16" [
        s0 0 s1 1 s2 2 s3 3 s4 4 s5 5 s6 6 s7 7 s8 8 s9 9 s10 10 s11 11 s12 12 s13 13 s14 14 s15 15 s16 16 s17 17 s18
        18 s19 19 s20 20 s21 21 s22 22 s23 23 s24 24 s25 25 s26 26 s27 27 s28 28 s29 29 s30 30 s31 31
    ]
}

/// Waits until no product is in flight.
#[inline(always)]
#[rustfmt::skip]
unsafe fn settle_two(d: &mut [f32; 32], q: &mut [f32; 32]) {
    settle! {
        pending 0
        d [d0 0 d1 1 d2 2 d3 3 d4 4 d5 5 d6 6 d7 7 d8 8 d9 9 d10 10 d11 11 d12 12 d13 13 d14 14 d15 15 d16
        16 d17 17 d18 18 d19 19 d20 20 d21 21 d22 22 d23 23 d24 24 d25 25 d26 26 d27 27 d28 28 d29 29 d30 30 d31
        31]
        q [q0 0 q1 1 q2 2 q3 3 q4 4 q5 5 q6 6 q7 7 q8 8 q9 9 q10 10 q11 11 q12 12 q13 13 q14 14 q15 15 q16
        16 q17 17 q18 18 q19 19 q20 20 q21 21 q22 22 q23 23 q24 24 q25 25 q26 26 q27 27 q28 28 q29 29 q30 30 q31
        31]
    }
}

/// Waits until only one group of products is in flight.
#[inline(always)]
#[rustfmt::skip]
unsafe fn settle_first(sums: &mut [f32; 32]) {
    settle! {
        pending 1
        sums [s0 0 s1 1 s2 2 s3 3 s4 4 s5 5 s6 6 s7 7 s8 8 s9 9 s10 10 s11 11 s12 12 s13 13 s14 14 s15 15
        s16 16 s17 17 s18 18 s19 19 s20 20 s21 21 s22 22 s23 23 s24 24 s25 25 s26 26 s27 27 s28 28 s29 29 s30 30
        s31 31]
    }
}

/// The low word of a matrix descriptor: core matrices of 128 bytes without swizzle, `along_sum` bytes between neighbours along
/// the summed dimension. The high word is the distance along the product's columns, in units of 16 bytes: a literal in the
/// `asm!`, so that one register of each step can be a uniform one.
#[inline(always)]
fn operand(address: u32, along_sum: u32) -> u32 {
    address >> 4 & 0x3fff | along_sum << 12
}

/// The first N elements of `a`.
#[inline(always)]
fn first<T: Copy + Default, const M: usize, const N: usize>(a: &[T; M]) -> [T; N] {
    let mut first = [T::default(); N];
    let mut i = 0;
    while i < N {
        first[i] = a[i];
        i += 1;
    }
    first
}

/// Copies `own` to the first N elements of `all`.
#[inline(always)]
fn put_first<const N: usize>(all: &mut [f32; 64], own: [f32; N]) {
    let mut i = 0;
    while i < N {
        all[i] = own[i];
        i += 1;
    }
}

#[inline(always)]
pub unsafe fn warpgroup_by_both<const K: u32>(a: &[u32; 32], image: u32) -> [[f32; 32]; 2] {
    let image = operand(image, 2048);
    // SAFETY: the caller's promise.
    unsafe {
        match K {
            128 => both_k128(*a, image),
            96 => both_k96(first(a), image),
            _ => both_k64(first(a), image),
        }
    }
}

#[inline(always)]
pub unsafe fn warpgroup_by_first<const K: u32>(a: &[u32; 32], image: u32) -> [f32; 32] {
    let image = operand(image, 2048);
    // SAFETY: the caller's promise.
    unsafe {
        match K {
            128 => first_k128(*a, image),
            96 => first_k96(first(a), image),
            _ => first_k64(first(a), image),
        }
    }
}

#[inline(always)]
pub fn warpgroup_settle_only(sums: &mut [f32; 32]) {
    // SAFETY: all threads of the group come, as they have to the products.
    unsafe { settle_k64(sums) }
}

#[inline(always)]
pub fn warpgroup_settle_first(sums: &mut [f32; 32]) {
    // SAFETY: all threads of the group come, as they have to the products.
    unsafe { settle_first(sums) }
}

#[inline(always)]
pub unsafe fn warpgroup_by_triangle(a: &[u32; 16], triangle: u32) -> [f32; 32] {
    // SAFETY: the caller's promise.
    unsafe { multiply_triangle(*a, operand(triangle, 128)) }
}

#[inline(always)]
pub fn warpgroup_settle_two([first, second]: &mut [[f32; 32]; 2]) {
    // SAFETY: all threads of the group come, as they have to the products.
    unsafe { settle_two(first, second) }
}

#[inline(always)]
pub unsafe fn warpgroup_add<const K: u32, const TOKENS: u32>(
    sums: &mut [f32; 64],
    (a, image): (&[u32; 16], u32),
    d: &mut [f32; 32],
    (x, triangle): (&[u32; 16], u32),
) {
    let (b, triangle) = ((*a, operand(image, 128)), (*x, operand(triangle, 128)));
    // SAFETY: the caller's promise.
    unsafe {
        match K {
            128 => accumulate_k128::<TOKENS>(sums, b, d, triangle),
            96 => {
                let mut own = first(sums);
                accumulate_k96::<TOKENS>(&mut own, b, d, triangle);
                put_first(sums, own);
            }
            _ => {
                let mut own = first(sums);
                accumulate_k64::<TOKENS>(&mut own, b, d, triangle);
                put_first(sums, own);
            }
        }
    }
}

#[inline(always)]
pub unsafe fn warpgroup_add_alone<const K: u32, const TOKENS: u32>(
    sums: &mut [f32; 64],
    (a, image): (&[u32; 16], u32),
) {
    let b = (*a, operand(image, 128));
    // SAFETY: the caller's promise.
    unsafe {
        match K {
            128 => add_k128::<TOKENS>(sums, b),
            96 => {
                let mut own = first(sums);
                add_k96::<TOKENS>(&mut own, b);
                put_first(sums, own);
            }
            _ => {
                let mut own = first(sums);
                add_k64::<TOKENS>(&mut own, b);
                put_first(sums, own);
            }
        }
    }
}

#[inline(always)]
pub fn warpgroup_settle<const K: u32>(sums: &mut [f32; 64]) {
    // SAFETY: all threads of the group come, as they have to the product.
    unsafe {
        match K {
            128 => settle_k128(sums),
            96 => {
                let mut own = first(sums);
                settle_k96(&mut own);
                put_first(sums, own);
            }
            _ => {
                let mut own = first(sums);
                settle_k64(&mut own);
                put_first(sums, own);
            }
        }
    }
}

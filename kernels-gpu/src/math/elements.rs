//! Loads and stores of bf16, f16 and f32 elements whose type is a load-time constant.

use crate::constants::Element;
use crate::device::{float, global};
use crate::math::each::each;
use crate::math::range::LARGE;

/// `N` consecutive elements as they lie in memory: 16-bit ones two to a word. Conversion is separate, so that a kernel can issue
/// every load before it waits for any.
#[derive(Clone, Copy)]
pub struct Raw<const N: usize>(pub [u32; N]);

/// Bytes of an element.
#[inline(always)]
pub const fn bytes_of(element: u32) -> u32 {
    if element == Element::F32 as u32 { 4 } else { 2 }
}

impl<const N: usize> Raw<N> {
    /// Loads `COUNT` (1, 2, 4 or 8) elements into elements `first..first + COUNT` of `self`.
    ///
    /// `wide`: the address is a multiple of 16 bytes, or of the bytes loaded where those are fewer.
    ///
    /// # Safety
    /// The elements are in global memory, naturally aligned, and nobody writes them during the launch.
    #[inline(always)]
    pub unsafe fn load<const COUNT: usize>(
        &mut self,
        first: usize,
        address: u64,
        element: u32,
        wide: bool,
    ) {
        // SAFETY: the caller's promise; each branch covers exactly the COUNT elements.
        unsafe {
            if element == Element::F32 as u32 {
                if wide {
                    self.load_words::<COUNT>(first, address);
                } else {
                    each!(i in 0..COUNT => {
                        self.0[first + i] = global::load_b32(address + 4 * i as u64);
                    });
                }
            } else if wide && COUNT > 1 {
                match COUNT {
                    2 => self.load_words::<1>(first / 2, address),
                    4 => self.load_words::<2>(first / 2, address),
                    _ => self.load_words::<4>(first / 2, address),
                }
            } else {
                each!(i in 0..COUNT => {
                    let bits = global::load_b16(address + 2 * i as u64) as u32;
                    let word = (first + i) / 2;
                    self.0[word] = if (first + i).is_multiple_of(2) {
                        bits
                    } else {
                        self.0[word] | (bits << 16)
                    };
                });
            }
        }
    }

    /// Loads `WORDS` words (1, 2, 4 or 8), in accesses of up to 16 bytes.
    #[inline(always)]
    unsafe fn load_words<const WORDS: usize>(&mut self, start: usize, address: u64) {
        match WORDS {
            1 => self.0[start] = global::load_b32(address),
            2 => [self.0[start], self.0[start + 1]] = global::load_b64(address),
            _ => {
                let mut i = 0;
                while i < WORDS {
                    [
                        self.0[start + i],
                        self.0[start + i + 1],
                        self.0[start + i + 2],
                        self.0[start + i + 3],
                    ] = global::load_b128(address + 4 * i as u64);
                    i += 4;
                }
            }
        }
    }

    /// Converts the elements to f32.
    #[inline(always)]
    pub fn to_f32(self, element: u32) -> [f32; N] {
        let mut values = [0.0; N];
        each!(i in 0..N => {
            let half = (self.0[i / 2] >> (16 * (i % 2))) as u16;
            values[i] = if element == Element::F32 as u32 {
                f32::from_bits(self.0[i])
            } else if element == Element::Bf16 as u32 {
                bf16_to_f32(half)
            } else {
                float::f16_to_f32(half)
            };
        });
        values
    }
}

impl<const N: usize> Raw<N> {
    /// Whether an element is at least [`LARGE`] in magnitude, or not finite. Never true for f16.
    #[inline(always)]
    pub fn is_large(self, element: u32) -> bool {
        let large = LARGE.to_bits();
        // Tests two bf16 in one addition: a large one carries into its sign bit.
        let (sizes, carry) = if element == Element::F32 as u32 {
            (0x7fff_ffff, (1 << 31) - large)
        } else {
            (0x7fff_7fff, (1 << 31 | 1 << 15) - (large | large >> 16))
        };
        let words = if element == Element::F32 as u32 {
            N
        } else {
            N.div_ceil(2)
        };
        let mut carried = 0;
        each!(i in 0..N => {
            if i < words {
                carried |= (self.0[i] & sizes) + carry;
            }
        });
        element != Element::F16 as u32 && carried & !sizes != 0
    }

    /// The elements times a power of two, in the same format. f16 stays unchanged.
    #[inline(always)]
    pub fn times(mut self, power: f32, element: u32) -> Self {
        let values = self.to_f32(element);
        each!(i in 0..N => {
            if element == Element::F32 as u32 {
                self.0[i] = (values[i] * power).to_bits();
            } else if element == Element::Bf16 as u32 && i % 2 == 0 {
                let next = if i + 1 < N { values[i + 1] } else { 0.0 };
                self.0[i / 2] = float::pack_bf16x2(values[i] * power, next * power);
            }
        });
        self
    }
}

/// A bf16 is the upper half of an f32.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `N` (1, 2, 4 or 8) consecutive elements.
///
/// # Safety
/// As for [`Raw::load`].
#[inline(always)]
pub unsafe fn load<const N: usize>(address: u64, element: u32, wide: bool) -> Raw<N> {
    let mut raw = Raw([0; N]);
    raw.load::<N>(0, address, element, wide);
    raw
}

/// One element.
///
/// # Safety
/// As for [`Raw::load`].
#[inline(always)]
pub unsafe fn load_one(address: u64, element: u32) -> Raw<1> {
    load::<1>(address, element, false)
}

/// Stores `N` (1, 2, 4 or 8) consecutive values, rounded to nearest even.
///
/// `wide`: the address is a multiple of 16 bytes, or of the bytes stored where those are fewer.
///
/// # Safety
/// The elements are in global memory, naturally aligned, and this thread's to write.
#[inline(always)]
pub unsafe fn store<const N: usize>(values: [f32; N], address: u64, element: u32, wide: bool) {
    let mut words = [0; N];
    each!(i in 0..N => {
        if element == Element::F32 as u32 {
            words[i] = values[i].to_bits();
        } else if i % 2 == 0 {
            let next = if i + 1 < N { values[i + 1] } else { 0.0 };
            words[i / 2] = if element == Element::Bf16 as u32 {
                float::pack_bf16x2(values[i], next)
            } else {
                float::pack_f16x2(values[i], next)
            };
        }
    });
    let mut i = 0;
    // SAFETY: the caller's promise; each branch covers exactly the N elements.
    unsafe {
        if element == Element::F32 as u32 {
            if wide {
                store_words(words, N, address);
            } else {
                while i < N {
                    global::store_b32(address + 4 * i as u64, words[i]);
                    i += 1;
                }
            }
        } else if wide && N > 1 {
            store_words(words, N / 2, address);
        } else {
            while i < N {
                global::store_b16(
                    address + 2 * i as u64,
                    (words[i / 2] >> (16 * (i % 2))) as u16,
                );
                i += 1;
            }
        }
    }
}

/// Stores the first `count` words (1, 2, 4 or 8) in accesses of up to 16 bytes.
#[inline(always)]
unsafe fn store_words<const N: usize>(words: [u32; N], count: usize, address: u64) {
    match count {
        1 => global::store_b32(address, words[0]),
        2 => global::store_b64(address, [words[0], words[1]]),
        _ => {
            let mut i = 0;
            while i < count {
                global::store_b128(
                    address + 4 * i as u64,
                    [words[i], words[i + 1], words[i + 2], words[i + 3]],
                );
                i += 4;
            }
        }
    }
}

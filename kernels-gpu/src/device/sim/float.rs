//! The arithmetic of the facade. The approximations flush denormals as the GPU does.

use half::{bf16, f16};

pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

pub fn minimum(a: f32, b: f32) -> f32 {
    number(a.min(b), a, b)
}

pub fn maximum(a: f32, b: f32) -> f32 {
    number(a.max(b), a, b)
}

pub fn exp2(x: f32) -> f32 {
    flush(flush(x).exp2())
}

pub fn log2(x: f32) -> f32 {
    flush(x).log2()
}

pub fn reciprocal(x: f32) -> f32 {
    flush(1.0 / flush(x))
}

pub fn rsqrt(x: f32) -> f32 {
    (1.0 / f64::from(flush(x)).sqrt()) as f32
}

pub fn pack_bf16x2(low: f32, high: f32) -> u32 {
    pack(low, high, |x| bf16::from_f32(x).to_bits())
}

pub fn pack_f16x2(low: f32, high: f32) -> u32 {
    pack(low, high, |x| f16::from_f32(x).to_bits())
}

pub fn pack_b16x2(low: f32, high: f32, is_f16: bool) -> u32 {
    if is_f16 {
        let most = f16::MAX.to_f32();
        pack_f16x2(low.clamp(-most, most), high.clamp(-most, most))
    } else {
        pack_bf16x2(low, high)
    }
}

#[inline]
pub fn b16x2_to_f32(word: u32, is_f16: bool) -> [f32; 2] {
    if is_f16 {
        [f16_to_f32(word as u16), f16_to_f32((word >> 16) as u16)]
    } else {
        // A bf16 is the upper half of an f32.
        [
            f32::from_bits(word << 16),
            f32::from_bits(word & 0xffff_0000),
        ]
    }
}

pub fn multiply_f16x2(a: u32, b: u32) -> u32 {
    // The product is exact in f32.
    let half = |shift: u32| f16_to_f32((a >> shift) as u16) * f16_to_f32((b >> shift) as u16);
    pack_f16x2(half(0), half(16))
}

pub fn add_f16x2(a: u32, b: u32) -> u32 {
    const ONES: u32 = 0x3c00_3c00;
    fma_f16x2(a, ONES, b)
}

pub fn fma_f16x2(a: u32, b: u32, c: u32) -> u32 {
    // The product is exact in f64. The sum is exact too, except when a term is below half a unit of an f16's last place.
    let half = |shift: u32| {
        let [a, b, c] = [a, b, c].map(|x| f64::from(f16_to_f32((x >> shift) as u16)));
        let sum = f16::from_f64(a * b + c);
        u32::from(if sum.is_nan() { 0x7fff } else { sum.to_bits() })
    };
    half(0) | half(16) << 16
}

pub fn larger_f16x2(a: u32, b: u32) -> u32 {
    const INFINITE: u32 = 0x7c00;
    const NAN: u32 = 0x7fff;
    let half = |shift: u32| {
        let larger = (a >> shift & NAN).max(b >> shift & NAN);
        if larger > INFINITE { NAN } else { larger }
    };
    half(0) | half(16) << 16
}

/// A shift and a product: they vectorize, unlike the branches of `half`.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    const INFINITE: u32 = 0x7c00 << 13;
    const TWO_TO_112: f32 = f32::from_bits((127 + 112) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // The exponent bias of f32 is larger by 112; this holds for denormal f16, too.
    let scaled = (f32::from_bits(magnitude) * TWO_TO_112).to_bits();
    let infinite = if magnitude >= INFINITE {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(sign | scaled | infinite)
}

/// `value`, unless `a` or `b` is NaN: then the GPU's canonical NaN.
fn number(value: f32, a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        f32::from_bits(0x7fff_ffff)
    } else {
        value
    }
}

/// Replaces a denormal by a zero of its sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() {
        0.0_f32.copysign(x)
    } else {
        x
    }
}

/// Packs two rounded values; every NaN becomes 0x7fff, as on the GPU.
fn pack(low: f32, high: f32, round: impl Fn(f32) -> u16) -> u32 {
    let bits = |x: f32| u32::from(if x.is_nan() { 0x7fff } else { round(x) });
    bits(high) << 16 | bits(low)
}

//! Powers of two that bring values into the range of f16.

/// 2⁻ᵉ and 2ᵉ, for the root of `square`, which is between 2^(e − 1) and 2^e.
#[inline(always)]
pub fn of_root(square: f32) -> [f32; 2] {
    let e = ((square.to_bits() >> 23 & 255) + 129) / 2;
    [f32::from_bits((254 - e) << 23), f32::from_bits(e << 23)]
}

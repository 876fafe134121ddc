//! Powers of two: those that bring values into the range of f16, and those that load-time constants often are.

/// 2⁻ᵉ and 2ᵉ, for the root of `square`, which is between 2^(e − 1) and 2^e.
#[inline(always)]
pub fn of_root(square: f32) -> [f32; 2] {
    of_exponent(((square.to_bits() >> 23 & 255) + 129) / 2)
}

/// 2¹²⁷⁻ᵉ and 2ᵉ⁻¹²⁷, of an exponent as an f32 has it, from 1 to 253.
#[inline(always)]
pub fn of_exponent(e: u32) -> [f32; 2] {
    [f32::from_bits((254 - e) << 23), f32::from_bits(e << 23)]
}

/// x / by and x % by, with a load-time constant. The assembler knows it and folds the choice, but makes no shift of a
/// division, which it does not recognise any more.
#[inline(always)]
pub fn divided(x: u32, by: u32) -> (u32, u32) {
    if by.is_power_of_two() {
        (x >> by.trailing_zeros(), x & (by - 1))
    } else {
        (x / by, x % by)
    }
}

/// [`divided`], of 64 bits.
#[inline(always)]
pub fn divided_long(x: u64, by: u32) -> (u64, u64) {
    if by.is_power_of_two() {
        (x >> by.trailing_zeros(), x & (by as u64 - 1))
    } else {
        (x / by as u64, x % by as u64)
    }
}

//! Powers of two: factors that bring values into the range of f16, and division by load-time constants, which often are powers of
//! two.

/// 2⁻ᵉ and 2ᵉ such that the root of `square` is between 2^(e − 1) and 2^e.
#[inline(always)]
pub fn of_root(square: f32) -> [f32; 2] {
    of_exponent(((square.to_bits() >> 23 & 255) + 129) / 2)
}

/// 2¹²⁷⁻ᵉ and 2ᵉ⁻¹²⁷, for a biased f32 exponent e from 1 to 253.
#[inline(always)]
pub fn of_exponent(e: u32) -> [f32; 2] {
    [f32::from_bits((254 - e) << 23), f32::from_bits(e << 23)]
}

/// x / by and x % by for a load-time constant. The assembler knows `by` and removes the branch, but it does not itself turn the
/// division into a shift, because it no longer recognises it as a division.
#[inline(always)]
pub fn divided(x: u32, by: u32) -> (u32, u32) {
    if by.is_power_of_two() {
        (x >> by.trailing_zeros(), x & (by - 1))
    } else {
        (x / by, x % by)
    }
}

/// [`divided`] for 64 bits.
#[inline(always)]
pub fn divided_long(x: u64, by: u32) -> (u64, u64) {
    if by.is_power_of_two() {
        (x >> by.trailing_zeros(), x & (by as u64 - 1))
    } else {
        (x / by as u64, x % by as u64)
    }
}

//! Collectives of a warp on matrices whose elements are distributed over its lanes.

use super::block::{LANES, Words};
use super::float::b16x2_to_f32;
use crate::device::shapes::Element;

/// A lane's operands of a multiplication.
pub fn fragments(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> Words {
    let mut words = Words::default();
    words[..4].copy_from_slice(&a);
    words[4..6].copy_from_slice(&b);
    words[6..10].copy_from_slice(bytemuck::cast_slice(&c));
    words
}

/// D of each lane, from the [`fragments`] of all.
///
/// Sums are in increasing order of k. Each product of two 16-bit elements is exact within the exponent range of f32: it has at
/// most 22 significant bits.
pub fn multiply(brought: &[Words; LANES], of: Element) -> [Words; LANES] {
    let elements = |word: u32| b16x2_to_f32(word, of == Element::F16);
    let mut a = [[0.0; 16]; 16];
    let mut b = [[0.0; 16]; 8];
    for (lane, words) in brought.iter().enumerate() {
        let (row, k) = (lane / 4, lane % 4 * 2);
        for (i, &word) in words[..4].iter().enumerate() {
            let at = k + i / 2 * 8;
            a[row + i % 2 * 8][at..at + 2].copy_from_slice(&elements(word));
        }
        for (i, &word) in words[4..6].iter().enumerate() {
            let at = k + i * 8;
            b[row][at..at + 2].copy_from_slice(&elements(word));
        }
    }
    let mut d = [Words::default(); LANES];
    for (lane, d) in d.iter_mut().enumerate() {
        for (i, d) in d[..4].iter_mut().enumerate() {
            let (row, column) = (&a[lane / 4 + i / 2 * 8], &b[lane % 4 * 2 + i % 2]);
            let mut sum = f32::from_bits(brought[lane][6 + i]);
            for (k, a) in row.iter().enumerate() {
                sum += a * column[k];
            }
            *d = sum.to_bits();
        }
    }
    d
}

fn half_of(word: u32, index: usize) -> u16 {
    (word >> (index % 2 * 16)) as u16
}

/// The row that `lane` stores, of a matrix of which each lane holds two elements of a column.
#[inline]
pub fn stored_rows(lane: usize, brought: &[Words; LANES]) -> Words {
    let (matrix, row) = (lane / 8, lane % 8);
    let element = |column: usize| half_of(brought[4 * column + row / 2][matrix], row);
    of_matrices(|i| u32::from(element(2 * i + 1)) << 16 | u32::from(element(2 * i)))
}

/// `lane`'s fragments of four matrices, from the rows that the lanes loaded.
#[inline]
pub fn rows(lane: usize, loaded: &[Words; LANES]) -> Words {
    of_matrices(|matrix| loaded[8 * matrix + lane / 4][lane % 4])
}

/// [`rows`] of the transposed matrices.
#[inline]
pub fn columns(lane: usize, loaded: &[Words; LANES]) -> Words {
    of_matrices(|matrix| {
        let half = |i: usize| {
            let row = &loaded[8 * matrix + lane % 4 * 2 + i];
            u32::from(half_of(row[lane / 4 / 2], lane / 4))
        };
        half(1) << 16 | half(0)
    })
}

#[inline]
fn of_matrices(word: impl Fn(usize) -> u32) -> Words {
    let mut words = Words::default();
    for (i, of_matrix) in words[..4].iter_mut().enumerate() {
        *of_matrix = word(i);
    }
    words
}

//! What a warp makes of matrices whose elements are spread over its lanes.

use std::array;

use super::block::{LANES, Words};
use super::float::b16x2_to_f32;
use crate::constants::Element;

/// What a lane brings to a multiplication.
pub fn fragments(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> Words {
    let mut words = Words::default();
    words[..4].copy_from_slice(&a);
    words[4..6].copy_from_slice(&b);
    words[6..10].copy_from_slice(&c.map(f32::to_bits));
    words
}

/// D of each lane, from the [`fragments`] of all.
///
/// Sums go up in k, each product exact where f32 has its exponent: of two elements of 16 bits it has at most 22.
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
    array::from_fn(|lane| {
        let mut d = Words::default();
        for (i, d) in d.iter_mut().take(4).enumerate() {
            let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            let c = f32::from_bits(brought[lane][6 + i]);
            let products = a[row].iter().zip(&b[column]).map(|(a, b)| a * b);
            *d = products.fold(c, |sum, product| sum + product).to_bits();
        }
        d
    })
}

fn half_of(word: u32, index: usize) -> u16 {
    (word >> (index % 2 * 16)) as u16
}

/// What `lane` stores, a row of a matrix of which each lane brought two elements of a column.
pub fn stored_rows(lane: usize, brought: &[Words; LANES]) -> Words {
    let (matrix, row) = (lane / 8, lane % 8);
    let element = |column: usize| half_of(brought[4 * column + row / 2][matrix], row);
    of_matrices(|i| u32::from(element(2 * i + 1)) << 16 | u32::from(element(2 * i)))
}

/// The 16 columns of rows r and r + 8 of a left factor, two to a word, from the words that the lanes brought.
pub fn left_rows(lane: usize, brought: &[Words; LANES]) -> Words {
    array::from_fn(|i| brought[lane / 4 * 4 + i % 4][i / 8 + i % 8 / 4 * 2])
}

/// What `lane` gets of four matrices, from the rows that the lanes loaded.
pub fn rows(lane: usize, loaded: &[Words; LANES]) -> Words {
    of_matrices(|matrix| loaded[8 * matrix + lane / 4][lane % 4])
}

/// [`rows`] of the transposed matrices.
pub fn columns(lane: usize, loaded: &[Words; LANES]) -> Words {
    of_matrices(|matrix| {
        let [low, high] = [0, 1].map(|i| {
            let row = &loaded[8 * matrix + lane % 4 * 2 + i];
            u32::from(half_of(row[lane / 4 / 2], lane / 4))
        });
        high << 16 | low
    })
}

fn of_matrices(word: impl Fn(usize) -> u32) -> Words {
    array::from_fn(|i| if i < 4 { word(i) } else { 0 })
}

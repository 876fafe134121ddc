//! What a warp makes of matrices whose elements are spread over its lanes.

use std::array;

use half::{bf16, f16};

use super::block::{LANES, Words};
use super::float::fma;
use crate::constants::Element;

/// What a lane brings to a multiplication.
pub fn fragments(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> Words {
    let mut words = Words::default();
    words[..4].copy_from_slice(&a);
    words[4..6].copy_from_slice(&b);
    words[6..10].copy_from_slice(&c.map(f32::to_bits));
    words
}

/// D of `lane`, from the [`fragments`] of all.
pub fn multiply(lane: usize, brought: &[Words; LANES], of: Element) -> Words {
    let mut d = Words::default();
    for (i, d) in d.iter_mut().take(4).enumerate() {
        let (row, column) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
        let c = f32::from_bits(brought[lane][6 + i]);
        let sum = (0..16).fold(c, |sum, k| {
            let a = &brought[row % 8 * 4 + k % 8 / 2];
            let b = &brought[column * 4 + k % 8 / 2];
            fma(
                element(a[k / 8 * 2 + row / 8], k, of),
                element(b[4 + k / 8], k, of),
                sum,
            )
        });
        *d = sum.to_bits();
    }
    d
}

/// The element of a word, of 16 bits, whose index in its row is even (the low half) or odd.
fn element(word: u32, index: usize, of: Element) -> f32 {
    let bits = half_of(word, index);
    match of {
        Element::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    }
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

//! Warpgroup products. Each warp has its own rows: it multiplies them when its lanes have arrived, regardless of the other warps.

use std::{ptr, slice};

use super::block::{Block, LANES, Thread};
use super::fault::Fault;
use super::fibers::At;
use super::float::{b16x2_to_f32, f16_to_f32};

/// Rows of a warp, rows of a core, columns of a core.
const ROWS: usize = 16;
const CORE: usize = 8;

/// A product by a right factor; all lanes of a warp name the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Address of its first core.
    at: u32,
    cores: Cores,
    rows: Rows,
    /// Steps of two cores along the summed dimension.
    steps: u8,
    /// Cores along the columns.
    columns: u8,
}

/// Arrangement of the cores by terms (the summed dimension) and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cores {
    /// An image: terms are channels, columns are tokens.
    Channels,
    /// An image: terms are tokens, columns are channels, this many bytes apart.
    Tokens(u16),
    /// A triangle.
    Triangle,
}

/// Orientation of the rows of a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    /// A row is a column of the product and runs along the summed dimension.
    OfColumns,
    /// A row is one term and runs along the columns.
    OfTerms,
}

/// A lane's words of the left factor and its sums, on its fiber's stack, while it waits for the product.
#[derive(Clone, Copy)]
pub struct Lent {
    a: *const u32,
    sums: *mut f32,
}

impl Lent {
    pub const NOTHING: Self = Self {
        a: ptr::null(),
        sums: ptr::null_mut(),
    };
}

/// Byte offset of the core of 8 tokens and 8 channels in an image of 128 tokens.
pub(super) fn of_image(tokens: usize, channels: usize) -> u32 {
    (channels * 2048 + tokens * 128) as u32
}

/// Byte offset of the core of 8 s and 8 t in a triangle, if it is stored.
fn of_triangle(s: usize, t: usize) -> Option<u32> {
    let (low, block) = (t / 4, s / 2);
    (low == 1 || block < 2)
        .then_some((low * 2048 + block * 1024 + t % 4 * 256 + s % 2 * 128) as u32)
}

impl Product {
    /// Address of the core of these terms and columns, if it is stored.
    fn core(self, terms: usize, columns: usize) -> Option<u32> {
        let byte = match self.cores {
            Cores::Channels => Some(of_image(columns, terms)),
            Cores::Tokens(apart) => Some(u32::from(apart) * columns as u32 + of_image(terms, 0)),
            Cores::Triangle => of_triangle(terms, columns),
        };
        Some(self.at + byte?)
    }
}

/// A lane's row in the first half of the rows, and the first of its two columns.
#[inline]
fn place(lane: usize) -> (usize, usize) {
    (lane / 4, lane % 4 * 2)
}

/// Adds a core's contribution for 8 terms of each row, one term after the other. Products of f16 are exact.
#[inline]
fn add(sums: &mut [[f32; CORE]; ROWS], left: &[[f32; CORE]; ROWS], right: &[[f32; CORE]; CORE]) {
    for row in 0..ROWS {
        let mut all = sums[row];
        for term in 0..CORE {
            for column in 0..CORE {
                all[column] += left[row][term] * right[term][column];
            }
        }
        sums[row] = all;
    }
}

impl Block<'_> {
    /// Adds to `sums` the product of `a` by the given factor.
    fn add_product(&self, sums: &mut [f32], a: &[u32], (at, cores, rows): (u32, Cores, Rows)) {
        let product = Product {
            at,
            cores,
            rows,
            steps: (a.len() / 4) as u8,
            columns: (sums.len() / 4) as u8,
        };
        let lent = Lent {
            a: a.as_ptr(),
            sums: sums.as_mut_ptr(),
        };
        self.threads[self.running.get()].lent.set(lent);
        self.wait(At::Warpgroup(product));
    }

    /// Completes a product for the warp of threads `first..`.
    pub(super) fn add_products(
        &self,
        first: usize,
        warp: &[Thread],
        product: Product,
    ) -> Result<(), Fault> {
        let (steps, columns) = (usize::from(product.steps), usize::from(product.columns));
        let lent = |lane: usize| {
            let Lent { a, sums } = warp[lane].lent.get();
            // SAFETY: all lanes wait in `add_product` for this very product, which determines the sizes of what each has lent.
            unsafe {
                (
                    slice::from_raw_parts(a, 4 * steps),
                    slice::from_raw_parts_mut(sums, 4 * columns),
                )
            }
        };
        // A lane has two columns of a core, in two rows.
        let mut sums = vec![[[0.0; CORE]; ROWS]; columns];
        for lane in 0..LANES {
            let ((row, c), own) = (place(lane), lent(lane).1);
            for (i, sums) in sums.iter_mut().enumerate() {
                for e in 0..2 {
                    sums[row][c + e] = own[4 * i + e];
                    sums[row + 8][c + e] = own[4 * i + 2 + e];
                }
            }
        }
        let mut right = [[0.0; CORE]; CORE];
        for terms in 0..2 * steps {
            let mut left = [[0.0; CORE]; ROWS];
            for lane in 0..LANES {
                let ((row, c), own) = (place(lane), lent(lane).0);
                let word = 4 * (terms / 2) + terms % 2 * 2;
                [left[row][c], left[row][c + 1]] = b16x2_to_f32(own[word], true);
                [left[row + 8][c], left[row + 8][c + 1]] = b16x2_to_f32(own[word + 1], true);
            }
            for (column, sums) in sums.iter_mut().enumerate() {
                if let Some(core) = product.core(terms, column) {
                    self.load_core(first, (core, product.rows), &mut right)?;
                    add(sums, &left, &right);
                }
            }
        }
        for lane in 0..LANES {
            let ((row, c), own) = (place(lane), lent(lane).1);
            for (i, sums) in sums.iter().enumerate() {
                for e in 0..2 {
                    own[4 * i + e] = sums[row][c + e];
                    own[4 * i + 2 + e] = sums[row + 8][c + e];
                }
            }
        }
        Ok(())
    }

    /// Loads a core, by terms and columns. Every warp needs each row; a different lane accesses each, so that a race is found
    /// unless the lane wrote the row itself.
    fn load_core(
        &self,
        first: usize,
        (core, rows): (u32, Rows),
        right: &mut [[f32; CORE]; CORE],
    ) -> Result<(), Fault> {
        for row in 0..CORE {
            let lane = (core as usize / 128 + row / 2 + first / LANES) % 8 * 4 + row / 2;
            self.running.set(first + lane);
            let halves: [u16; CORE] = self
                .try_load_shared(core + 16 * row as u32)
                .map_err(|problem| self.fault(first + lane, *problem))?;
            let values = floats(halves);
            match rows {
                Rows::OfTerms => right[row] = values,
                Rows::OfColumns => {
                    for (term, right) in right.iter_mut().enumerate() {
                        right[row] = values[term];
                    }
                }
            }
        }
        Ok(())
    }

    pub fn by_channels(&self, a: &[u32], image: u32) -> [f32; 32] {
        let mut d = [0.0; 32];
        self.add_product(&mut d, a, (image, Cores::Channels, Rows::OfColumns));
        d
    }

    pub fn by_triangle(&self, a: &[u32], triangle: u32) -> [f32; 32] {
        let mut d = [0.0; 32];
        self.add_product(&mut d, a, (triangle, Cores::Triangle, Rows::OfTerms));
        d
    }

    pub fn add_by_tokens(&self, sums: &mut [f32], a: &[u32], image: u32, tokens: u32) {
        let cores = Cores::Tokens(16 * tokens as u16);
        self.add_product(sums, a, (image, cores, Rows::OfTerms));
    }

    pub fn add_by_triangle(&self, d: &mut [f32], x: &[u32], triangle: u32) {
        self.add_product(d, x, (triangle, Cores::Triangle, Rows::OfColumns));
    }
}

/// Converts many f16 together, which is faster than one by one.
#[inline]
fn floats(halves: [u16; CORE]) -> [f32; CORE] {
    let mut floats = [0.0; CORE];
    for (i, float) in floats.iter_mut().enumerate() {
        *float = f16_to_f32(halves[i]);
    }
    floats
}

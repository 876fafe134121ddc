//! Products of warpgroups. A warp has rows of its own: it multiplies them when its lanes have come, whatever the others do.

use bytemuck::Pod;

use super::block::{Block, Words};
use super::fibers::At;
use super::float::{b16x2_to_f32, f16_to_f32};

/// Which way the cores of a right factor lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// A row is a column of the product, and goes along what is summed over.
    OfColumns,
    /// A row is one of those that are summed over, and goes along the columns.
    OfTerms,
}

/// The two f16 of a word.
#[inline]
fn pair(word: u32) -> [f32; 2] {
    b16x2_to_f32(word, true)
}

/// Many f16 at once, which is faster than one after the other.
#[inline]
fn floats(halves: [u16; 8]) -> [f32; 8] {
    let mut floats = [0.0; 8];
    for (i, float) in floats.iter_mut().enumerate() {
        *float = f16_to_f32(halves[i]);
    }
    floats
}

/// Byte of the core of 8 tokens and 8 channels in an image of 128 tokens.
pub(super) fn of_image(tokens: usize, channels: usize) -> u32 {
    (channels * 2048 + tokens * 128) as u32
}

/// Byte of the core of 8 s and 8 t in a triangle, if it has a place.
fn of_triangle(s: usize, t: usize) -> Option<u32> {
    let (low, block) = (t / 4, s / 2);
    (low == 1 || block < 2)
        .then_some((low * 2048 + block * 1024 + t % 4 * 256 + s % 2 * 128) as u32)
}

impl Block<'_> {
    /// Adds to `sums` the product of `a` and the cores that `core` places, of 8 terms and 8 columns.
    fn add_product(
        &self,
        sums: &mut [f32],
        a: &[u32],
        rows: Rows,
        core: impl Fn(usize, usize) -> Option<u32>,
    ) {
        let c = self.running.get() % 4;
        for (step, a) in a.chunks(4).enumerate() {
            let mut words = Words::default();
            words[..4].copy_from_slice(a);
            let mut left = [0.0; 32];
            let exchanged = self.exchange(words, At::Warpgroup);
            for (i, word) in exchanged.into_iter().enumerate() {
                [left[2 * i], left[2 * i + 1]] = pair(word);
            }
            for (column, sums) in sums.chunks_mut(4).enumerate() {
                for half in 0..2 {
                    let Some(address) = core(2 * step + half, column) else {
                        continue;
                    };
                    let terms: [[f32; 8]; 2] = self.terms(address, rows, c);
                    for (e, terms) in terms.iter().enumerate() {
                        for (i, &term) in terms.iter().enumerate() {
                            let at = 8 * half + i;
                            // Products of f16 are exact.
                            sums[e] += left[at] * term;
                            sums[2 + e] += left[16 + at] * term;
                        }
                    }
                }
            }
        }
    }

    /// A row of a core, which 8 lanes of a warp need, and all warps. One of the 8 accesses it, another one in each warp, so
    /// that a warp is found whose lane has not made the row itself; the others take what it holds.
    fn row_of_core<T: Pod>(&self, core: u32, row: usize, byte: u32) -> T {
        let thread = self.running.get();
        let (warp, r) = (thread / 32, thread % 32 / 4);
        let address = core + 16 * row as u32 + byte;
        if (core as usize / 128 + row / 2 + warp) % 8 == r {
            self.load_shared(address)
        } else {
            self.peek_shared(address)
        }
    }

    /// The 8 terms of columns 2c and 2c + 1 of a core.
    fn terms(&self, core: u32, rows: Rows, c: usize) -> [[f32; 8]; 2] {
        let mut halves = [[0; 8]; 2];
        match rows {
            Rows::OfTerms => {
                let [low, high] = &mut halves;
                for (i, low) in low.iter_mut().enumerate() {
                    let word: u32 = self.row_of_core(core, i, 4 * c as u32);
                    *low = word as u16;
                    high[i] = (word >> 16) as u16;
                }
            }
            Rows::OfColumns => {
                for (i, halves) in halves.iter_mut().enumerate() {
                    let row: [u32; 4] = self.row_of_core(core, 2 * c + i, 0);
                    *halves = bytemuck::cast(row);
                }
            }
        }
        [floats(halves[0]), floats(halves[1])]
    }

    pub fn by_channels(&self, a: &[u32], image: u32) -> [f32; 32] {
        let mut d = [0.0; 32];
        let core = |k, n| Some(image + of_image(n, k));
        self.add_product(&mut d, a, Rows::OfColumns, core);
        d
    }

    pub fn by_triangle(&self, a: &[u32], triangle: u32) -> [f32; 32] {
        let mut d = [0.0; 32];
        let core = |s, t| of_triangle(s, t).map(|byte| triangle + byte);
        self.add_product(&mut d, a, Rows::OfTerms, core);
        d
    }

    pub fn add_by_tokens(&self, sums: &mut [f32], a: &[u32], image: u32, tokens: u32) {
        let core = |token, n| Some(image + 16 * tokens * n as u32 + of_image(token, 0));
        self.add_product(sums, a, Rows::OfTerms, core);
    }

    pub fn add_by_triangle(&self, d: &mut [f32], x: &[u32], triangle: u32) {
        let core = |s, t| of_triangle(s, t).map(|byte| triangle + byte);
        self.add_product(d, x, Rows::OfColumns, core);
    }
}

//! Reductions over the lanes of a warp in one collective, with the same additions in the same order as the successive shuffles of
//! [`crate::math::reduce`].

use super::block::{LANES, Thread, WORDS, Words};

/// A reduction of `count` values per lane over the lanes whose index differs in bits `low..high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Butterfly {
    low: u8,
    high: u8,
    count: u8,
    /// Each lane keeps a part of the sums instead of all.
    scatters: bool,
}

impl Butterfly {
    /// `None` for more values than a lane can exchange, or for bits outside a warp's lane index.
    pub fn new(count: usize, low: u32, high: u32, scatters: bool) -> Option<Self> {
        let fits = count <= WORDS && 0 < low && low <= high && high <= LANES as u32;
        fits.then_some(Self {
            low: low as u8,
            high: high as u8,
            count: count as u8,
            scatters,
        })
    }

    pub fn describe(self) -> String {
        let Self { low, high, .. } = self;
        match self.scatters {
            true => format!("butterfly_scatter over lanes {low}..{high}"),
            false => format!("butterfly_sum over lanes {low}..{high}"),
        }
    }

    /// Gives each lane its sums.
    pub fn add(self, warp: &[Thread]) {
        let count = usize::from(self.count);
        // A row holds one value of every lane.
        let mut values = [[0.0f32; LANES]; WORDS];
        for (lane, thread) in warp.iter().enumerate() {
            let words = thread.words();
            for (row, word) in values[..count].iter_mut().zip(words) {
                row[lane] = f32::from_bits(word);
            }
        }
        match self.scatters {
            true => self.scatter(&mut values[..count]),
            false => self.sum(&mut values[..count]),
        }
        for (lane, thread) in warp.iter().enumerate() {
            let mut words = Words::default();
            for (word, row) in words.iter_mut().zip(&values[..count]) {
                *word = row[lane].to_bits();
            }
            thread.set_words(words);
        }
    }

    fn sum(self, values: &mut [[f32; LANES]]) {
        let mut lane_mask = usize::from(self.high / 2);
        while lane_mask >= usize::from(self.low) {
            for row in values.iter_mut() {
                let before = *row;
                for (lane, sum) in row.iter_mut().enumerate() {
                    *sum = before[lane] + before[lane ^ lane_mask];
                }
            }
            lane_mask /= 2;
        }
    }

    fn scatter(self, values: &mut [[f32; LANES]]) {
        let (low, high) = (usize::from(self.low), usize::from(self.high));
        let mut lane_mask = low;
        let mut stride = values.len() * low / high;
        let mut parted = 0;
        while lane_mask < high {
            for i in 0..values.len() {
                if i & (stride | parted) != 0 {
                    continue;
                }
                let (first, second) = (values[i], values[i + stride]);
                for (lane, sum) in values[i].iter_mut().enumerate() {
                    let mine = if lane & lane_mask != 0 {
                        &second
                    } else {
                        &first
                    };
                    *sum = mine[lane] + mine[lane ^ lane_mask];
                }
            }
            parted |= stride;
            lane_mask *= 2;
            stride *= 2;
        }
    }
}

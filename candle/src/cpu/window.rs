//! The convolution of a row, and the update of its window.

use super::rows::Row;
use super::view::View;
use super::{Conv, Source, Work, activate};

/// Outputs of the convolution: q, k and v of a row's tokens, concatenated along D.
pub struct Convolved {
    /// New tokens, `[n, D]`.
    pub new: Vec<f32>,
    /// Previous tokens, `[keep, D]`.
    pub previous: Vec<f32>,
}

impl Work<'_> {
    /// Channels of the convolution, D.
    fn channels(&self) -> usize {
        2 * self.heads.h * self.heads.k + self.heads.hv * self.heads.v
    }

    /// Convolves a row's tokens and writes its window.
    pub(super) fn convolve(&self, conv: &Conv<'_>, row: &Row) -> Convolved {
        let (channels, taps) = (self.channels(), conv.weight.dim(1));
        let before = taps - 1;
        let (window_slot, column) = match row.wide {
            Some((slot, column)) => (Some(slot), column),
            None => (row.start, 0),
        };
        // Inputs of the convolution in order, `[.., D]`, starting with the window.
        let mut line = vec![0.0; before * channels];
        if let (Some(slot), false) = (window_slot, row.is_fresh) {
            for (i, inputs) in line.chunks_exact_mut(channels).enumerate() {
                conv.windows.read(&[slot, 0, column + i], 1, inputs);
            }
        }
        let mut previous = Vec::new();
        if let (Some((keep, end)), Some(tokens)) = (row.commit, &self.previous) {
            if let Source::X(x) = &tokens.source {
                for t in 0..keep {
                    push(&mut line, channels, x, [row.b, t]);
                }
            }
            previous = convolve(conv, &line, channels, keep);
            line.drain(..keep * channels);
            self.write_window(conv, &line, end);
        }
        if let Some(waiting) = row.waiting {
            self.wait(conv.windows, &mut line, row, waiting);
        }
        let count = row.tokens.len();
        if let Some(Source::X(x)) = self.new.as_ref().map(|new| &new.source) {
            for t in 0..count {
                push(&mut line, channels, x, row.token(t));
            }
        }
        let new = convolve(conv, &line, channels, count);

        let window_after = |tokens: usize| &line[tokens * channels..][..before * channels];
        if let Some(snapshots) = &conv.snapshots {
            for t in 0..count {
                for (i, inputs) in window_after(t + 1).chunks_exact(channels).enumerate() {
                    snapshots.write(&[row.b, t, 0, i], 2, inputs);
                }
            }
        }
        for &(t, slot) in &row.checkpoints {
            self.write_window(conv, window_after(t + 1), slot);
        }
        match (row.wide, row.waiting) {
            (Some((slot, _)), _) if count > 0 => {
                // All inputs except the oldest.
                let kept = line[channels..].chunks_exact(channels);
                for (i, inputs) in kept.enumerate() {
                    conv.write_windows.write(&[slot, 0, i], 1, inputs);
                }
            }
            (None, Some(_)) => {
                let has_inputs = self.ring.as_ref().is_some_and(|ring| ring.inputs.is_some());
                if let (Some(slot), false) = (row.start, has_inputs) {
                    self.write_window(conv, window_after(count), slot);
                }
            }
            (None, None) => {
                if let Some(slot) = row.last() {
                    self.write_window(conv, window_after(count), slot);
                }
            }
            (Some(_), _) => {}
        }
        Convolved { new, previous }
    }

    /// Writes a window to a slot of the written windows.
    fn write_window(&self, conv: &Conv<'_>, window: &[f32], slot: usize) {
        for (i, inputs) in window.chunks_exact(self.channels()).enumerate() {
            conv.write_windows.write(&[slot, 0, i], 1, inputs);
        }
    }

    /// Deferred windows. Moves the window, `line`, past the pending tokens, writes the window if the state is written, and stores
    /// the row's own inputs in the ring.
    fn wait(&self, windows: View<'_>, line: &mut Vec<f32>, row: &Row, waiting: super::Waiting) {
        let channels = self.channels();
        let (Some(ring), Some(slot)) = (&self.ring, row.start) else {
            return;
        };
        let Some(inputs) = &ring.inputs else {
            return;
        };
        let entry = |j: usize| (waiting.base + j) % ring.entries;
        for j in 0..waiting.len {
            push(line, channels, inputs, [slot, entry(j)]);
        }
        line.drain(..waiting.len * channels);
        if waiting.is_flushed {
            for (i, inputs) in line.chunks_exact(channels).enumerate() {
                windows.write(&[slot, 0, i], 1, inputs);
            }
        }
        if let Some(Source::X(x)) = self.new.as_ref().map(|new| &new.source) {
            let mut of_token = vec![0.0; channels];
            for t in 0..row.tokens.len() {
                let [b, token] = row.token(t);
                x.read(&[b, token, 0], 2, &mut of_token);
                inputs.write(&[slot, entry(waiting.len + t), 0], 2, &of_token);
            }
        }
    }

    /// Moves the window of a row past the flushed tokens.
    pub(super) fn flush_window(&self, row: &Row) {
        let (Some(ring), Some(waiting), Some(slot)) = (&self.ring, row.waiting, row.start) else {
            return;
        };
        let Some(windows) = ring.windows else {
            return;
        };
        let (channels, before) = (windows.dim(1), windows.dim(2));
        let mut line = vec![0.0; before * channels];
        for (i, inputs) in line.chunks_exact_mut(channels).enumerate() {
            windows.read(&[slot, 0, i], 1, inputs);
        }
        self.wait(windows, &mut line, row, waiting);
    }
}

/// Appends the inputs of a token to `line`.
fn push(line: &mut Vec<f32>, channels: usize, x: &View<'_>, [b, t]: [usize; 2]) {
    let first = line.len();
    line.resize(first + channels, 0.0);
    x.read(&[b, t, 0], 2, &mut line[first..]);
}

/// Outputs of the convolution, `[tokens, D]`, for the inputs in `line`, which starts with the window.
fn convolve(conv: &Conv<'_>, line: &[f32], channels: usize, tokens: usize) -> Vec<f32> {
    let taps = conv.weight.dim(1);
    let mut weights = vec![0.0; taps * channels];
    for (j, tap) in weights.chunks_exact_mut(channels).enumerate() {
        conv.weight.read(&[0, j], 0, tap);
    }
    let mut bias = vec![0.0; channels];
    if let Some(of) = &conv.bias {
        of.read(&[0], 0, &mut bias);
    }
    let mut convolved = Vec::with_capacity(tokens * channels);
    for t in 0..tokens {
        let first = convolved.len();
        convolved.extend_from_slice(&bias);
        let sums = &mut convolved[first..];
        for (tap, inputs) in weights
            .chunks_exact(channels)
            .zip(line[t * channels..].chunks_exact(channels))
        {
            for ((sum, w), x) in sums.iter_mut().zip(tap).zip(inputs) {
                *sum += w * x;
            }
        }
        for sum in sums {
            *sum = activate(conv.activation, *sum);
        }
    }
    convolved
}

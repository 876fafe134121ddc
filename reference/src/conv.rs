//! The short causal convolution between a layer's projection and its recurrence, channel by channel:
//! ```text
//! y_t[c] = act(bias[c] + Σ_j weight[c, j] · x_{t−W+1+j}[c])    j = 0 … W − 1
//! ```
//! The W − 1 inputs before the first token are the row's window, oldest first.

use crate::error::{Error, check_length};
use crate::gate::Activation;

/// A convolution of D channels.
#[derive(Clone, Copy, Debug)]
pub struct Conv<'a> {
    /// Channels, D.
    pub channels: usize,
    /// Taps, W: an output depends on its own token and the W − 1 before it.
    pub width: usize,
    /// Taps `[D, W]`, oldest token first.
    pub weight: &'a [f64],
    /// Bias `[D]`.
    pub bias: Option<&'a [f64]>,
    /// Activation of the sum.
    pub activation: Activation,
}

/// Outputs y `[T, D]` of the inputs x `[T, D]` of one row, which follow `window` `[D, W − 1]`.
pub fn convolve(conv: &Conv, window: &[f64], x: &[f64]) -> Result<Vec<f64>, Error> {
    let tokens = conv.check(window, x)?;
    let mut y = Vec::with_capacity(x.len());
    for t in 0..tokens {
        for c in 0..conv.channels {
            let mut sum = conv.bias.map_or(0.0, |bias| bias[c]);
            for j in 0..conv.width {
                sum += conv.weight[c * conv.width + j] * conv.input(window, x, c, t + j);
            }
            y.push(conv.activation.of(sum));
        }
    }
    Ok(y)
}

/// The window `[D, W − 1]` after the first `keep` tokens: the last W − 1 inputs of `window` and these tokens.
pub fn window_after(
    conv: &Conv,
    window: &[f64],
    x: &[f64],
    keep: usize,
) -> Result<Vec<f64>, Error> {
    let tokens = conv.check(window, x)?;
    if keep > tokens {
        return Err(Error::Length {
            name: "x",
            shape: "[keep, D]".to_owned(),
            wanted: keep.saturating_mul(conv.channels),
            got: x.len(),
        });
    }
    let mut after = Vec::with_capacity(window.len());
    for c in 0..conv.channels {
        for i in 0..conv.width - 1 {
            after.push(conv.input(window, x, c, keep + i));
        }
    }
    Ok(after)
}

impl Conv<'_> {
    /// Channel c of input i, counted from the window's oldest input through the tokens of `x`.
    pub(crate) fn input(&self, window: &[f64], x: &[f64], c: usize, i: usize) -> f64 {
        let before = self.width - 1;
        match i.checked_sub(before) {
            None => window[c * before + i],
            Some(t) => x[t * self.channels + c],
        }
    }

    /// Checks the lengths and returns T.
    fn check(&self, window: &[f64], x: &[f64]) -> Result<usize, Error> {
        self.check_weights()?;
        let before = [self.channels, self.width - 1];
        check_length("window", "[D, W - 1]", &before, window.len())?;
        Error::check_multiple("x", "one token, D", self.channels, x.len())
    }

    pub(crate) fn check_weights(&self) -> Result<(), Error> {
        let Self {
            channels, width, ..
        } = *self;
        for (name, dim) in [("channels", channels), ("width", width)] {
            if dim == 0 {
                return Err(Error::Zero { name });
            }
        }
        check_length("weight", "[D, W]", &[channels, width], self.weight.len())?;
        match self.bias {
            Some(bias) => check_length("bias", "[D]", &[channels], bias.len()),
            None => Ok(()),
        }
    }
}

//! What a convolution, its windows, a norm and fresh rows have to be.

use super::argument::Argument;
use super::check::Found;
use super::checks::{Strides, floats, indices, same_dtype};
use super::layer::{Activation, Convolution};
use super::options::Formulation;
use super::request::{Phase, Request};
use crate::error::Error;
use crate::shapes::{Named, range, unsupported};

/// Dims of windows, and of those that are written to another pool: it has a P of its own, and windows its slots.
const OF_SLOTS: [[&str; 3]; 2] = [["P", "D", "W - 1"], ["P of write_pool", "D", "W - 1"]];

/// The same with token slots.
const OF_TOKEN_SLOTS: [[&str; 3]; 2] = [
    ["P", "D", "W - 2 + T"],
    ["P of write_pool", "D", "W - 2 + T"],
];

const SPAN: &str = "channels and inputs that span less than 2^32 elements";
const DISTINCT: &str = "inputs that do not overlap, since they are written";

/// What the checks find of a convolution.
#[derive(Default)]
pub(super) struct FoundConvolution {
    /// W
    pub taps: u32,
    pub x: Strides,
    /// Between the channels of the weight.
    pub weight_channel: u32,
    /// The taps of every channel are aligned to their bytes, where they are a power of two.
    pub wide_weight: bool,
    pub read: WindowStrides,
    pub write: WindowStrides,
    pub previous_x: Strides,
    pub snapshots: WindowSnapshotStrides,
}

/// Elements between the rows of snapshots of windows, their tokens, channels, and the inputs of one.
#[derive(Clone, Copy, Default)]
pub(super) struct WindowSnapshotStrides {
    pub row: u32,
    pub token: u32,
    pub channel: u32,
    pub input: u32,
}

/// Elements between the slots of windows, their channels, and the inputs of one.
#[derive(Clone, Copy, Default)]
pub(super) struct WindowStrides {
    pub slot: u32,
    pub channel: u32,
    pub input: u32,
}

impl WindowStrides {
    /// Checks windows of so many slots, which `slots_of` says, channels and inputs.
    fn find(
        &mut self,
        tensor: Named<'_>,
        letters: &'static [&'static str; 3],
        sizes: &[usize; 3],
        is_written: bool,
    ) -> Result<(), Error> {
        let view = tensor.dims(letters, sizes)?;
        tensor.natural()?;
        let slot = view.row_stride()?;
        let [channel, input] = view.strides_u32([1, 2], SPAN)?;
        if is_written {
            view.distinct(0, DISTINCT)?;
        }
        *self = Self {
            slot,
            channel,
            input,
        };
        Ok(())
    }
}

impl FoundConvolution {
    /// Checks the windows of a flush, which say W.
    pub fn find_flushed(
        &mut self,
        windows: Named<'_>,
        slots: usize,
        channels: usize,
    ) -> Result<(), Error> {
        let [letters, _] = &OF_SLOTS;
        let [_, _, inputs] = *windows.rank("[P, D, W - 1]")?.dims;
        if !(1..=3).contains(&inputs) {
            return Err(unsupported("W - 1 of windows", inputs, "1, 2 or 3"));
        }
        self.read
            .find(windows, letters, &[slots, channels, inputs], true)?;
        (self.write, self.taps) = (self.read, inputs as u32 + 1);
        Ok(())
    }
}

impl WindowSnapshotStrides {
    /// Checks windows after so many tokens of `rows`, of so many channels and inputs.
    fn find(
        &mut self,
        tensor: Named<'_>,
        rows: usize,
        [tokens, channels, inputs]: [usize; 3],
    ) -> Result<(), Error> {
        let [_, steps, ..] = *tensor.rank::<4>("[B, steps, D, W - 1]")?.dims;
        if steps < tokens {
            let wanted = format!("at least T = {tokens}");
            return Err(range("steps of window_snapshots", wanted, steps));
        }
        let letters = &["B", "steps", "D", "W - 1"];
        let view = tensor.dims(letters, &[rows, steps, channels, inputs])?;
        tensor.natural()?;
        let [channel, input] = view.strides_u32([2, 3], SPAN)?;
        *self = Self {
            row: view.row_stride()?,
            token: view.token_stride()?,
            channel,
            input,
        };
        view.distinct(0, DISTINCT)
    }
}

/// An activation is one of `allowed`, which `wanted` spells out.
fn activation(
    what: &'static str,
    activation: Activation,
    allowed: [Activation; 2],
    wanted: &'static str,
) -> Result<(), Error> {
    if allowed.contains(&activation) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what,
        got: activation.to_string(),
        allowed: wanted,
    })
}

impl Request<'_> {
    /// The convolution, the norm and the fresh rows, where there are such.
    pub(super) fn check_layer(&self, found: &mut Found) -> Result<(), Error> {
        if let Some(conv) = self.conv() {
            self.check_convolution(conv, found)?;
        }
        self.check_norm(found)?;
        match self.get(Argument::Fresh) {
            Some(fresh) => indices(fresh, &["B"], &[found.extents.rows]),
            None => Ok(()),
        }
    }

    fn check_convolution(&self, conv: &Convolution<'_>, found: &mut Found) -> Result<(), Error> {
        activation(
            "activation of the convolution",
            conv.activation,
            [Activation::Silu, Activation::None],
            "silu or none",
        )?;
        let channels = found.extents.heads.channels();
        let of_conv = &mut found.conv;
        if self.phase == Phase::Step {
            found
                .extents
                .new
                .inputs(conv.named_x(), channels, &mut of_conv.x)?;
        }

        let [_, taps] = *conv.named_weight().rank("[D, W]")?.dims;
        if !(2..=4).contains(&taps) {
            return Err(unsupported("W", taps, "2, 3 or 4"));
        }
        of_conv.taps = taps as u32;
        let weight = floats(conv.named_weight(), &["D", "W"], &[channels, taps])?;
        [of_conv.weight_channel] =
            weight.strides_u32([0], "channels that span less than 2^32 elements")?;
        of_conv.wide_weight =
            taps.is_power_of_two() && weight.aligned_to(taps * conv.weight.dtype().size_of());
        if let Some(bias) = conv.named_bias() {
            floats(bias, &["D"], &[channels])?;
        }

        let slots = |pool: Named<'_>| pool.tensor.dims()[0];
        let (read, written) = (slots(self.pool()), slots(self.written_pool()));
        let windows = conv.named_windows();
        let in_place = conv.write_windows.is_none();
        let tokens = found.extents.new.tokens;
        let (inputs, [letters, of_write_pool]) = match self.get(Argument::TokenSlots) {
            Some(_) => (taps - 2 + tokens, &OF_TOKEN_SLOTS),
            None => (taps - 1, &OF_SLOTS),
        };
        let sizes = |slots| [slots, channels, inputs];
        let is_written = in_place && !self.read_only;
        (of_conv.read).find(windows, letters, &sizes(read), is_written)?;
        same_dtype(windows, conv.named_x(), "the dtype of x")?;
        match conv.named_write_windows() {
            Some(write_windows) => {
                let letters = match self.get(Argument::WritePool) {
                    Some(_) => of_write_pool,
                    None => letters,
                };
                (of_conv.write).find(write_windows, letters, &sizes(written), true)?;
                same_dtype(write_windows, conv.named_x(), "the dtype of x")?;
            }
            None => {
                windows.dims(of_write_pool, &sizes(written))?;
                of_conv.write = of_conv.read;
            }
        }
        let Some(snapshots) = conv.named_window_snapshots() else {
            return Ok(());
        };
        same_dtype(snapshots, conv.named_x(), "the dtype of x")?;
        let of_row = [tokens, channels, taps - 1];
        of_conv
            .snapshots
            .find(snapshots, found.extents.rows, of_row)
    }

    fn check_norm(&self, found: &mut Found) -> Result<(), Error> {
        let Some(norm) = self.norm else {
            return Ok(());
        };
        activation(
            "activation of the norm",
            norm.activation,
            [Activation::Silu, Activation::Sigmoid],
            "silu or sigmoid",
        )?;
        if !(norm.eps.is_finite() && norm.eps > 0.0) {
            let wanted = "a finite number above 0".to_owned();
            return Err(range("eps of the norm", wanted, norm.eps));
        }
        let heads = found.extents.heads;
        (found.extents.new).values(norm.named_z(), heads, &mut found.z)?;
        let weight = floats(norm.named_weight(), &["V"], &[heads.v_dim])?;
        // The others take them one by one, and would be compiled twice for nothing.
        let takes_wide = self.formulation != Formulation::Recurrent;
        found.wide_norm = takes_wide && !found.z.narrow && weight.wide();
        Ok(())
    }
}

//! Checks of a convolution, its windows and a norm.

use super::checks::{Strides, floats, same_dtype};
use super::extents::Extents;
use crate::error::Error;
use crate::step::args::{Activation, Formulation};
use crate::step::argument::Argument;
use crate::step::request::{Phase, Request};
use crate::tensor_checks::{Named, range, unsupported};

/// Names of the dims of windows, and of windows in another pool to write. The latter have the P of the written pool.
const OF_SLOTS: [[&str; 3]; 2] = [["P", "D", "W - 1"], ["P of write_pool", "D", "W - 1"]];

/// [`OF_SLOTS`] with token slots.
const OF_TOKEN_SLOTS: [[&str; 3]; 2] = [
    ["P", "D", "W - 2 + T"],
    ["P of write_pool", "D", "W - 2 + T"],
];

const SPAN: &str = "channels and inputs that span less than 2^32 elements";
const DISTINCT: &str = "inputs that do not overlap, since they are written";

/// Strides and alignment of the tensors of a convolution.
#[derive(Default)]
pub struct ConvolutionStrides {
    /// W, the number of taps.
    pub taps: u32,
    /// Strides of the projection of the new tokens.
    pub x: Strides,
    /// Stride of the weight's channels, in elements.
    pub weight_channel: u32,
    /// Whether the taps of every channel are aligned to their size in bytes, if this size is a power of two.
    pub wide_weight: bool,
    pub read: WindowStrides,
    pub write: WindowStrides,
    pub snapshots: WindowSnapshotStrides,
}

/// Strides and alignment of the tensors of a norm.
#[derive(Default)]
pub struct NormStrides {
    pub z: Strides,
    /// Whether accesses to z and the weight are aligned to 16 bytes.
    pub wide: bool,
}

/// Strides of snapshots of windows in elements: rows, tokens, channels and inputs.
#[derive(Clone, Copy, Default)]
pub struct WindowSnapshotStrides {
    pub row: u32,
    pub token: u32,
    pub channel: u32,
    pub input: u32,
}

/// Strides of windows in elements: slots, channels and inputs.
#[derive(Clone, Copy, Default)]
pub struct WindowStrides {
    pub slot: u32,
    pub channel: u32,
    pub input: u32,
}

impl WindowStrides {
    /// Checks windows whose dims are `sizes` (slots, channels and inputs), which `letters` name.
    fn of(
        tensor: Named<'_>,
        letters: &'static [&'static str; 3],
        sizes: &[usize; 3],
        is_written: bool,
    ) -> Result<Self, Error> {
        let view = tensor.dims(letters, sizes)?;
        tensor.natural()?;
        let slot = view.row_stride()?;
        let [channel, input] = view.strides_u32([1, 2], SPAN)?;
        if is_written {
            view.distinct(0, DISTINCT)?;
        }
        Ok(Self {
            slot,
            channel,
            input,
        })
    }
}

impl ConvolutionStrides {
    /// Checks the windows of a flush. Their dims determine W.
    pub fn of_flushed(windows: Named<'_>, slots: usize, channels: usize) -> Result<Self, Error> {
        let [letters, _] = &OF_SLOTS;
        let [_, _, inputs] = *windows.rank("[P, D, W - 1]")?.dims;
        if !(1..=3).contains(&inputs) {
            return Err(unsupported("W - 1 of windows", inputs, "1, 2 or 3"));
        }
        let strides = WindowStrides::of(windows, letters, &[slots, channels, inputs], true)?;
        Ok(Self {
            taps: inputs as u32 + 1,
            read: strides,
            write: strides,
            ..Self::default()
        })
    }
}

impl WindowSnapshotStrides {
    /// Checks snapshots of windows `[rows, steps, channels, inputs]` with steps ≥ `tokens`.
    fn of(
        tensor: Named<'_>,
        rows: usize,
        [tokens, channels, inputs]: [usize; 3],
    ) -> Result<Self, Error> {
        let [_, steps, ..] = *tensor.rank::<4>("[B, steps, D, W - 1]")?.dims;
        if steps < tokens {
            let wanted = format!("at least T = {tokens}");
            return Err(range("steps of window_snapshots", wanted, steps));
        }
        let letters = &["B", "steps", "D", "W - 1"];
        let view = tensor.dims(letters, &[rows, steps, channels, inputs])?;
        tensor.natural()?;
        let [channel, input] = view.strides_u32([2, 3], SPAN)?;
        let strides = Self {
            row: view.row_stride()?,
            token: view.token_stride()?,
            channel,
            input,
        };
        view.distinct(0, DISTINCT)?;
        Ok(strides)
    }
}

/// Checks that an activation is one of `allowed`, which `wanted` spells out.
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

/// Checks the convolution, if the launch has one.
pub fn check(request: &Request<'_>, extents: &Extents) -> Result<ConvolutionStrides, Error> {
    let Some(conv) = request.conv() else {
        return Ok(ConvolutionStrides::default());
    };
    activation(
        "activation of the convolution",
        conv.activation,
        [Activation::Silu, Activation::None],
        "silu or none",
    )?;
    let (channels, tokens) = (extents.heads.channels(), extents.new.tokens);
    let x = match request.phase {
        Phase::Step => extents.new.inputs(conv.named_x(), channels)?,
        _ => Strides::default(),
    };

    let [_, taps] = *conv.named_weight().rank("[D, W]")?.dims;
    if !(2..=4).contains(&taps) {
        return Err(unsupported("W", taps, "2, 3 or 4"));
    }
    let weight = floats(conv.named_weight(), &["D", "W"], &[channels, taps])?;
    let [weight_channel] = weight.strides_u32([0], "channels that span less than 2^32 elements")?;
    let wide_weight =
        taps.is_power_of_two() && weight.aligned_to(taps * conv.weight.dtype().size_of());
    if let Some(bias) = conv.named_bias() {
        floats(bias, &["D"], &[channels])?;
    }

    let slots = |pool: Named<'_>| pool.tensor.dims()[0];
    let (read, written) = (slots(request.pool()), slots(request.written_pool()));
    let windows = conv.named_windows();
    let in_place = conv.write_windows.is_none();
    let (inputs, [letters, of_write_pool]) = match request.has(Argument::TokenSlots) {
        true => (taps - 2 + tokens, &OF_TOKEN_SLOTS),
        false => (taps - 1, &OF_SLOTS),
    };
    let sizes = |slots| [slots, channels, inputs];
    let is_written = in_place && !request.read_only;
    let read = WindowStrides::of(windows, letters, &sizes(read), is_written)?;
    same_dtype(windows, conv.named_x(), "the dtype of x")?;
    let write = match conv.named_write_windows() {
        Some(write_windows) => {
            let letters = match request.has(Argument::WritePool) {
                true => of_write_pool,
                false => letters,
            };
            let write = WindowStrides::of(write_windows, letters, &sizes(written), true)?;
            same_dtype(write_windows, conv.named_x(), "the dtype of x")?;
            write
        }
        None => {
            windows.dims(of_write_pool, &sizes(written))?;
            read
        }
    };
    let snapshots = match conv.named_window_snapshots() {
        Some(snapshots) => {
            same_dtype(snapshots, conv.named_x(), "the dtype of x")?;
            let of_row = [tokens, channels, taps - 1];
            WindowSnapshotStrides::of(snapshots, extents.rows, of_row)?
        }
        None => WindowSnapshotStrides::default(),
    };
    Ok(ConvolutionStrides {
        taps: taps as u32,
        x,
        weight_channel,
        wide_weight,
        read,
        write,
        snapshots,
    })
}

/// Checks the norm, if the launch has one.
pub fn check_norm(request: &Request<'_>, extents: &Extents) -> Result<NormStrides, Error> {
    let Some(norm) = request.norm else {
        return Ok(NormStrides::default());
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
    let heads = extents.heads;
    let z = extents.new.values(norm.named_z(), heads)?;
    let weight = floats(norm.named_weight(), &["V"], &[heads.v_dim])?;
    // Recurrent kernels have only narrow accesses. A wide constant would make them compile twice.
    let takes_wide = request.formulation != Formulation::Recurrent;
    let wide = takes_wide && !z.narrow && weight.wide();
    Ok(NormStrides { z, wide })
}

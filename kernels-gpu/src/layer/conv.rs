//! The short causal convolution, channel by channel: y = act(bias + Σ_j weight\[j\] · x\[t − W + 1 + j\]), in f32.

use core::array;

use super::Place;
use crate::constants::Element;
use crate::device::float::fma;
use crate::device::global::{load_state_b16, load_state_b32, store_b16, store_b32};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, load, load_one};
use crate::math::gate;
use crate::pending::InputRing;
use crate::row::Row;
use crate::step::{Activation, LayerParams, StepConstants};

pub use crate::step::TAPS;

/// The channels of one token that a thread convolves, at most `N`.
pub struct ThreadChannels<const N: usize> {
    parts: [Part; N],
    loaded: [Loaded; N],
}

/// A channel, and x of its token. A struct, not an array of two x (docs/compiler.md, One value, not two).
#[derive(Clone, Copy)]
struct Loaded {
    channel: Channel,
    x: Raw<1>,
}

impl<const N: usize> ThreadChannels<N> {
    /// Loads channels `first`, `first + threads`, … of the block, in the numbering of [`Part::new`]. With `all`, a thread without
    /// an n-th channel loads x and taps of another channel instead: then the loads of all channels are in one basic block and
    /// issue together. Without `all` each load has its own branch, which costs less than the extra traffic if the grid is
    /// one wave.
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; if the row is live, nobody else writes the windows of the block.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        row: Row,
        dims: [u32; 2],
        tiles: (u32, u32),
        (first, threads, all): (u32, u32, bool),
    ) -> Self {
        let part = |i: usize| Part::new(c, row, dims, tiles, first + i as u32 * threads);
        let parts = array::from_fn(part);
        let mut loaded = [const { Loaded::NONE }; N];
        each!(i in 0..N => {
            let is_there = parts[i].is_there;
            if is_there || (all && c.taps != 0) {
                let channel = if is_there {
                    parts[i].channel
                } else {
                    row.h * dims[0]
                };
                let address = params.x
                    + (row.b as u64 * c.x_row as u64 + channel as u64)
                        * bytes_of(c.x_element) as u64;
                loaded[i].x = load_one(address, c.x_element);
                loaded[i].channel = Channel::load(c, params, place, channel, is_there);
            }
        });
        Self { parts, loaded }
    }

    /// Convolves the token and passes every channel to `give`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn convolve(&self, c: &StepConstants, give: impl Fn(&Part, f32)) {
        each!(i in 0..N => {
            if self.parts[i].is_there {
                let Loaded { channel, x } = &self.loaded[i];
                give(&self.parts[i], channel.convolve(c, *x));
            }
        });
    }

    /// Writes the windows after the token, if the step writes states.
    ///
    /// # Safety
    /// As for [`Self::load`]; the row is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_windows(&self, c: &StepConstants, params: &LayerParams, place: &Place) {
        let mut i = 0;
        while i < N && c.update_state != 0 {
            let part = &self.parts[i];
            if part.is_there {
                let Loaded { mut channel, x } = self.loaded[i];
                channel.shift(x);
                channel.store_window(c, params, place, part.channel);
            }
            i += 1;
        }
    }
}

impl Loaded {
    /// Zeros, for a thread without a channel.
    const NONE: Self = Self {
        channel: Channel::NONE,
        x: Raw([0]),
    };
}

/// Window, taps and bias of one channel, unconverted. Inputs and taps end with the newest, for any W.
#[derive(Clone, Copy)]
pub struct Channel {
    /// The window. The first TAPS − W inputs are never used.
    inputs: [Raw<1>; TAPS - 1],
    taps: Raw<TAPS>,
    bias: Raw<1>,
}

impl Channel {
    /// Zeros, for a thread without a channel.
    pub const NONE: Self = Self {
        inputs: [Raw([0]); TAPS - 1],
        taps: Raw([0; TAPS]),
        bias: Raw([0]),
    };

    /// Loads channel `channel` of all D, for the row at `place`; the window only if the thread has the channel (`is_there`).
    ///
    /// # Safety
    /// `params` and `c` describe live tensors; if the row is live, nobody else writes the channel's window.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        channel: u32,
        is_there: bool,
    ) -> Self {
        let window = place.read_window(c, params) + channel as u64 * read_channel(c);
        let taps = load_taps(c, params, channel);
        let mut bias = Raw([0]);
        if c.has_conv_bias != 0 {
            let element = c.conv_bias_element;
            let address = params.conv_bias + channel as u64 * bytes_of(element) as u64;
            bias = load_one(address, element);
        }
        let mut inputs = [Raw([0]); TAPS - 1];
        each!(i in 0..TAPS - 1 => {
            if let Some(input) = input(c, i) {
                let address =
                    window + input * (c.read_windows_input * bytes_of(c.x_element)) as u64;
                inputs[i] = load_input(address, c.x_element, is_there && place.reads());
            }
            if place.is_fresh() {
                inputs[i] = Raw([0]);
            }
        });
        Self { inputs, taps, bias }
    }

    /// [`Self::load`] with the window after the pending tokens: its newest inputs are in `ring`, the older ones in the slot's
    /// window, which is as before the pending tokens. A flush loads no taps.
    ///
    /// # Safety
    /// As for [`Self::load`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_waiting(
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        ring: &InputRing,
        channel: u32,
    ) -> Self {
        let window = place.read_window(c, params) + channel as u64 * read_channel(c);
        let mut loaded = Self::NONE;
        if c.tokens != 0 {
            loaded.taps = load_taps(c, params, channel);
            if c.has_conv_bias != 0 {
                let bytes = bytes_of(c.conv_bias_element) as u64;
                let address = params.conv_bias + channel as u64 * bytes;
                loaded.bias = load_one(address, c.conv_bias_element);
            }
        }
        each!(i in 0..TAPS - 1 => {
            if input(c, i).is_some() {
                let (address, live) = match ring.pending_input(c, i, channel) {
                    Some(pending) => pending,
                    None => {
                        let at = i as u32 + c.taps + ring.pending() - TAPS as u32;
                        let first = at as u64 * c.read_windows_input as u64;
                        (window + first * bytes_of(c.x_element) as u64, place.reads())
                    }
                };
                loaded.inputs[i] = load_input(address, c.x_element, live);
            }
            if place.is_fresh() {
                loaded.inputs[i] = Raw([0]);
            }
        });
        loaded
    }

    /// y of the token with this x.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn convolve(&self, c: &StepConstants, x: Raw<1>) -> f32 {
        let [mut sum] = self.bias.to_f32(c.conv_bias_element);
        let taps = self.taps.to_f32(c.conv_weight_element);
        each!(i in 0..TAPS - 1 => {
            if input(c, i).is_some() {
                let [value] = self.inputs[i].to_f32(c.x_element);
                sum = fma(taps[i], value, sum);
            }
        });
        let [x] = x.to_f32(c.x_element);
        activate(c.conv_activation, fma(taps[TAPS - 1], x, sum))
    }

    /// Shifts the window by a token: drops its oldest input and appends x.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn shift(&mut self, x: Raw<1>) {
        each!(i in 0..TAPS - 2 => self.inputs[i] = self.inputs[i + 1]);
        self.inputs[TAPS - 2] = x;
    }

    /// [`Self::shift`] if `moves`; otherwise the window stays unchanged.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn shift_where(&mut self, moves: bool, x: Raw<1>) {
        let before = *self;
        self.shift(x);
        each!(i in 0..TAPS - 1 => {
            self.inputs[i] = if moves {
                self.inputs[i]
            } else {
                before.inputs[i]
            };
        });
    }

    /// Writes the window to the row's slot.
    ///
    /// # Safety
    /// As for [`Self::load`]; the row is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_window(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        channel: u32,
    ) {
        let channel = channel as u64 * (c.write_windows_channel * bytes_of(c.x_element)) as u64;
        let first = place.write_window(c, params) + channel;
        self.store_inputs(c, first, c.write_windows_input);
    }

    /// Writes the window from address `first` on; its inputs are `stride` elements apart.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_inputs(&self, c: &StepConstants, first: u64, stride: u32) {
        each!(i in 0..TAPS - 1 => {
            if let Some(input) = input(c, i) {
                let address = first + input * (stride * bytes_of(c.x_element)) as u64;
                store_element(c.x_element, address, self.inputs[i]);
            }
        });
    }

    /// With token slots: writes the inputs before the row's tokens, which are the window without its oldest input.
    ///
    /// # Safety
    /// As for [`Self::store_window`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_kept_inputs(
        &self,
        c: &StepConstants,
        params: &LayerParams,
        place: &Place,
        channel: u32,
    ) {
        let mut i = 1;
        while i < TAPS - 1 {
            if let Some(input) = input(c, i)
                && input > 0
            {
                let at = input as u32 - 1;
                store_input(c, params, place, channel, at, self.inputs[i]);
            }
            i += 1;
        }
    }
}

/// Writes a channel's input at index `at` of the row's window.
///
/// # Safety
/// As for [`Channel::store_window`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_input(
    c: &StepConstants,
    params: &LayerParams,
    place: &Place,
    channel: u32,
    at: u32,
    x: Raw<1>,
) {
    let element =
        channel as u64 * c.write_windows_channel as u64 + at as u64 * c.write_windows_input as u64;
    let address = place.write_window(c, params) + element * bytes_of(c.x_element) as u64;
    store_element(c.x_element, address, x);
}

/// Stores an element without conversion.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store_element(element: u32, address: u64, Raw([word]): Raw<1>) {
    if element == Element::F32 as u32 {
        store_b32(address, word);
    } else {
        store_b16(address, word as u16);
    }
}

/// The activation of x, which is a sum of the convolution or z.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn activate(activation: u32, x: f32) -> f32 {
    if activation == Activation::None as u32 {
        x
    } else if activation == Activation::Silu as u32 {
        x * gate::sigmoid(x)
    } else {
        gate::sigmoid(x)
    }
}

/// Bytes between channels of the windows that the row reads.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn read_channel(c: &StepConstants) -> u64 {
    (c.read_windows_channel * bytes_of(c.x_element)) as u64
}

/// Index in the window of input `i` of [`Channel`]: i − (TAPS − W); `None` if negative.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn input(c: &StepConstants, i: usize) -> Option<u64> {
    let absent = TAPS as u32 - c.taps;
    (i as u32 >= absent).then(|| (i as u32 - absent) as u64)
}

/// An input of a window, undefined unless `live`.
///
/// # Safety
/// If `live`, the address is that of an element.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_input(address: u64, element: u32, live: bool) -> Raw<1> {
    Raw([if element == Element::F32 as u32 {
        load_state_b32(address, live)
    } else {
        load_state_b16(address, live) as u32
    }])
}

/// The taps of a channel; the first TAPS − W are 0.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn load_taps(c: &StepConstants, params: &LayerParams, channel: u32) -> Raw<TAPS> {
    let element = c.conv_weight_element;
    let bytes = bytes_of(element) as u64;
    let address = params.conv_weight + channel as u64 * c.conv_weight_channel as u64 * bytes;
    if c.taps == TAPS as u32 {
        return load::<TAPS>(address, element, c.wide_conv_weight != 0);
    }
    let mut taps = Raw([0; TAPS]);
    each!(i in 0..TAPS => {
        let absent = TAPS as u32 - c.taps;
        if i as u32 >= absent {
            let Raw([tap]) = load_one(address + (i as u32 - absent) as u64 * bytes, element);
            if element == Element::F32 as u32 {
                taps.0[i] = tap;
            } else {
                taps.0[i / 2] |= tap << (16 * (i % 2));
            }
        }
    });
    taps
}

/// A channel that a thread of a block convolves: a channel of the block's part of q or k, which all blocks of the cluster need,
/// or of v of its own tile.
#[derive(Clone, Copy)]
pub struct Part {
    /// Whether the thread has a channel, and the step a convolution.
    pub is_there: bool,
    /// Index among all D channels.
    pub channel: u32,
    /// Index within the head (q, k), or among the block's channels of v, head by head.
    pub own: u32,
    /// The tensor.
    pub of: Qkv,
}

/// The tensors that the convolution computes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Qkv {
    /// q
    Query,
    /// k
    Key,
    /// v
    Value,
}

impl Part {
    /// Channel `i` of a block that has `tile` elements of v of each of its heads. The `blocks` of its cluster have equal parts of
    /// q and k.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn new(
        c: &StepConstants,
        row: Row,
        [k_dim, v_dim]: [u32; 2],
        (blocks, tile): (u32, u32),
        i: u32,
    ) -> Self {
        let part = k_dim / blocks;
        let keys = c.h * k_dim;
        if i < 2 * part {
            let own = row.tile * part + i % part;
            let of = if i < part { Qkv::Query } else { Qkv::Key };
            let first = if i < part { 0 } else { keys };
            return Self {
                is_there: c.taps != 0,
                channel: first + row.h * k_dim + own,
                own,
                of,
            };
        }
        let own = i - 2 * part;
        let (r, v) = (own / tile, row.tile * tile + own % tile);
        Self {
            is_there: c.taps != 0 && r < c.ratio,
            channel: 2 * keys + row.value_head(c, r) * v_dim + v,
            own,
            of: Qkv::Value,
        }
    }

    /// Channel `i` of a block that has `tile` elements of v of the row's value head, and `part` channels of q and k of its
    /// query/key head, from `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_head(
        c: &StepConstants,
        row: Row,
        [k_dim, v_dim]: [u32; 2],
        (first, part): (u32, u32),
        tile: u32,
        i: u32,
    ) -> Self {
        let keys = c.h * k_dim;
        if i < 2 * part {
            let (of, own) = if i < part {
                (Qkv::Query, first + i)
            } else {
                (Qkv::Key, first + i - part)
            };
            let head = if i < part { 0 } else { keys } + row.h * k_dim;
            return Self {
                is_there: c.taps != 0,
                channel: head + own,
                own,
                of,
            };
        }
        let own = i - 2 * part;
        Self {
            is_there: c.taps != 0 && own < tile,
            channel: 2 * keys + row.hv * v_dim + row.tile * tile + own,
            own,
            of: Qkv::Value,
        }
    }
}

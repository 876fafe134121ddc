//! The windows after a row's last token and after its checkpoints.

use super::convolution::ConvInputs;
use super::rows::Span;
use crate::layer::Place;
use crate::layer::conv::{TAPS, store_element};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of};
use crate::math::power::divided_long;
use crate::state::{is_live, slot_of};
use crate::step::{PrefillParams, StepConstants};

/// Inputs of a channel in a window, the latest in the last place.
pub type Window = [Raw<1>; TAPS - 1];

/// Window without a channel.
pub const NONE: Window = [Raw([0]); TAPS - 1];

/// Loads the window after a row's last token, for `channel` of all D; before any window is stored.
///
/// # Safety
/// `params` and `c` describe live tensors; the row has tokens and a slot.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn last(
    c: &StepConstants,
    params: &PrefillParams,
    span: &Span,
    place: &Place,
    channel: u32,
) -> Window {
    let inputs = ConvInputs::new(c, params, place);
    load(c, params, inputs, span, span.count, channel)
}

/// Stores the windows of a row for `channel` of all D; `last` is from [`last`].
///
/// # Safety
/// As for [`last`]; nobody else accesses the channel's windows.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn store(
    c: &StepConstants,
    params: &PrefillParams,
    (span, place): (&Span, &Place),
    channel: u32,
    last: Window,
) {
    let inputs = ConvInputs::new(c, params, place);
    if c.checkpoint_every != 0 {
        let every = c.checkpoint_every as u64;
        let (before, _) = divided_long(span.position, c.checkpoint_every);
        each!(number in 0..params.checkpoints as u64 => {
            let end = (before + number + 1) * every - span.position;
            if end > span.count as u64 {
                break;
            }
            let at = span.b as u64 * params.checkpoint_slots_row as u64 + number;
            let slot = slot_of(params.checkpoint_slots, c.checkpoint_index, at, u64::MAX);
            if is_live(slot, params.layer.write_windows_slots, c.null_slot) {
                let first = slot * c.write_windows_slot as u64 * bytes_of(c.x_element) as u64;
                let window = load(c, params, inputs, span, end as u32, channel);
                put(c, params.layer.write_windows + first, channel, window);
            }
        });
    }
    if c.update_state != 0 {
        put(c, place.write_window(c, &params.layer), channel, last);
    }
}

/// Loads the inputs before token `end`, the latest in the last place.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn load(
    c: &StepConstants,
    params: &PrefillParams,
    inputs: ConvInputs,
    span: &Span,
    end: u32,
    channel: u32,
) -> Window {
    let mut window = NONE;
    each!(i in 0..TAPS - 1 => {
        if i as u32 >= TAPS as u32 - c.taps {
            let t = end as i64 + i as i64 - (TAPS as i64 - 1);
            window[i] = inputs.raw((c, params), span, t, channel);
        }
    });
    window
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn put(c: &StepConstants, window: u64, channel: u32, inputs: Window) {
    each!(i in 0..TAPS - 1 => {
        let absent = TAPS as u32 - c.taps;
        if i as u32 >= absent {
            let element = channel as u64 * c.write_windows_channel as u64
                + (i as u32 - absent) as u64 * c.write_windows_input as u64;
            let address = window + element * bytes_of(c.x_element) as u64;
            store_element(c.x_element, address, inputs[i]);
        }
    });
}

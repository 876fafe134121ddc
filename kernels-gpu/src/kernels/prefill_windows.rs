//! The windows that a prefill with a convolution leaves: of both operators, behind all that read them.
//!
//! Math     docs/layer.md: the last W − 1 inputs of every channel, oldest first
//! Shapes   x [B, T, D], packed [1, total, D]   windows [P, D, W − 1]
//! Grid     x = ⌈D / block⌉, y = 1, z = b
//! Threads  one of a channel
//! Padding  an inactive row and one without tokens touch nothing
//! Truth    reference::layer; kernels-gpu/tests/prefill.rs, tests/prefill.rs

use crate::constants::Element;
use crate::device::thread::{block_idx_x, block_idx_z, thread_idx_x};
use crate::launch::{Computes, Family, Kernel, Layout};
use crate::layer::Place;
use crate::prefill::kernels::{constants, is_proved};
use crate::prefill::rows::Span;
use crate::prefill::windows;
use crate::step::PrefillParams;

/// The windows that rows leave, and those of their checkpoints: behind all that read them. A thread has a channel.
pub struct Windows<const K: u32, const V: u32>;

impl<const K: u32, const V: u32> Kernel for Windows<K, V> {
    type Params = PrefillParams;
    type Constants = crate::step::StepConstants;
    const BLOCK: u32 = 256;
    const TILES: u32 = 1;
    const PROVED: bool = is_proved(K);
    const COMPUTES: Option<Computes> = Some(Computes {
        family: Family::PrefillWindows,
        layout: Layout::KLast,
        state: Element::F32,
        k: K,
        v: V,
    });

    #[inline(always)]
    unsafe fn run(params: &PrefillParams) {
        let c = constants();
        let channel = block_idx_x() * Self::BLOCK + thread_idx_x();
        if c.taps < 2 || channel >= 2 * c.h * K + c.h * c.ratio * V {
            return;
        }
        // SAFETY: the caller's promise; a thread has a channel of a row.
        unsafe {
            let span = Span::load(&c, params, block_idx_z());
            if span.count == 0 {
                return;
            }
            let place = Place::load(&c, &params.layer, span.b);
            if place.live() {
                windows::store(&c, params, &span, &place, channel);
            }
        }
    }
}

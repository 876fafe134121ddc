//! GDN decode on K-last states; steps are those of the operator's header.

use core::marker::PhantomData;

use super::row::{DecodeGates, DecodeSlots};
use crate::device::float::fma;
use crate::device::thread::thread_idx_x;
use crate::launch::{Computes, Description, Family, Kernel, Layout};
use crate::math::delta_rule::Factors;
use crate::math::each::each;
use crate::math::elements::{self, load};
use crate::math::range::may_overflow;
use crate::math::reduce::{butterfly_sum_pairs, dot_parts};
use crate::recurrent::klast::{normable_of, parts_to_f32};
use crate::row::Row;
use crate::state::{Share, StateElement, check_k_last, lanes_of};
use crate::step::{StepConstants, StepParams};

/// K-last states: `ROWS` rows of S per group of [`lanes_of`] lanes, all in flight at once; `THREADS` of a block.
pub struct KLast<
    S,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize = 1,
>(PhantomData<S>);

impl<
    S: StateElement,
    const K: u32,
    const V: u32,
    const ROWS: usize,
    const THREADS: u32,
    const PARTS: usize,
> Kernel for KLast<S, K, V, ROWS, THREADS, PARTS>
{
    type Params = StepParams;
    type Constants = StepConstants;
    const DESCRIPTION: Description = Description {
        tiles: V / (THREADS / lanes_of(K, PARTS) * ROWS as u32),
        ..Description::of(
            THREADS,
            Computes::new(Family::DECODE, Some(false), [K, V]).on(Layout::KLast, S::ELEMENT),
        )
    };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    unsafe fn run(params: &StepParams) {
        const { check_k_last((K, PARTS), V, ROWS as u32, THREADS) };
        let lanes = const { lanes_of(K, PARTS) };
        let c = StepConstants::get();
        let row = Row::of_block(
            c.h,
            c.ratio,
            c.tiled != 0,
            const { Self::DESCRIPTION.tiles },
        );
        let share = Share {
            lane: thread_idx_x() % lanes,
            lanes,
            first: 0,
        };
        let first = (row.tile * (THREADS / lanes) + thread_idx_x() / lanes) * ROWS as u32;
        let wide = c.wide_io != 0;
        // SAFETY: the caller's promise; a group owns its ROWS rows, a lane its share of each.
        unsafe {
            let slots = DecodeSlots::load(&c, params, row.b);
            let live = slots.live(&c, params);
            let read = slots.read_head::<S>(&c, params, (row.hv, [V, K]));
            let from = (live, slots.is_fresh());
            let raw = read.load_start_rows::<S, ROWS, PARTS>(share, first, from);
            let k = share.load_parts::<S, PARTS>(row.k(&c, params, 0), c.k_element, wide);
            let q = share.load_parts::<S, PARTS>(row.q(&c, params, 0), c.q_element, wide);
            let v = load::<ROWS>(row.v(&c, params, first), c.v_element, wide);
            let gates = DecodeGates::load(&c, params, row);
            // Loads first: docs/compiler.md.
            if !live {
                if share.lane == 0 {
                    elements::store([0.0; ROWS], row.o(&c, params, first), c.o_element, wide);
                }
                return;
            }

            let (k, q, v) = (
                parts_to_f32(k, c.k_element),
                parts_to_f32(q, c.q_element),
                v.to_f32(c.v_element),
            );
            let may_overflow = may_overflow(c.l2norm != 0, [c.k_element, c.q_element]);
            let ((k, q), norms) = normable_of(may_overflow, (k, q), lanes); // (1)
            let factors = Factors::new(
                c.l2norm != 0,
                f32::from_bits(c.scale),
                norms,
                gates.values(&c),
            );

            let mut products = [[0.0; 2]; ROWS];
            each!(r in 0..ROWS => {
                let s = raw[r].map(|raw| S::widen(&c, raw));
                products[r] = [dot_parts(s, k), dot_parts(s, q)];
            });
            let products = butterfly_sum_pairs(products, 1, lanes);
            let write = slots.write_head::<S>(&c, params, (row.hv, [V, K]));
            let mut o = [0.0; ROWS];
            each!(r in 0..ROWS => {
                let [sk, sq] = products[r];
                let delta = factors.delta(v[r], sk); // (3)
                o[r] = factors.output(sq, delta); // (5)
                if c.update_state != 0 {
                    let step = delta * factors.k;
                    let mut next = raw[r].map(|raw| S::widen(&c, raw));
                    each!(part in 0..PARTS => {
                        each!(i in 0..8 => {
                            let s = next[part][i];
                            next[part][i] = fma(step, k[part][i], factors.decay * s); // (2) (4)
                        });
                    });
                    write.store_row::<S, PARTS>(&c, share, first + r as u32, next);
                }
            });
            if share.lane == 0 {
                elements::store(o, row.o(&c, params, first), c.o_element, wide);
            }
        }
    }
}

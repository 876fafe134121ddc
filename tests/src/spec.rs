//! Random problems: the values and slots that follow from a shape, some choices and a seed.

use gated_delta::ops::gdn_decode::GdnDecodeOptions;
use gated_delta::ops::{BetaScale, StateLayout};
use gated_delta::{DType, Entry};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::case::Case;
use crate::layout::Form;
use crate::problem::{Array, Problem, Raw};
use crate::slots::{SlotChoice, Slots};

/// Which kernels compute a problem: all entries of one layout, state dtype and K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// Which dim of a state is contiguous.
    pub layout: StateLayout,
    /// Element of the pools.
    pub state: DType,
    /// K = V.
    pub dim: usize,
}

impl Family {
    /// All families.
    pub fn all() -> impl Iterator<Item = Self> {
        let of_layout = |layout| {
            let of_dim =
                move |dim| [DType::F32, DType::Bf16].map(move |state| Self { layout, state, dim });
            [64, 128].into_iter().flat_map(of_dim)
        };
        [StateLayout::KLast, StateLayout::VLast]
            .into_iter()
            .flat_map(of_layout)
    }

    /// The family of an entry of `gdn_decode`.
    ///
    /// # Panics
    /// Where the entry's name is not of the form `gdn_decode_klast_bf16_k128_tile32`.
    #[must_use]
    pub fn of(entry: Entry) -> Self {
        let words: Vec<&str> = entry.name().split('_').collect();
        let ["gdn", "decode", layout, state, dim, ..] = words[..] else {
            panic!("{}", entry.name())
        };
        Self {
            layout: if layout == "klast" {
                StateLayout::KLast
            } else {
                StateLayout::VLast
            },
            state: if state == "f32" {
                DType::F32
            } else {
                DType::Bf16
            },
            dim: dim[1..]
                .parse()
                .unwrap_or_else(|_| panic!("{}", entry.name())),
        }
    }
}

/// How large q and k are.
#[derive(Clone, Copy, Debug)]
pub enum Magnitude {
    /// Of elements around 1, or of unit norm where the kernel does not normalise.
    Usual,
    /// Σk² around the 1e-6 of the norm.
    Tiny,
    /// A hundred times the usual.
    Large,
    /// Some heads are all zero.
    Zeros,
}

/// A random problem and its form.
#[derive(Clone, Debug)]
pub struct Spec {
    /// B
    pub batch: usize,
    /// H
    pub heads: usize,
    /// HV / H
    pub ratio: usize,
    /// K = V
    pub dim: usize,
    /// Raw gates with a factor of sigmoid(b), or given ones.
    pub raw: Option<BetaScale>,
    /// Of q and k.
    pub magnitude: Magnitude,
    /// Gates at the ends of their range.
    pub extreme_gates: bool,
    /// Of slots.
    pub slots: SlotChoice,
    /// Of the layer.
    pub options: GdnDecodeOptions,
    /// In memory.
    pub form: Form,
    /// Of the values.
    pub seed: u64,
}

impl Spec {
    /// An ordinary problem: two rows, raw gates, dense, bf16 but for the state.
    #[must_use]
    pub fn plain(family: Family) -> Self {
        Self {
            batch: 2,
            heads: 2,
            ratio: 2,
            dim: family.dim,
            raw: Some(BetaScale::One),
            magnitude: Magnitude::Usual,
            extreme_gates: false,
            slots: SlotChoice::NONE,
            options: GdnDecodeOptions {
                state_layout: family.layout,
                ..GdnDecodeOptions::default()
            },
            form: Form {
                state: family.state,
                qkvo: [DType::Bf16; 4],
                gates: [DType::Bf16; 2],
                ..Form::PLAIN
            },
            seed: 1,
        }
    }

    /// HV
    #[must_use]
    pub fn value_heads(&self) -> usize {
        self.heads * self.ratio
    }

    /// Laid out.
    #[must_use]
    pub fn case(&self) -> Case {
        self.problem().case(&self.form)
    }

    /// Its values. What no live row reads is NaN.
    #[must_use]
    pub fn problem(&self) -> Problem {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let (pool_slots, write_pool_slots) = self.pool_slots();
        let Slots {
            read: read_slots,
            write: write_slots,
            live,
        } = self.draw_slots(&mut rng);
        let (batch, hv, dim) = (self.batch, self.value_heads(), self.dim);
        let size = match self.magnitude {
            Magnitude::Tiny => 1e-3 / (dim as f32).sqrt(),
            Magnitude::Large => 100.0,
            _ => 1.0,
        };
        let size = if self.options.qk_l2norm {
            size
        } else {
            size / (dim as f32).sqrt()
        };
        let zeros = matches!(self.magnitude, Magnitude::Zeros);
        let mut qk = || {
            let mut array = Array::new(&[batch, self.heads, dim], || size * unit(&mut rng));
            array
                .values
                .chunks_mut(dim)
                .filter(|_| zeros && rng.random())
                .for_each(|head| head.fill(0.0));
            array
        };
        let (q, k) = (qk(), qk());
        let v = Array::new(&[batch, hv, dim], || unit(&mut rng));
        let (a, b, raw) = self.draw_gates(&mut rng);
        let states = [pool_slots, hv, dim, dim];
        let pool = Array::new(&states, || unit(&mut rng));
        let write_pool =
            write_pool_slots.map(|slots| Array::new(&[slots, hv, dim, dim], || f32::NAN));
        let options = self.options;
        let mut problem = Problem {
            q,
            k,
            v,
            a,
            b,
            raw,
            pool,
            write_pool,
            read_slots,
            write_slots,
            options,
        };
        for b in (0..batch).filter(|&b| live[b].is_none()) {
            for array in [
                &mut problem.q,
                &mut problem.k,
                &mut problem.v,
                &mut problem.a,
                &mut problem.b,
            ] {
                array.entry_mut(b).fill(f32::NAN);
            }
        }
        for slot in
            (0..pool_slots).filter(|&slot| !live.iter().flatten().any(|(read, _)| *read == slot))
        {
            problem.pool.entry_mut(slot).fill(f32::NAN);
        }
        problem
    }

    /// P of the pool and of the write pool.
    pub(crate) fn pool_slots(&self) -> (usize, Option<usize>) {
        let slots = self.batch + self.slots.spare;
        (
            slots,
            self.slots
                .write_pool
                .map(|more| slots.saturating_add_signed(more).max(1)),
        )
    }

    /// a, b and what raw gates need besides.
    fn draw_gates(&self, rng: &mut StdRng) -> (Array, Array, Option<Raw>) {
        let (rows, heads) = ([self.batch, self.value_heads()], [self.value_heads()]);
        let mut draw = |dims: &[usize], usual: [f32; 2], ends: &[f32]| {
            Array::new(dims, || match rng.random_range(0..4) {
                0 => rng.random_range(usual[0]..usual[1]),
                _ if !self.extreme_gates => rng.random_range(usual[0]..usual[1]),
                _ => ends[rng.random_range(0..ends.len())],
            })
        };
        let Some(beta_scale) = self.raw else {
            return (
                draw(&rows, [-3.0, 0.0], &[0.0, -1e4]),
                draw(&rows, [0.0, 2.0], &[0.0, 1.0, 2.0]),
                None,
            );
        };
        let a = draw(&rows, [-4.0, 4.0], &[1e4, -1e4]);
        let b = draw(&rows, [-4.0, 4.0], &[1e4, -1e4]);
        let a_log = draw(&heads, [0.0, 16f32.ln()], &[100.0, -100.0]);
        (
            a,
            b,
            Some(Raw {
                a_log,
                dt_bias: draw(&heads, [-2.0, 1.0], &[0.0]),
                beta_scale,
            }),
        )
    }
}

/// Around 0, of variance 1.
fn unit(rng: &mut StdRng) -> f32 {
    rng.random_range(-1.0..1.0) * 3f32.sqrt()
}

//! One cell of the GDN decode table: rotating buffers, the check against the reference, the launch.

use anyhow::{Result, ensure};
use gated_delta::driver::{Context, DeviceMemory, Stream};
use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::{BetaScale, GdnGates, StateLayout};
use gated_delta::{DType, Entry, Error, Library, Tensor};
use gated_delta_reference::gdn;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::shapes::Model;
use crate::timing::cold_sets;

/// What one cell measures.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Heads.
    pub model: Model,
    /// K = V.
    pub dim: usize,
    /// B.
    pub batch: usize,
    /// State dtype.
    pub state: DType,
    /// State layout.
    pub layout: StateLayout,
    /// Rotate over buffers that no cache holds, or stay on one set.
    pub cold: bool,
}

impl Cell {
    /// Bytes of the states of one set.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        self.batch * self.model.value_heads * self.dim * self.dim * self.state.size_of()
    }
}

/// Buffers of one launch.
struct Set {
    q: DeviceMemory,
    k: DeviceMemory,
    v: DeviceMemory,
    a: DeviceMemory,
    b: DeviceMemory,
    o: DeviceMemory,
    pool: DeviceMemory,
}

/// Buffer sets of a cell, with what the check needs of the first.
pub struct Buffers {
    cell: Cell,
    sets: Vec<Set>,
    a_log: DeviceMemory,
    dt_bias: DeviceMemory,
    host: Host,
}

/// Values of every set, which are alike.
struct Host {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    a: Vec<bf16>,
    b: Vec<bf16>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    /// States of one row; every row has these.
    row: Vec<f32>,
}

fn random(rng: &mut SmallRng, count: usize, low: f32, high: f32) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(low..high)).collect()
}

fn rounded(values: Vec<f32>) -> Vec<bf16> {
    values.into_iter().map(bf16::from_f32).collect()
}

impl Buffers {
    /// Allocates and fills every set.
    pub fn new(context: &Context, cell: Cell) -> Result<Self> {
        let mut rng = SmallRng::seed_from_u64(0x6764);
        let Model {
            heads, value_heads, ..
        } = cell.model;
        let dim = cell.dim;
        let mut bf16s = |count, low, high| rounded(random(&mut rng, count, low, high));
        let (qk, vo, gates) = (
            cell.batch * heads * dim,
            cell.batch * value_heads * dim,
            cell.batch * value_heads,
        );
        let (q, k, v) = (
            bf16s(qk, -1.0, 1.0),
            bf16s(qk, -1.0, 1.0),
            bf16s(vo, -1.0, 1.0),
        );
        let (a, b) = (bf16s(gates, -2.0, 2.0), bf16s(gates, -2.0, 2.0));
        let mut row = random(&mut rng, value_heads * dim * dim, -0.2, 0.2);
        let a_log = random(&mut rng, value_heads, -0.7, 1.4);
        let dt_bias = random(&mut rng, value_heads, -1.2, -0.8);
        if cell.state == DType::Bf16 {
            row.iter_mut()
                .for_each(|x| *x = bf16::from_f32(*x).to_f32());
        }
        let states: Vec<u8> = match cell.state {
            DType::Bf16 => row
                .iter()
                .flat_map(|&x| bf16::from_f32(x).to_ne_bytes())
                .collect(),
            _ => bytemuck::cast_slice(&row).to_vec(),
        };
        let states = states.repeat(cell.batch);
        let count = if cell.cold {
            cold_sets(cell.state_bytes())
        } else {
            1
        };
        let upload = |values: &[bf16]| DeviceMemory::from_slice(context, bits(values));
        let mut sets = Vec::with_capacity(count);
        for _ in 0..count {
            let mut o = DeviceMemory::allocate(context, vo * 2)?;
            o.fill(0xff)?;
            sets.push(Set {
                q: upload(&q)?,
                k: upload(&k)?,
                v: upload(&v)?,
                a: upload(&a)?,
                b: upload(&b)?,
                o,
                pool: DeviceMemory::from_slice(context, &states)?,
            });
        }
        Ok(Self {
            cell,
            sets,
            a_log: DeviceMemory::from_slice(context, &a_log)?,
            dt_bias: DeviceMemory::from_slice(context, &dt_bias)?,
            host: Host {
                q,
                k,
                v,
                a,
                b,
                a_log,
                dt_bias,
                row,
            },
        })
    }

    /// Number of sets.
    #[must_use]
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// The states of a set as the floor takes them: f32 words.
    pub fn words(&self, set: usize) -> Result<Tensor<'_>, Error> {
        let address = self.sets[set % self.sets.len()].pool.address();
        // SAFETY: the set owns its memory for as long as it is borrowed.
        unsafe { Tensor::from_raw(address, DType::F32, &[self.cell.state_bytes() / 4]) }
    }

    /// Arguments of the launch on a set.
    pub fn args(&self, set: usize) -> Result<GdnDecode<'_>, Error> {
        let set = &self.sets[set % self.sets.len()];
        let Cell {
            model: Model {
                heads, value_heads, ..
            },
            dim,
            batch,
            state,
            layout,
            ..
        } = self.cell;
        let gates = [batch, 1, value_heads];
        // SAFETY: the sets own their memory for as long as the arguments borrow them, and nothing else uses it.
        let written = |memory: &DeviceMemory, dtype, dims: &[usize]| unsafe {
            Tensor::from_raw(memory.address(), dtype, dims)
        };
        Ok(GdnDecode {
            q: set.q.tensor(DType::Bf16, &[batch, 1, heads, dim])?,
            k: set.k.tensor(DType::Bf16, &[batch, 1, heads, dim])?,
            v: set.v.tensor(DType::Bf16, &[batch, 1, value_heads, dim])?,
            gates: GdnGates::Raw {
                a: set.a.tensor(DType::Bf16, &gates)?,
                b: set.b.tensor(DType::Bf16, &gates)?,
                a_log: self.a_log.tensor(DType::F32, &[value_heads])?,
                dt_bias: self.dt_bias.tensor(DType::F32, &[value_heads])?,
                beta_scale: BetaScale::One,
            },
            o: written(&set.o, DType::Bf16, &[batch, 1, value_heads, dim])?,
            pool: written(&set.pool, state, &[batch, value_heads, dim, dim])?,
            write_pool: None,
            read_slots: None,
            write_slots: None,
            options: GdnDecodeOptions {
                state_layout: layout,
                ..GdnDecodeOptions::default()
            },
        })
    }

    /// Launches `variant` once on the first set and compares the first and last row with the reference.
    /// Returns the larger of the relative errors of o and of the state.
    pub fn check(&self, library: &Library, stream: &Stream, variant: Entry) -> Result<f64> {
        let Cell {
            model: Model {
                heads, value_heads, ..
            },
            dim,
            batch,
            state,
            layout,
            ..
        } = self.cell;
        // SAFETY: the buffers live until the stream is waited for.
        unsafe { library.gdn_decode_with(stream.as_ref(), &self.args(0)?, variant) }?;
        stream.synchronize()?;
        let mut o = vec![0u16; batch * value_heads * dim];
        self.sets[0].o.read(&mut o)?;
        let mut pool = vec![0u8; self.cell.state_bytes()];
        self.sets[0].pool.read(&mut pool)?;
        let host = &self.host;
        let row_elements = value_heads * dim * dim;
        let start: Vec<f64> = host.row.iter().map(|&x| f64::from(x)).collect();
        let mut worst = 0f64;
        for row in [0, batch - 1] {
            let wide = |values: &[bf16], width: usize| -> Vec<f64> {
                values[row * width..(row + 1) * width]
                    .iter()
                    .map(|x| x.to_f64())
                    .collect()
            };
            let f64s =
                |values: &[f32]| -> Vec<f64> { values.iter().map(|&x| f64::from(x)).collect() };
            let truth = gdn::decode(
                &gdn::GdnDecode {
                    batch: 1,
                    heads,
                    value_heads,
                    key_dim: dim,
                    value_dim: dim,
                    q: &wide(&host.q, heads * dim),
                    k: &wide(&host.k, heads * dim),
                    v: &wide(&host.v, value_heads * dim),
                    gates: gdn::Gates::Raw {
                        a: &wide(&host.a, value_heads),
                        b: &wide(&host.b, value_heads),
                        a_log: &f64s(&host.a_log),
                        dt_bias: &f64s(&host.dt_bias),
                        beta_scale: 1.0,
                    },
                    l2norm: true,
                    scale: 1.0 / (dim as f64).sqrt(),
                    head_map: gdn::HeadMap::Grouped,
                    layout: if layout == StateLayout::KLast {
                        gdn::Layout::KLast
                    } else {
                        gdn::Layout::VLast
                    },
                    read_slots: None,
                    write_slots: None,
                    null_slot: None,
                    update_state: true,
                },
                &start,
            )?;
            let got_o = o[row * value_heads * dim..(row + 1) * value_heads * dim]
                .iter()
                .map(|&x| bf16::from_bits(x).to_f64());
            worst = worst.max(relative_error(got_o, &truth.o));
            let bytes = &pool
                [row * row_elements * state.size_of()..(row + 1) * row_elements * state.size_of()];
            worst = worst.max(match state {
                DType::Bf16 => relative_error(
                    bytemuck::cast_slice::<u8, u16>(bytes)
                        .iter()
                        .map(|&x| bf16::from_bits(x).to_f64()),
                    &truth.pool,
                ),
                _ => relative_error(
                    bytemuck::cast_slice::<u8, f32>(bytes)
                        .iter()
                        .map(|&x| f64::from(x)),
                    &truth.pool,
                ),
            });
        }
        ensure!(
            worst <= 4e-3,
            "{}: relative error {worst:.1e} against the reference",
            variant.name()
        );
        Ok(worst)
    }
}

fn bits(values: &[bf16]) -> &[u16] {
    values.reinterpret_cast()
}

fn relative_error(got: impl Iterator<Item = f64>, truth: &[f64]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (got, &truth) in got.zip(truth) {
        error += (got - truth).powi(2);
        norm += truth.powi(2);
    }
    let relative = (error / norm).sqrt();
    if relative.is_finite() {
        relative
    } else {
        f64::INFINITY
    }
}

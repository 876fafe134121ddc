//! Initial values of the buffer sets of a cell.

use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use gated_delta::DType;

use gated_delta_harness::arguments::{DecayKind, Operator};

use crate::cell::{Cell, Mode};

/// Number of slots with states of their own. Other slots repeat these: more would not be worth their upload.
pub const DISTINCT_SLOTS: usize = 3;

/// Lower bound of KDA's log decay, for gates that have one.
pub const LOWER_BOUND: f32 = -5.0;

/// Tokens of all rows.
pub struct Tokens {
    /// Keys, `[B, T, H, K]`
    pub k: Vec<bf16>,
    /// Values, `[B, T, HV, V]`
    pub v: Vec<bf16>,
    /// Gates a or g, `[B, T, HV]`, KDA `[B, T, HV, K]`
    pub gate: Vec<bf16>,
    /// Gates b or β, `[B, T, HV]`
    pub beta: Vec<bf16>,
}

/// Values of a cell's tensors.
pub struct Inputs {
    /// Queries, `[B, T, H, K]`
    pub q: Vec<bf16>,
    /// New tokens; in a commit, the tokens to commit.
    pub tokens: Tokens,
    /// Previous tokens, in a resume.
    pub previous: Option<Tokens>,
    /// Gate parameter, `[HV]`
    pub a_log: Vec<f32>,
    /// Gate parameter, `[HV]`, KDA `[HV, K]`
    pub dt_bias: Vec<f32>,
    /// `[B]`: number of tokens to commit.
    pub keep: Vec<i32>,
    /// `[B]`: slot of each row.
    pub slots: Vec<i32>,
    /// `[B, T]`: slot of the state after each token.
    pub token_slots: Vec<i32>,
    /// `[B]`: number of accepted tokens of the last step.
    pub accepted: Vec<i32>,
    /// States of [`DISTINCT_SLOTS`] slots, rounded to the state's dtype.
    pub states: Vec<f32>,
    /// Values of the convolution and the norm, in a layer step.
    pub around: Option<Around>,
}

/// Taps of a layer's convolution, W.
pub const TAPS: usize = 4;
/// Epsilon of a layer's norm.
pub const EPS: f32 = 1e-6;

/// Values of a layer's convolution and norm.
pub struct Around {
    /// `[B, T, D + HV · V]`: x, then z, side by side as in a single projection.
    pub projection: Vec<bf16>,
    /// `[B, T, D]`: x of the previous tokens, in a resume.
    pub previous_x: Vec<bf16>,
    /// Taps of the convolution, `[D, W]`
    pub conv_weight: Vec<bf16>,
    /// Windows of [`DISTINCT_SLOTS`] slots, `[D, W − 1]` each.
    pub windows: Vec<bf16>,
    /// Weight of the norm, `[V]`
    pub norm_weight: Vec<bf16>,
}

impl Around {
    fn of(cell: &Cell, rng: &mut SmallRng) -> Self {
        let (channels, values) = (cell.channels(), cell.model.value_heads * cell.value_dim());
        let tokens = cell.batch * cell.tokens;
        let previous = if cell.mode.has_previous() { tokens } else { 0 };
        Self {
            projection: rounded(rng, tokens * (channels + values), -2.0, 2.0),
            previous_x: rounded(rng, previous * channels, -2.0, 2.0),
            conv_weight: rounded(rng, channels * TAPS, -0.7, 0.7),
            windows: rounded(rng, DISTINCT_SLOTS * channels * (TAPS - 1), -2.0, 2.0),
            norm_weight: rounded(rng, cell.value_dim(), 0.5, 1.5),
        }
    }
}

impl Inputs {
    /// Random values, the same for equal cells.
    #[must_use]
    pub fn of(cell: &Cell) -> Self {
        let mut rng = SmallRng::seed_from_u64(0x6764);
        let Cell {
            batch,
            tokens: steps,
            dim,
            ..
        } = *cell;
        let (heads, value_heads) = (cell.model.heads, cell.model.value_heads);
        let kda = cell.op.operator() == Operator::Kda;
        let q = rounded(&mut rng, batch * steps * heads * dim, -1.0, 1.0);
        let tokens = Tokens::of(cell, &mut rng);
        let previous = (cell.mode == Mode::Resume).then(|| Tokens::of(cell, &mut rng));
        let parameters = if kda { value_heads * dim } else { value_heads };
        let mut counts = |low: i32| -> Vec<i32> {
            let most = steps as i32;
            (0..batch).map(|_| rng.random_range(low..=most)).collect()
        };
        let (keep, accepted) = (counts(0), counts(1));
        let mut states = random(
            &mut rng,
            DISTINCT_SLOTS * value_heads * dim * cell.value_dim(),
            -0.2,
            0.2,
        );
        for state in &mut states {
            *state = match cell.state {
                DType::Bf16 => bf16::from_f32(*state).to_f32(),
                DType::F16 => f16::from_f32(*state).to_f32(),
                _ => *state,
            };
        }
        let mut shuffled = |count: usize| {
            let mut slots: Vec<i32> = (0..count as i32).collect();
            slots.shuffle(&mut rng);
            slots
        };
        let slots = if cell.slots {
            shuffled(batch)
        } else {
            (0..batch as i32).collect()
        };
        Self {
            q,
            tokens,
            previous,
            keep,
            accepted,
            slots,
            token_slots: shuffled(batch * steps),
            a_log: random(&mut rng, value_heads, -0.7, 1.4),
            dt_bias: random(&mut rng, parameters, -1.2, -0.8),
            states,
            around: cell.op.is_layer().then(|| Around::of(cell, &mut rng)),
        }
    }

    /// Bytes of `states` in the state's dtype.
    #[must_use]
    pub fn state_bytes(&self, dtype: DType) -> Vec<u8> {
        match dtype {
            DType::Bf16 => self
                .states
                .iter()
                .flat_map(|&x| bf16::from_f32(x).to_ne_bytes())
                .collect(),
            DType::F16 => self
                .states
                .iter()
                .flat_map(|&x| f16::from_f32(x).to_ne_bytes())
                .collect(),
            _ => bytemuck::cast_slice(&self.states).to_vec(),
        }
    }
}

impl Tokens {
    fn of(cell: &Cell, rng: &mut SmallRng) -> Self {
        let tokens = cell.batch * cell.tokens;
        let of_value_heads = tokens * cell.model.value_heads;
        let ((gates, low, high), (beta_low, beta_high)) = match (cell.op.operator(), cell.gate) {
            (Operator::Gdn, _) => ((of_value_heads, -2.0, 2.0), (-2.0, 2.0)),
            (Operator::Kda, DecayKind::Log) => ((of_value_heads * cell.dim, -0.5, 0.0), (0.0, 1.0)),
            (Operator::Kda, _) => ((of_value_heads * cell.dim, -2.0, 2.0), (0.0, 1.0)),
        };
        Self {
            k: rounded(rng, tokens * cell.model.heads * cell.dim, -1.0, 1.0),
            v: rounded(rng, of_value_heads * cell.value_dim(), -1.0, 1.0),
            gate: rounded(rng, gates, low, high),
            beta: rounded(rng, of_value_heads, beta_low, beta_high),
        }
    }
}

fn random(rng: &mut SmallRng, count: usize, low: f32, high: f32) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(low..high)).collect()
}

fn rounded(rng: &mut SmallRng, count: usize, low: f32, high: f32) -> Vec<bf16> {
    (0..count)
        .map(|_| bf16::from_f32(rng.random_range(low..high)))
        .collect()
}

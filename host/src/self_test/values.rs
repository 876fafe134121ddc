//! Random values for a launch, exact in the dtypes that they are stored in.

use half::bf16;

use super::cases::{Case, GateKind, ROWS, SLOTS, TAPS};

/// Epsilon of the norm.
pub const EPS: f32 = 1e-6;

/// Values of the new or the previous tokens.
pub struct Tokens {
    /// `[B, T, H, K]`.
    pub k: Vec<f64>,
    /// `[B, T, HV, V]`.
    pub v: Vec<f64>,
    /// `[B, T, HV]`, with KDA `[B, T, HV, K]`.
    pub gate: Vec<f64>,
    /// `[B, T, HV]`.
    pub beta: Vec<f64>,
}

/// Values of a launch.
pub struct Values {
    /// `[B, T, H, K]`.
    pub q: Vec<f64>,
    pub tokens: Tokens,
    pub previous: Tokens,
    /// `[HV]`.
    pub a_log: Vec<f64>,
    /// `[HV]`, with KDA `[HV, K]`.
    pub dt_bias: Vec<f64>,
    /// `[P, HV, V, K]` or `[P, HV, K, V]`; NaN in slots that no row starts from.
    pub pool: Vec<f64>,
    pub around: Around,
}

/// Values of a convolution and a norm; empty if the case has neither.
#[derive(Default)]
pub struct Around {
    /// `[B, T, D]`.
    pub x: Vec<f64>,
    /// `[B, T', D]`.
    pub previous_x: Vec<f64>,
    /// `[D, W]`.
    pub conv_weight: Vec<f64>,
    /// `[D]`.
    pub conv_bias: Vec<f64>,
    /// `[P, D, W - 1]`, with token slots `[P, D, W - 2 + T]`; NaN except for the windows that rows start from.
    pub windows: Vec<f64>,
    /// `[B, T, HV, V]`.
    pub z: Vec<f64>,
    /// `[V]`.
    pub norm_weight: Vec<f64>,
}

impl Values {
    pub fn of(case: &Case) -> Self {
        let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15 ^ u64::from(case.kind.k_dim));
        let (h, hv) = case.heads();
        let (k_dim, v_dim) = (case.key_dim(), case.value_dim());
        let new = ROWS * case.way.tokens;
        let per_head = match case.gates {
            GateKind::GdnRaw | GateKind::GdnGiven => 1,
            _ => k_dim,
        };
        let tokens = numbers.tokens(case, new, per_head);
        let previous = numbers.tokens(case, ROWS * case.way.previous, per_head);
        let pool = numbers.pool(case, case.state());
        let mut values = Self {
            q: numbers.between(-1.0, 1.0, new * h * k_dim),
            tokens,
            previous,
            a_log: numbers.between(-1.0, 1.0, hv),
            dt_bias: numbers.between(-1.0, 1.0, hv * per_head),
            pool,
            around: Around::default(),
        };
        let around = &mut values.around;
        if case.way.conv {
            let channels = case.channels();
            around.x = numbers.between(-1.0, 1.0, new * channels);
            around.conv_weight = numbers.between(-1.0, 1.0, channels * TAPS);
            around.conv_bias = numbers.between(-0.5, 0.5, channels);
            around.windows = numbers.windows(case);
            around.previous_x = numbers.between(-1.0, 1.0, ROWS * case.way.previous * channels);
        }
        if case.way.norm {
            around.z = numbers.between(-2.0, 2.0, new * hv * v_dim);
            around.norm_weight = numbers.between(0.5, 1.5, v_dim);
        }
        values
    }
}

/// A pseudo-random sequence of numbers.
pub struct Numbers(pub u64);

impl Numbers {
    /// The next `count` numbers in `low`..`high`, exact in bf16.
    pub fn between(&mut self, low: f64, high: f64, count: usize) -> Vec<f64> {
        let next = |_| {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            let unit = (self.0 >> 11) as f64 / (1u64 << 53) as f64;
            bf16::from_f64(low + (high - low) * unit).to_f64()
        };
        (0..count).map(next).collect()
    }

    /// States of `len` elements in the slots that rows start from, NaN in all others.
    fn pool(&mut self, case: &Case, len: usize) -> Vec<f64> {
        let mut pool = vec![f64::NAN; SLOTS * len];
        for slot in (0..ROWS).filter_map(|b| case.start(b)) {
            pool[slot * len..][..len].copy_from_slice(&self.between(-0.5, 0.5, len));
        }
        pool
    }

    /// The windows that rows start from; all other elements are NaN.
    fn windows(&mut self, case: &Case) -> Vec<f64> {
        let (channels, inputs) = (case.channels(), case.window_inputs());
        let mut windows = vec![f64::NAN; SLOTS * channels * inputs];
        for (slot, column) in (0..ROWS).filter_map(|b| case.window(b)) {
            let slot = &mut windows[slot * channels * inputs..][..channels * inputs];
            for channel in slot.chunks_mut(inputs) {
                let window = self.between(-1.0, 1.0, TAPS - 1);
                channel[column..][..TAPS - 1].copy_from_slice(&window);
            }
        }
        windows
    }

    fn tokens(&mut self, case: &Case, count: usize, gates_per_head: usize) -> Tokens {
        let (h, hv) = case.heads();
        let (gate, beta) = match case.gates {
            GateKind::GdnGiven | GateKind::KdaLog => ((-1.5, 0.0), (0.0, 1.0)),
            _ => ((-2.0, 2.0), (-2.0, 2.0)),
        };
        Tokens {
            k: self.between(-1.0, 1.0, count * h * case.key_dim()),
            v: self.between(-1.0, 1.0, count * hv * case.value_dim()),
            gate: self.between(gate.0, gate.1, count * hv * gates_per_head),
            beta: self.between(beta.0, beta.1, count * hv),
        }
    }
}

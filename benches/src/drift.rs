//! How far a state that is stored after every token moves away from the exact recurrence of the same inputs.

use anyhow::Result;
use gated_delta::{
    DeviceElement, Error, Gdn, GdnGates, Kda, KdaBeta, KdaGate, KdaGates, Library, States,
    StreamRef, Tensor, Work,
};
use gated_delta_harness::arguments::Operator;
use gated_delta_reference::compare::relative_error_of;
use gated_delta_reference::recurrence::{Token, normalise, recurrence};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Heads, H = HV.
pub const HEADS: usize = 4;

/// K = V.
pub const DIM: usize = 64;

/// One of so many decays is near 1: of the heads with GDN, of the channels with KDA.
const SLOW_EVERY: usize = 4;

/// Log decays of the slow ones.
const SLOW: (f32, f32) = (-0.002, 0.0);

/// The other log decays.
const FAST: (f32, f32) = (-0.5, -0.05);

/// Relative error of the states after a token, ‖S − S_exact‖ / ‖S_exact‖.
#[derive(Clone, Copy, Debug)]
pub struct Drift {
    /// Of all.
    pub all: f64,
    /// Of what decays near 1 are applied to.
    pub slow: f64,
    /// Of the rest.
    pub fast: f64,
}

/// What one token brings to every head.
struct Inputs {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    /// Log decays `[HV]` or `[HV, K]`.
    g: Vec<bf16>,
    beta: Vec<bf16>,
}

/// A state element.
pub trait Stored: DeviceElement + Default + Into<f64> {}
impl<S: DeviceElement + Default + Into<f64>> Stored for S {}

/// Decodes `steps` random tokens from a zero state with the kernel in the simulator, and in f64 without rounding.
pub fn roll<S: Stored>(operator: Operator, steps: usize) -> Result<Vec<Drift>> {
    let library = Library::simulator();
    let mut rng = SmallRng::seed_from_u64(0x6472);
    let mut states = vec![S::default(); HEADS * DIM * DIM];
    let mut exact = vec![vec![0.0; DIM * DIM]; HEADS];
    let mut drifts = Vec::with_capacity(steps);
    for _ in 0..steps {
        let inputs = Inputs::new(operator, &mut rng);
        inputs.launch(operator, &library, &mut states)?;
        for (head, exact) in exact.iter_mut().enumerate() {
            if let Some(step) = recurrence(exact, &[inputs.token(operator, head)])?.pop() {
                *exact = step.state;
            }
        }
        drifts.push(drift(operator, &states, &exact.concat()));
    }
    Ok(drifts)
}

impl Inputs {
    fn new(operator: Operator, rng: &mut SmallRng) -> Self {
        let mut random = |count: usize, (low, high): (f32, f32)| -> Vec<bf16> {
            (0..count)
                .map(|_| bf16::from_f32(rng.random_range(low..high)))
                .collect()
        };
        let [q, k, v] = [(); 3].map(|()| random(HEADS * DIM, (-1.0, 1.0)));
        let beta = random(HEADS, (0.0, 1.0));
        let decays = match operator {
            Operator::Gdn => HEADS,
            Operator::Kda => HEADS * DIM,
        };
        let g = (0..decays)
            .flat_map(|at| random(1, if at % SLOW_EVERY == 0 { SLOW } else { FAST }))
            .collect();
        Self { q, k, v, g, beta }
    }

    fn launch<S: Stored>(
        &self,
        operator: Operator,
        library: &Library,
        states: &mut [S],
    ) -> Result<(), Error> {
        let mut output = vec![bf16::ZERO; HEADS * DIM];
        let heads = [1, 1, HEADS, DIM];
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| Tensor::from_slice(x, &heads));
        let (q, k, v) = (q?, k?, v?);
        let o = Tensor::from_slice_mut(&mut output, &heads)?;
        let pool = Tensor::from_slice_mut(states, &[1, HEADS, DIM, DIM])?;
        let beta = Tensor::from_slice(&self.beta, &heads[..3])?;
        let inputs = gated_delta::Inputs::qkv(q, k, v);
        let pool = States::update(pool);
        let work: Box<dyn Work + '_> = match operator {
            Operator::Gdn => {
                let g = Tensor::from_slice(&self.g, &heads[..3])?;
                Box::new(Gdn::new(inputs, GdnGates::given(g, beta), o, pool))
            }
            Operator::Kda => {
                let g = Tensor::from_slice(&self.g, &heads)?;
                let gates = KdaGates::new(g, KdaGate::Log, beta, KdaBeta::Given);
                Box::new(Kda::new(inputs, gates, o, pool))
            }
        };
        // SAFETY: a simulated launch is done when it returns; there is one row.
        unsafe { library.launch(StreamRef::default_stream(), &*work) }
    }

    fn token(&self, operator: Operator, head: usize) -> Token {
        let row = |x: &[bf16]| -> Vec<f64> {
            let row = &x[head * DIM..(head + 1) * DIM];
            row.iter().map(|x| x.to_f64()).collect()
        };
        Token {
            q: normalise(&row(&self.q), true, 1.0),
            k: normalise(&row(&self.k), true, 1.0),
            v: row(&self.v),
            log_decay: match operator {
                Operator::Gdn => vec![self.g[head].to_f64(); DIM],
                Operator::Kda => row(&self.g),
            },
            beta: self.beta[head].to_f64(),
        }
    }
}

fn drift<S: Stored>(operator: Operator, states: &[S], exact: &[f64]) -> Drift {
    let is_slow = |at: usize| {
        let decay = match operator {
            Operator::Gdn => at / (DIM * DIM),
            Operator::Kda => at % DIM,
        };
        decay.is_multiple_of(SLOW_EVERY)
    };
    let pairs = || {
        states
            .iter()
            .map(|&got| got.into())
            .zip(exact.iter().copied())
    };
    let of = |slow: bool| {
        let which = move |&(at, _): &(usize, _)| is_slow(at) == slow;
        relative_error_of(pairs().enumerate().filter(which).map(|(_, pair)| pair))
    };
    Drift {
        all: relative_error_of(pairs()),
        slow: of(true),
        fast: of(false),
    }
}

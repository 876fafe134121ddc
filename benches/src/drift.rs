//! Drift of states from the exact recurrence of the same inputs, for states that are stored after every token, and with deferred
//! write-back after every eighth.

use anyhow::Result;
use gated_delta::step::{MAX_PENDING, pending};
use gated_delta::{
    DeviceElement, Error, Formulation, Gdn, GdnGates, Kda, KdaBeta, KdaDecay, KdaGates, Library,
    Options, Pending, States, StreamRef, Tensor, Work,
};
use gated_delta_harness::arguments::Operator;
use gated_delta_reference::recurrence::{Token, normalise, recurrence};
use gated_delta_reference::tolerance::relative_error_of;
use half::bf16;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Heads, H = HV.
pub const HEADS: usize = 4;

/// Head dims, K = V.
pub const DIM: usize = 128;

/// One in this many decays is slow, near 1: of the heads with GDN, of the channels with KDA.
const SLOW_EVERY: usize = 4;

/// Range of the slow log decays.
const SLOW: (f32, f32) = (-0.002, 0.0);

/// Range of the other log decays.
const FAST: (f32, f32) = (-0.5, -0.05);

/// Relative error of the states after a token, ‖S − S_exact‖ / ‖S_exact‖.
#[derive(Clone, Copy, Debug)]
pub struct Drift {
    /// Error of the whole state.
    pub all: f64,
    /// Error of the parts with slow decays.
    pub slow: f64,
    /// Error of the other parts.
    pub fast: f64,
}

/// Inputs of one token, for all heads.
struct Inputs {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    /// Log decays `[HV]` or `[HV, K]`.
    g: Vec<bf16>,
    beta: Vec<bf16>,
}

/// Type of a state's elements.
pub trait Stored: DeviceElement + Default + Into<f64> {}
impl<S: DeviceElement + Default + Into<f64>> Stored for S {}

/// Entries of a ring, R.
const ENTRIES: usize = MAX_PENDING + 1;

/// Times at which a state is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// After every token.
    Each,
    /// After every eighth token; the pending u are f32.
    Eighth,
    /// After every eighth token; the pending u are bf16, and the kernel runs on tensor cores.
    EighthOfBf16,
}

/// u of the pending tokens.
enum Updates {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Updates {
    fn get(&self, i: usize) -> f64 {
        match self {
            Self::F32(updates) => updates[i].into(),
            Self::Bf16(updates) => updates[i].into(),
        }
    }
}

/// Ring of the only slot, and its numbers of pending tokens.
struct Ring {
    keys: Vec<bf16>,
    updates: Updates,
    decays: Vec<f32>,
    count: pending::Count,
}

impl Ring {
    fn new(operator: Operator, stores: Stores) -> Self {
        let entries = HEADS * ENTRIES;
        Self {
            keys: vec![bf16::NAN; entries * DIM],
            updates: match stores {
                Stores::EighthOfBf16 => Updates::Bf16(vec![bf16::NAN; entries * DIM]),
                _ => Updates::F32(vec![f32::NAN; entries * DIM]),
            },
            decays: vec![f32::NAN; entries * channels(operator)],
            count: pending::Count::default(),
        }
    }

    /// States with the pending tokens added, as the next step reads them.
    fn applied(&self, operator: Operator, mut states: Vec<f64>) -> Vec<f64> {
        let channels = channels(operator);
        for j in 0..self.count.len {
            for head in 0..HEADS {
                let entry = head * ENTRIES + (self.count.base + j) % ENTRIES;
                let key = &self.keys[entry * DIM..];
                let decays = &self.decays[entry * channels..];
                let state = &mut states[head * DIM * DIM..][..DIM * DIM];
                for (i, row) in state.chunks_mut(DIM).enumerate() {
                    let u = self.updates.get(entry * DIM + i);
                    for (c, s) in row.iter_mut().enumerate() {
                        let decay = f64::from(decays[c % channels]).exp();
                        *s = *s * decay + u * key[c].to_f64();
                    }
                }
            }
        }
        states
    }
}

fn channels(operator: Operator) -> usize {
    match operator {
        Operator::Gdn => 1,
        Operator::Kda => DIM,
    }
}

/// Decodes `steps` random tokens from a zero state, with the kernel in the simulator and in f64 without rounding. Returns the errors.
pub fn roll<S: Stored>(operator: Operator, steps: usize, stores: Stores) -> Result<Vec<Drift>> {
    let mut ring = (stores != Stores::Each).then(|| Ring::new(operator, stores));
    let library = Library::simulator();
    let mut rng = SmallRng::seed_from_u64(0x6472);
    let mut states = vec![S::default(); HEADS * DIM * DIM];
    let mut exact = vec![vec![0.0; DIM * DIM]; HEADS];
    let mut drifts = Vec::with_capacity(steps);
    for _ in 0..steps {
        let inputs = Inputs::new(operator, &mut rng);
        inputs.launch(operator, &library, &mut states, ring.as_mut())?;
        for (head, exact) in exact.iter_mut().enumerate() {
            if let Some(step) = recurrence(exact, &[inputs.token(operator, head)])?.pop() {
                *exact = step.state;
            }
        }
        let got: Vec<f64> = states.iter().map(|&s| s.into()).collect();
        let got = match &ring {
            Some(ring) => ring.applied(operator, got),
            None => got,
        };
        drifts.push(drift(operator, &got, &exact.concat()));
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
        mut ring: Option<&mut Ring>,
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
        let (len, base) = match &ring {
            Some(ring) => ([ring.count.len as i32], [ring.count.base as i32]),
            None => ([0], [0]),
        };
        let mut options = Options::default().formulation(Formulation::Recurrent);
        let pending = match &mut ring {
            Some(ring) => {
                let dims = [1, HEADS, ENTRIES, DIM];
                let of_decays = match operator {
                    Operator::Gdn => &dims[..3],
                    Operator::Kda => &dims,
                };
                let updates = match &mut ring.updates {
                    Updates::F32(updates) => Tensor::from_slice_mut(updates, &dims)?,
                    Updates::Bf16(updates) => {
                        options = options.formulation(Formulation::Parallel);
                        Tensor::from_slice_mut(updates, &dims)?
                    }
                };
                Some(Pending::new(pending::Rings {
                    keys: Tensor::from_slice_mut(&mut ring.keys, &dims)?,
                    updates,
                    decays: Tensor::from_slice_mut(&mut ring.decays, of_decays)?,
                    len: Tensor::from_slice(&len, &[1])?,
                    base: Tensor::from_slice(&base, &[1])?,
                }))
            }
            None => None,
        };
        let work: Box<dyn Work + '_> = match operator {
            Operator::Gdn => {
                let g = Tensor::from_slice(&self.g, &heads[..3])?;
                let step = Gdn::new(inputs, GdnGates::given(g, beta), o, pool);
                let mut step = step.options(options);
                step.pending = pending;
                Box::new(step)
            }
            Operator::Kda => {
                let g = Tensor::from_slice(&self.g, &heads)?;
                let gates = KdaGates::new(g, KdaDecay::Log, beta, KdaBeta::Given);
                let mut step = Kda::new(inputs, gates, o, pool).options(options);
                step.pending = pending;
                Box::new(step)
            }
        };
        // SAFETY: a simulated launch is done when it returns; there is one row.
        unsafe { library.launch(StreamRef::default_stream(), &*work) }?;
        drop(work);
        if let Some(ring) = ring {
            let size = pending::Ring {
                most: MAX_PENDING,
                entries: ENTRIES,
            };
            ring.count = size.after(ring.count, 1, 1);
        }
        Ok(())
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

fn drift(operator: Operator, states: &[f64], exact: &[f64]) -> Drift {
    let is_slow = |at: usize| {
        let decay = match operator {
            Operator::Gdn => at / (DIM * DIM),
            Operator::Kda => at % DIM,
        };
        decay.is_multiple_of(SLOW_EVERY)
    };
    let pairs = || states.iter().copied().zip(exact.iter().copied());
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

//! Tests of deferred write-back. Rows have no pending tokens, have some, flush, are fresh, or are inactive. The same rows run
//! with drafts, with a convolution and a norm, and in a flush.

use gated_delta_kernels::constants::Element;
use gated_delta_reference::conv::Conv;
use gated_delta_reference::deferred::{After, Deferred, Rings, deferred};
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::kda;
use gated_delta_reference::layer::{Layer, Pools, Projection};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Recurrent, TokenGates};
use gated_delta_reference::tolerance::{
    COMPUTED_IN_F32, LOG_DECAY, Tolerance, norm, of_norm, within,
};

use super::buffer::Buffer;
use super::cases::TAPS;
use super::values::{Around, EPS, Numbers};
use crate::Entry;
use crate::driver::{Context, Stream};
use crate::error::Error;
use crate::library::Library;
use crate::step::pending::{self, Flush, MAX_PENDING, Pending, Ring};
use crate::step::{
    Convolution, Formulation, Gates as StepGates, Gdn, GdnGates, Inputs, Kda, KdaBeta, KdaDecay,
    KdaGates, Norm, Options, States, Step, Work,
};
use crate::stream::StreamRef;
use crate::tensor::{DType, Tensor};

const ROWS: usize = 6;
const SLOTS: usize = 7;
/// R, the number of entries of a ring.
const ENTRIES: usize = 20;
/// Pending tokens of each row for N = 8; twice as many for N = 16.
const LEN: [i32; ROWS] = [0, 3, 8, 5, 77, 2];
const BASE: [i32; ROWS] = [4, 18, 5, 0, 10, 3];
const READ_SLOTS: [i32; ROWS] = [2, 5, 0, -1, 3, 6];
const FRESH: [i32; ROWS] = [0, 0, 0, 0, 1, 0];
/// H and HV.
const HEADS: [usize; 2] = [1, 2];
/// Bound of the magnitude of log decays.
const MOST_DECAY: f64 = 0.5;

/// Every entry with deferred write-back.
pub fn entries() -> impl Iterator<Item = Entry> {
    let is_deferred = |entry: &Entry| {
        let computes = entry.computes();
        computes.is_some_and(|computes| computes.family.is_deferred())
    };
    Entry::ALL.iter().copied().filter(is_deferred)
}

/// Numbers of tokens that `entry` is launched with; 0 is a flush.
pub fn tokens(entry: Entry) -> &'static [usize] {
    match entry.computes() {
        Some(computes) if computes.family.is_parallel() => &[4, 1, 0],
        // The ring of a layer is flushed by the entry that flushes the ring of decodes.
        _ if is_layer(entry) => &[1],
        _ => &[1, 0],
    }
}

/// Dims and formulation of a launch.
#[derive(Clone, Copy)]
struct Shape {
    per_channel: bool,
    /// K = V.
    dim: usize,
    /// T; 0 in a flush.
    tokens: usize,
    formulation: Formulation,
}

impl Shape {
    /// T of the tensors; 1 in a flush, which does not use them.
    fn width(self) -> usize {
        self.tokens.max(1)
    }

    /// N, the largest number of pending tokens.
    fn most(self) -> usize {
        self.formulation.max_pending()
    }

    /// Number of pending tokens of each row.
    fn len(self) -> [i32; ROWS] {
        LEN.map(|len| len * (self.most() / MAX_PENDING) as i32)
    }

    fn tolerance(self) -> Tolerance {
        match self.formulation {
            Formulation::Parallel => Tolerance::PARALLEL,
            _ => Tolerance::RECURRENT,
        }
    }
}

/// Whether `entry` has a convolution before the recurrence, and a norm after it.
fn is_layer(entry: Entry) -> bool {
    (entry.computes()).is_some_and(|computes| computes.family.layer && computes.family.deferred)
}

/// Tensors of a launch.
struct Memory {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    g: Buffer,
    beta: Buffer,
    read_slots: Buffer,
    len: Buffer,
    base: Buffer,
    fresh: Buffer,
    /// Tensors of the convolution and the norm: x, weight and bias of the convolution, z, weight of the norm.
    around: Option<[Buffer; 5]>,
    /// Written tensors: o, pool, keys, updates, decays, windows, inputs.
    written: [Buffer; 7],
}

/// Launches `entry` with `tokens` tokens (0: a flush), as KDA if `per_channel`. Compares all results, and returns the largest
/// error as a fraction of the allowed error.
pub fn check(
    library: &Library,
    context: Option<&Context>,
    stream: Option<&Stream>,
    (entry, per_channel, tokens): (Entry, bool, usize),
) -> Result<f64, Error> {
    let wrong = |reason: String| Error::SelfTest {
        entry: entry.name(),
        case: match tokens {
            0 => "a flush",
            _ if is_layer(entry) => "a layer step on states that wait",
            2.. => "drafts on states that wait",
            _ => "a decode on states that wait",
        },
        reason,
    };
    let computes = entry
        .computes()
        .ok_or_else(|| wrong("no operator on states".to_owned()))?;
    let shape = Shape {
        per_channel,
        dim: computes.k as usize,
        tokens,
        formulation: match computes.family.is_parallel() {
            true => Formulation::Parallel,
            false => Formulation::Recurrent,
        },
    };
    let (dim, most, first_len) = (shape.dim, shape.most(), shape.len());
    let width = shape.width();
    let state = match computes.element {
        Some(Element::F32) => DType::F32,
        _ => DType::Bf16,
    };
    let [h, hv] = HEADS;
    let channels = if per_channel { dim } else { 1 };
    let mut numbers = Numbers(0x5eed ^ dim as u64);
    let mut random = |count: usize, low: f64, high: f64| numbers.between(low, high, count);
    let [q, k] = [(); 2].map(|()| random(ROWS * width * h * dim, -1.0, 1.0));
    let v = random(ROWS * width * hv * dim, -1.0, 1.0);
    let g = random(ROWS * width * hv * channels, -MOST_DECAY, -0.01);
    let beta = random(ROWS * width * hv, 0.1, 1.0);
    let mut pool = random(SLOTS * hv * dim * dim, -1.0, 1.0);
    for b in (0..ROWS).filter(|&b| FRESH[b] != 0) {
        let of_slot = hv * dim * dim;
        pool[READ_SLOTS[b] as usize * of_slot..][..of_slot].fill(f64::NAN);
    }
    let mut rings = Rings {
        keys: random(SLOTS * h * ENTRIES * dim, -1.0, 1.0),
        updates: random(SLOTS * hv * ENTRIES * dim, -0.3, 0.3),
        decays: random(SLOTS * hv * ENTRIES * channels, -MOST_DECAY, -0.01),
        inputs: None,
    };
    let layer = is_layer(entry);
    let windows_wait = layer && computes.family.is_parallel();
    let mut of_inputs = match windows_wait {
        true => random(SLOTS * ENTRIES * (2 * h + hv) * dim, -1.0, 1.0),
        false => vec![f64::NAN; SLOTS * ENTRIES],
    };
    let input_channels = of_inputs.len() / (SLOTS * ENTRIES);
    // Entries that are not pending are NaN.
    for slot in 0..SLOTS {
        let row = (0..ROWS).find(|&b| READ_SLOTS[b] as usize == slot && FRESH[b] == 0);
        let is_pending = |entry: usize| {
            row.is_some_and(|b| {
                (entry + ENTRIES - BASE[b] as usize) % ENTRIES < first_len[b] as usize
            })
        };
        for (ring, heads, of_entry) in [
            (&mut rings.keys, h, dim),
            (&mut rings.updates, hv, dim),
            (&mut rings.decays, hv, channels),
            (&mut of_inputs, 1, input_channels),
        ] {
            let of_slot =
                &mut ring[slot * heads * ENTRIES * of_entry..][..heads * ENTRIES * of_entry];
            for (i, values) in of_slot.chunks_mut(of_entry).enumerate() {
                if !is_pending(i % ENTRIES) {
                    values.fill(f64::NAN);
                }
            }
        }
    }
    let of_windows = (2 * h + hv) * dim * (TAPS - 1);
    let mut around = Around {
        windows: vec![f64::NAN; SLOTS * of_windows],
        ..Around::default()
    };
    if layer {
        let channels = (2 * h + hv) * dim;
        around.x = random(ROWS * width * channels, -1.0, 1.0);
        around.conv_weight = random(channels * TAPS, -1.0, 1.0);
        around.conv_bias = random(channels, -1.0, 1.0);
        around.z = random(ROWS * width * hv * dim, -2.0, 2.0);
        around.norm_weight = random(dim, -1.0, 1.0);
        for b in (0..ROWS).filter(|&b| FRESH[b] == 0) {
            if let Ok(slot) = usize::try_from(READ_SLOTS[b]) {
                let windows = random(of_windows, -1.0, 1.0);
                around.windows[slot * of_windows..][..of_windows].copy_from_slice(&windows);
            }
        }
    }
    // k is f32 if a convolution makes it.
    let of_keys = if layer { DType::F32 } else { DType::Bf16 };
    let floats = |dtype, values: &[f64]| Buffer::floats(context, dtype, values);
    let indices = |values: &[i32]| Buffer::indices(context, values);
    let mut memory = Memory {
        q: floats(DType::Bf16, &q)?,
        k: floats(DType::Bf16, &k)?,
        v: floats(DType::Bf16, &v)?,
        g: floats(DType::F32, &g)?,
        beta: floats(DType::F32, &beta)?,
        read_slots: indices(&READ_SLOTS)?,
        len: indices(&first_len)?,
        base: indices(&BASE)?,
        fresh: indices(&FRESH)?,
        around: match layer {
            false => None,
            true => Some([
                floats(DType::Bf16, &around.x)?,
                floats(DType::Bf16, &around.conv_weight)?,
                floats(DType::F32, &around.conv_bias)?,
                floats(DType::Bf16, &around.z)?,
                floats(DType::F32, &around.norm_weight)?,
            ]),
        },
        written: [
            floats(DType::Bf16, &vec![f64::NAN; ROWS * width * hv * dim])?,
            floats(state, &pool)?,
            floats(of_keys, &rings.keys)?,
            floats(DType::F32, &rings.updates)?,
            floats(DType::F32, &rings.decays)?,
            floats(DType::Bf16, &around.windows)?,
            floats(DType::Bf16, &of_inputs)?,
        ],
    };
    // The values after rounding to the stored dtypes.
    let [q, k, v] = [&memory.q, &memory.k, &memory.v].map(Buffer::values);
    let [g, beta] = [&memory.g, &memory.beta].map(Buffer::values);
    let written = memory.written.each_ref().map(Buffer::values);
    let [_, pool, keys, updates, decays, windows, inputs] = written;
    let rings = Rings {
        keys,
        updates,
        decays,
        inputs: windows_wait.then_some(inputs),
    };
    let before = memory
        .written
        .each_ref()
        .map(|buffer| buffer.bytes().to_vec());

    let queue = stream.map_or(StreamRef::default_stream(), Stream::as_ref);
    // SAFETY: the memory lives until the launch is done, below, and nothing else uses it.
    let enqueued = unsafe { memory.enqueue(library, queue, entry, shape) };
    let done = stream.map_or(Ok(()), Stream::synchronize);
    enqueued.and(done)?;
    memory.written.iter_mut().try_for_each(Buffer::fetch)?;

    let gates = match per_channel {
        false => TokenGates::Gdn(Gates::Given { g: &g, beta: &beta }),
        true => TokenGates::Kda(kda::KdaGates {
            g: &g,
            kind: kda::KdaDecay::Log,
            beta: &beta,
            beta_kind: kda::KdaBeta::Given,
        }),
    };
    let slots: Vec<i64> = READ_SLOTS.map(i64::from).to_vec();
    let fresh = FRESH.map(i64::from);
    let around_tokens = layer && tokens > 0;
    let gated = around_tokens.then(|| GatedNorm {
        z: &around.z,
        weight: &around.norm_weight,
        eps: EPS.into(),
        activation: Activation::Silu,
    });
    let says = |[pool, windows]: [&[f64]; 2],
                len: [i32; ROWS],
                base: [i32; ROWS],
                norm: Option<GatedNorm<'_>>| {
        let given = tokens > 0 && !layer;
        let of_tokens = |values: &'_ [f64]| if given { values.len() } else { 0 };
        let problem = Deferred {
            layer: Layer {
                step: Recurrent {
                    q: &q[..of_tokens(&q)],
                    k: &k[..of_tokens(&k)],
                    v: &v[..of_tokens(&v)],
                    read_slots: Some(&slots),
                    ..Recurrent::new([ROWS, tokens], HEADS, [dim; 2], gates)
                },
                projection: around_tokens.then(|| Projection {
                    x: &around.x,
                    previous: None,
                    conv: Conv {
                        channels: around.conv_bias.len(),
                        width: TAPS,
                        weight: &around.conv_weight,
                        bias: Some(&around.conv_bias),
                        activation: Activation::Silu,
                    },
                }),
                norm,
                fresh: (tokens > 0).then_some(&fresh[..]),
                checkpoints: None,
            },
            most,
            entries: ENTRIES,
            len: &len.map(i64::from),
            base: &base.map(i64::from),
        };
        let pools = Pools {
            states: pool,
            windows: layer.then_some(windows),
            ..Pools::default()
        };
        deferred(&problem, &pools, &rings).map_err(|error| wrong(error.to_string()))
    };
    let flushed = says([&pool, &windows], first_len, BASE, None)?;
    // Tokens after a flush start from the stored, rounded state.
    let (mut stored, mut len, mut base) = ([pool.clone(), windows.clone()], first_len, BASE);
    let got = [1, 5].map(|i| memory.written[i].values());
    let is_fresh = |b: usize| tokens > 0 && FRESH[b] != 0;
    let live = |b: usize| READ_SLOTS[b] >= 0 && (is_fresh(b) || first_len[b] as usize <= most);
    let ring = Ring {
        most,
        entries: ENTRIES,
    };
    let writes = |b: usize| {
        let of = first_len[b] as usize;
        live(b) && (is_fresh(b) || (of > 0 && (tokens == 0 || ring.flushes(of, tokens))))
    };
    for b in (0..ROWS).filter(|&b| writes(b) && !is_fresh(b)) {
        // Without a ring of inputs, windows already include the new token.
        let parts = if windows_wait { 2 } else { 1 };
        for (stored, got) in stored.iter_mut().zip(&got).take(parts) {
            let of_slot = got.len() / SLOTS;
            let slot = READ_SLOTS[b] as usize * of_slot;
            stored[slot..][..of_slot].copy_from_slice(&got[slot..][..of_slot]);
        }
        (base[b], len[b]) = ((BASE[b] + first_len[b]) % ENTRIES as i32, 0);
    }
    let mut wanted = match tokens {
        0 => flushed.clone(),
        _ => says(stored.each_ref().map(Vec::as_slice), len, base, None)?,
    };
    let before_last = (most + width - 1) as f64;
    let size = norm(&pool[..dim * dim]) + before_last * 0.3 * dim as f64 / 3.0;
    let of_conv = if layer { COMPUTED_IN_F32 } else { 0.0 };
    let bound = |tolerance: f64| {
        (tolerance + LOG_DECAY * (before_last + 1.0) * MOST_DECAY + 4.0 * of_conv) * size
    };
    // Allowed error of o, per row, token and value head; 0 for inactive rows.
    let mut of_outputs = vec![0.0; ROWS * tokens * hv];
    for (i, allowed) in of_outputs.iter_mut().enumerate() {
        if !live(i / (tokens * hv)) {
            continue;
        }
        *allowed = bound(shape.tolerance().output);
        if let Some(gated) = gated {
            let of_head = i * dim..(i + 1) * dim;
            let z = &gated.z[of_head.clone()];
            let off = of_norm(&GatedNorm { z, ..gated }, &wanted.o[of_head], *allowed);
            *allowed = off.map_err(|error| wrong(error.to_string()))?;
        }
    }
    if gated.is_some() {
        wanted.o = says(stored.each_ref().map(Vec::as_slice), len, base, gated)?.o;
    }
    if windows_wait {
        wanted.windows = flushed.windows.clone();
    }
    memory
        .compare(
            &before,
            (&flushed, &wanted),
            (live, writes, (shape, windows_wait)),
            (&of_outputs, bound),
            state,
        )
        .map_err(wrong)
}

impl Memory {
    /// # Safety
    /// Until `stream` has passed the launch, nobody else uses the memory.
    unsafe fn enqueue(
        &mut self,
        library: &Library,
        stream: StreamRef<'_>,
        entry: Entry,
        shape: Shape,
    ) -> Result<(), Error> {
        let [h, hv] = HEADS;
        let (dim, width) = (shape.dim, shape.width());
        let options = Options::default().formulation(shape.formulation);
        let [o, pool, keys, updates, decays, windows, ring_of_inputs] = &mut self.written;
        let decays = match shape.per_channel {
            false => decays.tensor_mut(&[SLOTS, hv, ENTRIES])?,
            true => decays.tensor_mut(&[SLOTS, hv, ENTRIES, dim])?,
        };
        let rings = pending::Rings {
            keys: keys.tensor_mut(&[SLOTS, h, ENTRIES, dim])?,
            updates: updates.tensor_mut(&[SLOTS, hv, ENTRIES, dim])?,
            decays,
            len: self.len.tensor(&[ROWS])?,
            base: self.base.tensor(&[ROWS])?,
        };
        let mut pending = Pending::new(rings).most(shape.most());
        let windows_wait = shape.formulation == Formulation::Parallel && self.around.is_some();
        let channels = (2 * h + hv) * dim;
        if windows_wait {
            pending = pending.inputs(ring_of_inputs.tensor_mut(&[SLOTS, ENTRIES, channels])?);
        }
        let of_windows = [SLOTS, channels, TAPS - 1];
        let mut flushed_windows = None;
        let pool = pool.tensor_mut(&[SLOTS, hv, dim, dim])?;
        let states = States::update(pool).slots(self.read_slots.tensor(&[ROWS])?);
        let mut norm = None;
        let inputs = match &self.around {
            Some([x, weight, bias, z, norm_weight]) => {
                let x = x.tensor(&[ROWS, width, channels])?;
                let windows = windows.tensor_mut(&of_windows)?;
                flushed_windows = windows_wait.then_some(windows);
                let weight = weight.tensor(&[channels, TAPS])?;
                let conv = Convolution::new(x, h, weight, windows);
                let z = z.tensor(&[ROWS, width, hv, dim])?;
                norm = Some(Norm::new(z, norm_weight.tensor(&[dim])?, EPS));
                Inputs::conv(conv.bias(bias.tensor(&[channels])?))
            }
            None => Inputs::qkv(
                self.q.tensor(&[ROWS, width, h, dim])?,
                self.k.tensor(&[ROWS, width, h, dim])?,
                self.v.tensor(&[ROWS, width, hv, dim])?,
            ),
        };
        let o = o.tensor_mut(&[ROWS, width, hv, dim])?;
        let beta = self.beta.tensor(&[ROWS, width, hv])?;
        let fresh = self.fresh.tensor(&[ROWS])?;
        fn with<'a, G: StepGates>(
            mut step: Step<'a, G>,
            norm: Option<Norm<'a>>,
            (pending, fresh, options): (Pending<'a>, Tensor<'a>, Options),
        ) -> Step<'a, G> {
            step.norm = norm;
            step.pending(pending).fresh(fresh).options(options)
        }
        let waiting = (pending, fresh, options);
        let work: Box<dyn Work + '_> = match (shape.tokens, shape.per_channel) {
            (0, _) => {
                let mut flush = Flush::new(states, pending).options(options);
                flush.windows = flushed_windows;
                Box::new(flush)
            }
            (_, false) => {
                let gates = GdnGates::given(self.g.tensor(&[ROWS, width, hv])?, beta);
                Box::new(with(Gdn::new(inputs, gates, o, states), norm, waiting))
            }
            (_, true) => {
                let g = self.g.tensor(&[ROWS, width, hv, dim])?;
                let gates = KdaGates::new(g, KdaDecay::Log, beta, KdaBeta::Given);
                Box::new(with(Kda::new(inputs, gates, o, states), norm, waiting))
            }
        };
        // SAFETY: the caller's promise; no two live rows have one slot.
        unsafe { library.launch_with(stream, &*work, entry) }
    }

    /// Checks that written elements are within their bounds, and that all others are unchanged, bit for bit. Returns the largest
    /// error as a fraction of the allowed error.
    fn compare(
        &self,
        before: &[Vec<u8>; 7],
        (flushed, wanted): (&After, &After),
        (live, writes, (shape, windows_wait)): (
            impl Fn(usize) -> bool,
            impl Fn(usize) -> bool,
            (Shape, bool),
        ),
        (of_outputs, bound): (&[f64], impl Fn(f64) -> f64),
        state: DType,
    ) -> Result<f64, String> {
        let names = [
            "o", "pool", "keys", "updates", "decays", "windows", "inputs",
        ];
        let exact: [&[f64]; 7] = [
            &wanted.o,
            &flushed.pool,
            &wanted.rings.keys,
            &wanted.rings.updates,
            &wanted.rings.decays,
            wanted.windows.as_deref().unwrap_or_default(),
            wanted.rings.inputs.as_deref().unwrap_or_default(),
        ];
        let layer = self.around.is_some();
        let mut worst = 0.0f64;
        for (i, buffer) in self.written.iter().enumerate() {
            let (got, dtype) = (buffer.values(), buffer.dtype());
            let parts = if i == 0 { ROWS } else { SLOTS };
            let (of_part, bytes) = (got.len() / parts, buffer.bytes());
            // Length of the runs that are compared together: one head of a token, one head's ring entry, or a whole slot.
            let run = match i {
                0 => shape.dim,
                1 | 5 => of_part,
                6 => of_part / ENTRIES,
                _ => of_part / (ENTRIES * if i == 2 { HEADS[0] } else { HEADS[1] }),
            };
            for part in 0..parts {
                let row = match i {
                    0 => Some(part),
                    _ => (0..ROWS).find(|&b| READ_SLOTS[b] as usize == part),
                };
                for (j, got) in got[part * of_part..][..of_part].chunks(run).enumerate() {
                    let first = part * of_part + j * run;
                    let what = || format!("{} {part}, part {j}", names[i]);
                    let is_written = row.is_some_and(|b| match i {
                        0 => shape.tokens > 0,
                        1 => writes(b),
                        5 if windows_wait => writes(b),
                        // Without a ring of inputs, every token moves the window.
                        5 => layer && live(b),
                        6 if !windows_wait => false,
                        _ => {
                            let len = if FRESH[b] != 0 {
                                0
                            } else {
                                shape.len()[b] as usize
                            };
                            let behind = BASE[b] as usize + len;
                            let mut left = behind..behind + shape.tokens;
                            live(b) && left.any(|entry| entry % ENTRIES == j % ENTRIES)
                        }
                    });
                    if !is_written {
                        let range = first * dtype.size_of()..(first + run) * dtype.size_of();
                        if bytes[range.clone()] != before[i][range] {
                            return Err(format!("{} is nobody's to write, and changed", what()));
                        }
                        continue;
                    }
                    let allowed = match i {
                        0 => of_outputs[part * shape.tokens * HEADS[1] + j],
                        1 => bound(shape.tolerance().state),
                        2 if layer => COMPUTED_IN_F32 * norm(&exact[i][first..][..run]),
                        2 | 5 | 6 => 0.0,
                        3 => bound(shape.tolerance().output),
                        _ => LOG_DECAY,
                    };
                    let dtype = if i == 1 { state } else { dtype };
                    let exact = &exact[i][first..][..run];
                    let error = within(got, exact, dtype.into(), allowed);
                    worst = worst.max(error.map_err(|off| format!("{}: {off}", what()))?);
                }
            }
        }
        Ok(worst)
    }
}

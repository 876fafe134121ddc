//! Prompts of any length: one prewarm serves all of them, and the longest has the right result.

use std::thread;

use gated_delta::driver::{Context, DeviceMemory, Stream};
use gated_delta::{
    DType, Error, Formulation, Gdn, GdnGates, Inputs, Library, Options, States, Work,
};
use gated_delta_reference::recurrence::{Token, default_scale, normalise, recurrence};
use gated_delta_reference::tolerance;
use gated_delta_test_support::backend::gpu;
use half::bf16;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// H. The next two constants are HV and K = V.
const HEADS: usize = 1;
const VALUE_HEADS: usize = 2;
const DIM: usize = 128;
/// Largest number of tokens.
const LONGEST: usize = 131_072;
/// Number of drawn tokens. Later tokens repeat them.
const DISTINCT: usize = 4099;
/// Mean log decays of the value heads. The second one forgets nothing within a thousand tokens.
const DECAYS: [f32; VALUE_HEADS] = [-0.2, -1e-4];
/// Largest relative errors of o, in bf16, and of f32 states.
const ERRORS: [f64; 2] = [2.5e-3, 2e-3];

/// Values of [`DISTINCT`] tokens.
struct Values {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl Values {
    fn new() -> Self {
        let mut rng = SmallRng::seed_from_u64(7);
        let mut draw = |of_token: usize| -> Vec<f32> {
            let one = |_| rng.random_range(-1.0f32..1.0);
            (0..DISTINCT * of_token).map(one).collect()
        };
        let rounded =
            |values: Vec<f32>| -> Vec<bf16> { values.into_iter().map(bf16::from_f32).collect() };
        let decay = |(i, x): (usize, f32)| DECAYS[i % VALUE_HEADS] * (x + 1.0);
        Self {
            q: rounded(draw(HEADS * DIM)),
            k: rounded(draw(HEADS * DIM)),
            v: rounded(draw(VALUE_HEADS * DIM)),
            g: draw(VALUE_HEADS)
                .into_iter()
                .enumerate()
                .map(decay)
                .collect(),
            beta: draw(VALUE_HEADS)
                .into_iter()
                .map(|x| (x + 1.0) / 2.0)
                .collect(),
        }
    }

    /// o `[T, V]` and the final state of a value head by the reference, from a zero state.
    fn truth(&self, head: usize, tokens: usize) -> (Vec<f64>, Vec<f64>) {
        let wide = |values: &[bf16], at: usize| -> Vec<f64> {
            values[at * DIM..][..DIM]
                .iter()
                .map(|x| x.to_f64())
                .collect()
        };
        let token = |t: usize| {
            let t = t % DISTINCT;
            let of_head = t * VALUE_HEADS + head;
            Token {
                q: normalise(&wide(&self.q, t), true, default_scale(DIM)),
                k: normalise(&wide(&self.k, t), true, 1.0),
                v: wide(&self.v, of_head),
                log_decay: vec![self.g[of_head].into(); DIM],
                beta: self.beta[of_head].into(),
            }
        };
        let (mut o, mut state) = (Vec::new(), vec![0.0; DIM * DIM]);
        for first in (0..tokens).step_by(64) {
            let some: Vec<Token> = (first..tokens.min(first + 64)).map(token).collect();
            let mut steps = recurrence(&state, &some).unwrap();
            steps.iter().for_each(|step| o.extend(&step.o));
            state = steps.pop().unwrap().state;
        }
        (o, state)
    }
}

/// Tensors of [`LONGEST`] tokens. A launch takes the first ones.
struct Prompt {
    q: DeviceMemory,
    k: DeviceMemory,
    v: DeviceMemory,
    g: DeviceMemory,
    beta: DeviceMemory,
    o: DeviceMemory,
    pool: DeviceMemory,
    cu_seqlens: DeviceMemory,
    workspace: DeviceMemory,
    workspace_bytes: usize,
}

/// Shapes of the rows.
#[derive(Clone, Copy, Debug)]
enum Rows {
    Dense(usize),
    /// One packed row with all tokens.
    Packed,
}

impl Prompt {
    fn new(context: &Context, values: &Values) -> Self {
        fn upload<T: Copy + bytemuck::Pod>(context: &Context, values: &[T]) -> DeviceMemory {
            let of_token = values.len() / DISTINCT;
            let all: Vec<T> = values
                .iter()
                .copied()
                .cycle()
                .take(of_token * LONGEST)
                .collect();
            DeviceMemory::from_slice(context, &all).unwrap()
        }
        let allocate = |bytes: usize| {
            let mut memory = DeviceMemory::allocate(context, bytes).unwrap();
            memory.fill(0xff).unwrap();
            memory
        };
        let mut pool = allocate(4 * VALUE_HEADS * DIM * DIM * 4);
        pool.fill(0).unwrap();
        let mut prompt = Self {
            q: upload(context, &values.q),
            k: upload(context, &values.k),
            v: upload(context, &values.v),
            g: upload(context, &values.g),
            beta: upload(context, &values.beta),
            o: allocate(LONGEST * VALUE_HEADS * DIM * 2),
            pool,
            cu_seqlens: DeviceMemory::from_slice(context, &[0i32, LONGEST as i32]).unwrap(),
            workspace: allocate(16),
            workspace_bytes: 16,
        };
        let longest = prompt.step(Rows::Packed, LONGEST).unwrap();
        let bytes = longest.workspace_bytes().unwrap();
        prompt.workspace = allocate(bytes);
        prompt.workspace_bytes = bytes;
        prompt
    }

    fn step(&self, rows: Rows, tokens: usize) -> Result<Gdn<'_>, Error> {
        let batch = match rows {
            Rows::Dense(batch) => batch,
            Rows::Packed => 1,
        };
        let of = |heads: usize| [batch, tokens, heads, DIM];
        let gates = [batch, tokens, VALUE_HEADS];
        let pool = [4, VALUE_HEADS, DIM, DIM];
        // SAFETY: the memory lives while the prompt is borrowed, and no other work uses the written tensors.
        let written = |memory: &DeviceMemory, dtype, dims: &[usize]| unsafe {
            gated_delta::Tensor::from_raw(memory.address(), dtype, dims)
        };
        let mut step = Gdn::new(
            Inputs::qkv(
                self.q.tensor(DType::Bf16, &of(HEADS))?,
                self.k.tensor(DType::Bf16, &of(HEADS))?,
                self.v.tensor(DType::Bf16, &of(VALUE_HEADS))?,
            ),
            GdnGates::given(
                self.g.tensor(DType::F32, &gates)?,
                self.beta.tensor(DType::F32, &gates)?,
            ),
            written(&self.o, DType::Bf16, &of(VALUE_HEADS))?,
            States::update(written(&self.pool, DType::F32, &pool)?),
        )
        .options(Options::default().formulation(Formulation::Chunked));
        if let Rows::Packed = rows {
            step = step.packed(self.cu_seqlens.tensor(DType::I32, &[2])?, usize::MAX);
        }
        let elements = self.workspace_bytes / 4;
        Ok(step.workspace(written(&self.workspace, DType::F32, &[elements])?))
    }
}

#[test]
fn one_prewarm_serves_prompts_of_every_length() {
    let Some(context) = gpu() else {
        return;
    };
    let prompt = Prompt::new(context, &Values::new());
    let stream = Stream::new(context).unwrap();
    for rows in [Rows::Dense(1), Rows::Packed] {
        let library = Library::new(context);
        library.prewarm(&prompt.step(rows, 1).unwrap()).unwrap();
        let compiled = library.compiled();
        assert!(compiled > 0);
        for tokens in [1, 2, 63, 64, 65, 128, 1000, 4097, 16_384, LONGEST] {
            let batches: &[usize] = match rows {
                Rows::Dense(_) if tokens < LONGEST / 4 => &[1, 4],
                _ => &[1],
            };
            for &batch in batches {
                let rows = match rows {
                    Rows::Dense(_) => Rows::Dense(batch),
                    Rows::Packed => rows,
                };
                let step = prompt.step(rows, tokens).unwrap();
                // SAFETY: the buffers outlive the wait below. Rows have slots of their own, and launches run one after the other.
                unsafe { library.launch(stream.as_ref(), &step) }.unwrap();
                assert_eq!(library.compiled(), compiled, "{rows:?} of {tokens} tokens");
            }
        }
        stream.synchronize().unwrap();
        // A launch of another layer compiles, which shows that the count works.
        let other = prompt.step(rows, 65).unwrap();
        let scale = Options::default()
            .formulation(Formulation::Chunked)
            .scale(0.5);
        library.prewarm(&other.options(scale)).unwrap();
        assert!(library.compiled() > compiled);
    }
}

#[test]
fn the_longest_prompt_is_right() {
    let Some(context) = gpu() else {
        return;
    };
    let values = Values::new();
    let prompt = Prompt::new(context, &values);
    let (library, stream) = (Library::new(context), Stream::new(context).unwrap());
    let step = prompt.step(Rows::Packed, LONGEST).unwrap();
    // SAFETY: the buffers outlive the wait.
    unsafe { library.launch(stream.as_ref(), &step) }.unwrap();
    stream.synchronize().unwrap();
    let mut o = vec![bf16::ZERO; LONGEST * VALUE_HEADS * DIM];
    prompt.o.read(&mut o).unwrap();
    let mut states = vec![0f32; 4 * VALUE_HEADS * DIM * DIM];
    prompt.pool.read(&mut states).unwrap();
    thread::scope(|scope| {
        for head in 0..VALUE_HEADS {
            let (values, o, states) = (&values, &o, &states);
            scope.spawn(move || {
                let (wanted_o, wanted) = values.truth(head, LONGEST);
                let of_head = o.chunks(DIM).skip(head).step_by(VALUE_HEADS);
                let got: Vec<f64> = of_head.flatten().map(|x| x.to_f64()).collect();
                // Errors are measured in each thousandth part, so that errors of few tokens show.
                for (i, (got, wanted)) in got
                    .chunks(DIM * 128)
                    .zip(wanted_o.chunks(DIM * 128))
                    .enumerate()
                {
                    let error = tolerance::relative_error(got, wanted);
                    assert!(
                        error <= ERRORS[0],
                        "o of head {head} from token {}: {error:e}",
                        128 * i
                    );
                }
                let state = &states[head * DIM * DIM..][..DIM * DIM];
                let got: Vec<f64> = state.iter().map(|&x| x.into()).collect();
                let error = tolerance::relative_error(&got, &wanted);
                assert!(error <= ERRORS[1], "the state of head {head}: {error:e}");
            });
        }
    });
}

/// Number of rows of [`TOKENS`] tokens. A block of the scan works four rows here, and two rows in a batch of half the size.
const ROWS: usize = 200;
const TOKENS: usize = 100;

/// Persistent blocks prefetch the states of all their rows but the first, if they have more than two rows. The results have the
/// bits of batches of half the size, without prefetch.
#[test]
fn a_batch_whose_blocks_go_on_has_the_bits_of_smaller_ones() {
    let Some(context) = gpu() else {
        return;
    };
    let values = Values::new();
    let prompt = Prompt::new(context, &values);
    let mut rng = SmallRng::seed_from_u64(8);
    let of_row = VALUE_HEADS * DIM * DIM;
    let before: Vec<f32> = (0..ROWS * of_row)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    let (library, stream) = (Library::new(context), Stream::new(context).unwrap());
    let of_o = TOKENS * VALUE_HEADS * DIM;
    let run = |batch: usize| -> (Vec<u16>, Vec<u32>) {
        let mut o = DeviceMemory::allocate(context, ROWS * of_o * 2).unwrap();
        o.fill(0xff).unwrap();
        let pool = DeviceMemory::from_slice(context, &before).unwrap();
        for first in (0..ROWS).step_by(batch) {
            let at = |memory: &DeviceMemory, dtype: DType, inner: &[usize]| {
                let of: usize = inner.iter().product();
                let byte = first * TOKENS * of * dtype.size_of();
                let dims = [&[batch, TOKENS], inner].concat();
                // SAFETY: the memory outlives the wait below, and no other work uses the written tensors.
                unsafe {
                    gated_delta::Tensor::from_raw(memory.address() + byte as u64, dtype, &dims)
                        .unwrap()
                }
            };
            let states = pool.address() + (first * of_row * 4) as u64;
            let dims = [batch, VALUE_HEADS, DIM, DIM];
            // SAFETY: as above.
            let states = unsafe { gated_delta::Tensor::from_raw(states, DType::F32, &dims) };
            let elements = prompt.workspace_bytes / 4;
            let workspace = prompt.workspace.address();
            // SAFETY: as above.
            let workspace =
                unsafe { gated_delta::Tensor::from_raw(workspace, DType::F32, &[elements]) };
            let step = Gdn::new(
                Inputs::qkv(
                    at(&prompt.q, DType::Bf16, &[HEADS, DIM]),
                    at(&prompt.k, DType::Bf16, &[HEADS, DIM]),
                    at(&prompt.v, DType::Bf16, &[VALUE_HEADS, DIM]),
                ),
                GdnGates::given(
                    at(&prompt.g, DType::F32, &[VALUE_HEADS]),
                    at(&prompt.beta, DType::F32, &[VALUE_HEADS]),
                ),
                at(&o, DType::Bf16, &[VALUE_HEADS, DIM]),
                States::update(states.unwrap()),
            )
            .options(Options::default().formulation(Formulation::Chunked))
            .workspace(workspace.unwrap());
            // SAFETY: the buffers outlive the wait, and launches run one after the other.
            unsafe { library.launch(stream.as_ref(), &step) }.unwrap();
        }
        stream.synchronize().unwrap();
        let (mut outputs, mut states) = (vec![0; ROWS * of_o], vec![0; ROWS * of_row]);
        o.read(&mut outputs).unwrap();
        pool.read(&mut states).unwrap();
        (outputs, states)
    };
    let (o, states) = run(ROWS);
    let (same_o, same_states) = run(ROWS / 2);
    assert!(o == same_o && states == same_states);
    // With four rows each block has one row, and half of a head.
    let (few_o, few_states) = run(4);
    assert!(o == few_o && states == few_states);
}

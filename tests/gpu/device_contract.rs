//! The simulator and the GPU give the same result for every primitive of the device facade.

use bytemuck::{Pod, cast_slice};
use gated_delta::driver::{Context, DeviceMemory, Stream};
use gated_delta::{DType, DeviceElement, Entry, Error, Library, StreamRef, Tensor};
use gated_delta_kernels::kernels::device_contract::{
    CLUSTER_BLOCKS, CLUSTER_RESULTS, RESULTS, WARPGROUP_RESULTS, matrix_element,
};
use gated_delta_test_support::backend::gpu;
use half::{bf16, f16};

const THREADS: usize = 64;
const NUMBER: u32 = 3_141_592_653;
/// Dims of the results of the primitives.
const OUTPUT: [usize; 2] = [RESULTS.len(), THREADS];
/// Number of blocks of a cluster.
const CLUSTER: usize = Entry::cluster_contract.cluster() as usize;
/// Number of blocks that exchange words.
const BLOCKS: usize = CLUSTER_BLOCKS as usize;
/// Dims of the exchanged words.
const EXCHANGED: [usize; 3] = [CLUSTER_RESULTS.len(), BLOCKS, THREADS];

/// Number of threads of a warpgroup.
const WARPGROUP: usize = Entry::warpgroup_contract.block() as usize;
/// Dims of a warpgroup's results.
const PRODUCTS: [usize; 2] = [WARPGROUP_RESULTS as usize, WARPGROUP];

/// Values over several binades, with the signs, zeros, infinities and NaN that primitives treat specially.
fn inputs() -> Vec<f32> {
    let mut inputs: Vec<f32> = (0..THREADS)
        .map(|i| (i as f32 * 0.37 - 9.0).exp2() * if i % 3 == 0 { -1.0 } else { 1.0 })
        .collect();
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        65_504.0,
        65_520.0,
        3e38,
        1e-30,
    ];
    inputs[..special.len()].copy_from_slice(&special);
    inputs
}

/// A kernel that tests primitives: it reads an input and writes words.
type Launch = unsafe fn(&Library, StreamRef<'_>, Tensor<'_>, Tensor<'_>, u32) -> Result<(), Error>;

/// Output of `launch` for `input` in the simulator.
fn simulated<T: DeviceElement>(
    launch: Launch,
    (input, dims): (&[T], &[usize]),
    output_dims: &[usize],
) -> Vec<u32> {
    let mut output = vec![u32::MAX; output_dims.iter().product()];
    let input = Tensor::from_slice(input, dims).unwrap();
    let written = Tensor::from_slice_mut(&mut output, output_dims).unwrap();
    let (library, stream) = (Library::simulator(), StreamRef::default_stream());
    // SAFETY: the simulator is done when the call returns.
    unsafe { launch(&library, stream, input, written, NUMBER) }.unwrap();
    output
}

/// Output of `launch` for `input` on a GPU.
fn on_gpu<T: DeviceElement + Pod>(
    context: &Context,
    launch: Launch,
    (input, dims): (&[T], &[usize]),
    output_dims: &[usize],
) -> Result<Vec<u32>, Error> {
    let mut words = vec![0u32; output_dims.iter().product()];
    let input = DeviceMemory::from_slice(context, input)?;
    let mut output = DeviceMemory::allocate(context, words.len() * 4)?;
    output.fill(0xff)?;
    let stream = Stream::new(context)?;
    let written = output.tensor_mut(DType::U32, output_dims)?;
    let (library, input) = (Library::new(context), input.tensor(T::DTYPE, dims)?);
    // SAFETY: the stream is waited for before the memory is read or freed.
    unsafe { launch(&library, stream.as_ref(), input, written, NUMBER) }?;
    stream.synchronize()?;
    output.read(&mut words)?;
    Ok(words)
}

fn every_primitive(inputs: &[f32]) -> Vec<u32> {
    simulated(Library::device_contract, (inputs, &[THREADS]), &OUTPUT)
}

/// Whether two results agree. Bits must be equal, except for the four approximations, whose bounds are in the documentation of the
/// facade.
fn agree(row: &str, input: f32, one: u32, other: u32) -> bool {
    if one == other {
        return true;
    }
    let (one, other) = (f32::from_bits(one), f32::from_bits(other));
    if one.is_nan() || other.is_nan() {
        return one.is_nan()
            && other.is_nan()
            && matches!(
                row,
                "fma(x, x, 1.5)"
                    | "exp2"
                    | "log2"
                    | "reciprocal"
                    | "rsqrt"
                    | "f16_to_f32"
                    | "b16x2_to_f32, f16, low"
                    | "b16x2_to_f32, f16, high"
            );
    }
    let difference = (f64::from(one) - f64::from(other)).abs();
    let relative = difference / f64::from(one).abs().max(f64::MIN_POSITIVE);
    let ulp = 2f64.powi(-23);
    match row {
        "exp2" => relative <= 3.0 * ulp,
        "reciprocal" => relative <= 2.0 * ulp,
        "rsqrt" => relative <= 4.0 * ulp,
        "log2" if (0.5..=2.0).contains(&input) => difference <= 2f64.powi(-21),
        "log2" => relative <= 4.0 * ulp,
        _ => false,
    }
}

/// bf16 bits of x. Every NaN becomes the GPU's NaN.
fn bf16_bits(x: f32) -> u16 {
    if x.is_nan() {
        0x7fff
    } else {
        bf16::from_f32(x).to_bits()
    }
}

/// Bits of the nearest f16, or of the largest one beyond the range. The inputs have 65,504, 65,520 and infinities.
fn held_f16_bits(x: f32) -> u16 {
    if x.is_nan() {
        0x7fff
    } else {
        f16::from_f32(x.clamp(-65_504.0, 65_504.0)).to_bits()
    }
}

#[test]
fn what_the_simulator_computes_is_right() {
    let inputs = inputs();
    let output = every_primitive(&inputs);
    let row = |name: &str| {
        let row = RESULTS.iter().position(|known| *known == name).unwrap();
        &output[row * THREADS..(row + 1) * THREADS]
    };
    let bits: Vec<u32> = inputs.iter().map(|x| x.to_bits()).collect();
    for id in 0..THREADS {
        let next = (id + 1) % THREADS;
        assert_eq!(row("thread_idx_x")[id], id as u32);
        assert_eq!(row("lane_id")[id], id as u32 % 32);
        assert_eq!(row("warp_shuffle_xor 5")[id], bits[id ^ 5]);
        assert_eq!(row("warp_shuffle_idx 3")[id], bits[id / 32 * 32 + 3]);
        assert_eq!(row("shared b32 of the next thread")[id], bits[next]);
        assert_eq!(
            row("shared b64 of the next thread")[id],
            bits[next].wrapping_add(next as u32)
        );
        assert_eq!(row("shared b16 of the next thread")[id], next as u32);
        assert_eq!(row("load_b16")[id], bits[id] & 0xffff);
        assert_eq!(row("load_state_b16")[id], bits[id] >> 16);
        assert_eq!(row("load_state_b32")[id], bits[id]);
        let quad = bits[id / 4 * 4..][..4]
            .iter()
            .fold(0u32, |sum, word| sum.wrapping_add(*word));
        for name in ["load_b128", "load_state_b128", "copy_async_b128"] {
            assert_eq!(row(name)[id], quad, "{name}");
        }
        assert_eq!(row("load-time constant")[id], NUMBER);
        let x = inputs[id];
        for (element, [low, high]) in [
            ("bf16", [x, -x].map(bf16_bits)),
            ("f16", [x, -x].map(held_f16_bits)),
        ] {
            let packed = row(&format!("pack_b16x2(x, -x), {element}"))[id];
            assert_eq!(
                packed,
                u32::from(low) | u32::from(high) << 16,
                "{element} of {x}"
            );
        }
        for (element, place, right) in [
            ("bf16", "low", bf16::from_f32(x).to_f32()),
            ("bf16", "high", bf16::from_f32(-x).to_f32()),
            ("f16", "low", f16::from_f32(x).to_f32()),
            ("f16", "high", f16::from_f32(-x).to_f32()),
        ] {
            let got = f32::from_bits(row(&format!("b16x2_to_f32, {element}, {place}"))[id]);
            let agree = got.to_bits() == right.to_bits() || got.is_nan() && right.is_nan();
            assert!(agree, "{element}, {place}, of {x}: {got}, not {right}");
        }
        let half = |x: f32| f16::from_f32(x).to_f64();
        let products = [half(x) * half(x), half(-x) * 1.5].map(f16::from_f64);
        let larger = [half(x).abs(), half(x).abs().max(1.5)].map(f16::from_f64);
        let name = "larger_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5))";
        let got = row(name)[id];
        for (i, right) in larger.into_iter().enumerate() {
            let right = if x.is_nan() { 0x7fff } else { right.to_bits() };
            assert_eq!((got >> (16 * i)) as u16, right, "{name} of {x}");
        }
        // Exact in f64, except for parts far below the last place of an f16.
        let sums = [half(x) + half(x), half(-x) + 1.5].map(f16::from_f64);
        let added = [half(x) * half(x) + half(x), half(-x) * 1.5 + half(-x)].map(f16::from_f64);
        for (name, right) in [
            (
                "multiply_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5))",
                products,
            ),
            ("add_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5))", sums),
            (
                "fma_f16x2(pack_f16x2(x, -x), pack_f16x2(x, 1.5), pack_f16x2(x, -x))",
                added,
            ),
        ] {
            let got = row(name)[id];
            for (i, right) in right.into_iter().enumerate() {
                let got = f16::from_bits((got >> (16 * i)) as u16);
                let agree = got.to_bits() == right.to_bits() || got.is_nan() && right.is_nan();
                assert!(agree, "{name} of {x}: {got}, not {right}");
            }
        }
        if x.is_finite() {
            assert_eq!(row("fma(x, x, 1.5)")[id], x.mul_add(x, 1.5).to_bits());
            assert!(
                agree("exp2", x, row("exp2")[id], x.exp2().to_bits()),
                "exp2({x})"
            );
        }
    }
    for id in 0..THREADS {
        let (r, c) = (id % 32 / 4, id % 4);
        for (place, i, j) in [
            ("[r, 2c]", r, 2 * c),
            ("[r, 2c+1]", r, 2 * c + 1),
            ("[r+8, 2c]", r + 8, 2 * c),
            ("[r+8, 2c+1]", r + 8, 2 * c + 1),
        ] {
            let at = |row: usize, column: usize| matrix_element(row as u32, column as u32);
            let sum = at(i, j) + (0..16).map(|k| at(i, k) * at(k, j)).sum::<f32>();
            for element in ["bf16", "f16", "b16, bf16", "b16, f16"] {
                let name = format!("mma_m16n8k16_{element} {place}");
                assert_eq!(row(&name)[id], sum.to_bits(), "{name}");
            }
        }
        let element = |matrix: usize, row: usize, column: usize| {
            let thread = id / 32 * 32 + 8 * matrix + row;
            let loaded = [
                thread as u32,
                thread as u32 + 1,
                thread as u32 + 2,
                bits[thread],
            ];
            loaded[column / 2] >> (column % 2 * 16) & 0xffff
        };
        for matrix in 0..4 {
            let rows = [0, 1].map(|i| element(matrix, r, 2 * c + i));
            let columns = [0, 1].map(|i| element(matrix, 2 * c + i, r));
            for (name, [low, high]) in [
                ("load_matrices", rows),
                ("load_matrices_transposed", columns),
            ] {
                let name = format!("{name} {matrix}");
                assert_eq!(row(&name)[id], high << 16 | low, "{name} of {id}");
            }
        }
    }
    assert_eq!(cast_slice::<u32, f32>(row("f16_to_f32"))[7], 65_504.0);
    assert_eq!(cast_slice::<u32, f32>(row("f16_to_f32"))[8], f32::INFINITY);
}

#[test]
fn sanitizer_the_gpu_agrees_with_the_simulator() {
    let inputs = inputs();
    let Some(context) = gpu() else { return };
    let launch = Library::device_contract;
    let words = on_gpu(context, launch, (&inputs, &[THREADS]), &OUTPUT).unwrap();
    let simulated = every_primitive(&inputs);
    let mut differences = Vec::new();
    for (i, (&gpu, &sim)) in words.iter().zip(&simulated).enumerate() {
        let (row, thread) = (RESULTS[i / THREADS], i % THREADS);
        if !agree(row, inputs[thread], gpu, sim) {
            differences.push(format!(
                "{row} of {:e}: GPU {gpu:#010x}, simulator {sim:#010x}",
                inputs[thread]
            ));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// Words that are all different.
fn words() -> Vec<u32> {
    (0..BLOCKS * THREADS)
        .map(|i| (i as u32 + 1).wrapping_mul(0x9e37_79b9))
        .collect()
}

/// Expected words of the threads of two clusters.
fn exchanged() -> Vec<u32> {
    let words = words();
    let threads = (0..BLOCKS).flat_map(|block| (0..THREADS).map(move |id| (block, id)));
    let results = threads.map(|(block, id)| {
        let next = (id + 1) % THREADS;
        let further = |blocks: usize| block / CLUSTER * CLUSTER + (block + blocks) % CLUSTER;
        let word = |blocks: usize| words[further(blocks) * THREADS + next];
        let across = [word(2), !word(2), next as u32, further(2) as u32];
        [
            block as u32,
            word(CLUSTER - 1),
            across.into_iter().fold(0, u32::wrapping_add),
            word(0),
            word(1) ^ NUMBER,
            word(CLUSTER - 1),
            !word(0),
        ]
    });
    let results: Vec<_> = results.collect();
    let rows = 0..CLUSTER_RESULTS.len();
    rows.flat_map(|row| results.iter().map(move |words| words[row]))
        .collect()
}

#[test]
fn blocks_of_a_cluster_exchange_words_in_the_simulator() {
    let words = words();
    let input = (&words[..], &[BLOCKS, THREADS][..]);
    let got = simulated(Library::cluster_contract, input, &EXCHANGED);
    assert_eq!(got, exchanged());
}

#[test]
fn sanitizer_blocks_of_a_cluster_exchange_words_on_the_gpu() {
    let Some(context) = gpu() else { return };
    if context.device().compute_capability().unwrap() < (9, 0) {
        println!("skipped: a GPU without clusters");
        return;
    }
    let words = words();
    let input = (&words[..], &[BLOCKS, THREADS][..]);
    let got = on_gpu(context, Library::cluster_contract, input, &EXCHANGED).unwrap();
    assert_eq!(got, exchanged());
}

/// Launches the warpgroup's kernel, which takes no number.
unsafe fn warpgroup(
    library: &Library,
    stream: StreamRef<'_>,
    input: Tensor<'_>,
    output: Tensor<'_>,
    _: u32,
) -> Result<(), Error> {
    // SAFETY: the caller's promise.
    unsafe { library.warpgroup_contract(stream, input, output) }
}

/// Words that a warpgroup copies, all different.
fn copied() -> Vec<u32> {
    (0..4 * WARPGROUP as u32)
        .map(|i| i << 16 | (i ^ 0x5555))
        .collect()
}

/// Expected words of the threads of a warpgroup: sums of small integers, which f16 and f32 represent exactly.
fn products() -> Vec<u32> {
    let at = matrix_element;
    let triangle = |s: u32, t: u32| if s <= t { at(s, t) } else { 0.0 };
    let sum = |terms: u32, term: &dyn Fn(u32) -> f32| (0..terms).map(term).sum::<f32>();
    let mut words = vec![u32::MAX; PRODUCTS.iter().product()];
    for id in 0..WARPGROUP as u32 {
        let mut put = |result: u32, word| words[result as usize * WARPGROUP + id as usize] = word;
        // Each sum of a thread belongs to a row and a column.
        for i in 0..64 {
            let row = id / 32 * 16 + id % 32 / 4 + i / 2 % 2 * 8;
            let column = i / 4 * 8 + id % 4 * 2 + i % 2;
            let by_both = sum(128, &|k| at(row, k) * at(column, k));
            put(i, by_both.to_bits());
            let added = 1.0 + sum(64, &|t| at(row, t) * at(t, column));
            put(96 + i, added.to_bits());
            if i < 32 {
                let product = sum(64, &|s| at(row, s) * triangle(s, column));
                put(64 + i, product.to_bits());
                put(160 + i, (1.0 + product).to_bits());
            }
        }
        // A lane has a row of one of four matrices, whose columns were in the lanes.
        let (matrix, i) = (id % 32 / 8, id % 8);
        let element = |j: u32| {
            let lane = id / 32 * 32 + 4 * j + i / 2;
            let row = lane / 32 * 16 + lane % 32 / 4 + matrix % 2 * 8;
            let column = matrix / 2 * 8 + lane % 4 * 2 + i % 2;
            u32::from(f16::from_f32(at(row, column)).to_bits())
        };
        for word in 0..4 {
            put(192 + word, element(2 * word + 1) << 16 | element(2 * word));
            put(198 + word, copied()[(4 * id + word) as usize]);
            let other = WARPGROUP as u32 - 1 - id;
            put(202 + word, copied()[(4 * other + word) as usize]);
            put(206 + word, copied()[(4 * id + word) as usize]);
        }
        // Pairs lie next to each other.
        let pair = 196 * WARPGROUP + 2 * id as usize;
        words[pair..pair + 2].copy_from_slice(&[!id, id]);
    }
    words
}

/// Panics unless each thread's words of `got` are those of `wanted`.
fn assert_products(got: &[u32], wanted: &[u32]) {
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let (result, thread) = (i / WARPGROUP, i % WARPGROUP);
        assert_eq!(got, wanted, "result {result} of thread {thread}");
    }
    assert_eq!(got.len(), wanted.len());
}

#[test]
fn a_warpgroup_multiplies_in_the_simulator() {
    let got = simulated(warpgroup, (&copied(), &[WARPGROUP, 4]), &PRODUCTS);
    assert_products(&got, &products());
}

#[test]
fn sanitizer_a_warpgroup_multiplies_on_the_gpu() {
    let Some(context) = gpu() else { return };
    if context.device().compute_capability().unwrap().0 != 9 {
        println!("skipped: a GPU whose warpgroups do not multiply");
        return;
    }
    let input = (&copied()[..], &[WARPGROUP, 4][..]);
    let got = on_gpu(context, warpgroup, input, &PRODUCTS).unwrap();
    assert_products(&got, &products());
}

//! The simulator and the GPU give the same answer for every primitive of the device facade.

use bytemuck::cast_slice;
use gated_delta::driver::{DeviceMemory, Stream};
use gated_delta::{DType, Error, Library, StreamRef, Tensor};
use gated_delta_kernels::kernels::device_contract::{RESULTS, matrix_element};
use gated_delta_tests::backend::gpu;

const THREADS: usize = 64;
const NUMBER: u32 = 3_141_592_653;

/// Values over several binades, with the signs, zeros, infinities and NaN that the primitives treat apart.
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

fn simulated(inputs: &[f32]) -> Vec<u32> {
    let mut output = vec![u32::MAX; RESULTS.len() * THREADS];
    let input = Tensor::from_slice(inputs, &[THREADS]).unwrap();
    let written = Tensor::from_slice_mut(&mut output, &[RESULTS.len(), THREADS]).unwrap();
    // SAFETY: the simulator is done when the call returns.
    unsafe {
        Library::simulator().device_contract(StreamRef::default_stream(), input, written, NUMBER)
    }
    .unwrap();
    output
}

fn on_gpu(inputs: &[f32]) -> Option<Result<Vec<u32>, Error>> {
    let context = gpu()?;
    let run = || {
        let input = DeviceMemory::from_slice(context, inputs)?;
        let mut output = DeviceMemory::allocate(context, RESULTS.len() * THREADS * 4)?;
        output.fill(0xff)?;
        let stream = Stream::new(context)?;
        let written = output.tensor_mut(DType::U32, &[RESULTS.len(), THREADS])?;
        let input = input.tensor(DType::F32, &[THREADS])?;
        // SAFETY: the stream is waited for before the memory is read or freed.
        unsafe { Library::new(context).device_contract(stream.as_ref(), input, written, NUMBER) }?;
        stream.synchronize()?;
        let mut words = vec![0u32; RESULTS.len() * THREADS];
        output.read(&mut words)?;
        Ok(words)
    };
    Some(run())
}

/// Bits must agree, but for the four approximations, whose bounds are those of the facade's documentation.
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
                "fma(x, x, 1.5)" | "exp2" | "log2" | "reciprocal" | "rsqrt" | "f16_to_f32"
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

#[test]
fn what_the_simulator_computes_is_right() {
    let inputs = inputs();
    let output = simulated(&inputs);
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
            let name = format!("mma_m16n8k16_bf16 {place}");
            assert_eq!(row(&name)[id], sum.to_bits(), "{name}");
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
    let Some(words) = on_gpu(&inputs) else { return };
    let (words, simulated) = (words.unwrap(), simulated(&inputs));
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

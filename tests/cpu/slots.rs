//! A commit with `keep` = 0 copies states bit for bit, as an engine's handling of slots relies on.

use std::env;

use bytemuck::Pod;
use gated_delta::driver::{Device, DeviceMemory, Stream};
use gated_delta::{
    Context, DType, DeviceElement, Error, Formulation, GdnCommit, GdnGates, KdaBeta, KdaCommit,
    KdaDecay, KdaGates, Library, Options, StateLayout, States, Stored, StreamRef, Tensor, Work,
};
use half::bf16;

const B: usize = 3;
const T: usize = 2;
const HV: usize = 2;
const P: usize = 6;
/// Read slots: two rows copy one slot, each to its own slot. The last row is padding.
const READ: [i32; B] = [3, 3, -1];
const WRITE: [i32; B] = [1, 5, 4];

#[derive(Clone, Copy, Debug)]
struct Case {
    is_kda: bool,
    k: usize,
    layout: StateLayout,
    formulation: Formulation,
}

/// Tensors of a launch.
struct Launch<'a> {
    tokens: Tensor<'a>,
    gate: Tensor<'a>,
    beta: Tensor<'a>,
    keep: Tensor<'a>,
    read: Tensor<'a>,
    write: Tensor<'a>,
    pool: Tensor<'a>,
}

impl Case {
    fn pool_dims(self) -> [usize; 4] {
        [P, HV, self.k, self.k]
    }

    fn token_dims(self) -> [usize; 4] {
        [B, T, HV, self.k]
    }

    fn gate_dims(self) -> Vec<usize> {
        self.token_dims()[..if self.is_kda { 4 } else { 3 }].to_vec()
    }

    /// NaN for the previous tokens, which a row with `keep` = 0 does not read.
    fn nan(self) -> Vec<f32> {
        vec![f32::NAN; B * T * HV * self.k]
    }

    fn commit(self, of: Launch<'_>) -> Box<dyn Work + '_> {
        let stored = Stored::kv(of.tokens, of.tokens);
        let states = States::update(of.pool).slots(of.read).write_slots(of.write);
        let options = Options::default()
            .state_layout(self.layout)
            .formulation(self.formulation);
        if self.is_kda {
            let gates = KdaGates::new(of.gate, KdaDecay::Log, of.beta, KdaBeta::Given);
            Box::new(KdaCommit::new(stored, gates, of.keep, states).options(options))
        } else {
            let gates = GdnGates::given(of.gate, of.beta);
            Box::new(GdnCommit::new(stored, gates, of.keep, states).options(options))
        }
    }

    fn simulate<E: DeviceElement>(self, pool: &mut [E]) -> Result<(), Error> {
        let (nan, keep) = (self.nan(), [0i32; B]);
        let some = |dims: &[usize]| Tensor::from_slice(&nan[..dims.iter().product()], dims);
        let commit = self.commit(Launch {
            tokens: some(&self.token_dims())?,
            gate: some(&self.gate_dims())?,
            beta: some(&[B, T, HV])?,
            keep: Tensor::from_slice(&keep, &[B])?,
            read: Tensor::from_slice(&READ, &[B])?,
            write: Tensor::from_slice(&WRITE, &[B])?,
            pool: Tensor::from_slice_mut(pool, &self.pool_dims())?,
        });
        // SAFETY: a simulated launch is done when it returns; no two rows write one slot.
        unsafe { Library::simulator().launch(StreamRef::default_stream(), &*commit) }
    }

    fn on_gpu<E: DeviceElement + Pod>(
        self,
        context: &Context,
        pool: &mut [E],
    ) -> Result<(), Error> {
        let nan = DeviceMemory::from_slice(context, &self.nan())?;
        let [keep, read, write] = [[0; B], READ, WRITE];
        let keep = DeviceMemory::from_slice(context, &keep)?;
        let read = DeviceMemory::from_slice(context, &read)?;
        let write = DeviceMemory::from_slice(context, &write)?;
        let mut states = DeviceMemory::from_slice(context, pool)?;
        let stream = Stream::new(context)?;
        let commit = self.commit(Launch {
            tokens: nan.tensor(DType::F32, &self.token_dims())?,
            gate: nan.tensor(DType::F32, &self.gate_dims())?,
            beta: nan.tensor(DType::F32, &[B, T, HV])?,
            keep: keep.tensor(DType::I32, &[B])?,
            read: read.tensor(DType::I32, &[B])?,
            write: write.tensor(DType::I32, &[B])?,
            pool: states.tensor_mut(E::DTYPE, &self.pool_dims())?,
        });
        // SAFETY: the buffers outlive the synchronisation; no two rows write one slot.
        unsafe { Library::new(context).launch(stream.as_ref(), &*commit) }?;
        stream.synchronize()?;
        drop(commit);
        states.read(pool)
    }

    /// Panics unless slots 1 and 5 equal slot 3 afterwards and all other slots are unchanged.
    fn check<E: DeviceElement + Pod>(self, context: Option<&Context>, before: &[E]) {
        let mut runs = vec![before.to_vec()];
        self.simulate(&mut runs[0]).unwrap();
        if let Some(context) = context {
            runs.push(before.to_vec());
            self.on_gpu(context, &mut runs[1]).unwrap();
        }
        let slot_elements = HV * self.k * self.k;
        for after in &runs {
            for (slot, after) in after.chunks(slot_elements).enumerate() {
                let from = if [1, 5].contains(&slot) { 3 } else { slot };
                let wanted = &before[from * slot_elements..][..slot_elements];
                let (after, wanted): (&[u8], &[u8]) =
                    (bytemuck::cast_slice(after), bytemuck::cast_slice(wanted));
                assert!(
                    after == wanted,
                    "{self:?}, {}: slot {slot} differs",
                    E::DTYPE
                );
            }
        }
    }
}

/// Bit patterns of numbers of all sizes, including zeros, infinities and subnormals of both signs, without NaN.
fn patterns(len: usize) -> impl Iterator<Item = u32> {
    let special = [0, 1, 0x7f80_0000, 0x0080_0000, 0x0001_0000, 0x007f_0000];
    let mut seed = 1u32;
    (0..len).map(move |i| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let drawn = match f32::from_bits(seed).is_nan() {
            true => seed & !0x0080_0000,
            false => seed,
        };
        let sign = drawn & 0x8000_0000;
        special.get(i % 61).map_or(drawn, |special| sign | special)
    })
}

#[test]
fn a_commit_that_keeps_nothing_copies_slots_bit_for_bit() {
    let context = match Device::get(0).and_then(Context::primary) {
        Ok(context) => Some(context),
        Err(Error::NoDriver { .. } | Error::NoDevice) => None,
        Err(error) => panic!("{error}"),
    };
    let required = env::var_os("GATED_DELTA_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(context.is_some() || !required, "wanted a GPU");
    for is_kda in [false, true] {
        for (k, layout) in [
            (64, StateLayout::KLast),
            (64, StateLayout::VLast),
            (128, StateLayout::KLast),
        ] {
            let formulation = Formulation::Recurrent;
            let case = Case {
                is_kda,
                k,
                layout,
                formulation,
            };
            let bits = || patterns(P * HV * k * k);
            let f32_states: Vec<_> = bits().map(f32::from_bits).collect();
            case.check(context.as_ref(), &f32_states);
            let high_half = |bits| bf16::from_bits((bits >> 16) as u16);
            let bf16_states: Vec<_> = bits().map(high_half).collect();
            case.check(context.as_ref(), &bf16_states);
            if layout == StateLayout::KLast && (k == 128 || !is_kda) {
                let formulation = Formulation::Parallel;
                let parallel = Case {
                    formulation,
                    ..case
                };
                parallel.check(context.as_ref(), &bf16_states);
            }
        }
    }
}

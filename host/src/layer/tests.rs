//! Tests of layers: their steps equal steps made by hand, and wrong tensors are refused by name.

use std::cell::Cell;

use bytemuck::bytes_of;

use super::*;
use crate::DType::{Bf16, F32, I32};
use crate::step::pending::Rings;
use crate::{Activation, GdnGates, HeadMap, KdaBeta, KdaDecay, KdaGates};

const B: usize = 3;
const H: usize = 2;
const HV: usize = 4;
/// K and V, the head dims.
const K: usize = 128;
/// P, the number of slots.
const SLOTS: usize = 6;
/// D, the number of channels.
const D: usize = (2 * H + HV) * K;
/// Elements of a token's `[q | k | v | z | b | a]`.
const ROW: usize = D + HV * K + 2 * HV;

thread_local! {
    static NEXT: Cell<u64> = const { Cell::new(0x1_0000) };
}

/// A tensor at an address of its own.
fn tensor(dtype: DType, dims: &[usize]) -> Tensor<'static> {
    let address = NEXT.replace(NEXT.get() + 0x1_0000);
    // SAFETY: nothing is launched.
    unsafe { Tensor::from_raw(address, dtype, dims) }.unwrap()
}

fn of_rows() -> Tensor<'static> {
    tensor(I32, &[B])
}

fn weights<P>(parameters: P) -> Weights<'static, P> {
    let (conv, norm) = (tensor(Bf16, &[D, 4]), tensor(Bf16, &[K]));
    Weights::new(H, conv, parameters, norm, 1e-5)
}

fn gdn_parameters() -> GdnParameters<'static> {
    GdnParameters::new(tensor(F32, &[HV]), tensor(F32, &[HV]))
}

fn pools() -> [Tensor<'static>; 2] {
    [
        tensor(Bf16, &[SLOTS, HV, K, K]),
        tensor(Bf16, &[SLOTS, D, 3]),
    ]
}

/// Asserts that two works have the same problem, variant, tensors and parameters.
#[track_caller]
fn same<W: Work, V: Work>(got: &W, wanted: &V) {
    let (got, wanted) = (got.request(), wanted.request());
    assert_eq!(got.check().unwrap(), wanted.check().unwrap());
    assert_eq!(got.selected().unwrap(), wanted.selected().unwrap());
    let [got_tensors, wanted_tensors] = [got.tensors(), wanted.tensors()]
        .map(|tensors| tensors.map(|named| named.map(|it| (it.name, format!("{:?}", it.tensor)))));
    assert_eq!(got_tensors, wanted_tensors);
    assert_eq!(bytes_of(got.params()), bytes_of(wanted.params()));
    assert_eq!(got.max_tokens, wanted.max_tokens);
    assert_eq!(got.checkpoint_every(), wanted.checkpoint_every());
}

/// A GDN and a KDA projection with these outer dims.
fn tokens(layer: &GdnLayer<'static>, [b, t]: [usize; 2]) -> [Projection<'static>; 2] {
    let gdn = layer.projection(tensor(Bf16, &[b, t, ROW])).unwrap();
    let g = tensor(Bf16, &[b, t, HV, K]);
    [gdn, Projection::new(gdn.x, [g, gdn.beta], gdn.z)]
}

/// With non-default options, every method of a layer makes the same step as a caller by hand.
#[test]
fn steps_are_those_by_hand() {
    let options = Options::default().head_map(HeadMap::Tiled).null_slot(0);
    let [pool, windows] = pools();
    let mut gdn = weights(gdn_parameters());
    gdn.conv_bias = Some(tensor(F32, &[D]));
    gdn.conv_activation = Activation::None;
    gdn.parameters.beta_scale = crate::BetaScale::Two;
    let kind = KdaDecay::Softplus {
        a_log: tensor(F32, &[HV]),
        dt_bias: Some(tensor(F32, &[HV, K])),
    };
    let mut kda = weights(KdaParameters::new(kind));
    kda.norm_activation = Activation::Sigmoid;

    let conv = |x| {
        let conv = Convolution::new(x, H, gdn.conv, windows).activation(Activation::None);
        conv.bias(gdn.conv_bias.unwrap())
    };
    let gdn_gates = |of: &Projection<'static>| {
        let parameters = gdn.parameters;
        GdnGates::raw(of.gate, of.beta, parameters.a_log, parameters.dt_bias)
            .beta_scale(crate::BetaScale::Two)
    };
    let layer = GdnLayer::new(gdn, pool, windows, options).unwrap();
    let kda_layer = KdaLayer::new(kda, pool, windows, options).unwrap();
    let ([one, _], [last, _]) = (tokens(&layer, [B, 1]), tokens(&layer, [B, 2]));
    let o = tensor(Bf16, &[B, 1, HV, K]);
    let [slots, to, fresh, keep] = [(); 4].map(|()| of_rows());
    let rows = Rows::new(slots).write_slots(to).fresh(fresh);
    let update = States::update(pool).slots(slots).write_slots(to);
    let by_hand = |states: States<'static>, of: &Projection<'static>, o| {
        Step::new(Inputs::conv(conv(of.x)), gdn_gates(of), o, states)
            .norm(Norm::new(of.z, gdn.norm, 1e-5))
            .fresh(fresh)
            .options(options)
    };
    let decode = by_hand(update.into(), &one, o);
    same(&layer.decode(&one, &rows, o), &decode);
    let previous = Previous::new(Stored::x(last.x), last.gate, last.beta, keep);
    let resume = decode.previous(previous);
    same(&layer.resume(&one, &last, keep, &rows, o), &resume);
    let commit = Commit::new(Stored::conv(conv(last.x)), gdn_gates(&last), keep, update);
    let commit = commit.fresh(fresh).options(options);
    same(&layer.commit(&last, keep, &rows), &commit);

    let ([drafts, of_kda], o) = (tokens(&layer, [B, 3]), tensor(Bf16, &[B, 3, HV, K]));
    let read_only = States::read_only(pool).slots(slots);
    let verify = by_hand(read_only.into(), &drafts, o);
    same(&layer.verify(&drafts, &rows, o), &verify);

    let kda_gates = KdaGates::new(of_kda.gate, kind, of_kda.beta, KdaBeta::Logit);
    let kda_conv = Convolution::new(of_kda.x, H, kda.conv, windows);
    let norm = Norm::new(of_kda.z, kda.norm, 1e-5).activation(Activation::Sigmoid);
    let verify = Step::new(Inputs::conv(kda_conv), kda_gates, o, read_only)
        .norm(norm)
        .fresh(fresh)
        .options(options);
    same(&kda_layer.verify(&of_kda, &rows, o), &verify);

    // A layer's prefill is chunkwise, whatever the number of tokens.
    let chunked = options.formulation(Formulation::Chunked);
    for total in [5, 900] {
        let [prompts, _] = tokens(&layer, [1, total]);
        let (bounds, o) = (tensor(I32, &[B + 1]), tensor(Bf16, &[1, total, HV, K]));
        let rows = rows.packed(bounds, total);
        let prefill = by_hand(update.into(), &prompts, o).packed(bounds, total);
        let prefill = prefill.options(chunked);
        same(&layer.prefill(&prompts, &rows, o), &prefill);

        let (at, kept, memory) = (of_rows(), tensor(I32, &[B, 2]), tensor(F32, &[1 << 24]));
        let rows = rows.positions(at).checkpoints(64, kept).workspace(memory);
        let prefill = prefill
            .positions(at)
            .checkpoints(64, kept)
            .workspace(memory);
        same(&layer.prefill(&prompts, &rows, o), &prefill);
    }
}

/// A projection's row is `[q | k | v | z | b | a]`.
#[test]
fn a_row_is_taken_apart() {
    let [pool, windows] = pools();
    let layer = GdnLayer::new(weights(gdn_parameters()), pool, windows, Options::default());
    let row = tensor(Bf16, &[B, 2, ROW]);
    let Projection {
        x, gate, beta, z, ..
    } = layer.unwrap().projection(row).unwrap();
    let offsets = [x, z, beta, gate].map(|view| (view.address() - row.address()) as usize / 2);
    assert_eq!(offsets, [0, D, D + HV * K, D + HV * K + HV]);
    assert_eq!(z.dims()[..], [B, 2, HV, K]);
    assert_eq!(
        [beta.dims()[..] == [B, 2, HV], gate.dims()[..] == [B, 2, HV]],
        [true; 2]
    );
}

/// A flush of a ring with inputs has windows, like a step with this ring.
#[test]
fn a_flush_is_that_by_hand() {
    let [pool, windows] = pools();
    let layer = GdnLayer::new(weights(gdn_parameters()), pool, windows, Options::default());
    let layer = layer.unwrap();
    let slots = of_rows();
    let states = States::update(pool).slots(slots);
    let waiting = Pending::new(Rings {
        keys: tensor(F32, &[SLOTS, H, 20, K]),
        updates: tensor(F32, &[SLOTS, HV, 20, K]),
        decays: tensor(F32, &[SLOTS, HV, 20]),
        len: of_rows(),
        base: of_rows(),
    });
    let drafts = waiting.most(16).inputs(tensor(Bf16, &[SLOTS, 20, D]));
    let rows = Rows::new(slots);
    same(&layer.flush(waiting, &rows), &Flush::new(states, waiting));
    let by_hand = Flush::new(states, drafts).windows(windows);
    same(&layer.flush(drafts, &rows), &by_hand);
}

/// A layer that lives as long as the process makes steps from tensors that are borrowed for one launch.
#[test]
fn a_layer_outlives_the_tensors_of_a_step() {
    let [pool, windows] = pools();
    let layer: GdnLayer<'static> =
        Layer::new(weights(gdn_parameters()), pool, windows, Options::default()).unwrap();
    let slots = [2i32, 0, 1];
    let slots = Tensor::from_slice(&slots, &[B]).unwrap();
    let row = tensor(Bf16, &[B, 1, ROW]);
    let o = tensor(Bf16, &[B, 1, HV, K]);
    let step = layer.decode(&layer.projection(row).unwrap(), &Rows::new(slots), o);
    assert!(step.selected().is_ok());
}

/// `Layer::new` refuses wrong tensors by name.
#[test]
fn refusals_name_the_tensor() {
    type Change = fn(&mut Weights<'static, GdnParameters<'static>>, &mut [Tensor<'static>; 2]);
    let refusals: [(&str, Change); 14] = [
        ("conv_weight: ", |of, _| of.conv = tensor(Bf16, &[D + 1, 4])),
        ("W = 5", |of, _| of.conv = tensor(Bf16, &[D, 5])),
        ("conv_bias: ", |of, _| {
            of.conv_bias = Some(tensor(Bf16, &[D, 1]));
        }),
        ("activation of the convolution", |of, _| {
            of.conv_activation = Activation::Sigmoid;
        }),
        ("A_log: ", |of, _| of.parameters.a_log = tensor(Bf16, &[HV])),
        ("dt_bias: ", |of, _| {
            of.parameters.dt_bias = tensor(F32, &[H]);
        }),
        ("norm_weight: ", |of, _| of.norm = tensor(Bf16, &[HV, K])),
        ("eps of the norm", |of, _| of.eps = 0.0),
        ("HV: ", |of, _| of.heads = 3),
        ("pool: ", |_, pools| pools[0] = tensor(Bf16, &[SLOTS, K, K])),
        ("K = 32", |_, pools| {
            pools[0] = tensor(Bf16, &[SLOTS, HV, K, 32]);
        }),
        ("windows: ", |_, pools| {
            pools[1] = tensor(Bf16, &[SLOTS, D, 4]);
        }),
        ("windows: ", |_, pools| {
            pools[1] = tensor(I32, &[SLOTS, D, 3]);
        }),
        ("windows: ", |_, pools| {
            pools[1] = tensor(Bf16, &[SLOTS - 1, D, 3]);
        }),
    ];
    let made = |change: Change| {
        let (mut weights, mut pools) = (weights(gdn_parameters()), pools());
        change(&mut weights, &mut pools);
        let [pool, windows] = pools;
        Layer::new(weights, pool, windows, Options::default())
    };
    for (name, change) in refusals {
        let message = made(change).unwrap_err().to_string();
        assert!(message.starts_with(name), "{name}: {message}");
    }
    let on_host = |_: &mut _, pools: &mut [Tensor<'static>; 2]| {
        pools[1] = Tensor::from_slice(&[half::bf16::ZERO; SLOTS * D * 3], &[SLOTS, D, 3]).unwrap();
    };
    assert_eq!(
        made(on_host).unwrap_err().to_string(),
        "windows: wanted device memory, got host memory"
    );
    let layer = made(|_, _| ()).unwrap();
    let short = layer.projection(tensor(Bf16, &[B, 1, ROW - 1]));
    let message = short.unwrap_err().to_string();
    assert!(
        message.starts_with("row: wanted shape [B, T, D + HV·V + 2·HV] = "),
        "{message}"
    );
}

/// A layer's pool must be writable.
#[test]
fn a_shared_pool_is_refused() {
    let floats = vec![0.0f32; SLOTS * D * 4];
    let of = |dims: &[usize]| Tensor::from_slice(&floats, dims).unwrap();
    let parameters = GdnParameters::new(of(&[HV]), of(&[HV]));
    let d = (2 * H + HV) * 64;
    let weights = Weights::new(H, of(&[d, 4]), parameters, of(&[64]), 1e-6);
    let floats = vec![0.0f32; SLOTS * HV * 64 * 64];
    let pool = Tensor::from_slice(&floats, &[SLOTS, HV, 64, 64]).unwrap();
    let error = Layer::new(weights, pool, of(&[SLOTS, d, 3]), Options::default()).unwrap_err();
    assert!(matches!(error, Error::ReadOnly { .. }), "{error}");
}

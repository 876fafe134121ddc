//! Tests of the compiled problem for given arguments, and of arguments that are refused.

mod choice;
mod layer;
mod layer_tokens;
mod pending;
mod prefill;
mod prefill_launches;
mod refused;
mod stages;

use gated_delta_kernels::launch::Family;
use gated_delta_kernels::step::{StepConstants, StepParams};

use super::work::sealed::Work as _;
use super::*;

use crate::DType::{self, Bf16, F16, F32, I32, I64, U32};
use crate::error::Error;
use crate::tensor::Tensor;

fn at(address: u64, dtype: DType, dims: &[usize]) -> Tensor<'static> {
    // SAFETY: nothing is launched.
    unsafe { Tensor::from_raw(address, dtype, dims) }.unwrap()
}

fn tensor(dtype: DType, dims: &[usize]) -> Tensor<'static> {
    at(0x1_0000, dtype, dims)
}

fn strided(dtype: DType, dims: &[usize], strides: &[usize]) -> Tensor<'static> {
    tensor(dtype, dims).with_strides(strides).unwrap()
}

fn pool() -> Tensor<'static> {
    tensor(Bf16, &[5, 4, 64, 64])
}

fn snapshots() -> Tensor<'static> {
    tensor(Bf16, &[2, 4, 4, 64, 64])
}

/// Options that name the recurrent formulation.
fn recurrent() -> Options {
    Options::default().formulation(Formulation::Recurrent)
}

/// A recurrent step with B = 2, T = 3, H = 2, HV = 4, K = V = 64, P = 5.
fn step<G>(gates: G) -> Step<'static, G> {
    let (qk, v) = (tensor(Bf16, &[2, 3, 2, 64]), tensor(Bf16, &[2, 3, 4, 64]));
    Step::new(Inputs::qkv(qk, qk, v), gates, v, States::update(pool())).options(recurrent())
}

fn gdn() -> Gdn<'static> {
    let parameter = tensor(F32, &[4]);
    let gates = GdnGates::raw(
        tensor(F16, &[2, 3, 4]),
        tensor(F32, &[2, 3, 4]),
        parameter,
        parameter,
    );
    step(gates.beta_scale(BetaScale::Two))
}

fn kda(kind: KdaDecay<'static>) -> Kda<'static> {
    let (g, beta) = (tensor(F32, &[2, 3, 4, 64]), tensor(Bf16, &[2, 3, 4]));
    step(KdaGates::new(g, kind, beta, KdaBeta::Logit))
}

fn lower_bound(bound: f32, a_log: Option<&[usize]>, dt_bias: Option<&[usize]>) -> Kda<'static> {
    kda(KdaDecay::LowerBound {
        lower_bound: bound,
        a_log: a_log.map(|dims| tensor(F32, dims)),
        dt_bias: dt_bias.map(|dims| tensor(F32, dims)),
    })
}

/// Previous tokens with T' = 5 and the dtypes of [`gdn`].
fn previous() -> Previous<'static> {
    let stored = Stored::kv(tensor(Bf16, &[2, 5, 2, 64]), tensor(Bf16, &[2, 5, 4, 64]));
    let (gate, beta) = (tensor(F16, &[2, 5, 4]), tensor(F32, &[2, 5, 4]));
    Previous::new(stored, gate, beta, tensor(I64, &[2]))
}

fn resume() -> Gdn<'static> {
    gdn().previous(previous())
}

/// Packed rows of at most 3 tokens, 7 tokens in all.
fn packed() -> Gdn<'static> {
    let of_total = |heads| tensor(Bf16, &[1, 7, heads, 64]);
    let (gate, states) = (tensor(F32, &[1, 7, 4]), States::update(pool()));
    let inputs = Inputs::qkv(of_total(2), of_total(2), of_total(4));
    Gdn::new(inputs, GdnGates::given(gate, gate), of_total(4), states)
        .packed(tensor(U32, &[3]), 3)
        .options(recurrent())
}

fn token_slots() -> Gdn<'static> {
    let states = States::per_token(pool(), tensor(I32, &[2, 3]));
    with_states(gdn(), states.accepted(tensor(I64, &[2])))
}

fn commit() -> GdnCommit<'static> {
    let stored = Stored::kv(tensor(Bf16, &[2, 3, 2, 64]), tensor(Bf16, &[2, 3, 4, 64]));
    GdnCommit::new(
        stored,
        gdn().gates,
        tensor(I32, &[2]),
        States::update(pool()),
    )
    .options(recurrent())
}

fn with_states<G>(
    mut step: Step<'static, G>,
    states: impl Into<States<'static>>,
) -> Step<'static, G> {
    step.states = states.into();
    step
}

/// The family of kernels, and whether the gates have one decay per key channel.
fn operator(work: &dyn Work) -> (Family, bool) {
    let kind = work.request().check().unwrap().kind;
    (kind.family, kind.per_channel)
}

/// The tensors q, k and v of a step.
fn qkv<'b, G>(step: &'b mut Step<'static, G>) -> [&'b mut Tensor<'static>; 3] {
    match &mut step.inputs {
        Inputs::Qkv { q, k, v } => [q, k, v],
        Inputs::Conv(_) => unreachable!("other inputs"),
    }
}

#[test]
fn the_parameters_of_a_kda_gate_have_one_number_of_rows() {
    let rows_h = |a_log: Option<&[usize]>, dt_bias: Option<&[usize]>| {
        let problem = lower_bound(-5.0, a_log, dt_bias).request().check()?;
        Ok::<_, Error>(problem.constants.gate_rows_h)
    };
    assert_eq!(rows_h(None, None).unwrap(), 0);
    assert_eq!(rows_h(Some(&[2]), Some(&[2, 64])).unwrap(), 1);
    assert_eq!(rows_h(Some(&[4]), Some(&[4, 64])).unwrap(), 0);
    assert_eq!(rows_h(None, Some(&[2, 64])).unwrap(), 1);
    for (a_log, dt_bias, wanted) in [
        (
            Some(&[2][..]),
            Some(&[4, 64][..]),
            "dt_bias: wanted shape [rows of A_log, K] = [2, 64], got [4, 64]",
        ),
        (
            Some(&[3]),
            None,
            "A_log: wanted shape [H or HV] = [4], got [3]",
        ),
        (
            None,
            Some(&[4, 32]),
            "dt_bias: wanted shape [H or HV, K] = [4, 64], got [4, 32]",
        ),
    ] {
        assert_eq!(rows_h(a_log, dt_bias).unwrap_err().to_string(), wanted);
    }
    for bound in [0.0, 1.0, f32::NAN, f32::NEG_INFINITY] {
        let error = lower_bound(bound, None, None).bytes().unwrap_err();
        assert!(error.to_string().starts_with("lower_bound"), "{error}");
    }
}

#[test]
fn constants_are_those_of_the_tensors() {
    let c = gdn().request().check().unwrap().constants;
    assert_eq!((c.tokens, c.previous_tokens, c.update_state), (3, 0, 1));
    assert_eq!((c.q_row, c.q_token, c.q_head), (384, 128, 64));
    assert_eq!((c.v_row, c.v_token, c.v_head), (768, 256, 64));
    assert_eq!((c.g_row, c.g_token, c.g_head), (12, 4, 1));
    assert_eq!((c.q_element, c.g_element, c.b_element), (1, 2, 0));
    assert_eq!((c.gate, c.beta_logit, c.beta_scale), (1, 1, 2f32.to_bits()));
    assert_eq!((c.wide_io, c.wide_state), (1, 1));

    let c = packed().request().check().unwrap().constants;
    assert_eq!((c.q_row, c.q_token, c.cu_seqlens_index), (0, 128, 3));
    assert_eq!((c.gate, c.has_a_log, c.b_row, c.b_token), (0, 0, 0, 4));
    assert_eq!(packed().params().step.total_tokens, 7);

    let c = resume().request().check().unwrap().constants;
    assert_eq!((c.tokens, c.previous_tokens, c.update_state), (3, 5, 0));
    assert_eq!((c.previous_k_row, c.previous_k_token), (640, 128));
    assert_eq!(c.keep_index, 2);

    let c = commit().request().check().unwrap().constants;
    assert_eq!((c.tokens, c.previous_tokens, c.update_state), (0, 3, 0));
    assert_eq!(
        (c.previous_v_row, c.v_row, c.v_element, c.g_element),
        (768, 0, 1, 2)
    );

    let c = token_slots().request().check().unwrap().constants;
    assert_eq!(
        (c.token_index, c.accepted_index, c.token_slots_row),
        (1, 2, 3)
    );
    assert_eq!(c.update_state, 0);

    let c = kda(KdaDecay::Log).request().check().unwrap().constants;
    assert_eq!(
        (c.g_row, c.g_token, c.g_head, c.beta_logit),
        (768, 256, 64, 1)
    );
}

#[test]
fn every_address_and_stride_decides_on_wide_accesses() {
    let wide = |args: &Kda<'_>| {
        let c = args.request().check().unwrap().constants;
        (c.wide_io, c.wide_state)
    };
    let good = || lower_bound(-1.0, None, Some(&[4, 64]));
    assert_eq!(wide(&good()), (1, 1));
    let mut args = good();
    args.gates.g = at(0x1_0004, F32, &[2, 3, 4, 64]);
    assert_eq!(wide(&args), (0, 1));
    args = good();
    args.gates.kind = KdaDecay::LowerBound {
        lower_bound: -1.0,
        a_log: None,
        dt_bias: Some(at(0x1_0008, F32, &[4, 64])),
    };
    assert_eq!(wide(&args), (0, 1));
    args = good();
    *qkv(&mut args)[0] = strided(Bf16, &[2, 3, 2, 64], &[1024, 129, 64, 1]);
    assert_eq!(wide(&args), (0, 1));
    let steps = strided(Bf16, &[2, 3, 4, 64, 64], &[65536, 16385, 4096, 64, 1]);
    assert_eq!(wide(&good().snapshots(steps)), (1, 0));
    let (aligned, odd) = (pool(), at(0x1_0002, Bf16, &[5, 4, 64, 64]));
    for states in [
        States::update(odd),
        States::update(aligned).write_pool(odd),
        States::update(odd).write_pool(aligned),
    ] {
        assert_eq!(wide(&with_states(good(), states)), (1, 0));
    }
    let mut args = resume();
    assert_eq!(args.request().check().unwrap().constants.wide_io, 1);
    let Stored::Kv { v, .. } = &mut args.previous.as_mut().unwrap().stored else {
        unreachable!("other inputs")
    };
    *v = at(0x1_0002, Bf16, &[2, 5, 4, 64]);
    assert_eq!(args.request().check().unwrap().constants.wide_io, 0);
}

#[test]
fn a_plan_names_the_address_that_is_less_aligned() {
    let args = lower_bound(-1.0, None, Some(&[4, 64]));
    let problem = args.request().check().unwrap();
    problem.check_aligned(&args.params()).unwrap();
    type Field = fn(&mut StepParams) -> &mut u64;
    let fields: [(&str, Field); 12] = [
        ("q", |params| &mut params.q),
        ("k", |params| &mut params.k),
        ("v", |params| &mut params.v),
        ("o", |params| &mut params.o),
        ("g", |params| &mut params.g),
        ("previous k", |params| &mut params.previous_k),
        ("previous v", |params| &mut params.previous_v),
        ("previous g", |params| &mut params.previous_g),
        ("dt_bias", |params| &mut params.dt_bias),
        ("pool", |params| &mut params.read_pool),
        ("write_pool", |params| &mut params.write_pool),
        ("snapshots", |params| &mut params.snapshots),
    ];
    for (name, field) in fields {
        let mut params = args.params();
        *field(&mut params.step) = 0x1_0008;
        let message = problem.check_aligned(&params).unwrap_err().to_string();
        assert_eq!(
            message,
            format!("{name}: wanted an alignment of 16 bytes, got 8")
        );
    }
    let mut params = args.params();
    params.step.b = 0x1_0002;
    problem.check_aligned(&params).unwrap();
}

/// For each B, a plan has the kernel that a launch with this B selects, on GPUs of several sizes.
#[test]
fn a_plan_has_the_launches_of_every_b() {
    let mut steps = 0;
    let one = |heads: [usize; 2]| {
        let [h, hv] = heads;
        let (qk, v) = (
            tensor(Bf16, &[1, 1, h, 128]),
            tensor(Bf16, &[1, 1, hv, 128]),
        );
        let gate = tensor(F32, &[1, 1, hv]);
        let states = States::update(tensor(Bf16, &[5, hv, 128, 128]));
        Gdn::new(
            Inputs::qkv(qk, qk, v),
            GdnGates::given(gate, gate),
            v,
            states,
        )
    };
    for work in [
        &one([16, 32]) as &dyn Work,
        &one([1, 2]),
        &gdn(),
        &resume(),
        &commit(),
    ] {
        let problem = work.request().check().unwrap();
        for multiprocessors in [20, 132, 160] {
            let gpu = Gpu {
                multiprocessors,
                ..MEASURED_ON
            };
            let by_rows: Vec<_> = problem.by_rows(gpu).collect();
            assert_eq!(by_rows.last().map(|step| step.last), Some(MAX_BATCH as u32));
            steps += by_rows.len();
            for rows in (1..600).chain([MAX_BATCH as u32 - 1, MAX_BATCH as u32]) {
                let lengths = crate::step::lengths::Lengths::of_rows(rows);
                let entry = problem.entry(&lengths, gpu).unwrap();
                let wanted = problem.launches(entry, &lengths, gpu, true).main;
                let step = by_rows.iter().find(|step| rows <= step.last).unwrap();
                let mut shape = step.shape;
                shape.grid[2] = rows;
                assert_eq!((step.of, shape), wanted, "B = {rows}, {multiprocessors}");
            }
        }
    }
    assert!(steps > 5 * 3, "nothing goes with B");
}

#[test]
fn bytes_are_each_start_state_each_kept_state_and_every_other_tensor() {
    const STATE: u64 = 4 * 64 * 64 * 2;
    // q, k; v, o; a, b; A_log, dt_bias.
    const TOKENS: u64 = 2 * (2 * 3 * 2 * 64 * 2) + 2 * (2 * 3 * 4 * 64 * 2) + 24 * (2 + 4) + 2 * 16;
    // k; v; a, b; keep.
    const PREVIOUS: u64 = (2 * 5 * 2 * 64 * 2) + (2 * 5 * 4 * 64 * 2) + 40 * (2 + 4) + 2 * 8;
    assert_eq!(gdn().bytes().unwrap(), 4 * STATE + TOKENS);
    let output_only = with_states(gdn(), States::read_only(pool()));
    assert_eq!(output_only.bytes().unwrap(), 2 * STATE + TOKENS);
    let of_each_token = output_only.snapshots(snapshots());
    assert_eq!(of_each_token.bytes().unwrap(), (2 + 6) * STATE + TOKENS);
    assert_eq!(resume().bytes().unwrap(), 4 * STATE + TOKENS + PREVIOUS);
    assert_eq!(
        token_slots().bytes().unwrap(),
        (2 + 6) * STATE + TOKENS + 24 + 16
    );
    assert_eq!(
        packed().snapshots(snapshots()).bytes().unwrap() - packed().bytes().unwrap(),
        7 * STATE
    );
}

/// The family of kernels follows from the formulation, T and the places where states are written.
#[test]
fn a_family_follows_from_t_and_options() {
    let family = |work: &dyn Work| work.selected().unwrap().operator();
    let one = |states: States<'static>| {
        let (qk, v) = (tensor(Bf16, &[2, 1, 2, 64]), tensor(Bf16, &[2, 1, 4, 64]));
        let gate = tensor(F32, &[2, 1, 4]);
        Gdn::new(
            Inputs::qkv(qk, qk, v),
            GdnGates::given(gate, gate),
            v,
            states,
        )
    };
    let update = || one(States::update(pool()).into());
    let per_token = States::per_token(pool(), tensor(I32, &[2, 1]));
    assert_eq!(family(&update()), "recurrent");
    assert_eq!(family(&one(States::read_only(pool()).into())), "recurrent");
    assert_eq!(family(&update().snapshots(snapshots())), "recurrent");
    assert_eq!(family(&one(per_token.into())), "recurrent");
    let mut packed_one = packed();
    packed_one.packed.as_mut().unwrap().max_tokens = 1;
    assert_eq!(family(&packed_one), "recurrent");
    assert_eq!(family(&gdn()), "recurrent");
    assert_eq!(family(&commit()), "recurrent");
    let parallel = Options::default().formulation(Formulation::Parallel);
    let selected = |work: &dyn Work| work.selected().unwrap().name();
    for work in [update().options(parallel), gdn().options(parallel)] {
        assert!(selected(&work).starts_with("gdn_mtp_parallel_"));
    }
    assert!(selected(&commit().options(parallel)).starts_with("gdn_mtp_parallel_"));
    assert_eq!(family(&kda(KdaDecay::Log)), "recurrent");
}

/// The selected entry may depend on which states a step keeps.
#[test]
fn what_is_kept_follows_from_states() {
    let mode = |work: &dyn Work| work.request().check().unwrap().kind.mode;
    assert_eq!(mode(&gdn()), Mode::Update);
    assert_eq!(mode(&gdn().snapshots(snapshots())), Mode::Each);
    assert_eq!(mode(&token_slots()), Mode::Each);
    let verify = with_states(gdn(), States::read_only(pool()));
    assert_eq!(mode(&verify), Mode::Verify);
    assert_eq!(mode(&resume()), Mode::Resume);
    assert_eq!(mode(&commit()), Mode::Commit);
}

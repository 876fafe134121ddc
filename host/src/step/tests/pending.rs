//! Tests of deferred write-back: kernels, constants, and options refused by name.

use super::layer::{self, D, conv};
use super::refused::refused;
use super::*;
use crate::step::pending::{Count, MAX_PENDING, Ring, Rings};
use crate::step::{Flush, Pending};

/// Rings of `entries` entries and keys of dtype `keys`: GDN with 2 and 4 heads, K = V = 64, in 5 slots.
fn rings_of(keys: DType, entries: usize) -> Pending<'static> {
    Pending::new(Rings {
        keys: tensor(keys, &[5, 2, entries, 64]),
        updates: tensor(F32, &[5, 4, entries, 64]),
        decays: tensor(F32, &[5, 4, entries]),
        len: tensor(I32, &[2]),
        base: tensor(I64, &[2]),
    })
}

fn rings(entries: usize) -> Pending<'static> {
    rings_of(Bf16, entries)
}

fn decode() -> Gdn<'static> {
    let of = |heads| tensor(Bf16, &[2, 1, heads, 64]);
    let gate = tensor(Bf16, &[2, 1, 4]);
    let states = States::update(tensor(Bf16, &[5, 4, 64, 64]));
    let inputs = Inputs::qkv(of(2), of(2), of(4));
    Gdn::new(inputs, GdnGates::given(gate, gate), of(4), states)
        .pending(rings(9))
        .options(recurrent())
}

/// A step of `tokens` drafts.
fn drafts(tokens: usize) -> Gdn<'static> {
    let of = |heads| tensor(Bf16, &[2, tokens, heads, 64]);
    let gate = tensor(Bf16, &[2, tokens, 4]);
    let states = States::update(tensor(Bf16, &[5, 4, 64, 64]));
    let inputs = Inputs::qkv(of(2), of(2), of(4));
    let options = Options::default().formulation(Formulation::Parallel);
    let step = Gdn::new(inputs, GdnGates::given(gate, gate), of(4), states);
    step.options(options).pending(rings(24).most(16))
}

/// A deferred decode with a convolution, a norm and fresh rows.
fn layer() -> Gdn<'static> {
    layer::layer()
        .pending(rings_of(F32, 9))
        .options(recurrent())
}

fn flush() -> Flush<'static> {
    let states = States::update(tensor(Bf16, &[5, 4, 64, 64]));
    Flush::new(states, rings(9)).options(recurrent())
}

#[test]
fn what_is_pending_is_compiled_in() {
    let c = decode().request().check().unwrap().constants;
    assert_eq!([c.pending, c.ring, c.tokens], [8, 9, 1]);
    assert_eq!(
        [c.keys_slot, c.updates_slot, c.decays_slot],
        [1152, 2304, 36]
    );
    assert_eq!([c.pending_len_index, c.pending_base_index], [1, 2]);
    let c = flush().request().check().unwrap().constants;
    assert_eq!([c.pending, c.ring, c.tokens, c.h, c.ratio], [8, 9, 0, 2, 2]);
    let names = |work: &dyn Work| -> Vec<&str> {
        let entries = work.variants().unwrap().into_iter();
        entries.map(|entry| entry.name()).collect()
    };
    assert_eq!(names(&decode()), ["deferred_klast_bf16_k64_tile64"]);
    assert_eq!(names(&flush()), ["deferred_klast_bf16_k64_tile64"]);
    // The ring's log decays make the launch a flush of KDA.
    let mut of_kda = flush();
    of_kda.pending.decays = tensor(F32, &[5, 4, 9, 64]);
    assert_eq!(names(&of_kda), ["deferred_klast_bf16_k64_tile64"]);
    // With a convolution, a norm or both. Keys have the dtype of k.
    let of_layer = ["deferred_layer_klast_bf16_k64_tile64"];
    assert_eq!(names(&layer()), of_layer);
    let mut without_norm = layer();
    without_norm.norm = None;
    assert_eq!(names(&without_norm), of_layer);
    let mut without_conv = layer();
    (without_conv.inputs, without_conv.pending) = (decode().inputs, Some(rings(9)));
    assert_eq!(names(&without_conv), of_layer);
    let keys_element = |step: &Gdn<'_>| step.request().check().unwrap().constants.keys_element;
    assert_eq!(
        [layer(), without_conv].map(|step| keys_element(&step)),
        [0, 1]
    );
}

/// A step writes its windows in every launch, whether or not a state is written.
#[test]
fn a_step_writes_its_windows() {
    let problem = layer().request().check().unwrap();
    assert_eq!(problem.constants.update_state, 1);
    assert!(layer().request().writes(Argument::Windows));
    let without = layer::layer().bytes().unwrap();
    let (state, entry) = (4 * 64 * 64 * 2, 2 * 64 * 4 + 4 * 64 * 4 + 4 * 4);
    let counts = 2 * (4 + 8);
    assert_eq!(
        layer().bytes().unwrap(),
        without - 2 * state + 2 * entry + counts
    );
}

#[test]
fn a_step_moves_a_state_once_and_leaves_one_entry() {
    let state = 4 * 64 * 64 * 2;
    let entry = 2 * 64 * 2 + 4 * 64 * 4 + 4 * 4;
    let tokens = 2 * (2 * 64 + 2 * 64 + 4 * 64 + 4 * 64 + 4 + 4);
    assert_eq!(
        decode().bytes().unwrap(),
        2 * (state + entry + tokens + 4 + 8)
    );
    assert_eq!(
        flush().bytes().unwrap(),
        2 * (2 * state + 8 * entry + 4 + 8)
    );
}

#[test]
fn a_recipe_has_the_rings_addresses() {
    let recipe = decode().recipe().unwrap();
    let deferred = recipe.deferred.unwrap();
    assert_eq!(recipe.parameter(), bytemuck::bytes_of(&deferred));
    assert_eq!(
        recipe.parameter().len(),
        recipe.kernel.entry().parameter_bytes()
    );
}

#[test]
fn rings_have_the_dims_of_the_layer() {
    let change = |change: fn(&mut Pending<'static>), parts: &[&str]| {
        refused(
            decode(),
            |args| change(args.pending.as_mut().unwrap()),
            parts,
        );
        refused(flush(), |args| change(&mut args.pending), parts);
    };
    change(|it| it.keys = tensor(Bf16, &[5, 2, 9]), &["keys"]);
    change(|it| it.keys = tensor(Bf16, &[6, 2, 9, 64]), &["P of keys"]);
    change(
        |it| *it = rings(8),
        &["R: wanted at least N + T = 9", "got 8"],
    );
    change(
        |it| it.most = 0,
        &["most of pending: wanted 1..=8", "got 0"],
    );
    change(
        |it| it.most = 9,
        &["most of pending: wanted 1..=8", "got 9"],
    );
    change(
        |it| it.updates = tensor(F32, &[5, 4, 10, 64]),
        &["updates", "[P, HV, R, V]"],
    );
    change(
        |it| it.updates = tensor(Bf16, &[5, 4, 9, 64]),
        &["updates", "f32; bf16 is for formulation = parallel"],
    );
    change(
        |it| it.decays = tensor(Bf16, &[5, 4, 9]),
        &["decays", "f32"],
    );
    // B of a flush is the size of `len`.
    refused(
        decode(),
        |args| args.pending.as_mut().unwrap().len = tensor(I32, &[3]),
        &["pending len", "[B]"],
    );
    refused(
        flush(),
        |args| args.pending.len = tensor(I32, &[3]),
        &["pending base", "[B]"],
    );
    change(|it| it.base = tensor(F32, &[2]), &["pending base"]);
    let odd = |it: &mut Pending<'static>| {
        it.updates = strided(F32, &[5, 4, 9, 64], &[2305, 576, 64, 1]);
    };
    change(odd, &["updates", "a slot stride of a multiple of 16 bytes"]);
    refused(
        decode(),
        |args| args.pending.as_mut().unwrap().keys = tensor(F32, &[5, 2, 9, 64]),
        &["keys", "the dtype of k"],
    );
    refused(
        layer(),
        |args| args.pending = Some(rings(9)),
        &["keys", "f32, as k is that a convolution makes", "bf16"],
    );
    refused(
        decode(),
        |args| args.pending.as_mut().unwrap().decays = tensor(F32, &[5, 4, 9, 64]),
        &["decays", "[P, HV, R]"],
    );
}

#[test]
fn what_has_no_kernel_is_refused_by_name() {
    let with = |other| ["pending", other, "exclude each other"];
    refused(
        decode(),
        |args| args.states = States::read_only(tensor(Bf16, &[5, 4, 64, 64])).into(),
        &with("read-only states"),
    );
    refused(
        decode(),
        |args| args.snapshots = Some(tensor(Bf16, &[2, 1, 4, 64, 64])),
        &with("snapshots"),
    );
    refused(
        decode(),
        |args| args.options.state_layout = StateLayout::VLast,
        &with("a v_last state"),
    );
    refused(
        decode(),
        |args| args.options.formulation = Formulation::Chunked,
        &with("formulation = chunked"),
    );
    refused(
        decode(),
        |args| {
            let states = States::update(tensor(Bf16, &[5, 4, 64, 64]));
            args.states = states.write_slots(tensor(I32, &[2])).into();
        },
        &with("write_slots"),
    );
    refused(
        layer(),
        |args| conv(args).write_windows = Some(tensor(Bf16, &[5, D, 3])),
        &with("write_windows"),
    );
    refused(
        layer(),
        |args| args.options.formulation = Formulation::Parallel,
        &["inputs is missing", "windows that wait"],
    );
    refused(
        drafts(4),
        |args| args.states = States::update(tensor(F32, &[5, 4, 64, 64])).into(),
        &["pending with formulation = parallel", "an f32 state"],
    );
    refused(
        drafts(8),
        |args| *args = drafts(9),
        &["T of the parallel formulation = 9", "1 to 8"],
    );
    refused(
        flush(),
        |args| args.states.write_pool = Some(tensor(Bf16, &[5, 4, 64, 64])),
        &with("write_pool"),
    );
    refused(
        drafts(2),
        |args| args.options.formulation = Formulation::Recurrent,
        &[
            "T with pending = 2",
            "1, or up to 8 with Formulation::Parallel",
        ],
    );
}

/// Drafts: several tokens together, with room for sixteen pending tokens.
#[test]
fn drafts_wait_on_tensor_cores() {
    let names = |work: &dyn Work| -> Vec<&str> {
        let entries = work.variants().unwrap().into_iter();
        entries.map(|entry| entry.name()).collect()
    };
    let wanted = [
        "gdn_deferred_parallel_klast_bf16_k64_tile32",
        "gdn_deferred_parallel_klast_bf16_k64_tile64",
    ];
    assert_eq!(names(&drafts(4)), wanted);
    assert_eq!(names(&drafts(1)), wanted);
    let mut of_drafts = flush();
    of_drafts.options.formulation = Formulation::Parallel;
    (of_drafts.pending, of_drafts.pending.most) = (rings(24), 16);
    assert_eq!(names(&of_drafts), wanted);
    let c = drafts(8).request().check().unwrap().constants;
    assert_eq!([c.pending, c.ring, c.tokens], [16, 24, 8]);
    let of = |change: fn(&mut Pending<'static>), parts: &[&str]| {
        let change = |args: &mut Gdn<'static>| change(args.pending.as_mut().unwrap());
        refused(drafts(8), change, parts);
    };
    of(|it| it.most = 17, &["most of pending: wanted 8..=16"]);
    of(|it| it.most = 7, &["most of pending: wanted 8..=16"]);
    of(
        |it| it.keys = tensor(Bf16, &[5, 2, 23, 64]),
        &["R: wanted at least N + T = 24", "got 23"],
    );
}

/// A layer step of one token whose windows are deferred too.
fn waiting_layer() -> Gdn<'static> {
    let pending = rings_of(F32, 9).inputs(tensor(Bf16, &[5, 9, D]));
    let mut step = layer().pending(pending);
    step.options.formulation = Formulation::Parallel;
    step
}

/// A flush that also writes windows.
fn waiting_flush() -> Flush<'static> {
    let pending = rings_of(F32, 9).inputs(tensor(Bf16, &[5, 9, D]));
    let states = States::update(tensor(Bf16, &[5, 4, 64, 64]));
    let options = Options::default().formulation(Formulation::Parallel);
    Flush::new(states, pending)
        .windows(tensor(Bf16, &[5, D, 3]))
        .options(options)
}

#[test]
fn windows_wait_with_drafts() {
    let entry = "gdn_deferred_layer_parallel_klast_bf16_k64_tile64";
    for work in [&waiting_layer() as &dyn Work, &waiting_flush()] {
        let [variant] = work.variants().unwrap()[..] else {
            panic!("one kernel")
        };
        assert_eq!(variant.name(), entry);
        // A caller that launches without a library has not opted in to kernels that ran only in the simulator.
        match work.recipe() {
            Ok(_) => assert!(variant.is_proved()),
            Err(error) => {
                assert!(!variant.is_proved());
                let message = error.to_string();
                assert!(
                    message.starts_with(&format!("kernel = {entry}")),
                    "{message}"
                );
            }
        }
    }
    let c = waiting_layer().request().check().unwrap().constants;
    assert_eq!([c.taps, c.inputs_slot], [4, 9 * D as u32]);
    let c = waiting_flush().request().check().unwrap().constants;
    assert_eq!(
        [c.taps, c.tokens, c.read_windows_slot],
        [4, 0, 3 * D as u32]
    );
    assert!(waiting_flush().request().writes(Argument::Windows));
    let mut of_channels = waiting_flush();
    of_channels.pending.decays = tensor(F32, &[5, 4, 9, 64]);
    let message = of_channels.bytes().unwrap_err().to_string();
    let wanted = "K = 64 is not supported: 128 with KDA and formulation = parallel";
    assert_eq!(message, wanted);
    let mut norm_alone = drafts(4);
    norm_alone.norm = Some(Norm::new(
        tensor(Bf16, &[2, 4, 4, 64]),
        tensor(F32, &[64]),
        1e-6,
    ));
    assert!(norm_alone.variants().is_ok());
}

#[test]
fn inputs_are_of_windows_that_wait() {
    let inputs = Some(tensor(Bf16, &[5, 9, D]));
    refused(
        waiting_layer(),
        |args| args.pending.as_mut().unwrap().inputs = None,
        &["inputs is missing", "windows that wait"],
    );
    refused(
        waiting_flush(),
        |args| args.pending.inputs = None,
        &["inputs is missing", "windows that wait"],
    );
    refused(
        waiting_flush(),
        |args| args.windows = None,
        &["windows is missing", "inputs that are pending"],
    );
    refused(
        waiting_layer(),
        |args| args.options.formulation = Formulation::Recurrent,
        &["inputs", "formulation = recurrent"],
    );
    refused(
        waiting_flush(),
        |args| {
            args.options.formulation = Formulation::Recurrent;
            args.pending.inputs = None;
        },
        &["windows of a flush", "formulation = recurrent"],
    );
    refused(
        drafts(1),
        |args| args.pending.as_mut().unwrap().inputs = inputs,
        &["inputs and q exclude each other"],
    );
    for (given, parts) in [
        (tensor(Bf16, &[5, 9, D - 1]), ["inputs", "[P, R, D]"]),
        (tensor(Bf16, &[5, 8, D]), ["inputs", "[P, R, D]"]),
        (
            tensor(F32, &[5, 9, D]),
            ["inputs", "the dtype of the windows"],
        ),
        (tensor(I32, &[5, 9, D]), ["inputs", "i32"]),
    ] {
        refused(
            waiting_layer(),
            |args| args.pending.as_mut().unwrap().inputs = Some(given),
            &parts,
        );
        refused(
            waiting_flush(),
            |args| args.pending.inputs = Some(given),
            &parts,
        );
    }
    for (given, parts) in [
        (tensor(Bf16, &[5, D + 1, 3]), ["windows", "[P, D, W - 1]"]),
        (tensor(Bf16, &[4, D, 3]), ["windows", "[P, D, W - 1]"]),
        (
            tensor(Bf16, &[5, D, 4]),
            ["W - 1 of windows = 4", "1, 2 or 3"],
        ),
        (tensor(Bf16, &[5, D]), ["windows", "[P, D, W - 1]"]),
    ] {
        refused(waiting_flush(), |args| args.windows = Some(given), &parts);
    }
}

/// The host's rules for the counts are the same as the kernels'.
#[test]
fn counts_go_round_the_ring() {
    for len in 0..=MAX_PENDING {
        for tokens in 1..=MAX_PENDING {
            for most in tokens.max(len)..=MAX_PENDING {
                let kernels = gated_delta_kernels::deferred::flushes;
                let ring = Ring { most, entries: 20 };
                let must = ring.flushes(len, tokens);
                assert_eq!(must, kernels(len as u32, tokens as u32, most as u32));
                for kept in 0..=tokens {
                    let next = ring.after(Count { len, base: 17 }, tokens, kept);
                    assert_eq!(next.base, if must { (17 + len) % 20 } else { 17 });
                    assert_eq!(next.len, if must { kept } else { len + kept });
                    assert!(next.len <= most);
                }
            }
        }
    }
}

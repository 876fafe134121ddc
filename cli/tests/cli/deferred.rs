//! States that wait for the tokens of a ring.

use crate::check::gpu;
use crate::command::{Contents, check, folder, run};
use safetensors::tensor::Dtype;

const GDN: &str = "gdn_decode_bf16_pool";
const KDA: &str = "kda_recurrent_bf16_softplus";
/// R
const ENTRIES: usize = 9;
const RINGS: [&str; 3] = ["pending.keys", "pending.updates", "pending.decays"];

fn backends() -> Vec<&'static str> {
    let mut backends = vec!["reference", "sim"];
    backends.extend(gpu().then_some("cuda"));
    backends
}

/// What a fixture expects, where its states wait and nothing is pending: rings of NaN.
fn waiting(name: &str) -> Contents {
    let contents = Contents::fixture(name);
    let dims = |name: &str| contents.tensors[name].1.clone();
    let (rows, heads, [slots, value_heads, v_dim, k_dim]) = (
        dims("q")[0],
        dims("q")[2],
        dims("state")[..].try_into().unwrap(),
    );
    let keys: [usize; 4] = [slots, heads, ENTRIES, k_dim];
    let updates = [slots, value_heads, ENTRIES, v_dim];
    let decays = match name {
        KDA => vec![slots, value_heads, ENTRIES, k_dim],
        _ => vec![slots, value_heads, ENTRIES],
    };
    let nan = |dims: &[usize]| vec![f32::NAN; dims.iter().product()];
    let of_keys = vec![0xff; 2 * keys.iter().product::<usize>()];
    contents
        .clone()
        .with("pending.keys", Dtype::BF16, &keys, of_keys)
        .with_floats("pending.updates", &updates, &nan(&updates))
        .with_floats("pending.decays", &decays, &nan(&decays))
        .with_indices("pending.len", &[rows], &vec![0; rows])
        .with_indices("pending.base", &[rows], &vec![ENTRIES as i32 - 1; rows])
}

/// The fixture's answers hold: o of the step, and the states when its tokens have been folded in.
#[test]
fn known_answers_hold_where_states_wait() {
    let folder = folder();
    for name in [GDN, KDA] {
        let step = waiting(name).without(&["expected.state"]);
        let input = step.write(&folder, "step");
        let output = folder.path().join("out.safetensors");
        for backend in backends() {
            let stdout = check(&input, &["--backend", backend]).succeeds().stdout;
            assert!(stdout.contains("| state, other slots "), "{stdout}");
            assert!(!stdout.contains("| state, written"), "{stdout}");
            let wrote = stdout.contains("| pending.updates, written entries ");
            assert_eq!(wrote, backend != "reference", "{stdout}");
            run(&input, &output, &["--backend", backend]).succeeds();
            let after = Contents::read(&output);
            assert_eq!(after.tensors["state"], step.tensors["state"], "{backend}");
            // What a flush takes: no token, and one pending of each row.
            let of_tokens = ["q", "k", "v", "a", "b", "g", "beta", "expected.o"];
            let rows = step.tensors["pending.len"].1[0];
            let mut flush = waiting(name).without(&of_tokens).with_indices(
                "pending.len",
                &[rows],
                &vec![1; rows],
            );
            for ring in RINGS {
                flush
                    .tensors
                    .insert(ring.to_owned(), after.tensors[ring].clone());
            }
            let flush = flush.write(&folder, "flush");
            for backend in backends() {
                let stdout = check(&flush, &["--backend", backend]).succeeds().stdout;
                assert!(stdout.contains("| state, written slots "), "{stdout}");
                assert!(stdout.contains(" file "), "{stdout}");
                assert!(!stdout.contains("| o |"), "{stdout}");
            }
        }
    }
}

/// A row that has 8 pending folds them, writes its state and leaves its token behind them.
#[test]
fn a_row_without_room_folds() {
    let folder = folder();
    for name in [GDN, KDA] {
        let rows = waiting(name).tensors["pending.len"].1[0];
        let mut lens = vec![0; rows];
        lens[0] = 8;
        let mut full = waiting(name)
            .without_expected()
            .with_indices("pending.len", &[rows], &lens);
        for ring in RINGS {
            let (dtype, shape, data) = full.tensors[ring].clone();
            let value = if ring == "pending.decays" {
                -0.125f32
            } else {
                0.0625
            };
            let bytes = match dtype {
                Dtype::BF16 => half::bf16::from_f32(value)
                    .to_le_bytes()
                    .repeat(data.len() / 2),
                _ => value.to_le_bytes().repeat(data.len() / 4),
            };
            full = full.with(ring, dtype, &shape, bytes);
        }
        let input = full.write(&folder, "full");
        for backend in backends().into_iter().filter(|it| *it != "reference") {
            let stdout = check(&input, &["--backend", backend]).succeeds().stdout;
            assert!(stdout.contains("| state, written slots "), "{stdout}");
            let more = full.clone().with_metadata("max_pending", "7");
            check(&more.write(&folder, "more"), &["--backend", backend]).succeeds();
        }
    }
}

#[test]
fn what_contradicts_a_ring_is_refused_by_name() {
    let folder = folder();
    let cases = [
        ("pending.len", waiting(GDN).without(&["pending.len"])),
        (
            "max_pending: wanted none without pending.len",
            Contents::fixture(GDN).with_metadata("max_pending", "8"),
        ),
        (
            "max_pending: wanted 1..=8, got 9",
            waiting(GDN).with_metadata("max_pending", "9"),
        ),
        (
            "tensor pending.base: gdn_mtp takes none",
            waiting(GDN).with_metadata("op", "gdn_mtp"),
        ),
        (
            "a flush and k exclude each other",
            waiting(GDN).without(&["q"]).without_expected(),
        ),
        (
            "pending.updates",
            waiting(GDN).without(&["pending.updates"]),
        ),
        (
            "pending.decays: wanted shape",
            waiting(KDA).with_floats("pending.decays", &[3, 2, 9], &[0.0; 54]),
        ),
    ];
    for (part, contents) in cases {
        check(&contents.write(&folder, "bad"), &["--backend", "sim"]).refused(part);
    }
}

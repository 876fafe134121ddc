//! The reference against expectations computed in f32 by public implementations of GDN and KDA.
//!
//! The files are those of `tests/fixtures` in the workspace, or of the folder that `GATED_DELTA_FIXTURES` names.

use std::collections::HashMap;
use std::path::PathBuf;

use gated_delta_reference::gate::{lower_bound_log_decay, sigmoid, softplus_log_decay};
use gated_delta_reference::gdn::{Gates, GdnDecode, HeadMap, Layout, decode};
use gated_delta_reference::recurrence::{Token, default_scale, normalise, recurrence};
use half::bf16;
use safetensors::{Dtype, SafeTensors};

/// Relative L2 error allowed: the expectations are f32 that was never rounded to bf16, and are met within 4e-7.
const TOLERANCE: f64 = 1e-6;

struct Fixture {
    tensors: HashMap<String, (Vec<usize>, Vec<f64>)>,
    metadata: HashMap<String, String>,
}

impl Fixture {
    fn read(name: &str) -> Self {
        let folder = std::env::var_os("GATED_DELTA_FIXTURES").map_or_else(
            || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures")),
            PathBuf::from,
        );
        let path = folder.join(name);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        Self {
            metadata: header.metadata().clone().unwrap_or_default(),
            tensors: tensors
                .iter()
                .map(|(name, view)| {
                    (
                        name.to_owned(),
                        (view.shape().to_vec(), widen(view.dtype(), view.data())),
                    )
                })
                .collect(),
        }
    }

    fn get(&self, name: &str) -> &[f64] {
        &self.tensors[name].1
    }

    /// The last `N` dims of a tensor.
    fn dims<const N: usize>(&self, name: &str) -> [usize; N] {
        *self.tensors[name].0.last_chunk().unwrap()
    }

    /// `[B]`: the slot each row starts from.
    fn slots(&self) -> Vec<i64> {
        let [batch, ..] = self.dims::<4>("q");
        match self.tensors.get("read_slots") {
            Some((_, slots)) => slots.iter().map(|slot| *slot as i64).collect(),
            None => (0..batch as i64).collect(),
        }
    }

    /// The recurrence over all rows and value heads of a K-last file: o `[B, T, HV, V]` and the state after each
    /// token `[B, T, HV, V, K]`. `gates` gives `[K]` log decays and beta at (index in [B, T, HV], hv).
    fn run(&self, gates: impl Fn(usize, usize) -> (Vec<f64>, f64)) -> (Vec<f64>, Vec<f64>) {
        let [batch, tokens, heads, key_dim] = self.dims("q");
        let [value_heads, value_dim] = self.dims("v");
        let mut o = vec![0.0; batch * tokens * value_heads * value_dim];
        let mut states = vec![0.0; o.len() * key_dim];
        for (b, slot) in self.slots().into_iter().enumerate() {
            for hv in 0..value_heads {
                let value_head = |t: usize| (b * tokens + t) * value_heads + hv;
                let token = |t: usize| {
                    let head = (b * tokens + t) * heads + hv / (value_heads / heads);
                    let (log_decay, beta) = gates(value_head(t), hv);
                    Token {
                        q: normalise(
                            row(self.get("q"), head, key_dim),
                            true,
                            default_scale(key_dim),
                        ),
                        k: normalise(row(self.get("k"), head, key_dim), true, 1.0),
                        v: row(self.get("v"), value_head(t), value_dim).to_vec(),
                        log_decay,
                        beta,
                    }
                };
                let start = row(
                    self.get("state"),
                    slot as usize * value_heads + hv,
                    value_dim * key_dim,
                );
                let steps = recurrence(start, &(0..tokens).map(token).collect::<Vec<_>>()).unwrap();
                for (t, step) in steps.iter().enumerate() {
                    row_mut(&mut o, value_head(t), value_dim).copy_from_slice(&step.o);
                    row_mut(&mut states, value_head(t), value_dim * key_dim)
                        .copy_from_slice(&step.state);
                }
            }
        }
        (o, states)
    }

    /// The pool with the states `[B, 1, HV, V, K]` in the rows' slots.
    fn pool_with(&self, states: &[f64]) -> Vec<f64> {
        let slot_len = self.dims::<3>("state").iter().product();
        let mut pool = self.get("state").to_vec();
        for (b, slot) in self.slots().into_iter().enumerate() {
            row_mut(&mut pool, slot as usize, slot_len).copy_from_slice(row(states, b, slot_len));
        }
        pool
    }
}

/// Row `index` of a matrix with rows of `len`.
fn row(matrix: &[f64], index: usize, len: usize) -> &[f64] {
    &matrix[index * len..][..len]
}

fn row_mut(matrix: &mut [f64], index: usize, len: usize) -> &mut [f64] {
    &mut matrix[index * len..][..len]
}

fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => numbers(bytes, |b| f32::from_le_bytes(b).into()),
        Dtype::BF16 => numbers(bytes, |b| bf16::from_le_bytes(b).into()),
        Dtype::I32 => numbers(bytes, |b| i32::from_le_bytes(b).into()),
        other => panic!("no fixture holds {other}"),
    }
}

fn numbers<const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    let (chunks, []) = bytes.as_chunks() else {
        panic!("{} bytes in elements of {N}", bytes.len())
    };
    chunks.iter().copied().map(read).collect()
}

#[track_caller]
fn assert_close(name: &str, got: &[f64], wanted: &[f64]) {
    assert_eq!(got.len(), wanted.len(), "{name}: elements");
    let difference: f64 = got
        .iter()
        .zip(wanted)
        .map(|(got, wanted)| (got - wanted).powi(2))
        .sum();
    let norm: f64 = wanted.iter().map(|wanted| wanted.powi(2)).sum();
    let error = (difference / norm).sqrt();
    println!("{name}: relative L2 error {error:.2e}");
    assert!(
        error <= TOLERANCE,
        "{name}: relative L2 error {error:.2e}, wanted at most {TOLERANCE:.0e}"
    );
}

fn gdn_decode(name: &str, layout: Layout) {
    let file = Fixture::read(name);
    let [batch, _, heads, key_dim] = file.dims("q");
    let [value_heads, value_dim] = file.dims("v");
    let slots = file.slots();
    let problem = GdnDecode {
        batch,
        heads,
        value_heads,
        key_dim,
        value_dim,
        q: file.get("q"),
        k: file.get("k"),
        v: file.get("v"),
        gates: Gates::Raw {
            a: file.get("a"),
            b: file.get("b"),
            a_log: file.get("A_log"),
            dt_bias: file.get("dt_bias"),
            beta_scale: 1.0,
        },
        l2norm: true,
        scale: default_scale(key_dim),
        head_map: HeadMap::Grouped,
        layout,
        read_slots: Some(&slots),
        write_slots: None,
        null_slot: None,
        update_state: true,
    };
    let after = decode(&problem, file.get("state")).unwrap();
    assert_close("o", &after.o, file.get("expected.o"));
    assert_close("state", &after.pool, file.get("expected.state"));
    let slot_len = value_heads * value_dim * key_dim;
    for slot in (0..after.pool.len() / slot_len).filter(|slot| !slots.contains(&(*slot as i64))) {
        let (got, wanted) = (
            row(&after.pool, slot, slot_len),
            row(file.get("expected.state"), slot, slot_len),
        );
        assert!(got == wanted, "slot {slot} belongs to no row and changed");
    }
}

#[test]
fn gdn_decode_bf16_pool() {
    gdn_decode("gdn_decode_bf16_pool.safetensors", Layout::KLast);
}

#[test]
fn gdn_decode_f32_vlast() {
    gdn_decode("gdn_decode_f32_vlast.safetensors", Layout::VLast);
}

#[test]
fn gdn_mtp_bf16_snapshots() {
    let file = Fixture::read("gdn_mtp_bf16_snapshots.safetensors");
    let [key_dim] = file.dims("k");
    let (o, states) = file.run(|i, hv| {
        let log_decay = softplus_log_decay(
            file.get("a")[i],
            file.get("A_log")[hv],
            file.get("dt_bias")[hv],
        );
        (vec![log_decay; key_dim], sigmoid(file.get("b")[i]))
    });
    assert_close("o", &o, file.get("expected.o"));
    assert_close("snapshots", &states, file.get("expected.snapshots"));
}

/// `log_decay` of (g, A_log, dt_bias).
fn kda_recurrent(file: &Fixture, log_decay: impl Fn(f64, f64, f64) -> f64) {
    let [key_dim] = file.dims("k");
    let (o, states) = file.run(|i, hv| {
        let (g, dt_bias) = (
            row(file.get("g"), i, key_dim),
            row(file.get("dt_bias"), hv, key_dim),
        );
        let log_decay = g
            .iter()
            .zip(dt_bias)
            .map(|(g, dt_bias)| log_decay(*g, file.get("A_log")[hv], *dt_bias));
        (log_decay.collect(), file.get("beta")[i])
    });
    assert_close("o", &o, file.get("expected.o"));
    assert_close(
        "state",
        &file.pool_with(&states),
        file.get("expected.state"),
    );
}

#[test]
fn kda_recurrent_bf16_softplus() {
    kda_recurrent(
        &Fixture::read("kda_recurrent_bf16_softplus.safetensors"),
        softplus_log_decay,
    );
}

#[test]
fn kda_recurrent_bf16_lower_bound_d64() {
    let file = Fixture::read("kda_recurrent_bf16_lower_bound_d64.safetensors");
    let lower_bound = file.metadata["lower_bound"].parse().unwrap();
    kda_recurrent(&file, |g, a_log, dt_bias| {
        lower_bound_log_decay(g, lower_bound, a_log, dt_bias)
    });
}

//! Tests of the reference with results that public implementations of GDN and KDA, and of layers of them, computed in f32.
//!
//! The files are in `tests/fixtures` of the workspace, or in the folder that `GATED_DELTA_FIXTURES` names.

use std::collections::HashMap;
use std::path::PathBuf;

use gated_delta_reference::conv::Conv;
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn::{Gates, GdnDecode, HeadMap, Layout, decode};
use gated_delta_reference::kda::{KdaBeta, KdaDecay, KdaGates};
use gated_delta_reference::layer::{Layer, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrence::default_scale;
use gated_delta_reference::recurrent::{Recurrent, TokenGates, recurrent};
use gated_delta_reference::tolerance::{COMPUTED_IN_CHUNKS, COMPUTED_IN_F32, relative_error};
use half::bf16;
use safetensors::{Dtype, SafeTensors};

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
        self.indices("read_slots").unwrap_or_else(|| {
            let [batch, ..] = self.dims::<4>("q");
            (0..batch as i64).collect()
        })
    }

    fn indices(&self, name: &str) -> Option<Vec<i64>> {
        let (_, indices) = self.tensors.get(name)?;
        Some(indices.iter().map(|index| *index as i64).collect())
    }

    fn activation(&self, key: &str) -> Activation {
        match self.metadata[key].as_str() {
            "none" => Activation::None,
            "silu" => Activation::Silu,
            "sigmoid" => Activation::Sigmoid,
            other => panic!("{key} {other}"),
        }
    }

    /// The file's raw gates of GDN.
    fn gdn_gates(&self) -> Gates<'_> {
        Gates::Raw {
            a: self.get("a"),
            b: self.get("b"),
            a_log: self.get("A_log"),
            dt_bias: self.get("dt_bias"),
            beta_scale: self
                .metadata
                .get("beta_scale")
                .map_or(1.0, |scale| scale.parse().unwrap()),
        }
    }

    /// All tokens of a file with K-last states; only o is written.
    fn recurrent<'a>(&'a self, gates: TokenGates<'a>, slots: &'a [i64]) -> Recurrent<'a> {
        let [batch, tokens, heads, key_dim] = self.dims("q");
        let [value_heads, value_dim] = self.dims("v");
        let (heads, dims) = ([heads, value_heads], [key_dim, value_dim]);
        Recurrent {
            q: self.get("q"),
            k: self.get("k"),
            v: self.get("v"),
            read_slots: Some(slots),
            update_state: false,
            ..Recurrent::new([batch, tokens], heads, dims, gates)
        }
    }

    /// Compares the pool with the file's; slots that belong to no row have to be equal bit for bit.
    #[track_caller]
    fn assert_pool(&self, pool: &[f64]) {
        let wanted = self.get("expected.state");
        assert_close("state", pool, wanted);
        let slot_len = self.dims::<3>("state").iter().product();
        let slots = self.slots();
        for slot in (0..pool.len() / slot_len).filter(|slot| !slots.contains(&(*slot as i64))) {
            assert!(
                row(pool, slot, slot_len) == row(wanted, slot, slot_len),
                "slot {slot} belongs to no row and changed"
            );
        }
    }
}

/// Row `index` of a matrix with rows of `len`.
fn row(matrix: &[f64], index: usize, len: usize) -> &[f64] {
    &matrix[index * len..][..len]
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
    assert_within(name, got, wanted, COMPUTED_IN_F32);
}

#[track_caller]
fn assert_within(name: &str, got: &[f64], wanted: &[f64], tolerance: f64) {
    let error = relative_error(got, wanted);
    println!("{name}: relative L2 error {error:.2e}");
    assert!(
        error <= tolerance,
        "{name}: relative L2 error {error:.2e}, wanted at most {tolerance:.0e}"
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
        gates: file.gdn_gates(),
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
    file.assert_pool(&after.pool);
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
    let slots = file.slots();
    let [_, tokens, ..] = file.dims::<4>("q");
    let problem = Recurrent {
        snapshot_steps: Some(tokens),
        ..file.recurrent(TokenGates::Gdn(file.gdn_gates()), &slots)
    };
    let wanted = file.get("expected.snapshots");
    let unwritten = vec![f64::NAN; wanted.len()];
    let after = recurrent(&problem, file.get("state"), None, Some(&unwritten)).unwrap();
    assert_close("o", &after.o, file.get("expected.o"));
    assert_close("snapshots", &after.snapshots.unwrap(), wanted);
    assert_eq!(after.pool, file.get("expected.state"));
}

fn kda_recurrent(file: &Fixture, kind: KdaDecay) {
    let slots = file.slots();
    let gates = KdaGates {
        g: file.get("g"),
        kind,
        beta: file.get("beta"),
        beta_kind: KdaBeta::Given,
    };
    let problem = Recurrent {
        update_state: true,
        ..file.recurrent(TokenGates::Kda(gates), &slots)
    };
    let after = recurrent(&problem, file.get("state"), None, None).unwrap();
    assert_close("o", &after.o, file.get("expected.o"));
    file.assert_pool(&after.pool);
}

#[test]
fn kda_recurrent_bf16_softplus() {
    let file = Fixture::read("kda_recurrent_bf16_softplus.safetensors");
    let kind = KdaDecay::Softplus {
        a_log: file.get("A_log"),
        dt_bias: Some(file.get("dt_bias")),
    };
    kda_recurrent(&file, kind);
}

#[test]
fn kda_recurrent_bf16_lower_bound_d64() {
    let file = Fixture::read("kda_recurrent_bf16_lower_bound_d64.safetensors");
    let kind = KdaDecay::LowerBound {
        lower_bound: file.metadata["lower_bound"].parse().unwrap(),
        a_log: Some(file.get("A_log")),
        dt_bias: Some(file.get("dt_bias")),
    };
    kda_recurrent(&file, kind);
}

/// A layer from its projection to its norm: compares o, the states, the windows bit for bit, and everything that belongs to no row.
fn layer_step(name: &str, tolerance: f64) {
    let file = Fixture::read(name);
    let heads: usize = file.metadata["heads"].parse().unwrap();
    let [value_heads, value_dim] = file.dims("z");
    let [channels, width] = file.dims("conv_weight");
    let key_dim = (channels - value_heads * value_dim) / 2 / heads;
    let [rows, tokens] = *file.tensors["x"].0.first_chunk().unwrap();
    let (slots, cu_seqlens, fresh) = (
        file.slots(),
        file.indices("cu_seqlens"),
        file.indices("fresh"),
    );
    let layout = match file.metadata["state_layout"].as_str() {
        "v_last" => Layout::VLast,
        _ => Layout::KLast,
    };
    let gates = if file.metadata["op"].starts_with("gdn") {
        TokenGates::Gdn(file.gdn_gates())
    } else {
        assert_eq!(
            [&file.metadata["gate"], &file.metadata["beta"]],
            ["softplus", "sigmoid"]
        );
        TokenGates::Kda(KdaGates {
            g: file.get("g"),
            kind: KdaDecay::Softplus {
                a_log: file.get("A_log"),
                dt_bias: Some(file.get("dt_bias")),
            },
            beta: file.get("beta"),
            beta_kind: KdaBeta::Logit,
        })
    };
    let rows = cu_seqlens.as_ref().map_or(rows, |bounds| bounds.len() - 1);
    let (heads, dims) = ([heads, value_heads], [key_dim, value_dim]);
    let step = Recurrent {
        layout,
        read_slots: Some(&slots),
        cu_seqlens: cu_seqlens.as_deref(),
        ..Recurrent::new([rows, tokens], heads, dims, gates)
    };
    let problem = Layer {
        step,
        projection: Some(Projection {
            x: file.get("x"),
            previous: None,
            conv: Conv {
                channels,
                width,
                weight: file.get("conv_weight"),
                bias: None,
                activation: file.activation("conv_activation"),
            },
        }),
        norm: Some(GatedNorm {
            z: file.get("z"),
            weight: file.get("norm_weight"),
            eps: file.metadata["norm_eps"].parse().unwrap(),
            activation: file.activation("norm_activation"),
        }),
        fresh: fresh.as_deref(),
        checkpoints: None,
    };
    let pools = Pools {
        states: file.get("state"),
        windows: Some(file.get("conv_state")),
        ..Pools::default()
    };
    let after = layer(&problem, &pools).unwrap();
    file.assert_pool(&after.states);
    assert_within("o", &after.o, file.get("expected.o"), tolerance);
    assert_eq!(after.windows.unwrap(), file.get("expected.conv_state"));
}

#[test]
fn layer_qwen3_next_decode() {
    layer_step("layer_qwen3_next_decode.safetensors", COMPUTED_IN_F32);
}

#[test]
fn layer_kimi_linear_decode() {
    layer_step("layer_kimi_linear_decode.safetensors", COMPUTED_IN_F32);
}

#[test]
fn layer_kimi_linear_prefill() {
    layer_step("layer_kimi_linear_prefill.safetensors", COMPUTED_IN_CHUNKS);
}

#[test]
fn layer_qwen3_next_prefill() {
    layer_step("layer_qwen3_next_prefill.safetensors", COMPUTED_IN_CHUNKS);
}

#[test]
fn layer_olmo_hybrid_decode() {
    layer_step("layer_olmo_hybrid_decode.safetensors", COMPUTED_IN_F32);
}

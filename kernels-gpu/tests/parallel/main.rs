//! The tensor-core kernels of GDN MTP and KDA in the simulator, against the reference, and against themselves.

mod buffer;
mod case;
mod laws;

use buffer::Buffer;
use case::{Case, Layer, Random, Tokens};
use gated_delta_kernels::constants::Element;
use gated_delta_kernels::entries::Entry;
use gated_delta_reference::compare::{DType, Tolerance, TooFar, norm, within};

fn entries(layer: &Layer) -> Vec<Entry> {
    let operator = if layer.per_channel {
        "kda_recurrent"
    } else {
        "gdn_mtp"
    };
    let stem = format!("{operator}_parallel_klast_bf16_k{}_", layer.k);
    let entries = Entry::ALL.iter().copied();
    let entries: Vec<_> = entries
        .filter(|entry| entry.name().starts_with(&stem))
        .collect();
    assert!(!entries.is_empty());
    entries
}

fn layer(per_channel: bool, random: &mut Random) -> Layer {
    let [q, k, v, o, g, b] =
        [0; 6].map(|_| random.one_of(&[Element::Bf16, Element::Bf16, Element::F16, Element::F32]));
    Layer {
        per_channel,
        k: random.one_of(&[64, 128]),
        heads: 1 + random.below(2),
        ratio: 1 + random.below(3),
        tiled: random.below(2) == 0,
        l2norm: random.below(4) != 0,
        raw_gates: random.below(2) == 0,
        beta_scale: random.one_of(&[1.0, 2.0]),
        elements: [q, k, v, o, g, b],
        gap: random.one_of(&[0, 0, 1, 3]),
    }
}

/// `got` is `wanted`, rounded to `element`, but for so large a part of it.
fn close(got: &[f64], wanted: &[f64], element: Element, part: f64) -> Result<f64, TooFar> {
    let dtype = match element {
        Element::F32 => DType::F32,
        Element::Bf16 => DType::Bf16,
        Element::F16 => DType::F16,
    };
    within(got, wanted, dtype, part * norm(wanted))
}

fn pool(layer: &Layer, slots: usize, gap: usize, random: &mut Random) -> Buffer {
    let dims = [slots, layer.value_heads(), layer.k, layer.k];
    Buffer::new(Element::Bf16, &dims, gap).filled(|| random.signed())
}

/// `T` of `rows` rows.
fn output(layer: &Layer, rows: usize, tokens: usize) -> Buffer {
    let dims = [rows, tokens, layer.value_heads(), layer.k];
    Buffer::new(layer.elements[3], &dims, layer.gap)
}

struct Gates {
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
}

impl Gates {
    fn new(layer: &Layer, random: &mut Random) -> Self {
        let mut values = |reach: f64, of_head: usize| {
            let value = |_| (reach * random.signed()) as f32;
            (0..layer.value_heads() * of_head).map(value).collect()
        };
        Self {
            a_log: values(1.0, 1),
            dt_bias: values(2.0, layer.decays()),
        }
    }
}

/// A random permutation of the slots of a pool, some of them replaced by ones that are not live.
fn slots(count: usize, rows: usize, random: &mut Random) -> Vec<i32> {
    let mut slots: Vec<i32> = (0..count as i32).collect();
    for i in (1..count).rev() {
        slots.swap(i, random.below(i + 1));
    }
    slots.truncate(rows);
    for slot in &mut slots {
        if random.below(5) == 0 {
            *slot = random.one_of(&[-1, i32::MIN, count as i32, i32::MAX]);
        }
    }
    slots
}

fn is_live(slot: i32, count: usize, null_slot: u32) -> bool {
    slot >= 0 && (slot as usize) < count && slot as u32 != null_slot
}

#[test]
fn random_launches_of_gdn_agree_with_the_recurrence() {
    for seed in 0..80 {
        random_launch(false, seed);
    }
}

#[test]
fn random_launches_of_kda_agree_with_the_recurrence() {
    for seed in 0..80 {
        random_launch(true, seed);
    }
}

fn random_launch(per_channel: bool, seed: u64) {
    let random = &mut Random(seed);
    let layer = layer(per_channel, random);
    let entry = random.one_of(&entries(&layer));
    let (rows, slot_count) = (1 + random.below(3), 4);
    let gates = Gates::new(&layer, random);
    let pool_gap = random.one_of(&[0, 0, 8, 1]);
    let mut read_pool = pool(&layer, slot_count, pool_gap, random);
    let mut write_pool = (random.below(2) == 0).then(|| pool(&layer, slot_count, pool_gap, random));

    let with_previous = random.below(2) == 0;
    let count = if with_previous && random.below(2) == 0 {
        0
    } else {
        1 + random.below(8)
    };
    let packed = count > 0 && random.below(3) == 0;
    let cu_seqlens: Option<Vec<i32>> = packed.then(|| {
        let mut end = 0;
        let length = |_| {
            end += random.below(count + 1) as i32;
            end
        };
        [0].into_iter().chain((0..rows).map(length)).collect()
    });
    let tokens = match &cu_seqlens {
        Some(starts) => Tokens::new(&layer, 1, starts[rows].max(1) as usize, random),
        None => Tokens::new(&layer, rows, count.max(1), random),
    };
    let saved = Tokens::new(&layer, rows, 1 + random.below(8), random);
    let keep: Vec<i32> = (0..rows)
        .map(|_| random.below(saved.tokens + 3) as i32 - 1)
        .collect();
    let read_slots = (random.below(2) == 0).then(|| slots(slot_count, rows, random));
    let write_slots = (random.below(2) == 0).then(|| slots(slot_count, rows, random));
    let case = Case {
        layer,
        entry,
        tokens: &tokens,
        count,
        cu_seqlens: cu_seqlens.as_deref(),
        previous: with_previous.then_some((&saved, keep.as_slice())),
        a_log: &gates.a_log,
        dt_bias: &gates.dt_bias,
        read_slots: read_slots.as_deref(),
        write_slots: write_slots.as_deref(),
        null_slot: random.one_of(&[u32::MAX, 0]),
        update: !with_previous && random.below(2) == 0,
    };
    if let (None, Some(_), true) = (&write_pool, &write_slots, case.update || with_previous) {
        // In place, a slot that one row reads and another writes is the caller's bug: a pool of their own.
        write_pool = Some(pool(&layer, slot_count, pool_gap, random));
    }

    let mut o = output(&layer, tokens.rows, tokens.tokens);
    let (pool_before, write_before) = (read_pool.clone(), write_pool.clone());
    case.launch(&mut o, &mut read_pool, write_pool.as_mut())
        .unwrap_or_else(|fault| panic!("seed {seed}: {fault}\n{layer:?}"));

    let writes = case.update || with_previous;
    let (hv_count, size) = (layer.value_heads(), layer.k * layer.k);
    let mut expected_pool = write_before.as_ref().unwrap_or(&pool_before).clone();
    let written = write_pool.as_ref().unwrap_or(&read_pool);
    for b in 0..rows {
        let range = match case.cu_seqlens {
            Some(starts) => starts[b] as usize..starts[b + 1] as usize,
            None => b * count..(b + 1) * count,
        };
        let read = read_slots.as_ref().map_or(b as i32, |slots| slots[b]);
        let write = write_slots.as_ref().map_or(read, |slots| slots[b]);
        let untouched = packed && range.is_empty();
        let active = !untouched
            && is_live(read, slot_count, case.null_slot)
            && (!writes || is_live(write, slot_count, case.null_slot))
            && (!with_previous || (0..=saved.tokens as i32).contains(&keep[b]));
        for hv in 0..hv_count {
            let outputs = |o: &Buffer| -> Vec<f64> {
                let token = |t| o.values((t * hv_count + hv) * layer.k, layer.k);
                range.clone().flat_map(token).collect()
            };
            if !active {
                assert!(
                    outputs(&o).iter().all(|o| *o == 0.0),
                    "seed {seed}, row {b}"
                );
                continue;
            }
            let start = pool_before.values((read as usize * hv_count + hv) * size, size);
            let (wanted_o, wanted_state) = case.expected(b, hv, &start);
            let Tolerance { state, output } = Tolerance::PARALLEL;
            close(&outputs(&o), &wanted_o, layer.elements[3], output).unwrap_or_else(|far| {
                panic!("seed {seed}, row {b}, head {hv}: o {far}\n{layer:?}")
            });
            if writes {
                let at = (write as usize * hv_count + hv) * size;
                let got = written.values(at, size);
                close(&got, &wanted_state, Element::Bf16, state).unwrap_or_else(|far| {
                    panic!("seed {seed}, row {b}, head {hv}: state {far}\n{layer:?}")
                });
                for (i, s) in got.into_iter().enumerate() {
                    expected_pool.set(at + i, s);
                }
            }
        }
    }
    assert!(
        written.bits() == expected_pool.bits(),
        "seed {seed}: other slots changed"
    );
    if write_pool.is_some() {
        assert!(read_pool.bits() == pool_before.bits(), "seed {seed}");
    }
}

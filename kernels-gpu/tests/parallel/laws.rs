//! What holds to the bit.

use gated_delta_kernels::constants::Element;
use gated_delta_reference::compare::Tolerance;

use super::buffer::Buffer;
use super::case::{Case, Layer, Random, Tokens};
use super::{Gates, close, entries, output, pool};

const ROWS: usize = 2;

/// Whether decays are per channel, and K.
const KINDS: [(bool, usize); 4] = [(false, 64), (false, 128), (true, 64), (true, 128)];

/// A layer with all that its launches read.
struct Setting {
    layer: Layer,
    gates: Gates,
    tokens: Tokens,
    saved: Tokens,
    pool: Buffer,
    random: Random,
}

/// What a launch leaves.
#[derive(PartialEq)]
struct Left {
    o: Vec<u128>,
    pool: Vec<u128>,
}

impl Setting {
    fn new(seed: u64, per_channel: bool, k: usize) -> Self {
        let mut random = Random(seed);
        let element = random.one_of(&[Element::Bf16, Element::F32]);
        let layer = Layer {
            per_channel,
            k,
            heads: 1,
            ratio: 2,
            tiled: false,
            l2norm: true,
            raw_gates: seed.is_multiple_of(2),
            beta_scale: 1.0,
            elements: [element; 6],
            gap: 0,
        };
        Self {
            gates: Gates::new(&layer, &mut random),
            tokens: Tokens::new(&layer, ROWS, 8, &mut random),
            saved: Tokens::new(&layer, ROWS, 8, &mut random),
            pool: pool(&layer, ROWS, 0, &mut random),
            layer,
            random,
        }
    }

    fn verify(&self) -> Case<'_> {
        Case {
            layer: self.layer,
            entry: entries(&self.layer)[0],
            tokens: &self.tokens,
            count: self.tokens.tokens,
            cu_seqlens: None,
            previous: None,
            a_log: &self.gates.a_log,
            dt_bias: &self.gates.dt_bias,
            read_slots: None,
            write_slots: None,
            null_slot: u32::MAX,
            update: false,
        }
    }

    fn run(&self, case: &Case<'_>) -> Left {
        self.run_on(case, &self.pool)
    }

    fn run_on(&self, case: &Case<'_>, pool: &Buffer) -> Left {
        let mut o = output(&self.layer, case.tokens.rows, case.tokens.tokens);
        let mut pool = pool.clone();
        case.launch(&mut o, &mut pool, None).unwrap();
        Left {
            o: o.bits().to_vec(),
            pool: pool.bits().to_vec(),
        }
    }
}

fn for_each_setting(mut f: impl FnMut(Setting)) {
    for (per_channel, k) in KINDS {
        for seed in 0..4 {
            f(Setting::new(seed, per_channel, k));
        }
    }
}

#[test]
fn every_variant_gives_the_same_bits() {
    for_each_setting(|s| {
        let keep = [3, 8];
        let resume = Case {
            previous: Some((&s.saved, &keep)),
            ..s.verify()
        };
        let update = Case {
            update: true,
            ..s.verify()
        };
        for case in [resume, update] {
            let first = s.run(&case);
            for entry in entries(&s.layer) {
                assert!(s.run(&Case { entry, ..case }) == first, "{}", entry.name());
            }
        }
    });
}

#[test]
fn an_update_is_a_verify_and_a_commit_of_all_tokens() {
    for_each_setting(|s| {
        let verified = s.run(&s.verify());
        let updated = s.run(&Case {
            update: true,
            ..s.verify()
        });
        let keep = [8; ROWS];
        let committed = s.run(&Case {
            count: 0,
            previous: Some((&s.tokens, &keep)),
            ..s.verify()
        });
        assert!(verified.pool == s.pool.bits());
        assert!(verified.o == updated.o);
        assert!(committed.pool == updated.pool);
        assert!(updated.pool != s.pool.bits());
    });
}

#[test]
fn a_resume_is_a_commit_and_a_verify() {
    for_each_setting(|mut s| {
        let keep = [0; ROWS].map(|_| s.random.below(9) as i32);
        let resume = Case {
            previous: Some((&s.saved, &keep)),
            ..s.verify()
        };
        let resumed = s.run(&resume);
        let mut pool = s.pool.clone();
        let mut o = output(&s.layer, ROWS, 8);
        let commit = Case { count: 0, ..resume };
        commit.launch(&mut o, &mut pool, None).unwrap();
        let verified = s.run_on(&s.verify(), &pool);
        assert!(resumed == verified);
    });
}

/// Tokens of the launch and of the previous ones that are not there, or not kept, change nothing.
#[test]
fn tokens_that_are_not_there_change_nothing() {
    for_each_setting(|mut s| {
        let (length, kept) = (1 + s.random.below(7), s.random.below(8));
        let keep = [kept as i32; ROWS];
        let all = s.run(&Case {
            previous: Some((&s.saved, &keep)),
            ..s.verify()
        });
        let whole = output_of(&s.layer, &all.o, 8);

        poison(&mut s.tokens, length);
        poison(&mut s.saved, kept);
        let starts = [0, length as i32];
        let resumed = s.run(&Case {
            previous: Some((&s.saved, &keep)),
            cu_seqlens: Some(&starts),
            ..s.verify()
        });
        let part = output_of(&s.layer, &resumed.o, 8);
        let size = length * s.layer.value_heads() * s.layer.k;
        assert!(whole[..size] == part[..size]);
        assert!(part[size..].iter().all(|o| o.is_nan()));
        let head = s.pool.strides[0] * 2 / 16;
        assert!(resumed.pool[..head] == all.pool[..head]);
    });
}

fn output_of(layer: &Layer, bits: &[u128], tokens: usize) -> Vec<f64> {
    let mut o = output(layer, ROWS, tokens);
    o.set_bits(bits);
    o.values(0, ROWS * tokens * layer.value_heads() * layer.k)
}

/// NaN from token `first` of every row on.
fn poison(tokens: &mut Tokens, first: usize) {
    let (rows, count) = (tokens.rows, tokens.tokens);
    for buffer in [
        &mut tokens.q,
        &mut tokens.k,
        &mut tokens.v,
        &mut tokens.g,
        &mut tokens.b,
    ] {
        let size: usize = buffer.dims()[2..].iter().product();
        for row in 0..rows {
            for i in (row * count + first) * size..(row + 1) * count * size {
                buffer.set(i, f64::NAN);
            }
        }
    }
}

#[test]
fn a_commit_of_no_tokens_keeps_every_bit() {
    for_each_setting(|s| {
        let mut pool = s.pool.clone();
        for (i, bits) in [-0.0, f64::INFINITY, f64::NAN, 1e-40]
            .into_iter()
            .enumerate()
        {
            pool.set(1000 * i + 7, bits);
        }
        let keep = [0; ROWS];
        let committed = s.run_on(
            &Case {
                count: 0,
                previous: Some((&s.saved, &keep)),
                ..s.verify()
            },
            &pool,
        );
        assert!(committed.pool == pool.bits());
    });
}

/// Decays down to nothing: no NaN, and what comes after is right.
#[test]
fn decays_to_nothing() {
    for lowest in [-80.0, -1e4, -1e30, f64::NEG_INFINITY] {
        for (per_channel, k) in KINDS {
            let mut s = Setting::new(1, per_channel, k);
            s.layer.raw_gates = false;
            s.layer.elements[4] = Element::F32;
            s.tokens = Tokens::new(&s.layer, ROWS, 8, &mut s.random);
            // Of whole heads, and, where channels have their own, of some.
            let decays = s.layer.decays();
            for head in [2, 3, 11, 20, 31] {
                (0..decays).for_each(|i| s.tokens.g.set(head * decays + i, lowest));
            }
            for i in (0..32 * decays).filter(|i| per_channel && i % 7 == 0) {
                s.tokens.g.set(i, lowest);
            }
            let case = Case {
                update: true,
                ..s.verify()
            };
            let mut o = output(&s.layer, ROWS, 8);
            let mut pool = s.pool.clone();
            case.launch(&mut o, &mut pool, None).unwrap();
            let size = k * k;
            for (b, hv) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let at = (b * 2 + hv) * size;
                let (wanted_o, wanted_state) = case.expected(b, hv, &s.pool.values(at, size));
                let token = |t| o.values(((b * 8 + t) * 2 + hv) * k, k);
                let got: Vec<f64> = (0..8).flat_map(token).collect();
                // A third of what random launches may be off by.
                let part = Tolerance::PARALLEL.state / 3.0;
                for (got, wanted, element) in [
                    (got, wanted_o, s.layer.elements[3]),
                    (pool.values(at, size), wanted_state, Element::Bf16),
                ] {
                    close(&got, &wanted, element, part)
                        .unwrap_or_else(|far| panic!("{lowest}: {far}"));
                }
            }
        }
    }
}

/// a + dt_bias beyond the range of f32, beside an exp(A_log) of 0: no NaN. A NaN in A_log reaches its own head, all of it.
#[test]
fn gates_at_the_ends_of_f32() {
    for (per_channel, k) in KINDS {
        let mut s = Setting::new(0, per_channel, k);
        s.layer.elements = [Element::F32; 6];
        s.tokens = Tokens::new(&s.layer, ROWS, 8, &mut s.random);
        let count = ROWS * 8 * 2 * s.layer.decays();
        (0..count).for_each(|i| s.tokens.g.set(i, 3e38));
        s.gates.dt_bias.fill(3e38);
        for (second, is_nan) in [(1.0, false), (f32::NAN, true)] {
            s.gates.a_log = vec![-200.0, second];
            let case = Case {
                update: true,
                ..s.verify()
            };
            let mut o = output(&s.layer, ROWS, 8);
            let mut pool = s.pool.clone();
            case.launch(&mut o, &mut pool, None).unwrap();
            for b in 0..ROWS {
                let token = |hv| move |t| ((b * 8 + t) * 2 + hv) * k;
                let of_head = |hv| (0..8).map(token(hv)).flat_map(|at| o.values(at, k));
                let state = |hv| pool.values((b * 2 + hv) * k * k, k * k);
                let (wanted_o, wanted_state) =
                    case.expected(b, 0, &s.pool.values(b * 2 * k * k, k * k));
                let got: Vec<f64> = of_head(0).collect();
                assert!(error(&got, &wanted_o, s.layer.elements[3]) < 1e-4);
                assert!(error(&state(0), &wanted_state, Element::Bf16) < 1e-4);
                assert!(of_head(1).all(|o| o.is_nan() == is_nan));
                assert!(state(1).iter().all(|s| s.is_nan() == is_nan));
            }
        }
    }
}

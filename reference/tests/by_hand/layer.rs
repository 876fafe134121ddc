//! The layer step: convolution, recurrence and norm over pools.

use gated_delta_reference::conv::Conv;
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::kda::{KdaBeta, KdaGate, KdaGates};
use gated_delta_reference::layer::{Layer, LayerOutput, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Previous, Recurrent, TokenGates, recurrent};

use crate::recurrent::{NAN, POOL, STATES, TOKENS, halfway};
use crate::{assert_bits, values};

/// q and k are their inputs, v the sum of its last two.
const CONV: Conv = Conv {
    channels: 3,
    width: 2,
    weight: &[0.0, 1.0, 0.0, 1.0, 1.0, 1.0],
    bias: None,
    activation: Activation::None,
};
/// v of [`TOKENS`] after [`WINDOWS`].
const X: [f64; 18] = [
    1.0, 1.0, 5.0, 1.0, 1.0, -5.0, 1.0, 1.0, 9.0, //
    1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 3.0,
];
const WINDOWS: [f64; 12] = [7.0, 7.0, 3.0, 7.0, 7.0, 1.0, NAN, NAN, NAN, NAN, NAN, NAN];
const STEP: Recurrent = Recurrent {
    q: &[],
    k: &[],
    v: &[],
    ..TOKENS
};
const PROJECTION: Projection = Projection {
    x: &X,
    previous: None,
    conv: CONV,
};
/// Of one value, its sign.
const NORM: GatedNorm = GatedNorm {
    z: &[0.0; 6],
    weight: &[6.0],
    eps: 0.0,
    activation: Activation::Sigmoid,
};
const LAYER: Layer = Layer {
    step: STEP,
    projection: Some(PROJECTION),
    norm: None,
    fresh: None,
};
const POOLS: Pools = Pools {
    states: &POOL,
    write_states: None,
    windows: Some(&WINDOWS),
    write_windows: None,
    snapshots: None,
};

#[track_caller]
fn assert_leaves(problem: &Layer, pools: &Pools, o: &[f64], states: &[f64], windows: &[f64]) {
    let after = layer(problem, pools).unwrap();
    assert_bits(&after.o, o);
    assert_bits(&after.states, states);
    assert_bits(&after.windows.unwrap(), windows);
}

#[test]
fn three_tokens_of_two_rows_by_hand() {
    let mut windows = WINDOWS;
    windows[..6].copy_from_slice(&[1.0, 1.0, 9.0, 1.0, 1.0, 3.0]);
    let states = [5.0, 5.25, NAN, NAN];
    assert_leaves(&LAYER, &POOLS, &STATES, &states, &windows);
    let normed = Layer {
        norm: Some(NORM),
        ..LAYER
    };
    assert_leaves(&normed, &POOLS, &[3.0; 6], &states, &windows);
}

#[test]
fn without_parts_it_is_the_recurrence() {
    let bare = Layer {
        step: TOKENS,
        projection: None,
        norm: None,
        fresh: None,
    };
    let pools = Pools {
        states: &POOL,
        ..Pools::default()
    };
    let after = layer(&bare, &pools).unwrap();
    assert_bits(&after.o, &STATES);
    assert_bits(&after.states, &[5.0, 5.25, NAN, NAN]);
    assert_eq!((after.windows, after.snapshots), (None, None));
    let normed = Layer {
        norm: Some(NORM),
        ..bare
    };
    assert_bits(&layer(&normed, &pools).unwrap().o, &[3.0; 6]);
}

#[test]
fn update_state_off_keeps_states_and_windows() {
    let verify = Layer {
        step: Recurrent {
            update_state: false,
            ..STEP
        },
        ..LAYER
    };
    assert_leaves(&verify, &POOLS, &STATES, &POOL, &WINDOWS);
}

#[test]
fn inactive_rows_touch_nothing() {
    let mut windows = WINDOWS;
    windows[3..6].copy_from_slice(&[1.0, 1.0, 3.0]);
    let mut x = X;
    x[..9].fill(NAN);
    for dead in [-1, 4, 9] {
        let layer = Layer {
            step: Recurrent {
                read_slots: Some(&[dead, 1]),
                null_slot: Some(9),
                ..STEP
            },
            projection: Some(Projection {
                x: &x,
                ..PROJECTION
            }),
            norm: Some(GatedNorm {
                z: &[NAN, NAN, NAN, 0.0, 0.0, 0.0],
                ..NORM
            }),
            ..LAYER
        };
        let o = [0.0, 0.0, 0.0, 3.0, 3.0, 3.0];
        assert_leaves(&layer, &POOLS, &o, &[16.0, 5.25, NAN, NAN], &windows);
    }
}

#[test]
fn read_and_write_slots_and_pools() {
    let between = Layer {
        step: Recurrent {
            read_slots: Some(&[1, 0]),
            write_slots: Some(&[2, 0]),
            ..STEP
        },
        // The rows change places.
        projection: Some(Projection {
            x: &[&X[9..], &X[..9]].concat(),
            ..PROJECTION
        }),
        ..LAYER
    };
    let o = [&STATES[3..], &STATES[..3]].concat();
    let mut windows = WINDOWS;
    windows[..3].copy_from_slice(&[1.0, 1.0, 9.0]);
    windows[6..9].copy_from_slice(&[1.0, 1.0, 3.0]);
    assert_leaves(&between, &POOLS, &o, &[5.0, 8.0, 5.25, NAN], &windows);

    let pools = Pools {
        write_states: Some(&[-1.0; 3]),
        write_windows: Some(&[-2.0; 9]),
        ..POOLS
    };
    let mut written = [-2.0; 9];
    written[..3].copy_from_slice(&[1.0, 1.0, 9.0]);
    written[6..].copy_from_slice(&[1.0, 1.0, 3.0]);
    assert_leaves(&between, &pools, &o, &[5.0, -1.0, 5.25], &written);
}

/// Row 0 starts from zeros: its first v is 5, not 8.
#[test]
fn fresh_rows_start_from_zeros() {
    let mut windows = WINDOWS;
    windows[..6].copy_from_slice(&[1.0, 1.0, 9.0, 1.0, 1.0, 3.0]);
    let o = [2.5, 1.25, 2.625, 5.0, 4.5, 5.25];
    let fresh = Layer {
        fresh: Some(&[7, 0]),
        ..LAYER
    };
    assert_leaves(&fresh, &POOLS, &o, &[2.625, 5.25, NAN, NAN], &windows);
    // Whatever the slot holds.
    let (states, mut garbage) = ([NAN, 8.0, NAN, NAN], WINDOWS);
    garbage[..3].fill(NAN);
    let pools = Pools {
        states: &states,
        windows: Some(&garbage),
        ..POOLS
    };
    assert_leaves(&fresh, &pools, &o, &[2.625, 5.25, NAN, NAN], &windows);
    // Its slot to read may be dead, that to write not.
    for (write, live) in [(Some(&[0, 1][..]), true), (None, false)] {
        let step = Recurrent {
            read_slots: Some(&[-1, 1]),
            write_slots: write,
            ..STEP
        };
        let after = layer(&Layer { step, ..fresh }, &pools).unwrap();
        let row = if live { &o[..3] } else { &[0.0; 3] };
        assert_bits(&after.o[..3], row);
        assert_bits(&after.states[..1], &[if live { 2.625 } else { NAN }]);
    }
}

#[test]
fn fresh_rows_with_token_slots() {
    let fresh = Layer {
        step: Recurrent {
            token_slots: Some(&[3, 2, 0, 9, 9, 1]),
            accepted: Some(&[-5, 3]),
            ..TOKENS
        },
        projection: None,
        norm: None,
        fresh: Some(&[1, 0]),
    };
    let pools = Pools {
        states: &POOL,
        ..Pools::default()
    };
    let after = layer(&fresh, &pools).unwrap();
    assert_bits(&after.o, &[4.0, 2.0, 3.0, 5.0, 4.5, 5.25]);
    assert_bits(&after.states, &[3.0, 5.25, 2.0, 4.0]);
}

/// Tensors of a layer with H = 1, HV = 2, K = 2, V = 3 and W = 4, and a problem of them.
struct Drawn {
    x: Vec<f64>,
    z: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    norm_weight: Vec<f64>,
    states: Vec<f64>,
    windows: Vec<f64>,
}

const CHANNELS: usize = 2 * 2 + 2 * 3;

impl Drawn {
    fn new(rows: usize, tokens: usize, decays: usize) -> Self {
        let count = rows * tokens;
        let negative = |x: f64| -x.abs();
        Self {
            x: values(count * CHANNELS, 1),
            z: values(count * 6, 2),
            g: values(count * 2 * decays, 3)
                .into_iter()
                .map(negative)
                .collect(),
            beta: values(count * 2, 4).into_iter().map(f64::abs).collect(),
            weight: values(CHANNELS * 4, 5),
            bias: values(CHANNELS, 6),
            norm_weight: values(3, 7),
            states: values(rows * 12, 8),
            windows: values(rows * CHANNELS * 3, 9),
        }
    }

    /// Tokens `range` of every row, of `tokens`, cut out.
    fn cut(&self, tokens: usize, range: std::ops::Range<usize>) -> Self {
        let cut = |values: &[f64]| -> Vec<f64> {
            let rows = self.states.len() / 12;
            let token = values.len() / rows / tokens;
            let row = |row: &[f64]| row[range.start * token..range.end * token].to_vec();
            values.chunks(tokens * token).flat_map(row).collect()
        };
        Self {
            x: cut(&self.x),
            z: cut(&self.z),
            g: cut(&self.g),
            beta: cut(&self.beta),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            norm_weight: self.norm_weight.clone(),
            states: self.states.clone(),
            windows: self.windows.clone(),
        }
    }

    fn gates(&self) -> TokenGates<'_> {
        let (g, beta) = (&self.g, &self.beta);
        if g.len() == beta.len() {
            return TokenGates::Gdn(Gates::Given { g, beta });
        }
        TokenGates::Kda(KdaGates {
            g,
            kind: KdaGate::Log,
            beta,
            beta_kind: KdaBeta::Given,
        })
    }

    fn layer(&self, rows: usize, tokens: usize) -> Layer<'_> {
        Layer {
            step: Recurrent {
                batch: rows,
                tokens,
                heads: 1,
                value_heads: 2,
                key_dim: 2,
                value_dim: 3,
                gates: self.gates(),
                l2norm: true,
                ..STEP
            },
            projection: Some(Projection {
                x: &self.x,
                previous: None,
                conv: Conv {
                    channels: CHANNELS,
                    width: 4,
                    weight: &self.weight,
                    bias: Some(&self.bias),
                    activation: Activation::Silu,
                },
            }),
            norm: Some(GatedNorm {
                z: &self.z,
                weight: &self.norm_weight,
                eps: 1e-5,
                activation: Activation::Silu,
            }),
            fresh: None,
        }
    }

    fn pools(&self) -> Pools<'_> {
        Pools {
            states: &self.states,
            windows: Some(&self.windows),
            ..Pools::default()
        }
    }

    fn run(&self, rows: usize, tokens: usize) -> LayerOutput {
        layer(&self.layer(rows, tokens), &self.pools()).unwrap()
    }
}

/// Every part on its own, for each row, against the step.
#[test]
fn the_step_is_its_parts() {
    use gated_delta_reference::conv::{convolve, window_after};
    use gated_delta_reference::norm::gated_norm;
    for decays in [1, 2] {
        let drawn = Drawn::new(2, 5, decays);
        let problem = drawn.layer(2, 5);
        let conv = problem.projection.unwrap().conv;
        let (mut q, mut k, mut v, mut windows) = (vec![], vec![], vec![], vec![]);
        for b in 0..2 {
            let x = &drawn.x[b * 5 * CHANNELS..][..5 * CHANNELS];
            let window = &drawn.windows[b * CHANNELS * 3..][..CHANNELS * 3];
            for y in convolve(&conv, window, x).unwrap().chunks(CHANNELS) {
                q.extend_from_slice(&y[..2]);
                k.extend_from_slice(&y[2..4]);
                v.extend_from_slice(&y[4..]);
            }
            windows.extend(window_after(&conv, window, x, 5).unwrap());
        }
        let step = Recurrent {
            q: &q,
            k: &k,
            v: &v,
            ..problem.step
        };
        let bare = recurrent(&step, &drawn.states, None, None).unwrap();
        let after = drawn.run(2, 5);
        let normed = gated_norm(&problem.norm.unwrap(), &bare.o).unwrap();
        assert_bits(&after.o, &normed);
        assert_bits(&after.states, &bare.pool);
        assert_bits(&after.windows.unwrap(), &windows);
    }
}

#[test]
fn tokens_may_come_in_two_launches_and_packed() {
    for decays in [1, 2] {
        let drawn = Drawn::new(2, 5, decays);
        let whole = drawn.run(2, 5);
        let first = drawn.cut(5, 0..2).run(2, 2);
        let mut rest = drawn.cut(5, 2..5);
        rest.states = first.states;
        rest.windows = first.windows.unwrap();
        let second = rest.run(2, 3);
        assert_bits(&second.states, &whole.states);
        assert_eq!(second.windows, whole.windows);
        assert_bits(&second.o[..3 * 6], &whole.o[2 * 6..5 * 6]);

        let mut packed = drawn.layer(2, 5);
        packed.step.cu_seqlens = Some(&[0, 5, 10]);
        assert_eq!(layer(&packed, &drawn.pools()).unwrap(), whole);
        // The second row has none, and keeps what it has, fresh or not.
        packed.step.cu_seqlens = Some(&[0, 5, 5]);
        packed.fresh = Some(&[0, 1]);
        let one = layer(&packed, &drawn.pools()).unwrap();
        assert_bits(&one.o[..30], &whole.o[..30]);
        assert!(one.o[30..].iter().all(|o| o.is_nan()));
        assert_bits(&one.states[12..], &drawn.states[12..]);
        assert_bits(&one.windows.unwrap()[30..], &drawn.windows[30..]);
    }
}

/// The window and the state go on from what is kept of the previous tokens, of which x is all that is handed over.
#[test]
fn a_resume_is_an_update_and_a_verify() {
    for decays in [1, 2] {
        let drawn = Drawn::new(1, 5, decays);
        for (keep, fresh) in (0..=3).flat_map(|keep| [(keep, 0), (keep, 1)]) {
            let (old, new) = (drawn.cut(5, 0..3), drawn.cut(5, 3..5));
            let fresh = Some([fresh]);
            let previous = Some(Previous {
                tokens: 3,
                k: &[],
                v: &[],
                gates: old.gates(),
                keep: &[keep as i64],
            });
            let mut resume = new.layer(1, 2);
            resume.step.previous = previous;
            resume.projection.as_mut().unwrap().previous = Some(&old.x);
            resume.fresh = fresh.as_ref().map(<[i64; 1]>::as_slice);
            let resumed = layer(&resume, &drawn.pools()).unwrap();

            let mut kept = drawn.cut(5, 0..keep);
            if fresh == Some([1]) {
                kept.states.fill(0.0);
                kept.windows.fill(0.0);
            }
            let (states, windows) = match keep {
                0 => (kept.states.clone(), kept.windows.clone()),
                _ => {
                    let updated = kept.run(1, keep);
                    (updated.states, updated.windows.unwrap())
                }
            };
            assert_bits(&resumed.states, &states);
            assert_bits(resumed.windows.as_ref().unwrap(), &windows);
            let mut verify = drawn.cut(5, 3..5);
            (verify.states, verify.windows) = (states, windows);
            assert_bits(&resumed.o, &verify.run(1, 2).o);

            // A commit is the same without new tokens.
            let nothing = drawn.cut(5, 0..0);
            let mut commit = nothing.layer(1, 0);
            commit.step.previous = previous;
            commit.projection = Some(Projection {
                x: &[],
                ..resume.projection.unwrap()
            });
            (commit.norm, commit.fresh) = (None, resume.fresh);
            let committed = layer(&commit, &drawn.pools()).unwrap();
            assert_bits(&committed.states, &resumed.states);
            assert_eq!(committed.windows, resumed.windows);
        }
    }
}

#[track_caller]
fn assert_fails(problem: Layer, pools: Pools, wanted: &str) {
    assert_eq!(layer(&problem, &pools).unwrap_err().to_string(), wanted);
}

#[test]
fn parts_that_contradict_each_other() {
    let with = |step| Layer { step, ..LAYER };
    let previous = |k, v| {
        with(Recurrent {
            previous: Some(Previous {
                tokens: 1,
                k,
                v,
                gates: halfway(2),
                keep: &[1, 1],
            }),
            ..STEP
        })
    };
    let q = with(Recurrent { q: &[1.0], ..STEP });
    assert_fails(q, POOLS, "q: wanted none with projection, got some");
    let v = with(Recurrent { v: &[1.0], ..STEP });
    assert_fails(v, POOLS, "k and v: wanted none with projection, got some");
    assert_fails(
        previous(&[1.0; 2], &[]),
        POOLS,
        "previous k and v: wanted none with projection, got some",
    );
    assert_fails(
        previous(&[], &[]),
        POOLS,
        "previous x: wanted with previous, got none",
    );
    let token_slots = with(Recurrent {
        token_slots: Some(&[0; 6]),
        ..STEP
    });
    assert_fails(
        token_slots,
        POOLS,
        "token_slots: wanted none with projection, got some",
    );
    let frozen = with(Recurrent {
        update_state: false,
        ..STEP
    });
    let written = Pools {
        write_windows: Some(&WINDOWS),
        ..POOLS
    };
    assert_fails(
        frozen,
        written,
        "write_windows: wanted none with update_state = false, got some",
    );
    let no_windows = Pools {
        windows: None,
        ..POOLS
    };
    assert_fails(
        LAYER,
        no_windows,
        "windows: wanted with projection, got none",
    );
    let bare = Layer {
        step: TOKENS,
        projection: None,
        ..LAYER
    };
    assert_fails(bare, POOLS, "projection: wanted with windows, got none");
    let written_alone = Pools {
        windows: None,
        ..written
    };
    assert_fails(
        bare,
        written_alone,
        "windows: wanted with write_windows, got none",
    );
    let previous_x = Layer {
        projection: Some(Projection {
            previous: Some(&X),
            ..PROJECTION
        }),
        ..LAYER
    };
    assert_fails(
        previous_x,
        POOLS,
        "previous: wanted with previous x, got none",
    );
    let mut normed_commit = Layer {
        norm: Some(NORM),
        ..previous(&[], &[])
    };
    normed_commit.step.tokens = 0;
    assert_fails(
        normed_commit,
        POOLS,
        "norm: wanted none with tokens = 0, got some",
    );
}

#[test]
fn shapes_are_checked() {
    let projected = |projection| Layer {
        projection: Some(projection),
        ..LAYER
    };
    let conv = Conv {
        channels: 4,
        ..CONV
    };
    let wide = projected(Projection { conv, ..PROJECTION });
    assert_fails(wide, POOLS, "channels 2*H*K + HV*V: wanted length 3, got 4");
    let short = projected(Projection {
        x: &X[3..],
        ..PROJECTION
    });
    assert_fails(short, POOLS, "x [B, T, D]: wanted length 18, got 15");
    let packed = Layer {
        step: Recurrent {
            cu_seqlens: Some(&[0, 3, 6]),
            ..STEP
        },
        ..projected(Projection {
            x: &X[1..],
            ..PROJECTION
        })
    };
    assert_fails(
        packed,
        POOLS,
        "x: wanted a multiple of 3 elements (one token, D), got 17",
    );
    let previous = Layer {
        step: Recurrent {
            previous: Some(Previous {
                tokens: 1,
                k: &[],
                v: &[],
                gates: halfway(2),
                keep: &[1, 1],
            }),
            ..STEP
        },
        ..projected(Projection {
            previous: Some(&X[..5]),
            ..PROJECTION
        })
    };
    assert_fails(
        previous,
        POOLS,
        "previous x [B, T', D]: wanted length 6, got 5",
    );
    let windows = Pools {
        windows: Some(&WINDOWS[3..]),
        ..POOLS
    };
    assert_fails(
        LAYER,
        windows,
        "windows [P, D, W - 1]: wanted length 12, got 9",
    );
    let written = Pools {
        write_states: Some(&[0.0; 2]),
        ..POOLS
    };
    assert_fails(
        LAYER,
        written,
        "write_windows [P, D, W - 1]: wanted length 6, got 12",
    );
    let fresh = Layer {
        fresh: Some(&[1]),
        ..LAYER
    };
    assert_fails(fresh, POOLS, "fresh [B]: wanted length 2, got 1");
    let normed = |norm| Layer {
        norm: Some(norm),
        ..LAYER
    };
    let z = normed(GatedNorm {
        z: &[0.0; 5],
        ..NORM
    });
    assert_fails(z, POOLS, "z [B, T, HV, V]: wanted length 6, got 5");
    let weight = normed(GatedNorm {
        weight: &[1.0; 2],
        ..NORM
    });
    assert_fails(weight, POOLS, "norm weight [V]: wanted length 1, got 2");
    let slots = Layer {
        step: Recurrent {
            read_slots: Some(&[0]),
            ..STEP
        },
        ..LAYER
    };
    assert_fails(slots, POOLS, "read_slots [B]: wanted length 2, got 1");
}

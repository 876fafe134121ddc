//! Tests of the layer step: convolution, recurrence and norm over pools.

use gated_delta_reference::conv::Conv;
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::kda::{KdaBeta, KdaDecay, KdaGates};
use gated_delta_reference::layer::{Layer, LayerOutput, Pools, Projection, layer};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Checkpoints, Previous, Recurrent, TokenGates, recurrent};

use crate::recurrent::{NAN, POOL, STATES, TOKENS, halfway};
use crate::{assert_bits, values};

/// Convolution whose q and k are their inputs, and whose v is the sum of its last two.
const CONV: Conv = Conv {
    channels: 3,
    width: 2,
    weight: &[0.0, 1.0, 0.0, 1.0, 1.0, 1.0],
    bias: None,
    activation: Activation::None,
};
/// Inputs for which v is that of [`TOKENS`], after [`WINDOWS`].
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
/// Norm of a single value, which gives its sign.
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
    checkpoints: None,
};
const POOLS: Pools = Pools {
    states: &POOL,
    write_states: None,
    windows: Some(&WINDOWS),
    write_windows: None,
    snapshots: None,
    window_snapshots: None,
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
        checkpoints: None,
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
        // The rows are exchanged.
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

/// Row 0 reaches its second multiple of 2 after all of its tokens. Row 1, with one earlier token in its sequence, reaches its first
/// multiple after its first token.
#[test]
fn checkpoints_by_hand() {
    let checkpoints = |slots, positions| Layer {
        checkpoints: Some(Checkpoints {
            every: 2,
            slots,
            positions,
        }),
        ..LAYER
    };
    let mut windows = WINDOWS;
    windows[..6].copy_from_slice(&[1.0, 1.0, 9.0, 1.0, 1.0, 3.0]);
    let mut both = windows;
    both[6..9].copy_from_slice(&X[3..6]);
    both[9..].copy_from_slice(&X[9..12]);
    let with = checkpoints(&[2, 3], Some(&[0, 1]));
    let states = [5.0, 5.25, STATES[1], STATES[3]];
    assert_leaves(&with, &POOLS, &STATES, &states, &both);
    // The last token's state goes to both of its slots; a dead entry skips only its own store.
    let with = checkpoints(&[-1, 9, 4, 3], Some(&[0, 1]));
    both[6..9].copy_from_slice(&[NAN; 3]);
    both[9..].copy_from_slice(&X[15..]);
    assert_leaves(&with, &POOLS, &STATES, &[5.0, 5.25, NAN, 5.25], &both);
    // Without positions each row is the beginning of its sequence.
    let with = checkpoints(&[2, 3], None);
    both[6..9].copy_from_slice(&X[3..6]);
    both[9..].copy_from_slice(&X[12..15]);
    let states = [5.0, 5.25, STATES[1], STATES[4]];
    assert_leaves(&with, &POOLS, &STATES, &states, &both);
    let none = checkpoints(&[], None);
    assert_leaves(&none, &POOLS, &STATES, &[5.0, 5.25, NAN, NAN], &windows);
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
    // The contents of the slot do not matter.
    let (states, mut garbage) = ([NAN, 8.0, NAN, NAN], WINDOWS);
    garbage[..3].fill(NAN);
    let pools = Pools {
        states: &states,
        windows: Some(&garbage),
        ..POOLS
    };
    assert_leaves(&fresh, &pools, &o, &[2.625, 5.25, NAN, NAN], &windows);
    // The read slot of a fresh row may be dead, the write slot may not.
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
        checkpoints: None,
    };
    let pools = Pools {
        states: &POOL,
        ..Pools::default()
    };
    let after = layer(&fresh, &pools).unwrap();
    assert_bits(&after.o, &[4.0, 2.0, 3.0, 5.0, 4.5, 5.25]);
    assert_bits(&after.states, &[3.0, 5.25, 2.0, 4.0]);
}

/// [`CONV`] with an additional, older tap of 0.
const THREE_TAPS: Conv = Conv {
    width: 3,
    weight: &[0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0],
    ..CONV
};
/// The rows of [`LAYER`] with token slots. All tokens of the last step of row 0 were accepted, and one of row 1, of whose tokens only
/// the first has a slot.
const TOKEN_SLOTS: Recurrent = Recurrent {
    token_slots: Some(&[3, 2, 0, 1, 9, -1]),
    accepted: Some(&[3, 1]),
    ..STEP
};

/// Three channels of a slot with these four columns.
fn wide(q_and_k: [f64; 4], v: [f64; 4]) -> Vec<f64> {
    [q_and_k, q_and_k, v].concat()
}

/// Windows of [`TOKEN_SLOTS`] and [`THREE_TAPS`]; elements that are never read are NaN.
fn wide_windows() -> Vec<f64> {
    let rows = [
        wide([6.0, 7.0, NAN, NAN], [2.0, 1.0, NAN, NAN]),
        wide([NAN, NAN, 6.0, 7.0], [NAN, NAN, 2.0, 3.0]),
    ];
    let none = [NAN; 12];
    [&none, &rows[0][..], &none, &rows[1]].concat()
}

#[test]
fn windows_with_token_slots_by_hand() {
    let projection = |x| {
        Some(Projection {
            x,
            conv: THREE_TAPS,
            ..PROJECTION
        })
    };
    let problem = Layer {
        step: TOKEN_SLOTS,
        projection: projection(&X),
        ..LAYER
    };
    let windows = wide_windows();
    let pools = Pools {
        windows: Some(&windows),
        ..POOLS
    };
    // The newest input of the window, then the inputs of the tokens.
    let row_0 = wide([7.0, 1.0, 1.0, 1.0], [3.0, 5.0, -5.0, 9.0]);
    let row_1 = wide([7.0, 1.0, 1.0, 1.0], [1.0, 1.0, 3.0, 3.0]);
    let mut after = windows.clone();
    after[12..24].copy_from_slice(&row_1);
    after[36..].copy_from_slice(&row_0);
    let states = [5.0, 5.0, 6.0, 12.0];
    assert_leaves(&problem, &pools, &STATES, &states, &after);

    // Separate windows to write, with as many slots as the separate pool of states.
    let written = Pools {
        write_states: Some(&[-1.0; 5]),
        write_windows: Some(&[-2.0; 60]),
        ..pools
    };
    let mut apart = [-2.0; 60];
    apart[12..24].copy_from_slice(&row_1);
    apart[36..48].copy_from_slice(&row_0);
    let states = [5.0, 5.0, 6.0, 12.0, -1.0];
    assert_leaves(&problem, &written, &STATES, &states, &apart);

    // Row 1 has two tokens: the columns after these stay as they are.
    let mut fewer = problem;
    fewer.step.cu_seqlens = Some(&[0, 3, 5]);
    after[12..24].copy_from_slice(&wide([7.0, 1.0, 1.0, NAN], [1.0, 1.0, 3.0, NAN]));
    let o = [12.0, 6.0, 5.0, 5.0, 4.5, 0.0];
    assert_leaves(&fewer, &pools, &o, &[5.0, 5.0, 6.0, 12.0], &after);

    // Row 0 starts from zeros: its first v is 5, not 8.
    let mut fresh = problem;
    fresh.fresh = Some(&[1, 0]);
    fresh.step.accepted = Some(&[-5, 1]);
    let mut after = windows.clone();
    after[12..24].copy_from_slice(&row_1);
    after[36..].copy_from_slice(&wide([0.0, 1.0, 1.0, 1.0], [0.0, 5.0, -5.0, 9.0]));
    let o = [2.5, 1.25, 2.625, 5.0, 4.5, 5.25];
    let states = [2.625, 5.0, 1.25, 2.5];
    assert_leaves(&fresh, &pools, &o, &states, &after);
}

/// The state of the row's last accepted token has a live slot, its window has not.
#[test]
fn a_row_whose_window_has_a_dead_slot_is_inactive() {
    let columns = wide_windows();
    let mut after = columns.clone();
    after[12..24].copy_from_slice(&wide([7.0, 1.0, 1.0, 1.0], [1.0, 1.0, 3.0, 3.0]));
    let (write_states, write_windows) = ([-1.0; 3], [-2.0; 36]);
    let mut apart = write_windows;
    apart[12..24].copy_from_slice(&after[12..24]);
    for (first, null_slot) in [(-1, None), (4, None), (2, Some(2)), (3, None)] {
        let slots = [first, 2, 0, 1, 9, -1];
        for fresh in [None, Some(&[1, 0][..])] {
            let mut dead = Layer {
                step: Recurrent {
                    token_slots: Some(&slots),
                    null_slot,
                    ..TOKEN_SLOTS
                },
                fresh,
                ..LAYER
            };
            dead.projection.as_mut().unwrap().conv = THREE_TAPS;
            let o = [0.0, 0.0, 0.0, 5.0, 4.5, 5.25];
            let pools = Pools {
                windows: Some(&columns),
                ..POOLS
            };
            if first == 3 {
                // The slot is one of the windows that are read, and not of the windows that are written.
                let pools = Pools {
                    write_states: Some(&write_states),
                    write_windows: Some(&write_windows),
                    ..pools
                };
                assert_leaves(&dead, &pools, &o, &[-1.0, 5.0, -1.0], &apart);
            } else {
                assert_leaves(&dead, &pools, &o, &[16.0, 5.0, NAN, NAN], &after);
            }
        }
    }
    // A slot that exists only in the windows that are written is not enough either.
    let pools = Pools {
        states: &[16.0, 8.0, NAN],
        write_states: Some(&[-1.0; 4]),
        windows: Some(&columns[..36]),
        write_windows: Some(&[-2.0; 48]),
        ..Pools::default()
    };
    let mut dead = Layer {
        step: TOKEN_SLOTS,
        ..LAYER
    };
    dead.projection.as_mut().unwrap().conv = THREE_TAPS;
    let mut apart = [-2.0; 48];
    apart[12..24].copy_from_slice(&after[12..24]);
    let o = [0.0, 0.0, 0.0, 5.0, 4.5, 5.25];
    assert_leaves(&dead, &pools, &o, &[-1.0, 5.0, -1.0, -1.0], &apart);
}

#[test]
fn snapshots_of_windows_by_hand() {
    // Window snapshots may have more steps than state snapshots.
    let before: Vec<f64> = (0..24).map(|i| -f64::from(i)).collect();
    for (update_state, states) in [(true, [5.0, 5.25]), (false, [16.0, 8.0])] {
        let mut problem = LAYER;
        problem.step.update_state = update_state;
        problem.step.snapshot_steps = Some(3);
        let pools = Pools {
            snapshots: Some(&[-1.0; 6]),
            window_snapshots: Some(&before),
            ..POOLS
        };
        let after = layer(&problem, &pools).unwrap();
        assert_bits(&after.states[..2], &states);
        let mut wanted = before.clone();
        wanted[..9].copy_from_slice(&X[..9]);
        wanted[12..21].copy_from_slice(&X[9..]);
        assert_bits(&after.window_snapshots.unwrap(), &wanted);

        // Row 0 has one token, and row 1 is inactive.
        problem.step.cu_seqlens = Some(&[0, 1, 4]);
        problem.step.read_slots = Some(&[0, -1]);
        wanted = before.clone();
        wanted[..3].copy_from_slice(&X[..3]);
        let after = layer(&problem, &pools).unwrap();
        assert_bits(&after.window_snapshots.unwrap(), &wanted);
    }
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

    /// Tensors of the tokens `range` of every row, out of `tokens`.
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
            kind: KdaDecay::Log,
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
            checkpoints: None,
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

/// Compares the step with its parts, run one by one for each row.
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
        // The second row has no tokens, and keeps its start state: zeros if it is fresh.
        packed.step.cu_seqlens = Some(&[0, 5, 5]);
        let zeros = [0.0; 60];
        let kept: [&[f64]; 2] = [&drawn.states, &drawn.windows];
        for (fresh, kept) in [(&[0, 0], kept), (&[0, 1], [&zeros; 2])] {
            packed.fresh = Some(fresh);
            let one = layer(&packed, &drawn.pools()).unwrap();
            assert_bits(&one.o[..30], &whole.o[..30]);
            assert_bits(&one.o[30..], &zeros[..30]);
            let [states, windows] = kept;
            assert_bits(&one.states[12..], &states[12..one.states.len()]);
            assert_bits(&one.windows.as_ref().unwrap()[30..], &windows[30..60]);
        }
        // The row moves from the first slot to the second, its window too.
        packed.fresh = None;
        packed.step.cu_seqlens = Some(&[0, 0]);
        packed.step.batch = 1;
        packed.step.write_slots = Some(&[1]);
        let copied = layer(&packed, &drawn.pools()).unwrap();
        let windows = copied.windows.unwrap();
        assert_bits(&copied.states[12..], &drawn.states[..12]);
        assert_bits(&windows[30..], &drawn.windows[..30]);
        assert_bits(&windows[..30], &drawn.windows[..30]);
    }
}

/// The windows that T tokens leave in token slots and in snapshots are those of T launches of one token each.
#[test]
fn the_window_after_any_token_is_that_of_as_many_steps() {
    const T: usize = 5;
    for decays in [1, 2] {
        let drawn = Drawn::new(2, T, decays);
        // Windows and states after 0 to T launches of a token.
        let (mut states, mut windows) = (vec![drawn.states.clone()], vec![drawn.windows.clone()]);
        let mut o = Vec::new();
        for t in 0..T {
            let mut token = drawn.cut(T, t..t + 1);
            (token.states, token.windows) = (states[t].clone(), windows[t].clone());
            let after = token.run(2, 1);
            states.push(after.states);
            windows.push(after.windows.unwrap());
            o.push(after.o);
        }
        let whole = drawn.run(2, T);
        assert_bits(&whole.states, &states[T]);
        assert_bits(whole.windows.as_ref().unwrap(), &windows[T]);

        let nothing = [vec![NAN; 2 * T * 12], vec![NAN; 2 * T * CHANNELS * 3]];
        let mut kept = drawn.layer(2, T);
        kept.step.snapshot_steps = Some(T);
        let pools = Pools {
            snapshots: Some(&nothing[0]),
            window_snapshots: Some(&nothing[1]),
            ..drawn.pools()
        };
        let window_snapshots = layer(&kept, &pools).unwrap().window_snapshots.unwrap();

        // Token t of row b in slot b·T + t; start states in the slots of the first tokens.
        let slots: Vec<i64> = (0..2 * T as i64).collect();
        let mut slotted = drawn.layer(2, T);
        slotted.step.token_slots = Some(&slots);
        let columns = 2 + T;
        let (mut pool, mut wide) = (vec![NAN; 2 * T * 12], vec![NAN; 2 * T * CHANNELS * columns]);
        for b in 0..2 {
            pool[b * T * 12..][..12].copy_from_slice(&drawn.states[b * 12..][..12]);
            for c in 0..CHANNELS {
                let window = &drawn.windows[(b * CHANNELS + c) * 3..][..3];
                wide[(b * T * CHANNELS + c) * columns..][..3].copy_from_slice(window);
            }
        }
        let pools = Pools {
            states: &pool,
            windows: Some(&wide),
            ..Pools::default()
        };
        let in_slots = layer(&slotted, &pools).unwrap();
        assert_bits(&in_slots.o, &whole.o);
        let wide = in_slots.windows.unwrap();

        for accepted in 1..=T {
            for b in 0..2 {
                let len = CHANNELS * 3;
                let wanted = &windows[accepted][b * len..][..len];
                assert_bits(
                    &window_snapshots[(b * T + accepted - 1) * len..][..len],
                    wanted,
                );
                let oldest = |c| (b * T * CHANNELS + c) * columns + accepted - 1;
                let read = (0..CHANNELS).flat_map(|c| &wide[oldest(c)..][..3]);
                assert_bits(&read.copied().collect::<Vec<_>>(), wanted);
                assert_bits(
                    &in_slots.states[(b * T + accepted - 1) * 12..][..12],
                    &states[accepted][b * 12..][..12],
                );
            }
            // The next step continues from there.
            let counts = [accepted as i64; 2];
            let mut next = slotted;
            next.step.accepted = Some(&counts);
            let pools = Pools {
                states: &in_slots.states,
                windows: Some(&wide),
                ..Pools::default()
            };
            let mut plain = drawn.cut(T, 0..T);
            (plain.states, plain.windows) = (states[accepted].clone(), windows[accepted].clone());
            assert_bits(&layer(&next, &pools).unwrap().o, &plain.run(2, T).o);
        }
        let first: Vec<f64> = o.iter().flat_map(|o| &o[..6]).copied().collect();
        assert_bits(&whole.o[..T * 6], &first);
    }
}

/// The window and the state continue from the kept previous tokens, of which the caller passes only x.
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

            // A commit gives the same, without new tokens.
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
    let after_windows = Pools {
        window_snapshots: Some(&[0.0; 18]),
        ..POOLS
    };
    assert_fails(
        LAYER,
        after_windows,
        "snapshots: wanted with window_snapshots, got none",
    );
    let of_no_windows = Pools {
        windows: None,
        ..after_windows
    };
    let mut bare = LAYER;
    (bare.step, bare.projection) = (TOKENS, None);
    assert_fails(
        bare,
        of_no_windows,
        "projection: wanted with window_snapshots, got none",
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
    let checkpoints = |of: Layer<'static>| Layer {
        checkpoints: Some(Checkpoints {
            every: 2,
            slots: &[2, 3],
            positions: None,
        }),
        ..of
    };
    for (step, with) in [
        (
            Recurrent {
                update_state: false,
                ..STEP
            },
            "update_state = false",
        ),
        (
            Recurrent {
                token_slots: Some(&[0; 6]),
                ..STEP
            },
            "token_slots",
        ),
        (previous(&[], &[]).step, "previous"),
    ] {
        let wanted = format!("checkpoints: wanted none with {with}, got some");
        let mut layer = checkpoints(Layer { step, ..LAYER });
        if let (Some(projection), Some(_)) = (&mut layer.projection, &step.previous) {
            projection.previous = Some(&X);
        }
        assert_fails(layer, POOLS, &wanted);
    }
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
    let mut wide = LAYER;
    wide.step.token_slots = Some(&[0; 6]);
    assert_fails(
        wide,
        POOLS,
        "windows [P, D, W - 2 + T]: wanted length 36, got 12",
    );
    let mut kept = LAYER;
    kept.step.snapshot_steps = Some(4);
    let of_windows = Pools {
        snapshots: Some(&[0.0; 8]),
        window_snapshots: Some(&[0.0; 12]),
        ..POOLS
    };
    assert_fails(
        kept,
        of_windows,
        "window_snapshots [B, steps >= T, D, W - 1]: wanted length 18, got 12",
    );
    let broken = Pools {
        window_snapshots: Some(&[0.0; 20]),
        ..of_windows
    };
    assert_fails(
        kept,
        broken,
        "window_snapshots: wanted a multiple of 6 elements (one step, B*D*(W - 1)), got 20",
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

//! Laws that launches of a batch with several heads obey, for GDN and KDA.

use gated_delta_reference::gdn::{Gates, GdnDecode, decode};
use gated_delta_reference::kda::{KdaBeta, KdaDecay, KdaGates};
use gated_delta_reference::recurrent::{
    HeadMap, Layout, Output, Previous, Recurrent, TokenGates, recurrent,
};

use crate::values;

const BATCH: usize = 3;
const HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
const KEY_DIM: usize = 3;
const VALUE_DIM: usize = 2;
const SLOT: usize = VALUE_HEADS * VALUE_DIM * KEY_DIM;

/// Inputs of tokens: `a` is GDN's, `g` KDA's.
#[derive(Clone)]
struct Tokens {
    tokens: usize,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    a: Vec<f64>,
    g: Vec<f64>,
    beta: Vec<f64>,
}

impl Tokens {
    fn new(tokens: usize, seed: usize) -> Self {
        let values = |dims: &[usize], seed| {
            let token: usize = dims.iter().product();
            values(BATCH * tokens * token, seed)
        };
        Self {
            tokens,
            q: values(&[HEADS, KEY_DIM], seed),
            k: values(&[HEADS, KEY_DIM], seed + 1),
            v: values(&[VALUE_HEADS, VALUE_DIM], seed + 2),
            a: values(&[VALUE_HEADS], seed + 3),
            g: values(&[VALUE_HEADS, KEY_DIM], seed + 4),
            beta: values(&[VALUE_HEADS], seed + 5),
        }
    }

    /// The tokens of `range` in every row.
    fn range(&self, range: std::ops::Range<usize>) -> Self {
        let cut = |x: &[f64]| {
            let token = x.len() / (BATCH * self.tokens);
            x.chunks(self.tokens * token)
                .flat_map(|row| &row[range.start * token..range.end * token])
                .copied()
                .collect()
        };
        Self {
            tokens: range.len(),
            q: cut(&self.q),
            k: cut(&self.k),
            v: cut(&self.v),
            a: cut(&self.a),
            g: cut(&self.g),
            beta: cut(&self.beta),
        }
    }

    fn gdn(&self) -> Gates<'_> {
        Gates::Raw {
            a: &self.a,
            b: &self.beta,
            a_log: &[0.5, -0.5, 0.25, 0.0],
            dt_bias: &[0.0, 0.5, 1.0, -1.0],
            beta_scale: 2.0,
        }
    }

    fn kda(&self) -> KdaGates<'_> {
        KdaGates {
            g: &self.g,
            kind: KdaDecay::LowerBound {
                lower_bound: -5.0,
                a_log: Some(&[0.5, -0.5]),
                dt_bias: None,
            },
            beta: &self.beta,
            beta_kind: KdaBeta::Logit,
        }
    }

    /// Checks `law` for GDN and KDA, in both layouts and head maps.
    fn each(&self, law: impl Fn(&Recurrent)) {
        for gates in [TokenGates::Gdn(self.gdn()), TokenGates::Kda(self.kda())] {
            for layout in [Layout::KLast, Layout::VLast] {
                for head_map in [HeadMap::Grouped, HeadMap::Tiled] {
                    law(&Recurrent {
                        layout,
                        head_map,
                        ..self.problem(gates)
                    });
                }
            }
        }
    }

    fn problem<'a>(&'a self, gates: TokenGates<'a>) -> Recurrent<'a> {
        Recurrent {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            scale: 0.5,
            read_slots: Some(&[2, 4, 1]),
            ..Recurrent::new(
                [BATCH, self.tokens],
                [HEADS, VALUE_HEADS],
                [KEY_DIM, VALUE_DIM],
                gates,
            )
        }
    }

    /// `problem` with these tokens in place of its own.
    fn instead<'a>(&'a self, problem: &Recurrent<'a>) -> Recurrent<'a> {
        Recurrent {
            tokens: self.tokens,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            gates: self.like(&problem.gates),
            ..*problem
        }
    }

    /// Gates of these tokens, of the same kind as `gates`.
    fn like(&self, gates: &TokenGates) -> TokenGates<'_> {
        match gates {
            TokenGates::Gdn(_) => TokenGates::Gdn(self.gdn()),
            TokenGates::Kda(_) => TokenGates::Kda(self.kda()),
        }
    }
}

fn pool() -> Vec<f64> {
    values(5 * SLOT, 9)
}

#[track_caller]
fn run(problem: &Recurrent, pool: &[f64]) -> Output {
    recurrent(problem, pool, None, None).unwrap()
}

#[test]
fn a_launch_is_its_tokens_one_by_one() {
    let all = Tokens::new(4, 1);
    all.each(|problem| {
        let snapshots = vec![f64::NAN; BATCH * 4 * SLOT];
        let with_snapshots = Recurrent {
            snapshot_steps: Some(4),
            ..*problem
        };
        let wanted = recurrent(&with_snapshots, &pool(), None, Some(&snapshots)).unwrap();
        let snapshots = wanted.snapshots.unwrap();
        let mut pool = pool();
        for t in 0..4 {
            let one = all.range(t..t + 1);
            let after = run(&one.instead(problem), &pool);
            let token = VALUE_HEADS * VALUE_DIM;
            for (b, slot) in [2, 4, 1].into_iter().enumerate() {
                let row = b * 4 + t;
                assert_eq!(
                    after.o[b * token..][..token],
                    wanted.o[row * token..][..token]
                );
                assert_eq!(
                    after.pool[slot * SLOT..][..SLOT],
                    snapshots[row * SLOT..][..SLOT]
                );
            }
            pool = after.pool;
        }
        assert_eq!(pool, wanted.pool);
    });
}

#[test]
fn one_token_is_a_decode() {
    let one = Tokens::new(1, 1);
    let problem = one.problem(TokenGates::Gdn(one.gdn()));
    let decoded = decode(
        &GdnDecode {
            batch: BATCH,
            heads: HEADS,
            value_heads: VALUE_HEADS,
            key_dim: KEY_DIM,
            value_dim: VALUE_DIM,
            q: &one.q,
            k: &one.k,
            v: &one.v,
            gates: one.gdn(),
            l2norm: true,
            scale: 0.5,
            head_map: HeadMap::Grouped,
            layout: Layout::KLast,
            read_slots: problem.read_slots,
            write_slots: None,
            null_slot: None,
            update_state: true,
        },
        &pool(),
    )
    .unwrap();
    let after = run(&problem, &pool());
    assert_eq!((after.o, after.pool), (decoded.o, decoded.pool));
}

#[test]
fn a_resume_is_a_commit_and_a_verify() {
    let (old, new) = (Tokens::new(3, 1), Tokens::new(2, 20));
    old.each(|problem| {
        let resume = Recurrent {
            write_slots: Some(&[0, 4, 3]),
            previous: Some(Previous {
                tokens: 3,
                k: &old.k,
                v: &old.v,
                gates: problem.gates,
                keep: &[2, 0, 3],
            }),
            round_state: |s| f64::from(s as f32),
            ..new.instead(problem)
        };
        let nothing = new.range(0..0);
        let committed = run(&nothing.instead(&resume), &pool());
        let verify = Recurrent {
            read_slots: resume.write_slots,
            write_slots: None,
            update_state: false,
            previous: None,
            ..resume
        };
        let stored: Vec<f64> = committed
            .pool
            .iter()
            .map(|s| (resume.round_state)(*s))
            .collect();
        let resumed = run(&resume, &pool());
        assert_eq!(resumed.o, run(&verify, &stored).o);
        assert_eq!(resumed.pool, committed.pool);
    });
}

#[test]
fn a_commit_of_all_tokens_is_an_update() {
    let all = Tokens::new(3, 1);
    all.each(|problem| {
        let nothing = all.range(0..0);
        let commit = Recurrent {
            previous: Some(Previous {
                tokens: 3,
                k: &all.k,
                v: &all.v,
                gates: problem.gates,
                keep: &[3; BATCH],
            }),
            ..nothing.instead(problem)
        };
        assert_eq!(run(&commit, &pool()).pool, run(problem, &pool()).pool);
    });
}

#[test]
fn switches_that_keep_states_leave_the_output_alone() {
    let all = Tokens::new(3, 1);
    all.each(|problem| {
        let wanted = run(problem, &pool()).o;
        let slots = [2, 0, 3, 9, 4, 9, 9, 9, 1];
        for switched in [
            Recurrent {
                update_state: false,
                ..*problem
            },
            Recurrent {
                write_slots: Some(&[3, 0, 2]),
                ..*problem
            },
            Recurrent {
                read_slots: None,
                token_slots: Some(&slots),
                accepted: Some(&[1, 2, 3]),
                ..*problem
            },
            Recurrent {
                cu_seqlens: Some(&[0, 3, 6, 9]),
                ..*problem
            },
        ] {
            assert_eq!(run(&switched, &pool()).o, wanted);
        }
    });
}

#[test]
fn equal_channels_are_gdn() {
    let gdn = Tokens::new(3, 1);
    let kda = Tokens {
        g: gdn.a.iter().flat_map(|g| [*g; KEY_DIM]).collect(),
        ..gdn.clone()
    };
    let given = gdn.problem(TokenGates::Gdn(Gates::Given {
        g: &gdn.a,
        beta: &gdn.beta,
    }));
    let log = kda.problem(TokenGates::Kda(KdaGates {
        kind: KdaDecay::Log,
        beta_kind: KdaBeta::Given,
        ..kda.kda()
    }));
    assert_eq!(run(&log, &pool()), run(&given, &pool()));
}

#[test]
fn permuted_channels_permute_the_state_alone() {
    let all = Tokens::new(3, 1);
    let rotated = |x: &[f64]| -> Vec<f64> {
        x.chunks(KEY_DIM)
            .flat_map(|channels| [channels[1], channels[2], channels[0]])
            .collect()
    };
    let permuted = Tokens {
        q: rotated(&all.q),
        k: rotated(&all.k),
        g: rotated(&all.g),
        ..all.clone()
    };
    let got = run(
        &permuted.problem(TokenGates::Kda(permuted.kda())),
        &rotated(&pool()),
    );
    let wanted = run(&all.problem(TokenGates::Kda(all.kda())), &pool());
    crate::assert_near(&got.o, &wanted.o);
    crate::assert_near(&got.pool, &rotated(&wanted.pool));
}

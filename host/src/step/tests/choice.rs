//! Tests of `Formulation::Auto` on both sides of every threshold: a launch with `Auto` equals the launch that names the choice.

use super::*;
use crate::step::pending::Rings;
use crate::step::problem::Problem;
use Formulation::{Auto, Chunked, Parallel, Recurrent};
use gated_delta_kernels::launch::Family;

/// States that a launch keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keep {
    Update,
    Nothing,
    Snapshots,
    TokenSlots,
}

/// Options that only a prefill has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum OfPrefill {
    Positions,
    Checkpoints,
    Workspace,
}

#[derive(Clone, Copy, Debug)]
struct Ring {
    most: usize,
    entries: usize,
    updates: DType,
    /// Whether windows are deferred too.
    inputs: bool,
}

/// A ring with N = 8 and R = 9.
const RING: Ring = Ring {
    most: 8,
    entries: 9,
    updates: F32,
    inputs: false,
};

/// A launch with two rows and two query/key heads.
#[derive(Clone, Copy, Debug)]
struct Launch {
    kda: bool,
    /// K, the dim of a query/key head.
    dim: usize,
    ratio: usize,
    /// T; 0 for a commit and for a flush.
    tokens: usize,
    /// T'; 0 without previous tokens.
    previous: usize,
    /// Whether rows are packed, with as many tokens in all as two rows of T.
    packed: bool,
    state: DType,
    layout: StateLayout,
    conv: bool,
    norm: bool,
    keep: Keep,
    of_prefill: Option<OfPrefill>,
    ring: Option<Ring>,
}

/// A verify of bf16 states that writes the last state.
const VERIFY: Launch = Launch {
    kda: false,
    dim: 128,
    ratio: 2,
    tokens: 4,
    previous: 0,
    packed: false,
    state: Bf16,
    layout: StateLayout::KLast,
    conv: false,
    norm: false,
    keep: Keep::Update,
    of_prefill: None,
    ring: None,
};

/// [`VERIFY`] with f32 states.
const OF_F32: Launch = Launch {
    state: F32,
    ..VERIFY
};

/// A decode with a ring.
const DEFERRED: Launch = Launch {
    tokens: 1,
    ring: Some(RING),
    ..VERIFY
};

impl Launch {
    /// The result of `find` for the launch with a named formulation.
    fn with<R>(&self, formulation: Formulation, find: impl Fn(&dyn Work) -> R) -> R {
        let per_head = |tokens| {
            tensor(
                F32,
                &[
                    self.of_rows(tokens)[0],
                    self.of_rows(tokens)[1],
                    2 * self.ratio,
                ],
            )
        };
        match self.kda {
            false => {
                let gates = |tokens| GdnGates::given(per_head(tokens), per_head(tokens));
                let previous = Self::dense(self.previous);
                let previous = tensor(F32, &[previous[0], previous[1], 2 * self.ratio]);
                self.of(
                    formulation,
                    gates(self.tokens),
                    GdnGates::given(previous, previous),
                    previous,
                    find,
                )
            }
            true => {
                let hv = 2 * self.ratio;
                let of = |[rows, tokens]: [usize; 2]| {
                    let g = tensor(F32, &[rows, tokens, hv, self.dim]);
                    KdaGates::new(
                        g,
                        KdaDecay::Log,
                        tensor(F32, &[rows, tokens, hv]),
                        KdaBeta::Given,
                    )
                };
                let previous = of(Self::dense(self.previous));
                self.of(
                    formulation,
                    of(self.of_rows(self.tokens)),
                    previous,
                    previous.g,
                    find,
                )
            }
        }
    }

    fn dense(tokens: usize) -> [usize; 2] {
        [2, tokens]
    }

    fn of_rows(&self, tokens: usize) -> [usize; 2] {
        match self.packed {
            true => [1, 2 * tokens],
            false => Self::dense(tokens),
        }
    }

    /// V, the dim of a value head.
    fn value_dim(&self) -> usize {
        if self.dim == 96 { 192 } else { self.dim }
    }

    fn channels(&self) -> usize {
        4 * self.dim + 2 * self.ratio * self.value_dim()
    }

    fn pool(&self) -> Tensor<'static> {
        let [outer, inner] = match self.layout {
            StateLayout::KLast => [self.value_dim(), self.dim],
            StateLayout::VLast => [self.dim, self.value_dim()],
        };
        tensor(self.state, &[8, 2 * self.ratio, outer, inner])
    }

    fn convolution(&self, [rows, tokens]: [usize; 2]) -> Convolution<'static> {
        let channels = self.channels();
        let columns = match self.keep {
            Keep::TokenSlots => 2 + tokens,
            _ => 3,
        };
        Convolution::new(
            tensor(Bf16, &[rows, tokens, channels]),
            2,
            tensor(Bf16, &[channels, 4]),
            tensor(Bf16, &[8, channels, columns]),
        )
    }

    fn pending(&self, ring: Ring) -> Pending<'static> {
        let hv = 2 * self.ratio;
        let Ring {
            most,
            entries,
            updates,
            inputs,
        } = ring;
        let decays: &[usize] = match self.kda {
            true => &[8, hv, entries, self.dim],
            false => &[8, hv, entries],
        };
        let keys = if self.conv { F32 } else { Bf16 };
        let rings = Rings {
            keys: tensor(keys, &[8, 2, entries, self.dim]),
            updates: tensor(updates, &[8, hv, entries, self.value_dim()]),
            decays: tensor(F32, decays),
            len: tensor(I32, &[2]),
            base: tensor(I32, &[2]),
        };
        let pending = Pending::new(rings).most(most);
        match inputs {
            true => pending.inputs(tensor(Bf16, &[8, entries, self.channels()])),
            false => pending,
        }
    }

    fn of<G: Gates, R>(
        &self,
        formulation: Formulation,
        gates: G,
        previous_gates: G,
        previous_gate: Tensor<'static>,
        find: impl Fn(&dyn Work) -> R,
    ) -> R
    where
        Step<'static, G>: Work,
        Commit<'static, G>: Work,
    {
        let options = Options::default()
            .state_layout(self.layout)
            .formulation(formulation);
        let states = States::update(self.pool()).slots(tensor(I32, &[2]));
        let [rows, t] = Self::dense(self.previous);
        let [k, v] = [(2, self.dim), (2 * self.ratio, self.value_dim())]
            .map(|(heads, dim)| tensor(Bf16, &[rows, t, heads, dim]));
        let keep = tensor(I32, &[2]);
        match (self.tokens, self.ring) {
            (0, Some(ring)) => {
                let mut flush = Flush::new(states, self.pending(ring));
                if ring.inputs {
                    flush = flush.windows(tensor(Bf16, &[8, self.channels(), 3]));
                }
                find(&flush.options(options))
            }
            (0, None) => {
                let stored = match self.conv {
                    true => Stored::conv(self.convolution([rows, t])),
                    false => Stored::kv(k, v),
                };
                find(&Commit::new(stored, previous_gates, keep, states).options(options))
            }
            (_, ring) => {
                let [rows, tokens] = self.of_rows(self.tokens);
                let heads = |heads: usize, dim: usize| tensor(Bf16, &[rows, tokens, heads, dim]);
                let (qk, o) = (heads(2, self.dim), heads(2 * self.ratio, self.value_dim()));
                let inputs = match self.conv {
                    true => Inputs::conv(self.convolution([rows, tokens])),
                    false => Inputs::qkv(qk, qk, o),
                };
                let states: States<'static> = match self.keep {
                    Keep::Update | Keep::Snapshots => states.into(),
                    Keep::Nothing => States::read_only(self.pool()).into(),
                    Keep::TokenSlots => {
                        States::per_token(self.pool(), tensor(I32, &[2, self.tokens])).into()
                    }
                };
                let mut step = Step::new(inputs, gates, o, states).options(options);
                if self.keep == Keep::Snapshots {
                    let dims = self.pool().dims()[1..].to_vec();
                    let dims = [&[2, self.tokens], &dims[..]].concat();
                    step = step.snapshots(tensor(self.state, &dims));
                }
                if self.norm {
                    step = step.norm(Norm::new(o, tensor(F32, &[self.value_dim()]), 1e-6));
                }
                if self.packed {
                    step = step.packed(tensor(I32, &[3]), self.tokens);
                }
                if self.previous > 0 {
                    let stored = match self.conv {
                        true => Stored::x(tensor(Bf16, &[2, self.previous, self.channels()])),
                        false => Stored::kv(k, v),
                    };
                    let beta = tensor(F32, &[2, self.previous, 2 * self.ratio]);
                    step = step.previous(Previous::new(stored, previous_gate, beta, keep));
                }
                step = match self.of_prefill {
                    Some(OfPrefill::Positions) => step.positions(tensor(I32, &[2])),
                    Some(OfPrefill::Checkpoints) => step.checkpoints(64, tensor(I32, &[2, 1])),
                    Some(OfPrefill::Workspace) => step.workspace(tensor(F32, &[1 << 24])),
                    None => step,
                };
                if let Some(ring) = ring {
                    step = step.pending(self.pending(ring));
                }
                find(&step)
            }
        }
    }

    fn chosen(&self) -> Formulation {
        self.with(Auto, |work| work.formulation())
    }

    fn check(&self, formulation: Formulation) -> Result<Problem, String> {
        self.with(formulation, |work| {
            work.request().check().map_err(|error| error.to_string())
        })
    }

    fn refused(&self) -> String {
        self.check(Auto).unwrap_err()
    }
}

/// T, T' and the options of a prefill decide, on both sides of every threshold.
#[test]
fn the_most_tokens_that_may_come_decide() {
    let of = |tokens: usize, previous: usize| Launch {
        tokens,
        previous,
        ..VERIFY
    };
    for packed in [false, true] {
        for (tokens, wanted) in [
            (1, Recurrent),
            (2, Parallel),
            (16, Parallel),
            (17, Chunked),
            (4096, Chunked),
        ] {
            let launch = Launch {
                packed,
                ..of(tokens, 0)
            };
            assert_eq!(launch.chosen(), wanted, "T = {tokens}, {packed}");
        }
    }
    for (tokens, previous, wanted) in [
        (1, 1, Recurrent),
        (1, 2, Parallel),
        (2, 1, Parallel),
        (16, 16, Parallel),
        // A commit.
        (0, 1, Recurrent),
        (0, 2, Parallel),
        (0, 16, Parallel),
    ] {
        let chosen = of(tokens, previous).chosen();
        assert_eq!(chosen, wanted, "T = {tokens}, T' = {previous}");
    }
    // 16 tokens; with a convolution or a norm 8, and 16-bit states have to be K-last.
    for (layout, state) in [
        (StateLayout::KLast, F32),
        (StateLayout::VLast, F32),
        (StateLayout::KLast, Bf16),
        (StateLayout::VLast, Bf16),
        (StateLayout::VLast, F16),
    ] {
        for (tokens, previous, wanted, of_layer) in [
            (8, 0, Parallel, Parallel),
            (9, 0, Parallel, Recurrent),
            (16, 0, Parallel, Recurrent),
            (17, 0, Chunked, Chunked),
            (3, 9, Parallel, Recurrent),
            (16, 16, Parallel, Recurrent),
            (0, 9, Parallel, Recurrent),
            (0, 16, Parallel, Recurrent),
        ] {
            let plain = Launch {
                layout,
                state,
                tokens,
                previous,
                ..VERIFY
            };
            let is_16_bit_v_last = layout == StateLayout::VLast && state != F32;
            let is_few = is_16_bit_v_last && tokens.max(previous) <= 8;
            let wanted = if is_few { Recurrent } else { wanted };
            let of_layer = match of_layer {
                Parallel if is_16_bit_v_last => Recurrent,
                named => named,
            };
            for (launch, wanted) in [
                (plain, wanted),
                (Launch { kda: true, ..plain }, wanted),
                (
                    Launch {
                        conv: true,
                        ..plain
                    },
                    of_layer,
                ),
            ] {
                assert_eq!(launch.chosen(), wanted, "{launch:?}");
                assert!(launch.check(wanted).is_ok(), "{launch:?}");
            }
            let norm = Launch {
                norm: true,
                ..plain
            };
            if tokens > 0 {
                assert_eq!(norm.chosen(), of_layer, "{norm:?}");
            }
        }
    }
    use OfPrefill::{Checkpoints, Positions, Workspace};
    for tokens in [1, 8, 16] {
        for it in [Positions, Checkpoints, Workspace] {
            let of_prefill = Some(it);
            let launch = Launch {
                of_prefill,
                ..of(tokens, 0)
            };
            assert_eq!(launch.chosen(), Chunked, "{it:?}, T = {tokens}");
        }
    }
}

/// The states decide for 2 to 8 tokens, on both sides of every rule.
#[test]
fn states_decide_where_tensor_cores_may_come() {
    for (wanted, launch) in [
        (Parallel, VERIFY),
        (
            Parallel,
            Launch {
                kda: true,
                ..VERIFY
            },
        ),
        (Parallel, Launch { dim: 64, ..VERIFY }),
        (Recurrent, Launch { dim: 96, ..VERIFY }),
        (
            Recurrent,
            Launch {
                kda: true,
                dim: 64,
                ..VERIFY
            },
        ),
        (
            Parallel,
            Launch {
                state: F16,
                ..VERIFY
            },
        ),
        (Parallel, OF_F32),
        (
            Parallel,
            Launch {
                layout: StateLayout::VLast,
                ..OF_F32
            },
        ),
        (
            Parallel,
            Launch {
                tokens: 3,
                ..OF_F32
            },
        ),
        (
            Recurrent,
            Launch {
                tokens: 2,
                previous: 2,
                ..OF_F32
            },
        ),
        (
            Parallel,
            Launch {
                tokens: 1,
                previous: 3,
                ..OF_F32
            },
        ),
        (
            Recurrent,
            Launch {
                dim: 96,
                layout: StateLayout::VLast,
                ..OF_F32
            },
        ),
        (
            Recurrent,
            Launch {
                layout: StateLayout::VLast,
                ..VERIFY
            },
        ),
        (
            Parallel,
            Launch {
                keep: Keep::Nothing,
                ..VERIFY
            },
        ),
        (
            Recurrent,
            Launch {
                keep: Keep::Snapshots,
                ..VERIFY
            },
        ),
        (
            Recurrent,
            Launch {
                keep: Keep::TokenSlots,
                ..VERIFY
            },
        ),
        // The states that a commit advances decide its formulation.
        (
            Parallel,
            Launch {
                tokens: 0,
                previous: 3,
                ..OF_F32
            },
        ),
        (
            Recurrent,
            Launch {
                tokens: 0,
                previous: 2,
                ..OF_F32
            },
        ),
        (
            Recurrent,
            Launch {
                tokens: 0,
                previous: 4,
                layout: StateLayout::VLast,
                ..VERIFY
            },
        ),
    ] {
        assert_eq!(launch.chosen(), wanted, "{launch:?}");
    }
    // A prefill takes all of these states.
    for launch in [
        Launch {
            state: F32,
            ..VERIFY
        },
        Launch {
            layout: StateLayout::VLast,
            ..VERIFY
        },
        Launch { dim: 96, ..VERIFY },
    ] {
        assert_eq!(
            Launch {
                tokens: 17,
                ..launch
            }
            .chosen(),
            Chunked
        );
    }
}

/// On a GPU without clusters, drafts of a layer that would need clusters are `Recurrent`, unless the caller names another
/// formulation.
#[test]
fn a_gpu_without_clusters_has_a_choice_of_its_own() {
    let family = |launch: Launch, formulation, capability| {
        launch.with(formulation, |work| {
            let recipe = work.recipe_for(82, capability);
            let entry = recipe.map(|recipe| recipe.kernel.entry());
            entry.map(|entry| entry.computes().unwrap().family)
        })
    };
    for (conv, norm) in [(true, false), (false, true)] {
        let layer = Launch {
            conv,
            norm,
            ratio: 2,
            ..VERIFY
        };
        assert_eq!(
            family(layer, Auto, (9, 0)).unwrap(),
            Family::PARALLEL.in_layer()
        );
        assert_eq!(
            family(layer, Auto, (8, 6)).unwrap(),
            Family::RECURRENT.in_layer()
        );
        let refused = family(layer, Parallel, (8, 6)).unwrap_err().to_string();
        assert!(refused.contains("without clusters of blocks"), "{refused}");
        // With one value head per query/key head, a cluster has one block.
        let alone = Launch { ratio: 1, ..layer };
        assert_eq!(
            family(alone, Auto, (8, 6)).unwrap(),
            Family::PARALLEL.in_layer()
        );
        // On this GPU, a block has no room for a whole head of KDA's f32 states.
        let kda = Launch {
            kda: true,
            state: F32,
            ..alone
        };
        assert_eq!(
            family(kda, Auto, (8, 6)).unwrap(),
            Family::RECURRENT.in_layer()
        );
    }
    assert_eq!(family(VERIFY, Auto, (8, 6)).unwrap(), Family::PARALLEL);
}

/// A cluster has all value heads of a query/key head if they are computed together.
#[test]
fn a_layers_value_heads_decide_where_clusters_have_them() {
    for (conv, norm) in [(true, false), (false, true), (true, true)] {
        for (kda, most) in [(false, 8), (true, 4)] {
            for previous in [0, 4] {
                let of = |ratio| Launch {
                    kda,
                    conv,
                    norm,
                    ratio,
                    previous,
                    ..VERIFY
                };
                let (takes, many) = (of(most), of(most + 1));
                assert_eq!(takes.chosen(), Parallel, "{takes:?}");
                assert_eq!(many.chosen(), Recurrent, "{many:?}");
                assert!(takes.check(Auto).is_ok() && many.check(Parallel).is_err());
            }
        }
    }
    let commit = |ratio| Launch {
        tokens: 0,
        previous: 4,
        conv: true,
        ratio,
        ..VERIFY
    };
    assert_eq!(
        [commit(8), commit(9)].map(|it| it.chosen()),
        [Parallel, Recurrent]
    );
    // Without a convolution and a norm, a block has one value head.
    assert_eq!(Launch { ratio: 9, ..VERIFY }.chosen(), Parallel);
}

/// The ring decides whether drafts are possible. Its steps and its flush agree.
#[test]
fn a_ring_decides_for_its_steps_and_its_flush() {
    let of_drafts = [
        Ring {
            most: 9,
            entries: 10,
            ..RING
        },
        Ring {
            entries: 10,
            ..RING
        },
        Ring {
            updates: Bf16,
            ..RING
        },
    ];
    for (kda, dim) in [(false, 64), (false, 128), (true, 128)] {
        let of = |tokens: usize, ring: Ring| Launch {
            kda,
            dim,
            tokens,
            ring: Some(ring),
            ..DEFERRED
        };
        for tokens in [0, 1] {
            assert_eq!(of(tokens, RING).chosen(), Recurrent, "{tokens}");
            for ring in of_drafts {
                let chosen = of(tokens, ring).chosen();
                assert_eq!(chosen, Parallel, "{:?}", of(tokens, ring));
            }
        }
        // R is at least N + T.
        for tokens in [2, 8] {
            let ring = Ring {
                entries: 8 + tokens,
                ..RING
            };
            assert_eq!(of(tokens, ring).chosen(), Parallel);
        }
        assert_eq!(
            of(
                9,
                Ring {
                    entries: 25,
                    most: 16,
                    ..RING
                }
            )
            .chosen(),
            Recurrent
        );
    }
    let more = Ring {
        entries: 10,
        ..RING
    };
    for launch in [
        Launch {
            state: F32,
            ..DEFERRED
        },
        Launch {
            state: F16,
            ..DEFERRED
        },
        Launch {
            dim: 96,
            ..DEFERRED
        },
        Launch {
            kda: true,
            dim: 64,
            ..DEFERRED
        },
    ] {
        for tokens in [0, 1, 2] {
            let launch = Launch {
                tokens,
                ring: Some(more),
                ..launch
            };
            assert_eq!(launch.chosen(), Recurrent, "{launch:?}");
        }
    }
    // A window that moves with every token, and a deferred window.
    let conv = |tokens, ring| Launch {
        conv: true,
        tokens,
        ring: Some(ring),
        ..DEFERRED
    };
    assert_eq!(conv(1, RING).chosen(), Recurrent);
    assert_eq!(conv(1, more).chosen(), Recurrent);
    for tokens in [0, 1, 4] {
        let waits = Ring {
            inputs: true,
            entries: 12,
            ..RING
        };
        assert_eq!(conv(tokens, waits).chosen(), Parallel);
    }
    let norm = |kda, ratio| Launch {
        kda,
        norm: true,
        ratio,
        ring: Some(more),
        ..DEFERRED
    };
    for (kda, ratio, wanted) in [
        (false, 8, Parallel),
        (false, 9, Recurrent),
        (true, 4, Parallel),
        (true, 5, Recurrent),
    ] {
        assert_eq!(norm(kda, ratio).chosen(), wanted, "{kda}, {ratio}");
    }
}

/// B, P, the total of packed rows, addresses and strides do not change the choice.
#[test]
fn rows_and_addresses_do_not_decide() {
    for rows in [0, 1, 2, 4096] {
        let of = |heads| at(0x1_0002, Bf16, &[rows, 4, heads, 64]);
        let gate = tensor(F32, &[rows, 4, 4]);
        let states = States::update(tensor(Bf16, &[rows, 4, 64, 64]));
        let inputs = Inputs::qkv(of(2), of(2), of(4));
        let step = Gdn::new(inputs, GdnGates::given(gate, gate), of(4), states);
        assert_eq!(step.formulation(), Parallel);
        let of_total = |heads| tensor(Bf16, &[1, 100 * rows, heads, 64]);
        let gate = tensor(F32, &[1, 100 * rows, 4]);
        let inputs = Inputs::qkv(of_total(2), of_total(2), of_total(4));
        let step = Gdn::new(inputs, GdnGates::given(gate, gate), of_total(4), states);
        assert_eq!(
            step.packed(tensor(I32, &[rows + 1]), 4).formulation(),
            Parallel
        );
        assert_eq!(
            step.packed(tensor(I32, &[rows + 1]), 1).formulation(),
            Recurrent
        );
    }
}

/// `Auto` accepts every launch that some formulation takes, and equals the launch that names the choice.
#[test]
fn what_any_formulation_takes_is_taken_without_its_name() {
    let mut counts = [0; 4];
    let mut check = |launch: Launch| {
        let chosen = launch.chosen();
        assert_ne!(chosen, Auto);
        let named = [Recurrent, Parallel, Chunked].map(|formulation| {
            assert_eq!(
                launch.with(formulation, |work| work.formulation()),
                formulation
            );
            (formulation, launch.check(formulation))
        });
        match launch.check(Auto) {
            Ok(problem) => {
                let same = named.iter().find(|(formulation, _)| *formulation == chosen);
                assert_eq!(same.unwrap().1.as_ref(), Ok(&problem), "{launch:?}");
                counts[chosen as usize] += 1;
            }
            Err(message) => {
                // In the recurrent formulation, a block has no room for 9 to 16 tokens of many value heads. The caller has to
                // name `Chunked`.
                let no_room = message.contains("by the shared memory of a block");
                let taken = named.iter().find(|(formulation, checked)| {
                    checked.is_ok() && !(no_room && *formulation == Chunked)
                });
                assert!(taken.is_none(), "{launch:?}: {taken:?}, not {message}");
                let told = ["ormulation", "recurrent", "parallel", "chunked"];
                let told = told.into_iter().find(|word| message.contains(word));
                assert!(told.is_none(), "{launch:?}: {message}");
                counts[0] += 1;
            }
        }
    };
    let states = [
        (F32, StateLayout::KLast),
        (F16, StateLayout::KLast),
        (Bf16, StateLayout::KLast),
        (Bf16, StateLayout::VLast),
    ];
    let around = [(false, false), (true, false), (false, true)];
    for kda in [false, true] {
        for (state, layout) in states {
            for (dim, ratio) in [(64, 1), (96, 1), (128, 2), (128, 8), (64, 9), (128, 5)] {
                for (conv, norm) in around {
                    let of = Launch {
                        kda,
                        state,
                        layout,
                        dim,
                        ratio,
                        conv,
                        norm,
                        ..VERIFY
                    };
                    for tokens in [0, 1, 2, 8, 9, 16, 17, 100] {
                        for previous in [0, 1, 8, 9, 17] {
                            if tokens + previous == 0 || tokens == 0 && norm {
                                continue;
                            }
                            check(Launch {
                                tokens,
                                previous,
                                ..of
                            });
                        }
                        if tokens == 0 {
                            continue;
                        }
                        for keep in [Keep::Nothing, Keep::Snapshots, Keep::TokenSlots] {
                            check(Launch {
                                tokens,
                                keep,
                                packed: tokens % 2 == 0,
                                ..of
                            });
                        }
                        use OfPrefill::{Checkpoints, Positions, Workspace};
                        for it in [Positions, Checkpoints, Workspace] {
                            check(Launch {
                                tokens,
                                of_prefill: Some(it),
                                ..of
                            });
                        }
                    }
                    for tokens in [0, 1, 2, 8, 9, 17] {
                        if tokens == 0 && norm {
                            continue;
                        }
                        for (most, entries) in [(8, 9), (8, 16), (9, 10), (16, 24), (17, 33)] {
                            for (updates, inputs) in [(F32, false), (Bf16, false), (F32, true)] {
                                let ring = Some(Ring {
                                    most,
                                    entries,
                                    updates,
                                    inputs,
                                });
                                check(Launch { tokens, ring, ..of });
                                let of_prefill = Some(OfPrefill::Positions);
                                check(Launch {
                                    tokens,
                                    ring,
                                    of_prefill,
                                    ..of
                                });
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(counts.iter().all(|&count| count > 100), "{counts:?}");
}

/// If neither a prefill nor drafts take a launch with `Auto`, the error names the argument that decided.
#[test]
fn errors_name_what_has_decided() {
    let long = Launch {
        tokens: 17,
        ..VERIFY
    };
    for (launch, parts) in [
        (
            Launch {
                keep: Keep::Snapshots,
                ..long
            },
            ["T above 16 and snapshots exclude each other", "checkpoints"],
        ),
        (
            Launch {
                keep: Keep::Nothing,
                ..long
            },
            ["T above 16 and read-only states", "a prefill"],
        ),
        (
            Launch {
                previous: 4,
                ..long
            },
            ["T above 16 and previous", "a prefill"],
        ),
        (
            Launch {
                of_prefill: Some(OfPrefill::Workspace),
                previous: 4,
                ..VERIFY
            },
            ["workspace and previous", "a prefill"],
        ),
        (
            Launch {
                of_prefill: Some(OfPrefill::Positions),
                ..DEFERRED
            },
            ["pending and positions", "they are of a prefill"],
        ),
        (
            Launch {
                tokens: 2,
                state: F32,
                ..DEFERRED
            },
            ["T with pending = 2", "1, or up to 8 of bf16 states"],
        ),
        (
            Launch {
                tokens: 17,
                ..DEFERRED
            },
            ["T with pending = 17", "1, or up to 8 of bf16 states"],
        ),
        (
            Launch {
                state: F32,
                ring: Some(Ring {
                    updates: Bf16,
                    ..RING
                }),
                ..DEFERRED
            },
            ["updates", "f32; bf16 is for bf16 states"],
        ),
        (
            Launch {
                state: F16,
                conv: true,
                ring: Some(Ring {
                    inputs: true,
                    ..RING
                }),
                ..DEFERRED
            },
            ["inputs and an f16 state", "drafts of bf16 states"],
        ),
        (
            Launch {
                tokens: 4,
                conv: true,
                ring: Some(Ring {
                    entries: 12,
                    ..RING
                }),
                ..DEFERRED
            },
            ["inputs", "missing"],
        ),
        (
            Launch {
                previous: 17,
                ..VERIFY
            },
            ["T' = 17", "1 to 16"],
        ),
    ] {
        let message = launch.refused();
        assert!(
            parts.iter().all(|part| message.contains(part)),
            "wanted {parts:?}, got: {message}"
        );
    }
}

//! An engine on random schedules: it admits sequences that continue kept prefixes, prefills them in pieces with checkpoints,
//! decodes and verifies drafts, rejects some, commits, and reuses each slot immediately. Each output and each last state is near
//! that of the sequence alone, token by token. The guide's page on prefixes shows [`Slots`].

use std::collections::BTreeMap;

use gated_delta::layer::{GdnLayer, GdnParameters, Rows, Weights};
use gated_delta::{
    DType, DeviceElement, Inputs, Library, Options, StateLayout, States, StreamRef, Tensor, Work,
};
use gated_delta_reference::conv::Conv;
use gated_delta_reference::gate::Activation;
use gated_delta_reference::gdn::Gates;
use gated_delta_reference::judge::{Judgement, judge};
use gated_delta_reference::layer::{Layer, Pools, Projection};
use gated_delta_reference::norm::GatedNorm;
use gated_delta_reference::recurrent::{Recurrent, TokenGates};
use gated_delta_reference::tolerance::{self, Tolerance, within};
use gated_delta_test_support::{depth, seed};
use half::bf16;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

/// H, HV, K and V.
const H: usize = 1;
const HV: usize = 1;
const K: usize = 64;
/// D, and W.
const D: usize = (2 * H + HV) * K;
const TAPS: usize = 4;
/// Elements of a token's `[q | k | v | z | b | a]`.
const ROW: usize = D + HV * K + 2 * HV;
const EPS: f32 = 1e-6;
/// P: few slots, so that prefixes are evicted. There are at most [`SEQUENCES`] sequences.
const SLOTS: usize = 18;
const SEQUENCES: usize = 3;
/// Tokens from one checkpoint to the next, and C.
const EVERY: usize = 64;
const CHECKPOINTS: usize = 1;
/// T and T′ of drafts.
const DRAFTS: usize = 4;
/// Steps of a schedule.
const STEPS: usize = 60;
/// Number of different tokens.
const VOCABULARY: u32 = 50;

/// The slots of a pool, the same in all layers. A slot is free, of a sequence, or of a kept prefix.
pub struct Slots {
    free: Vec<i32>,
    /// Kept prefixes: a slot holds the state and the window after these tokens.
    prefixes: BTreeMap<Vec<u32>, i32>,
}

impl Slots {
    /// A slot for a launch to write, which may hold anything. If none is free, a prefix loses its slot.
    pub fn take(&mut self) -> Option<i32> {
        let evict = || self.prefixes.pop_first().map(|(_, slot)| slot);
        self.free.pop().or_else(evict)
    }

    /// Takes a slot back when the last launch that uses it is enqueued.
    pub fn give(&mut self, slot: i32) {
        self.free.push(slot);
    }

    /// Keeps the state in `slot` for sequences that begin with `tokens`.
    pub fn keep(&mut self, tokens: &[u32], slot: i32) {
        let twice = self.prefixes.insert(tokens.to_vec(), slot);
        self.free.extend(twice);
    }

    /// The longest kept prefix of a prompt, and its slot. At least one token is left, for the output after the prompt.
    pub fn longest(&self, prompt: &[u32]) -> Option<(usize, i32)> {
        let kept = |len: usize| Some((len, *self.prefixes.get(&prompt[..len])?));
        (1..prompt.len()).rev().find_map(kept)
    }
}

/// The way in which the states of drafts are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// One slot. A resume or a commit adds the accepted tokens of the last step.
    Resume,
    /// A slot for the state after each of [`DRAFTS`] tokens, and one wide window in the first of them.
    TokenSlots,
}

impl Way {
    /// Slots of a sequence.
    fn slots(self) -> usize {
        match self {
            Self::Resume => 1,
            Self::TokenSlots => DRAFTS,
        }
    }

    /// Inputs of each channel in a slot of the windows.
    fn inputs(self) -> usize {
        TAPS - 2 + self.slots()
    }
}

/// A sequence that the engine serves.
struct Sequence {
    tokens: Vec<u32>,
    /// Length of the prompt.
    prompt: usize,
    /// Number of tokens whose outputs are known: those of the state, and the accepted ones of the last step.
    done: usize,
    slots: Vec<i32>,
    /// Whether its slot holds a state. A row without one is fresh.
    written: bool,
    /// Tokens of the last step that are not in the state yet, and how many of them are accepted.
    last: Vec<u32>,
    /// Accepted tokens of the last step.
    accepted: usize,
    /// Position of the first output, and all outputs from there on.
    begin: usize,
    outputs: Vec<f32>,
}

/// A row of a launch.
#[derive(Clone, Default)]
struct Row {
    tokens: Vec<u32>,
    last: Vec<u32>,
    keep: i32,
    read: i32,
    write: i32,
    fresh: bool,
    at: usize,
    checkpoint: i32,
    token_slots: Vec<i32>,
    accepted: i32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Launch {
    Prefill,
    Decode,
    Verify,
    Resume,
    Commit,
    PerToken,
}

/// Weights, and the projection of each token.
struct Model {
    conv: Vec<f32>,
    norm: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    rows: Vec<Vec<f32>>,
}

impl Model {
    fn random(rng: &mut SmallRng) -> Self {
        let mut of = |len: usize, low: f32, high: f32| -> Vec<f32> {
            (0..len).map(|_| rng.random_range(low..high)).collect()
        };
        Self {
            conv: of(D * TAPS, -0.7, 0.7),
            norm: of(K, 0.5, 1.5),
            // Slow decays: the state after a prompt still shows its first tokens.
            a_log: of(HV, -4.5, -3.5),
            dt_bias: of(HV, -1.0, 0.0),
            rows: (0..VOCABULARY).map(|_| of(ROW, -1.5, 1.5)).collect(),
        }
    }

    /// The results for a sequence alone, token by token, in f64, and the bounds on the errors.
    fn alone(&self, tokens: &[u32], tolerance: &Tolerance) -> Judgement {
        let part = |from: usize, len: usize| -> Vec<f64> {
            let rows = tokens.iter().map(|token| &self.rows[*token as usize]);
            rows.flat_map(|row| row[from..from + len].iter().map(|x| f64::from(*x)))
                .collect()
        };
        let doubles = |of: &[f32]| of.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let (z, b, a) = (
            part(D, HV * K),
            part(D + HV * K, HV),
            part(D + HV * K + HV, HV),
        );
        let gates = TokenGates::Gdn(Gates::Raw {
            a: &a,
            b: &b,
            a_log: &doubles(&self.a_log),
            dt_bias: &doubles(&self.dt_bias),
            beta_scale: 1.0,
        });
        let problem = Layer {
            step: Recurrent::new([1, tokens.len()], [H, HV], [K, K], gates),
            projection: Some(Projection {
                x: &part(0, D),
                previous: None,
                conv: Conv {
                    channels: D,
                    width: TAPS,
                    weight: &doubles(&self.conv),
                    bias: None,
                    activation: Activation::Silu,
                },
            }),
            norm: Some(GatedNorm {
                z: &z,
                weight: &doubles(&self.norm),
                eps: EPS.into(),
                activation: Activation::Silu,
            }),
            fresh: None,
            checkpoints: None,
        };
        let pools = Pools {
            states: &[0.0; HV * K * K],
            windows: Some(&[0.0; D * (TAPS - 1)]),
            ..Pools::default()
        };
        judge(&problem, &pools, None, tolerance, 0.0).unwrap()
    }
}

/// An engine with one layer.
struct Engine<'a, S> {
    model: &'a Model,
    layout: StateLayout,
    way: Way,
    states: Vec<S>,
    windows: Vec<f32>,
    slots: Slots,
    running: Vec<Sequence>,
    /// Prompts that sequences begin with.
    common: [Vec<u32>; 2],
    rng: SmallRng,
    /// Numbers of finished sequences, and of those that continued a kept prefix.
    finished: [usize; 2],
}

impl<'a, S: DeviceElement + Copy + Into<f64>> Engine<'a, S> {
    /// An engine whose pools are full of NaN.
    fn new(model: &'a Model, layout: StateLayout, way: Way, nan: S, seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let common = [(); 2].map(|()| words(&mut rng, 2 * EVERY + 2));
        Self {
            model,
            layout,
            way,
            states: vec![nan; SLOTS * HV * K * K],
            windows: vec![f32::NAN; SLOTS * D * way.inputs()],
            slots: Slots {
                free: (0..SLOTS as i32).collect(),
                prefixes: BTreeMap::new(),
            },
            running: Vec::new(),
            common,
            rng,
            finished: [0; 2],
        }
    }

    /// Launches rows and returns o of all their tokens. What a row does not have is NaN.
    fn launch(&mut self, how: Launch, rows: &[Row]) -> Vec<f32> {
        let model = self.model;
        let b = rows.len();
        let project = |tokens: &[u32], len: usize| {
            let all = tokens.iter().flat_map(|token| &model.rows[*token as usize]);
            let mut all: Vec<f32> = all.copied().collect();
            all.resize(len * ROW, f32::NAN);
            all
        };
        let (mut new, mut last, mut bounds) = (Vec::new(), Vec::new(), vec![0i32]);
        for row in rows {
            new.extend(project(&row.tokens, row.tokens.len()));
            last.extend(project(&row.last, DRAFTS));
            bounds.push((new.len() / ROW) as i32);
        }
        let total = new.len() / ROW;
        let longest = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
        let mut o = vec![f32::NAN; total * HV * K];
        let of = |index: fn(&Row) -> i32| rows.iter().map(index).collect::<Vec<i32>>();
        let (read, write) = (of(|row| row.read), of(|row| row.write));
        let (keep, fresh) = (of(|row| row.keep), of(|row| row.fresh.into()));
        let (at, accepted) = (of(|row| row.at as i32), of(|row| row.accepted));
        let checkpoints = of(|row| row.checkpoint);
        let table: Vec<i32> = rows
            .iter()
            .flat_map(|row| &row.token_slots)
            .copied()
            .collect();
        fn column(of: &[i32]) -> Tensor<'_> {
            Tensor::from_slice(of, &[of.len()]).unwrap()
        }

        let states = Tensor::from_slice_mut(&mut self.states, &[SLOTS, HV, K, K]).unwrap();
        let dims = [SLOTS, D, self.way.inputs()];
        let wide = Tensor::from_slice_mut(&mut self.windows, &dims).unwrap();
        let windows = wide.narrow(2, 0, TAPS - 1).unwrap();
        let floats = |of: &'a [f32], dims: &[usize]| Tensor::from_slice(of, dims).unwrap();
        let parameters =
            GdnParameters::new(floats(&model.a_log, &[HV]), floats(&model.dt_bias, &[HV]));
        let (conv, norm) = (floats(&model.conv, &[D, TAPS]), floats(&model.norm, &[K]));
        let weights = Weights::new(H, conv, parameters, norm, EPS);
        let options = Options::default().state_layout(self.layout);
        let layer = GdnLayer::new(weights, states, windows, options).unwrap();

        let is_packed = matches!(how, Launch::Prefill | Launch::PerToken);
        let outer = if is_packed { [1, total] } else { [b, longest] };
        let tokens = Tensor::from_slice(&new, &[outer[0], outer[1], ROW]).unwrap();
        let before = Tensor::from_slice(&last, &[b, DRAFTS, ROW]).unwrap();
        let [tokens, before] = [tokens, before].map(|row| layer.projection(row).unwrap());
        let out = Tensor::from_slice_mut(&mut o, &[outer[0], outer[1], HV, K]).unwrap();
        let places = Rows::new(column(&read)).fresh(column(&fresh));
        let places = places.write_slots(column(&write));
        let library = Library::simulator();
        let run = |work: &dyn Work| {
            // SAFETY: a simulated launch is done when it returns, and no row writes a slot that another row uses.
            unsafe { library.launch(StreamRef::default_stream(), work) }.unwrap();
        };
        let bounds = Tensor::from_slice(&bounds, &[b + 1]).unwrap();
        match how {
            Launch::Prefill => {
                let kept = Tensor::from_slice(&checkpoints, &[b, CHECKPOINTS]).unwrap();
                let places = places.packed(bounds, longest).positions(column(&at));
                let step = layer.prefill(&tokens, &places.checkpoints(EVERY, kept), out);
                let mut scratch = vec![f32::NAN; step.workspace_bytes().unwrap() / 4 + 4];
                let skipped = scratch.as_ptr().align_offset(16);
                let scratch = &mut scratch[skipped..];
                let elements = scratch.len();
                run(&step.workspace(Tensor::from_slice_mut(scratch, &[elements]).unwrap()));
            }
            Launch::Decode => run(&layer.decode(&tokens, &places, out)),
            Launch::Verify => run(&layer.verify(&tokens, &places, out)),
            Launch::Resume => {
                run(&layer.resume(&tokens, &before, column(&keep), &places, out));
            }
            Launch::Commit => run(&layer.commit(&before, column(&keep), &places)),
            Launch::PerToken => {
                let places = Rows::new(column(&read)).fresh(column(&fresh));
                let mut step = layer.decode(&tokens, &places.packed(bounds, DRAFTS), out);
                let table = Tensor::from_slice(&table, &[b, DRAFTS]).unwrap();
                let per_token = States::per_token(states, table);
                step.states = per_token.accepted(column(&accepted)).into();
                if let Inputs::Conv(conv) = &mut step.inputs {
                    conv.windows = wide;
                }
                run(&step);
            }
        }
        o
    }

    fn one_in(&mut self, count: u32) -> bool {
        self.rng.random_ratio(1, count)
    }

    /// Admits a sequence. Its prompt begins as a common one does, or has no token.
    fn admit(&mut self) {
        let common = self.common.choose(&mut self.rng).unwrap();
        let shared = *[0, EVERY + 1, EVERY + 1, common.len()]
            .choose(&mut self.rng)
            .unwrap();
        let mut tokens = common[..shared].to_vec();
        let more = self.rng.random_range(0..6);
        tokens.extend(words(&mut self.rng, more));
        let prompt = tokens.len();
        let answer = self.rng.random_range(2..10);
        tokens.extend(words(&mut self.rng, answer));
        self.running.push(Sequence {
            tokens,
            prompt,
            done: 0,
            slots: (0..self.way.slots())
                .map(|_| self.slots.take().unwrap())
                .collect(),
            written: false,
            last: Vec::new(),
            accepted: 1,
            begin: 0,
            outputs: Vec::new(),
        });
    }

    /// Prefills pieces of prompts, together with single tokens of other sequences. A slot for a checkpoint is taken before a
    /// prefix is looked up, because the taken slot may have held a prefix.
    fn prefill(&mut self) {
        let is_in_prompt = |it: &Sequence| it.done < it.prompt;
        let is_beside = |it: &Sequence| {
            it.slots.len() == 1 && it.written && it.last.is_empty() && it.done < it.tokens.len()
        };
        let with_others = self.one_in(2);
        let taken = |it: &Sequence| is_in_prompt(it) || (with_others && is_beside(it));
        if !self.running.iter().any(is_in_prompt) {
            return;
        }
        let chosen: Vec<usize> = (0..self.running.len())
            .filter(|i| taken(&self.running[*i]))
            .collect();
        let kept: Vec<i32> = chosen.iter().map(|_| self.slots.take().unwrap()).collect();
        let mut rows = Vec::new();
        for (&i, &checkpoint) in chosen.iter().zip(&kept) {
            let it = &mut self.running[i];
            let mut read = it.slots[0];
            if !it.written
                && let Some((len, slot)) = self.slots.longest(&it.tokens[..it.prompt])
            {
                (it.done, it.begin, read) = (len, len, slot);
            }
            let left = it.prompt.saturating_sub(it.done).clamp(1, EVERY + 6);
            let tokens = it.done..it.done + self.rng.random_range(1..=left);
            rows.push(Row {
                tokens: it.tokens[tokens].to_vec(),
                read,
                write: it.slots[0],
                fresh: it.done == 0,
                at: it.done,
                checkpoint,
                ..Row::default()
            });
        }
        let o = self.launch(Launch::Prefill, &rows);
        let mut o = &o[..];
        for (i, row) in chosen.into_iter().zip(rows) {
            let it = &mut self.running[i];
            let (of_row, rest) = o.split_at(row.tokens.len() * HV * K);
            (it.written, o) = (true, rest);
            it.outputs.extend(of_row);
            it.done += row.tokens.len();
            let multiple = (row.at / EVERY + 1) * EVERY;
            match multiple <= it.done {
                true => self.slots.keep(&it.tokens[..multiple], row.checkpoint),
                false => self.slots.give(row.checkpoint),
            }
        }
    }

    /// A decode, a verify or a resume of all sequences past their prompts, with the right token first and arbitrary drafts after
    /// it.
    fn step(&mut self) {
        let tokens = *[1, 1, 2, 3, DRAFTS].choose(&mut self.rng).unwrap();
        let chosen: Vec<usize> = (0..self.running.len())
            .filter(|i| {
                let it = &self.running[*i];
                it.done >= it.prompt && it.done < it.tokens.len()
            })
            .collect();
        let mut rows = Vec::new();
        let mut right = Vec::new();
        for &i in &chosen {
            let it = &self.running[i];
            let tokens = match self.way {
                Way::Resume => tokens,
                Way::TokenSlots => self.rng.random_range(1..=DRAFTS),
            };
            let left = it.tokens.len() - it.done;
            let accepted = self.rng.random_range(1..=tokens.min(left));
            let mut drafts = it.tokens[it.done..it.done + accepted].to_vec();
            drafts.extend(words(&mut self.rng, tokens - accepted));
            right.push(accepted);
            rows.push(Row {
                tokens: drafts,
                last: it.last.clone(),
                keep: if it.last.is_empty() {
                    0
                } else {
                    it.accepted as i32
                },
                read: it.slots[0],
                write: it.slots[0],
                fresh: !it.written,
                token_slots: it.slots.clone(),
                accepted: it.accepted as i32,
                ..Row::default()
            });
        }
        if rows.is_empty() {
            return;
        }
        let how = match (self.way, rows.iter().any(|row| !row.last.is_empty())) {
            (Way::TokenSlots, _) => Launch::PerToken,
            (_, true) => Launch::Resume,
            _ if tokens == 1 => Launch::Decode,
            _ => Launch::Verify,
        };
        let o = self.launch(how, &rows);
        let mut o = &o[..];
        for ((i, row), accepted) in chosen.iter().zip(rows).zip(right) {
            let it = &mut self.running[*i];
            let (of_row, rest) = o.split_at(row.tokens.len() * HV * K);
            o = rest;
            it.outputs.extend(&of_row[..accepted * HV * K]);
            (it.done, it.accepted) = (it.done + accepted, accepted);
            it.written |= how != Launch::Verify;
            it.last = match how {
                Launch::Verify | Launch::Resume => row.tokens,
                _ => Vec::new(),
            };
        }
        if self.way == Way::TokenSlots {
            self.turn_token_slots(&chosen);
        }
    }

    /// Gives away all token slots but that of the window, the first, and that of the state, and takes others.
    fn turn_token_slots(&mut self, chosen: &[usize]) {
        let others = |it: &Sequence| (1..DRAFTS).filter(|t| t + 1 != it.accepted).collect();
        let others: Vec<(usize, Vec<usize>)> = chosen
            .iter()
            .map(|&i| (i, others(&self.running[i])))
            .collect();
        for (i, of_row) in &others {
            for &t in of_row {
                self.slots.give(self.running[*i].slots[t]);
            }
        }
        for (i, of_row) in others {
            for t in of_row {
                self.running[i].slots[t] = self.slots.take().unwrap();
            }
        }
    }

    /// Commits the accepted tokens of some sequences, in place or to a slot that keeps them as a prefix.
    fn commit(&mut self) {
        let mut rows = Vec::new();
        for i in 0..self.running.len() {
            let keeps = self.one_in(2);
            let it = &self.running[i];
            // With token slots a state and its window are in one slot only after a single accepted token.
            let is_whole = it.slots.len() == 1 || it.accepted == 1;
            if !it.written && it.last.is_empty() || !is_whole || it.done == 0 {
                continue;
            }
            let taken = keeps.then(|| self.slots.take().unwrap());
            let write = taken.unwrap_or(it.slots[0]);
            rows.push((i, keeps, self.running[i].committed(write)));
        }
        if rows.is_empty() {
            return;
        }
        let of_launch: Vec<Row> = rows.iter().map(|(.., row)| row.clone()).collect();
        self.launch(Launch::Commit, &of_launch);
        for (i, keeps, row) in rows {
            let it = &mut self.running[i];
            if keeps {
                self.slots.keep(&it.tokens[..it.done], row.write);
            } else {
                (it.written, it.last) = (true, Vec::new());
            }
        }
    }

    /// Compares the sequences that are done, or all, with each alone, and gives their slots away.
    fn finish(&mut self, all: bool) {
        let is_done = |it: &Sequence| (all || it.done == it.tokens.len()) && it.done > it.begin;
        while let Some(i) = self.running.iter().position(is_done) {
            let mut it = self.running.remove(i);
            if !it.last.is_empty() {
                self.launch(Launch::Commit, &[it.committed(it.slots[0])]);
                it.accepted = 1;
            }
            self.compare(&it);
            self.finished[0] += 1;
            self.finished[1] += usize::from(it.begin > 0);
            it.slots.into_iter().for_each(|slot| self.slots.give(slot));
        }
    }

    fn compare(&self, it: &Sequence) {
        // Errors relative to ‖S‖ and to ‖q̂‖ ‖S‖: a norm enlarges those of an o that is small by chance.
        let (output, state) = match S::DTYPE {
            DType::F32 => (2e-4, 1e-3),
            _ => (1e-3, 1e-2),
        };
        let tolerance = Tolerance {
            state,
            output,
            ..Tolerance::RECURRENT
        };
        let alone = self.model.alone(&it.tokens[..it.done], &tolerance);
        let near = |what: &str, got: &[f64], wanted: &[f64], allowed: f64| {
            let part = within(got, wanted, tolerance::DType::F32, allowed);
            part.unwrap_or_else(|off| panic!("{what}: {off}"));
        };
        let outputs: Vec<f64> = it.outputs.iter().map(|x| f64::from(*x)).collect();
        let wanted = &alone.o[it.begin * HV * K..];
        assert_eq!(outputs.len(), wanted.len());
        let heads = outputs.chunks(K).zip(wanted.chunks(K));
        for (i, (got, wanted)) in heads.enumerate() {
            let i = it.begin * HV + i;
            near(
                &format!("o of token {}", i / HV),
                got,
                wanted,
                alone.allowed.o[i],
            );
        }
        let accepted = if self.way == Way::TokenSlots {
            it.accepted
        } else {
            1
        };
        let slot = it.slots[accepted - 1] as usize;
        let states: Vec<f64> = self.states[slot * HV * K * K..][..HV * K * K]
            .iter()
            .map(|x| (*x).into())
            .collect();
        let klast = match self.layout {
            StateLayout::KLast => states,
            StateLayout::VLast => {
                let at = |i: usize| i / (K * K) * K * K + i % K * K + i / K % K;
                (0..states.len()).map(|i| states[at(i)]).collect()
            }
        };
        near("the state", &klast, &alone.states, alone.allowed.states[0]);
        let inputs = self.way.inputs();
        let windows = &self.windows[it.slots[0] as usize * D * inputs..][..D * inputs];
        let windows: Vec<f64> = windows
            .chunks(inputs)
            .flat_map(|of| &of[accepted - 1..][..TAPS - 1])
            .map(|x| f64::from(*x))
            .collect();
        assert!(windows == alone.windows.unwrap(), "the window differs");
    }

    /// Ends a sequence before its end, or evicts a prefix.
    fn drop_one(&mut self) {
        if self.one_in(2) && !self.running.is_empty() {
            let i = self.rng.random_range(0..self.running.len());
            let slots = self.running.remove(i).slots;
            slots.into_iter().for_each(|slot| self.slots.give(slot));
        } else if let Some((_, slot)) = self.slots.prefixes.pop_last() {
            self.slots.give(slot);
        }
    }

    fn serve(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.rng.random_range(0..16) {
                0..=3 if self.running.len() < SEQUENCES => self.admit(),
                0..=6 => self.prefill(),
                7..=12 => self.step(),
                13..=14 => self.commit(),
                _ => self.drop_one(),
            }
            self.finish(false);
        }
        self.finish(true);
    }
}

impl Sequence {
    /// The row of a commit to slot `write`.
    fn committed(&self, write: i32) -> Row {
        Row {
            last: self.last.clone(),
            keep: if self.last.is_empty() {
                0
            } else {
                self.accepted as i32
            },
            read: self.slots[0],
            write,
            fresh: !self.written,
            ..Row::default()
        }
    }
}

fn words(rng: &mut SmallRng, len: usize) -> Vec<u32> {
    (0..len).map(|_| rng.random_range(0..VOCABULARY)).collect()
}

/// Serves a random schedule of each layout and way, with states of type `S`.
fn serves<S: DeviceElement + Copy + Into<f64>>(nan: S, cases: [(StateLayout, Way); 3]) {
    let model = Model::random(&mut SmallRng::seed_from_u64(1));
    let mut finished = [0; 2];
    for (layout, way) in cases {
        let seed = seed(&format!("{layout}, {way:?}"));
        println!("{layout}, {way:?}, seed {seed}");
        let mut engine = Engine::new(&model, layout, way, nan, seed);
        engine.serve(STEPS * depth() as usize);
        // A schedule may have no prompt that continues a kept prefix.
        for _ in 0..9 {
            if engine.finished[1] == 0 {
                engine.serve(STEPS);
            }
        }
        let counts = finished.iter_mut().zip(engine.finished);
        counts.for_each(|(sum, count)| *sum += count);
    }
    let [all, behind_prefixes] = finished;
    assert!(all > behind_prefixes && behind_prefixes > 0, "{finished:?}");
}

#[test]
fn schedules_on_f32_states() {
    use StateLayout::{KLast, VLast};
    let cases = [
        (KLast, Way::Resume),
        (VLast, Way::Resume),
        (VLast, Way::TokenSlots),
    ];
    serves(f32::NAN, cases);
}

#[test]
fn schedules_on_bf16_states() {
    use StateLayout::{KLast, VLast};
    let cases = [
        (KLast, Way::Resume),
        (VLast, Way::Resume),
        (KLast, Way::TokenSlots),
    ];
    serves(bf16::NAN, cases);
}

#[test]
fn the_page_shows_these_slots() {
    let page = include_str!("../../host/docs/prefixes.md");
    let (_, code) = page.split_once("BTreeMap;\n\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    assert!(code.contains("pub struct Slots"));
    assert!(include_str!("prefixes.rs").contains(code));
}

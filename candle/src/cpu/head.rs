//! The recurrence of one value head of a row.

use gated_delta::StateLayout;

use super::rows::Row;
use super::view::View;
use super::window::Convolved;
use super::{Form, Kind, Source, Tokens, Work, activate, finite_exp, sigmoid, softplus};

/// Epsilon that is added to a sum of squares before its root.
const EPSILON: f32 = 1e-6;

/// The run of one value head of a row.
pub struct Head<'w, 'a> {
    work: &'w Work<'a>,
    row: &'w Row,
    convolved: Option<&'w Convolved>,
    hv: usize,
    h: usize,
    /// State `[V, K]`.
    state: Vec<f32>,
}

/// A token in the form that the recurrence takes.
struct Token {
    q: Vec<f32>,
    /// k as given, or as the convolution made it; not normalised.
    raw_k: Vec<f32>,
    k: Vec<f32>,
    /// Length that k was divided by. An update in the ring is divided by it too.
    length: f32,
    v: Vec<f32>,
    /// One log decay, or K of them.
    log_decay: Vec<f32>,
    beta: f32,
}

impl<'w, 'a> Head<'w, 'a> {
    pub fn new(
        work: &'w Work<'a>,
        row: &'w Row,
        convolved: Option<&'w Convolved>,
        hv: usize,
    ) -> Self {
        let h = work.head_of(hv);
        let state = vec![0.0; work.heads.v * work.heads.k];
        Self {
            work,
            row,
            convolved,
            hv,
            h,
            state,
        }
    }

    /// Runs the row: reads its start state, and writes outputs and states.
    pub fn run(mut self) {
        let (work, row) = (self.work, self.row);
        let [read, written] = work.pools;
        if let (Some(slot), false) = (row.start, row.is_fresh) {
            self.load(&read, slot);
        }
        if let Some(waiting) = row.waiting {
            self.catch_up(waiting);
            if let (true, Some(slot)) = (waiting.is_flushed, row.start) {
                self.store(&written, &[slot]);
                self.round(&written);
            }
        }
        if let (Some((keep, end)), Some(previous)) = (row.commit, &work.previous) {
            for t in 0..keep {
                let token = self.previous_token(previous, t);
                self.advance(&token);
            }
            self.store(&written, &[end]);
            self.round(&written);
        }
        if let Some(end) = row.carried
            && !(row.start == Some(end) && read_is_written(work))
        {
            self.store(&written, &[end]);
        }
        let Some((new, o)) = work.new.as_ref().zip(work.o) else {
            return;
        };
        for t in 0..row.tokens.len() {
            let token = self.new_token(new, t);
            if let Some(waiting) = row.waiting {
                self.leave(&token, waiting.base + waiting.len + t);
            }
            let mut of_token = self.advance(&token);
            let [b, at] = row.token(t);
            self.norm(&mut of_token, [b, at, self.hv]);
            o.write(&[b, at, self.hv], 3, &of_token);
            let besides = row.checkpoints.iter().filter(|(at, _)| *at == t);
            for &slot in besides.map(|(_, slot)| slot).chain(&row.stores[t]) {
                self.store(&written, &[slot]);
            }
            if let Some(snapshots) = &work.snapshots {
                self.store(snapshots, &[row.b, t]);
            }
        }
    }

    /// Reads the state in `slot`.
    fn load(&mut self, pool: &View<'_>, slot: usize) {
        let k = self.work.heads.k;
        let is_v_last = self.work.options.state_layout == StateLayout::VLast;
        for (v, row) in self.state.chunks_exact_mut(k).enumerate() {
            match is_v_last {
                false => pool.read(&[slot, self.hv, v], 3, row),
                true => pool.read(&[slot, self.hv, 0, v], 2, row),
            }
        }
    }

    /// Writes the state. `at` is a slot of a pool, or a row and a token of snapshots.
    fn store(&self, pool: &View<'_>, at: &[usize]) {
        let k = self.work.heads.k;
        let is_v_last = self.work.options.state_layout == StateLayout::VLast;
        let head = [at, &[self.hv]].concat();
        let dim = head.len();
        let mut held = vec![0.0; k];
        for (v, row) in self.state.chunks_exact(k).enumerate() {
            for (held, &s) in held.iter_mut().zip(row) {
                *held = pool.stored(s);
            }
            match is_v_last {
                false => pool.write(&[&head[..], &[v]].concat(), dim + 1, &held),
                true => pool.write(&[&head[..], &[0, v]].concat(), dim, &held),
            }
        }
    }

    /// Rounds the state as it is stored.
    fn round(&mut self, pool: &View<'_>) {
        for s in &mut self.state {
            *s = pool.stored(*s);
        }
    }

    /// Adds the pending tokens to the state (flush).
    fn catch_up(&mut self, waiting: super::Waiting) {
        let (Some(ring), Some(slot)) = (&self.work.ring, self.row.start) else {
            return;
        };
        let (k, v) = (self.work.heads.k, self.work.heads.v);
        let (mut key, mut update, mut decay) = (vec![0.0; k], vec![0.0; v], vec![0.0; k]);
        for j in 0..waiting.len {
            let entry = (waiting.base + j) % ring.entries;
            ring.keys.read(&[slot, self.h, entry], 3, &mut key);
            ring.updates.read(&[slot, self.hv, entry], 3, &mut update);
            match ring.decays.rank() {
                3 => decay.fill(ring.decays.at(&[slot, self.hv, entry])),
                _ => ring.decays.read(&[slot, self.hv, entry], 3, &mut decay),
            }
            for decay in &mut decay {
                *decay = decay.exp();
            }
            for (row, u) in self.state.chunks_exact_mut(k).zip(&update) {
                for ((s, decay), key) in row.iter_mut().zip(&decay).zip(&key) {
                    *s = *s * decay + u * key;
                }
            }
        }
    }

    /// Writes a token's key, update and log decay to the ring. The state does not include the token yet.
    fn leave(&self, token: &Token, entry: usize) {
        let (Some(ring), Some(slot)) = (&self.work.ring, self.row.start) else {
            return;
        };
        let entry = entry % ring.entries;
        let first_of_head = (0..self.hv).all(|hv| self.work.head_of(hv) != self.h);
        if first_of_head {
            ring.keys.write(&[slot, self.h, entry], 3, &token.raw_k);
        }
        let decay = token.decay();
        let rows = self.state.chunks_exact(self.work.heads.k);
        let updates: Vec<f32> = rows
            .zip(&token.v)
            .map(|(row, v)| {
                let terms = row.iter().zip(&token.k).enumerate();
                let sk: f32 = terms
                    .map(|(c, (s, k))| s * decay[c % decay.len()] * k)
                    .sum();
                token.beta * (v - sk) / token.length
            })
            .collect();
        ring.updates.write(&[slot, self.hv, entry], 3, &updates);
        match ring.decays.rank() {
            3 => ring
                .decays
                .write(&[slot, self.hv, entry], 2, &token.log_decay),
            _ => ring
                .decays
                .write(&[slot, self.hv, entry], 3, &token.log_decay),
        }
    }

    /// Adds a token to the state and returns its output `[V]`.
    fn advance(&mut self, token: &Token) -> Vec<f32> {
        let (k, decay) = (self.work.heads.k, token.decay());
        let rows = self.state.chunks_exact_mut(k).zip(&token.v);
        rows.map(|(row, v)| {
            match decay[..] {
                [decay] => row.iter_mut().for_each(|s| *s *= decay),
                _ => row.iter_mut().zip(&decay).for_each(|(s, d)| *s *= d),
            }
            let delta = token.beta * (v - dot(row, &token.k));
            for (s, k) in row.iter_mut().zip(&token.k) {
                *s += delta * k;
            }
            dot(row, &token.q)
        })
        .collect()
    }

    /// Applies the gated norm to an output, if the launch has one.
    fn norm(&self, o: &mut [f32], token: [usize; 3]) {
        let Some(norm) = &self.work.norm else {
            return;
        };
        let mut z = vec![0.0; o.len()];
        norm.z.read(&token, 3, &mut z);
        let mean = dot(o, o) / o.len() as f32;
        let size = (mean + norm.eps).sqrt();
        for ((o, z), weight) in o.iter_mut().zip(z).zip(&norm.weight) {
            *o = weight * *o / size * activate(norm.activation, z);
        }
    }

    fn new_token(&self, tokens: &Tokens<'_>, t: usize) -> Token {
        let convolved = self.convolved.map(|of| &of.new[..]);
        self.token(tokens, convolved, self.row.token(t), t)
    }

    fn previous_token(&self, tokens: &Tokens<'_>, t: usize) -> Token {
        let convolved = self.convolved.map(|of| &of.previous[..]);
        self.token(tokens, convolved, [self.row.b, t], t)
    }

    /// Token t of the row, at `[b, at]` of its tensors.
    fn token(
        &self,
        tokens: &Tokens<'_>,
        convolved: Option<&[f32]>,
        [b, at]: [usize; 2],
        t: usize,
    ) -> Token {
        let of = self.work.heads;
        let (mut q, mut raw_k, mut v) = (vec![0.0; of.k], vec![0.0; of.k], vec![0.0; of.v]);
        match (&tokens.source, convolved) {
            (Source::Qkv(views), _) => {
                views[0].read(&[b, at, self.h], 3, &mut q);
                views[1].read(&[b, at, self.h], 3, &mut raw_k);
                views[2].read(&[b, at, self.hv], 3, &mut v);
            }
            (Source::X(_), Some(convolved)) => {
                let (keys, values) = (of.h * of.k, of.hv * of.v);
                let of_token = &convolved[t * (2 * keys + values)..][..2 * keys + values];
                q.copy_from_slice(&of_token[self.h * of.k..][..of.k]);
                raw_k.copy_from_slice(&of_token[keys + self.h * of.k..][..of.k]);
                v.copy_from_slice(&of_token[2 * keys + self.hv * of.v..][..of.v]);
            }
            (Source::X(_), None) => {}
        }
        let options = &self.work.options;
        let scale = options.scale.unwrap_or(1.0 / (of.k as f32).sqrt());
        let (mut k, mut length) = (raw_k.clone(), 1.0);
        if options.qk_l2norm {
            length = (dot(&k, &k) + EPSILON).sqrt();
            k.iter_mut().for_each(|k| *k /= length);
            let of_q = (dot(&q, &q) + EPSILON).sqrt();
            q.iter_mut().for_each(|q| *q /= of_q);
        }
        q.iter_mut().for_each(|q| *q *= scale);
        let form = &self.work.form;
        let beta = tokens.beta.at(&[b, at, self.hv]);
        Token {
            q,
            raw_k,
            k,
            length,
            v,
            log_decay: self.log_decay(&tokens.gate, [b, at]),
            beta: match form.beta_is_logit {
                true => form.beta_scale * sigmoid(beta),
                false => beta,
            },
        }
    }

    /// Log decays of a token: one number, with KDA one per key channel.
    fn log_decay(&self, gate: &View<'_>, [b, at]: [usize; 2]) -> Vec<f32> {
        let (form, of) = (&self.work.form, self.work.heads);
        let mut g = vec![0.0; if form.per_channel { of.k } else { 1 }];
        match form.per_channel {
            true => gate.read(&[b, at, self.hv], 3, &mut g),
            false => g[0] = gate.at(&[b, at, self.hv]),
        }
        let mut bias = vec![0.0; g.len()];
        if let Some(of) = &form.dt_bias {
            let row = self.parameter_row(of);
            match form.per_channel {
                true => of.read(&[row], 1, &mut bias),
                false => bias[0] = of.at(&[row]),
            }
        }
        let a_log = form.a_log.as_ref();
        let rate = finite_exp(a_log.map_or(0.0, |of| of.at(&[self.parameter_row(of)])));
        let Form { kind, .. } = form;
        for (g, bias) in g.iter_mut().zip(bias) {
            *g = match kind {
                Kind::Log => *g,
                Kind::Softplus => -rate * softplus(*g + bias),
                Kind::LowerBound(bound) => bound * sigmoid(rate * (*g + bias)),
            };
        }
        g
    }

    /// Row of a gate parameter for this value head. The parameter has H or HV rows.
    fn parameter_row(&self, of: &View<'_>) -> usize {
        match of.dim(0) == self.work.heads.hv {
            true => self.hv,
            false => self.h,
        }
    }
}

impl Token {
    fn decay(&self) -> Vec<f32> {
        self.log_decay.iter().map(|g| g.exp()).collect()
    }
}

/// Whether states are written to the pool that they are read from.
fn read_is_written(work: &Work<'_>) -> bool {
    match &work.states {
        gated_delta::States::Update(of) => of.write_pool.is_none(),
        _ => true,
    }
}

/// Dot product, in eight partial sums.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a, b) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a
        .remainder()
        .iter()
        .zip(b.remainder())
        .map(|(a, b)| a * b)
        .sum();
    for (a, b) in a.zip(b) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + rest
}

//! One launch: inputs, the simulator, and what the reference says.

use std::ops::Range;

use gated_delta_kernels::constants::{Constants, Element, Index};
use gated_delta_kernels::device::sim::{self, Fault, Launch};
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::step::{Gate, StepConstants, StepParams};
use gated_delta_reference::compare;
use gated_delta_reference::gate::{sigmoid, softplus_log_decay};
use gated_delta_reference::recurrence::{Token, normalise, recurrence};

use super::buffer::{Buffer, indices};

/// Splitmix64.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// In (-1, 1).
    pub fn signed(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// What a layer fixes.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// KDA: one decay per channel of a key; GDN: one per head.
    pub per_channel: bool,
    pub k: usize,
    pub heads: usize,
    pub ratio: usize,
    pub tiled: bool,
    pub l2norm: bool,
    pub raw_gates: bool,
    pub beta_scale: f32,
    /// Of q, k, v, o, g, b.
    pub elements: [Element; 6],
    /// Elements between rows: 0 keeps 16-byte accesses possible.
    pub gap: usize,
}

impl Layer {
    pub fn scale(&self) -> f32 {
        1.0 / (self.k as f32).sqrt()
    }

    pub fn value_heads(&self) -> usize {
        self.heads * self.ratio
    }

    /// Decays of a head.
    pub fn decays(&self) -> usize {
        if self.per_channel { self.k } else { 1 }
    }

    fn key_head(&self, hv: usize) -> usize {
        if self.tiled {
            hv % self.heads
        } else {
            hv / self.ratio
        }
    }
}

/// Tokens of all rows: `rows` × `tokens` of them.
#[derive(Clone)]
pub struct Tokens {
    pub rows: usize,
    pub tokens: usize,
    pub q: Buffer,
    pub k: Buffer,
    pub v: Buffer,
    pub g: Buffer,
    pub b: Buffer,
}

impl Tokens {
    pub fn new(layer: &Layer, rows: usize, tokens: usize, random: &mut Random) -> Self {
        let [q, k, v, _, g, b] = layer.elements;
        let (h, hv) = (layer.heads, layer.value_heads());
        // Small enough that, without norms, δ stays in range.
        let reach = if layer.l2norm { 3.0 } else { 0.2 };
        let mut filled = |element, heads, width, map: &dyn Fn(f64) -> f64| {
            Buffer::new(element, &[rows, tokens, heads, width], layer.gap)
                .filled(|| map(random.signed()))
        };
        Self {
            rows,
            tokens,
            q: filled(q, h, layer.k, &|x| reach * x),
            k: filled(k, h, layer.k, &|x| reach * x),
            v: filled(v, hv, layer.k, &|x| 2.0 * x),
            g: filled(g, hv, layer.decays(), &|x| {
                if layer.raw_gates { 3.0 * x } else { -x.abs() }
            }),
            b: filled(b, hv, 1, &|x| {
                if layer.raw_gates { 3.0 * x } else { x.abs() }
            }),
        }
    }
}

/// One launch on a pool.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub layer: Layer,
    pub entry: Entry,
    pub tokens: &'a Tokens,
    /// T; less than `tokens` has with `cu_seqlens`.
    pub count: usize,
    pub cu_seqlens: Option<&'a [i32]>,
    pub previous: Option<(&'a Tokens, &'a [i32])>,
    pub a_log: &'a [f32],
    pub dt_bias: &'a [f32],
    pub read_slots: Option<&'a [i32]>,
    pub write_slots: Option<&'a [i32]>,
    pub null_slot: u32,
    pub update: bool,
}

impl Case<'_> {
    pub fn rows(&self) -> usize {
        match self.cu_seqlens {
            Some(starts) => starts.len() - 1,
            None => self.tokens.rows,
        }
    }

    /// Runs the entry in the simulator. `o` and the pools are written.
    pub fn launch(
        &self,
        o: &mut Buffer,
        pool: &mut Buffer,
        write_pool: Option<&mut Buffer>,
    ) -> Result<(), Fault> {
        let layer = &self.layer;
        let previous_tokens = self.previous.map(|(tokens, _)| tokens);
        let saved = previous_tokens.unwrap_or(self.tokens);
        let index = |some: bool| if some { Index::I32 } else { Index::None } as u32;
        let [
            q_element,
            k_element,
            v_element,
            o_element,
            g_element,
            b_element,
        ] = layer.elements.map(|element| element as u32);
        let packed = self.cu_seqlens.is_some();
        let strides = |buffer: &Buffer, packed: bool| {
            let row = if packed { 0 } else { buffer.strides[0] };
            [row, buffer.strides[1], buffer.strides[2]].map(|stride| stride as u32)
        };
        let new = self.tokens;
        let [q_row, q_token, q_head] = strides(&new.q, packed);
        let [k_row, k_token, k_head] = strides(&new.k, packed);
        let [v_row, v_token, v_head] = strides(&new.v, packed);
        let [o_row, o_token, o_head] = strides(o, packed);
        let [g_row, g_token, g_head] = strides(&new.g, packed);
        let [b_row, b_token, _] = strides(&new.b, packed);
        let [previous_k_row, previous_k_token, previous_k_head] = strides(&saved.k, false);
        let [previous_v_row, previous_v_token, previous_v_head] = strides(&saved.v, false);
        let [previous_g_row, previous_g_token, previous_g_head] = strides(&saved.g, false);
        let [previous_b_row, previous_b_token, _] = strides(&saved.b, false);
        let write = write_pool.as_deref().unwrap_or(pool);
        let constants = StepConstants {
            h: layer.heads as u32,
            ratio: layer.ratio as u32,
            tiled: layer.tiled.into(),
            l2norm: layer.l2norm.into(),
            scale: layer.scale().to_bits(),
            gate: if layer.raw_gates {
                Gate::Softplus
            } else {
                Gate::Log
            } as u32,
            lower_bound: 0,
            has_a_log: layer.raw_gates.into(),
            has_dt_bias: layer.raw_gates.into(),
            gate_rows_h: 0,
            beta_logit: layer.raw_gates.into(),
            beta_scale: layer.beta_scale.to_bits(),
            tokens: self.count as u32,
            previous_tokens: previous_tokens.map_or(0, |tokens| tokens.tokens as u32),
            update_state: self.update.into(),
            has_snapshots: 0,
            null_slot: self.null_slot,
            read_index: index(self.read_slots.is_some()),
            write_index: index(self.write_slots.is_some()),
            token_index: 0,
            accepted_index: 0,
            cu_seqlens_index: index(packed),
            keep_index: index(self.previous.is_some()),
            q_element,
            k_element,
            v_element,
            o_element,
            g_element,
            b_element,
            wide_io: (layer.gap == 0).into(),
            wide_state: pool.strides[0].is_multiple_of(8).into(),
            q_row,
            q_token,
            q_head,
            k_row,
            k_token,
            k_head,
            v_row,
            v_token,
            v_head,
            o_row,
            o_token,
            o_head,
            g_row,
            g_token,
            g_head,
            b_row,
            b_token,
            previous_k_row,
            previous_k_token,
            previous_k_head,
            previous_v_row,
            previous_v_token,
            previous_v_head,
            previous_g_row,
            previous_g_token,
            previous_g_head,
            previous_b_row,
            previous_b_token,
            read_slot: pool.strides[0] as u32,
            write_slot: write.strides[0] as u32,
            snapshot_row: 0,
            snapshot_token: 0,
            token_slots_row: 0,
        };

        let mut regions = vec![
            pool.region("pool", write_pool.is_none()),
            o.region("o", true),
            new.q.region("q", false),
            new.k.region("k", false),
            new.v.region("v", false),
            new.g.region("g", false),
            new.b.region("b", false),
        ];
        let address_of = |slots: Option<&[i32]>| {
            slots.map_or(0, |slots| slots.as_ptr().expose_provenance() as u64)
        };
        regions.extend(self.read_slots.map(|slots| indices("read_slots", slots)));
        regions.extend(self.write_slots.map(|slots| indices("write_slots", slots)));
        regions.extend(self.cu_seqlens.map(|starts| indices("cu_seqlens", starts)));
        let floats = |name, values: &[f32]| sim::Region {
            name,
            address: values.as_ptr().expose_provenance() as u64,
            element_bytes: 4,
            dims: vec![values.len()],
            strides: vec![1],
            writable: false,
        };
        regions.push(floats("a_log", self.a_log));
        regions.push(floats("dt_bias", self.dt_bias));
        regions.extend(
            write_pool
                .as_deref()
                .map(|pool| pool.region("write_pool", true)),
        );
        if let Some((tokens, keep)) = self.previous {
            regions.extend([
                tokens.k.region("previous k", false),
                tokens.v.region("previous v", false),
                tokens.g.region("previous g", false),
                tokens.b.region("previous b", false),
                indices("keep", keep),
            ]);
        }
        let new_address = |buffer: &Buffer| if self.count == 0 { 0 } else { buffer.address() };
        let params = StepParams {
            q: new_address(&new.q),
            k: new_address(&new.k),
            v: new_address(&new.v),
            g: new_address(&new.g),
            b: new_address(&new.b),
            o: new_address(o),
            previous_k: previous_tokens.map_or(0, |tokens| tokens.k.address()),
            previous_v: previous_tokens.map_or(0, |tokens| tokens.v.address()),
            previous_g: previous_tokens.map_or(0, |tokens| tokens.g.address()),
            previous_b: previous_tokens.map_or(0, |tokens| tokens.b.address()),
            keep: address_of(self.previous.map(|(_, keep)| keep)),
            a_log: self.a_log.as_ptr().expose_provenance() as u64,
            dt_bias: self.dt_bias.as_ptr().expose_provenance() as u64,
            read_pool: pool.address(),
            write_pool: write.address(),
            snapshots: 0,
            read_slots: address_of(self.read_slots),
            write_slots: address_of(self.write_slots),
            token_slots: 0,
            accepted: 0,
            cu_seqlens: address_of(self.cu_seqlens),
            read_pool_slots: pool.dims()[0] as u32,
            write_pool_slots: write.dims()[0] as u32,
            total_tokens: (new.rows * new.tokens) as u32,
            reserved: 0,
        };
        let launch = Launch {
            kernel: self.entry.name(),
            shape: LaunchShape {
                grid: [
                    self.entry.tiles() * layer.ratio as u32,
                    layer.heads as u32,
                    self.rows() as u32,
                ],
                block: self.entry.block(),
                shared_bytes: self.entry.shared_bytes(),
            },
            constants: constants.words(),
            regions: &regions,
        };
        let params = bytemuck::bytes_of(&params);
        // SAFETY: the regions cover what the parameters point at, and nothing else touches them.
        unsafe { sim::launch(&launch, &|| self.entry.simulate(params)) }
    }

    /// Token `index` in row-major order of rows and tokens, of a value head.
    fn token(&self, tokens: &Tokens, index: usize, hv: usize) -> Token {
        let layer = &self.layer;
        let (k_dim, decays) = (layer.k, layer.decays());
        let head = (index * layer.heads + layer.key_head(hv)) * k_dim;
        let at = index * layer.value_heads() + hv;
        let (g, b) = (tokens.g.values(at * decays, decays), tokens.b.get(at));
        let log_decay = |(i, g): (usize, f64)| {
            if !layer.raw_gates {
                return g;
            }
            let dt_bias = self.dt_bias[hv * decays + i];
            softplus_log_decay(g, self.a_log[hv].into(), dt_bias.into())
        };
        let of_head = g.into_iter().enumerate().map(log_decay);
        Token {
            q: normalise(
                &tokens.q.values(head, k_dim),
                layer.l2norm,
                layer.scale().into(),
            ),
            k: normalise(&tokens.k.values(head, k_dim), layer.l2norm, 1.0),
            v: tokens.v.values(at * k_dim, k_dim),
            log_decay: of_head.cycle().take(k_dim).collect(),
            beta: if layer.raw_gates {
                f64::from(layer.beta_scale) * sigmoid(b)
            } else {
                b
            },
        }
    }

    /// Outputs of row `b`, which is active, and the state that it stores, before that is rounded.
    pub fn expected(&self, b: usize, hv: usize, start: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let tokens_of = |tokens: &Tokens, range: Range<usize>| -> Vec<Token> {
            range.map(|index| self.token(tokens, index, hv)).collect()
        };
        let mut state = start.to_vec();
        let mut committed = None;
        if let Some((tokens, keep)) = self.previous {
            let first = b * tokens.tokens;
            let kept = tokens_of(tokens, first..first + keep[b] as usize);
            if let Some(step) = recurrence(&state, &kept).unwrap().pop() {
                state = step.state;
            }
            committed = Some(state.clone());
            state
                .iter_mut()
                .for_each(|s| *s = compare::DType::Bf16.round(*s));
        }
        let range = match self.cu_seqlens {
            Some(starts) => starts[b] as usize..starts[b + 1] as usize,
            None => b * self.count..(b + 1) * self.count,
        };
        let steps = recurrence(&state, &tokens_of(self.tokens, range)).unwrap();
        if let Some(last) = steps.last() {
            state.clone_from(&last.state);
        }
        let o = steps.into_iter().flat_map(|step| step.o).collect();
        (o, committed.unwrap_or(state))
    }
}

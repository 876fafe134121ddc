//! Launch forms of prefills that the library only uses for many rows or long prompts, in the simulator with few and short rows:
//! persistent blocks, segments, two heads a block, rows of one token in a launch of their own.

use std::ops::Deref;

use gated_delta_kernels::constants::{Constants, Element, Index};
use gated_delta_kernels::device::sim::{self, Fault, Launch, Region};
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::kernels::device_contract::{
    DeviceContractConstants, DeviceContractParams, WARPGROUP_RESULTS, matrix_element,
};
use gated_delta_kernels::launch::{Family, LaunchShape, Layout, Stage, States};
use gated_delta_kernels::machine;
use gated_delta_kernels::prefill::workspace::{carried_bytes, tokens_bytes};
use gated_delta_kernels::prefill::{ALL_CHUNKS, units};
use gated_delta_kernels::step::{Activation, PrefillParams, StepConstants};
use half::{bf16, f16};

/// Sizes, switches and values of a launch.
#[derive(Clone)]
struct Case {
    entry: Kernel,
    heads: usize,
    ratio: usize,
    tiled: bool,
    element: Element,
    lengths: Vec<usize>,
    positions: Option<Vec<i64>>,
    /// Slots that each row reads and writes.
    read: Vec<i64>,
    write: Vec<i64>,
    fresh: Option<Vec<i64>>,
    every: usize,
    checkpoints: Vec<Vec<i64>>,
    slots: usize,
    seed: u64,
    /// W of a convolution. 0 without one.
    taps: usize,
    norm: bool,
    /// Whether a block has two value heads.
    pairs: bool,
    /// First chunks of all segments but the first. Empty for one segment.
    edges: Vec<u32>,
    /// Size of the scan's grid along z, whose blocks continue with further rows. Rows of one token have a launch of their own then.
    /// 0 for all rows at once.
    turns: u32,
    /// Number of tokens in `total` beyond those of the rows.
    spare: usize,
}

/// Random numbers in [0, 1).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }

    /// An approximately normal random number.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }
}

/// Elements of a tensor as bytes in memory.
#[derive(Clone)]
struct Tensor {
    element: Element,
    bytes: Vec<u128>,
    len: usize,
}

impl Tensor {
    fn new(element: Element, values: &[f64]) -> Self {
        let size = if element == Element::F32 { 4 } else { 2 };
        let mut bytes = vec![u128::MAX; (values.len() * size).div_ceil(16)];
        let places = bytemuck::cast_slice_mut::<_, u8>(&mut bytes);
        for (place, &value) in places.chunks_exact_mut(size).zip(values) {
            match element {
                Element::F32 => place.copy_from_slice(&(value as f32).to_le_bytes()),
                Element::Bf16 => place.copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
                Element::F16 => place.copy_from_slice(&f16::from_f64(value).to_le_bytes()),
            }
        }
        Self {
            element,
            bytes,
            len: values.len(),
        }
    }

    fn values(&self) -> Vec<f64> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.bytes);
        match self.element {
            Element::F32 => bytemuck::cast_slice::<u8, f32>(bytes)[..self.len]
                .iter()
                .map(|&x| f64::from(x))
                .collect(),
            _ => bytemuck::cast_slice::<u8, u16>(bytes)[..self.len]
                .iter()
                .map(|&bits| {
                    if self.element == Element::Bf16 {
                        bf16::from_bits(bits).to_f64()
                    } else {
                        f16::from_bits(bits).to_f64()
                    }
                })
                .collect(),
        }
    }

    fn address(&mut self) -> u64 {
        self.bytes.as_mut_ptr().expose_provenance() as u64
    }

    fn region(&mut self, name: &'static str, writable: bool) -> Region {
        region(
            name,
            self.address(),
            if self.element == Element::F32 { 4 } else { 2 },
            self.len,
            writable,
        )
    }
}

fn region(
    name: &'static str,
    address: u64,
    element_bytes: usize,
    len: usize,
    writable: bool,
) -> Region {
    Region {
        name,
        address,
        element_bytes,
        dims: vec![len],
        strides: vec![1],
        writable,
    }
}

/// A launch, its inputs, and its outputs.
struct Done {
    case: Case,
    x: Vec<f64>,
    weight: Vec<f64>,
    windows_before: Vec<f64>,
    windows: Vec<f64>,
    z: Vec<f64>,
    norm_weight: Vec<f64>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    g: Vec<f64>,
    b: Vec<f64>,
    before: Vec<f64>,
    o: Vec<f64>,
    pool: Vec<f64>,
}

impl Case {
    fn new(entry: Kernel, lengths: &[usize]) -> Self {
        let rows = lengths.len() as i64;
        Self {
            entry,
            heads: 1,
            ratio: 1,
            tiled: false,
            element: Element::Bf16,
            lengths: lengths.to_vec(),
            positions: None,
            read: (0..rows).collect(),
            write: (0..rows).collect(),
            fresh: None,
            every: 0,
            checkpoints: Vec::new(),
            slots: lengths.len() + 4,
            seed: 1,
            taps: 0,
            norm: false,
            pairs: false,
            edges: Vec::new(),
            turns: 0,
            spare: 0,
        }
    }

    fn dims(&self) -> (usize, usize, usize) {
        let computes = self.entry.computes().unwrap();
        (
            self.heads * self.ratio,
            computes.k as usize,
            computes.v as usize,
        )
    }

    /// D.
    fn channels(&self) -> usize {
        let (value_heads, k_dim, v_dim) = self.dims();
        2 * self.heads * k_dim + value_heads * v_dim
    }

    /// Whether decays are per key channel.
    fn per_channel(&self) -> bool {
        self.entry.computes().unwrap().per_channel == Some(true)
    }

    /// Compute capability of the simulated GPU. The portable scan runs on GPUs with 99 KB of shared memory, with bulk copies
    /// (K-last states) and without.
    fn capability(&self) -> (u32, u32) {
        match (self.entry.takes_warpgroups(), self.entry.1.layout) {
            (true, _) => (9, 0),
            (false, Layout::KLast) => (12, 0),
            (false, Layout::VLast) => (8, 6),
        }
    }

    /// Number of blocks for chunks of one token in the launch after the scan.
    fn blocks_of_tokens(&self) -> u32 {
        let (_, _, v_dim) = self.dims();
        match !self.entry.takes_warpgroups() && self.norm && v_dim > 64 {
            true => 2 * self.lengths.len() as u32,
            false => 0,
        }
    }

    fn prepare(&self) -> Entry {
        match (self.per_channel(), self.dims().1) {
            (false, 128) => Entry::gdn_prefill_prepare_k128,
            (false, 96) => Entry::gdn_prefill_prepare_k96v192,
            (false, _) => Entry::gdn_prefill_prepare_k64,
            (true, _) => Entry::kda_prefill_prepare_k128,
        }
    }

    /// The entry of a family that both operators share.
    fn of_family(&self, family: Family) -> Entry {
        let of_dims = |entry: &Entry| entry.computes().unwrap().k as usize == self.dims().1;
        entries(family).find(of_dims).unwrap()
    }

    fn convolve(&self) -> Entry {
        self.of_family(Family::chunked(Stage::Convolve))
    }

    fn single(&self) -> Entry {
        self.of_family(Family::chunked(Stage::Single))
    }

    fn finish(&self) -> Entry {
        self.of_family(Family::chunked(Stage::Finish))
    }

    /// Number of blocks of `entry` for one chunk.
    fn blocks_of_unit(&self, entry: Entry) -> u32 {
        let family = entry.computes().unwrap().family;
        family.blocks_of_unit(self.heads as u32, self.ratio as u32, self.per_channel())
    }

    /// A random log decay.
    fn decay(&self, random: &mut Random) -> f64 {
        match self.per_channel() {
            false => -0.2 * random.next(),
            // Some channels forget immediately, others little.
            true => -0.2 * random.next().powi(6),
        }
    }

    fn run(&self) -> Result<Done, Fault> {
        let (value_heads, k_dim, v_dim) = self.dims();
        let computes = self.entry.computes().unwrap();
        let rows = self.lengths.len();
        let total: usize = self.lengths.iter().sum();
        let mut random = Random(self.seed);
        let mut draw = |n: usize, f: &mut dyn FnMut(&mut Random) -> f64| -> Vec<f64> {
            (0..n).map(|_| f(&mut random)).collect()
        };
        let qs = draw(total * self.heads * k_dim, &mut Random::normal);
        let ks = draw(total * self.heads * k_dim, &mut Random::normal);
        let vs = draw(total * value_heads * v_dim, &mut Random::normal);
        let decays = if self.per_channel() { k_dim } else { 1 };
        let gs = draw(total * value_heads * decays, &mut |r| self.decay(r));
        let bs = draw(total * value_heads, &mut Random::next);
        let states = draw(self.slots * value_heads * k_dim * v_dim, &mut |r| {
            0.3 * r.normal()
        });
        let channels = self.channels();
        let inputs = self.taps.saturating_sub(1);
        let xs = draw(total * channels * self.taps.min(1), &mut Random::normal);
        let weights = draw(channels * self.taps, &mut |r| 0.5 * r.normal());
        let olds = draw(self.slots * channels * inputs, &mut Random::normal);
        let zs = draw(total * value_heads * v_dim, &mut Random::normal);
        let norms = draw(v_dim, &mut |r| 1.0 + 0.1 * r.normal());
        let mut x = Tensor::new(self.element, &xs);
        let mut weight = Tensor::new(self.element, &weights);
        let mut windows = Tensor::new(self.element, &olds);
        let windows_before = windows.values();
        let mut z = Tensor::new(self.element, &zs);
        let mut norm_weight = Tensor::new(Element::F32, &norms);
        let mut q = Tensor::new(self.element, &qs);
        let mut k = Tensor::new(self.element, &ks);
        let mut v = Tensor::new(self.element, &vs);
        let mut g = Tensor::new(Element::F32, &gs);
        let mut b = Tensor::new(Element::F32, &bs);
        let of_token = value_heads * v_dim;
        let mut o = Tensor::new(
            self.element,
            &vec![f64::NAN; (total + self.spare) * of_token],
        );
        let mut pool = Tensor::new(self.entry.1.element, &states);
        let before = pool.values();
        let mut seqlens = vec![0i32];
        for &length in &self.lengths {
            seqlens.push(seqlens.last().unwrap() + length as i32);
        }
        let mut positions = self.positions.clone().unwrap_or_default();
        let (mut read, mut write) = (self.read.clone(), self.write.clone());
        let mut fresh = self.fresh.clone().unwrap_or_default();
        let columns = self.checkpoints.iter().map(Vec::len).max().unwrap_or(0);
        let mut checkpoints: Vec<i64> = (0..rows * columns)
            .map(|i| {
                self.checkpoints
                    .get(i / columns)
                    .and_then(|row| row.get(i % columns))
                    .copied()
                    .unwrap_or(-1)
            })
            .collect();
        let has_positions = self.positions.is_some();
        let most = (total + self.spare) as u64;
        let units = units(most, rows as u64, has_positions);
        let bytes = u64::from(self.prepare().workspace_bytes_per_unit(
            self.ratio as u32,
            true,
            true,
        )) * self.heads as u64
            * units
            + tokens_bytes(rows as u32, value_heads as u32, computes.v)
            + match self.edges[..] {
                [] => 0,
                _ => carried_bytes(value_heads as u32, computes.k, computes.v),
            };
        let mut workspace = vec![u128::MAX; bytes as usize / 16];

        let at = |pointer: *mut i64| pointer.expose_provenance() as u64;
        let mut params: PrefillParams = bytemuck::Zeroable::zeroed();
        let step = &mut params.layer.step;
        (step.q, step.k, step.v, step.o) = (q.address(), k.address(), v.address(), o.address());
        (step.g, step.b) = (g.address(), b.address());
        if self.taps > 0 {
            (step.q, step.k, step.v) = (0, 0, 0);
        }
        (step.read_pool, step.write_pool) = (pool.address(), pool.address());
        (step.read_pool_slots, step.write_pool_slots) = (self.slots as u32, self.slots as u32);
        (step.read_slots, step.write_slots) = (at(read.as_mut_ptr()), at(write.as_mut_ptr()));
        step.fresh = at(fresh.as_mut_ptr());
        step.cu_seqlens = seqlens.as_mut_ptr().expose_provenance() as u64;
        (step.total_tokens, step.rows) = (most as u32, rows as u32);
        params.tokens = match is_short(self.entry) {
            true => 64,
            false => u32::MAX,
        };
        let layer = &mut params.layer;
        (layer.x, layer.conv_weight) = (x.address(), weight.address());
        (layer.read_windows, layer.write_windows) = (windows.address(), windows.address());
        (layer.read_windows_slots, layer.write_windows_slots) =
            (self.slots as u32, self.slots as u32);
        (layer.z, layer.norm_weight) = (z.address(), norm_weight.address());
        params.positions = at(positions.as_mut_ptr());
        params.checkpoint_slots = at(checkpoints.as_mut_ptr());
        (params.checkpoints, params.checkpoint_slots_row) = (columns as u32, columns as u32);
        params.workspace = workspace.as_mut_ptr().expose_provenance() as u64;
        params.rows = rows as u32;
        params.end_chunk = ALL_CHUNKS;
        params.turns = rows as u32;
        if self.turns > 0 {
            let has_singles = self.lengths.contains(&1);
            (params.turns, params.has_singles) = (self.turns, has_singles.into());
        }

        let mut c: StepConstants = bytemuck::Zeroable::zeroed();
        (c.h, c.ratio, c.tiled) = (self.heads as u32, self.ratio as u32, u32::from(self.tiled));
        c.l2norm = 1;
        c.scale = (1.0 / (k_dim as f32).sqrt()).to_bits();
        c.update_state = 1;
        c.state_f32 = u32::from(self.entry.1.element == Element::F32);
        c.state_v_last = u32::from(self.entry.1.layout == Layout::VLast);
        c.per_channel = u32::from(self.per_channel());
        c.machine = machine::of_capability(self.capability());
        c.null_slot = u32::MAX;
        (c.read_index, c.write_index) = (Index::I64 as u32, Index::I64 as u32);
        c.cu_seqlens_index = Index::I32 as u32;
        c.positions_index = if has_positions { Index::I64 as u32 } else { 0 };
        c.fresh_index = if self.fresh.is_some() {
            Index::I64 as u32
        } else {
            0
        };
        c.checkpoint_index = Index::I64 as u32;
        c.checkpoint_every = self.every as u32;
        (c.q_element, c.k_element, c.v_element, c.o_element) = (
            self.element as u32,
            self.element as u32,
            self.element as u32,
            self.element as u32,
        );
        (c.g_element, c.b_element) = (Element::F32 as u32, Element::F32 as u32);
        (c.wide_io, c.wide_state) = (1, 1);
        (c.q_token, c.q_head) = ((self.heads * k_dim) as u32, k_dim as u32);
        (c.k_token, c.k_head) = (c.q_token, c.q_head);
        (c.v_token, c.v_head) = ((value_heads * v_dim) as u32, v_dim as u32);
        (c.o_token, c.o_head) = (c.v_token, c.v_head);
        c.g_token = (value_heads * decays) as u32;
        (c.g_head, c.b_token) = (decays as u32, value_heads as u32);
        c.read_slot = (value_heads * k_dim * v_dim) as u32;
        c.write_slot = c.read_slot;

        (c.taps, c.conv_activation) = (self.taps as u32, Activation::Silu as u32);
        (c.x_element, c.conv_weight_element) = (self.element as u32, self.element as u32);
        c.wide_conv_weight = u32::from(self.taps == 4);
        (c.x_token, c.conv_weight_channel) = (channels as u32, self.taps as u32);
        (c.read_windows_channel, c.read_windows_input) = (inputs as u32, 1);
        c.read_windows_slot = (channels * inputs) as u32;
        c.write_windows_slot = c.read_windows_slot;
        (c.write_windows_channel, c.write_windows_input) = (inputs as u32, 1);
        (c.has_norm, c.norm_activation) = (u32::from(self.norm), Activation::Silu as u32);
        c.norm_eps = 1e-6f32.to_bits();
        (c.z_element, c.norm_weight_element) = (self.element as u32, Element::F32 as u32);
        (c.wide_norm, c.z_token, c.z_head) = (1, (value_heads * v_dim) as u32, v_dim as u32);

        let regions = [
            x.region("x", false),
            weight.region("conv_weight", false),
            windows.region("windows", true),
            z.region("z", false),
            norm_weight.region("norm_weight", false),
            q.region("q", false),
            k.region("k", false),
            v.region("v", false),
            g.region("g", false),
            b.region("b", false),
            o.region("o", true),
            pool.region("pool", true),
            region("read_slots", params.layer.step.read_slots, 8, rows, false),
            region("write_slots", params.layer.step.write_slots, 8, rows, false),
            region("fresh", params.layer.step.fresh, 8, fresh.len(), false),
            region("positions", params.positions, 8, positions.len(), false),
            region(
                "checkpoint_slots",
                params.checkpoint_slots,
                8,
                checkpoints.len(),
                false,
            ),
            region(
                "cu_seqlens",
                params.layer.step.cu_seqlens,
                4,
                rows + 1,
                false,
            ),
            region("workspace", params.workspace, 16, workspace.len(), true),
        ];
        let of_state = |entry: Entry| match self.entry.1 {
            KLAST_F32 => 4 * entry.shared_state_elements(),
            KLAST_BF16 => 2 * entry.shared_state_elements(),
            _ => 0,
        };
        let launch_with = |entry: Entry, grid: [u32; 3], params: &PrefillParams| {
            let launch = Launch {
                kernel: entry.name(),
                capability: self.capability(),
                shape: LaunchShape {
                    grid,
                    block: entry.block(),
                    shared_bytes: entry.shared_bytes() + of_state(entry),
                    cluster: entry.cluster(),
                    overlaps: false,
                },
                constants: c.words(),
                regions: &regions,
            };
            // SAFETY: the regions are buffers of this function.
            unsafe { sim::launch(&launch, &|| entry.simulate(bytemuck::bytes_of(params))) }
        };
        let launch = |entry: Entry, grid: [u32; 3]| launch_with(entry, grid, &params);
        let is_short = is_short(self.entry);
        if units > 0 && !is_short {
            let convolve = Some(self.convolve()).filter(|_| self.taps > 0);
            let prepare = Some(self.prepare()).filter(|_| self.edges.is_empty());
            for entry in convolve.into_iter().chain(prepare) {
                launch(entry, [units as u32 * self.blocks_of_unit(entry), 1, 1])?;
            }
        }
        let entry = self.edges.is_empty().then_some(*self.entry);
        let grid = [
            self.entry.tiles() * self.ratio as u32,
            self.heads as u32,
            rows as u32,
        ];
        for (i, &end) in self.edges.iter().chain([&ALL_CHUNKS]).enumerate() {
            if self.edges.is_empty() {
                break;
            }
            let mut params = params;
            params.first_chunk = if i == 0 { 0 } else { self.edges[i - 1] };
            params.end_chunk = end;
            let of_unit = self.blocks_of_unit(self.prepare());
            let count = (units as u32).min(end) - params.first_chunk;
            launch_with(self.prepare(), [count * of_unit, 1, 1], &params)?;
            launch_with(*self.entry, grid, &params)?;
        }
        entry.map_or(Ok(()), |entry| {
            let heads = if self.pairs { 2 } else { 1 };
            launch(
                entry,
                [
                    self.entry.tiles() * (self.ratio / heads) as u32,
                    self.heads as u32,
                    params.turns,
                ],
            )
        })?;
        if self.turns > 0 {
            let single = self.single();
            launch(single, [(self.heads * self.ratio) as u32, 1, rows as u32])?;
        }
        let of_units = if self.norm && !is_short {
            units as u32 * self.blocks_of_unit(self.finish())
        } else {
            0
        };
        let of_windows = if self.taps > 1 {
            rows as u32 * (channels as u32).div_ceil(self.finish().block())
        } else {
            0
        };
        let blocks = of_windows + self.blocks_of_tokens() + of_units;
        if blocks > 0 {
            launch(self.finish(), [blocks, 1, 1])?;
        }
        Ok(Done {
            case: self.clone(),
            x: x.values(),
            weight: weight.values(),
            windows_before,
            windows: windows.values(),
            z: z.values(),
            norm_weight: norm_weight.values(),
            q: q.values(),
            k: k.values(),
            v: v.values(),
            g: g.values(),
            b: b.values(),
            before,
            o: o.values(),
            pool: pool.values(),
        })
    }
}

impl Done {
    /// o of all tokens and the pool by the reference in f64. o is NaN where nothing is written.
    fn truth(&self) -> (Vec<f64>, Vec<f64>) {
        let case = &self.case;
        let (value_heads, k_dim, v_dim) = case.dims();
        let vlast = case.entry.1.layout == Layout::VLast;
        let (mut o, mut pool) = (vec![f64::NAN; self.o.len()], self.before.clone());
        let size = k_dim * v_dim;
        let mut first = 0;
        for (row, &length) in case.lengths.iter().enumerate() {
            let (read, write) = (case.read[row], case.write[row]);
            let is_fresh = case.fresh.as_ref().is_some_and(|fresh| fresh[row] != 0);
            let in_pool = |slot: i64| (0..case.slots as i64).contains(&slot);
            let live = (is_fresh || in_pool(read)) && in_pool(write);
            let position = case
                .positions
                .as_ref()
                .map_or(0, |positions| positions[row] as usize);
            for hv in 0..value_heads {
                let h = if case.tiled {
                    hv % case.heads
                } else {
                    hv / case.ratio
                };
                // S has V rows of K here, in either layout of the pool.
                let place = |i: usize| match vlast {
                    true => i % k_dim * v_dim + i / k_dim,
                    false => i,
                };
                let mut s = vec![0.0; size];
                if live && !is_fresh {
                    let before = &self.before[(read as usize * value_heads + hv) * size..][..size];
                    (0..size).for_each(|i| s[i] = before[place(i)]);
                }
                let store = |pool: &mut [f64], slot: i64, s: &[f64]| {
                    let state = &mut pool[(slot as usize * value_heads + hv) * size..][..size];
                    (0..size).for_each(|i| state[place(i)] = s[i]);
                };
                let mut due = 0;
                for t in first..first + length {
                    let token = &mut o[(t * value_heads + hv) * v_dim..][..v_dim];
                    if !live {
                        token.fill(0.0);
                        continue;
                    }
                    let norm =
                        |x: &[f64]| 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    let slot = if is_fresh { None } else { Some(read as usize) };
                    let own = [
                        self.input(0, h, (first, t, slot)),
                        self.input(1, h, (first, t, slot)),
                        self.input(2, hv, (first, t, slot)),
                    ];
                    let [q, k, values] = &own;
                    let (kn, qn) = (norm(k), norm(q) / (k_dim as f64).sqrt());
                    let k: Vec<f64> = k.iter().map(|k| k * kn).collect();
                    let q: Vec<f64> = q.iter().map(|q| q * qn).collect();
                    let decays = if case.per_channel() { k_dim } else { 1 };
                    let of_head = &self.g[(t * value_heads + hv) * decays..][..decays];
                    let of_head: Vec<f64> = of_head.iter().map(|g| g.exp()).collect();
                    let decay: Vec<f64> = (0..k_dim).map(|i| of_head[i % decays]).collect();
                    let beta = self.b[t * value_heads + hv];
                    let dot =
                        |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
                    let rows = s.chunks_exact_mut(k_dim).zip(values);
                    for (o, (s, value)) in token.iter_mut().zip(rows) {
                        s.iter_mut().zip(&decay).for_each(|(s, decay)| *s *= decay);
                        let delta = beta * (value - dot(s, &k));
                        s.iter_mut().zip(&k).for_each(|(s, k)| *s += delta * k);
                        *o = dot(s, &q);
                    }
                    if case.norm {
                        let squares: f64 = token.iter().map(|o| o * o).sum();
                        let size = (squares / v_dim as f64 + 1e-6).sqrt();
                        for (v, o) in token.iter_mut().enumerate() {
                            let z = self.z[(t * value_heads + hv) * v_dim + v];
                            *o *= self.norm_weight[v] / size * z / (1.0 + (-z).exp());
                        }
                    }
                    let end = position + t + 1 - first;
                    if case.every > 0 && end.is_multiple_of(case.every) {
                        let slot = case
                            .checkpoints
                            .get(row)
                            .and_then(|slots| slots.get(due))
                            .copied();
                        due += 1;
                        if let Some(slot) = slot.filter(|&slot| in_pool(slot)) {
                            store(&mut pool, slot, &s);
                        }
                    }
                }
                if live {
                    store(&mut pool, write, &s);
                }
            }
            first += length;
        }
        // Tokens that belong to no row.
        o[first * value_heads * v_dim..].fill(0.0);
        (o, pool)
    }

    /// The convolved q, k or v (0, 1, 2) of a head at token `t`. The row begins with token `first`, and its window is in `slot`.
    fn input(
        &self,
        of: usize,
        head: usize,
        (first, t, slot): (usize, usize, Option<usize>),
    ) -> Vec<f64> {
        let case = &self.case;
        let (value_heads, k_dim, v_dim) = case.dims();
        let (heads, dim) = match of {
            2 => (value_heads, v_dim),
            _ => (case.heads, k_dim),
        };
        if case.taps == 0 {
            let values = [&self.q, &self.k, &self.v][of];
            return values[(t * heads + head) * dim..][..dim].to_vec();
        }
        let of_channel = |channel: usize| {
            let terms = (0..case.taps).map(|i| {
                self.before(
                    first,
                    t as i64 + i as i64 - (case.taps as i64 - 1),
                    slot,
                    channel,
                ) * self.weight[channel * case.taps + i]
            });
            let sum: f64 = terms.sum();
            sum / (1.0 + (-sum).exp())
        };
        let channel = of * case.heads * k_dim + head * dim;
        (channel..channel + dim).map(of_channel).collect()
    }

    /// Input `t` of a channel. Inputs before `first` come from the window.
    fn before(&self, first: usize, t: i64, slot: Option<usize>, channel: usize) -> f64 {
        let channels = self.case.channels();
        if t >= first as i64 {
            return self.x[t as usize * channels + channel];
        }
        let inputs = self.case.taps - 1;
        let at = (t - first as i64 + inputs as i64) as usize;
        slot.map_or(0.0, |slot| {
            self.windows_before[(slot * channels + channel) * inputs + at]
        })
    }

    /// Relative root mean square errors of o and of states.
    fn errors(&self) -> [f64; 2] {
        let (o, pool) = self.truth();
        [error(&self.o, &o), error(&self.pool, &pool)]
    }
}

/// The root mean square of the error, relative to that of the truth.
fn error(got: &[f64], truth: &[f64]) -> f64 {
    let (mut error, mut size) = (0.0, 1e-90);
    for (got, truth) in got.iter().zip(truth) {
        if got.is_nan() && truth.is_nan() {
            continue;
        }
        let square = (got - truth) * (got - truth);
        error += if square.is_nan() {
            f64::INFINITY
        } else {
            square
        };
        size += truth * truth;
    }
    (error / size).sqrt()
}

/// A kernel of a prefill, and the layout and element of its states.
#[derive(Clone, Copy, Debug)]
struct Kernel(Entry, States);

impl Deref for Kernel {
    type Target = Entry;

    fn deref(&self) -> &Entry {
        &self.0
    }
}

const KLAST_BF16: States = States::ALL[0];
const KLAST_F32: States = States::ALL[1];
const VLAST_BF16: States = States::ALL[2];

const KLAST: Kernel = Kernel(Entry::gdn_prefill_chain_k128_tile128, KLAST_F32);
const KDA: Kernel = Kernel(Entry::kda_prefill_chain_k128_tile128, KLAST_F32);

fn is_short(kernel: Kernel) -> bool {
    kernel.computes().unwrap().family.max_tokens() == 64
}

#[track_caller]
fn check(what: &str, case: &Case) -> Done {
    check_within(2.5e-3, what, case)
}

#[track_caller]
fn check_within(most: f64, what: &str, case: &Case) -> Done {
    let done = case.run().unwrap_or_else(|fault| panic!("{what}: {fault}"));
    let [o, pool] = done.errors();
    println!("{what}: o {o:.2e}, states {pool:.2e}");
    assert!(
        o < most && pool < 0.8 * most,
        "{what}: o {o:e}, states {pool:e}"
    );
    done
}

/// All entries of a family.
fn entries(family: Family) -> impl Iterator<Item = Entry> {
    let is_of = move |entry: &Entry| {
        entry
            .computes()
            .is_some_and(|computes| computes.family == family)
    };
    Entry::ALL.iter().copied().filter(is_of)
}

/// All entries of a family, each with every layout and element of states.
fn kernels(family: Family) -> impl Iterator<Item = Kernel> {
    let with_states = |entry: Entry| {
        let all = entry.computes().unwrap().all_states();
        all.map(move |states| Kernel(entry, states))
    };
    // Portable scans treat the element of states as Hopper's scans do, so only f32 states run on them.
    let is_tried = |kernel: &Kernel| kernel.takes_warpgroups() || kernel.1.element == Element::F32;
    entries(family).flat_map(with_states).filter(is_tried)
}

fn chains() -> impl Iterator<Item = Kernel> {
    kernels(Family::chunked(Stage::Chain))
}

/// Every scan in each layout with one element of states. Consecutive entries alternate between elements.
fn chains_of_one_element() -> impl Iterator<Item = Kernel> {
    let elements = [Element::F32, Element::Bf16];
    chains().filter(move |kernel| {
        !kernel.takes_warpgroups() || kernel.1.element == elements[kernel.0 as usize % 2]
    })
}

fn shorts() -> impl Iterator<Item = Kernel> {
    kernels(Family::chunked(Stage::Short))
}

/// Whether a kernel is tried with a convolution and a norm, in tests that try each kernel with or without them: one of the two
/// elements of each layout is.
fn has_layer(Kernel(_, states): Kernel) -> bool {
    (states.element == Element::F32) != (states.layout == Layout::VLast)
}

#[test]
fn two_heads_of_a_block_have_the_bits_of_one() {
    let mut pairs = 0;
    for entry in shorts().filter(|entry| entry.makes_pairs()) {
        pairs += 1;
        for (around, element) in [(false, Element::Bf16), (true, Element::F32)] {
            let case = Case {
                ratio: if around { 4 } else { 2 },
                tiled: around,
                element,
                positions: Some(vec![0, 63, 100, 30]),
                // The last row has no valid slot.
                write: vec![0, 1, 2, -1],
                every: 64,
                checkpoints: vec![vec![6], vec![7], vec![-1], vec![5]],
                taps: if around { 4 } else { 0 },
                norm: around,
                ..Case::new(entry, &[64, 6, 30, 3])
            };
            let one = case
                .run()
                .unwrap_or_else(|fault| panic!("{entry:?}: {fault}"));
            let done = check(
                entry.name(),
                &Case {
                    pairs: true,
                    ..case
                },
            );
            let bits =
                |values: &[f64]| -> Vec<u64> { values.iter().map(|x| x.to_bits()).collect() };
            assert_eq!(bits(&done.o), bits(&one.o), "{entry:?}: o");
            assert_eq!(bits(&done.pool), bits(&one.pool), "{entry:?}: states");
        }
    }
    assert_eq!(pairs, 4);
}

#[test]
fn blocks_go_from_row_to_row() {
    for entry in chains_of_one_element() {
        let around = has_layer(entry);
        let case = Case {
            turns: 2,
            // Even and odd numbers of chunks, single tokens at both ends, a row without a valid slot and one without tokens.
            positions: Some(vec![0, 63, 0, 30, 0, 64, 63]),
            write: vec![0, 1, 2, -1, 4, 5, 6],
            every: 64,
            checkpoints: vec![
                vec![7],
                vec![8],
                vec![-1],
                vec![-1],
                vec![-1],
                vec![9],
                vec![-1],
            ],
            ratio: if around { 2 } else { 1 },
            taps: if around { 3 } else { 0 },
            norm: around,
            slots: 11,
            ..Case::new(entry, &[66, 65, 3, 70, 0, 64, 2])
        };
        check(entry.name(), &case);
    }
}

/// Persistent blocks with more than two rows prefetch K-last states for rows of one chunk and of several, also after fresh rows and
/// rows without a valid slot or tokens.
#[test]
fn states_are_brought_ahead() {
    let is_brought =
        |kernel: &Kernel| kernel.min_blocks_per_sm() == 1 && kernel.1.layout == Layout::KLast;
    let all = chains().filter(is_brought);
    for (i, entry) in all.enumerate() {
        let whole = Case {
            fresh: Some(vec![0, 0, 0, 1, 0, 0, 0, 0]),
            write: vec![0, 1, 2, 3, -1, 5, 6, 7],
            ..Case::new(entry, &[65, 64, 3, 2, 30, 0, 66, 2])
        };
        let one = check(entry.name(), &whole);
        // The number of blocks varies by kernel. With four rows at once each block has one row more, whose state it loads without
        // prefetch.
        let turns = [1, 3, 4][i % 3];
        let on = Case { turns, ..whole };
        same_as(&format!("{}, {turns} turns", entry.name()), &on, &one);
    }
}

/// Longer rows start first and each row runs once, both if one warp can sort all of them and if there are more.
#[test]
fn rows_in_turn() {
    for rows in [2, 32, 33, 70] {
        let mut lengths: Vec<usize> = (0..rows).map(|b| b % 4).collect();
        lengths[rows / 2] = 66;
        lengths[rows - 1] = 65;
        let entry = Kernel(Entry::gdn_prefill_chain_k64_tile64, KLAST_F32);
        check(&format!("{rows} rows"), &Case::new(entry, &lengths));
    }
}

/// Panics unless all bits are equal, also those of NaN.
#[track_caller]
fn same_bits(what: &str, got: &[f64], wanted: &[f64]) {
    let bits = |values: &[f64]| -> Vec<u64> { values.iter().map(|x| x.to_bits()).collect() };
    assert!(bits(got) == bits(wanted), "{what}");
}

/// Panics unless `case` leaves the results `one`.
#[track_caller]
fn same_as(what: &str, case: &Case, one: &Done) {
    let done = case.run().unwrap_or_else(|fault| panic!("{what}: {fault}"));
    same_bits(&format!("{what}, o"), &done.o, &one.o);
    same_bits(&format!("{what}, states"), &done.pool, &one.pool);
    same_bits(&format!("{what}, windows"), &done.windows, &one.windows);
}

/// Segments have the bits of one segment. A row of any length, under launches for the longest one, ends within each segment, at its
/// edges and next to them.
#[test]
fn stretches_have_the_bits_of_one() {
    let most = 300;
    let kernels = [
        Kernel(Entry::gdn_prefill_chain_k64_tile64, KLAST_F32),
        Kernel(Entry::kda_prefill_chain_k128_tile64, VLAST_BF16),
    ];
    for (position, lengths) in [
        (0, &[0, 1, 127, 128, 129, 130, 192, 256, 257, 258, 300][..]),
        // The first chunk is a single token, which is not counted as a unit.
        (63, &[1, 2, 65, 66, 67, 193, 194, 195, 300]),
        (30, &[34, 97, 98, 99, 227]),
    ] {
        for entry in kernels {
            for &length in lengths {
                let whole = Case {
                    positions: Some(vec![position]),
                    every: 64,
                    checkpoints: vec![vec![1, 2, -1, 3, 4]],
                    spare: most - length,
                    slots: 5,
                    ..Case::new(entry, &[length])
                };
                let what = format!("{}: {length} tokens from {position}", entry.name());
                let one = check(&what, &whole);
                let edges = vec![2, 4];
                same_as(&what, &Case { edges, ..whole }, &one);
            }
        }
    }
}

#[test]
fn stretches_of_every_chain() {
    for entry in chains_of_one_element() {
        let norm = has_layer(entry);
        let taps = if norm { 4 } else { 0 };
        let whole = Case {
            ratio: 2,
            taps,
            norm,
            fresh: norm.then(|| vec![1]),
            positions: Some(vec![63]),
            every: 64,
            checkpoints: vec![vec![-1, 1, 2]],
            spare: 132,
            slots: 4,
            ..Case::new(entry, &[131])
        };
        let what = format!("{}, {taps} taps, norm: {norm}", entry.name());
        let one = check_within(3e-3, &what, &whole);
        let edges = vec![2, 4];
        same_as(&what, &Case { edges, ..whole }, &one);
    }
}

/// An inactive row writes zeros from the first segment on, and no state.
#[test]
fn an_inactive_row_in_stretches() {
    for entry in [KLAST, KDA] {
        let case = Case {
            read: vec![-1],
            spare: 300,
            edges: vec![2, 4],
            ..Case::new(entry, &[300])
        };
        let done = check(entry.name(), &case);
        assert!(done.o.iter().all(|&o| o == 0.0));
        same_bits("states", &done.pool, &done.before);
    }
}

/// A launch for rows of one token has the results of the scan. The scan's blocks go on from row to row: along z there are as many
/// as rows, fewer, or one.
#[test]
fn rows_of_one_token_beside_longer_ones() {
    for (i, entry) in chains_of_one_element().enumerate() {
        let around = has_layer(entry);
        let whole = Case {
            ratio: if around { 2 } else { 1 },
            taps: if around { 4 } else { 0 },
            norm: around,
            fresh: around.then(|| vec![0, 0, 1, 0, 0, 1, 0, 0]),
            // Chunks of one token at the beginning and at the end of rows, and rows of one token.
            positions: Some(vec![3, 63, 64, 0, 127, 0, 62, 63]),
            // A row of one token and a longer one have no valid slot.
            write: vec![0, 1, 2, 3, 4, 5, -1, -1],
            every: 64,
            checkpoints: [8, 9, 10, -1, 11, 12, 13, 14].map(|slot| vec![slot]).into(),
            slots: 15,
            ..Case::new(entry, &[1, 66, 1, 0, 1, 65, 1, 67])
        };
        let what = format!("{}, around: {around}", entry.name());
        let one = check_within(3e-3, &what, &whole);
        // The number of blocks along z varies by operator, layout and element.
        let turns = [1, 3, 8][i % 3];
        let apart = Case { turns, ..whole };
        same_as(&format!("{what}, {turns} turns"), &apart, &one);
    }
}

/// The results are right whether or not any row has one token, any has more, and one warp can read all lengths. Only the GPU knows
/// the lengths.
#[test]
fn any_rows_beside_any() {
    let mut many: Vec<usize> = (0..70).map(|b| usize::from(b % 5 != 0)).collect();
    (many[33], many[69]) = (66, 5);
    for lengths in [vec![1; 5], vec![66, 2, 5], vec![0; 3], many] {
        for entry in [KLAST, KDA] {
            let whole = Case {
                ratio: 2,
                ..Case::new(entry, &lengths)
            };
            let one = check(entry.name(), &whole);
            let apart = Case { turns: 2, ..whole };
            same_as(entry.name(), &apart, &one);
        }
    }
}

#[test]
fn products_of_a_warpgroup_are_those_of_matrices() {
    let entry = Entry::warpgroup_contract;
    let threads = entry.block() as usize;
    let mut output = vec![u128::MAX; WARPGROUP_RESULTS as usize * threads / 4];
    let address = output.as_mut_ptr().expose_provenance() as u64;
    let input: Vec<u128> = (0..threads as u128).map(|i| i << 64 | !i).collect();
    let source = input.as_ptr().expose_provenance() as u64;
    let regions = [
        region("input", source, 4, input.len() * 4, false),
        region("output", address, 4, output.len() * 4, true),
    ];
    let launch = Launch {
        kernel: entry.name(),
        capability: (9, 0),
        shape: LaunchShape {
            grid: [1; 3],
            block: entry.block(),
            shared_bytes: entry.shared_bytes(),
            cluster: 1,
            overlaps: false,
        },
        constants: DeviceContractConstants { number: 0 }.words(),
        regions: &regions,
    };
    let params = DeviceContractParams {
        input: source,
        output: address,
    };
    // SAFETY: the region is a buffer of this function.
    unsafe { sim::launch(&launch, &|| entry.simulate(bytemuck::bytes_of(&params))) }.unwrap();
    let words: &[u32] = bytemuck::cast_slice(&output);
    let at = matrix_element;
    let triangle = |s: u32, t: u32| if s <= t { at(s, t) } else { 0.0 };
    let sum = |terms: u32, term: &dyn Fn(u32) -> f32| (0..terms).map(term).sum::<f32>();
    for id in 0..threads as u32 {
        let got = |result: u32| words[result as usize * threads + id as usize];
        let copied = |result: u32| {
            let words: [u32; 4] = std::array::from_fn(|i| got(result + i as u32));
            bytemuck::cast::<_, u128>(words)
        };
        let (own, other) = (input[id as usize], input[threads - 1 - id as usize]);
        assert_eq!(copied(198), own, "copy_bulk {id}");
        assert_eq!(copied(202), other, "copies that are counted {id}");
        assert_eq!(copied(206), own, "words that are counted {id}");
        for i in 0..64 {
            let row = id / 32 * 16 + id % 32 / 4 + i / 2 % 2 * 8;
            let column = i / 4 * 8 + id % 4 * 2 + i % 2;
            let of = |result: u32| f32::from_bits(got(result + i));
            assert_eq!(
                of(0),
                sum(128, &|k| at(row, k) * at(column, k)),
                "by_both {row} {column}"
            );
            assert_eq!(
                of(96),
                1.0 + sum(64, &|t| at(row, t) * at(t, column)),
                "add {row} {column}"
            );
            if i < 32 {
                let product = sum(64, &|s| at(row, s) * triangle(s, column));
                assert_eq!(of(64), product, "by_triangle {row} {column}");
                assert_eq!(of(160), 1.0 + product, "add {row} {column}");
            }
        }
        // Row i of matrix m, whose columns are in the lanes.
        let (m, i) = (id % 32 / 8, id % 8);
        for word in 0..4 {
            let element = |j: u32| {
                let lane = id / 32 * 32 + 4 * j + i / 2;
                let row = lane / 32 * 16 + lane % 32 / 4 + m % 2 * 8;
                at(row, m / 2 * 8 + lane % 4 * 2 + i % 2)
            };
            let pair = [element(2 * word), element(2 * word + 1)];
            let bits = pair.map(|x| u32::from(f16::from_f32(x).to_bits()));
            assert_eq!(
                got(192 + word),
                bits[1] << 16 | bits[0],
                "thread {id}, word {word}"
            );
        }
        let pair = 196 * threads + 2 * id as usize;
        assert_eq!(words[pair..pair + 2], [!id, id]);
    }
}

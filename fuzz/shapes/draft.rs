//! Reads the fuzzer's bytes as a launch: gates, a way of keeping states, options, and the form of every tensor. Most of the forms fit
//! the launch.

use gated_delta::tensor::MAX_DIMS;
use gated_delta::{
    Activation, BetaScale, DType, Formulation, HeadMap, KdaBeta, Options, StateLayout,
};
use gated_delta_harness::arguments::{
    Arguments, Convolved, DecayKind, GateKind, GatedNorm, Kept, New, Operator, Packed, Pending,
    Tokens,
};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};

use crate::form::Form;
use crate::sizes::{Sizes, draw_tokens};

/// A launch on tensors without memory, drawn from the fuzzer's bytes.
#[derive(Debug)]
pub struct Draft {
    /// The launch's tensors, each by its position in `forms`.
    pub arguments: Arguments<usize>,
    /// Names and forms of the tensors.
    pub forms: Vec<(&'static str, Form)>,
    /// Tokens of each packed row, if all rows have the same length.
    pub tokens: usize,
    /// Values that index tensors are filled with, in a cycle. If empty, they are filled with ascending numbers.
    pub indices: Vec<i64>,
    /// Number of the variant to launch, modulo the count of variants.
    pub variant: u8,
}

/// Way in which a launch keeps states.
#[derive(Clone, Copy, PartialEq)]
enum Keeping {
    InPlace,
    Slots,
    OtherPool,
    Snapshots,
    TokenSlots,
    Resume,
    Commit,
    Pending,
    Flush,
}

impl Keeping {
    const ALL: [Self; 9] = [
        Self::InPlace,
        Self::Slots,
        Self::OtherPool,
        Self::Snapshots,
        Self::TokenSlots,
        Self::Resume,
        Self::Commit,
        Self::Pending,
        Self::Flush,
    ];

    /// Whether the states' write-back is deferred, with a ring of pending tokens.
    fn is_deferred(self) -> bool {
        matches!(self, Self::Pending | Self::Flush)
    }
}

/// True about once in `n` calls. False once the bytes are used up.
pub fn rarely(u: &mut Unstructured<'_>, n: u8) -> Result<bool> {
    Ok(u.int_in_range(0..=n - 1)? == n - 1)
}

impl<'a> Arbitrary<'a> for Draft {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let gates = gates(u)?;
        let keeping = *u.choose(&Keeping::ALL)?;
        let mut sizes = Sizes::draw(u)?;
        let options = options(u, keeping)?;
        if keeping.is_deferred() && !rarely(u, 16)? {
            sizes.packed = false;
            sizes.wait(options.formulation);
        }
        let parallel = options.formulation == Formulation::Parallel;
        // Drafts of KDA have neither convolution nor norm in parallel kernels.
        let has_layer = !parallel || gates.operator() == Operator::Gdn || rarely(u, 16)?;
        let convolves = keeping.is_deferred() && has_layer && rarely(u, 2)?;
        let of_parallel = options.formulation == Formulation::Parallel && !rarely(u, 8)?;
        let state = match of_parallel {
            true => *u.choose(&[DType::Bf16, DType::F16])?,
            false => *u.choose(&[DType::F32, DType::Bf16, DType::F16])?,
        };
        if convolves {
            sizes.taps = u.int_in_range(2..=4)?;
        }
        let x = match convolves {
            true => Some(*u.choose(&[DType::F32, DType::Bf16, DType::F16])?),
            false => None,
        };
        let mut draw = Draw {
            u,
            gates,
            sizes: &sizes,
            state,
            x,
            forms: Vec::new(),
        };
        let mut arguments = draw.arguments(keeping, options)?;
        if rarely(draw.u, 16)? {
            draw.toggle(&mut arguments)?;
        }
        let mut forms = draw.forms;
        if u.arbitrary()? {
            let bent = u.choose_index(forms.len())?;
            forms[bent].1.bend(u)?;
        }
        let (indices, variant) = (indices(u)?, u.arbitrary()?);
        // Drawn last, so that the bytes of an older corpus keep their meaning.
        if u.arbitrary()? {
            arguments.options.formulation = Formulation::Auto;
        }
        Ok(Self {
            arguments,
            forms,
            tokens: sizes.tokens,
            indices,
            variant,
        })
    }
}

fn gates(u: &mut Unstructured<'_>) -> Result<GateKind> {
    Ok(match u.int_in_range(0..=5)? {
        0 | 1 => GateKind::Raw(BetaScale::One),
        2 => GateKind::Raw(BetaScale::Two),
        3 => GateKind::Given,
        _ => {
            let decay = match u.int_in_range(0..=3)? {
                0 => DecayKind::Log,
                1 => DecayKind::Softplus,
                2 => DecayKind::LowerBound(-5.0),
                _ => DecayKind::LowerBound(-u.arbitrary::<f32>()?.abs()),
            };
            GateKind::Kda(decay, *u.choose(&[KdaBeta::Given, KdaBeta::Logit])?)
        }
    })
}

fn options(u: &mut Unstructured<'_>, keeping: Keeping) -> Result<Options> {
    let is_deferred = keeping.is_deferred();
    let has_parallel = !matches!(keeping, Keeping::Snapshots | Keeping::TokenSlots);
    let parallel = rarely(u, if has_parallel { 2 } else { 32 })?;
    let v_last = rarely(u, if parallel || is_deferred { 16 } else { 2 })?;
    let mut options = Options::default()
        .head_map(*u.choose(&[HeadMap::Grouped, HeadMap::Tiled])?)
        .qk_l2norm(u.arbitrary()?);
    if v_last {
        options = options.state_layout(StateLayout::VLast);
    }
    if rarely(u, 8)? {
        options = options.scale(u.arbitrary()?);
    }
    if rarely(u, 4)? {
        options = options.null_slot(u.int_in_range(0..=4)?);
    }
    Ok(options.formulation(match parallel {
        true => Formulation::Parallel,
        false => Formulation::Recurrent,
    }))
}

/// Draws the tensors of a launch from the fuzzer's bytes.
struct Draw<'d, 'a> {
    u: &'d mut Unstructured<'a>,
    gates: GateKind,
    sizes: &'d Sizes,
    /// Dtype of the states.
    state: DType,
    /// Dtype of a convolution's input, if there is a convolution.
    x: Option<DType>,
    forms: Vec<(&'static str, Form)>,
}

impl Draw<'_, '_> {
    /// Draws a tensor and returns its position in `forms`.
    fn tensor(&mut self, name: &'static str) -> Result<usize> {
        let dims = self.sizes.dims(name, self.gates.operator(), self.u)?;
        let dtype = match (name, self.x) {
            ("x" | "windows" | "inputs", Some(x)) if !rarely(self.u, 16)? => x,
            ("keys", Some(_)) if !rarely(self.u, 16)? => DType::F32,
            _ => dtype(name, self.state, self.u)?,
        };
        let form = Form::draw(dtype, dims, free_dims(name), self.u)?;
        self.forms.push((name, form));
        Ok(self.forms.len() - 1)
    }

    /// As [`tensor`](Self::tensor), if `wanted`.
    fn wanted(&mut self, wanted: bool, name: &'static str) -> Result<Option<usize>> {
        wanted.then(|| self.tensor(name)).transpose()
    }

    fn tokens(&mut self, [k, v, gate, beta]: [&'static str; 4]) -> Result<Tokens<usize>> {
        Ok(Tokens {
            k: self.tensor(k)?,
            v: self.tensor(v)?,
            gate: self.tensor(gate)?,
            beta: self.tensor(beta)?,
        })
    }

    fn new_tokens(&mut self) -> Result<New<usize>> {
        let [gate, beta] = self.gates.names();
        Ok(New {
            q: self.tensor("q")?,
            tokens: self.tokens(["k", "v", gate, beta])?,
            o: self.tensor("o")?,
        })
    }

    fn convolved(&mut self) -> Result<Convolved<usize>> {
        let [gate, beta] = self.gates.names();
        let has_bias = self.u.arbitrary()?;
        Ok(Convolved {
            x: self.tensor("x")?,
            heads: self.sizes.heads,
            gate: self.tensor(gate)?,
            beta: self.tensor(beta)?,
            o: self.tensor("o")?,
            weight: self.tensor("conv_weight")?,
            bias: self.wanted(has_bias, "conv_bias")?,
            activation: *self.u.choose(&[Activation::Silu, Activation::None])?,
            windows: self.tensor("windows")?,
            write_windows: None,
            window_snapshots: None,
        })
    }

    fn norm(&mut self) -> Result<GatedNorm<usize>> {
        Ok(GatedNorm {
            z: self.tensor("z")?,
            weight: self.tensor("norm_weight")?,
            eps: 1e-6,
            activation: *self.u.choose(&[Activation::Silu, Activation::Sigmoid])?,
        })
    }

    fn kept(&mut self) -> Result<Kept<usize>> {
        let [gate, beta] = self.gates.previous_names();
        Ok(Kept {
            tokens: self.tokens(["previous k", "previous v", gate, beta])?,
            keep: self.tensor("keep")?,
        })
    }

    /// Ring of pending tokens. With [`Formulation::Parallel`] a convolution's inputs are mostly pending too.
    fn pending(&mut self, options: Options, is_flush: bool) -> Result<Pending<usize>> {
        let waits = self.x.is_some() && options.formulation == Formulation::Parallel;
        let inputs = self.x.is_some() && (waits != rarely(self.u, 16)?);
        let windows = is_flush && self.x.is_some() && (waits != rarely(self.u, 16)?);
        Ok(Pending {
            keys: self.tensor("keys")?,
            updates: self.tensor("updates")?,
            decays: self.tensor("decays")?,
            len: self.tensor("pending len")?,
            base: self.tensor("pending base")?,
            inputs: self.wanted(inputs, "inputs")?,
            windows: self.wanted(windows, "windows")?,
            most: self.sizes.ring[0],
        })
    }

    fn packed(&mut self) -> Result<Packed<usize>> {
        Ok(Packed {
            cu_seqlens: self.tensor("cu_seqlens")?,
            max_tokens: match rarely(self.u, 3)? {
                true => draw_tokens(self.u)?,
                false => self.sizes.tokens,
            },
        })
    }

    /// Draws the tensors of a launch that keeps states in this way.
    fn arguments(&mut self, keeping: Keeping, options: Options) -> Result<Arguments<usize>> {
        let is_commit = keeping == Keeping::Commit;
        let has_previous = matches!(keeping, Keeping::Resume | Keeping::Commit);
        let is_flush = keeping == Keeping::Flush;
        let has_new = !is_commit && !is_flush;
        let new = match has_new && self.x.is_none() {
            true => Some(self.new_tokens()?),
            false => None,
        };
        let convolved = match has_new && self.x.is_some() {
            true => Some(self.convolved()?),
            false => None,
        };
        let packed = match self.sizes.packed && has_new {
            true => Some(self.packed()?),
            false => None,
        };
        let (a_log, dt_bias) = match self.gates {
            GateKind::Raw(_) => (true, true),
            GateKind::Given | GateKind::Kda(DecayKind::Log, _) => (false, false),
            GateKind::Kda(DecayKind::Softplus, _) => (true, self.u.arbitrary()?),
            GateKind::Kda(DecayKind::LowerBound(_), _) => {
                (self.u.arbitrary()?, self.u.arbitrary()?)
            }
        };
        let of_tokens = keeping == Keeping::TokenSlots;
        let of_rows = !of_tokens && !matches!(keeping, Keeping::InPlace | Keeping::Snapshots);
        let reads_alone =
            matches!(keeping, Keeping::InPlace | Keeping::Snapshots) && rarely(self.u, 3)?;
        let pending = match keeping.is_deferred() {
            true => Some(self.pending(options, is_flush)?),
            false => None,
        };
        let norm = match convolved.is_some() && self.u.arbitrary()? {
            true => Some(self.norm()?),
            false => None,
        };
        let fresh = convolved.is_some() && rarely(self.u, 4)?;
        let usual = pending.is_none() || rarely(self.u, 16)?;
        let write_slots = of_rows && usual && self.u.arbitrary()?;
        let accepted = of_tokens && self.u.arbitrary()?;
        let write_pool = keeping == Keeping::OtherPool || (usual && rarely(self.u, 4)?);
        Ok(Arguments {
            gates: self.gates,
            a_log: self.wanted(a_log, "A_log")?,
            dt_bias: self.wanted(dt_bias, "dt_bias")?,
            new,
            previous: match has_previous {
                true => Some(self.kept()?),
                false => None,
            },
            previous_x: None,
            pool: self.tensor("pool")?,
            write_pool: self.wanted(write_pool && !reads_alone, "write_pool")?,
            read_slots: self.wanted(of_rows, "read_slots")?,
            write_slots: self.wanted(write_slots, "write_slots")?,
            token_slots: self.wanted(of_tokens, "token_slots")?,
            accepted: self.wanted(accepted, "accepted")?,
            snapshots: self.wanted(keeping == Keeping::Snapshots, "snapshots")?,
            packed,
            convolved,
            norm,
            fresh: self.wanted(fresh, "fresh")?,
            positions: None,
            checkpoints: None,
            workspace: None,
            pending,
            update_state: !reads_alone,
            options,
        })
    }

    /// Removes an optional tensor that is there, or adds one that is not.
    fn toggle(&mut self, arguments: &mut Arguments<usize>) -> Result<()> {
        let (name, tensor) = match self.u.int_in_range(0..=9)? {
            0 => ("A_log", &mut arguments.a_log),
            1 => ("dt_bias", &mut arguments.dt_bias),
            2 => ("write_pool", &mut arguments.write_pool),
            3 => ("read_slots", &mut arguments.read_slots),
            4 => ("write_slots", &mut arguments.write_slots),
            5 => ("token_slots", &mut arguments.token_slots),
            6 => ("accepted", &mut arguments.accepted),
            7 => ("snapshots", &mut arguments.snapshots),
            8 => {
                arguments.update_state = !arguments.update_state;
                return Ok(());
            }
            _ => {
                arguments.previous = match arguments.previous {
                    Some(_) => None,
                    None => Some(self.kept()?),
                };
                return Ok(());
            }
        };
        *tensor = match tensor {
            Some(_) => None,
            None => Some(self.tensor(name)?),
        };
        Ok(())
    }
}

/// Number of outermost dims of the tensor `name` whose strides are free.
fn free_dims(name: &str) -> usize {
    match name {
        "A_log" | "dt_bias" => 0,
        "conv_bias" | "norm_weight" => 0,
        "pool" | "write_pool" | "keys" | "updates" | "decays" | "inputs" | "conv_weight" => 1,
        "snapshots" => 2,
        _ => MAX_DIMS,
    }
}

/// Values for the index tensors; mostly none, for ascending numbers.
fn indices(u: &mut Unstructured<'_>) -> Result<Vec<i64>> {
    let count = if rarely(u, 3)? {
        u.int_in_range(1..=8)?
    } else {
        0
    };
    let index = |u: &mut Unstructured<'_>| match rarely(u, 16)? {
        true => u.arbitrary(),
        false => u.int_in_range(-1..=6),
    };
    (0..count).map(|_| index(u)).collect()
}

/// A dtype that the tensor `name` may have.
fn dtype(name: &str, state: DType, u: &mut Unstructured<'_>) -> Result<DType> {
    let (floats, indices) = (
        [DType::F32, DType::Bf16, DType::F16],
        [DType::I32, DType::I64, DType::U32],
    );
    let allowed = match name {
        "pool" | "write_pool" | "snapshots" => &[state][..],
        "A_log" | "dt_bias" | "updates" | "decays" => &[DType::F32],
        "read_slots" | "write_slots" | "token_slots" | "accepted" | "cu_seqlens" | "keep" => {
            &indices
        }
        "pending len" | "pending base" | "fresh" => &indices,
        _ => &floats,
    };
    Ok(*u.choose(allowed)?)
}

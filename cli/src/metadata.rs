//! The `__metadata__` of a problem's file: its keys, and their contradictions with the tensors or each other.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use gated_delta::{Activation, BetaScale, Formulation, HeadMap, KdaBeta, Options, StateLayout};
use gated_delta_harness::arguments::{DecayKind, GateKind};

use crate::op::{DEFERRED, Op};

/// Values of the metadata. An error message begins with the key.
pub(crate) struct Metadata {
    pub op: Op,
    pub options: Options,
    pub update_state: bool,
    /// Whether the state after every token is wanted.
    pub snapshots: bool,
    pub max_tokens: Option<usize>,
    /// Tokens from one checkpoint to the next.
    pub checkpoint_every: Option<usize>,
    /// Most pending tokens of a slot, N.
    pub max_pending: Option<usize>,
    /// Query/key heads H, with a convolution.
    pub heads: Option<usize>,
    conv_activation: Option<Activation>,
    /// Epsilon of the norm, if there is one.
    pub norm_eps: Option<f32>,
    norm_activation: Option<Activation>,
    gate: Option<Gate>,
    beta_scale: BetaScale,
    beta: KdaBeta,
    lower_bound: Option<f32>,
}

#[derive(Clone, Copy, PartialEq)]
enum Gate {
    Raw,
    Given,
    Log,
    Softplus,
    LowerBound,
}

const STATE_LAYOUTS: [(&str, StateLayout); 2] = [
    ("k_last", StateLayout::KLast),
    ("v_last", StateLayout::VLast),
];
const HEAD_MAPS: [(&str, HeadMap); 2] = [("grouped", HeadMap::Grouped), ("tiled", HeadMap::Tiled)];
const GDN_GATES: &[(&str, Gate)] = &[("raw", Gate::Raw), ("given", Gate::Given)];
const KDA_GATES: &[(&str, Gate)] = &[
    ("log", Gate::Log),
    ("softplus", Gate::Softplus),
    ("lower_bound", Gate::LowerBound),
];

/// Wanted values of `norm_eps`, for error messages.
const EPS: &str = "a number above 0";

impl Metadata {
    /// Reads the values of all keys.
    pub fn parse(metadata: &BTreeMap<String, String>) -> Result<Self, String> {
        let ops = Op::ALL.map(|op| (op.name(), op));
        let mut parsed = Self {
            op: match metadata.get("op") {
                Some(op) => one_of("op", op, &ops)?,
                None => return Err(format!("op: wanted {}, got none", names(&ops))),
            },
            options: Options::default(),
            update_state: true,
            snapshots: false,
            max_tokens: None,
            checkpoint_every: None,
            max_pending: None,
            heads: None,
            conv_activation: None,
            norm_eps: None,
            norm_activation: None,
            gate: None,
            beta_scale: BetaScale::One,
            beta: KdaBeta::Given,
            lower_bound: None,
        };
        if parsed.op.is_prefill() {
            parsed.options.formulation = Formulation::Chunked;
        }
        for (key, value) in metadata {
            parsed.set(key, value)?;
        }
        Ok(parsed)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        use Op::{GdnDecode, GdnMtp, GdnPrefill, KdaPrefill, KdaRecurrent};
        let takers: &[Op] = match key {
            "beta_scale" => &[GdnDecode, GdnMtp, GdnPrefill],
            "beta" | "lower_bound" => &[KdaRecurrent, KdaPrefill],
            "formulation" => &[GdnMtp, KdaRecurrent],
            "max_tokens" => &[GdnMtp, GdnPrefill, KdaRecurrent, KdaPrefill],
            "checkpoint_every" | "split" => &[GdnPrefill, KdaPrefill],
            "max_pending" => DEFERRED,
            _ => &Op::ALL,
        };
        if !takers.contains(&self.op) {
            let takers: Vec<_> = takers.iter().map(|taker| taker.name()).collect();
            return Err(format!(
                "{key}: {} takes none, {} does",
                self.op.name(),
                takers.join(" or ")
            ));
        }
        let options = &mut self.options;
        match key {
            // Known from elsewhere, or for readers only.
            "op" | "model" => {}
            "heads" => {
                self.heads = Some(number(key, value, "the number of query/key heads")?);
            }
            "conv_activation" => {
                let activations = [("silu", Activation::Silu), ("none", Activation::None)];
                self.conv_activation = Some(one_of(key, value, &activations)?);
            }
            "norm_eps" => self.norm_eps = Some(held(key, value, EPS)?),
            "norm_activation" => {
                let activations = [("silu", Activation::Silu), ("sigmoid", Activation::Sigmoid)];
                self.norm_activation = Some(one_of(key, value, &activations)?);
            }
            "state_layout" => {
                options.state_layout = one_of(key, value, &STATE_LAYOUTS)?;
            }
            "head_map" => options.head_map = one_of(key, value, &HEAD_MAPS)?,
            "formulation" => {
                let formulations = [
                    ("auto", Formulation::Auto),
                    ("recurrent", Formulation::Recurrent),
                    ("parallel", Formulation::Parallel),
                ];
                options.formulation = one_of(key, value, &formulations)?;
            }
            "qk_l2norm" => options.qk_l2norm = flag(key, value)?,
            "update_state" => self.update_state = flag(key, value)?,
            "scale" => options.scale = Some(held(key, value, "a number")?),
            "null_slot" => options.null_slot = Some(number(key, value, "a slot, 0 or more")?),
            "snapshots" => {
                self.snapshots = flag(key, value)?;
                if self.snapshots && matches!(self.op, GdnDecode | GdnPrefill | KdaPrefill) {
                    let op = self.op.name();
                    return Err(format!("snapshots: {op} has none, wanted false"));
                }
            }
            "checkpoint_every" => {
                let wanted = "a number of tokens, a multiple of 64";
                self.checkpoint_every = Some(number(key, value, wanted)?);
            }
            "split" => {
                let wanted = "a number of tokens, a multiple of 64";
                options.split = Some(number(key, value, wanted)?);
            }
            "max_pending" => {
                self.max_pending = Some(number(key, value, "a number of tokens")?);
            }
            "max_tokens" if self.op.is_prefill() => {
                self.max_tokens = Some(number(key, value, "a number of tokens")?);
            }
            "max_tokens" => {
                let wanted = "a number of tokens, 1 or more";
                let tokens = number(key, value, wanted)?;
                if tokens < 1 {
                    return Err(format!("{key}: wanted {wanted}, got {value:?}"));
                }
                self.max_tokens = Some(tokens);
            }
            "gate" => {
                let gates = match self.op {
                    GdnDecode | GdnMtp | GdnPrefill => GDN_GATES,
                    KdaRecurrent | KdaPrefill => KDA_GATES,
                };
                self.gate = Some(one_of(key, value, gates)?);
            }
            "lower_bound" => self.lower_bound = Some(held(key, value, "a number below 0")?),
            "beta" => {
                let betas = [("given", KdaBeta::Given), ("sigmoid", KdaBeta::Logit)];
                self.beta = one_of(key, value, &betas)?;
            }
            "beta_scale" => {
                let scales = [("1", BetaScale::One), ("2", BetaScale::Two)];
                self.beta_scale = one_of(key, value, &scales)?;
            }
            _ => return Err(format!("{key:?}: wanted no such key, got {value:?}")),
        }
        Ok(())
    }

    /// Activations of the convolution and of the norm. `has` tells the tensors of the file: the keys have to be present exactly if the
    /// tensors are.
    pub fn activations(&self, has: impl Fn(&str) -> bool) -> Result<[Activation; 2], String> {
        let lacks = |key, wanted, tensor| format!("{key}: wanted {wanted} with {tensor}, got none");
        match (has("x") || has("prev.x"), self.heads) {
            (true, None) => return Err(lacks("heads", "the number of query/key heads", "x")),
            (false, Some(_)) => return Err("heads: wanted none without x".to_owned()),
            _ => {}
        }
        match (has("z"), self.norm_eps) {
            (true, None) => return Err(lacks("norm_eps", EPS, "z")),
            (false, Some(_)) => return Err("norm_eps: wanted none without z".to_owned()),
            _ => {}
        }
        let keys = [
            ("conv_activation", self.conv_activation, "x"),
            ("norm_activation", self.norm_activation, "z"),
        ];
        for (key, activation, tensor) in keys {
            let of_commit = tensor == "x" && has("prev.x");
            if activation.is_some() && !has(tensor) && !of_commit {
                return Err(format!("{key}: wanted none without {tensor}"));
            }
        }
        Ok([self.conv_activation, self.norm_activation].map(Option::unwrap_or_default))
    }

    /// Form of the gates. `has` tells the tensors of the file.
    pub fn gates(&self, has: impl Fn(&str) -> bool) -> Result<GateKind, String> {
        if self.max_tokens.is_some() && !has("cu_seqlens") {
            return Err("max_tokens: wanted none without cu_seqlens".to_owned());
        }
        if self.max_pending.is_some() && !has("pending.len") {
            return Err("max_pending: wanted none without pending.len".to_owned());
        }
        match (has("checkpoint_slots"), self.checkpoint_every) {
            (true, None) => {
                return Err(
                    "checkpoint_every: wanted a multiple of 64 with checkpoint_slots, got none"
                        .to_owned(),
                );
            }
            (false, Some(_)) => {
                return Err("checkpoint_every: wanted none without checkpoint_slots".to_owned());
            }
            _ => {}
        }
        match self.op {
            Op::GdnDecode | Op::GdnMtp | Op::GdnPrefill => self.gdn_gates(has),
            Op::KdaRecurrent | Op::KdaPrefill => self.kda_gates(),
        }
    }

    fn gdn_gates(&self, has: impl Fn(&str) -> bool) -> Result<GateKind, String> {
        let given = ["g", "beta", "prev.g", "prev.beta"].into_iter().any(has);
        match self.gate {
            Some(Gate::Raw) if given => {
                Err("gate: raw takes a, b, A_log and dt_bias, the file has g or beta".to_owned())
            }
            Some(Gate::Given) if !given => {
                Err("gate: given takes g and beta, the file has neither".to_owned())
            }
            _ if given && self.beta_scale == BetaScale::Two => Err(
                "beta_scale: wanted none with given gates, whose beta is taken as it is".to_owned(),
            ),
            _ if given => Ok(GateKind::Given),
            _ => Ok(GateKind::Raw(self.beta_scale)),
        }
    }

    fn kda_gates(&self) -> Result<GateKind, String> {
        let decay = match (self.gate, self.lower_bound) {
            (Some(Gate::LowerBound), Some(bound)) => DecayKind::LowerBound(bound),
            (Some(Gate::LowerBound), None) => {
                return Err(
                    "lower_bound: wanted a number below 0 with gate = lower_bound, got none"
                        .to_owned(),
                );
            }
            (None, _) => return Err(format!("gate: wanted {}, got none", names(KDA_GATES))),
            (Some(_), Some(bound)) => {
                return Err(format!(
                    "lower_bound: wanted none without gate = lower_bound, got {bound}"
                ));
            }
            (Some(Gate::Softplus), None) => DecayKind::Softplus,
            (Some(Gate::Log | Gate::Raw | Gate::Given), None) => DecayKind::Log,
        };
        Ok(GateKind::Kda(decay, self.beta))
    }
}

/// Value of `state_layout` for a layout.
pub(crate) fn state_layout_name(layout: StateLayout) -> &'static str {
    match layout {
        StateLayout::KLast => STATE_LAYOUTS[0].0,
        StateLayout::VLast => STATE_LAYOUTS[1].0,
    }
}

/// Value of `head_map` for a head map.
pub(crate) fn head_map_name(map: HeadMap) -> &'static str {
    match map {
        HeadMap::Grouped => HEAD_MAPS[0].0,
        HeadMap::Tiled => HEAD_MAPS[1].0,
    }
}

fn one_of<T: Copy>(key: &str, value: &str, allowed: &[(&str, T)]) -> Result<T, String> {
    allowed
        .iter()
        .find(|(name, _)| *name == value)
        .map(|(_, choice)| *choice)
        .ok_or_else(|| format!("{key}: wanted {}, got {value:?}", names(allowed)))
}

/// List of the names in words: "a, b or c".
fn names<T>(allowed: &[(&str, T)]) -> String {
    let names: Vec<&str> = allowed.iter().map(|(name, _)| *name).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

fn flag(key: &str, value: &str) -> Result<bool, String> {
    one_of(key, value, &[("true", true), ("false", false)])
}

fn number<T: FromStr<Err: Display>>(key: &str, value: &str, wanted: &str) -> Result<T, String> {
    value
        .trim()
        .parse()
        .map_err(|error| format!("{key}: wanted {wanted}, got {value:?} ({error})"))
}

/// A number that f32 holds: neither infinite nor 0 unless `value` is.
fn held(key: &str, value: &str, wanted: &str) -> Result<f32, String> {
    let (exact, held): (f64, f32) = (number(key, value, wanted)?, number(key, value, wanted)?);
    let is_held = held.is_finite() == exact.is_finite() && (held == 0.0) == (exact == 0.0);
    match is_held {
        true => Ok(held),
        false => Err(format!(
            "{key}: wanted {wanted}, within the range of f32, got {value:?}"
        )),
    }
}

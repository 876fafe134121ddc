//! Turns a problem into the library's arguments.

use gated_delta::{Error, Tensor};
use gated_delta_harness::arguments::{
    Arguments, Checkpoints, CommitConvolution, Convolved, GatedNorm, Kept, KeptX, New, Packed,
    Pending, Tokens,
};

use crate::op::{Op, excluded, previous_gates};
use crate::problem::{CONV, INPUTS, NORM, PREVIOUS, Problem, Views};

/// Tensors that belong to new tokens, and so exclude a commit or a flush, which have none.
const OF_NEW_TOKENS: [&str; 12] = [
    "k",
    "v",
    "a",
    "b",
    "g",
    "beta",
    "token_slots",
    "accepted",
    "cu_seqlens",
    "snapshots",
    "z",
    "norm_weight",
];

/// Tensors of a convolution's weights. A flush excludes these too, but may have windows.
const OF_CONV: [&str; 2] = ["conv_weight", "conv_bias"];

impl Problem {
    /// The library's arguments, from views of the problem's tensors.
    ///
    /// # Errors
    /// [`Error::MissingTensor`]; [`Error::Contradiction`] for tensors of other gates, for new tokens in a commit, and for q, k or v next to
    /// a convolution; [`Error::Shape`] in [`Op::GdnDecode`] for rows without exactly one token.
    pub fn arguments<'a>(&self, views: &Views<'a>) -> Result<Arguments<Tensor<'a>>, Error> {
        self.check_excluded()?;
        let view = |name: &&'static str| views.get(name).copied().ok_or_else(|| self.missing(name));
        let arguments = self.places().map(&view)?;
        self.check_decode(&arguments)?;
        check_empty(&arguments)?;
        Ok(arguments)
    }

    /// Arguments with the name of each tensor in place of the tensor.
    fn places(&self) -> Arguments<&'static str> {
        let optional = |name| self.tensors.contains_key(name).then_some(name);
        let [gate, beta] = self.gates.names();
        let (is_commit, has_new) = (self.is_commit(), self.has_new());
        let convolved = (self.has_conv() && has_new).then(|| Convolved {
            x: "x",
            heads: self.heads.unwrap_or(0),
            gate,
            beta,
            o: "o",
            weight: "conv_weight",
            bias: optional("conv_bias"),
            activation: self.conv_activation,
            windows: "conv_state",
            write_windows: None,
            window_snapshots: optional("conv_snapshots"),
        });
        let norm = self.has_norm().then(|| GatedNorm {
            z: "z",
            weight: "norm_weight",
            eps: self.norm_eps.unwrap_or(0.0),
            activation: self.norm_activation,
        });
        let new = (has_new && !self.has_conv()).then_some(New {
            q: "q",
            tokens: Tokens {
                k: "k",
                v: "v",
                gate,
                beta,
            },
            o: "o",
        });
        let [gate, beta] = previous_gates(self.gates);
        let previous_x = (self.has_previous() && self.has_conv()).then(|| KeptX {
            x: "prev.x",
            gate,
            beta,
            keep: "keep",
            conv: is_commit.then(|| CommitConvolution {
                heads: self.heads.unwrap_or(0),
                weight: "conv_weight",
                bias: optional("conv_bias"),
                activation: self.conv_activation,
                windows: "conv_state",
                write_windows: None,
            }),
        });
        let previous = (self.has_previous() && !self.has_conv()).then_some(Kept {
            tokens: Tokens {
                k: "prev.k",
                v: "prev.v",
                gate,
                beta,
            },
            keep: "keep",
        });
        let packed = optional("cu_seqlens").map(|cu_seqlens| Packed {
            cu_seqlens,
            max_tokens: self.max_tokens(),
        });
        Arguments {
            gates: self.gates,
            a_log: optional("A_log"),
            dt_bias: optional("dt_bias"),
            new,
            previous,
            previous_x,
            pool: "state",
            write_pool: None,
            read_slots: optional("read_slots"),
            write_slots: optional("write_slots"),
            token_slots: optional("token_slots"),
            accepted: optional("accepted"),
            snapshots: optional("snapshots"),
            packed,
            convolved,
            norm,
            fresh: optional("fresh"),
            positions: optional("positions"),
            checkpoints: optional("checkpoint_slots").map(|slots| Checkpoints {
                every: self.checkpoint_every.unwrap_or(0),
                slots,
            }),
            workspace: optional("workspace"),
            pending: self.has_pending().then(|| Pending {
                keys: "pending.keys",
                updates: "pending.updates",
                decays: "pending.decays",
                len: "pending.len",
                base: "pending.base",
                inputs: optional(INPUTS),
                windows: optional("conv_state").filter(|_| self.is_flush()),
                most: self.most_pending(),
            }),
            update_state: self.update_state,
            options: self.options,
        }
    }

    /// Checks that there is no tensor that the gates, a commit or a flush exclude.
    fn check_excluded(&self) -> Result<(), Error> {
        let present = |names: &[&'static str]| {
            let mut names = names.iter().copied();
            names.find(|name| self.tensors.contains_key(name))
        };
        let (gates, excluded) = excluded(self.gates);
        if let Some(other) = present(excluded) {
            return Err(Error::Contradiction {
                one: gates,
                other,
                why: "g is the log decay as it is, or gates are computed",
            });
        }
        let made = ["q", "k", "v", "prev.k", "prev.v"];
        if let (Some(one), Some(other)) = (present(&CONV), present(&made)) {
            return Err(Error::Contradiction {
                one,
                other,
                why: "a convolution makes q, k and v of x",
            });
        }
        let without_new = [
            (
                self.is_commit(),
                "a commit",
                &[][..],
                "previous tokens without a q or an x are committed, and there are no new ones",
            ),
            (
                self.is_flush(),
                "a flush",
                &OF_CONV[..],
                "pending tokens without a q or an x are flushed, and there are no new ones",
            ),
        ];
        for (is, one, besides, why) in without_new {
            let other = present(&OF_NEW_TOKENS).or_else(|| present(besides));
            if let Some(other) = other.filter(|_| is) {
                return Err(Error::Contradiction { one, other, why });
            }
        }
        Ok(())
    }

    /// Checks that each row of a `gdn_decode` has one token: the library's steps take any number.
    fn check_decode(&self, arguments: &Arguments<Tensor<'_>>) -> Result<(), Error> {
        let (tensor, dims, got, rank) = match (&arguments.new, &arguments.convolved) {
            (Some(new), _) => ("q", "[B, T = 1, H, K]", new.q.dims(), 4),
            (None, Some(convolved)) => ("x", "[B, T = 1, D]", convolved.x.dims(), 3),
            (None, None) => return Ok(()),
        };
        if self.op == Op::GdnDecode && (got.len() != rank || got[1] != 1) {
            return Err(Error::Shape {
                tensor,
                wanted: format!("{dims} with op = gdn_decode"),
                got: *got,
            });
        }
        Ok(())
    }

    /// The error [`Error::MissingTensor`] for an input.
    pub(crate) fn missing(&self, tensor: &'static str) -> Error {
        let needed_by = match tensor {
            name if PREVIOUS.contains(&name) => "previous tokens",
            name if name.starts_with("pending.") => "pending tokens",
            name if CONV.contains(&name) => "convolutions",
            name if NORM.contains(&name) => "norms",
            "a" | "b" => "raw gates",
            "g" | "beta" if Op::GDN.contains(&self.op) => "given gates",
            _ => self.op.plural(),
        };
        Error::MissingTensor { tensor, needed_by }
    }

    /// Puts the names of this problem's tensors into an error of the library.
    pub(crate) fn renamed(&self, mut error: Error) -> Error {
        use Error::{
            Alignment, Contradiction, DType, Hazard, Index, Memory, MissingTensor, Range, ReadOnly,
            Shape, Stride, Unsupported,
        };
        match &mut error {
            DType { tensor, wanted, .. } => {
                *tensor = self.name_of(tensor);
                if *wanted == "the dtype of pool" {
                    *wanted = "the dtype of state";
                }
            }
            Shape { tensor, .. }
            | Stride { tensor, .. }
            | Alignment { tensor, .. }
            | MissingTensor { tensor, .. }
            | ReadOnly { tensor }
            | Memory { tensor, .. }
            | Index { tensor, .. } => *tensor = self.name_of(tensor),
            Contradiction { one, other, .. } => {
                (*one, *other) = (self.name_of(one), self.name_of(other));
            }
            Hazard { one, other } => {
                for place in [one, other] {
                    *place = place.replace(" of pool", " of state");
                    *place = place.replace(" of windows", " of conv_state");
                }
            }
            Unsupported { what, .. } | Range { what, .. }
                if *what == "T" && self.tensors.contains_key("cu_seqlens") =>
            {
                *what = match self.max_tokens {
                    Some(_) => "max_tokens",
                    None => "tokens of the longest row of cu_seqlens",
                };
            }
            Unsupported { what, .. } | Range { what, .. } => {
                *what = match *what {
                    "eps of the norm" => "norm_eps",
                    "activation of the norm" => "norm_activation",
                    "activation of the convolution" => "conv_activation",
                    "every of checkpoints" => "checkpoint_every",
                    "C" => "C of checkpoint_slots",
                    "H" if self.convolves() => "heads",
                    "most of pending" => "max_pending",
                    "P of keys" => "P of pending.keys",
                    "W - 1 of windows" => "W - 1 of conv_state",
                    what => what,
                }
            }
            _ => {}
        }
        error
    }

    /// Name in this problem of a tensor of the library.
    fn name_of(&self, name: &'static str) -> &'static str {
        match (name, self.is_commit()) {
            ("pool", _) => "state",
            ("read-only states", _) => "update_state = false",
            ("windows" | "windows of a flush", _) => "conv_state",
            ("window_snapshots", _) => "conv_snapshots",
            ("keys", _) => "pending.keys",
            ("updates", _) => "pending.updates",
            ("decays", _) => "pending.decays",
            ("inputs", _) => INPUTS,
            ("pending len", _) => "pending.len",
            ("pending base", _) => "pending.base",
            ("previous", _) => self.previous_tokens(),
            ("previous x", _) | ("x", true) => "prev.x",
            ("previous k", _) | ("k", true) => "prev.k",
            ("previous v", _) | ("v", true) => "prev.v",
            ("previous a", _) | ("a", true) => "prev.a",
            ("previous b", _) | ("b", true) => "prev.b",
            ("previous g", _) | ("g", true) => "prev.g",
            ("previous beta", _) | ("beta", true) => "prev.beta",
            _ => name,
        }
    }
}

/// Reports an empty q under its own name: the library takes the dims of k from q, and would blame k.
fn check_empty(arguments: &Arguments<Tensor<'_>>) -> Result<(), Error> {
    let Some(new) = &arguments.new else {
        return Ok(());
    };
    let (q, k) = (new.q.dims(), new.tokens.k.dims());
    if q.contains(&0) && !k.contains(&0) {
        return Err(Error::Shape {
            tensor: "q",
            wanted: format!("[B, T, H, K] as k, {k:?}"),
            got: *q,
        });
    }
    Ok(())
}

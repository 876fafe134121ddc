//! A problem in host memory: tensors by name, and the options of a layer.

use std::collections::BTreeMap;
use std::ops::Range;

use gated_delta::step::pending::Ring;
use gated_delta::{
    Activation, DType, Formulation, IndexReport, Library, Options, StateLayout, StreamRef, Tensor,
};
use gated_delta_harness::arguments::GateKind;

use crate::error::Error;
use crate::op::Op;
use crate::tensor::HostTensor;

/// Views of a problem's tensors, by name, for the library.
pub type Views<'a> = BTreeMap<&'static str, Tensor<'a>>;

/// Names of the previous tokens' tensors and of the number of kept tokens.
pub(crate) const PREVIOUS: [&str; 8] = [
    "prev.x",
    "prev.k",
    "prev.v",
    "prev.a",
    "prev.b",
    "prev.g",
    "prev.beta",
    "keep",
];
/// Names of the rings of pending tokens, which are results too. The last one is there if windows are deferred.
pub(crate) const RINGS: [&str; 4] = ["pending.keys", "pending.updates", "pending.decays", INPUTS];
/// Name of the ring of a convolution's inputs.
pub(crate) const INPUTS: &str = "pending.inputs";
/// Names of the tensors that tell which entries of a ring are pending.
const PENDING: [&str; 2] = ["pending.len", "pending.base"];
/// Names of a convolution's tensors.
pub(crate) const CONV: [&str; 5] = ["x", "prev.x", "conv_weight", "conv_bias", "conv_state"];
/// Names of a norm's tensors.
pub(crate) const NORM: [&str; 2] = ["z", "norm_weight"];

/// A launch: a decode, a verify or a resume; without `q` and `x`, a commit of previous tokens or a flush of pending ones.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Operator of the file.
    pub op: Op,
    /// Form of the gates, which also decides the operator.
    pub gates: GateKind,
    /// Tensors by name: the [inputs](Op::inputs); `o`, except in a commit; `snapshots` if they are wanted, and with a convolution
    /// `conv_snapshots` too; `workspace`, if a launch takes one. Rings are results too.
    pub tensors: BTreeMap<&'static str, HostTensor>,
    /// Whether states are written.
    pub update_state: bool,
    /// Options that are fixed for the layer.
    pub options: Options,
    /// Most tokens of a row with `cu_seqlens`; by default, the tokens of the longest row.
    pub max_tokens: Option<usize>,
    /// Tokens from one checkpoint to the next, with `checkpoint_slots`.
    pub checkpoint_every: Option<usize>,
    /// Most pending tokens of a slot; by default, the library's limit.
    pub max_pending: Option<usize>,
    /// Query/key heads H, with a convolution.
    pub heads: Option<usize>,
    /// Activation of the convolution, if there is one.
    pub conv_activation: Activation,
    /// Epsilon of the norm, if there is one.
    pub norm_eps: Option<f32>,
    /// Activation of the norm's z, if there is one.
    pub norm_activation: Activation,
}

impl Problem {
    /// The tensor `name`.
    ///
    /// # Errors
    /// [`gated_delta::Error::MissingTensor`].
    pub fn tensor(&self, name: &'static str) -> Result<&HostTensor, Error> {
        Ok(self.tensors.get(name).ok_or_else(|| self.missing(name))?)
    }

    /// Whether a launch writes the tensor `name`.
    #[must_use]
    pub fn writes(&self, name: &str) -> bool {
        match name {
            "state" | "conv_state" => self.update_state,
            name if RINGS.contains(&name) => !self.is_flush(),
            _ => matches!(name, "o" | "snapshots" | "conv_snapshots" | "workspace"),
        }
    }

    /// Whether there are previous tokens.
    #[must_use]
    pub fn has_previous(&self) -> bool {
        self.has_any(&PREVIOUS)
    }

    /// Whether there is a tensor of a convolution, which computes q, k and v of new tokens, or k and v in a commit.
    #[must_use]
    pub fn has_conv(&self) -> bool {
        self.has_any(&CONV)
    }

    /// Whether the outputs are normed.
    #[must_use]
    pub fn has_norm(&self) -> bool {
        self.has_any(&NORM)
    }

    fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.tensors.contains_key(name))
    }

    /// Whether there are previous tokens and no new ones.
    #[must_use]
    pub fn is_commit(&self) -> bool {
        self.has_previous() && !self.has_any(&["q", "x"])
    }

    /// Whether write-back is deferred, with rings of pending tokens.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        self.has_any(&RINGS) || self.has_any(&PENDING)
    }

    /// Whether there are pending tokens, and neither previous nor new ones.
    #[must_use]
    pub fn is_flush(&self) -> bool {
        self.has_pending() && !self.has_previous() && !self.has_any(&["q", "x"])
    }

    /// Whether windows are deferred as states are, and written together with them.
    fn windows_wait(&self) -> bool {
        self.tensors.contains_key(INPUTS)
    }

    /// Whether a convolution computes q, k and v of new tokens, or k and v in a commit. A flush has windows at most.
    pub(crate) fn convolves(&self) -> bool {
        self.has_conv() && !self.is_flush()
    }

    /// Whether there are new tokens.
    #[must_use]
    pub fn has_new(&self) -> bool {
        !self.is_commit() && !self.is_flush()
    }

    /// Formulation of a launch: the one in the options, or the one that follows from the tensors.
    ///
    /// # Errors
    /// A missing tensor.
    pub(crate) fn formulation(&self) -> Result<Formulation, Error> {
        Ok(self.arguments(&self.views()?)?.work()?.formulation())
    }

    /// Most pending tokens of a slot, N.
    #[must_use]
    pub fn most_pending(&self) -> usize {
        self.max_pending
            .unwrap_or(self.options.formulation.max_pending())
    }

    /// Number of pending tokens of row b, and the ring entry of the first. The row is active.
    pub(crate) fn pending(&self, b: usize) -> Option<[usize; 2]> {
        let index = |name: &str| {
            let index = self.tensors.get(name)?.to_i64().get(b).copied();
            usize::try_from(index?).ok()
        };
        let len = if self.is_fresh(b) {
            0
        } else {
            index("pending.len")?
        };
        Some([len, index("pending.base")?])
    }

    /// Whether row b starts from zeros.
    fn is_fresh(&self, b: usize) -> bool {
        let fresh = self.tensors.get("fresh").map(HostTensor::to_i64);
        fresh.is_some_and(|fresh| fresh[b] != 0)
    }

    /// Heads and entries of a ring in a slot. A ring of inputs counts as one head with all channels.
    pub(crate) fn ring(&self, name: &str) -> [usize; 2] {
        match name {
            INPUTS => [1, self.dim(name, 1)],
            _ => [self.dim(name, 1), self.dim(name, 2)],
        }
    }

    /// Ring entries that the tokens of row b write. The row is active.
    pub(crate) fn left(&self, b: usize) -> impl Iterator<Item = usize> {
        let (first, tokens) = match self.pending(b).filter(|_| self.has_new()) {
            Some([len, base]) => (base + len, self.dim(self.new_tokens(), 1)),
            None => (0, 0),
        };
        let entries = self.dim("pending.updates", 2).max(1);
        (first..first + tokens).map(move |entry| entry % entries)
    }

    /// The tensor whose dims begin with those of the new tokens.
    fn new_tokens(&self) -> &'static str {
        if self.has_conv() { "x" } else { "q" }
    }

    /// The tensor whose dims begin with those of the previous tokens.
    pub(crate) fn previous_tokens(&self) -> &'static str {
        if self.has_conv() { "prev.x" } else { "prev.k" }
    }

    /// K and V of the states.
    pub(crate) fn state_dims(&self) -> [usize; 2] {
        let (outer, inner) = (self.dim("state", 2), self.dim("state", 3));
        match self.options.state_layout {
            StateLayout::KLast => [inner, outer],
            StateLayout::VLast => [outer, inner],
        }
    }

    /// Tensor for the outputs, all bits set, of the dtype of `v` or `x`. `None` without new tokens, or if a tensor is missing that decides
    /// the dims.
    ///
    /// # Errors
    /// [`Error::Input`] if the channels of `x` contradict the states.
    pub(crate) fn output(&self) -> Result<Option<HostTensor>, Error> {
        let like = |name| self.tensors.get(name).filter(|_| self.has_new());
        if let Some(v) = like("v") {
            return HostTensor::new(v.dtype(), v.dims()).map(Some);
        }
        let (Some(x), Some(_)) = (like("x"), like("state")) else {
            return Ok(None);
        };
        // o is made like x: errors of the library would name o.
        if !matches!(x.dtype(), DType::Bf16 | DType::F16 | DType::F32) {
            let got = x.dtype();
            return Err(Error::Input(format!(
                "x: wanted bf16, f16 or f32, got {got}"
            )));
        }
        if self.tensors.contains_key("cu_seqlens") && x.dims().first() != Some(&1) {
            return Err(Error::Input(format!(
                "x: wanted shape [1, total, D] with cu_seqlens, got {:?}",
                x.dims()
            )));
        }
        let [key_dim, value_dim] = self.state_dims();
        let (heads, value_heads) = (self.heads.unwrap_or(0), self.dim("state", 1));
        let keys = heads.saturating_mul(key_dim).saturating_mul(2);
        let channels = keys.saturating_add(value_heads.saturating_mul(value_dim));
        match *x.dims() {
            [rows, tokens, got] if got == channels => {
                let dims = [rows, tokens, value_heads, value_dim];
                HostTensor::new(x.dtype(), &dims).map(Some)
            }
            _ => Err(Error::Input(format!(
                "x: wanted shape [B, T, D] with D = 2*H*K + HV*V = {channels} of heads and state, got {:?}",
                x.dims()
            ))),
        }
    }

    /// Adds the workspace, if the launch takes one. Errors in the problem are left to [`Problem::validate`].
    ///
    /// # Errors
    /// Too little host memory.
    pub(crate) fn add_workspace(&mut self) -> Result<(), Error> {
        let bytes = || {
            let arguments = self.arguments(&self.views()?)?;
            arguments.work()?.workspace_bytes()
        };
        if let Ok(bytes @ 1..) = bytes() {
            let workspace = HostTensor::new(DType::F32, &[bytes.div_ceil(4)])?;
            self.tensors.insert("workspace", workspace);
        }
        Ok(())
    }

    /// Slots of the checkpoints that row b reaches with `tokens` tokens.
    fn checkpoints(&self, b: usize, tokens: usize) -> Vec<i64> {
        let indices = |name| self.tensors.get(name).map(HostTensor::to_i64);
        let (Some(every), Some(slots)) = (self.checkpoint_every, indices("checkpoint_slots"))
        else {
            return Vec::new();
        };
        let before = indices("positions").map_or(0, |positions| positions[b].max(0) as usize);
        let every = every.max(1);
        let passed = (before.saturating_add(tokens)) / every - before / every;
        let of_row = self.dim("checkpoint_slots", 1);
        slots[b * of_row..][..passed.min(of_row)].to_vec()
    }

    /// Most tokens of a row, T; 0 in a commit or a flush.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        match self.tensors.get("cu_seqlens") {
            Some(_) => self.max_tokens.unwrap_or_else(|| self.longest_row()),
            None => self.dim(self.new_tokens(), 1),
        }
    }

    /// Read-only views of the host tensors.
    ///
    /// # Errors
    /// The errors of [`HostTensor::view`].
    pub fn views(&self) -> Result<Views<'_>, gated_delta::Error> {
        self.tensors
            .iter()
            .map(|(&name, tensor)| Ok((name, tensor.view()?)))
            .collect()
    }

    /// Runs all checks of the library, on the contents of index tensors too. Returns the activity of each row.
    ///
    /// # Errors
    /// The errors of the library, with the names of this problem's tensors.
    pub fn validate(&self) -> Result<IndexReport, Error> {
        let arguments = self.arguments(&self.views()?)?;
        let check = || {
            let work = arguments.work()?;
            Library::simulator().validate(StreamRef::default_stream(), &*work)
        };
        Ok(check().map_err(|error| self.renamed(error))?)
    }

    /// Tokens of each row, among the tokens of all rows. Ranges are empty in a commit or a flush, and for bounds in `cu_seqlens` that
    /// [`Problem::validate`] refuses.
    #[must_use]
    pub fn tokens(&self) -> Vec<Range<usize>> {
        let total = self.dim(self.new_tokens(), 1);
        let Some(cu_seqlens) = self.tensors.get("cu_seqlens").map(HostTensor::to_i64) else {
            let rows = match (self.is_commit(), self.is_flush()) {
                (true, _) => self.previous_tokens(),
                (_, true) => "pending.len",
                _ => self.new_tokens(),
            };
            let row = |b| b * total..(b + 1) * total;
            return (0..self.dim(rows, 0)).map(row).collect();
        };
        let bound = |bound: i64| usize::try_from(bound).ok().filter(|bound| *bound <= total);
        let row = |pair: &[i64]| match (bound(pair[0]), bound(pair[1])) {
            (Some(start), Some(end)) => start..end.max(start),
            _ => 0..0,
        };
        cu_seqlens.windows(2).map(row).collect()
    }

    /// Whether row b, which has no tokens, writes its start state: not if it is in place.
    pub(crate) fn carries(&self, b: usize) -> bool {
        let slot = |name| self.tensors.get(name).map(|slots| slots.to_i64()[b]);
        let read = slot("read_slots").unwrap_or(b as i64);
        self.is_fresh(b) || slot("write_slots").is_some_and(|write| write != read)
    }

    /// Slots whose states row b writes. The row is active and has `tokens` tokens.
    pub(crate) fn written_slots(&self, b: usize, tokens: usize) -> Vec<usize> {
        if self.has_pending() && !self.stores_pending(b, tokens) {
            return Vec::new();
        }
        self.slots_after(b, tokens)
    }

    /// Slots whose windows row b writes; empty without windows. Windows move with every token, deferred states or not, unless the windows
    /// are deferred too.
    pub(crate) fn written_windows(&self, b: usize, tokens: usize) -> Vec<usize> {
        let mut written = match self.windows_wait() {
            true => self.written_slots(b, tokens),
            false => self.slots_after(b, tokens),
        };
        written.retain(|slot| *slot < self.dim("conv_state", 0));
        written
    }

    /// Live slots for the state of row b after its tokens, and for its checkpoints.
    fn slots_after(&self, b: usize, tokens: usize) -> Vec<usize> {
        let indices = |name| self.tensors.get(name).map(HostTensor::to_i64);
        let written = match indices("token_slots") {
            Some(slots) => slots[b * self.max_tokens()..][..tokens].to_vec(),
            None if self.update_state => {
                let slots = indices("write_slots").or_else(|| indices("read_slots"));
                let mut written = vec![slots.map_or(b as i64, |slots| slots[b])];
                written.extend(self.checkpoints(b, tokens));
                written
            }
            None => Vec::new(),
        };
        let null_slot = self.options.null_slot.map(i64::from);
        let live = written.into_iter().filter(|slot| Some(*slot) != null_slot);
        let slot = |slot| usize::try_from(slot).ok();
        let pool = self.dim("state", 0);
        live.filter_map(slot).filter(|slot| *slot < pool).collect()
    }

    /// Whether row b writes its state, with deferred write-back: if it is fresh, or if it flushes.
    fn stores_pending(&self, b: usize, tokens: usize) -> bool {
        let Some([len, _]) = self.pending(b) else {
            return false;
        };
        let ring = Ring {
            most: self.most_pending(),
            entries: self.dim("pending.keys", 2),
        };
        let flushes = tokens == 0 || ring.flushes(len, tokens);
        self.is_fresh(b) || (len > 0 && flushes)
    }

    /// Slot of the window that row b writes, and the number of its columns. The row is active and has `tokens` tokens.
    pub(crate) fn written_window(&self, b: usize, tokens: usize) -> Option<(usize, usize)> {
        // With token slots the window is in the slot of the first token, live in an active row, and the tokens' inputs follow it.
        let slot = self.written_windows(b, tokens).into_iter().next()?;
        let inputs = match self.tensors.contains_key("token_slots") {
            true => tokens,
            false => 1,
        };
        Some((
            slot,
            (self.dim("conv_weight", 1) + inputs).saturating_sub(2),
        ))
    }

    /// Size of a dim of the tensor `name`; 0 if there is none.
    pub(crate) fn dim(&self, name: &str, dim: usize) -> usize {
        let dims = self.tensors.get(name).map(HostTensor::dims);
        dims.and_then(|dims| dims.get(dim)).copied().unwrap_or(0)
    }

    /// Tokens of the longest row, at least 1.
    fn longest_row(&self) -> usize {
        let lengths = self.tokens().into_iter().map(|tokens| tokens.len());
        lengths.max().unwrap_or(0).max(1)
    }
}

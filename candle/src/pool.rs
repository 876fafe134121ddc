//! The states of an engine's sequences: pools of slots for states and windows, and the rows of a batch.

use std::sync::OnceLock;

use candle_core::{DType, Device, Result, Tensor};
use gated_delta::{Formulation, MAX_TOKENS, Operator, Options, StateLayout};

use crate::error::bail;
use crate::step::{Commit, Convolution, Gates, GdnGates, KdaDecay, KdaGates, States, Stored};

/// A slot number for no slot. A row with it is inactive, and a checkpoint with it is not kept.
pub const NO_SLOT: u32 = u32::MAX;

/// Heads and dims of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Operator of the layer.
    pub operator: Operator,
    /// Query/key heads, H
    pub heads: usize,
    /// Value heads, HV
    pub value_heads: usize,
    /// Head dim of q and k, K
    pub key_dim: usize,
    /// Head dim of v, V
    pub value_dim: usize,
    /// Taps of the convolution, W
    pub taps: usize,
}

impl LayerShape {
    /// Channels of the convolution, D.
    #[must_use]
    pub fn channels(&self) -> usize {
        2 * self.heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// States and windows of one layer.
#[derive(Clone, Debug)]
pub struct LayerStates {
    /// States, `[P, HV, V, K]`, with [`StateLayout::VLast`] `[P, HV, K, V]`.
    pub states: Tensor,
    /// Layout of the states.
    pub layout: StateLayout,
    /// Algorithm of all launches on these states: see [`StatePool::formulation`].
    pub formulation: Formulation,
    /// Windows, `[P, D, W − 1]`, a view of `[P, W − 1, D]`.
    pub windows: Tensor,
}

impl LayerStates {
    /// Options of a launch on these states.
    pub(crate) fn options(&self) -> Options {
        let options = Options::default().state_layout(self.layout);
        options.formulation(self.formulation)
    }
}

/// States and windows of all layers of a model, and the list of free slots.
///
/// A slot has the same number in all layers. A slot is not cleared when it is handed out: a row at position 0 starts from zeros,
/// whatever its slot holds.
#[derive(Debug)]
pub struct StatePool {
    shape: LayerShape,
    layers: Vec<LayerStates>,
    /// Free slots. The last one is handed out next.
    free: Vec<u32>,
    slots: usize,
    /// Arguments of the commits that make copies. They are zeros, and are never read.
    unread: Unread,
}

/// Arguments of the commit that makes a copy: one token, which is not kept.
#[derive(Debug)]
struct Unread {
    x: Tensor,
    weight: Tensor,
    gates: Gates,
}

impl StatePool {
    /// A pool of `slots` slots for `layers` layers of one shape. Windows have `dtype`, the activations' dtype; states have
    /// `state_dtype`. If both are f32, the layers compute in f32 ([`formulation`](Self::formulation)).
    ///
    /// # Errors
    /// The errors of candle, including out of memory.
    pub fn new(
        shape: LayerShape,
        layers: usize,
        slots: usize,
        dtype: DType,
        state_dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let LayerShape {
            value_heads,
            key_dim,
            value_dim,
            taps,
            ..
        } = shape;
        let channels = shape.channels();
        let Ok(count) = u32::try_from(slots) else {
            return bail!("slots: wanted less than 2³², got {slots}");
        };
        if taps < 2 {
            return bail!("taps: wanted 2..=4, got {taps}");
        }
        let formulation = match (dtype, state_dtype) {
            (DType::F32, DType::F32) => Formulation::Recurrent,
            _ => Formulation::Auto,
        };
        let layer = |_| {
            let windows = Tensor::zeros((slots, taps - 1, channels), dtype, device)?;
            let states = (slots, value_heads, value_dim, key_dim);
            Ok(LayerStates {
                states: Tensor::zeros(states, state_dtype, device)?,
                layout: StateLayout::KLast,
                formulation,
                windows: windows.transpose(1, 2)?,
            })
        };
        let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, device);
        let gate = zeros(&[1, 1, value_heads], dtype)?;
        let rate = zeros(&[value_heads], DType::F32)?;
        let gates = match shape.operator {
            Operator::Gdn => GdnGates::raw(&gate, &gate, &rate, &rate).into(),
            Operator::Kda => {
                let g = zeros(&[1, 1, value_heads, key_dim], dtype)?;
                KdaGates::new(&g, KdaDecay::Log, &gate, gated_delta::KdaBeta::Logit).into()
            }
        };
        Ok(Self {
            shape,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            free: (0..count).rev().collect(),
            slots,
            unread: Unread {
                x: zeros(&[1, 1, channels], dtype)?,
                weight: zeros(&[channels, taps], dtype)?,
                gates,
            },
        })
    }

    /// Converts the states to a layout; a new pool is K-last. No launch may use the pool's former states.
    ///
    /// # Errors
    /// The errors of candle, including out of memory.
    pub fn state_layout(mut self, layout: StateLayout) -> Result<Self> {
        for layer in &mut self.layers {
            if layer.layout != layout {
                layer.states = layer.states.transpose(2, 3)?.contiguous()?;
                layer.layout = layout;
            }
        }
        Ok(self)
    }

    /// Sets the algorithm of all launches on the pool: [`Formulation::Auto`] is the fastest, [`Formulation::Recurrent`]
    /// computes in f32.
    ///
    /// | formulation | prompts | drafts |
    /// |---|---|---|
    /// | `Auto` | chunkwise; factors of products are f16 | together, on tensor cores |
    /// | `Recurrent` | token by token in f32; one launch for 16 tokens of a row, one after the other | token by token in f32 |
    ///
    /// By default a pool has `Recurrent` if activations and states are f32, and `Auto` otherwise. Candle computes f32 products
    /// without TF32 unless an engine asks for it, and an f32 model is usually compared with another engine's. For bf16
    /// activations `Recurrent` gains nothing: they are rounded more coarsely than the factors of `Auto`.
    ///
    /// With `Recurrent` and f32 states, the bits of the recurrence do not depend on how a prompt is cut, on drafts, or on
    /// prefixes. 16-bit states are rounded after each launch. With any other formulation, a launch that does not accept it
    /// returns an error.
    #[must_use]
    pub fn formulation(mut self, formulation: Formulation) -> Self {
        for layer in &mut self.layers {
            layer.formulation = formulation;
        }
        self
    }

    /// States and windows of layer `index`.
    ///
    /// # Errors
    /// Errors if the pool has no such layer.
    pub fn layer(&self, index: usize) -> Result<&LayerStates> {
        match self.layers.get(index) {
            Some(layer) => Ok(layer),
            None => bail!("layer: wanted one of {}, got {index}", self.layers.len()),
        }
    }

    /// Number of slots, P.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Number of free slots.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Hands out a slot, without clearing it.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Takes a slot back. The slot may be handed out again immediately, to later launches.
    ///
    /// # Errors
    /// Errors if the slot is free already, or is not in the pool.
    pub fn give_back(&mut self, slot: u32) -> Result<()> {
        if slot as usize >= self.slots || self.free.contains(&slot) {
            return bail!(
                "slot: wanted one that is in use, of {}, got {slot}",
                self.slots
            );
        }
        self.free.push(slot);
        Ok(())
    }

    /// Copies states and windows of all layers from `from[i]` to `to[i]`, bit for bit, with one launch per layer. The slots of
    /// `to` have to be distinct, and none of them may be in `from`.
    ///
    /// # Errors
    /// Errors for lists that break these rules; the errors of a launch.
    pub fn copy(&self, from: &[u32], to: &[u32]) -> Result<()> {
        let distinct = |i: usize| !to[..i].contains(&to[i]) && !from.contains(&to[i]);
        if from.len() != to.len() || !(0..to.len()).all(distinct) {
            return bail!(
                "slots of a copy: wanted as many from as to, and those distinct and not read, got {from:?} to {to:?}"
            );
        }
        let (Some(first), batch) = (self.layers.first(), from.len()) else {
            return Ok(());
        };
        if batch == 0 {
            return Ok(());
        }
        let device = first.states.device();
        let [from, to] = [Tensor::new(from, device)?, Tensor::new(to, device)?];
        let keep = Tensor::zeros(batch, DType::U32, device)?;
        let of_rows = |tensor: &Tensor| tensor.repeat(batch_first(tensor, batch));
        let x = of_rows(&self.unread.x)?;
        let gates: Gates = match &self.unread.gates {
            Gates::Gdn(GdnGates::Raw {
                a, a_log, dt_bias, ..
            }) => {
                let a = of_rows(a)?;
                GdnGates::raw(&a, &a, a_log, dt_bias).into()
            }
            Gates::Kda(gates) => KdaGates {
                g: of_rows(&gates.g)?,
                beta: of_rows(&gates.beta)?,
                ..gates.clone()
            }
            .into(),
            other => other.clone(),
        };
        for layer in &self.layers {
            let conv = Convolution::new(&x, self.shape.heads, &self.unread.weight, &layer.windows);
            let states = States::update(&layer.states, &from).write_slots(&to);
            let mut copy = Commit::new(Stored::Conv(conv), gates.clone(), &keep, states);
            copy.options = layer.options();
            copy.run()?;
        }
        Ok(())
    }
}

/// Numbers of repetitions per dim that make `batch` rows of one row.
fn batch_first(tensor: &Tensor, batch: usize) -> Vec<usize> {
    let mut times = vec![1; tensor.rank()];
    times[0] = batch;
    times
}

/// A row of a batch.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Slot of the row.
    pub slot: u32,
    /// Slot to start from, if it is not the row's own: the row forks from a kept prefix.
    pub from: Option<u32>,
    /// Number of its tokens in this launch.
    pub tokens: usize,
    /// Number of tokens of its sequence before these. At 0 the row starts from zeros.
    pub position: usize,
    /// Slots for the states at the multiples of `every` ([`Rows::new`]) that this launch reaches, in order; [`NO_SLOT`] keeps nothing.
    pub checkpoints: Vec<u32>,
}

/// A batch of rows of different lengths, in the form of the launches of all layers. An engine makes it once per step.
#[derive(Clone, Debug)]
pub struct Rows {
    pub(crate) slots: Tensor,
    pub(crate) write_slots: Tensor,
    pub(crate) fresh: Tensor,
    pub(crate) cu_seqlens: Tensor,
    pub(crate) positions: Option<Tensor>,
    pub(crate) checkpoints: Option<(usize, Tensor)>,
    pub(crate) max_tokens: usize,
    pub(crate) total: usize,
    rows: Vec<Row>,
    pieces: OnceLock<Vec<Piece>>,
}

/// A sub-batch: the tokens of one launch that is no prefill, at most 16 of each row.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// Index in the batch of its first token.
    pub first: usize,
    pub tokens: usize,
    pub slots: Tensor,
    pub write_slots: Tensor,
    pub fresh: Tensor,
    pub cu_seqlens: Tensor,
    pub max_tokens: usize,
}

impl Rows {
    /// A batch of these rows, concatenated, with checkpoints after every `every` tokens of a sequence, a multiple of 64.
    ///
    /// If no row has more than 16 tokens and no row has a checkpoint, a batch is one launch of a layer, as a decode is. Any
    /// other batch is a prefill. If a layer has no prefill (KDA with K = 64, or a pool with [`Formulation::Recurrent`]), the
    /// modules cut the batch into launches of up to 16 tokens of a row. The launches of a long row run one after the other,
    /// and neighbouring shorter rows share a launch.
    ///
    /// # Errors
    /// The errors of candle; with checkpoints, an `every` that is not a multiple of 64.
    pub fn new(rows: &[Row], every: usize, device: &Device) -> Result<Self> {
        let mut bounds = vec![0u32];
        let mut total = 0;
        for row in rows {
            total += row.tokens;
            bounds.push(total as u32);
        }
        let longest = rows.iter().map(|row| row.tokens).max().unwrap_or(0);
        let most = rows.iter().map(|row| row.checkpoints.len()).max();
        let most = most.unwrap_or(0);
        let tensor = |values: Vec<u32>| {
            let len = values.len();
            Tensor::from_vec(values, len, device)
        };
        let checkpoints = match most {
            0 => None,
            _ if every == 0 || !every.is_multiple_of(64) => {
                return bail!("every: wanted a multiple of 64, got {every}");
            }
            _ => {
                let mut slots = vec![NO_SLOT; rows.len() * most];
                for (of_row, row) in slots.chunks_exact_mut(most).zip(rows) {
                    of_row[..row.checkpoints.len()].copy_from_slice(&row.checkpoints);
                }
                let slots = Tensor::from_vec(slots, (rows.len(), most), device)?;
                Some((every, slots))
            }
        };
        let is_prefill = longest > MAX_TOKENS || checkpoints.is_some();
        let starts = |row: &Row| row.position == 0 && row.from.is_none();
        let positions = rows.iter().map(|row| row.position as u32).collect();
        Ok(Self {
            slots: tensor(
                rows.iter()
                    .map(|row| row.from.unwrap_or(row.slot))
                    .collect(),
            )?,
            write_slots: tensor(rows.iter().map(|row| row.slot).collect())?,
            fresh: tensor(rows.iter().map(|row| starts(row).into()).collect())?,
            cu_seqlens: tensor(bounds)?,
            positions: is_prefill.then(|| tensor(positions)).transpose()?,
            checkpoints,
            // The bits of a row depend on this bound. It therefore has few values: 1, or the most that a launch takes.
            max_tokens: match longest {
                0..=1 => 1,
                _ if is_prefill => longest,
                _ => MAX_TOKENS,
            },
            total,
            rows: rows.to_vec(),
            pieces: OnceLock::new(),
        })
    }

    /// Whether the batch is a prefill: a row has more than 16 tokens, or a checkpoint.
    pub(crate) fn is_prefill(&self) -> bool {
        self.positions.is_some()
    }

    /// The sub-batches in order, with at most 16 tokens of a row each.
    pub(crate) fn pieces(&self) -> Result<&[Piece]> {
        if let Some(pieces) = self.pieces.get() {
            return Ok(pieces);
        }
        let pieces = self.cut()?;
        Ok(self.pieces.get_or_init(|| pieces))
    }

    /// Cuts the batch. Neighbouring rows of up to 16 tokens share a sub-batch. Longer rows have sub-batches of their own, cut at multiples
    /// of 16 of their sequences. A sub-batch that ends at a checkpoint writes its slot, and the next one starts from that slot.
    fn cut(&self) -> Result<Vec<Piece>> {
        let every = self
            .checkpoints
            .as_ref()
            .map_or(usize::MAX, |&(every, _)| every);
        let device = self.slots.device();
        let (mut pieces, mut first, mut side_by_side) = (Vec::new(), 0, Vec::new());
        for row in &self.rows {
            let keeps = row.checkpoints.iter().any(|&slot| slot != NO_SLOT);
            if row.tokens <= MAX_TOKENS && !keeps {
                side_by_side.push(Part::of(row));
                continue;
            }
            first = push(&mut pieces, first, &mut side_by_side, device)?;
            let (mut at, end, mut from) = (row.position, row.position + row.tokens, row.from);
            let mut kept = row.checkpoints.iter().copied();
            while at < end {
                let stop = end.min((at / MAX_TOKENS + 1) * MAX_TOKENS);
                let checkpoint = match stop % every {
                    0 => kept.next().filter(|&slot| slot != NO_SLOT),
                    _ => None,
                };
                let part = Part {
                    from,
                    to: checkpoint.unwrap_or(row.slot),
                    is_fresh: at == 0,
                    tokens: stop - at,
                    slot: row.slot,
                };
                let next = push(&mut pieces, first, &mut vec![part.clone()], device)?;
                if checkpoint.is_some() && stop == end {
                    // The same tokens again, to write the row's own slot too.
                    let again = Part {
                        to: row.slot,
                        ..part
                    };
                    push(&mut pieces, first, &mut vec![again], device)?;
                }
                (first, at, from) = (next, stop, checkpoint);
            }
        }
        push(&mut pieces, first, &mut side_by_side, device)?;
        Ok(pieces)
    }

    /// Tokens of all rows.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }
}

/// A row of a sub-batch.
#[derive(Clone)]
struct Part {
    slot: u32,
    from: Option<u32>,
    to: u32,
    is_fresh: bool,
    tokens: usize,
}

impl Part {
    /// All tokens of a row.
    fn of(row: &Row) -> Self {
        Self {
            slot: row.slot,
            from: row.from,
            to: row.slot,
            is_fresh: row.position == 0 && row.from.is_none(),
            tokens: row.tokens,
        }
    }
}

/// Makes a sub-batch of `parts`, unless `parts` is empty. Returns the index after its tokens.
fn push(
    pieces: &mut Vec<Piece>,
    first: usize,
    parts: &mut Vec<Part>,
    device: &Device,
) -> Result<usize> {
    if parts.is_empty() {
        return Ok(first);
    }
    let mut bounds = vec![0u32];
    let mut tokens = 0;
    for part in &*parts {
        tokens += part.tokens;
        bounds.push(tokens as u32);
    }
    let longest = parts.iter().map(|part| part.tokens).max();
    let tensor = |value: fn(&Part) -> u32| {
        let values = parts.iter().map(value).collect();
        Tensor::from_vec(values, parts.len(), device)
    };
    pieces.push(Piece {
        first,
        tokens,
        slots: tensor(|part| part.from.unwrap_or(part.slot))?,
        write_slots: tensor(|part| part.to)?,
        fresh: tensor(|part| part.is_fresh.into())?,
        cu_seqlens: Tensor::from_vec(bounds, parts.len() + 1, device)?,
        max_tokens: if longest <= Some(1) { 1 } else { MAX_TOKENS },
    });
    parts.clear();
    Ok(first + tokens)
}

/// A batch of rows to verify. All rows have the same number of tokens: the last certain token, then drafts. No row is at the
/// beginning of its sequence.
#[derive(Clone, Debug)]
pub struct DraftRows {
    pub(crate) slots: Tensor,
    pub(crate) keep: Tensor,
}

impl DraftRows {
    /// Rows in `slots`. `keep` is the number of each row's last verified tokens that are accepted; 0 for a row without verified
    /// tokens.
    ///
    /// # Errors
    /// The errors of candle; lists of different lengths.
    pub fn new(slots: &[u32], keep: &[u32], device: &Device) -> Result<Self> {
        if slots.len() != keep.len() {
            return bail!(
                "keep: wanted {}, one for each slot, got {}",
                slots.len(),
                keep.len()
            );
        }
        Ok(Self {
            slots: Tensor::new(slots, device)?,
            keep: Tensor::new(keep, device)?,
        })
    }
}

//! Checks of arguments: shapes, dtypes, strides and alignment, and options that exclude each other.
//!
//! Each check is a function of a request and of the extents from [`Extents::of`]. Its result becomes part of the load-time
//! constants.

pub(super) mod checks;
mod constants;
mod convolution;
mod extents;
mod family;
mod gates;
pub(super) mod prefill;
pub(super) mod rings;
mod states;
pub(super) mod switches;
mod tokens;

pub use checks::MAX_BATCH;

use gated_delta_kernels::launch::Family;

use crate::error::Error;
use crate::step::argument::Argument;
use crate::step::kind::{Kind, Mode};
use crate::step::problem::Problem;
use crate::step::request::{Phase, Request};
use checks::indices;
use convolution::{ConvolutionStrides, NormStrides};
use extents::Extents;
use gates::GateRows;
use rings::Rings;
use states::StateStrides;
use tokens::TokenStrides;

/// Results of all checks. The result for a tensor that is not given is its default.
struct Shape {
    extents: Extents,
    /// The kernels' code of the null slot.
    null_slot: u32,
    /// The factor of q.
    scale: f32,
    new: TokenStrides,
    previous: TokenStrides,
    gates: GateRows,
    states: StateStrides,
    convolution: ConvolutionStrides,
    norm: NormStrides,
    rings: Rings,
}

/// Checks shapes, dtypes, strides and switches. Returns the problem to compile, whether or not a kernel computes it.
pub(super) fn check(request: &Request<'_>) -> Result<Problem, Error> {
    switches::check(request)?;
    let extents = Extents::of(request)?;
    checks::batch(extents.rows)?;
    prefill::check_switches(request)?;
    let family = family::of(request, &extents)?;
    let null_slot = checks::null_slot(request.options.null_slot)?;
    let scale = checks::scale(request.options.scale, extents.heads.k_dim)?;
    let new = tokens::new(request, &extents)?;
    let previous = tokens::previous(request, &extents)?;
    let gates = gates::check(request, &extents)?;
    let states = states::check(request, &extents)?;
    let convolution = convolution::check(request, &extents)?;
    let norm = convolution::check_norm(request, &extents)?;
    if let Some(fresh) = request.get(Argument::Fresh) {
        indices(fresh, &["B"], &[extents.rows])?;
    }
    let (rings, flushed) = rings::check(request, &extents)?;
    prefill::check_lengths(request, &extents)?;
    let shape = Shape {
        extents,
        null_slot,
        scale,
        new,
        previous,
        gates,
        states,
        convolution: flushed.unwrap_or(convolution),
        norm,
        rings,
    };
    Ok(Problem {
        kind: shape.kind(request, family),
        constants: constants::of(request, &shape),
    })
}

impl Shape {
    /// Whether some access to the tensors of the tokens is not aligned to 16 bytes.
    fn narrow_io(&self) -> bool {
        self.new.narrow()
            || self.previous.narrow()
            || self.convolution.x.narrow
            || self.gates.narrow_dt_bias
    }

    /// The kind of the launch.
    fn kind(&self, request: &Request<'_>, family: Family) -> Kind {
        let Extents {
            heads,
            new,
            previous,
            ..
        } = &self.extents;
        let is_chunked = request.is_chunked();
        let state = request.pool().tensor.dtype();
        let layout = request.options.state_layout;
        Kind {
            family,
            per_channel: request.gates.per_channel,
            mode: mode(request),
            narrow: self.narrow_io() || self.states.narrow,
            layout,
            state,
            k_dim: heads.k_dim as u32,
            v_dim: heads.v_dim as u32,
            ratio: heads.ratio as u32,
            tokens: match is_chunked {
                true => 0,
                false => (new.tokens + previous.tokens) as u32,
            },
            in_sets: false,
            in_pair: false,
            norm: is_chunked && request.norm.is_some(),
        }
        .with_tokens([new.tokens, previous.tokens])
    }
}

/// The states that the launch keeps.
fn mode(request: &Request<'_>) -> Mode {
    match (request.phase, request.stored) {
        (Phase::Commit, _) => Mode::Commit,
        (_, Some(_)) => Mode::Resume,
        _ if request.has(Argument::Snapshots) || request.has(Argument::TokenSlots) => Mode::Each,
        _ if request.read_only => Mode::Verify,
        _ => Mode::Update,
    }
}

//! What arguments have to be: shapes, dtypes, strides and alignment, and which options go together.
//!
//! Each check is a function of a request, and of the extents that [`Extents::of`] has found; what it returns is part of what the
//! load-time constants are made of.

pub(super) mod checks;
mod constants;
mod convolution;
mod extents;
mod gates;
mod operator;
pub(super) mod prefill;
pub(super) mod rings;
mod states;
pub(super) mod switches;
mod tokens;

pub use checks::MAX_BATCH;

use crate::error::Error;
use crate::step::argument::Argument;
use crate::step::kind::{Keeps, Kind, Operator};
use crate::step::problem::Problem;
use crate::step::request::Request;
use checks::indices;
use convolution::{ConvolutionStrides, NormStrides};
use extents::Extents;
use gates::GateRows;
use rings::Rings;
use states::StateStrides;
use tokens::TokenStrides;

/// What the checks find besides errors. Of a tensor that is not there, its default.
struct Shape {
    extents: Extents,
    /// The kernels' code of it.
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

/// Checks shapes, dtypes, strides and switches, and says what to compile, whether there is a kernel for it or not.
pub(super) fn check(request: &Request<'_>) -> Result<Problem, Error> {
    switches::check(request)?;
    let extents = Extents::of(request)?;
    checks::batch(extents.rows)?;
    prefill::check_switches(request)?;
    let operator = operator::of(request, &extents)?;
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
        kind: shape.kind(request, operator),
        constants: constants::of(request, &shape),
    })
}

impl Shape {
    /// Whether an access to the tensors of the tokens is not aligned to 16 bytes.
    fn narrow_io(&self) -> bool {
        self.new.narrow()
            || self.previous.narrow()
            || self.convolution.x.narrow
            || self.gates.narrow_dt_bias
    }

    /// What is launched, but for its tile.
    fn kind(&self, request: &Request<'_>, operator: Operator) -> Kind {
        let Extents {
            heads,
            new,
            previous,
            ..
        } = &self.extents;
        let (is_chunked, is_narrow) =
            (request.is_chunked(), self.narrow_io() || self.states.narrow);
        Kind {
            operator: match is_narrow {
                true => operator.narrow(),
                false => operator,
            },
            layout: request.options.state_layout,
            state: request.pool().tensor.dtype(),
            k_dim: heads.k_dim as u32,
            v_dim: heads.v_dim as u32,
            ratio: heads.ratio as u32,
            tokens: match is_chunked {
                true => 0,
                false => (new.tokens + previous.tokens) as u32,
            },
            keeps: keeps(request),
            norm: is_chunked && request.norm.is_some(),
        }
    }
}

/// Which states are kept, where a choice depends on it.
fn keeps(request: &Request<'_>) -> Keeps {
    if request.stored.is_some() {
        Keeps::Other
    } else if request.has(Argument::Snapshots) || request.has(Argument::TokenSlots) {
        Keeps::Each
    } else if request.read_only {
        Keeps::Other
    } else {
        Keeps::Last
    }
}

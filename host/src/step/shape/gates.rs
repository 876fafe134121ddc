//! Checks of the parameters of the gates.

use super::checks::parameter;
use super::extents::Extents;
use crate::error::Error;
use crate::step::argument::Argument;
use crate::step::request::Request;
use crate::tensor_checks::{Named, range};

/// Numbers of rows and alignment of the parameters of the gates.
#[derive(Default)]
pub struct GateRows {
    /// Whether the parameters have H rows instead of HV rows.
    pub are_h: bool,
    /// Whether dt_bias has a value for each channel and is not aligned to 16 bytes.
    pub narrow_dt_bias: bool,
}

/// Checks the lower bound, A_log and dt_bias.
pub fn check(request: &Request<'_>, extents: &Extents) -> Result<GateRows, Error> {
    let (heads, per_channel) = (extents.heads, request.gates.per_channel);
    if let Some(bound) = request.gates.lower_bound
        && !(bound.is_finite() && bound < 0.0)
    {
        return Err(range(
            "lower_bound",
            "a finite number below 0".to_owned(),
            bound,
        ));
    }
    let [a_log, dt_bias] = [Argument::ALog, Argument::DtBias].map(|it| request.get(it));
    let first = a_log.or(dt_bias);
    let of_h = |named: Named<'_>| named.tensor.dims().first() == Some(&heads.h);
    let are_h = per_channel && heads.h != heads.hv && first.is_some_and(of_h);
    let rows = if are_h { heads.h } else { heads.hv };
    if let Some(a_log) = a_log {
        let letters = if per_channel { &["H or HV"] } else { &["HV"] };
        parameter(a_log, letters, &[rows])?;
    }
    let narrow_dt_bias = match dt_bias {
        Some(dt_bias) if per_channel => {
            let letters = match a_log {
                Some(_) => &["rows of A_log", "K"],
                None => &["H or HV", "K"],
            };
            !parameter(dt_bias, letters, &[rows, heads.k_dim])?
        }
        Some(dt_bias) => {
            parameter(dt_bias, &["HV"], &[rows])?;
            false
        }
        None => false,
    };
    Ok(GateRows {
        are_h,
        narrow_dt_bias,
    })
}

//! Problems in f64, by the reference.

use gated_delta::ops::{BetaScale, HeadMap, StateLayout};
use gated_delta_reference::gdn::{self, Gates, GdnDecode};
use gated_delta_reference::recurrence::default_scale;

use crate::backend::Outputs;
use crate::error::Error;
use crate::problem::Problem;
use crate::tensor::HostTensor;

/// What a launch is to leave behind, not rounded.
#[derive(Clone, Debug, PartialEq)]
pub struct Truth {
    /// `[B, 1, HV, V]`.
    pub o: Vec<f64>,
    /// The whole written pool afterwards.
    pub pool: Vec<f64>,
}

/// The truth of a problem that [`Problem::validate`] has passed, from the values as they are stored.
///
/// # Errors
/// [`gated_delta::Error::MissingTensor`], or what the reference finds.
pub fn truth(problem: &Problem) -> Result<Truth, Error> {
    let values = |name| Ok::<_, Error>(problem.tensor(name)?.to_f64());
    let slots = |name| problem.tensors.get(name).map(HostTensor::to_i64);
    let (q, k, v) = (values("q")?, values("k")?, values("v")?);
    let (q_dims, v_dims) = (problem.tensor("q")?.dims(), problem.tensor("v")?.dims());
    let (&[batch, _, heads, key_dim], &[_, _, value_heads, value_dim]) = (q_dims, v_dims) else {
        return Err(Error::Input(format!(
            "q, v: wanted [B, 1, H, K] and [B, 1, HV, V], got {q_dims:?} and {v_dims:?}"
        )));
    };
    let given = problem.tensors.contains_key("g");
    let [first, second, a_log, dt_bias] = if given {
        [values("g")?, values("beta")?, Vec::new(), Vec::new()]
    } else {
        [
            values("a")?,
            values("b")?,
            values("A_log")?,
            values("dt_bias")?,
        ]
    };
    let options = &problem.options;
    let decoded = gdn::decode_between(
        &GdnDecode {
            batch,
            heads,
            value_heads,
            key_dim,
            value_dim,
            q: &q,
            k: &k,
            v: &v,
            gates: if given {
                Gates::Given {
                    g: &first,
                    beta: &second,
                }
            } else {
                let beta_scale = if problem.beta_scale == BetaScale::Two {
                    2.0
                } else {
                    1.0
                };
                Gates::Raw {
                    a: &first,
                    b: &second,
                    a_log: &a_log,
                    dt_bias: &dt_bias,
                    beta_scale,
                }
            },
            l2norm: options.qk_l2norm,
            scale: options
                .scale
                .map_or_else(|| default_scale(key_dim), f64::from),
            head_map: match options.head_map {
                HeadMap::Grouped => gdn::HeadMap::Grouped,
                HeadMap::Tiled => gdn::HeadMap::Tiled,
            },
            layout: match options.state_layout {
                StateLayout::KLast => gdn::Layout::KLast,
                StateLayout::VLast => gdn::Layout::VLast,
            },
            read_slots: slots("read_slots").as_deref(),
            write_slots: slots("write_slots").as_deref(),
            null_slot: options.null_slot.map(i64::from),
            update_state: options.update_state,
        },
        &values("state")?,
        &values(problem.written_pool())?,
    )?;
    Ok(Truth {
        o: decoded.o,
        pool: decoded.pool,
    })
}

/// Runs a problem that [`Problem::validate`] has passed and rounds the results where a kernel stores them.
pub(crate) fn run(problem: &Problem) -> Result<Outputs, Error> {
    let truth = truth(problem)?;
    let mut after = problem.clone();
    for (name, values) in [("o", &truth.o), (problem.written_pool(), &truth.pool)] {
        if let Some(tensor) = after.tensors.get_mut(name) {
            tensor.fill(values)?;
        }
    }
    Outputs::of(after, None)
}

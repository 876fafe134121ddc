//! GDN decode: one token per sequence (Gated DeltaNet, arXiv 2412.06464).
//!
//! Two rows of a batch of which one is padding, one query/key head, two value heads. On the simulator:
//!
//! ```
//! use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
//! use gated_delta::ops::{BetaScale, GdnGates};
//! use gated_delta::{Library, StreamRef, Tensor};
//!
//! let (qk, v, raw_gates) = ([0.1f32; 2 * 64], [0.5f32; 2 * 2 * 64], [0.0f32; 2 * 2]);
//! let (parameters, slots) = ([0.0f32; 2], [1i32, -1]);
//! let (mut output, mut states) = ([f32::NAN; 2 * 2 * 64], vec![0.0f32; 3 * 2 * 64 * 64]);
//! let qk = Tensor::from_slice(&qk, &[2, 1, 1, 64])?;
//! let raw_gates = Tensor::from_slice(&raw_gates, &[2, 1, 2])?;
//! let parameters = Tensor::from_slice(&parameters, &[2])?;
//! let args = GdnDecode {
//!     q: qk,
//!     k: qk,
//!     v: Tensor::from_slice(&v, &[2, 1, 2, 64])?,
//!     gates: GdnGates::Raw {
//!         a: raw_gates,
//!         b: raw_gates,
//!         a_log: parameters,
//!         dt_bias: parameters,
//!         beta_scale: BetaScale::One,
//!     },
//!     o: Tensor::from_slice_mut(&mut output, &[2, 1, 2, 64])?,
//!     pool: Tensor::from_slice_mut(&mut states, &[3, 2, 64, 64])?,
//!     write_pool: None,
//!     read_slots: Some(Tensor::from_slice(&slots, &[2])?),
//!     write_slots: None,
//!     options: GdnDecodeOptions::default(),
//! };
//! let library = Library::simulator();
//! library.prewarm_gdn_decode(&args)?; // before a graph is captured
//! assert!(args.variants()?.contains(&args.selected()?));
//! // SAFETY: a simulated launch is done when it returns.
//! unsafe { library.gdn_decode(StreamRef::default_stream(), &args) }?;
//! // β = ½ of the value is stored under the unit key; the unit query, times 1/√K, reads it.
//! assert!((output[0] - 0.25 / 8.0).abs() < 1e-5);
//! assert_eq!(output[2 * 64..], [0.0; 2 * 64]); // padding
//! assert_eq!(states[..2 * 64 * 64], [0.0; 2 * 64 * 64]); // slot 0 is nobody's
//! # Ok::<(), gated_delta::Error>(())
//! ```

mod check;
mod launch;

pub use gated_delta_kernels::kernels::gdn_decode::GdnDecodeParams;
pub use gated_delta_kernels::launch::LaunchShape;
pub use launch::GdnDecodePlan;

pub use super::checks::MAX_BATCH;
use super::{BetaScale, GdnGates, HeadMap, StateLayout};
use crate::Entry;
use crate::error::Error;
use crate::shapes::{Named, named, optional};
use crate::tensor::Tensor;

/// Arguments of a GDN decode. T = 1; K = V in {64, 128}; HV a multiple of H.
///
/// Row and head strides of q, k, v and o, row strides of the gates and the slot stride of the pools are free;
/// the innermost dim is contiguous. Views that are not 16-byte aligned are taken, by a narrower path.
#[derive(Clone, Copy, Debug)]
pub struct GdnDecode<'a> {
    /// `[B, 1, H, K]`, bf16, f16 or f32.
    pub q: Tensor<'a>,
    /// `[B, 1, H, K]`, bf16, f16 or f32.
    pub k: Tensor<'a>,
    /// `[B, 1, HV, V]`, bf16, f16 or f32.
    pub v: Tensor<'a>,
    /// Raw or given gates, `[B, 1, HV]`.
    pub gates: GdnGates<'a>,
    /// `[B, 1, HV, V]`, bf16, f16 or f32, written; zero for inactive rows.
    pub o: Tensor<'a>,
    /// States, `[P, HV, V, K]` or `[P, HV, K, V]`, f32 or bf16; updated in place unless `write_pool` is given.
    pub pool: Tensor<'a>,
    /// Pool that the new states go to instead, of the same dtype and dims but P.
    pub write_pool: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32: slot that row b starts from; without it, slot b.
    pub read_slots: Option<Tensor<'a>>,
    /// `[B]`, i32, i64 or u32: slot that row b's new state goes to; without it, the read slot.
    pub write_slots: Option<Tensor<'a>>,
    /// What is fixed for a layer.
    pub options: GdnDecodeOptions,
}

/// What is fixed for a layer, besides shapes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GdnDecodeOptions {
    /// Which dim of a state is contiguous.
    pub state_layout: StateLayout,
    /// Query/key head of a value head.
    pub head_map: HeadMap,
    /// Normalise q and k to unit length.
    pub qk_l2norm: bool,
    /// Factor of q; 1/√K where `None`.
    pub scale: Option<f32>,
    /// A slot that makes its row inactive, besides those out of range (vLLM's slot 0).
    pub null_slot: Option<u32>,
    /// Write the new states.
    pub update_state: bool,
}

impl Default for GdnDecodeOptions {
    fn default() -> Self {
        Self {
            state_layout: StateLayout::KLast,
            head_map: HeadMap::Grouped,
            qk_l2norm: true,
            scale: None,
            null_slot: None,
            update_state: true,
        }
    }
}

/// Most tensors of a launch.
pub(crate) const TENSORS: usize = 12;

/// See [`GdnDecode::switches`].
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Switches {
    options: GdnDecodeOptions,
    /// Of raw gates.
    beta_scale: Option<BetaScale>,
    variant: Option<Entry>,
}

impl<'a> GdnDecode<'a> {
    /// All but the tensors that [`GdnDecode::check`] and the choice of a variant look at.
    fn switches(&self, variant: Option<Entry>) -> Switches {
        Switches {
            options: self.options,
            beta_scale: match &self.gates {
                GdnGates::Raw { beta_scale, .. } => Some(*beta_scale),
                GdnGates::Given { .. } => None,
            },
            variant,
        }
    }

    /// Every tensor under its name, where there is one.
    pub(crate) fn tensors(&self) -> [Option<Named<'_>>; TENSORS] {
        let [a, b, a_log, dt_bias] = match &self.gates {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            } => [
                Some(named("a", a)),
                Some(named("b", b)),
                Some(named("A_log", a_log)),
                Some(named("dt_bias", dt_bias)),
            ],
            GdnGates::Given { g, beta } => {
                [Some(named("g", g)), Some(named("beta", beta)), None, None]
            }
        };
        [
            Some(named("q", &self.q)),
            Some(named("k", &self.k)),
            Some(named("v", &self.v)),
            Some(named("o", &self.o)),
            Some(named("state", &self.pool)),
            optional("write state", &self.write_pool),
            optional("read_slots", &self.read_slots),
            optional("write_slots", &self.write_slots),
            a,
            b,
            a_log,
            dt_bias,
        ]
    }

    /// Every compiled variant that computes these arguments, best or not.
    ///
    /// # Errors
    /// As [`Library::gdn_decode`](crate::Library::gdn_decode)'s.
    pub fn variants(&self) -> Result<Vec<Entry>, Error> {
        Ok(self.check()?.kind.variants().collect())
    }

    /// The variant that [`Library::gdn_decode`](crate::Library::gdn_decode) launches.
    ///
    /// # Errors
    /// As [`Library::gdn_decode`](crate::Library::gdn_decode)'s.
    pub fn selected(&self) -> Result<Entry, Error> {
        self.check()?.entry(self.q.dims()[0] as u32)
    }

    /// Bytes that a launch must move where every row is active: each state read and written once, every other
    /// tensor once.
    ///
    /// # Errors
    /// As [`Library::gdn_decode`](crate::Library::gdn_decode)'s.
    pub fn bytes(&self) -> Result<u64, Error> {
        let problem = self.check()?;
        let batch = self.q.dims()[0] as u64;
        let passes = if self.options.update_state { 2 } else { 1 };
        let others = self
            .tensors()
            .into_iter()
            .flatten()
            .filter(|named| !matches!(named.name, "state" | "write state"));
        let others: usize = others
            .map(|named| {
                named.tensor.dims().iter().product::<usize>() * named.tensor.dtype().size_of()
            })
            .sum();
        Ok(batch * problem.state_bytes() * passes + others as u64)
    }

    /// Addresses and pool sizes, as a launch takes them.
    #[must_use]
    pub fn params(&self) -> GdnDecodeParams {
        let address = |tensor: Option<&Tensor<'_>>| tensor.map_or(0, |tensor| tensor.address());
        let slots = |tensor: &Tensor<'_>| tensor.dims().first().map_or(0, |&slots| slots as u32);
        let (a, b, a_log, dt_bias) = match &self.gates {
            GdnGates::Raw {
                a,
                b,
                a_log,
                dt_bias,
                ..
            } => (a, b, Some(a_log), Some(dt_bias)),
            GdnGates::Given { g, beta } => (g, beta, None, None),
        };
        let write_pool = self.write_pool.as_ref().unwrap_or(&self.pool);
        GdnDecodeParams {
            q: self.q.address(),
            k: self.k.address(),
            v: self.v.address(),
            a: a.address(),
            b: b.address(),
            a_log: address(a_log),
            dt_bias: address(dt_bias),
            o: self.o.address(),
            read_pool: self.pool.address(),
            write_pool: write_pool.address(),
            read_slots: address(self.read_slots.as_ref()),
            write_slots: address(self.write_slots.as_ref()),
            read_pool_slots: slots(&self.pool),
            write_pool_slots: slots(write_pool),
        }
    }
}

//! What every operator on states asks of its sizes and tensors.

use crate::Entry;
use crate::error::Error;
use crate::ops::StateLayout;
use crate::shapes::{Named, range, unsupported};
use crate::tensor::DType;

/// Most rows of one launch: a grid's z extent.
pub const MAX_BATCH: usize = 65_535;

/// Heads of a layer and their dims.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    /// Query/key heads.
    pub h: usize,
    /// Value heads.
    pub hv: usize,
    /// K = V.
    pub dim: usize,
}

impl Heads {
    /// Checks them, as the dims of k and v say.
    #[inline]
    pub fn new(h: usize, k_dim: usize, hv: usize, v_dim: usize) -> Result<Self, Error> {
        if !matches!(k_dim, 64 | 128) {
            return Err(unsupported("K", k_dim, "64 or 128"));
        }
        if v_dim != k_dim {
            return Err(unsupported("V", v_dim, "the same as K"));
        }
        if h == 0 || h > MAX_BATCH {
            return Err(range("H", format!("1..={MAX_BATCH}"), h));
        }
        if hv == 0 || !hv.is_multiple_of(h) || hv > MAX_BATCH {
            return Err(range(
                "HV",
                format!("a multiple of H = {h} up to {MAX_BATCH}"),
                hv,
            ));
        }
        Ok(Self { h, hv, dim: k_dim })
    }

    /// A state's dims, as they lie in `layout`.
    #[inline]
    pub fn state(self, layout: StateLayout) -> [(&'static str, usize); 3] {
        let (v, k) = (("V", self.dim), ("K", self.dim));
        match layout {
            StateLayout::KLast => [("HV", self.hv), v, k],
            StateLayout::VLast => [("HV", self.hv), k, v],
        }
    }
}

/// B fits a launch.
#[inline]
pub(crate) fn batch(rows: usize) -> Result<(), Error> {
    if rows > MAX_BATCH {
        return Err(range("B", format!("at most {MAX_BATCH}"), rows));
    }
    Ok(())
}

/// Floats of these dims with a contiguous innermost one: q, k, v, o, or gates.
#[inline]
pub(crate) fn floats<const N: usize>(
    tensor: Named<'_>,
    dims: &[(&'static str, usize); N],
) -> Result<(), Error> {
    tensor.dims(dims)?;
    tensor.float()?;
    tensor.inner_contiguous(1, "a contiguous innermost dim")?;
    tensor.natural()
}

/// A parameter of the gates, f32 without gaps.
#[inline]
pub(crate) fn parameter<const N: usize>(
    tensor: Named<'_>,
    dims: &[(&'static str, usize); N],
) -> Result<(), Error> {
    tensor.dims(dims)?;
    tensor.dtype(&[DType::F32], "f32")?;
    tensor.inner_contiguous(N, "contiguous")?;
    tensor.natural()
}

/// Integers of these dims, each row without gaps.
#[inline]
pub(crate) fn indices<const N: usize>(
    tensor: Named<'_>,
    dims: &[(&'static str, usize); N],
) -> Result<(), Error> {
    tensor.dims(dims)?;
    tensor.dtype(&[DType::I32, DType::I64, DType::U32], "i32, i64 or u32")?;
    tensor.inner_contiguous(1, "contiguous")?;
    tensor.natural()
}

/// The pools that states are read from and written to.
#[derive(Clone, Copy)]
pub(crate) struct Pools<'a> {
    pub read: Named<'a>,
    pub write: Named<'a>,
    /// Elements between the slots of `read`.
    pub read_slot: u32,
    /// Elements between the slots of `write`.
    pub write_slot: u32,
}

impl<'a> Pools<'a> {
    /// Checks pools of states with the dims `state`; `write` is `read` where it is not given.
    #[inline]
    pub fn new(
        read: Named<'a>,
        write: Option<Named<'a>>,
        state: [(&'static str, usize); 3],
    ) -> Result<Self, Error> {
        let read_slot = pool(read, state)?;
        let (write, write_slot) = match write {
            Some(write) => (write, pool(write, state)?),
            None => (read, read_slot),
        };
        same_dtype(write, read, "the dtype of state")?;
        Ok(Self {
            read,
            write,
            read_slot,
            write_slot,
        })
    }

    /// Whether every address and stride is a multiple of 16 bytes.
    #[inline]
    pub fn wide(&self) -> bool {
        self.read.wide() && self.write.wide()
    }

    /// Each of `rows` has the slot of its own number, where no slots are given.
    #[inline]
    pub fn one_for_each(&self, rows: usize, without: &'static str) -> Result<(), Error> {
        let slots = self.read.tensor.dims()[0];
        if rows > slots {
            return Err(range(without, format!("at most P = {slots}"), rows));
        }
        Ok(())
    }
}

/// A pool of states with the dims `state`; its slot stride.
#[inline]
fn pool(tensor: Named<'_>, state: [(&'static str, usize); 3]) -> Result<u32, Error> {
    let [count, ..] = tensor.rank::<4>("[P, HV, V, K]")?;
    tensor.dims(&[("P", count), state[0], state[1], state[2]])?;
    tensor.dtype(&[DType::F32, DType::Bf16], "f32 or bf16")?;
    tensor.inner_contiguous(3, "contiguous slots (the slot stride is free)")?;
    tensor.natural()?;
    if count >= u32::MAX as usize {
        return Err(range("P", "below 2^32 - 1".to_owned(), count));
    }
    let stride = tensor.row_stride()?;
    tensor.distinct(3, "slots that do not overlap")?;
    Ok(stride)
}

/// `tensor` has the dtype of `like`, which `wanted` says.
#[inline]
pub(crate) fn same_dtype(
    tensor: Named<'_>,
    like: Named<'_>,
    wanted: &'static str,
) -> Result<(), Error> {
    tensor.dtype(&[like.tensor.dtype()], wanted)
}

/// The factor of q: finite, 1/√K by default.
#[inline]
pub(crate) fn scale(scale: Option<f32>, k_dim: usize) -> Result<f32, Error> {
    let scale = scale.unwrap_or(1.0 / (k_dim as f32).sqrt());
    if !scale.is_finite() {
        return Err(range("scale", "a finite number".to_owned(), scale));
    }
    Ok(scale)
}

/// The kernels' code of a null slot.
#[inline]
pub(crate) fn null_slot(slot: Option<u32>) -> Result<u32, Error> {
    if slot == Some(u32::MAX) {
        return Err(range(
            "null_slot",
            "below 2^32 - 1 (which is out of range as it is)".to_owned(),
            u32::MAX,
        ));
    }
    Ok(slot.unwrap_or(u32::MAX))
}

/// Two of the arguments exclude each other where both are given.
#[inline]
pub(crate) fn excludes(
    one: (bool, &'static str),
    others: &[(bool, &'static str)],
    why: &'static str,
) -> Result<(), Error> {
    match others.iter().find(|&&(given, _)| one.0 && given) {
        Some(&(_, other)) => Err(Error::Contradiction {
            one: one.1,
            other,
            why,
        }),
        None => Ok(()),
    }
}

/// Each address is a multiple of 16 bytes.
#[inline]
pub(crate) fn aligned<const N: usize>(addresses: [(&'static str, u64); N]) -> Result<(), Error> {
    match addresses
        .iter()
        .find(|(_, address)| !address.is_multiple_of(16))
    {
        Some(&(tensor, address)) => Err(Error::Alignment {
            tensor,
            wanted: 16,
            got: 1 << address.trailing_zeros(),
        }),
        None => Ok(()),
    }
}

/// `variant`, which is one of the arguments' own.
pub(crate) fn one_of(
    mut variants: impl Iterator<Item = Entry>,
    variant: Entry,
) -> Result<Entry, Error> {
    if variants.any(|entry| entry == variant) {
        Ok(variant)
    } else {
        Err(Error::Unsupported {
            what: "variant",
            got: variant.name().to_owned(),
            allowed: "one of the arguments' variants",
        })
    }
}

//! Checks of sizes and tensors that all operators share.

use crate::Entry;
use crate::error::Error;
use crate::step::args::StateLayout;
use crate::tensor::DType;
use crate::tensor_checks::{Named, View, range, unsupported};

/// Largest number of rows of a launch: the limit of a grid's extent in z.
pub const MAX_BATCH: usize = 65_535;

/// Numbers of heads of a layer and their dims.
#[derive(Clone, Copy, Default)]
pub(crate) struct Heads {
    /// Number of query/key heads.
    pub h: usize,
    /// Number of value heads.
    pub hv: usize,
    /// HV / H.
    pub ratio: usize,
    /// K, the dim of a query/key head.
    pub k_dim: usize,
    /// V, the dim of a value head.
    pub v_dim: usize,
}

impl Heads {
    /// Checks the numbers of heads and the dims.
    #[inline]
    pub fn new(h: usize, k_dim: usize, hv: usize, v_dim: usize) -> Result<Self, Error> {
        if !matches!(k_dim, 64 | 96 | 128) {
            return Err(unsupported("K", k_dim, "64, 96 or 128"));
        }
        if k_dim == 96 && v_dim != 192 {
            return Err(unsupported("V", v_dim, "192 with K = 96"));
        }
        if k_dim != 96 && v_dim != k_dim {
            return Err(unsupported("V", v_dim, "the same as K"));
        }
        if h == 0 || h > MAX_BATCH {
            return Err(range("H", format!("1..={MAX_BATCH}"), h));
        }
        // The division is in 32 bits, which is faster. A number that does not fit in 32 bits is not a multiple either.
        let ratio = (hv as u32 / h as u32) as usize;
        if hv == 0 || hv > MAX_BATCH || ratio * h != hv {
            return Err(range(
                "HV",
                format!("a multiple of H = {h} up to {MAX_BATCH}"),
                hv,
            ));
        }
        Ok(Self {
            h,
            hv,
            ratio,
            k_dim,
            v_dim,
        })
    }

    /// D, the number of channels of a convolution that makes q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.h * self.k_dim + self.hv * self.v_dim
    }

    /// The two inner dims of a state, in the order of the layout.
    pub fn state_dims(&self, layout: StateLayout) -> [usize; 2] {
        match layout {
            StateLayout::KLast => [self.v_dim, self.k_dim],
            StateLayout::VLast => [self.k_dim, self.v_dim],
        }
    }
}

/// Checks that a block has room for all value heads of a query/key head. `most` is the limit; `None`: the kernels have no limit.
pub(crate) fn ratio(ratio: usize, most: Option<u32>) -> Result<(), Error> {
    match most {
        Some(most) if ratio > most as usize => Err(range(
            "HV / H",
            format!("at most {most} with a convolution or a norm"),
            ratio,
        )),
        _ => Ok(()),
    }
}

/// Checks that a launch can have this many rows.
#[inline]
pub(crate) fn batch(rows: usize) -> Result<(), Error> {
    if rows > MAX_BATCH {
        return Err(range("B", format!("at most {MAX_BATCH}"), rows));
    }
    Ok(())
}

/// Checks dims and a float dtype, with a contiguous innermost dim: for q, k, v, o, or gates.
#[inline(always)]
pub(crate) fn floats<'a, const N: usize>(
    tensor: Named<'a>,
    letters: &'static [&'static str; N],
    sizes: &[usize; N],
) -> Result<View<'a, N>, Error> {
    let view = tensor.dims(letters, sizes)?;
    tensor.float()?;
    view.inner_contiguous(1, "a contiguous innermost dim")?;
    tensor.natural()?;
    Ok(view)
}

/// Layout of a tensor's rows.
#[derive(Clone, Copy, Default)]
pub(crate) struct Rows {
    /// Whether rows are concatenated, so that dim 0 has size 1.
    pub packed: bool,
    /// Whether constants are the same for rows of any length.
    pub any_length: bool,
}

/// Strides of a tensor in elements, and whether its accesses are narrow (not aligned to 16 bytes).
#[derive(Clone, Copy, Default)]
pub(crate) struct Strides {
    pub row: u32,
    /// Stride of tokens; 0 if there is only one token.
    pub token: u32,
    pub head: u32,
    pub narrow: bool,
}

impl Strides {
    /// Checks a float tensor `[rows, tokens, heads, dim]`; packed rows are `[1, total, heads, dim]`.
    pub fn of_heads(
        tensor: Named<'_>,
        letters: &'static [&'static str; 4],
        sizes: &[usize; 4],
        rows: Rows,
    ) -> Result<Self, Error> {
        let view = floats(tensor, letters, sizes)?;
        let [row, token] = steps(view, rows)?;
        let head = view.stride_u32(2)?;
        let is_wide = view.wide_from(rows.packed as usize);
        Ok(Self {
            row,
            token,
            head,
            // In a launch of rows of any length, the stride of tokens counts even if T is 1, so that constants do not depend on
            // T.
            narrow: !is_wide || rows.any_length && !view.token_wide(),
        })
    }

    /// Checks a float tensor `[rows, tokens, …]` without wide accesses.
    pub fn of_tokens(
        tensor: Named<'_>,
        letters: &'static [&'static str; 3],
        sizes: &[usize; 3],
        rows: Rows,
    ) -> Result<Self, Error> {
        let view = floats(tensor, letters, sizes)?;
        let [row, token] = steps(view, rows)?;
        Ok(Self {
            row,
            token,
            head: 1,
            narrow: false,
        })
    }
}

/// Strides of rows and tokens (dims 0 and 1).
#[inline(always)]
fn steps<const N: usize>(view: View<'_, N>, rows: Rows) -> Result<[u32; 2], Error> {
    let row = match rows.packed {
        true => 0,
        false => view.row_stride()?,
    };
    // A launch of rows of any length has the stride of rows as a parameter, not as a constant.
    let row = if rows.any_length { 0 } else { row };
    let token = if rows.packed || rows.any_length || view.dims[1] > 1 {
        view.token_stride()?
    } else {
        0
    };
    Ok([row, token])
}

/// Checks a parameter of the gates: contiguous f32. Returns whether it is aligned to 16 bytes.
pub(crate) fn parameter<const N: usize>(
    tensor: Named<'_>,
    letters: &'static [&'static str; N],
    sizes: &[usize; N],
) -> Result<bool, Error> {
    let view = tensor.dims(letters, sizes)?;
    tensor.dtype(&[DType::F32], "f32")?;
    view.inner_contiguous(N, "contiguous")?;
    tensor.natural()?;
    Ok(view.wide())
}

/// Checks an integer tensor of these dims, whose rows have no gaps.
pub(crate) fn indices<const N: usize>(
    tensor: Named<'_>,
    letters: &'static [&'static str; N],
    sizes: &[usize; N],
) -> Result<(), Error> {
    let view = tensor.dims(letters, sizes)?;
    tensor.dtype(&[DType::I32, DType::I64, DType::U32], "i32, i64 or u32")?;
    view.inner_contiguous(1, "contiguous")?;
    tensor.natural()
}

/// Checks a written float tensor of all slots, contiguous except for the stride of slots. Returns the stride of slots in
/// elements.
pub(crate) fn floats_of_slots<const N: usize>(
    tensor: Named<'_>,
    letters: &'static [&'static str; N],
    sizes: &[usize; N],
) -> Result<u32, Error> {
    let view = tensor.dims(letters, sizes)?;
    tensor.float()?;
    view.inner_contiguous(N - 1, "contiguous slots (the slot stride is free)")?;
    tensor.natural()?;
    view.distinct(N - 1, "slots that do not overlap, since they are written")?;
    view.row_stride()
}

/// [`floats_of_slots`], and a check that slots are 16-byte aligned.
pub(crate) fn wide_floats_of_slots<const N: usize>(
    tensor: Named<'_>,
    letters: &'static [&'static str; N],
    sizes: &[usize; N],
) -> Result<u32, Error> {
    let stride = floats_of_slots(tensor, letters, sizes)?;
    aligned(16, || [(tensor.name, tensor.tensor.address())])?;
    if !tensor.dims(letters, sizes)?.aligned_to(16) {
        return Err(Error::Stride {
            tensor: tensor.name,
            wanted: "a slot stride of a multiple of 16 bytes",
            got: *tensor.tensor.strides(),
        });
    }
    Ok(stride)
}

/// Checks that `tensor` has the dtype of `like`, as `wanted` says.
#[inline]
pub(crate) fn same_dtype(
    tensor: Named<'_>,
    like: Named<'_>,
    wanted: &'static str,
) -> Result<(), Error> {
    tensor.dtype(&[like.tensor.dtype()], wanted)
}

/// The factor of q: finite, by default 1/√K.
#[inline]
pub(crate) fn scale(scale: Option<f32>, k_dim: usize) -> Result<f32, Error> {
    let scale = scale.unwrap_or(1.0 / (k_dim as f32).sqrt());
    if !scale.is_finite() {
        return Err(range("scale", "a finite number".to_owned(), scale));
    }
    Ok(scale)
}

/// The kernels' code of the null slot.
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

/// Checks that each address is a multiple of `bytes`, a power of two. Names are computed only for the error.
#[inline(always)]
pub(crate) fn aligned<const N: usize>(
    bytes: usize,
    addresses: impl Fn() -> [(&'static str, u64); N],
) -> Result<(), Error> {
    let low = bytes as u64 - 1;
    if addresses().iter().fold(0, |all, (_, one)| all | one) & low == 0 {
        Ok(())
    } else {
        Err(misaligned(bytes, addresses()))
    }
}

/// The error for the first address that is not a multiple of `bytes`.
#[cold]
pub(crate) fn misaligned(
    bytes: usize,
    addresses: impl IntoIterator<Item = (&'static str, u64)>,
) -> Error {
    let is_off = |(_, address): &(_, u64)| !address.is_multiple_of(bytes as u64);
    let (tensor, address) = (addresses.into_iter().find(is_off)).unwrap_or(("tensor", 0));
    Error::Alignment {
        tensor,
        wanted: bytes,
        got: 1 << address.trailing_zeros().min(63),
    }
}

/// Checks that `variant` is one of the variants of the arguments.
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

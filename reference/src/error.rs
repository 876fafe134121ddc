use std::fmt;

/// An input whose shape contradicts the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A slice is not as long as its dimensions say.
    Length {
        /// The slice.
        name: &'static str,
        /// Its dimensions in letters.
        shape: &'static str,
        /// Elements of those dimensions.
        wanted: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// A pool is not a whole number of slots.
    Pool {
        /// The pool.
        name: &'static str,
        /// Elements of a slot, HV·K·V.
        slot: usize,
        /// Elements of the pool.
        got: usize,
    },
    /// A dimension is zero.
    Zero {
        /// The dimension.
        name: &'static str,
    },
    /// HV is not a multiple of H.
    Heads {
        /// H
        heads: usize,
        /// HV
        value_heads: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length {
                name,
                shape,
                wanted,
                got,
            } => {
                write!(f, "{name} {shape}: wanted length {wanted}, got {got}")
            }
            Self::Pool { name, slot, got } => {
                write!(
                    f,
                    "{name}: wanted a multiple of {slot} elements (one slot, HV*K*V), got {got}"
                )
            }
            Self::Zero { name } => write!(f, "{name}: wanted at least 1, got 0"),
            Self::Heads { heads, value_heads } => {
                write!(
                    f,
                    "value_heads: wanted a multiple of heads = {heads}, got {value_heads}"
                )
            }
        }
    }
}

impl std::error::Error for Error {}

/// Checks that `values` has the product of `dims` elements, `shape` in letters.
pub(crate) fn check_length(
    name: &'static str,
    shape: &'static str,
    dims: &[usize],
    got: usize,
) -> Result<(), Error> {
    let wanted = elements(dims);
    if got == wanted {
        Ok(())
    } else {
        Err(Error::Length {
            name,
            shape,
            wanted,
            got,
        })
    }
}

/// Product of `dims`; `usize::MAX`, which no slice of f64 reaches, where it overflows.
pub(crate) fn elements(dims: &[usize]) -> usize {
    dims.iter()
        .fold(1, |product: usize, &dim| product.saturating_mul(dim))
}

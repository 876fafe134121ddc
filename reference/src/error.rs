use std::fmt;

/// An input whose shape contradicts the others, or switches that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A slice is not as long as its dimensions say.
    Length {
        /// The slice.
        name: &'static str,
        /// Its dimensions in letters.
        shape: String,
        /// Elements of those dimensions.
        wanted: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// A slice has neither a row for each query/key head nor one for each value head.
    HeadRows {
        /// The slice.
        name: &'static str,
        /// Elements of H rows.
        heads: usize,
        /// Elements of HV rows.
        value_heads: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// A slice is not a whole number of slots or tokens.
    Multiple {
        /// The slice.
        name: &'static str,
        /// What it is to be a whole number of, and its dimensions.
        unit: &'static str,
        /// Elements of a unit.
        of: usize,
        /// Elements of the slice.
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
    /// Fewer snapshots than tokens.
    Steps {
        /// T
        tokens: usize,
        /// Snapshots of a row.
        steps: usize,
    },
    /// Two inputs of which at most one may be given.
    Contradiction {
        /// The one.
        name: &'static str,
        /// The other.
        with: &'static str,
    },
    /// An input that means nothing without another.
    Missing {
        /// What is absent.
        name: &'static str,
        /// What is given.
        with: &'static str,
    },
    /// An error in the previous tokens.
    Previous(Box<Error>),
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
            Self::HeadRows {
                name,
                heads,
                value_heads,
                got,
            } => {
                write!(
                    f,
                    "{name}: wanted length {heads} (H rows) or {value_heads} (HV rows), got {got}"
                )
            }
            Self::Multiple {
                name,
                unit,
                of,
                got,
            } => {
                write!(
                    f,
                    "{name}: wanted a multiple of {of} elements ({unit}), got {got}"
                )
            }
            Self::Zero { name } => write!(f, "{name}: wanted at least 1, got 0"),
            Self::Heads { heads, value_heads } => {
                write!(
                    f,
                    "value_heads: wanted a multiple of heads = {heads}, got {value_heads}"
                )
            }
            Self::Steps { tokens, steps } => {
                write!(
                    f,
                    "snapshot_steps: wanted at least tokens = {tokens}, got {steps}"
                )
            }
            Self::Contradiction { name, with } => {
                write!(f, "{name}: wanted none with {with}, got some")
            }
            Self::Missing { name, with } => write!(f, "{name}: wanted with {with}, got none"),
            Self::Previous(error) => write!(f, "previous {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// How many units of `of` elements `got` elements are.
    pub(crate) fn check_multiple(
        name: &'static str,
        unit: &'static str,
        of: usize,
        got: usize,
    ) -> Result<usize, Self> {
        if got.is_multiple_of(of) {
            Ok(got.checked_div(of).unwrap_or(0))
        } else {
            Err(Self::Multiple {
                name,
                unit,
                of,
                got,
            })
        }
    }
}

/// The leading dimensions of tensors with something for every token, in letters, and their product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens {
    pub letters: &'static str,
    pub count: usize,
}

impl Tokens {
    /// Checks that a tensor with the trailing dimensions `dims` of every token has `got` elements.
    pub fn check(
        &self,
        name: &'static str,
        letters: &str,
        dims: &[usize],
        got: usize,
    ) -> Result<(), Error> {
        let wanted = elements(dims).saturating_mul(self.count);
        check_elements(
            name,
            || format!("[{}, {letters}]", self.letters),
            wanted,
            got,
        )
    }
}

/// Checks that `got` is the product of `dims`, `shape` in letters.
pub(crate) fn check_length(
    name: &'static str,
    shape: &str,
    dims: &[usize],
    got: usize,
) -> Result<(), Error> {
    check_elements(name, || shape.to_owned(), elements(dims), got)
}

fn check_elements(
    name: &'static str,
    shape: impl FnOnce() -> String,
    wanted: usize,
    got: usize,
) -> Result<(), Error> {
    if got == wanted {
        return Ok(());
    }
    Err(Error::Length {
        name,
        shape: shape(),
        wanted,
        got,
    })
}

/// Product of `dims`; `usize::MAX`, which no slice of f64 reaches, where it overflows.
pub(crate) fn elements(dims: &[usize]) -> usize {
    dims.iter()
        .fold(1, |product: usize, &dim| product.saturating_mul(dim))
}

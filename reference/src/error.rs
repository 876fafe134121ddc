use std::fmt;

/// A shape of an input that contradicts the others, or switches that contradict each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A slice is not as long as its dimensions say.
    Length {
        /// Name of the slice.
        name: &'static str,
        /// Dimensions of the slice, in letters.
        shape: String,
        /// Elements of those dimensions.
        wanted: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// A slice has rows neither for the query/key heads nor for the value heads.
    HeadRows {
        /// Name of the slice.
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
        /// Name of the slice.
        name: &'static str,
        /// Name of the unit and its dimensions.
        unit: &'static str,
        /// Elements of one unit.
        of: usize,
        /// Elements of the slice.
        got: usize,
    },
    /// A dimension is zero.
    Zero {
        /// Name of the dimension.
        name: &'static str,
    },
    /// HV is not a multiple of H.
    Heads {
        /// Query/key heads, H.
        heads: usize,
        /// Value heads, HV.
        value_heads: usize,
    },
    /// Fewer snapshots than tokens.
    Steps {
        /// Tokens of each row, T.
        tokens: usize,
        /// Snapshots of a row.
        steps: usize,
    },
    /// Two inputs of which at most one may be given.
    Contradiction {
        /// Name of one input.
        name: &'static str,
        /// Name of the other.
        with: &'static str,
    },
    /// An input that needs another one, which is missing.
    Missing {
        /// Name of the missing input.
        name: &'static str,
        /// Name of the input that needs it.
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
    /// Number of units of `of` elements in `got` elements.
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

/// Leading dimensions of tensors that have an entry for every token: in letters, and their product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens {
    pub letters: &'static str,
    pub count: usize,
}

impl Tokens {
    /// Checks that a tensor with these leading dimensions and `dims` for every token has `got` elements.
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

/// Checks that `got` is the product of `dims`, whose letters are `shape`.
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

/// Product of `dims`, or `usize::MAX` if it overflows: no slice of f64 is as long.
pub(crate) fn elements(dims: &[usize]) -> usize {
    dims.iter()
        .fold(1, |product: usize, &dim| product.saturating_mul(dim))
}

//! Dims and strides.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;

use super::range;
use crate::error::Error;

/// Most dims that a tensor has.
pub const MAX_DIMS: usize = 5;

/// Up to [`MAX_DIMS`] numbers, one for each dim: the dims themselves, or strides in elements.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Values after the first `len` are 0.
    pub(super) values: [usize; MAX_DIMS],
    pub(super) len: usize,
}

impl Hash for Dims {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self[..].hash(state);
    }
}

impl Dims {
    /// Creates dims or strides from `values`, outermost first.
    ///
    /// # Errors
    /// [`Error::Range`] if there are more than [`MAX_DIMS`] values.
    pub fn new(values: &[usize]) -> Result<Self, Error> {
        let mut dims = Self {
            values: [0; MAX_DIMS],
            len: values.len(),
        };
        let Some(head) = dims.values.get_mut(..values.len()) else {
            return Err(range(
                "dims of a tensor",
                format!("at most {MAX_DIMS}"),
                values.len(),
            ));
        };
        head.copy_from_slice(values);
        Ok(dims)
    }

    /// The value for `dim`; 0 if the tensor has no such dim.
    #[inline(always)]
    pub(crate) const fn or_zero(&self, dim: usize) -> usize {
        self.values[dim]
    }

    /// Strides of a contiguous tensor of these dims, in elements; [`Error::Range`] if they overflow.
    pub(super) fn contiguous_strides(&self) -> Result<Self, Error> {
        let mut strides = *self;
        let mut stride = 1usize;
        for dim in (0..self.len).rev() {
            strides.values[dim] = stride;
            stride = stride
                .checked_mul(self.values[dim])
                .ok_or_else(|| range("elements of a tensor", "at most 2^64 - 1", self))?;
        }
        Ok(strides)
    }
}

impl Deref for Dims {
    type Target = [usize];

    #[inline]
    fn deref(&self) -> &[usize] {
        &self.values[..self.len]
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

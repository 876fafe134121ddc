//! Address map of a tensor: which bytes belong to it, and which element a byte belongs to.

use std::cmp::Reverse;
use std::fmt;
use std::ops::Range;

use super::Region;

/// A region with at least one element, laid out for look-up.
pub struct View<'a> {
    pub region: &'a Region,
    /// Index of the shadow that records its accesses.
    pub shadow: usize,
    /// In order of falling stride.
    axes: Vec<Axis>,
    /// The axes before this one step over runs of elements without gaps.
    outer: usize,
    /// Bytes of such a run.
    run: u64,
    /// Bytes from the first to the last byte.
    reach: u64,
}

/// One dim along which the address changes.
struct Axis {
    dim: usize,
    count: u64,
    /// Bytes between neighbours.
    stride: u64,
    /// Bytes from the first to the last byte of one position along the axis.
    reach: u64,
}

impl<'a> View<'a> {
    /// None for a region without elements.
    pub fn new(region: &'a Region) -> Option<Self> {
        let element = region.element_bytes as u64;
        if element == 0 || region.dims.contains(&0) {
            return None;
        }
        let axis = |(dim, (&count, &stride)): (usize, (&usize, &usize))| {
            // The stride of a dim of one may be any number.
            (count > 1 && stride > 0).then(|| Axis {
                dim,
                count: count as u64,
                stride: stride as u64 * element,
                reach: 0,
            })
        };
        let dims = region.dims.iter().zip(&region.strides).enumerate();
        let mut axes: Vec<_> = dims.filter_map(axis).collect();
        axes.sort_by_key(|axis| Reverse(axis.stride));
        let (mut reach, mut run, mut outer) = (element, element, axes.len());
        for (at, axis) in axes.iter_mut().enumerate().rev() {
            axis.reach = reach;
            reach += (axis.count - 1) * axis.stride;
            if at + 1 == outer && axis.stride == run {
                run *= axis.count;
                outer = at;
            }
        }
        Some(Self {
            region,
            shadow: 0,
            axes,
            outer,
            run,
            reach,
        })
    }

    /// Address of the first byte.
    pub fn start(&self) -> u64 {
        self.region.address
    }

    /// Address past the last byte.
    pub fn end(&self) -> u64 {
        self.region.address + self.reach
    }

    /// Whether all `size` bytes at `address` belong to elements.
    pub fn covers(&self, address: u64, size: u64) -> bool {
        self.run_of(address, size).is_some() || self.in_runs(address, size)
    }

    /// The run that contains all `size` bytes at `address`, if one does.
    #[inline]
    pub fn run_of(&self, address: u64, size: u64) -> Option<Range<u64>> {
        let offset = address.wrapping_sub(self.start());
        if offset >= self.reach {
            return None;
        }
        let start = address - self.offset_in_run(&self.axes[..self.outer], offset, size)?;
        Some(start..start + self.run)
    }

    /// Byte offset within a run of the `size` bytes at `offset`, if one run contains them all.
    #[inline]
    fn offset_in_run(&self, outer: &[Axis], offset: u64, size: u64) -> Option<u64> {
        let [axis, inner @ ..] = outer else {
            return (offset + size <= self.run).then_some(offset);
        };
        let last = (offset / axis.stride).min(axis.count - 1);
        let mut rest = offset - last * axis.stride;
        // A second position is possible only if elements overlap.
        while rest < axis.reach && rest <= offset {
            let into = self.offset_in_run(inner, rest, size);
            if into.is_some() {
                return into;
            }
            rest += axis.stride;
        }
        None
    }

    /// Whether each byte lies within a run.
    #[cold]
    fn in_runs(&self, address: u64, size: u64) -> bool {
        size > 1 && (address..address + size).all(|byte| self.covers(byte, 1))
    }

    /// The element at `address`, or the last one before it, and the address of its end; `address` is not before the start.
    pub fn element(&self, address: u64) -> (Vec<usize>, u64) {
        let mut index = vec![0; self.region.dims.len()];
        let mut element = self.start();
        for axis in &self.axes {
            let place = ((address - element) / axis.stride).min(axis.count - 1);
            index[axis.dim] = place as usize;
            element += place * axis.stride;
        }
        (index, element + self.region.element_bytes as u64)
    }

    /// Bytes between `address` and the element at or before it, or the tensor's start.
    pub fn distance(&self, address: u64) -> u64 {
        if address < self.start() {
            return self.start() - address;
        }
        address.saturating_sub(self.element(address).1)
    }
}

impl fmt::Display for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Region {
            name,
            dims,
            strides,
            ..
        } = self.region;
        write!(f, "`{name}` {dims:?}")?;
        if self.outer > 0 {
            write!(f, " with strides {strides:?}")
        } else {
            Ok(())
        }
    }
}

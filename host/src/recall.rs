//! The last launch of an operator, remembered: a launch of the same layouts is neither checked nor looked up again.

use std::sync::Mutex;

use crate::driver::RawFunction;
use crate::shapes::Named;
use crate::step::Launches;
use crate::tensor::{DType, Dims, Memory, Tensor};

/// Words of [`Switches`].
pub(crate) const SWITCHES: usize = 18;

/// All that a check looks at besides tensors, floats by their bits.
pub(crate) type Switches = [u64; SWITCHES];

/// What was launched last, of arguments with up to `N` tensors.
///
/// A thread that finds another one at it does without.
pub(crate) struct Last<const N: usize>(Mutex<Option<Launched<N>>>);

struct Launched<const N: usize> {
    switches: Switches,
    layouts: [Option<Layout>; N],
    launches: Launches<RawFunction>,
}

/// All that a check looks at in a tensor.
struct Layout {
    dtype: DType,
    dims: Dims,
    strides: Dims,
    memory: Memory,
    is_writable: bool,
    /// Bytes past a multiple of 16: no check asks for more.
    misalignment: u64,
}

impl<const N: usize> Default for Last<N> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<const N: usize> Last<N> {
    /// What to launch, where the last launch was one of these layouts.
    pub fn recall(
        &self,
        switches: &Switches,
        tensors: &[Option<Named<'_>>; N],
    ) -> Option<Launches<RawFunction>> {
        let last = self.0.try_lock().ok()?;
        let last = last.as_ref().filter(|last| last.switches == *switches)?;
        let same = |(layout, named): (&Option<Layout>, &Option<Named<'_>>)| match (layout, named) {
            (Some(layout), Some(named)) => layout.is_of(named.tensor),
            (None, None) => true,
            _ => false,
        };
        let recalled = last.layouts.iter().zip(tensors).all(same);
        recalled.then_some(last.launches)
    }

    /// Remembers a launch of checked arguments.
    pub fn remember(
        &self,
        switches: Switches,
        tensors: &[Option<Named<'_>>; N],
        launches: Launches<RawFunction>,
    ) {
        let launched = Launched {
            switches,
            layouts: tensors.map(|named| named.map(|named| Layout::of(named.tensor))),
            launches,
        };
        if let Ok(mut last) = self.0.try_lock() {
            *last = Some(launched);
        }
    }
}

impl Layout {
    fn of(tensor: &Tensor<'_>) -> Self {
        Self {
            dtype: tensor.dtype(),
            dims: *tensor.dims(),
            strides: *tensor.strides(),
            memory: tensor.memory(),
            is_writable: tensor.is_writable(),
            misalignment: tensor.address() % 16,
        }
    }

    fn is_of(&self, tensor: &Tensor<'_>) -> bool {
        // Without a branch for each, which costs more than to compare them all.
        (self.dims == *tensor.dims())
            & (self.strides == *tensor.strides())
            & (self.dtype == tensor.dtype())
            & (self.memory == tensor.memory())
            & (self.is_writable == tensor.is_writable())
            & (self.misalignment == tensor.address() % 16)
    }
}

#[cfg(test)]
mod tests {
    use gated_delta_kernels::launch::LaunchShape;

    use super::*;
    use crate::shapes::named;

    const FUNCTION: RawFunction = RawFunction::NULL;
    const SHAPE: LaunchShape = LaunchShape {
        grid: [1, 2, 3],
        block: 64,
        shared_bytes: 5,
        cluster: 1,
        overlaps: false,
    };
    /// What was launched.
    fn launches() -> Launches<RawFunction> {
        let mut launches = Launches::alone(FUNCTION, LaunchShape { block: 96, ..SHAPE });
        launches.beside.prepare = Some((FUNCTION, SHAPE));
        launches
    }

    fn at(address: u64, dtype: DType, dims: &[usize]) -> Tensor<'static> {
        // SAFETY: nothing is launched.
        unsafe { Tensor::from_raw(address, dtype, dims) }.unwrap()
    }

    /// Whether a launch of the first arguments is recalled for the second ones.
    fn recalled(
        launched: (u64, [Option<Tensor<'_>>; 2]),
        asked: (u64, [Option<Tensor<'_>>; 2]),
    ) -> bool {
        let last = Last::<2>::default();
        let tensors = launched
            .1
            .each_ref()
            .map(|tensor| tensor.as_ref().map(|tensor| named("a", tensor)));
        last.remember([launched.0; SWITCHES], &tensors, launches());
        let tensors = asked
            .1
            .each_ref()
            .map(|tensor| tensor.as_ref().map(|tensor| named("a", tensor)));
        last.recall(&[asked.0; SWITCHES], &tensors) == Some(launches())
    }

    #[test]
    fn layouts_are_recalled_at_any_address_as_aligned() {
        let a = || at(0x1_0008, DType::Bf16, &[2, 3]);
        assert!(recalled((1, [Some(a()), None]), (1, [Some(a()), None])));
        let elsewhere = at(0x7_0018, DType::Bf16, &[2, 3]);
        assert!(recalled(
            (1, [Some(a()), None]),
            (1, [Some(elsewhere), None])
        ));
    }

    #[test]
    fn whatever_a_check_looks_at_tells_launches_apart() {
        let a = || at(0x1_0008, DType::Bf16, &[2, 3]);
        for other in [
            at(0x1_0000, DType::Bf16, &[2, 3]),
            at(0x1_000a, DType::Bf16, &[2, 3]),
            at(0x1_0008, DType::F16, &[2, 3]),
            at(0x1_0008, DType::Bf16, &[3, 3]),
            at(0x1_0008, DType::Bf16, &[2, 3, 1]),
            a().with_strides(&[4, 1]).unwrap(),
        ] {
            assert!(
                !recalled((1, [Some(a()), None]), (1, [Some(other), None])),
                "{other:?}"
            );
        }
        assert!(!recalled((1, [Some(a()), None]), (2, [Some(a()), None])));
        assert!(!recalled((1, [Some(a()), None]), (1, [None, Some(a())])));
        assert!(!recalled(
            (1, [Some(a()), None]),
            (1, [Some(a()), Some(a())])
        ));
        assert!(!recalled(
            (1, [Some(a()), Some(a())]),
            (1, [Some(a()), None])
        ));
    }

    #[test]
    fn memory_and_borrow_tell_launches_apart() {
        let mut numbers = [0.0f32; 4];
        let address = numbers.as_ptr().addr() as u64;
        let device = at(address, DType::F32, &[4]);
        let shared = Tensor::from_slice(&numbers, &[4]).unwrap();
        assert!(recalled(
            (1, [Some(shared), None]),
            (1, [Some(shared), None])
        ));
        assert!(!recalled(
            (1, [Some(device), None]),
            (1, [Some(shared), None])
        ));
        let shared = Layout::of(&shared);
        let exclusive = Tensor::from_slice_mut(&mut numbers, &[4]).unwrap();
        assert!(!shared.is_of(&exclusive) && Layout::of(&exclusive).is_of(&exclusive));
    }
}

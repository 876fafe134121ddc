//! The last launch of an operator. A launch with the same layouts needs no checks, and no search for its kernels.

use crate::driver::RawFunction;
use crate::step::{SWITCHES, Sequence, Switches};
use crate::tensor::{Differences, Layout, Tensor};
use crate::try_lock::TryLock;

/// The last launch of arguments with up to `N` tensors, at most 64.
pub(crate) struct Last<const N: usize>(TryLock<Option<Launched<N>>>);

// The fields lie in the order of their comparison.
#[repr(C)]
struct Launched<const N: usize> {
    switches: Switches,
    /// Bit i is set if there is a tensor i.
    present: u64,
    /// The layouts of the tensors that are present, by number, without gaps.
    layouts: [Layout; N],
    launches: Sequence<RawFunction>,
}

/// The tensors of a launch, and a bit for each one that is present.
pub(crate) type Present<'r, 'a, const N: usize> = (u64, &'r [Option<&'a Tensor<'a>>; N]);

impl<const N: usize> Launched<N> {
    /// Whether the tensors at the same places have the same layouts.
    ///
    /// The function is not inlined, and serves all kinds of arguments: the compiler knows that a reference in an argument is
    /// aligned.
    #[inline(never)]
    fn has_layouts_of(&self, tensors: &[Option<&Tensor<'_>>; N]) -> bool {
        let (mut left, mut next, mut differences) = (self.present, 0, Differences::NONE);
        while left != 0 {
            let tensor = tensors.get(left.trailing_zeros() as usize);
            let (Some(layout), Some(Some(tensor))) = (self.layouts.get(next), tensor) else {
                return false;
            };
            left &= left - 1;
            next += 1;
            layout.differs(tensor, &mut differences);
        }
        differences.are_none()
    }
}

impl<const N: usize> Default for Last<N> {
    fn default() -> Self {
        Self(TryLock::default())
    }
}

impl<const N: usize> Last<N> {
    /// Applies `read` to the launches of the last call, if it had the same switches and layouts. Otherwise `None`.
    #[expect(
        clippy::needless_range_loop,
        reason = "nothing of an iterator is left to be inlined where a build has no link-time optimisation"
    )]
    #[inline(always)]
    pub fn recall<R>(
        &self,
        switches: &Switches,
        (present, tensors): Present<'_, '_, N>,
        read: impl FnOnce(&Sequence<RawFunction>) -> R,
    ) -> Option<R> {
        let recalled = self.0.with(|last| {
            let last = last.as_ref()?;
            // All differences are combined into one word, because a branch for each would cost more than comparing all of them.
            let mut differ = last.present ^ present;
            for at in 0..SWITCHES {
                differ |= last.switches[at] ^ switches[at];
            }
            if differ != 0 {
                return None;
            }
            last.has_layouts_of(tensors).then(|| read(&last.launches))
        });
        recalled?
    }

    /// Remembers a launch whose arguments are checked.
    pub fn remember(
        &self,
        switches: Switches,
        (present, tensors): Present<'_, '_, N>,
        launches: Sequence<RawFunction>,
    ) {
        let mut layouts = [Layout::NONE; N];
        for (layout, tensor) in layouts.iter_mut().zip(tensors.iter().flatten()) {
            *layout = tensor.layout();
        }
        let launched = Launched {
            switches,
            present,
            layouts,
            launches,
        };
        self.0.with(|last| *last = Some(launched));
    }
}

#[cfg(test)]
mod tests {
    use gated_delta_kernels::launch::LaunchShape;

    use super::*;
    use crate::step::Launches;
    use crate::tensor::DType;

    const FUNCTION: RawFunction = RawFunction::NULL;
    const SHAPE: LaunchShape = LaunchShape {
        grid: [1, 2, 3],
        block: 64,
        shared_bytes: 5,
        cluster: 1,
        overlaps: false,
    };
    /// Launches with arbitrary numbers.
    fn launches() -> Sequence<RawFunction> {
        let mut launches = Launches::alone(FUNCTION, LaunchShape { block: 96, ..SHAPE });
        launches.beside.prepare = Some((FUNCTION, SHAPE));
        launches.sequence()
    }

    fn at(address: u64, dtype: DType, dims: &[usize]) -> Tensor<'static> {
        // SAFETY: nothing is launched.
        unsafe { Tensor::from_raw(address, dtype, dims) }.unwrap()
    }

    /// Whether a launch of the second arguments is recalled from a launch of the first arguments.
    fn recalled(
        launched: (u64, [Option<Tensor<'_>>; 2]),
        asked: (u64, [Option<Tensor<'_>>; 2]),
    ) -> bool {
        let last = Last::<2>::default();
        let present = |tensors: &[Option<Tensor<'_>>; 2]| {
            let [first, second] = tensors.each_ref().map(|it| u64::from(it.is_some()));
            first | second << 1
        };
        let tensors = launched.1.each_ref().map(Option::as_ref);
        let of = (present(&launched.1), &tensors);
        last.remember([launched.0; SWITCHES], of, launches());
        let tensors = asked.1.each_ref().map(Option::as_ref);
        let asked = (present(&asked.1), &tensors, [asked.0; SWITCHES]);
        let recalled = last.recall(&asked.2, (asked.0, asked.1), |launches| *launches);
        recalled == Some(launches())
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
        let shared = shared.layout();
        let exclusive = Tensor::from_slice_mut(&mut numbers, &[4]).unwrap();
        let differs = |layout: Layout| {
            let mut differences = Differences::NONE;
            layout.differs(&exclusive, &mut differences);
            !differences.are_none()
        };
        assert!(differs(shared) && !differs(exclusive.layout()));
    }
}

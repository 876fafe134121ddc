//! Tensors with any dims, strides, dtype and address, and views of them.

use gated_delta::{DType, Tensor};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::select;

/// Sizes that operators take, and sizes whose products overflow.
pub fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..=4,
        4 => select(vec![16, 17, 64, 65, 128, 65_535, 65_536]),
        1 => select(vec![usize::MAX, usize::MAX / 2, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 62]),
        1 => any::<usize>(),
    ]
}

pub fn dtype() -> impl Strategy<Value = DType> {
    select(vec![
        DType::F32,
        DType::Bf16,
        DType::F16,
        DType::I32,
        DType::I64,
        DType::U32,
    ])
}

/// Operation that makes a view of a tensor.
#[derive(Clone, Debug)]
pub enum View {
    Strides(Vec<usize>),
    Narrow(usize, usize, usize),
    Split(usize, usize),
}

pub fn view() -> impl Strategy<Value = View> {
    prop_oneof![
        2 => vec(size(), 0..=6).prop_map(View::Strides),
        1 => (0usize..6, size(), size()).prop_map(|(dim, start, len)| View::Narrow(dim, start, len)),
        1 => (0usize..6, size()).prop_map(|(dim, inner)| View::Split(dim, inner)),
    ]
}

impl View {
    pub fn of(self, tensor: Tensor<'static>) -> Option<Tensor<'static>> {
        match self {
            Self::Strides(strides) => tensor.with_strides(&strides),
            Self::Narrow(dim, start, len) => tensor.narrow(dim, start, len),
            Self::Split(dim, inner) => tensor.split(dim, inner),
        }
        .ok()
    }
}

pub fn raw(address: u64, dtype: DType, dims: &[usize]) -> Option<Tensor<'static>> {
    // SAFETY: all launches here are the simulator's, which refuses tensors in GPU memory.
    unsafe { Tensor::from_raw(address, dtype, dims) }.ok()
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => Just(0x1000),
        1 => select(vec![0, 1, 2, 0x1008, u64::MAX, u64::MAX - 15]),
        1 => any::<u64>(),
    ]
}

/// Any tensor.
pub fn wild() -> impl Strategy<Value = Tensor<'static>> {
    let parts = (address(), dtype(), vec(size(), 0..=6), vec(view(), 0..3));
    parts.prop_filter_map("no such tensor", |(address, dtype, dims, views)| {
        let tensor = raw(address, dtype, &dims)?;
        views
            .into_iter()
            .try_fold(tensor, |tensor, view| view.of(tensor))
    })
}

//! The rules of the arguments, each broken once.

pub mod decode;
pub mod kda;
pub mod mtp;

use gated_delta::{DType, Tensor};
use gated_delta_tests::args::Args;
use gated_delta_tests::tensors;

/// What the message begins with, what it says was wanted, and what it says came.
pub type Message = [&'static str; 3];

/// What it says of a tensor of floats.
const FLOATS: &str = "bf16, f16 or f32";

/// A broken rule.
pub struct Rule {
    change: Box<dyn Fn(&mut Args<'_>)>,
    message: Message,
}

impl Rule {
    /// Arguments after `change` are refused with `message`.
    pub fn new(change: impl Fn(&mut Args<'_>) + 'static, message: Message) -> Self {
        Self {
            change: Box::new(change),
            message,
        }
    }

    /// So are those in which the tensor of this name is another one.
    fn of_tensor((name, tensor, message): (&'static str, Tensor<'static>, Message)) -> Self {
        let change = move |args: &mut Args<'_>| {
            *tensors::tensor(args, name) = tensor;
        };
        Self::new(change, message)
    }

    /// Breaks it in good arguments.
    pub fn change(&self, args: &mut Args<'_>) {
        (self.change)(args);
    }

    /// Panics unless `message` is the one that the rule asks for.
    #[track_caller]
    pub fn assert_names_it(&self, message: &str) {
        let named = message
            .strip_prefix(self.message[0])
            .is_some_and(|rest| rest.starts_with([':', ' ']));
        let complete = self.message.iter().all(|part| message.contains(part));
        assert!(
            named && complete,
            "wanted {:?}, got: {message}",
            self.message
        );
    }
}

/// A tensor that nothing is ever launched on.
fn tensor(dtype: DType, dims: &[usize]) -> Tensor<'static> {
    at(0x1_0000, dtype, dims)
}

fn at(address: u64, dtype: DType, dims: &[usize]) -> Tensor<'static> {
    // SAFETY: the arguments that it becomes part of are refused.
    unsafe { Tensor::from_raw(address, dtype, dims) }.unwrap()
}

fn strided(dtype: DType, dims: &[usize], strides: &[usize]) -> Tensor<'static> {
    tensor(dtype, dims).with_strides(strides).unwrap()
}

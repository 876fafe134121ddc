//! The rules of the arguments, each broken once.

pub mod decode;
pub mod kda;
pub mod verify;

use gated_delta::{DType, Tensor};
use gated_delta_harness::arguments::Arguments;

/// What the message begins with, what it says was wanted, and what it says came.
pub type Message = [&'static str; 3];

/// What it says of a tensor of floats.
const FLOATS: &str = "bf16, f16 or f32";

/// What is done to good arguments.
type Change = fn(&mut Arguments<Tensor<'_>>);

/// What becomes of the tensor of this name.
type OfTensor = (&'static str, Tensor<'static>, Message);

/// A broken rule.
pub struct Rule {
    broken: Broken,
    message: Message,
}

/// How it is broken.
enum Broken {
    /// The tensor of this name is another one.
    Tensor(&'static str, Tensor<'static>),
    Otherwise(Change),
}

/// Rules of tensors, and others.
fn all(tensors: Vec<OfTensor>, changes: &[(Change, Message)]) -> Vec<Rule> {
    let tensors = tensors.into_iter().map(|(name, tensor, message)| Rule {
        broken: Broken::Tensor(name, tensor),
        message,
    });
    let changes = changes.iter().map(|&(change, message)| Rule {
        broken: Broken::Otherwise(change),
        message,
    });
    tensors.chain(changes).collect()
}

/// The tensor of this name.
///
/// # Panics
/// Where there is none.
pub fn tensor_of<'a, 'b>(args: &'b mut Arguments<Tensor<'a>>, name: &str) -> &'b mut Tensor<'a> {
    let all = args.tensors_mut().into_iter();
    let named = all.into_iter().find(|(of, _)| *of == name);
    named.unwrap_or_else(|| panic!("there is no {name}")).1
}

impl Rule {
    /// Breaks it in good arguments.
    pub fn change(&self, args: &mut Arguments<Tensor<'_>>) {
        match self.broken {
            Broken::Tensor(name, tensor) => *tensor_of(args, name) = tensor,
            Broken::Otherwise(change) => change(args),
        }
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

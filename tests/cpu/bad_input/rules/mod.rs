//! The rules of arguments, each broken once.

pub mod decode;
pub mod kda;
pub mod verify;

use gated_delta::{DType, Tensor};
use gated_delta_harness::arguments::Arguments;

/// Parts of an error message: its beginning, the rule, and the given value.
pub type Message = [&'static str; 3];

/// Dtypes of a float tensor in a message.
const FLOATS: &str = "bf16, f16 or f32";

/// Change that breaks valid arguments.
type Change = fn(&mut Arguments<Tensor<'_>>);

/// Name of a tensor, its invalid replacement, and the message.
type OfTensor = (&'static str, Tensor<'static>, Message);

/// A rule, with a way to break it and the expected message.
pub struct Rule {
    broken: Broken,
    message: Message,
}

/// Way to break a rule.
enum Broken {
    /// Replaces the tensor with this name.
    Tensor(&'static str, Tensor<'static>),
    Otherwise(Change),
}

/// Rules that a tensor breaks, and rules that a change of the arguments breaks.
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

/// The tensor with this name.
///
/// # Panics
/// If there is none.
pub fn tensor_of<'a, 'b>(args: &'b mut Arguments<Tensor<'a>>, name: &str) -> &'b mut Tensor<'a> {
    let all = args.tensors_mut().into_iter();
    let named = all.into_iter().find(|(of, _)| *of == name);
    named.unwrap_or_else(|| panic!("there is no {name}")).1
}

impl Rule {
    /// Breaks the rule in valid arguments.
    pub fn change(&self, args: &mut Arguments<Tensor<'_>>) {
        match self.broken {
            Broken::Tensor(name, tensor) => *tensor_of(args, name) = tensor,
            Broken::Otherwise(change) => change(args),
        }
    }

    /// Panics unless `message` is the expected message of the rule.
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

/// A tensor for arguments that are never launched.
fn tensor(dtype: DType, dims: &[usize]) -> Tensor<'static> {
    at(0x1_0000, dtype, dims)
}

fn at(address: u64, dtype: DType, dims: &[usize]) -> Tensor<'static> {
    // SAFETY: arguments with this tensor are refused.
    unsafe { Tensor::from_raw(address, dtype, dims) }.unwrap()
}

fn strided(dtype: DType, dims: &[usize], strides: &[usize]) -> Tensor<'static> {
    tensor(dtype, dims).with_strides(strides).unwrap()
}

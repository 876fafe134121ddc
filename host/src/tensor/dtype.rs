//! Element types.

use std::fmt;

use bytemuck::NoUninit;

/// Element type of a tensor.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, NoUninit)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit brain float (bfloat16).
    Bf16,
    /// 16-bit IEEE float.
    F16,
    /// 32-bit signed integer.
    I32,
    /// 64-bit signed integer.
    I64,
    /// 32-bit unsigned integer.
    U32,
}

impl DType {
    /// Bytes of an element.
    #[must_use]
    pub const fn size_of(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U32 => "u32",
        })
    }
}

/// A Rust type that is an element of a tensor.
///
/// # Safety
/// The type's size, alignment and bits are those of [`DeviceElement::DTYPE`].
pub unsafe trait DeviceElement: Copy + Send + Sync + 'static {
    /// The dtype of this Rust type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {
        $(
            // SAFETY: the type is the dtype, bit for bit.
            unsafe impl DeviceElement for $type {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}
elements! { f32 => F32, half::bf16 => Bf16, half::f16 => F16, i32 => I32, i64 => I64, u32 => U32 }

//! Load-time constants: numbers that are fixed for a layer, written into the PTX text when the text is loaded.
//!
//! `constants!` defines one `u32` struct of load-time constants. The kernel reads the struct with `get()`. The host substitutes
//! [`Constants::SYMBOLS`] by [`Constants::words`], and keys its module cache on the same value.

pub use crate::device::shapes::Element;

/// A struct of load-time constants.
pub trait Constants: Copy + Eq + core::hash::Hash + core::fmt::Debug {
    /// The symbols that stand for the fields in the PTX text, in field order.
    const SYMBOLS: &'static [&'static str];

    /// The values, in the order of [`Constants::SYMBOLS`].
    fn words(&self) -> &[u32];
}

macro_rules! constants {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$field_meta:meta])* $field:ident = $symbol:literal,)*
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: u32,)*
        }

        impl $crate::constants::Constants for $name {
            const SYMBOLS: &'static [&'static str] = &[$($symbol),*];

            fn words(&self) -> &[u32] {
                bytemuck::cast_slice(core::slice::from_ref(self))
            }
        }

        impl $name {
            /// The values of the running launch.
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            pub(crate) fn get() -> Self {
                Self { $($field: $crate::device::load_time_constant!($symbol),)* }
            }

            /// The values of the running launch.
            #[cfg(not(target_arch = "nvptx64"))]
            pub(crate) fn get() -> Self {
                $crate::device::load_time_constants(|words| bytemuck::cast_slice::<u32, Self>(words)[0])
            }
        }
    };
}
pub(crate) use constants;

/// How slot indices are given, as a load-time constant.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Index {
    /// No indices: row b reads slot b, and writes the slot that it reads.
    None = 0,
    /// 32-bit signed.
    I32 = 1,
    /// 64-bit signed.
    I64 = 2,
    /// 32-bit unsigned.
    U32 = 3,
}

//! Every compiled variant, one line each: `symbol = operator::Body<parameters>`.
//!
//! A symbol is made of: kernel; layout and state dtype, unless they are load-time constants (both in a prefill, the layout of f32
//! states in a parallel step); dims (`k128` if V = K, otherwise `k96v192`); tile; warps of a block if two entries share a tile;
//! `alone` for an entry without clusters if another one has clusters; `mma` for products by warps if another entry multiplies by
//! warpgroups. A line defines the PTX entry, the [`Entry`] variant that the host selects, and the simulator's call.

use crate::constants::Constants;
use crate::kernels;
use crate::launch::{Computes, Description, Kernel, Shared};
use crate::prefill::chain::machine::{Hopper, Portable};
use crate::recurrent::{Either, PerChannel, PerHead};
use crate::state::{B16, F32};

/// Calls `$callback!` with the table of variants.
#[macro_export]
macro_rules! for_each_entry {
    ($callback:ident) => {
        $callback! {
            recurrent_klast_bf16_k64_tile16 = recurrent::KLast<Either, B16, 64, 64, 1, 128>;
            recurrent_klast_bf16_k64_tile32 = recurrent::KLast<Either, B16, 64, 64, 4, 64>;
            recurrent_klast_bf16_k128_tile16 = recurrent::KLast<Either, B16, 128, 128, 2, 128>;
            recurrent_klast_bf16_k128_tile16_warps2 = recurrent::KLast<Either, B16, 128, 128, 4, 64>;
            recurrent_klast_f32_k64_tile16 = recurrent::KLast<Either, F32, 64, 64, 1, 128>;
            recurrent_klast_f32_k64_tile32 = recurrent::KLast<Either, F32, 64, 64, 2, 128>;
            recurrent_klast_f32_k128_tile16 = recurrent::KLast<Either, F32, 128, 128, 2, 128>;
            recurrent_klast_f32_k128_tile16_warps2 = recurrent::KLast<Either, F32, 128, 128, 4, 64>;
            gdn_mtp_parallel_klast_bf16_k64_tile32 = gdn_mtp::Parallel<PerHead, B16, 64, 64, 2, 1>;
            gdn_mtp_parallel_klast_bf16_k64_tile64 = gdn_mtp::Parallel<PerHead, B16, 64, 64, 4, 1>;
            gdn_mtp_parallel_klast_bf16_k64_tile64_warps2 = gdn_mtp::Parallel<PerHead, B16, 64, 64, 2, 2>;
            gdn_mtp_parallel_klast_bf16_k128_tile32 = gdn_mtp::Parallel<PerHead, B16, 128, 128, 2, 1>;
            gdn_mtp_parallel_klast_bf16_k128_tile64 = gdn_mtp::Parallel<PerHead, B16, 128, 128, 4, 1>;
            gdn_mtp_parallel_klast_bf16_k128_tile64_warps2 = gdn_mtp::Parallel<PerHead, B16, 128, 128, 2, 2>;
            gdn_mtp_parallel_klast_bf16_k128_tile128 = gdn_mtp::Parallel<PerHead, B16, 128, 128, 4, 2>;
            gdn_mtp_parallel_f32_k64_tile64 = gdn_mtp::Parallel<PerHead, F32, 64, 64, 4, 1>;
            gdn_mtp_parallel_f32_k128_tile32 = gdn_mtp::Parallel<PerHead, F32, 128, 128, 2, 1>;
            gdn_mtp_parallel_f32_k128_tile64 = gdn_mtp::Parallel<PerHead, F32, 128, 128, 4, 1>;
            gdn_mtp_parallel_f32_k128_tile128 = gdn_mtp::Parallel<PerHead, F32, 128, 128, 8, 1>;
            recurrent_klast_f32_k128_tile8 = recurrent::KLast<Either, F32, 128, 128, 1, 128>;
            kda_recurrent_parallel_klast_bf16_k128_tile64 = kda_recurrent::Parallel<PerChannel, B16, 128, 128, 4, 1>;
            kda_recurrent_parallel_klast_bf16_k128_tile128 = kda_recurrent::Parallel<PerChannel, B16, 128, 128, 4, 2>;
            kda_recurrent_parallel_f32_k128_tile64 = kda_recurrent::Parallel<PerChannel, F32, 128, 128, 4, 1>;
            recurrent_vlast_bf16_k64_tile32 = recurrent::VLast<Either, B16, 64, 64, 4, 4>;
            recurrent_vlast_bf16_k64_tile64 = recurrent::VLast<Either, B16, 64, 64, 8, 4>;
            recurrent_vlast_bf16_k128_tile32 = recurrent::VLast<Either, B16, 128, 128, 4, 4>;
            recurrent_vlast_bf16_k128_tile64 = recurrent::VLast<Either, B16, 128, 128, 8, 4>;
            recurrent_vlast_bf16_k128_tile64_warps4 = recurrent::VLast<Either, B16, 128, 128, 8, 8>;
            recurrent_vlast_bf16_k128_tile128 = recurrent::VLast<Either, B16, 128, 128, 16, 8>;
            recurrent_vlast_f32_k64_tile32 = recurrent::VLast<Either, F32, 64, 64, 4, 4>;
            recurrent_vlast_f32_k64_tile64 = recurrent::VLast<Either, F32, 64, 64, 8, 2>;
            recurrent_vlast_f32_k128_tile32 = recurrent::VLast<Either, F32, 128, 128, 4, 4>;
            recurrent_vlast_f32_k128_tile64 = recurrent::VLast<Either, F32, 128, 128, 8, 4>;
            deferred_klast_bf16_k64_tile64 = deferred::KLast<Either, B16, 64, 64, 4, 8, 128>;
            deferred_klast_bf16_k128_tile32 = deferred::KLast<Either, B16, 128, 128, 8, 16, 64>;
            deferred_klast_bf16_k128_tile64 = deferred::KLast<Either, B16, 128, 128, 8, 16, 128>;
            deferred_klast_f32_k64_tile64 = deferred::KLast<Either, F32, 64, 64, 4, 8, 128>;
            deferred_klast_f32_k128_tile32 = deferred::KLast<Either, F32, 128, 128, 4, 8, 128>;
            deferred_layer_klast_bf16_k64_tile64 = deferred::WholeKLast<Either, B16, 64, 64, 4, 8, 64, 3>;
            deferred_layer_klast_bf16_k128_tile128 = deferred::WholeKLast<Either, B16, 128, 128, 4, 8, 128, 3>;
            deferred_layer_klast_f32_k64_tile64 = deferred::WholeKLast<Either, F32, 64, 64, 4, 8, 64, 3>;
            deferred_layer_klast_f32_k128_tile128 = deferred::WholeKLast<Either, F32, 128, 128, 4, 8, 128, 3>;
            gdn_deferred_parallel_klast_bf16_k64_tile32 = deferred::Parallel<PerHead, 64, 64, 2, 1>;
            gdn_deferred_parallel_klast_bf16_k64_tile64 = deferred::Parallel<PerHead, 64, 64, 4, 1>;
            gdn_deferred_parallel_klast_bf16_k128_tile64 = deferred::Parallel<PerHead, 128, 128, 4, 1>;
            gdn_deferred_parallel_klast_bf16_k128_tile128 = deferred::Parallel<PerHead, 128, 128, 4, 2>;
            kda_deferred_parallel_klast_bf16_k128_tile64 = deferred::Parallel<PerChannel, 128, 128, 4, 1>;
            kda_deferred_parallel_klast_bf16_k128_tile128 = deferred::Parallel<PerChannel, 128, 128, 4, 2>;
            gdn_deferred_layer_parallel_klast_bf16_k64_tile64 = deferred::LayerParallel<PerHead, 64, 64, 4, 1>;
            gdn_deferred_layer_parallel_klast_bf16_k128_tile64 = deferred::LayerParallel<PerHead, 128, 128, 4, 1>;
            gdn_deferred_layer_parallel_klast_bf16_k128_tile128 = deferred::LayerParallel<PerHead, 128, 128, 4, 2>;
            kda_deferred_layer_parallel_klast_bf16_k128_tile64 = deferred::LayerParallel<PerChannel, 128, 128, 4, 1>;
            layer_klast_bf16_k64_tile16 = layer::KLast<Either, B16, 64, 64, 2, 64>;
            layer_klast_bf16_k64_tile64 = layer::WholeKLast<Either, B16, 64, 64, 2, 256, 2>;
            layer_klast_bf16_k128_tile16 = layer::KLast<Either, B16, 128, 128, 4, 64>;
            layer_klast_bf16_k128_tile128 = layer::WholeKLast<Either, B16, 128, 128, 4, 256, 3>;
            layer_klast_f32_k64_tile16 = layer::KLast<Either, F32, 64, 64, 2, 64>;
            layer_klast_f32_k64_tile64 = layer::WholeKLast<Either, F32, 64, 64, 2, 256, 2>;
            layer_klast_f32_k128_tile16 = layer::KLast<Either, F32, 128, 128, 4, 64>;
            layer_klast_f32_k128_tile128 = layer::WholeKLast<Either, F32, 128, 128, 2, 256, 3>;
            layer_klast_f32_k128_tile128_warps16 = layer::WholeKLast<Either, F32, 128, 128, 2, 512, 2>;
            layer_vlast_bf16_k64_tile32 = layer::VLast<Either, B16, 64, 64, 4, 2, 1>;
            layer_vlast_bf16_k64_tile64 = layer::WholeVLast<Either, B16, 64, 64, 8, 2, 256>;
            layer_vlast_bf16_k128_tile32 = layer::VLast<Either, B16, 128, 128, 4, 4, 1>;
            layer_vlast_bf16_k128_tile128 = layer::WholeVLast<Either, B16, 128, 128, 16, 4, 256>;
            layer_vlast_f32_k64_tile32 = layer::VLast<Either, F32, 64, 64, 4, 2, 1>;
            layer_vlast_f32_k64_tile64 = layer::WholeVLast<Either, F32, 64, 64, 8, 2, 256>;
            layer_vlast_f32_k128_tile32 = layer::VLast<Either, F32, 128, 128, 4, 4, 1>;
            layer_vlast_f32_k128_tile128 = layer::WholeVLast<Either, F32, 128, 128, 16, 4, 256>;
            layer_mtp_klast_bf16_k64_tile16 = layer_mtp::KLast<Either, B16, 64, 64, 16, 2, 128, 1>;
            layer_mtp_klast_bf16_k64_tile64 = layer_mtp::KLast<Either, B16, 64, 64, 64, 2, 256, 1>;
            layer_mtp_klast_bf16_k128_tile32 = layer_mtp::KLast<Either, B16, 128, 128, 32, 4, 256, 1>;
            layer_mtp_klast_bf16_k128_tile64 = layer_mtp::KLast<Either, B16, 128, 128, 64, 4, 256, 1>;
            layer_mtp_klast_bf16_k128_tile128 = layer_mtp::KLast<Either, B16, 128, 128, 128, 4, 256, 2>;
            layer_mtp_klast_f32_k64_tile16 = layer_mtp::KLast<Either, F32, 64, 64, 16, 2, 128, 1>;
            layer_mtp_klast_f32_k64_tile64 = layer_mtp::KLast<Either, F32, 64, 64, 64, 2, 256, 1>;
            layer_mtp_klast_f32_k128_tile32 = layer_mtp::KLast<Either, F32, 128, 128, 32, 2, 256, 1>;
            layer_mtp_klast_f32_k128_tile64 = layer_mtp::KLast<Either, F32, 128, 128, 64, 2, 256, 1>;
            layer_mtp_klast_f32_k128_tile128 = layer_mtp::KLast<Either, F32, 128, 128, 128, 2, 256, 2>;
            layer_mtp_vlast_bf16_k64_tile32 = layer_mtp::VLast<Either, B16, 64, 64, 32, 4, 4, 128, 1>;
            layer_mtp_vlast_bf16_k64_tile64 = layer_mtp::VLast<Either, B16, 64, 64, 64, 8, 4, 256, 1>;
            layer_mtp_vlast_bf16_k128_tile32 = layer_mtp::VLast<Either, B16, 128, 128, 32, 4, 4, 256, 1>;
            layer_mtp_vlast_bf16_k128_tile64 = layer_mtp::VLast<Either, B16, 128, 128, 64, 8, 4, 256, 1>;
            layer_mtp_vlast_bf16_k128_tile128 = layer_mtp::VLast<Either, B16, 128, 128, 128, 8, 4, 256, 1>;
            layer_mtp_vlast_f32_k64_tile32 = layer_mtp::VLast<Either, F32, 64, 64, 32, 4, 4, 128, 1>;
            layer_mtp_vlast_f32_k64_tile64 = layer_mtp::VLast<Either, F32, 64, 64, 64, 8, 4, 128, 1>;
            layer_mtp_vlast_f32_k128_tile32 = layer_mtp::VLast<Either, F32, 128, 128, 32, 4, 4, 256, 1>;
            layer_mtp_vlast_f32_k128_tile64 = layer_mtp::VLast<Either, F32, 128, 128, 64, 4, 4, 128, 1>;
            layer_mtp_vlast_f32_k128_tile128 = layer_mtp::VLast<Either, F32, 128, 128, 128, 4, 4, 128, 1>;
            gdn_layer_parallel_klast_bf16_k64_tile64 = layer_mtp::Parallel<PerHead, B16, 64, 64, 4, 1, true>;
            gdn_layer_parallel_klast_bf16_k64_tile64_alone = layer_mtp::Parallel<PerHead, B16, 64, 64, 4, 1, false>;
            gdn_layer_parallel_klast_bf16_k128_tile64 = layer_mtp::Parallel<PerHead, B16, 128, 128, 4, 1, true>;
            gdn_layer_parallel_klast_bf16_k128_tile128 = layer_mtp::Parallel<PerHead, B16, 128, 128, 4, 2, true>;
            gdn_layer_parallel_klast_bf16_k128_tile128_alone = layer_mtp::Parallel<PerHead, B16, 128, 128, 4, 2, false>;
            gdn_layer_parallel_klast_bf16_k128_tile128_warps8 = layer_mtp::Parallel<PerHead, B16, 128, 128, 8, 1, true>;
            gdn_layer_parallel_klast_bf16_k128_tile128_warps8_alone = layer_mtp::Parallel<PerHead, B16, 128, 128, 8, 1, false>;
            gdn_layer_parallel_f32_k64_tile64 = layer_mtp::Parallel<PerHead, F32, 64, 64, 4, 1, true>;
            gdn_layer_parallel_f32_k128_tile64 = layer_mtp::Parallel<PerHead, F32, 128, 128, 4, 1, true>;
            gdn_layer_parallel_f32_k128_tile128 = layer_mtp::Parallel<PerHead, F32, 128, 128, 8, 1, true>;
            gdn_layer_parallel_f32_k128_tile128_alone = layer_mtp::Parallel<PerHead, F32, 128, 128, 8, 1, false>;
            kda_layer_parallel_f32_k128_tile64 = layer_mtp::Parallel<PerChannel, F32, 128, 128, 4, 1, true>;
            kda_layer_parallel_klast_bf16_k128_tile64 = layer_mtp::Parallel<PerChannel, B16, 128, 128, 4, 1, true>;
            kda_layer_parallel_klast_bf16_k128_tile128_alone = layer_mtp::Parallel<PerChannel, B16, 128, 128, 4, 2, false>;
            kda_layer_parallel_klast_bf16_k128_tile128_warps8_alone = layer_mtp::Parallel<PerChannel, B16, 128, 128, 8, 1, false>;
            recurrent_klast_bf16_k96v192_tile32 = recurrent::KLast<PerHead, B16, 96, 192, 2, 64, 3>;
            recurrent_klast_f32_k96v192_tile16 = recurrent::KLast<PerHead, F32, 96, 192, 1, 64, 3>;
            recurrent_vlast_bf16_k96v192_tile32 = recurrent::VLast<PerHead, B16, 96, 192, 4, 4>;
            recurrent_vlast_bf16_k96v192_tile64 = recurrent::VLast<PerHead, B16, 96, 192, 8, 8>;
            recurrent_vlast_f32_k96v192_tile32 = recurrent::VLast<PerHead, F32, 96, 192, 4, 4>;
            layer_klast_bf16_k96v192_tile32 = layer::KLast<PerHead, B16, 96, 192, 2, 64, 3>;
            layer_klast_bf16_k96v192_tile192 = layer::WholeKLast<PerHead, B16, 96, 192, 1, 256, 3, 3>;
            layer_klast_f32_k96v192_tile32 = layer::KLast<PerHead, F32, 96, 192, 1, 128, 3>;
            layer_klast_f32_k96v192_tile192 = layer::WholeKLast<PerHead, F32, 96, 192, 1, 192, 3, 3>;
            layer_vlast_bf16_k96v192_tile32 = layer::VLast<PerHead, B16, 96, 192, 4, 4, 1>;
            layer_vlast_bf16_k96v192_tile192 = layer::WholeVLast<PerHead, B16, 96, 192, 8, 4, 192>;
            layer_vlast_f32_k96v192_tile32 = layer::VLast<PerHead, F32, 96, 192, 4, 4, 1>;
            layer_vlast_f32_k96v192_tile192 = layer::WholeVLast<PerHead, F32, 96, 192, 8, 4, 192>;
            layer_mtp_klast_bf16_k96v192_tile32 = layer_mtp::KLast<PerHead, B16, 96, 192, 32, 1, 128, 1, 3>;
            layer_mtp_klast_bf16_k96v192_tile192 = layer_mtp::KLast<PerHead, B16, 96, 192, 192, 1, 256, 2, 3>;
            layer_mtp_klast_f32_k96v192_tile192 = layer_mtp::KLast<PerHead, F32, 96, 192, 192, 1, 256, 2, 3>;
            layer_mtp_vlast_bf16_k96v192_tile192 = layer_mtp::VLast<PerHead, B16, 96, 192, 192, 8, 4, 192, 1>;
            layer_mtp_vlast_f32_k96v192_tile192 = layer_mtp::VLast<PerHead, F32, 96, 192, 192, 4, 4, 192, 1>;
            prefill_convolve_k64 = prefill::Convolve<64, 64>;
            prefill_convolve_k128 = prefill::Convolve<128, 128>;
            prefill_convolve_k96v192 = prefill::Convolve<96, 192>;
            gdn_prefill_prepare_k64 = gdn_prefill::Prepare<64, 64>;
            gdn_prefill_prepare_k128 = gdn_prefill::Prepare<128, 128>;
            gdn_prefill_prepare_k96v192 = gdn_prefill::Prepare<96, 192>;
            gdn_prefill_chain_k64_tile64 = gdn_prefill::Chain<PerHead, Hopper, 64, 64, 1>;
            gdn_prefill_chain_k128_tile64 = gdn_prefill::Chain<PerHead, Hopper, 128, 128, 1>;
            gdn_prefill_chain_k128_tile128 = gdn_prefill::Chain<PerHead, Hopper, 128, 128, 2>;
            gdn_prefill_chain_k96v192_tile64 = gdn_prefill::Chain<PerHead, Hopper, 96, 192, 1>;
            gdn_prefill_chain_k64_tile64_mma = gdn_prefill::Chain<PerHead, Portable, 64, 64, 1>;
            gdn_prefill_chain_k128_tile64_mma = gdn_prefill::Chain<PerHead, Portable, 128, 128, 1>;
            gdn_prefill_chain_k96v192_tile64_mma = gdn_prefill::Chain<PerHead, Portable, 96, 192, 1>;
            gdn_prefill_short_k64_tile64 = gdn_prefill::Short<PerHead, 64, 64, 1>;
            gdn_prefill_short_k128_tile64 = gdn_prefill::Short<PerHead, 128, 128, 1>;
            gdn_prefill_short_k128_tile128 = gdn_prefill::Short<PerHead, 128, 128, 2>;
            gdn_prefill_short_k96v192_tile64 = gdn_prefill::Short<PerHead, 96, 192, 1>;
            prefill_single_k64 = prefill::Single<64, 64, 1>;
            prefill_single_k128 = prefill::Single<128, 128, 2>;
            prefill_single_k96v192 = prefill::Single<96, 192, 3>;
            kda_prefill_prepare_k128 = kda_prefill::Prepare<128, 128>;
            kda_prefill_chain_k128_tile64 = kda_prefill::Chain<PerChannel, Hopper, 128, 128, 1>;
            kda_prefill_chain_k128_tile128 = kda_prefill::Chain<PerChannel, Hopper, 128, 128, 2>;
            kda_prefill_chain_k128_tile64_mma = kda_prefill::Chain<PerChannel, Portable, 128, 128, 1>;
            kda_prefill_short_k128_tile128 = kda_prefill::Short<PerChannel, 128, 128, 2>;
            prefill_carry_k128 = prefill::Carry<128>;
            prefill_finish_k64 = prefill::Finish<64, 64>;
            prefill_finish_k128 = prefill::Finish<128, 128>;
            prefill_finish_k96v192 = prefill::Finish<96, 192>;
            device_contract = device_contract::EveryPrimitive<64>;
            cluster_contract = device_contract::Cluster<64>;
            warpgroup_contract = device_contract::Warpgroup<128>;
            state_floor = state_floor::InPlace<2>;
        }
    };
}

macro_rules! define_entries {
    ($($symbol:ident = $operator:ident::$body:ident<$($parameter:tt),*>;)*) => {
        #[cfg(target_arch = "nvptx64")]
        mod symbols {
            use super::*;
            $(
                /// # Safety
                /// The host launches it with the parameters and shape of its operator.
                #[unsafe(no_mangle)]
                pub unsafe extern "ptx-kernel" fn $symbol(params: <kernels::$operator::$body<$($parameter),*> as Kernel>::Params) {
                    // SAFETY: the host's promise.
                    unsafe { kernels::$operator::$body::<$($parameter),*>::run(&params) }
                }
            )*
        }

        /// A compiled variant, named like its PTX symbol.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Entry {
            $(
                #[doc = concat!("`", stringify!($operator::$body<$($parameter),*>), "`")]
                $symbol,
            )*
        }

        /// The bodies, each in a separate module, because one thread compiles a whole module.
        #[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
        mod simulated {
            $(
                pub mod $symbol {
                    #[allow(unused_imports)]
                    use super::super::*;

                    /// Never inlined, so that a fiber's stack holds the frame of one body.
                    ///
                    /// # Safety
                    /// As for [`Entry::simulate`].
                    #[inline(never)]
                    pub unsafe fn run(params: &[u8]) {
                        // SAFETY: the caller's promise.
                        unsafe { simulate::<kernels::$operator::$body<$($parameter),*>>(params) }
                    }
                }
            )*
        }

        impl Entry {
            /// All entries, in the order of the table.
            pub const ALL: &[Entry] = &[$(Entry::$symbol),*];

            /// Runs the body as the current simulated thread.
            ///
            /// # Safety
            /// `params` begin with the bytes of the operator's parameters, and the simulation's regions cover all
            /// tensors to which they point.
            #[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
            pub unsafe fn simulate(self, params: &[u8]) {
                match self {
                    // SAFETY: the caller's promise.
                    $(Entry::$symbol => unsafe { simulated::$symbol::run(params) },)*
                }
            }
        }

        /// The facts about each entry, in the order of the table.
        const FACTS: &[Facts] = &[
            $(Facts::of::<kernels::$operator::$body<$($parameter),*>>(stringify!($symbol), stringify!($operator)),)*
        ];
    };
}

for_each_entry!(define_entries);

/// Facts about an entry and its kernel.
struct Facts {
    name: &'static str,
    operator: &'static str,
    description: Description,
    parameter_bytes: usize,
    symbols: &'static [&'static str],
}

impl Facts {
    const fn of<Body: Kernel>(name: &'static str, operator: &'static str) -> Self {
        Self {
            name,
            operator,
            description: Body::DESCRIPTION,
            parameter_bytes: size_of::<Body::Params>(),
            symbols: Body::Constants::SYMBOLS,
        }
    }
}

impl Entry {
    const fn facts(self) -> &'static Facts {
        &FACTS[self as usize]
    }

    /// The shape of the launch, and the operator that the entry computes.
    pub const fn description(self) -> &'static Description {
        &self.facts().description
    }

    /// The PTX symbol.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// Name of the entry's operator: the stem of its kernel's file.
    pub const fn operator(self) -> &'static str {
        self.facts().operator
    }

    /// Bytes of the entry's parameters.
    pub const fn parameter_bytes(self) -> usize {
        self.facts().parameter_bytes
    }

    /// Symbols of the load-time constants of the entry's operator.
    pub const fn symbols(self) -> &'static [&'static str] {
        self.facts().symbols
    }

    /// Dynamic shared memory of a block, without [`Self::shared_state_elements`]; `per_channel`: each key channel has its own
    /// decay, otherwise each value head.
    pub const fn shared(self, per_channel: bool) -> Shared {
        let it = self.description();
        if per_channel {
            it.shared.and(it.shared_of_channels)
        } else {
            it.shared
        }
    }

    /// Minimum number of blocks per multiprocessor, which bounds registers, if
    /// [`StepConstants::blocks_per_sm`](crate::step::StepConstants) is `most`. For blocks of more than 5 warps, half of `most`
    /// counts.
    pub const fn blocks_per_sm(self, most: u32) -> u32 {
        let own = self.description().min_blocks_per_sm;
        let most = match (self.description().block > 160, most) {
            (true, 2..) => most / 2,
            _ => most,
        };
        if own < most { own } else { most }
    }

    /// Threads of a block for a layer of `ratio` value heads per query/key head.
    pub const fn block_of(self, ratio: u32) -> u32 {
        let it = self.description();
        if it.block_per_head {
            it.block * ratio
        } else {
            it.block
        }
    }

    /// Blocks of a cluster for a layer of `ratio` value heads per query/key head; 1: no cluster.
    pub const fn cluster_of(self, ratio: u32) -> u32 {
        let it = self.description();
        if it.cluster_of_heads {
            it.cluster * ratio
        } else {
            it.cluster
        }
    }

    /// Whether the entry needs a GPU with clusters, of compute capability 9.0.
    pub const fn takes_clusters(self) -> bool {
        self.cluster() > 1 || self.has_cluster_of_heads()
    }

    /// Largest number of value heads per query/key head.
    pub const fn max_ratio(self) -> u32 {
        let it = self.description();
        if it.max_heads > 1 {
            it.max_heads
        } else {
            it.max_ratio
        }
    }

    /// Bytes of a prefill's workspace for a chunk and a query/key head with `ratio` value heads, a multiple of 128; with v in f16
    /// if `makes_values`, with o in f16 for a norm if `leaves_o`. [`crate::prefill::units`] bounds the number of chunks.
    pub const fn workspace_bytes_per_unit(
        self,
        ratio: u32,
        makes_values: bool,
        leaves_o: bool,
    ) -> u32 {
        let it = &self.description().workspace;
        let of_values = it.of_values * makes_values as u32;
        let of_norm = it.of_norm * leaves_o as u32;
        it.per_key_head + (it.per_head + of_values + of_norm) * ratio
    }
}

/// Defines methods of an entry for fields of its description.
macro_rules! fields {
    ($($name:ident: $type:ty = $($field:ident).+;)*) => {
        impl Entry {
            $(
                #[doc = concat!("`", stringify!($($field).+), "` of its [`Description`].")]
                pub const fn $name(self) -> $type {
                    self.description().$($field).+
                }
            )*
        }
    };
}

fields! {
    computes: Option<Computes> = computes;
    block: u32 = block;
    min_blocks_per_sm: u32 = min_blocks_per_sm;
    min_blocks_by_constant: bool = min_blocks_by_constant;
    one_block_before_hopper: bool = one_block_before_hopper;
    tiles: u32 = tiles;
    makes_pairs: bool = makes_pairs;
    max_heads: u32 = max_heads;
    cluster: u32 = cluster;
    has_cluster_of_heads: bool = cluster_of_heads;
    takes_warpgroups: bool = warpgroups;
    overlaps: bool = overlaps;
    is_proved: bool = proved;
    shared_bytes: u32 = shared.block;
    shared_bytes_per_token: u32 = shared.per_token;
    shared_bytes_of_lows: u32 = shared_of_lows;
    shared_bytes_of_sets: u32 = shared_of_sets;
    shared_state_elements: u32 = shared_state_elements;
}

/// Runs a body as the current simulated thread.
#[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn simulate<Body: Kernel>(params: &[u8]) {
    let params = bytemuck::pod_read_unaligned(&params[..size_of::<Body::Params>()]);
    // SAFETY: the caller's promise.
    unsafe { Body::run(&params) }
}

#[cfg(test)]
mod tests {
    use super::Entry;
    use crate::constants::Element;
    use crate::launch::{Computes, Family, Form, Layout, Stage};

    /// The symbol that the table should give an entry, without the warps of its block.
    fn symbol(entry: Entry, computes: Computes) -> String {
        let Computes {
            family,
            layout,
            element,
            k,
            v,
            ..
        } = computes;
        let deferred = if family.deferred { "deferred_" } else { "" };
        let layer = if family.layer { "layer_" } else { "" };
        let form = match family.form {
            Form::Decode => "",
            Form::Recurrent if family.layer => "mtp",
            Form::Recurrent => "recurrent",
            Form::Parallel => "parallel",
            Form::Chunked(Stage::Convolve) => "prefill_convolve",
            Form::Chunked(Stage::Prepare) => "prefill_prepare",
            Form::Chunked(Stage::Chain) => "prefill_chain",
            Form::Chunked(Stage::Carry) => "prefill_carry",
            Form::Chunked(Stage::Short) => "prefill_short",
            Form::Chunked(Stage::Single) => "prefill_single",
            Form::Chunked(Stage::Finish) => "prefill_finish",
        };
        // Two of the operators that compute all tokens together keep the name of the operator's file.
        let operator = match (computes.per_channel, family) {
            _ if entry.name().starts_with("recurrent") || entry.name().starts_with("layer") => "",
            (Some(false), Family::PARALLEL) => "gdn_mtp_",
            (Some(true), Family::PARALLEL) => "kda_recurrent_",
            (Some(false), _) => "gdn_",
            (Some(true), _) => "kda_",
            (None, _) => "",
        };
        let name = format!("{operator}{deferred}{layer}{form}");
        let name = name.trim_end_matches('_');
        let layout = layout.map_or("", |layout| match layout {
            Layout::KLast => "klast_",
            Layout::VLast => "vlast_",
        });
        let element = element.map_or("", |element| match element {
            Element::F32 => "f32_",
            Element::Bf16 => "bf16_",
            Element::F16 => "f16_",
        });
        let states = format!("{layout}{element}");
        let dims = if k == v {
            format!("k{k}")
        } else {
            format!("k{k}v{v}")
        };
        let of_states = format!("{name}_{states}{dims}");
        // These kernels have whole heads, for all dims.
        match family.takes_singles() || !family.knows_states() {
            true => of_states,
            false => format!("{of_states}_tile{}", v / entry.tiles()),
        }
    }

    #[test]
    fn symbols_say_what_entries_compute() {
        for &entry in Entry::ALL {
            let Some(computes) = entry.computes() else {
                assert!(matches!(
                    entry,
                    Entry::device_contract
                        | Entry::cluster_contract
                        | Entry::warpgroup_contract
                        | Entry::state_floor
                ));
                continue;
            };
            assert!(computes.v.is_multiple_of(entry.tiles()), "{entry:?}");
            let symbol = symbol(entry, computes);
            let warps = entry.block() / 32 - u32::from(computes.family.is_parallel());
            let name = match (entry.takes_clusters(), entry.takes_warpgroups()) {
                (false, false) => entry
                    .name()
                    .trim_end_matches("_alone")
                    .trim_end_matches("_mma"),
                _ => entry.name(),
            };
            let rest = name.strip_prefix(&symbol);
            assert!(
                rest.is_some_and(|rest| rest.is_empty() || rest == format!("_warps{warps}")),
                "{entry:?} is {symbol}, of {warps} warps"
            );
        }
    }
}

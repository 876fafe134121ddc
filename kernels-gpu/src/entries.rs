//! Every compiled variant, one line each: `symbol = operator::Body<parameters>`.
//!
//! Symbols read kernel, layout and state dtype (not of a prefill, where both are load-time constants), dims (`k128` where
//! V = K, `k96v192` where they differ), tile, warps of a block where two entries share a tile, `alone` where these are in
//! clusters and it is not, and `mma` where these multiply by warpgroups and it does by warps. A line makes the PTX entry, the [`Entry`] variant that the host selects, and the simulator's call.

use crate::kernels;
use crate::launch::{Computes, Kernel, Shared};
use crate::state::{B16, F32};

/// Calls `$callback!` with the table of variants.
#[macro_export]
macro_rules! for_each_entry {
    ($callback:ident) => {
        $callback! {
            gdn_decode_klast_bf16_k64_tile16 = gdn_decode::KLast<B16, 64, 64, 1, 128>;
            gdn_decode_klast_bf16_k64_tile32 = gdn_decode::KLast<B16, 64, 64, 4, 64>;
            gdn_decode_klast_bf16_k128_tile16 = gdn_decode::KLast<B16, 128, 128, 2, 128>;
            gdn_decode_klast_bf16_k128_tile16_warps2 = gdn_decode::KLast<B16, 128, 128, 4, 64>;
            gdn_decode_klast_f32_k64_tile8 = gdn_decode::KLast<F32, 64, 64, 2, 32>;
            gdn_decode_klast_f32_k64_tile16 = gdn_decode::KLast<F32, 64, 64, 1, 128>;
            gdn_decode_klast_f32_k128_tile4 = gdn_decode::KLast<F32, 128, 128, 2, 32>;
            gdn_decode_klast_f32_k128_tile8 = gdn_decode::KLast<F32, 128, 128, 1, 128>;
            gdn_decode_vlast_bf16_k64_tile32 = gdn_decode::VLast<B16, 64, 64, 4, 2>;
            gdn_decode_vlast_bf16_k64_tile64 = gdn_decode::VLast<B16, 64, 64, 8, 4>;
            gdn_decode_vlast_bf16_k128_tile32 = gdn_decode::VLast<B16, 128, 128, 4, 4>;
            gdn_decode_vlast_bf16_k128_tile64 = gdn_decode::VLast<B16, 128, 128, 8, 8>;
            gdn_decode_vlast_bf16_k128_tile128 = gdn_decode::VLast<B16, 128, 128, 16, 8>;
            gdn_decode_vlast_f32_k64_tile32 = gdn_decode::VLast<F32, 64, 64, 4, 2>;
            gdn_decode_vlast_f32_k64_tile64 = gdn_decode::VLast<F32, 64, 64, 8, 2>;
            gdn_decode_vlast_f32_k128_tile32 = gdn_decode::VLast<F32, 128, 128, 4, 2>;
            gdn_decode_vlast_f32_k128_tile64 = gdn_decode::VLast<F32, 128, 128, 8, 2>;
            recurrent_klast_bf16_k64_tile16 = recurrent::KLast<B16, 64, 64, 1, 128>;
            recurrent_klast_bf16_k64_tile32 = recurrent::KLast<B16, 64, 64, 4, 64>;
            recurrent_klast_bf16_k128_tile16 = recurrent::KLast<B16, 128, 128, 2, 128>;
            recurrent_klast_bf16_k128_tile16_warps2 = recurrent::KLast<B16, 128, 128, 4, 64>;
            recurrent_klast_f32_k64_tile16 = recurrent::KLast<F32, 64, 64, 1, 128>;
            recurrent_klast_f32_k64_tile32 = recurrent::KLast<F32, 64, 64, 2, 128>;
            recurrent_klast_f32_k128_tile16 = recurrent::KLast<F32, 128, 128, 2, 128>;
            recurrent_klast_f32_k128_tile16_warps2 = recurrent::KLast<F32, 128, 128, 4, 64>;
            gdn_mtp_parallel_klast_bf16_k64_tile32 = gdn_mtp::Parallel<64, 64, 2, 1>;
            gdn_mtp_parallel_klast_bf16_k64_tile64 = gdn_mtp::Parallel<64, 64, 4, 1>;
            gdn_mtp_parallel_klast_bf16_k64_tile64_warps2 = gdn_mtp::Parallel<64, 64, 2, 2>;
            gdn_mtp_parallel_klast_bf16_k128_tile32 = gdn_mtp::Parallel<128, 128, 2, 1>;
            gdn_mtp_parallel_klast_bf16_k128_tile64 = gdn_mtp::Parallel<128, 128, 4, 1>;
            gdn_mtp_parallel_klast_bf16_k128_tile64_warps2 = gdn_mtp::Parallel<128, 128, 2, 2>;
            gdn_mtp_parallel_klast_bf16_k128_tile128 = gdn_mtp::Parallel<128, 128, 4, 2>;
            recurrent_klast_f32_k128_tile8 = recurrent::KLast<F32, 128, 128, 1, 128>;
            kda_recurrent_parallel_klast_bf16_k128_tile64 = kda_recurrent::Parallel<128, 128, 4, 1>;
            kda_recurrent_parallel_klast_bf16_k128_tile128 = kda_recurrent::Parallel<128, 128, 4, 2>;
            recurrent_vlast_bf16_k64_tile32 = recurrent::VLast<B16, 64, 64, 4, 4>;
            recurrent_vlast_bf16_k128_tile32 = recurrent::VLast<B16, 128, 128, 4, 4>;
            recurrent_vlast_bf16_k128_tile64 = recurrent::VLast<B16, 128, 128, 8, 4>;
            recurrent_vlast_f32_k64_tile32 = recurrent::VLast<F32, 64, 64, 4, 4>;
            recurrent_vlast_f32_k128_tile32 = recurrent::VLast<F32, 128, 128, 4, 4>;
            recurrent_vlast_f32_k128_tile64 = recurrent::VLast<F32, 128, 128, 8, 4>;
            deferred_klast_bf16_k64_tile64 = deferred::KLast<B16, 64, 64, 4, 8, 128>;
            deferred_klast_bf16_k128_tile32 = deferred::KLast<B16, 128, 128, 8, 16, 64>;
            deferred_klast_bf16_k128_tile64 = deferred::KLast<B16, 128, 128, 8, 16, 128>;
            deferred_klast_f32_k64_tile64 = deferred::KLast<F32, 64, 64, 4, 8, 128>;
            deferred_klast_f32_k128_tile32 = deferred::KLast<F32, 128, 128, 4, 8, 128>;
            deferred_layer_klast_bf16_k64_tile64 = deferred::WholeKLast<B16, 64, 64, 4, 8, 64, 3>;
            deferred_layer_klast_bf16_k128_tile128 = deferred::WholeKLast<B16, 128, 128, 4, 8, 128, 3>;
            deferred_layer_klast_f32_k64_tile64 = deferred::WholeKLast<F32, 64, 64, 4, 8, 64, 3>;
            deferred_layer_klast_f32_k128_tile128 = deferred::WholeKLast<F32, 128, 128, 4, 8, 128, 3>;
            gdn_deferred_parallel_klast_bf16_k64_tile32 = deferred::GdnParallel<64, 64, 2, 1>;
            gdn_deferred_parallel_klast_bf16_k64_tile64 = deferred::GdnParallel<64, 64, 4, 1>;
            gdn_deferred_parallel_klast_bf16_k128_tile64 = deferred::GdnParallel<128, 128, 4, 1>;
            gdn_deferred_parallel_klast_bf16_k128_tile128 = deferred::GdnParallel<128, 128, 4, 2>;
            kda_deferred_parallel_klast_bf16_k128_tile64 = deferred::KdaParallel<128, 128, 4, 1>;
            kda_deferred_parallel_klast_bf16_k128_tile128 = deferred::KdaParallel<128, 128, 4, 2>;
            gdn_deferred_layer_parallel_klast_bf16_k64_tile64 = deferred::GdnLayerParallel<64, 64, 4, 1>;
            gdn_deferred_layer_parallel_klast_bf16_k128_tile64 = deferred::GdnLayerParallel<128, 128, 4, 1>;
            gdn_deferred_layer_parallel_klast_bf16_k128_tile128 = deferred::GdnLayerParallel<128, 128, 4, 2>;
            kda_deferred_layer_parallel_klast_bf16_k128_tile64 = deferred::KdaLayerParallel<128, 128, 4, 1>;
            layer_klast_bf16_k64_tile16 = layer::KLast<B16, 64, 64, 2, 64>;
            layer_klast_bf16_k64_tile64 = layer::WholeKLast<B16, 64, 64, 2, 256, 2>;
            layer_klast_bf16_k128_tile16 = layer::KLast<B16, 128, 128, 4, 64>;
            layer_klast_bf16_k128_tile128 = layer::WholeKLast<B16, 128, 128, 4, 256, 3>;
            layer_klast_f32_k64_tile16 = layer::KLast<F32, 64, 64, 2, 64>;
            layer_klast_f32_k64_tile64 = layer::WholeKLast<F32, 64, 64, 2, 256, 2>;
            layer_klast_f32_k128_tile16 = layer::KLast<F32, 128, 128, 4, 64>;
            layer_klast_f32_k128_tile128 = layer::WholeKLast<F32, 128, 128, 2, 256, 3>;
            layer_klast_f32_k128_tile128_warps16 = layer::WholeKLast<F32, 128, 128, 2, 512, 2>;
            layer_vlast_bf16_k64_tile32 = layer::VLast<B16, 64, 64, 4, 2, 1>;
            layer_vlast_bf16_k64_tile64 = layer::WholeVLast<B16, 64, 64, 8, 2, 256>;
            layer_vlast_bf16_k128_tile32 = layer::VLast<B16, 128, 128, 4, 4, 1>;
            layer_vlast_bf16_k128_tile128 = layer::WholeVLast<B16, 128, 128, 16, 4, 256>;
            layer_vlast_f32_k64_tile32 = layer::VLast<F32, 64, 64, 4, 2, 1>;
            layer_vlast_f32_k64_tile64 = layer::WholeVLast<F32, 64, 64, 8, 2, 256>;
            layer_vlast_f32_k128_tile32 = layer::VLast<F32, 128, 128, 4, 4, 1>;
            layer_vlast_f32_k128_tile128 = layer::WholeVLast<F32, 128, 128, 16, 4, 256>;
            layer_mtp_klast_bf16_k64_tile16 = layer_mtp::KLast<B16, 64, 64, 16, 2, 128, 1>;
            layer_mtp_klast_bf16_k64_tile64 = layer_mtp::KLast<B16, 64, 64, 64, 2, 256, 1>;
            layer_mtp_klast_bf16_k128_tile32 = layer_mtp::KLast<B16, 128, 128, 32, 4, 256, 1>;
            layer_mtp_klast_bf16_k128_tile64 = layer_mtp::KLast<B16, 128, 128, 64, 4, 256, 1>;
            layer_mtp_klast_bf16_k128_tile128 = layer_mtp::KLast<B16, 128, 128, 128, 4, 256, 2>;
            layer_mtp_klast_f32_k64_tile16 = layer_mtp::KLast<F32, 64, 64, 16, 2, 128, 1>;
            layer_mtp_klast_f32_k64_tile64 = layer_mtp::KLast<F32, 64, 64, 64, 2, 256, 1>;
            layer_mtp_klast_f32_k128_tile32 = layer_mtp::KLast<F32, 128, 128, 32, 2, 256, 1>;
            layer_mtp_klast_f32_k128_tile64 = layer_mtp::KLast<F32, 128, 128, 64, 2, 256, 1>;
            layer_mtp_klast_f32_k128_tile128 = layer_mtp::KLast<F32, 128, 128, 128, 2, 256, 2>;
            layer_mtp_vlast_bf16_k64_tile32 = layer_mtp::VLast<B16, 64, 64, 32, 4, 4, 128, 1>;
            layer_mtp_vlast_bf16_k64_tile64 = layer_mtp::VLast<B16, 64, 64, 64, 8, 4, 256, 1>;
            layer_mtp_vlast_bf16_k128_tile32 = layer_mtp::VLast<B16, 128, 128, 32, 4, 4, 256, 1>;
            layer_mtp_vlast_bf16_k128_tile64 = layer_mtp::VLast<B16, 128, 128, 64, 8, 4, 256, 1>;
            layer_mtp_vlast_bf16_k128_tile128 = layer_mtp::VLast<B16, 128, 128, 128, 8, 4, 256, 1>;
            layer_mtp_vlast_f32_k64_tile32 = layer_mtp::VLast<F32, 64, 64, 32, 4, 4, 128, 1>;
            layer_mtp_vlast_f32_k64_tile64 = layer_mtp::VLast<F32, 64, 64, 64, 8, 4, 128, 1>;
            layer_mtp_vlast_f32_k128_tile32 = layer_mtp::VLast<F32, 128, 128, 32, 4, 4, 256, 1>;
            layer_mtp_vlast_f32_k128_tile64 = layer_mtp::VLast<F32, 128, 128, 64, 4, 4, 128, 1>;
            layer_mtp_vlast_f32_k128_tile128 = layer_mtp::VLast<F32, 128, 128, 128, 4, 4, 128, 1>;
            gdn_layer_parallel_klast_bf16_k64_tile32 = layer_mtp::GdnParallel<64, 64, 2, 1, true>;
            gdn_layer_parallel_klast_bf16_k64_tile64 = layer_mtp::GdnParallel<64, 64, 4, 1, true>;
            gdn_layer_parallel_klast_bf16_k64_tile64_alone = layer_mtp::GdnParallel<64, 64, 4, 1, false>;
            gdn_layer_parallel_klast_bf16_k128_tile64 = layer_mtp::GdnParallel<128, 128, 4, 1, true>;
            gdn_layer_parallel_klast_bf16_k128_tile128 = layer_mtp::GdnParallel<128, 128, 4, 2, true>;
            gdn_layer_parallel_klast_bf16_k128_tile128_alone = layer_mtp::GdnParallel<128, 128, 4, 2, false>;
            gdn_layer_parallel_klast_bf16_k128_tile128_warps8 = layer_mtp::GdnParallel<128, 128, 8, 1, true>;
            gdn_layer_parallel_klast_bf16_k128_tile128_warps8_alone = layer_mtp::GdnParallel<128, 128, 8, 1, false>;
            kda_layer_parallel_klast_bf16_k128_tile64 = layer_mtp::KdaParallel<128, 128, 4, 1, true>;
            kda_layer_parallel_klast_bf16_k128_tile128_alone = layer_mtp::KdaParallel<128, 128, 4, 2, false>;
            kda_layer_parallel_klast_bf16_k128_tile128_warps8_alone = layer_mtp::KdaParallel<128, 128, 8, 1, false>;
            gdn_decode_klast_bf16_k96v192_tile32 = gdn_decode::KLast<B16, 96, 192, 2, 64, 3>;
            gdn_decode_klast_f32_k96v192_tile8 = gdn_decode::KLast<F32, 96, 192, 1, 32, 3>;
            gdn_decode_klast_f32_k96v192_tile16 = gdn_decode::KLast<F32, 96, 192, 1, 64, 3>;
            gdn_decode_vlast_bf16_k96v192_tile32 = gdn_decode::VLast<B16, 96, 192, 4, 4>;
            gdn_decode_vlast_bf16_k96v192_tile64 = gdn_decode::VLast<B16, 96, 192, 8, 8>;
            gdn_decode_vlast_f32_k96v192_tile32 = gdn_decode::VLast<F32, 96, 192, 4, 2>;
            recurrent_klast_bf16_k96v192_tile32 = recurrent::GdnKLast<B16, 96, 192, 2, 64, 3>;
            recurrent_klast_f32_k96v192_tile16 = recurrent::GdnKLast<F32, 96, 192, 1, 64, 3>;
            recurrent_vlast_bf16_k96v192_tile32 = recurrent::GdnVLast<B16, 96, 192, 4, 4>;
            recurrent_vlast_f32_k96v192_tile32 = recurrent::GdnVLast<F32, 96, 192, 4, 4>;
            layer_klast_bf16_k96v192_tile32 = layer::GdnKLast<B16, 96, 192, 2, 64, 3>;
            layer_klast_bf16_k96v192_tile192 = layer::GdnWholeKLast<B16, 96, 192, 1, 256, 3, 3>;
            layer_klast_f32_k96v192_tile32 = layer::GdnKLast<F32, 96, 192, 1, 128, 3>;
            layer_klast_f32_k96v192_tile192 = layer::GdnWholeKLast<F32, 96, 192, 1, 192, 3, 3>;
            layer_vlast_bf16_k96v192_tile32 = layer::GdnVLast<B16, 96, 192, 4, 4, 1>;
            layer_vlast_bf16_k96v192_tile192 = layer::GdnWholeVLast<B16, 96, 192, 8, 4, 192>;
            layer_vlast_f32_k96v192_tile32 = layer::GdnVLast<F32, 96, 192, 4, 4, 1>;
            layer_vlast_f32_k96v192_tile192 = layer::GdnWholeVLast<F32, 96, 192, 8, 4, 192>;
            layer_mtp_klast_bf16_k96v192_tile32 = layer_mtp::GdnKLast<B16, 96, 192, 32, 1, 128, 1, 3>;
            layer_mtp_klast_bf16_k96v192_tile192 = layer_mtp::GdnKLast<B16, 96, 192, 192, 1, 256, 2, 3>;
            layer_mtp_klast_f32_k96v192_tile192 = layer_mtp::GdnKLast<F32, 96, 192, 192, 1, 256, 2, 3>;
            layer_mtp_vlast_bf16_k96v192_tile192 = layer_mtp::GdnVLast<B16, 96, 192, 192, 8, 4, 192, 1>;
            layer_mtp_vlast_f32_k96v192_tile192 = layer_mtp::GdnVLast<F32, 96, 192, 192, 4, 4, 192, 1>;
            prefill_convolve_k64 = prefill::Convolve<64, 64>;
            prefill_convolve_k128 = prefill::Convolve<128, 128>;
            prefill_convolve_k96v192 = prefill::Convolve<96, 192>;
            gdn_prefill_prepare_k64 = gdn_prefill::Prepare<64, 64>;
            gdn_prefill_prepare_k128 = gdn_prefill::Prepare<128, 128>;
            gdn_prefill_prepare_k96v192 = gdn_prefill::Prepare<96, 192>;
            gdn_prefill_chain_k64_tile64 = gdn_prefill::Chain<64, 64, 1>;
            gdn_prefill_chain_k128_tile64 = gdn_prefill::Chain<128, 128, 1>;
            gdn_prefill_chain_k128_tile128 = gdn_prefill::Chain<128, 128, 2>;
            gdn_prefill_chain_k96v192_tile64 = gdn_prefill::Chain<96, 192, 1>;
            gdn_prefill_chain_k64_tile64_mma = gdn_prefill::PortableChain<64, 64>;
            gdn_prefill_chain_k128_tile64_mma = gdn_prefill::PortableChain<128, 128>;
            gdn_prefill_chain_k96v192_tile64_mma = gdn_prefill::PortableChain<96, 192>;
            gdn_prefill_short_k64_tile64 = gdn_prefill::Short<64, 64, 1>;
            gdn_prefill_short_k128_tile64 = gdn_prefill::Short<128, 128, 1>;
            gdn_prefill_short_k128_tile128 = gdn_prefill::Short<128, 128, 2>;
            gdn_prefill_short_k96v192_tile64 = gdn_prefill::Short<96, 192, 1>;
            prefill_single_k64 = prefill::Single<64, 64, 1>;
            prefill_single_k128 = prefill::Single<128, 128, 2>;
            prefill_single_k96v192 = prefill::Single<96, 192, 3>;
            kda_prefill_prepare_k128 = kda_prefill::Prepare<128, 128>;
            kda_prefill_chain_k128_tile64 = kda_prefill::Chain<128, 128, 1>;
            kda_prefill_chain_k128_tile128 = kda_prefill::Chain<128, 128, 2>;
            kda_prefill_chain_k128_tile64_mma = kda_prefill::PortableChain<128, 128>;
            kda_prefill_short_k128_tile128 = kda_prefill::Short<128, 128, 2>;
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

        /// The bodies, each in a module of its own: what is in one module is compiled by one thread.
        #[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
        mod simulated {
            $(
                pub mod $symbol {
                    #[allow(unused_imports)]
                    use super::super::*;

                    /// Never inlined, so that a fiber's stack holds the frame of one body.
                    ///
                    /// # Safety
                    /// As [`Entry::simulate`]'s.
                    #[inline(never)]
                    pub unsafe fn run(params: &[u8]) {
                        // SAFETY: the caller's promise.
                        unsafe { simulate::<kernels::$operator::$body<$($parameter),*>>(params) }
                    }
                }
            )*
        }

        impl Entry {
            /// All of them, in the order of the table.
            pub const ALL: &[Entry] = &[$(Entry::$symbol),*];

            /// The PTX symbol.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Entry::$symbol => stringify!($symbol),)*
                }
            }

            /// Operator that it belongs to: the stem of its kernel's file.
            pub const fn operator(self) -> &'static str {
                match self {
                    $(Entry::$symbol => stringify!($operator),)*
                }
            }

            /// Threads of a block.
            pub const fn block(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::BLOCK,)*
                }
            }

            /// Blocks of a multiprocessor that registers must leave room for; 0 leaves it to the assembler.
            pub const fn min_blocks_per_sm(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::MIN_BLOCKS_PER_SM,)*
                }
            }

            /// Whether the load-time constant `GD_BLOCKS_PER_SM` says so instead.
            pub const fn min_blocks_by_constant(self) -> bool {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::MIN_BLOCKS_BY_CONSTANT,)*
                }
            }

            /// Whether a block may have two value heads of a query/key head, one after the other: where the grid has HV/(2 H)
            /// blocks along x instead of HV/H.
            pub const fn makes_pairs(self) -> bool {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::MAKES_PAIRS,)*
                }
            }

            /// Whether it waits itself for the launch before it on its stream, and may begin while that still runs.
            pub const fn overlaps(self) -> bool {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::OVERLAPS,)*
                }
            }

            /// Blocks that share one head's state.
            pub const fn tiles(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::TILES,)*
                }
            }

            /// Dynamic shared memory of a block, bytes.
            pub const fn shared_bytes(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_BYTES,)*
                }
            }

            /// Dynamic shared memory of a block besides where it has two stages, bytes.
            pub const fn shared_bytes_of_stage(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_BYTES_OF_STAGE,)*
                }
            }

            /// Elements of a K-last state for which a block has dynamic shared memory besides.
            pub const fn shared_state_elements(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_STATE_ELEMENTS,)*
                }
            }

            /// Dynamic shared memory of a block, but for [`Self::shared_state_elements`], where each key channel has its own decay
            /// or each value head has one.
            pub const fn shared(self, per_channel: bool) -> Shared {
                let more = if per_channel { self.shared_of_channels() } else { Shared::NONE };
                Shared {
                    block: self.shared_bytes() + more.block,
                    per_token: self.shared_bytes_per_token() + more.per_token,
                    per_head: self.shared_bytes_per_head() + more.per_head,
                    per_token_of_head: self.shared_bytes_per_token_of_head() + more.per_token_of_head,
                }
            }

            /// Dynamic shared memory besides, where each key channel has its own decay.
            const fn shared_of_channels(self) -> Shared {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_OF_CHANNELS,)*
                }
            }

            /// What of it is of no use where q, k and the keys of a ring are bf16, bytes.
            pub const fn shared_bytes_of_lows(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_BYTES_OF_LOWS,)*
                }
            }

            /// Dynamic shared memory of a block for every token and previous token of a row, bytes.
            pub const fn shared_bytes_per_token(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_BYTES_PER_TOKEN,)*
                }
            }

            /// What an operator on states computes with it; nothing of other kernels.
            pub const fn computes(self) -> Option<Computes> {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::COMPUTES,)*
                }
            }

            /// Value heads that a block may have, where it has all those of a query/key head; else 1.
            pub const fn max_heads(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::MAX_HEADS,)*
                }
            }

            /// Threads of a block for a layer of `ratio` value heads to a query/key head.
            pub const fn block_of(self, ratio: u32) -> u32 {
                let per_head = match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::BLOCK_PER_HEAD,)*
                };
                if per_head { self.block() * ratio } else { self.block() }
            }

            /// Dynamic shared memory of a block for each of its value heads, bytes.
            pub const fn shared_bytes_per_head(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_BYTES_PER_HEAD,)*
                }
            }

            /// Dynamic shared memory of a block for every token and previous token of each of its value heads, bytes.
            pub const fn shared_bytes_per_token_of_head(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::SHARED_BYTES_PER_TOKEN_OF_HEAD,)*
                }
            }

            /// Blocks along x of a cluster; 1: there is none, or it has one for each value head.
            pub const fn cluster(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::CLUSTER,)*
                }
            }

            /// Whether a cluster has so many blocks for each value head of a query/key head, and the grid's y goes through
            /// the value heads.
            pub const fn has_cluster_of_heads(self) -> bool {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::CLUSTER_OF_HEADS,)*
                }
            }

            /// Blocks of a cluster for a layer of `ratio` value heads to a query/key head; 1: none.
            pub const fn cluster_of(self, ratio: u32) -> u32 {
                if self.has_cluster_of_heads() { self.cluster() * ratio } else { self.cluster() }
            }

            /// Whether it takes a GPU with clusters: of compute capability 9.0.
            pub const fn takes_clusters(self) -> bool {
                self.cluster() > 1 || self.has_cluster_of_heads()
            }

            /// Whether it takes a GPU whose warpgroups multiply: of compute capability 9.0, no later one (sm_90a).
            pub const fn takes_warpgroups(self) -> bool {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::WARPGROUPS,)*
                }
            }

            /// Whether its tests have passed on a GPU.
            pub const fn is_proved(self) -> bool {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::PROVED,)*
                }
            }

            /// Most value heads of a query/key head.
            pub const fn max_ratio(self) -> u32 {
                match self {
                    $(Entry::$symbol => <kernels::$operator::$body<$($parameter),*> as Kernel>::MAX_RATIO,)*
                }
            }

            /// Bytes of the workspace for a unit of a prefill and a query/key head with `ratio` value heads, which `makes_values` of
            /// v or not, and `leaves_o` in f16 for a norm or not: a multiple of 128. There are [`crate::prefill::units`].
            pub const fn workspace_bytes_per_unit(self, ratio: u32, makes_values: bool, leaves_o: bool) -> u32 {
                match self {
                    $(Entry::$symbol => {
                        let of_values = <kernels::$operator::$body<$($parameter),*> as Kernel>::WORKSPACE_BYTES_OF_VALUES;
                        let of_norm = <kernels::$operator::$body<$($parameter),*> as Kernel>::WORKSPACE_BYTES_OF_NORM;
                        <kernels::$operator::$body<$($parameter),*> as Kernel>::WORKSPACE_BYTES
                            + (<kernels::$operator::$body<$($parameter),*> as Kernel>::WORKSPACE_BYTES_PER_HEAD
                                + of_values * makes_values as u32
                                + of_norm * leaves_o as u32) * ratio
                    })*
                }
            }

            /// Bytes of its parameters.
            pub const fn parameter_bytes(self) -> usize {
                match self {
                    $(Entry::$symbol => size_of::<<kernels::$operator::$body<$($parameter),*> as Kernel>::Params>(),)*
                }
            }

            /// Load-time constants of its operator.
            pub fn symbols(self) -> &'static [&'static str] {
                use crate::constants::Constants;
                match self {
                    $(Entry::$symbol => <<kernels::$operator::$body<$($parameter),*> as Kernel>::Constants as Constants>::SYMBOLS,)*
                }
            }

            /// Runs the body as the current simulated thread.
            ///
            /// # Safety
            /// `params` begin with the bytes of the operator's parameters, and the simulation's regions cover what
            /// they point at.
            #[cfg(all(feature = "simulator", not(target_arch = "nvptx64")))]
            pub unsafe fn simulate(self, params: &[u8]) {
                match self {
                    // SAFETY: the caller's promise.
                    $(Entry::$symbol => unsafe { simulated::$symbol::run(params) },)*
                }
            }
        }
    };
}

for_each_entry!(define_entries);

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
    use crate::launch::{Computes, Family, Layout, States};

    /// The symbol that the table should give an entry, but for the warps of its block.
    fn symbol(entry: Entry, computes: Computes) -> String {
        let Computes {
            family,
            states,
            k,
            v,
            ..
        } = computes;
        let name = match family {
            Family::GdnDecode => "gdn_decode",
            Family::Recurrent => "recurrent",
            Family::GdnMtpParallel => "gdn_mtp_parallel",
            Family::KdaRecurrentParallel => "kda_recurrent_parallel",
            Family::Deferred => "deferred",
            Family::DeferredLayer => "deferred_layer",
            Family::GdnDeferredParallel => "gdn_deferred_parallel",
            Family::GdnDeferredLayerParallel => "gdn_deferred_layer_parallel",
            Family::KdaDeferredLayerParallel => "kda_deferred_layer_parallel",
            Family::KdaDeferredParallel => "kda_deferred_parallel",
            Family::Layer => "layer",
            Family::LayerMtp => "layer_mtp",
            Family::GdnLayerParallel => "gdn_layer_parallel",
            Family::KdaLayerParallel => "kda_layer_parallel",
            Family::GdnPrefillPrepare => "gdn_prefill_prepare",
            Family::GdnPrefillChain => "gdn_prefill_chain",
            Family::GdnPrefillShort => "gdn_prefill_short",
            Family::PrefillConvolve => "prefill_convolve",
            Family::PrefillSingle => "prefill_single",
            Family::PrefillFinish => "prefill_finish",
            Family::KdaPrefillPrepare => "kda_prefill_prepare",
            Family::KdaPrefillChain => "kda_prefill_chain",
            Family::KdaPrefillShort => "kda_prefill_short",
        };
        let states = states.map_or(String::new(), |States { layout, element }| {
            let layout = match layout {
                Layout::KLast => "klast",
                Layout::VLast => "vlast",
            };
            let element = match element {
                Element::F32 => "f32",
                Element::Bf16 => "bf16",
                Element::F16 => "f16",
            };
            format!("{layout}_{element}_")
        });
        let dims = if k == v {
            format!("k{k}")
        } else {
            format!("k{k}v{v}")
        };
        let of_states = format!("{name}_{states}{dims}");
        // Whole heads, whatever their dims.
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

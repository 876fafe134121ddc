//! Loads of q and k of a chunk into its threads, from memory or from the convolution: in f16, times a power of two.

use super::convolution::{ConvInputs, channel_of, run_of};
use super::opaque;
use super::operands::{SharedSink, Sink};
use super::range::MOST_KEY;
use super::rows::{Chunk, Span};
use super::workspace::Operands;
use super::{CHUNK, FACTOR_BYTES, FACTORS, QUERIES};
use crate::constants::Element;
use crate::device::float::{f16_to_f32, fma, pack_f16x2, rsqrt};
use crate::device::global::{load_b32, load_b128};
use crate::device::shared::{load_shared_b128, store_shared_b32, store_shared_b64};
use crate::device::thread::thread_idx_x;
use crate::device::warp::lane_id;
use crate::math::each::each;
use crate::math::elements;
use crate::math::power;
use crate::math::range::{SMALL, any_large, power_for, times};
use crate::math::reduce::{butterfly_sum, dot};
use crate::step::{PrefillParams, StepConstants};

/// Threads of the intra-chunk pass of a chunk.
pub const THREADS: u32 = 256;

/// Some of a token's runs of 8 channels, as in memory: a thread has every fourth run.
pub type RawChannels = [elements::Raw<8>; 4];
/// Zeros.
pub const NO_RAW_CHANNELS: RawChannels = [elements::Raw([0; 8]); 4];
/// Values of [`RawChannels`].
pub type LaneChannels = [[f32; 8]; 4];
/// Values in f16, two to a word.
pub type Words = [[u32; 4]; 4];

/// Byte stride of an image between a lane's runs of channels.
const RUN_BYTES: u32 = 4 * 2048;

/// Byte offset of the lower (0) or upper (1) four of a token's 8 channels, as [`Load::stage`] stores them. Tokens are swizzled by
/// the channels, so that neither a token's nor a channel's elements have bank conflicts.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn staged_byte(part: u32, of: u32, token: u32) -> u32 {
    part * 2048 + of * QUERIES + (token ^ ((2 * part + of) % 8)) * 16
}

/// Address, strides of rows and tokens, first channel and element of a tensor.
pub type TensorRows = (u64, (u32, u32), u32, u32);

/// Where q and k are convolved.
#[derive(Clone, Copy)]
pub enum Convolved {
    /// In the block itself, from these inputs.
    Here(ConvInputs),
    /// In an earlier launch, which stored them in the workspace: [`super::kernels::Convolve`].
    Before(Operands),
}

/// Loads q and k of a chunk into its [`THREADS`]: 8 tokens a warp, four lanes a token. `NEIGHBOURS`: lane = 4 · token + part, the
/// order of the fragments of a product. Otherwise lane = 8 · part + token, the order of an image: a store of 8 lanes is one core
/// of 128 bytes.
pub struct Load<'a, const NEIGHBOURS: bool> {
    /// Constants and parameters of the launch.
    pub with: (&'a StepConstants, &'a PrefillParams),
    /// Inputs of the convolution of q and k.
    pub inputs: ConvInputs,
    /// Query/key head.
    pub head: u32,
    /// Tokens of the row.
    pub span: &'a Span,
    /// Tokens of the chunk.
    pub chunk: Chunk,
}

impl<const NEIGHBOURS: bool> Load<'_, NEIGHBOURS> {
    /// This thread's token of the chunk.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn token(&self) -> u32 {
        let lane = lane_id();
        8 * (thread_idx_x() / 32) + if NEIGHBOURS { lane / 4 } else { lane % 8 }
    }

    /// Index of this lane among the four lanes of a token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn part(&self) -> u32 {
        let lane = lane_id();
        if NEIGHBOURS { lane % 4 } else { lane / 8 }
    }

    /// Sum of x over the lanes of a token.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn sum(x: f32) -> f32 {
        let [sum] = if NEIGHBOURS {
            butterfly_sum([x], 1, 4)
        } else {
            butterfly_sum([x], 8, 32)
        };
        sum
    }

    /// Sum of the squares of a token; each of its lanes has its own channels.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn squares<const K: u32>(x: &LaneChannels) -> f32 {
        let mut sum = 0.0;
        each!(i in 0..K as usize / 32 => sum += dot(x[i], x[i]));
        Self::sum(sum)
    }

    /// Loads the thread's channels of its token, as they are in memory; those of the first token if the chunk does not have its
    /// token.
    ///
    /// # Safety
    /// The tensor is live.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn rows<const K: u32>(
        &self,
        (base, strides, head, element): TensorRows,
    ) -> RawChannels {
        let mut rows = NO_RAW_CHANNELS;
        let token = self.token();
        let t = self.chunk.start + if token < self.chunk.count { token } else { 0 };
        let channel = head + 8 * self.part();
        let first = self.span.at(base, strides, t, channel, element);
        each!(i in 0..K as usize / 32 => {
            let address = first + (32 * i as u32 * elements::bytes_of(element)) as u64;
            rows[i] = elements::load::<8>(address, element, self.with.0.wide_io != 0);
        });
        rows
    }

    /// Byte offset of the token's 8 channels, run `i`, in the image of k (0) or q (1).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn byte(&self, of: u32, i: u32) -> u32 {
        self.part() * 2048 + i * RUN_BYTES + of * QUERIES + self.token() * 16
    }

    /// Convolves k (0) or q (1) and stores the values in f32: half of them in the place of k, half in that of q. A barrier must
    /// follow.
    ///
    /// # Safety
    /// The tensors are live, and the image is the block's.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn stage<const K: u32, const OF: u32>(&self, image: u32) {
        let (of_token, thread) = (K / 2, opaque(thread_idx_x()));
        let (pair, first) = (thread % of_token, thread / of_token);
        if first >= THREADS / of_token {
            return;
        }
        let channel = channel_of(self.with.0, 1 - OF, self.head, K) + 2 * pair;
        let (part, of) = (pair / 4, pair / 2 % 2);
        let mut first = run_of(K) as u32 * first;
        while first < CHUNK {
            let (t, end) = (
                self.chunk.start + first,
                self.chunk.start + self.chunk.count,
            );
            let give = |token: u32, y: [f32; 2]| {
                let place = image + staged_byte(part, of, first + token) + pair % 2 * 8;
                // SAFETY: the caller's promise; a thread owns its tokens' channels.
                unsafe { store_shared_b64(place, y.map(f32::to_bits)) };
            };
            // SAFETY: the caller's promise.
            unsafe {
                if const { run_of(K) == 16 } {
                    self.inputs
                        .convolve_run::<16>(self.with, self.span, (t, end), channel, give);
                } else {
                    self.inputs
                        .convolve_run::<8>(self.with, self.span, (t, end), channel, give);
                }
            }
            first += run_of(K) as u32 * (THREADS / of_token);
        }
    }

    /// Loads the channels that [`Self::stage`] stored.
    ///
    /// # Safety
    /// The channels were stored before a barrier.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn staged<const K: u32>(&self, image: u32) -> LaneChannels {
        let mut x = [[0.0; 8]; 4];
        each!(i in 0..K as usize / 32 => {
            let part = self.part() + 4 * i as u32;
            let place = |of| image + staged_byte(part, of, self.token());
            // SAFETY: the channels were stored before a barrier.
            let [a, b] = unsafe { [0, 1].map(|of| load_shared_b128(place(of))) };
            x[i] = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]].map(f32::from_bits);
        });
        x
    }

    /// Multiplies k (0) or q (1) by a power of two and rounds it to f16. Stores the scale that makes up the difference to k̂ or
    /// q̂; 0 for a k that f16 does not hold. Called by the four lanes of a token with their channels; `rounds`: the channels may
    /// have more bits than f16.
    ///
    /// # Safety
    /// The scales are the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn scaled<const K: u32, const OF: u32>(
        &self,
        mut x: LaneChannels,
        rounds: bool,
        scales: u32,
    ) -> Words {
        let c = self.with.0;
        let mut sum = Self::squares::<K>(&x);
        let is_held = |sum: f32| sum < f32::INFINITY;
        // A warp has several tokens, so the branch is by vote.
        if any_large(!is_held(sum)) {
            if c.l2norm != 0 {
                let mut small = x;
                multiply::<K>(&mut small, SMALL);
                let by = power_for(sum == f32::INFINITY, Self::squares::<K>(&small));
                multiply::<K>(&mut x, by);
                sum = Self::squares::<K>(&x);
            }
            // Otherwise the products of this k with zeros would reach tokens before it.
            if OF == 0 && !is_held(sum) {
                x = [[0.0; 8]; 4];
            }
        }
        let [mut power, inverse] = power::of_root(sum);
        // The first token was loaded in place of tokens beyond the chunk.
        if self.token() >= self.chunk.count {
            power = 0.0;
        }
        let mut words: Words = [[0; 4]; 4];
        let mut i = 0;
        while i < K as usize / 32 {
            each!(j in 0..4 => {
                words[i][j] = pack_f16x2(x[i][2 * j] * power, x[i][2 * j + 1] * power);
            });
            i += 1;
        }
        let mut rest = inverse;
        if c.l2norm != 0 {
            rest *= rsqrt(sum + 1e-6);
        }
        if rounds && OF == 0 {
            // Undoes the change of length by rounding: with equal keys and β = 2 it would grow with every token.
            let mut rounded = 0.0;
            i = 0;
            while i < K as usize / 32 {
                each!(j in 0..4 => {
                    let word = words[i][j];
                    let half = [word as u16, (word >> 16) as u16].map(f16_to_f32);
                    rounded = fma(half[0], half[0], fma(half[1], half[1], rounded));
                });
                i += 1;
            }
            let rounded = Self::sum(rounded);
            let exact = sum * power * power;
            let ratio = exact * rsqrt(exact * rounded);
            rest *= if exact * rounded > 1e-30 { ratio } else { 1.0 };
        }
        if OF == 1 {
            rest *= f32::from_bits(c.scale);
        } else {
            // The solver treats a token whose scale is 0 as outside the range of f16.
            rest = if rest < MOST_KEY { rest } else { 0.0 };
        }
        if self.part() == 0 {
            store_shared_b32(
                scales + OF * FACTOR_BYTES + 4 * self.token(),
                rest.to_bits(),
            );
        }
        words
    }

    /// Stores the words of k (0) or q (1) to an image.
    ///
    /// # Safety
    /// The image is the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn give<const K: u32, const OF: u32>(&self, words: Words, image: impl Sink) {
        each!(i in 0..K as usize / 32 => {
            let byte = self.byte(OF, i as u32);
            // SAFETY: the caller's promise; a thread writes its own token's channels.
            unsafe { image.store_b128(byte, words[i]) };
        });
    }

    /// Loads k (0) or q (1) as an earlier launch stored it, and copies its scale to the scales.
    ///
    /// # Safety
    /// The operands are in the workspace; the scales are the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn left<const K: u32>(&self, of: u32, operands: Operands, scales: u32) -> Words {
        let mut words: Words = [[0; 4]; 4];
        // SAFETY: the caller's promise.
        unsafe {
            // Opaque (docs/compiler.md), because LLVM would keep the addresses until the store.
            let first = opaque(self.byte(of, 0));
            each!(i in 0..K as usize / 32 => {
                let byte = first + i as u32 * RUN_BYTES;
                words[i] = load_b128(operands.images + byte as u64);
            });
            if self.part() == 0 {
                let byte = of * FACTOR_BYTES + 4 * self.token();
                let scale = load_b32(operands.head + (FACTORS + byte) as u64);
                store_shared_b32(scales + byte, scale);
            }
        }
        words
    }

    /// Converts loaded k (0) or q (1) to f16, times a power of two.
    ///
    /// # Safety
    /// The scales are the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn words<const K: u32, const OF: u32>(
        &self,
        rows: RawChannels,
        element: u32,
        scales: u32,
    ) -> Words {
        let mut x: LaneChannels = [[0.0; 8]; 4];
        each!(i in 0..K as usize / 32 => x[i] = rows[i].to_f32(element));
        self.scaled::<K, OF>(x, element == Element::F32 as u32, scales)
    }

    /// Like [`Self::words`], and stores the words to the image.
    ///
    /// # Safety
    /// The image and the scales are the block's to write.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn place<const K: u32, const OF: u32>(
        &self,
        rows: RawChannels,
        element: u32,
        (image, scales): (u32, u32),
    ) {
        let words = self.words::<K, OF>(rows, element, scales);
        self.give::<K, OF>(words, SharedSink(image));
    }
}

#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn multiply<const K: u32>(x: &mut LaneChannels, by: f32) {
    each!(i in 0..K as usize / 32 => x[i] = times(x[i], by));
}

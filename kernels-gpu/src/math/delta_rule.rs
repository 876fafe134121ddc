//! Scalars of the gated delta rule. k and q are not normalised: their norms are factored out of the products.

use crate::device::float::{fma, rsqrt};

/// Scalars of one head and token.
#[derive(Clone, Copy)]
pub struct Factors {
    /// α; 1 if the products are taken from a state that has already decayed.
    pub decay: f32,
    /// β
    pub beta: f32,
    /// Norm factor of k: k̂ = k · this.
    pub k: f32,
    /// Norm factor of q: q̂ = q · this.
    pub q: f32,
    /// k̂·q̂
    pub kq: f32,
}

impl Factors {
    /// From Σk², Σq², k·q, and (α, β). The sums are finite: see [`super::range`].
    #[inline(always)]
    pub fn new(
        l2norm: bool,
        scale: f32,
        [kk, qq, kq]: [f32; 3],
        (decay, beta): (f32, f32),
    ) -> Self {
        let (k, q) = if l2norm {
            (rsqrt(kk + 1e-6), rsqrt(qq + 1e-6) * scale)
        } else {
            (1.0, scale)
        };
        Self {
            decay,
            beta,
            k,
            q,
            kq: kq * k * q,
        }
    }

    /// δ of one v, from S k.
    #[inline(always)]
    pub fn delta(&self, v: f32, sk: f32) -> f32 {
        self.beta * fma(-(self.decay * self.k), sk, v)
    }

    /// o of one v, from S q and δ.
    #[inline(always)]
    pub fn output(&self, sq: f32, delta: f32) -> f32 {
        fma(self.decay * self.q, sq, delta * self.kq)
    }
}

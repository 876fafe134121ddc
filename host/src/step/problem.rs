//! The problem: everything that a launch is compiled for.

use gated_delta_kernels::machine;
use gated_delta_kernels::prefill::split::Pass;
use gated_delta_kernels::prefill::workspace::leaves_tokens;
use gated_delta_kernels::step::StepConstants;

use super::kind::Kind;

/// Everything that a launch is compiled for: all arguments except the addresses, B, P and the `total` of packed rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    pub kind: Kind,
    pub constants: StepConstants,
}

impl Problem {
    /// Whether each row's final state is written, by an update or by a commit.
    pub fn writes_final(&self) -> bool {
        self.constants.update_state != 0 || self.constants.previous_tokens != 0
    }

    /// Whether the launch is a prefill.
    pub fn is_chunked(&self) -> bool {
        self.kind.is_chunked()
    }

    /// Whether the kernels are those for Hopper, whose warpgroups multiply (wgmma).
    pub fn is_on_hopper(&self) -> bool {
        self.constants.machine == machine::HOPPER
    }

    /// Whether the scan leaves o of chunks of one token to a later norm.
    pub fn leaves_tokens(&self) -> bool {
        self.is_chunked() && leaves_tokens(&self.constants, self.kind.v_dim)
    }

    pub fn value_heads(&self) -> u32 {
        self.constants.h * self.constants.ratio
    }

    /// Size of the states of a slot in bytes.
    pub fn state_bytes(&self) -> u64 {
        let elements = u64::from(self.kind.k_dim) * u64::from(self.kind.v_dim);
        u64::from(self.value_heads()) * elements * self.kind.state.size_of() as u64
    }

    /// The load-time constants of a launch in `pass`.
    pub fn constants_of(&self, pass: Pass) -> StepConstants {
        StepConstants {
            pass: pass as u32,
            ..self.constants
        }
    }
}

//! The tensors of a launch, each at a number of its own.

use gated_delta_kernels::step::LayerParams;

/// Numbers the tensors, and says what they are called, and which parameter each is.
macro_rules! arguments {
    ($($(#[$meta:meta])* $argument:ident = $name:literal $(in $($field:ident).+)?,)*) => {
        /// A tensor that a launch may have.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Argument {
            $($(#[$meta])* $argument,)*
        }

        impl Argument {
            /// All, by number.
            pub const ALL: &[Self] = &[$(Self::$argument),*];

            /// Sets the parameter that is its address, where one is.
            #[inline(always)]
            pub const fn set(self, params: &mut LayerParams, address: u64) {
                match self {
                    $(Self::$argument => { arguments!(set params address $($($field).+)?) })*
                }
            }

            /// What it is called, but where [`Request::name`](super::Request::name) says otherwise.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$argument => $name,)*
                }
            }
        }
    };
    (set $params:ident $address:ident) => { () };
    (set $params:ident $address:ident $($field:ident).+) => { $params.$($field).+ = $address };
}

arguments! {
    Q = "q" in step.q,
    K = "k" in step.k,
    V = "v" in step.v,
    /// Of the new tokens' convolution.
    X = "x" in x,
    ConvWeight = "conv_weight" in conv_weight,
    Windows = "windows" in read_windows,
    /// Of the new tokens: `a` or `g`.
    Gate = "gate" in step.g,
    /// Of the new tokens: `b` or `beta`.
    Beta = "beta" in step.b,
    /// Here and below: of previous tokens, or of those of a commit.
    PreviousK = "previous k" in step.previous_k,
    PreviousV = "previous v" in step.previous_v,
    PreviousX = "previous x" in previous_x,
    PreviousGate = "previous gate" in step.previous_g,
    PreviousBeta = "previous beta" in step.previous_b,
    O = "o" in step.o,
    Keep = "keep" in step.keep,
    ConvBias = "conv_bias" in conv_bias,
    WriteWindows = "write_windows" in write_windows,
    Z = "z" in z,
    NormWeight = "norm_weight" in norm_weight,
    Fresh = "fresh" in step.fresh,
    ALog = "A_log" in step.a_log,
    DtBias = "dt_bias" in step.dt_bias,
    Pool = "pool" in step.read_pool,
    WritePool = "write_pool" in step.write_pool,
    ReadSlots = "read_slots" in step.read_slots,
    WriteSlots = "write_slots" in step.write_slots,
    TokenSlots = "token_slots" in step.token_slots,
    Accepted = "accepted" in step.accepted,
    Snapshots = "snapshots" in step.snapshots,
    WindowSnapshots = "window_snapshots" in window_snapshots,
    CuSeqlens = "cu_seqlens" in step.cu_seqlens,
    Positions = "positions",
    CheckpointSlots = "checkpoint_slots",
    Keys = "keys",
    Updates = "updates",
    Decays = "decays",
    /// Of a ring.
    Inputs = "inputs",
    PendingLen = "pending len",
    PendingBase = "pending base",
    Workspace = "workspace",
}

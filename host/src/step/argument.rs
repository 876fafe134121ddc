//! The tensors of a launch: a table of each tensor's name, parameter, access and unit.

use gated_delta_kernels::step::LayerParams;

/// Access of a launch to a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// The launch reads the elements.
    Read,
    /// The launch writes the elements.
    Write,
    /// A step writes the elements, a flush reads them.
    Ring,
    /// The launch reads the elements. It also writes them, unless states are read-only or the named tensor is given as
    /// destination.
    Update(Argument),
    /// The launch writes the elements, unless states are read-only.
    States,
}

/// Unit that a tensor has elements for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Each token.
    Token,
    /// Each row: the tensor has indices or counts.
    Row,
    /// The layer: the tensor has weights or other parameters.
    Layer,
    /// Each slot of a pool. A launch touches only the slots of its rows.
    Slot,
    /// Each token, with a state or a window.
    Snapshot,
    /// The launch itself.
    Launch,
}

/// Load-time constant that says whether accesses to a tensor are wide. If they are, its address has to stay aligned to their
/// width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wide {
    /// No constant: accesses are of single elements, or the kernels have no narrow path.
    Never,
    /// `wide_io`.
    Io,
    /// `wide_io`, in a prefill only.
    Chunks,
    /// `wide_io`, with a decay for each key channel only.
    Channels,
    /// `wide_state`.
    States,
    /// `wide_conv_weight`: the taps of a channel in one access.
    Taps,
    /// `wide_norm`.
    Norm,
}

/// Defines [`Argument`] from the table.
macro_rules! arguments {
    ($($(#[$meta:meta])* $argument:ident = $name:literal $(in $($field:ident).+)?, $access:ident $(unless $other:ident)?, $unit:ident, $wide:ident;)*) => {
        /// A tensor that a launch may have.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Argument {
            $($(#[$meta])* $argument,)*
        }

        impl Argument {
            /// All arguments, by number.
            pub const ALL: &[Self] = &[$(Self::$argument),*];

            /// Sets the parameter that has the address. No effect if the argument has none.
            #[inline(always)]
            pub const fn set(self, params: &mut LayerParams, address: u64) {
                match self {
                    $(Self::$argument => { arguments!(set params address $($($field).+)?) })*
                }
            }

            /// The address in the parameters; 0 if the argument has no parameter.
            #[inline(always)]
            pub const fn address(self, params: &LayerParams) -> u64 {
                match self {
                    $(Self::$argument => arguments!(get params $($($field).+)?),)*
                }
            }

            /// The bitwise or of the addresses of all tensors of class `wide`.
            #[inline(always)]
            pub const fn addresses(wide: Wide, params: &LayerParams) -> u64 {
                0 $(| match wide as u32 == Wide::$wide as u32 {
                    true => arguments!(get params $($($field).+)?),
                    false => 0,
                })*
            }

            /// The usual name. [`Request::name`](super::Request::name) gives the name in particular arguments.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$argument => $name,)*
                }
            }

            /// The access of a launch to the tensor.
            pub const fn access(self) -> Access {
                match self {
                    $(Self::$argument => Access::$access $((Self::$other))?,)*
                }
            }

            /// The unit that the tensor has elements for.
            pub const fn unit(self) -> Unit {
                match self {
                    $(Self::$argument => Unit::$unit,)*
                }
            }

            /// The constant that says whether accesses to the tensor are wide.
            pub const fn wide(self) -> Wide {
                match self {
                    $(Self::$argument => Wide::$wide,)*
                }
            }
        }
    };
    (set $params:ident $address:ident) => { () };
    (set $params:ident $address:ident $($field:ident).+) => { $params.$($field).+ = $address };
    (get $params:ident) => { 0 };
    (get $params:ident $($field:ident).+) => { $params.$($field).+ };
}

arguments! {
    Q = "q" in step.q, Read, Token, Io;
    K = "k" in step.k, Read, Token, Io;
    V = "v" in step.v, Read, Token, Io;
    /// The projection, input of the convolution of the new tokens.
    X = "x" in x, Read, Token, Chunks;
    ConvWeight = "conv_weight" in conv_weight, Read, Layer, Taps;
    Windows = "windows" in read_windows, Update unless WriteWindows, Slot, Never;
    /// The gate of the new tokens; its name with raw gates is `a`.
    Gate = "g" in step.g, Read, Token, Channels;
    /// The beta of the new tokens; its name with raw gates is `b`.
    Beta = "beta" in step.b, Read, Token, Never;
    /// The arguments from here to `PreviousBeta` belong to previous tokens, or to the tokens of a commit.
    PreviousK = "previous k" in step.previous_k, Read, Token, Io;
    PreviousV = "previous v" in step.previous_v, Read, Token, Io;
    PreviousX = "previous x" in previous_x, Read, Token, Never;
    PreviousGate = "previous g" in step.previous_g, Read, Token, Channels;
    PreviousBeta = "previous beta" in step.previous_b, Read, Token, Never;
    O = "o" in step.o, Write, Token, Io;
    Keep = "keep" in step.keep, Read, Row, Never;
    ConvBias = "conv_bias" in conv_bias, Read, Layer, Never;
    WriteWindows = "write_windows" in write_windows, States, Slot, Never;
    Z = "z" in z, Read, Token, Norm;
    NormWeight = "norm_weight" in norm_weight, Read, Layer, Norm;
    Fresh = "fresh" in step.fresh, Read, Row, Never;
    ALog = "A_log" in step.a_log, Read, Layer, Never;
    DtBias = "dt_bias" in step.dt_bias, Read, Layer, Channels;
    Pool = "pool" in step.read_pool, Update unless WritePool, Slot, States;
    WritePool = "write_pool" in step.write_pool, States, Slot, States;
    ReadSlots = "read_slots" in step.read_slots, Read, Row, Never;
    WriteSlots = "write_slots" in step.write_slots, Read, Row, Never;
    TokenSlots = "token_slots" in step.token_slots, Read, Row, Never;
    Accepted = "accepted" in step.accepted, Read, Row, Never;
    Snapshots = "snapshots" in step.snapshots, Write, Snapshot, States;
    WindowSnapshots = "window_snapshots" in window_snapshots, Write, Snapshot, Never;
    CuSeqlens = "cu_seqlens" in step.cu_seqlens, Read, Row, Never;
    Positions = "positions", Read, Row, Never;
    CheckpointSlots = "checkpoint_slots", Read, Row, Never;
    Keys = "keys", Ring, Slot, Never;
    Updates = "updates", Ring, Slot, Never;
    Decays = "decays", Ring, Slot, Never;
    /// The ring of the convolution's inputs.
    Inputs = "inputs", Ring, Slot, Never;
    PendingLen = "pending len", Read, Row, Never;
    PendingBase = "pending base", Read, Row, Never;
    Workspace = "workspace", Write, Launch, Never;
}

/// The number of arguments.
pub(crate) const TENSORS: usize = Argument::ALL.len();

const _: () = assert!(TENSORS <= 64, "a bit for each");

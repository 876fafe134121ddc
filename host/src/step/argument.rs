//! The tensors of a launch: one table of what each is called, which parameter it is, and how a launch uses it.

use gated_delta_kernels::step::LayerParams;

/// The use that a launch makes of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// A launch reads them.
    Read,
    /// A launch writes them.
    Write,
    /// A step writes them, a flush reads them.
    Ring,
    /// A launch reads them, and writes them unless states are read-only or the other tensor is given.
    Update(Argument),
    /// A launch writes them, unless states are read-only.
    States,
}

/// The thing that a tensor has elements for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Each token.
    Token,
    /// Each row: an index tensor.
    Row,
    /// The layer.
    Layer,
    /// Each slot of a pool: a launch touches those of its rows.
    Slot,
    /// Each token, a state or a window.
    Snapshot,
    /// The launch itself.
    Launch,
}

/// The load-time constant that says that accesses to a tensor are wide, and so that its address stays aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wide {
    /// None: accesses are of single elements, or the kernels have no narrow path.
    Never,
    /// `wide_io`.
    Io,
    /// `wide_io`, of a prefill.
    Chunks,
    /// `wide_io`, where each key channel has its own decay.
    Channels,
    /// `wide_state`.
    States,
    /// `wide_conv_weight`: the taps of a channel at once.
    Taps,
    /// `wide_norm`.
    Norm,
}

/// Makes [`Argument`] of the table.
macro_rules! arguments {
    ($($(#[$meta:meta])* $argument:ident = $name:literal $(in $($field:ident).+)?, $access:ident $(unless $other:ident)?, $unit:ident, $wide:ident;)*) => {
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

            /// Its parameter; 0 where it has none.
            #[inline(always)]
            pub const fn address(self, params: &LayerParams) -> u64 {
                match self {
                    $(Self::$argument => arguments!(get params $($($field).+)?),)*
                }
            }

            /// Bits of the addresses, all together, of the tensors whose accesses are as `wide` says.
            #[inline(always)]
            pub const fn addresses(wide: Wide, params: &LayerParams) -> u64 {
                0 $(| match wide as u32 == Wide::$wide as u32 {
                    true => arguments!(get params $($($field).+)?),
                    false => 0,
                })*
            }

            /// Its name, but where [`Request::name`](super::Request::name) gives another.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$argument => $name,)*
                }
            }

            /// The use that a launch makes of it.
            pub const fn access(self) -> Access {
                match self {
                    $(Self::$argument => Access::$access $((Self::$other))?,)*
                }
            }

            /// The thing that it has elements for.
            pub const fn unit(self) -> Unit {
                match self {
                    $(Self::$argument => Unit::$unit,)*
                }
            }

            /// The constant that says that accesses to it are wide.
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
    /// The projection that the convolution of the new tokens reads.
    X = "x" in x, Read, Token, Chunks;
    ConvWeight = "conv_weight" in conv_weight, Read, Layer, Taps;
    Windows = "windows" in read_windows, Update unless WriteWindows, Slot, Never;
    /// The gate of the new tokens; raw gates call it `a`.
    Gate = "g" in step.g, Read, Token, Channels;
    /// The beta of the new tokens; raw gates call it `b`.
    Beta = "beta" in step.b, Read, Token, Never;
    /// This one and the four below belong to previous tokens, or to those of a commit.
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
    /// A ring of what tokens were convolved from.
    Inputs = "inputs", Ring, Slot, Never;
    PendingLen = "pending len", Read, Row, Never;
    PendingBase = "pending base", Read, Row, Never;
    Workspace = "workspace", Write, Launch, Never;
}

/// The number of arguments.
pub(crate) const TENSORS: usize = Argument::ALL.len();

const _: () = assert!(TENSORS <= 64, "a bit for each");

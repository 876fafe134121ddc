//! The shape of a launch, and the elements of what it works on: all that the machine and its simulator know of a kernel.

/// Element type of a tensor, as a load-time constant.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 32-bit float.
    F32 = 0,
    /// Brain float.
    Bf16 = 1,
    /// Half float.
    F16 = 2,
}

/// Shape of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block (x only), a multiple of 32.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared_bytes: u32,
    /// Blocks that share a cluster, neighbours along x and, where these are all of a row, along y; 1: none. The PTX says it
    /// too: a launcher need not.
    pub cluster: u32,
    /// The launch may begin before the one before it on its stream has ended
    /// (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`), for which the kernel waits itself. Without that attribute it
    /// begins behind it, and computes the same.
    pub overlaps: bool,
}

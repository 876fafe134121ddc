//! The shape of a launch and the element types of its tensors: all that the machine and its simulator know of a kernel.

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
    /// Blocks of a cluster, neighbours along x and, if the cluster spans all of x, along y; 1: no cluster. The PTX states it too,
    /// so a launcher need not.
    pub cluster: u32,
    /// The launch may begin before the previous one on its stream has ended
    /// (`CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`); the kernel itself waits for the previous one. Without that
    /// attribute it begins after it, with the same results.
    pub overlaps: bool,
}

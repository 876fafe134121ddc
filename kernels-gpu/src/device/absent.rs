//! Placeholder functions: kernels compile against them when the target is not a GPU and the feature `simulator` is off. They are
//! never called.

pub fn nothing_runs() -> ! {
    unreachable!("kernels run on a GPU, or with the feature `simulator`")
}

/// The words of the load-time constants.
pub fn load_time_constants<R>(_: impl FnOnce(&[u32]) -> R) -> R {
    nothing_runs()
}

macro_rules! absent {
    ($([$($unsafe:ident)?] $name:ident $(<$(const $constant:ident),*>)? ($($type:ty),*) $(-> $result:ty)?;)*) => {
        $(pub $($unsafe)? fn $name $(<$(const $constant: u32),*>)? ($(_: $type),*) $(-> $result)? {
            nothing_runs()
        })*
    };
}

absent! {
    [] cluster_arrive_relaxed();
    [] cluster_arrive();
    [] cluster_wait();
    [unsafe] warpgroup_by_both<const K>(&[u32; 32], u32) -> [[f32; 32]; 2];
    [unsafe] warpgroup_by_first<const K>(&[u32; 32], u32) -> [f32; 32];
    [] warpgroup_settle_only(&mut [f32; 32]);
    [] warpgroup_settle_first(&mut [f32; 32]);
    [unsafe] warpgroup_by_triangle(&[u32; 16], u32) -> [f32; 32];
    [] warpgroup_settle_two(&mut [[f32; 32]; 2]);
    [unsafe] warpgroup_add<const K, const TOKENS>(
        &mut [f32; 64],
        (&[u32; 16], u32),
        &mut [f32; 32],
        (&[u32; 16], u32)
    );
    [unsafe] warpgroup_add_alone<const K, const TOKENS>(&mut [f32; 64], (&[u32; 16], u32));
    [] warpgroup_settle<const K>(&mut [f32; 64]);
}

//! Types that threads may share and send. This file does not compile if one of them is not `Send` and `Sync`.

use crate::driver::{DeviceMemory, Driver, Event, Function, Graph, Module, Stream};
use crate::raw::{Kernel, Recipe};
use crate::*;

const fn is_shared<T: Send + Sync>() {}

#[cfg(feature = "self-test")]
const _: () = is_shared::<SelfTest>();

const _: () = {
    is_shared::<Library>();
    is_shared::<Plan>();
    is_shared::<Context>();
    is_shared::<Device>();
    is_shared::<Driver>();
    is_shared::<Stream>();
    is_shared::<Event>();
    is_shared::<Graph>();
    is_shared::<Module>();
    is_shared::<Function<'_>>();
    is_shared::<DeviceMemory>();
    is_shared::<StreamRef<'_>>();
    is_shared::<Tensor<'_>>();
    is_shared::<Gdn<'_>>();
    is_shared::<GdnCommit<'_>>();
    is_shared::<Kda<'_>>();
    is_shared::<KdaCommit<'_>>();
    is_shared::<Kernel>();
    is_shared::<Recipe>();
    is_shared::<IndexReport>();
    is_shared::<Error>();
};

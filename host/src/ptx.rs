//! The PTX text of every entry, as `cargo xtask ptx` made it.

use gated_delta_kernels::entries::Entry;

macro_rules! embed {
    ($($symbol:ident = $operator:ident::$body:ident<$($parameter:tt),*>;)*) => {
        /// PTX of `entry`, with its load-time constants still as symbols; `None` for an entry newer than this library.
        pub(crate) fn text(entry: Entry) -> Option<&'static str> {
            match entry {
                $(Entry::$symbol => Some(include_str!(concat!("../ptx/", stringify!($symbol), ".ptx"))),)*
                _ => None,
            }
        }
    };
}

gated_delta_kernels::for_each_entry!(embed);

//! The PTX text of every entry, [packed] by `cargo xtask ptx`.

mod packed;

use gated_delta_kernels::entries::Entry;

use crate::error::Error;

macro_rules! embed {
    ($($symbol:ident = $operator:ident::$body:ident<$($parameter:tt),*>;)*) => {
        /// The packed text of `entry`; `None` for an entry newer than this library.
        fn packed_of(entry: Entry) -> Option<&'static [u8]> {
            match entry {
                $(Entry::$symbol => Some(
                    include_bytes!(concat!("../ptx/", stringify!($symbol), ".packed")),
                ),)*
                _ => None,
            }
        }
    };
}

gated_delta_kernels::for_each_entry!(embed);

/// PTX of `entry`, in which its load-time constants are still symbols. Every call unpacks the text, which takes two milliseconds;
/// compiling a kernel takes tens of milliseconds.
///
/// # Errors
/// [`Error::Specialise`] for an entry newer than this library.
pub(crate) fn text(entry: Entry) -> Result<String, Error> {
    let defect = |what: &str| Error::Specialise(format!("{what} for {}", entry.name()));
    let packed = packed_of(entry).ok_or_else(|| defect("no PTX"))?;
    packed::unpacked(packed).ok_or_else(|| defect("damaged PTX"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The packed texts have a seventh of the size of the PTX. A registry takes packages of at most 10 MiB.
    #[test]
    fn all_entries_are_light() {
        let bytes = |&entry: &Entry| packed_of(entry).unwrap().len();
        let embedded: usize = Entry::ALL.iter().map(bytes).sum();
        assert!(embedded < 8_000_000, "{embedded} bytes embedded");
    }
}

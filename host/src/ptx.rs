//! The PTX text of every entry from `cargo xtask ptx`, [packed] by `build.rs`.

mod packed;

use gated_delta_kernels::entries::Entry;

use crate::error::Error;

macro_rules! embed {
    ($($symbol:ident = $operator:ident::$body:ident<$($parameter:tt),*>;)*) => {
        /// The packed text of `entry`; `None` for an entry newer than this library.
        fn packed_of(entry: Entry) -> Option<&'static [u8]> {
            match entry {
                $(Entry::$symbol => Some(
                    include_bytes!(concat!(env!("OUT_DIR"), "/", stringify!($symbol), ".packed")),
                ),)*
                _ => None,
            }
        }

        #[cfg(test)]
        const FILES: &[(Entry, &str)] =
            &[$((Entry::$symbol, include_str!(concat!("../ptx/", stringify!($symbol), ".ptx"))),)*];
    };
}

gated_delta_kernels::for_each_entry!(embed);

/// PTX of `entry`, in which its load-time constants are still symbols. Every call unpacks it, which takes two
/// milliseconds; compiling takes tens of them.
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

    #[test]
    fn nothing_but_comments_is_lost() {
        assert_eq!(FILES.len(), Entry::ALL.len());
        for &(entry, file) in FILES {
            let lines = file.lines().filter(|line| !line.starts_with("//"));
            let text = text(entry).unwrap();
            assert!(text.lines().eq(lines), "{}", entry.name());
            assert!(text.starts_with(".version "), "{}", entry.name());
        }
    }

    #[test]
    fn all_entries_are_light() {
        let bytes = |&(entry, _): &(Entry, &str)| packed_of(entry).unwrap().len();
        let embedded: usize = FILES.iter().map(bytes).sum();
        let files: usize = FILES.iter().map(|(_, file)| file.len()).sum();
        assert!(embedded < files / 7, "{embedded} bytes embedded of {files}");
    }
}

//! The PTX text of every entry from `cargo xtask ptx`, without comments, compressed by `build.rs`.

use gated_delta_kernels::entries::Entry;
use miniz_oxide::inflate::decompress_to_vec;

use crate::error::Error;

macro_rules! embed {
    ($($symbol:ident = $operator:ident::$body:ident<$($parameter:tt),*>;)*) => {
        /// The compressed text of `entry`; `None` for an entry newer than this library.
        fn compressed(entry: Entry) -> Option<&'static [u8]> {
            match entry {
                $(Entry::$symbol => Some(
                    include_bytes!(concat!(env!("OUT_DIR"), "/", stringify!($symbol), ".deflate")),
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

/// PTX of `entry`, in which its load-time constants are still symbols. Every call decompresses it, which takes less than a
/// millisecond; compiling takes tens of them.
///
/// # Errors
/// [`Error::Specialise`] for an entry newer than this library.
pub(crate) fn text(entry: Entry) -> Result<String, Error> {
    let defect = |what: &str| Error::Specialise(format!("{what} for {}", entry.name()));
    let compressed = compressed(entry).ok_or_else(|| defect("no PTX"))?;
    let text = decompress_to_vec(compressed).map_err(|_| defect("damaged PTX"))?;
    String::from_utf8(text).map_err(|_| defect("PTX that is no UTF-8"))
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
        let bytes = |&(entry, _): &(Entry, &str)| compressed(entry).unwrap().len();
        let embedded: usize = FILES.iter().map(bytes).sum();
        let files: usize = FILES.iter().map(|(_, file)| file.len()).sum();
        assert!(embedded < files / 4, "{embedded} bytes embedded of {files}");
    }
}

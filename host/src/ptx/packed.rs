//! The packed form of PTX: register numbers are relative, and the text is deflated. `cargo xtask ptx` packs, and the library
//! unpacks. Relative numbers save a third.
//!
//! A register's number is replaced by its difference from the number at the same place in the previous line of the same kind.
//! Lines are of the same kind if they are equal up to their first register:
//!
//! ```text
//! fma.rn.f32 %r120,%r41,%r7,%r112;      fma.rn.f32 %r120,%r41,%r7,%r112;
//! fma.rn.f32 %r121,%r41,%r8,%r113;      fma.rn.f32 %r1,%r0,%r1,%r1;
//! ```

use std::fmt::Write;

use miniz_oxide::{deflate, inflate};

/// Compression level. Higher levels take twice the time and save two thousandths.
const LEVEL: u8 = 6;
/// Number of kinds of lines that are distinguished. Kinds with the same hash share their numbers, which only costs bytes.
const KINDS: usize = 1024;
/// Number of registers of a line that are distinguished. All further registers share the numbers of the last one.
const PLACES: usize = 8;

/// `text`, packed.
#[allow(dead_code)] // the library does not pack
pub fn packed(text: &str) -> Vec<u8> {
    let text = rewritten(text, |number, last| [number.wrapping_sub(last), number]);
    deflate::compress_to_vec(text.as_bytes(), LEVEL)
}

/// The text that was [`packed`]. `None` if the bytes are damaged.
pub fn unpacked(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8(inflate::decompress_to_vec(bytes).ok()?).ok()?;
    Some(rewritten(&text, |number, last| {
        [number.wrapping_add(last); 2]
    }))
}

/// Rewrites register numbers. `of` takes the number in the text and the previous register's number. It returns the number to
/// write and this register's number.
fn rewritten(text: &str, of: impl Fn(i64, i64) -> [i64; 2]) -> String {
    let mut all = vec![[0; PLACES]; KINDS];
    let mut out = String::new();
    for line in text.lines() {
        let mut parts = line.split('%');
        let before = parts.next().unwrap_or_default();
        out.push_str(before);
        let last = &mut all[kind(before)];
        for (place, part) in parts.enumerate() {
            let rest = part.trim_start_matches(|c: char| c.is_ascii_lowercase());
            let class = &part[..part.len() - rest.len()];
            let unsigned = rest.strip_prefix('-').unwrap_or(rest);
            let behind = unsigned.trim_start_matches(|c: char| c.is_ascii_digit());
            let Ok(number) = rest[..rest.len() - behind.len()].parse() else {
                // A special register, or a declaration of registers.
                out.extend(["%", part]);
                continue;
            };
            let last = &mut last[place.min(PLACES - 1)];
            let [written, own] = of(number, *last);
            *last = own;
            let _ = write!(out, "%{class}{written}{behind}"); // a `String` takes everything
        }
        out.push('\n');
    }
    out
}

/// Hash of the start of a line (FNV-1a).
fn kind(before: &str) -> usize {
    let hash = before.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    (hash ^ hash >> 15) as usize % KINDS
}

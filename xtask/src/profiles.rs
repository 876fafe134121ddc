//! Values for the load-time constants, with which the entries are assembled here.
//!
//! The columns together take every branch that a constant decides: each element type with wide and with
//! narrow accesses, each index type, each flag both ways. A symbol that is not in the table is an error.

use anyhow::{Context, Result, bail};

use crate::entries::Entry;

/// Names of the columns.
pub const PROFILES: [&str; 6] = [
    "canonical",
    "f32",
    "f16",
    "narrow",
    "narrow-f32",
    "narrow-f16",
];

const NONE: u32 = u32::MAX;
const ONE: u32 = 1.0f32.to_bits();
const TWO: u32 = 2.0f32.to_bits();
/// 1/√128 and 1/√64.
const SCALE_128: u32 = 0x3db5_04f3;
const SCALE_64: u32 = 0x3e00_0000;

#[rustfmt::skip]
const VALUES: &[(&str, [u32; PROFILES.len()])] = &[
    ("GD_H",            [16,        16,        16,        4,         32,       1]),
    ("GD_RATIO",        [2,         1,         4,         2,         1,        8]),
    ("GD_TILED",        [0,         1,         0,         1,         0,        1]),
    ("GD_L2NORM",       [1,         0,         1,         0,         1,        0]),
    ("GD_SCALE",        [SCALE_128, SCALE_64,  ONE,       SCALE_128, SCALE_64, ONE]),
    ("GD_GIVEN_GATES",  [0,         1,         0,         1,         0,        1]),
    ("GD_BETA_SCALE",   [ONE,       TWO,       TWO,       ONE,       TWO,      ONE]),
    ("GD_UPDATE_STATE", [1,         1,         0,         1,         1,        0]),
    ("GD_NULL_SLOT",    [NONE,      0,         NONE,      NONE,      0,        7]),
    ("GD_READ_INDEX",   [1,         2,         3,         0,         1,        2]),
    ("GD_WRITE_INDEX",  [0,         2,         3,         0,         1,        3]),
    ("GD_Q_ELEMENT",    [1,         0,         2,         1,         0,        2]),
    ("GD_K_ELEMENT",    [1,         0,         2,         1,         0,        2]),
    ("GD_V_ELEMENT",    [1,         0,         2,         1,         0,        2]),
    ("GD_O_ELEMENT",    [1,         0,         2,         1,         0,        2]),
    ("GD_A_ELEMENT",    [1,         0,         2,         1,         0,        2]),
    ("GD_B_ELEMENT",    [1,         0,         2,         1,         0,        2]),
    ("GD_WIDE_IO",      [1,         1,         1,         0,         0,        0]),
    ("GD_WIDE_STATE",   [1,         1,         1,         0,         0,        0]),
    ("GD_Q_ROW",        [2048,      2048,      8192,      515,       4097,     131]),
    ("GD_Q_HEAD",       [128,       128,       128,       129,       129,      131]),
    ("GD_K_ROW",        [2048,      2048,      8192,      515,       4097,     131]),
    ("GD_K_HEAD",       [128,       128,       128,       129,       129,      131]),
    ("GD_V_ROW",        [4096,      2048,      8192,      1031,      4097,     1025]),
    ("GD_V_HEAD",       [128,       128,       128,       129,       129,      131]),
    ("GD_O_ROW",        [4096,      2048,      8192,      1024,      4096,     1024]),
    ("GD_O_HEAD",       [128,       128,       128,       128,       128,      128]),
    ("GD_A_ROW",        [32,        16,        64,        9,         33,       8]),
    ("GD_B_ROW",        [32,        16,        64,        9,         33,       8]),
    ("GD_READ_SLOT",    [524288,    262144,    1048576,   131073,    524289,   131073]),
    ("GD_WRITE_SLOT",   [524288,    262144,    1048576,   131073,    524289,   131073]),
    ("GD_NUMBER",       [12345,     0,         NONE,      1,         7,        ONE]),
    ("GD_FACTOR",       [ONE,       TWO,       0,         ONE,       TWO,      SCALE_64]),
];

/// The constants of `entry` in the column `profile`.
pub fn values(entry: Entry, profile: &str) -> Result<Vec<(&'static str, u32)>> {
    let Some(column) = PROFILES.iter().position(|name| *name == profile) else {
        bail!("no profile {profile}; there are {}", PROFILES.join(", "));
    };
    let value = |&symbol: &&'static str| {
        let row = VALUES.iter().find(|row| row.0 == symbol);
        let row = row.with_context(|| {
            format!(
                "{}: xtask/src/profiles.rs has no values for {symbol}",
                entry.name()
            )
        })?;
        Ok((symbol, row.1[column]))
    };
    entry.symbols().iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_constants_of_the_entries_and_no_others() {
        for &entry in Entry::ALL {
            for profile in PROFILES {
                assert_eq!(values(entry, profile).unwrap().len(), entry.symbols().len());
            }
        }
        for (symbol, _) in VALUES {
            let used = Entry::ALL
                .iter()
                .any(|entry| entry.symbols().contains(symbol));
            assert!(used, "no entry has {symbol}");
        }
    }
}

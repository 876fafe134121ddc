//! Profiles: values of the load-time constants, to assemble the entries with.
//!
//! The columns of the table together take every branch that a constant decides: each element type with wide and with narrow accesses,
//! each index type, each flag both ways. In this order they are a verify with snapshots, a decode, a packed resume, a packed update with
//! snapshots, packed token slots, and a commit. Entries whose constants decide the layout and element type of states, or the operator,
//! are assembled with each of these and every column. Tokens and value heads are limited to the entry's maximum. A symbol without a
//! row in the table is an error.

use anyhow::{Context, Result};
use gated_delta_kernels::constants::Element;
use gated_delta_kernels::launch::Family;
use gated_delta_kernels::step::StepConstants;

use crate::assemble::machine_of;
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
/// 1/√128; below, 1/√64.
const SCALE_128: u32 = 0x3db5_04f3;
const SCALE_64: u32 = 0x3e00_0000;
const EPS: u32 = 1e-6f32.to_bits();
const MINUS_FIVE: u32 = (-5.0f32).to_bits();

#[rustfmt::skip]
const VALUES: &[(&str, [u32; PROFILES.len()])] = &[
    ("GD_H",                 [16,        16,        16,        4,         32,        1]),
    ("GD_RATIO",             [2,         1,         4,         2,         1,         8]),
    ("GD_TILED",             [0,         1,         0,         1,         0,         1]),
    ("GD_L2NORM",            [1,         0,         1,         0,         1,         0]),
    ("GD_SCALE",             [SCALE_128, SCALE_64,  ONE,       SCALE_128, SCALE_64,  ONE]),
    ("GD_BETA_SCALE",        [ONE,       TWO,       TWO,       ONE,       TWO,       ONE]),
    ("GD_UPDATE_STATE",      [1,         1,         0,         1,         0,         0]),
    ("GD_NULL_SLOT",         [NONE,      0,         NONE,      NONE,      0,         7]),
    ("GD_READ_INDEX",        [1,         2,         3,         0,         1,         2]),
    ("GD_WRITE_INDEX",       [0,         2,         3,         0,         1,         3]),
    ("GD_Q_ELEMENT",         [1,         0,         2,         1,         0,         2]),
    ("GD_K_ELEMENT",         [1,         0,         2,         1,         0,         2]),
    ("GD_V_ELEMENT",         [1,         0,         2,         1,         0,         2]),
    ("GD_O_ELEMENT",         [1,         0,         2,         1,         0,         2]),
    ("GD_B_ELEMENT",         [1,         0,         2,         1,         0,         2]),
    ("GD_WIDE_IO",           [1,         1,         1,         0,         0,         0]),
    ("GD_WIDE_STATE",        [1,         1,         1,         0,         0,         0]),
    ("GD_Q_ROW",             [2048,      2048,      8192,      515,       4097,      131]),
    ("GD_Q_HEAD",            [128,       128,       128,       129,       129,       131]),
    ("GD_K_ROW",             [2048,      2048,      8192,      515,       4097,      131]),
    ("GD_K_HEAD",            [128,       128,       128,       129,       129,       131]),
    ("GD_V_ROW",             [4096,      2048,      8192,      1031,      4097,      1025]),
    ("GD_V_HEAD",            [128,       128,       128,       129,       129,       131]),
    ("GD_O_ROW",             [4096,      2048,      8192,      1024,      4096,      1024]),
    ("GD_O_HEAD",            [128,       128,       128,       128,       128,       128]),
    ("GD_B_ROW",             [32,        16,        64,        9,         33,        8]),
    ("GD_READ_SLOT",         [524288,    262144,    1048576,   131073,    524289,    131073]),
    ("GD_WRITE_SLOT",        [524288,    262144,    1048576,   131073,    524289,    131073]),
    ("GD_GATE",              [1,         0,         2,         1,         0,         2]),
    ("GD_LOWER_BOUND",       [0,         0,         MINUS_FIVE, 0,        0,         MINUS_FIVE]),
    ("GD_HAS_A_LOG",         [1,         0,         1,         1,         0,         0]),
    ("GD_HAS_DT_BIAS",       [1,         0,         1,         0,         0,         1]),
    ("GD_GATE_ROWS_H",       [0,         0,         1,         0,         0,         1]),
    ("GD_BETA_LOGIT",        [1,         0,         1,         1,         0,         0]),
    ("GD_TOKENS",            [4,         1,         8,         16,        8,         0]),
    ("GD_PREVIOUS_TOKENS",   [0,         0,         8,         0,         0,         4]),
    ("GD_HAS_SNAPSHOTS",     [1,         0,         0,         1,         0,         0]),
    ("GD_TOKEN_INDEX",       [0,         0,         0,         0,         2,         0]),
    ("GD_ACCEPTED_INDEX",    [0,         0,         0,         0,         1,         0]),
    ("GD_CU_SEQLENS_INDEX",  [0,         0,         3,         1,         2,         0]),
    ("GD_KEEP_INDEX",        [0,         0,         1,         0,         0,         2]),
    ("GD_G_ELEMENT",         [1,         0,         2,         1,         0,         2]),
    ("GD_Q_TOKEN",           [2048,      0,         2048,      515,       4097,      0]),
    ("GD_K_TOKEN",           [2048,      0,         2048,      515,       4097,      0]),
    ("GD_V_TOKEN",           [4096,      0,         8192,      1031,      4097,      0]),
    ("GD_O_TOKEN",           [4096,      0,         8192,      1024,      4096,      0]),
    ("GD_G_ROW",             [16384,     2048,      8192,      1031,      4097,      0]),
    ("GD_G_TOKEN",           [4096,      0,         8192,      1031,      4097,      0]),
    ("GD_G_HEAD",            [128,       1,         128,       129,       1,         131]),
    ("GD_B_TOKEN",           [32,        0,         64,        9,         33,        0]),
    ("GD_PREVIOUS_K_ROW",    [0,         0,         16384,     0,         0,         527]),
    ("GD_PREVIOUS_K_TOKEN",  [0,         0,         2048,      0,         0,         131]),
    ("GD_PREVIOUS_K_HEAD",   [0,         0,         128,       0,         0,         131]),
    ("GD_PREVIOUS_V_ROW",    [0,         0,         65536,     0,         0,         4101]),
    ("GD_PREVIOUS_V_TOKEN",  [0,         0,         8192,      0,         0,         1025]),
    ("GD_PREVIOUS_V_HEAD",   [0,         0,         128,       0,         0,         131]),
    ("GD_PREVIOUS_G_ROW",    [0,         0,         65536,     0,         0,         4101]),
    ("GD_PREVIOUS_G_TOKEN",  [0,         0,         8192,      0,         0,         1025]),
    ("GD_PREVIOUS_G_HEAD",   [0,         0,         128,       0,         0,         131]),
    ("GD_PREVIOUS_B_ROW",    [0,         0,         512,       0,         0,         33]),
    ("GD_PREVIOUS_B_TOKEN",  [0,         0,         64,        0,         0,         8]),
    ("GD_SNAPSHOT_ROW",      [2097152,   0,         0,         2097169,   0,         0]),
    ("GD_SNAPSHOT_TOKEN",    [524288,    0,         0,         131073,    0,         0]),
    ("GD_TOKEN_SLOTS_ROW",   [0,         0,         0,         0,         8,         0]),
    ("GD_FRESH_INDEX",        [0,          0,          1,          0,          2,          3]),
    ("GD_TAPS",               [4,          0,          4,          3,          4,          2]),
    ("GD_CONV_ACTIVATION",    [1,          0,          1,          0,          1,          1]),
    ("GD_HAS_CONV_BIAS",      [0,          0,          1,          1,          1,          0]),
    ("GD_X_ELEMENT",          [1,          0,          2,          1,          0,          2]),
    ("GD_CONV_WEIGHT_ELEMENT", [1,          0,          0,          1,          0,          2]),
    ("GD_CONV_BIAS_ELEMENT",  [0,          0,          0,          1,          0,          0]),
    ("GD_WIDE_CONV_WEIGHT",   [1,          0,          1,          0,          0,          0]),
    ("GD_X_ROW",              [8192,       0,          16384,      2064,       12288,      1283]),
    ("GD_X_TOKEN",            [8192,       0,          16384,      2064,       12288,      1283]),
    ("GD_CONV_WEIGHT_CHANNEL", [4,          0,          4,          3,          5,          2]),
    ("GD_READ_WINDOWS_SLOT",  [24576,      0,          49152,      6192,       36864,      1281]),
    ("GD_READ_WINDOWS_CHANNEL", [3,          0,          1,          4,          1,          1]),
    ("GD_READ_WINDOWS_INPUT", [1,          0,          16384,      1,          12288,      1281]),
    ("GD_WRITE_WINDOWS_SLOT", [24576,      0,          49152,      6192,       36864,      1281]),
    ("GD_WRITE_WINDOWS_CHANNEL", [3,          0,          1,          4,          1,          1]),
    ("GD_WRITE_WINDOWS_INPUT", [1,          0,          16384,      1,          12288,      1281]),
    ("GD_PREVIOUS_X_ROW",     [0,          0,          131072,     0,          0,          5132]),
    ("GD_PREVIOUS_X_TOKEN",   [0,          0,          16384,      0,          0,          1283]),
    ("GD_HAS_WINDOW_SNAPSHOTS", [1,          0,          0,          1,          0,          0]),
    ("GD_WINDOW_SNAPSHOT_ROW", [98304,      0,          0,          98305,      0,          0]),
    ("GD_WINDOW_SNAPSHOT_TOKEN", [24576,      0,          0,          6145,       0,          0]),
    ("GD_WINDOW_SNAPSHOT_CHANNEL", [3,          0,          0,          1,          0,          0]),
    ("GD_WINDOW_SNAPSHOT_INPUT", [1,          0,          0,          2048,       0,          0]),
    ("GD_HAS_NORM",           [1,          0,          1,          1,          0,          1]),
    ("GD_NORM_ACTIVATION",    [1,          0,          2,          2,          0,          1]),
    ("GD_NORM_EPS",           [EPS,        0,          EPS,        EPS,        0,          EPS]),
    ("GD_Z_ELEMENT",          [1,          0,          2,          1,          0,          2]),
    ("GD_NORM_WEIGHT_ELEMENT", [1,          0,          0,          1,          0,          2]),
    ("GD_WIDE_NORM",          [1,          0,          1,          0,          1,          0]),
    ("GD_Z_ROW",              [12288,      0,          8192,       1031,       0,          1025]),
    ("GD_Z_TOKEN",            [12288,      0,          8192,       1031,       0,          0]),
    ("GD_Z_HEAD",             [128,        0,          128,        129,        0,          131]),
    ("GD_POSITIONS_INDEX",   [2,         0,         3,         1,         0,         2]),
    ("GD_CHECKPOINT_INDEX",  [1,         0,         2,         0,         3,         0]),
    ("GD_CHECKPOINT_EVERY",  [64,        0,         128,       0,         2048,      0]),
    ("GD_RESERVED",          [0,         0,         0,         0,         0,         0]),
    ("GD_SPLIT",             [0,         2048,      0,          64,        0,          192]),
    ("GD_PASS",              [0,         1,         0,          0,         0,          1]),
    ("GD_PENDING",           [8,         8,         4,         8,         1,         8]),
    ("GD_RING",              [9,         16,        5,         9,         2,         9]),
    ("GD_KEYS_ELEMENT",      [1,         0,         2,         1,         0,         2]),
    ("GD_KEYS_SLOT",         [18432,     32768,     10240,     4608,      8192,      1152]),
    ("GD_UPDATES_ELEMENT",   [0,         1,         1,         0,         1,         0]),
    ("GD_UPDATES_SLOT",      [36864,     32768,     40960,     9216,      8192,      9216]),
    ("GD_DECAYS_SLOT",       [36864,     256,       40960,     9216,      8192,      9216]),
    ("GD_PENDING_LEN_INDEX", [1,         2,         3,         1,         2,         3]),
    ("GD_PENDING_BASE_INDEX", [1,         2,         3,         3,         1,         2]),
    ("GD_INPUTS_SLOT",       [73728,     64,        82000,     18432,     64,        9216]),
    ("GD_STATE_F16",         [0,         0,         1,         0,         1,         1]),
    ("GD_BLOCKS_PER_SM",     [4,         2,         2,         1,         1,         1]),
    // The machine depends on the architecture: see `assemble::substitute`.
    ("GD_MACHINE",           [0,         0,         0,         0,         0,         0]),
    // These are 0 in every column and also assembled with 1: see [`of`].
    ("GD_STATE_F32",         [0,         0,         0,         0,         0,         0]),
    ("GD_STATE_V_LAST",      [0,         0,         0,         0,         0,         0]),
    ("GD_PER_CHANNEL",       [0,         0,         0,         0,         0,         0]),
    ("GD_NUMBER",            [12345,     0,         NONE,      1,         7,         ONE]),
    ("GD_FACTOR",            [ONE,       TWO,       0,         ONE,       TWO,       SCALE_64]),
];

/// Values to assemble an entry with: a column of the table, and the constants that are set over it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Profile {
    column: usize,
    /// Constants set to 1 over the column, T and T′ to 16, each with its name in the profile's name.
    ways: Vec<(&'static str, &'static str)>,
}

impl Profile {
    /// Name of the column and of the constants set over it, joined by `-`.
    pub fn name(&self) -> String {
        let ways = self.ways.iter().map(|(name, _)| *name);
        let parts: Vec<_> = [PROFILES[self.column]].into_iter().chain(ways).collect();
        parts.join("-")
    }

    /// Whether this is the first column with nothing set over it.
    pub fn is_canonical(&self) -> bool {
        self.column == 0 && self.ways.is_empty()
    }
}

/// Profiles of `entry`: each column with every combination of the state layouts, state elements and operators that are constants of it,
/// and with 16 new or previous tokens where its family else has fewer.
pub fn of(entry: Entry) -> Vec<Profile> {
    let mut ways = vec![vec![]];
    let computes = entry.computes();
    let mut both = |way| {
        let with = ways.clone().into_iter().map(|mut of: Vec<_>| {
            of.push(way);
            of
        });
        ways.extend(with.collect::<Vec<_>>());
    };
    if computes.is_some_and(|it| it.has_any_elements()) {
        both(("states32", "GD_STATE_F32"));
    }
    if computes.is_some_and(|it| it.has_any_states()) {
        both(("vlast", "GD_STATE_V_LAST"));
    }
    if computes.is_some_and(|it| it.per_channel.is_none()) {
        both(("kda", "GD_PER_CHANNEL"));
    }
    if computes.is_some_and(|it| it.max_tokens() > it.family.max_tokens()) {
        both(("t16", "GD_TOKENS"));
    }
    if computes.is_some_and(|it| it.takes_sets()) {
        both(("resume16", "GD_PREVIOUS_TOKENS"));
    }
    let columns = 0..PROFILES.len();
    let of_column = |column| {
        ways.iter().map(move |ways| Profile {
            column,
            ways: ways.clone(),
        })
    };
    columns.flat_map(of_column).collect()
}

/// The profile of `entry` called `name`.
pub fn find(entry: Entry, name: &str) -> Result<Profile> {
    let all = of(entry);
    let found = all.iter().find(|profile| profile.name() == name);
    let names: Vec<_> = all.iter().map(Profile::name).collect();
    let found = found.with_context(|| format!("no profile {name}; there are {}", names.join(", ")));
    found.cloned()
}

/// Whether other constants give the number of blocks of a multiprocessor: for rows of one token in a prefill, and steps without
/// deferred write-back.
fn is_by_others(family: Family) -> bool {
    let is_step = family.is_parallel() && !family.is_deferred() || family == Family::RECURRENT;
    family.takes_singles() || is_step
}

/// The row of the table for a load-time constant of `entry`.
fn row_of(entry: Entry, symbol: &str) -> Result<&'static (&'static str, [u32; PROFILES.len()])> {
    let row = VALUES.iter().find(|row| row.0 == symbol);
    row.with_context(|| {
        format!(
            "{}: xtask/src/profiles.rs has no values for {symbol}",
            entry.name()
        )
    })
}

/// The load-time constants of `entry` and their values in `profile`, for an architecture.
pub fn values(
    entry: Entry,
    profile: &Profile,
    architecture: &str,
) -> Result<Vec<(&'static str, u32)>> {
    let column = profile.column;
    let has = |symbol: &str| profile.ways.iter().any(|(_, of)| *of == symbol);
    let family = entry.computes().map(|computes| computes.family);
    let of_channels = entry.computes().and_then(|computes| computes.per_channel);
    let of_channels = of_channels.unwrap_or(has("GD_PER_CHANNEL"));
    let max_tokens = family.map_or(NONE, Family::max_tokens);
    let value = |&symbol: &&'static str| {
        let row = row_of(entry, symbol)?;
        let is_chunked = family.is_some_and(Family::is_chunked);
        let most = match symbol {
            // A prefill has none of these.
            "GD_TOKENS"
            | "GD_PREVIOUS_TOKENS"
            | "GD_TOKEN_INDEX"
            | "GD_ACCEPTED_INDEX"
            | "GD_KEEP_INDEX"
            | "GD_HAS_SNAPSHOTS"
            | "GD_HAS_WINDOW_SNAPSHOTS"
                if is_chunked =>
            {
                0
            }
            "GD_RATIO" => entry.max_ratio(),
            "GD_TOKENS" | "GD_PREVIOUS_TOKENS" if has(symbol) => return Ok((symbol, 16)),
            _ if has(symbol) => return Ok((symbol, 1)),
            "GD_BLOCKS_PER_SM" if family.is_some_and(is_by_others) => {
                let of = |symbol| Ok::<_, anyhow::Error>(row_of(entry, symbol)?.1[column]);
                let tokens = |symbol| match has(symbol) {
                    true => Ok(16),
                    false => of(symbol).map(|tokens| tokens.min(max_tokens)),
                };
                let constants = StepConstants {
                    tokens: tokens("GD_TOKENS")?,
                    previous_tokens: tokens("GD_PREVIOUS_TOKENS")?,
                    wide_state: of("GD_WIDE_STATE")?,
                    wide_io: of("GD_WIDE_IO")?,
                    state_f16: of("GD_STATE_F16")?,
                    state_f32: u32::from(has("GD_STATE_F32")),
                    k_element: of("GD_K_ELEMENT")?,
                    state_v_last: u32::from(has("GD_STATE_V_LAST")),
                    per_channel: u32::from(of_channels),
                    machine: machine_of(architecture),
                    ..bytemuck::Zeroable::zeroed()
                };
                if family.is_some_and(Family::takes_singles) {
                    let v = entry.computes().map_or(0, |computes| computes.v);
                    let blocks = constants.blocks_of_singles(v);
                    return Ok((symbol, entry.blocks_per_sm(blocks)));
                }
                if family == Some(Family::RECURRENT) {
                    return Ok((symbol, entry.blocks_per_sm(constants.blocks_of_two_warps())));
                }
                if family.is_some_and(|it| !it.layer) {
                    let takes_sets = entry.computes().is_some_and(|it| it.takes_sets());
                    let widens = takes_sets && constants.state_f32 == 0;
                    let blocks = constants.blocks_of_drafts(constants.machine, widens);
                    return Ok((symbol, entry.blocks_per_sm(blocks)));
                }
                let element = entry.computes().and_then(|computes| computes.element);
                let is_f32 = element == Some(Element::F32);
                let blocks = constants.blocks_of_layer(constants.machine, is_f32);
                return Ok((symbol, entry.blocks_per_sm(blocks)));
            }
            // As `StepConstants::blocks_by_tokens` gives.
            "GD_BLOCKS_PER_SM" if of_channels => 2,
            "GD_TOKENS" | "GD_PREVIOUS_TOKENS" => max_tokens,
            _ => NONE,
        };
        Ok((symbol, row.1[column].min(most)))
    };
    entry.symbols().iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_constants_of_the_entries_and_no_others() {
        for &entry in Entry::ALL {
            for profile in of(entry) {
                let values = values(entry, &profile, "sm_90").unwrap();
                assert_eq!(values.len(), entry.symbols().len());
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

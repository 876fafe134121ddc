//! Makes a Rust `match` of the lines of `src/step/select/tiles.txt`.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let here = env::var("CARGO_MANIFEST_DIR")?;
    let here = Path::new(&here);
    println!("cargo::rerun-if-changed=build.rs");
    tiles(&here.join("src/step/select/tiles.txt"))
}

/// Leaves `rows` and `UNSELECTED` for `src/step/select/table.rs`: an arm for each line, in order. An entry that does not exist, or a line
/// that none can reach, does not compile.
fn tiles(table: &Path) -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={}", table.display());
    let (mut arms, mut unselected) = (String::new(), String::new());
    for line in fs::read_to_string(table)?.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [] | ["#", ..] => {}
            ["unselected", name, _, ..] => unselected += &format!("Entry::{name}, "),
            [of, family, layout, state, dims, ref rest @ ..] => {
                let arm = arm(of, family, layout, state, dims, rest);
                arms += &arm.ok_or_else(|| format!("tiles.txt: what is {line}?"))?;
            }
            _ => return Err(format!("tiles.txt: what is {line}?").into()),
        }
    }
    let text = format!(
        "/// The entries of a kind, by the largest B * HV of each.\n\
        #[deny(unreachable_patterns)]\n\
        pub fn rows(kind: Kind) -> &'static [Row] {{\n\
        let dims = [kind.k_dim, kind.v_dim];\n\
        match (kind.family, kind.per_channel, kind.layout, kind.state_of_entries(), dims) {{\n\
        {arms}_ => &[],\n}}\n}}\n\n\
        /// Entries that no launch selects.\n\
        #[cfg(test)]\n\
        pub const UNSELECTED: &[Entry] = &[{unselected}];\n"
    );
    Ok(fs::write(
        Path::new(&env::var("OUT_DIR")?).join("tiles.rs"),
        text,
    )?)
}

/// The arm of a line; `None` where a word is none of the table's.
fn arm(
    of: &str,
    family: &str,
    layout: &str,
    state: &str,
    dims: &str,
    rest: &[&str],
) -> Option<String> {
    let (tiles, conditions): (Vec<&str>, Vec<&str>) = rest.iter().partition(|it| it.contains(':'));
    let guards: Option<Vec<String>> = conditions.into_iter().map(guard).collect();
    let guards = guards?.join(" && ");
    let guard = if guards.is_empty() {
        guards
    } else {
        format!(" if {guards}")
    };
    let per_channel = match of {
        "gdn" => "false",
        "kda" => "true",
        "any" => "_",
        _ => return None,
    };
    let of_layout = match layout {
        "klast" => "StateLayout::KLast",
        "vlast" => "StateLayout::VLast",
        "any" => "_",
        _ => return None,
    };
    let (of_state, element) = match state {
        "bf16" => ("DType::Bf16", "bf16_"),
        "f32" => ("DType::F32", "f32_"),
        "any" => ("_", ""),
        _ => return None,
    };
    // Where a load-time constant decides, a name says nothing.
    let of_names = match state {
        "any" => String::new(),
        "f32" if family.ends_with("parallel") => String::new(),
        _ => format!("{layout}_"),
    };
    let states = of_names + element;
    let (k, v) = dims
        .strip_prefix('k')?
        .split_once('v')
        .unwrap_or((&dims[1..], &dims[1..]));
    let rows: Option<String> = (tiles.iter())
        .map(|row| {
            let (most, tile) = row.split_once(':')?;
            let most = match most {
                "*" => "ANY",
                "elsewhere" => "ELSEWHERE",
                number => number,
            };
            Some(format!("({most}, Entry::{family}_{states}{dims}_{tile}), "))
        })
        .collect();
    Some(format!(
        "({}, {per_channel}, {of_layout}, {of_state}, [{k}, {v}]){guard} => &[{}],\n",
        pattern(family)?,
        rows?
    ))
}

/// The pattern of a family, whose kernels' names begin with `name`; `None` where a word is none of theirs.
fn pattern(name: &str) -> Option<String> {
    let (mut form, mut layer, mut deferred) = ("Decode", false, false);
    for word in name.split('_') {
        match word {
            "gdn" | "kda" | "prefill" => {}
            "layer" => layer = true,
            "deferred" => deferred = true,
            "mtp" | "recurrent" => form = "Recurrent",
            "parallel" => form = "Parallel",
            "chain" => form = "Chunked(Stage::Chain)",
            "short" => form = "Chunked(Stage::Short)",
            _ => return None,
        }
    }
    Some(format!(
        "Family {{ form: Form::{form}, layer: {layer}, deferred: {deferred} }}"
    ))
}

/// The expression of a condition.
fn guard(condition: &str) -> Option<String> {
    let one = |word: &str| {
        Some(match word {
            "verify" => "kind.mode == Mode::Verify",
            "update" => "kind.mode == Mode::Update",
            "each" => "kind.mode == Mode::Each",
            "commit" => "kind.mode == Mode::Commit",
            "resume" => "kind.mode == Mode::Resume",
            "decode" => "kind.is_decode()",
            "narrow" => "kind.narrow",
            "f16" => "kind.state == DType::F16",
            _ => return None,
        })
    };
    if let Some((number, least)) = condition.split_once(">=") {
        return Some(format!("kind.{number} >= {least}"));
    }
    if let Some((number, exactly)) = condition.split_once('=') {
        return Some(format!("kind.{number} == {exactly}"));
    }
    let either: Option<Vec<&str>> = condition.split('|').map(one).collect();
    Some(format!("({})", either?.join(" || ")))
}

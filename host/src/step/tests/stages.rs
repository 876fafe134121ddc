//! The stages of a launch: a file names none of a later one.

use std::fs;
use std::path::{Path, PathBuf};

/// From arguments to launches: each is a file of `host/src/step`, or a folder.
const STAGES: [&str; 15] = [
    "args", "argument", "request", "choice", "given", "gpu", "kind", "problem", "shape", "lengths",
    "select", "schedule", "settle", "work", "plan",
];

/// What launches, and what of the crate does so by it.
const LAST: [&str; 5] = ["launch", "library", "raw", "recall", "validate"];

/// Where a stage stands.
fn stage(name: &str) -> Option<usize> {
    let last = LAST.contains(&name).then_some(STAGES.len());
    STAGES.iter().position(|stage| *stage == name).or(last)
}

/// The first words behind each `path` in lines that are no comments.
fn named<'t>(text: &'t str, path: &str) -> Vec<&'t str> {
    let code = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let behind = code.flat_map(|line| line.split(path).skip(1));
    let end = |c: char| !c.is_alphanumeric() && c != '_';
    behind
        .map(|rest| rest.split(end).next().unwrap_or(""))
        .collect()
}

/// The sources of a file or a folder, but for those of tests.
fn sources(at: &Path) -> Vec<PathBuf> {
    if at.is_dir() {
        let inside = fs::read_dir(at).unwrap().map(|it| it.unwrap().path());
        return inside.flat_map(|path| sources(&path)).collect();
    }
    let is_test = at.file_stem().is_some_and(|name| name == "tests");
    if is_test {
        Vec::new()
    } else {
        vec![at.to_owned()]
    }
}

#[test]
fn no_stage_names_a_later_one() {
    let step = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/step");
    let mut seen = 0;
    for entry in fs::read_dir(&step).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if ["mod", "tests"].contains(&name) {
            continue;
        }
        let own = stage(name).unwrap_or_else(|| panic!("{name} is no stage"));
        for source in sources(&path) {
            let text = fs::read_to_string(&source).unwrap();
            let mut others = named(&text, "crate::step::");
            // In a folder, `super` is the stage itself, but for its `mod.rs`.
            if source.parent() == Some(&step) || source.ends_with("mod.rs") {
                others.extend(named(&text, "super::"));
            }
            for other in others {
                let at = stage(other);
                let at =
                    at.unwrap_or_else(|| panic!("{source:?} names {other:?}, which is no stage"));
                assert!(at <= own, "{source:?} names the later stage {other}");
                seen += 1;
            }
            let of_crate = named(&text, "crate::");
            let later = of_crate.iter().find(|other| LAST.contains(*other));
            let is_late = own + 3 > STAGES.len();
            assert!(
                is_late || later.is_none(),
                "{source:?} names crate::{later:?}"
            );
        }
    }
    assert!(seen > 100, "{seen}");
}

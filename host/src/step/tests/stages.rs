//! Test of the stages of a launch: no file names anything of a later stage.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules of the crate that use the last stages.
const LAST: [&str; 5] = ["layer", "library", "raw", "recall", "validate"];

/// The first stage that may name the modules in `LAST`.
const LATE: &str = "work";

/// The stages, in the order of `mod.rs`, from arguments to launches. Each is a file or a folder.
fn stages() -> Vec<&'static str> {
    let text = include_str!("../mod.rs").lines();
    let stages = text.filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    stages.filter(|stage| *stage != "tests").collect()
}

/// The first word after each `path`, in lines that are not comments.
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

/// The sources of a file or a folder, except tests.
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
    let stages = stages();
    let stage = |name: &str| stages.iter().position(|stage| *stage == name);
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
            // In a folder, `super` is the stage itself, except in its `mod.rs`.
            if source.parent() == Some(&step) || source.ends_with("mod.rs") {
                others.extend(named(&text, "super::"));
            }
            for other in others {
                let Some(at) = stage(other) else {
                    panic!("{source:?} names {other:?}, which is no stage");
                };
                assert!(at <= own, "{source:?} names the later stage {other}");
                seen += 1;
            }
            let later = named(&text, "crate::")
                .into_iter()
                .find(|it| LAST.contains(it));
            if let (Some(later), true) = (later, Some(own) < stage(LATE)) {
                panic!("{source:?} names crate::{later}");
            }
        }
    }
    assert!(seen > 100, "{seen}");
}

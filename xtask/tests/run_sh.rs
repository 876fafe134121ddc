//! Tests of the bundle's `run.sh`, with scripts in place of the test binaries and the sanitizer.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

const RUN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/gpu-bundle/run.sh");

/// A binary with two tests, and with none under the filter `none`.
const PASSES: &str = r#"
[[ " $* " == *" --list "* ]] && { [[ " $* " == *" none "* ]] || echo "a: test"; exit; }
echo "SHARD ${SHARD:-none} filter ${1:-none}"
echo "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s"
"#;
const FAILS: &str = r#"
[[ " $* " == *" --list "* ]] && exit
echo "what went wrong"
echo "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s"
exit 101
"#;
const HANGS: &str = "[[ \" $* \" == *\" --list \"* ]] && exit; sleep 100";
/// A binary with two top-level modules; one has a test that takes all memory.
const MODULES: &str = r#"
if [[ " $* " == *" --list "* ]]; then
    for test in entries::a faults::b faults::out_of_memory laws::entries::a; do
        [[ $# == 1 || $test == *"$2"* ]] && echo "$test: test"
    done
    exit
fi
echo "arguments $* simulator $GATED_DELTA_SIMULATOR entries ${ENTRIES:-all}"
echo "test result: ok. $(($# - 1)) passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s"
"#;
const EXAMPLE: &str = "echo shown";
/// Sanitizer that reports an error of memcheck in the second of several processes.
const SANITIZER: &str = r#"
tool=$2
shift 4
[[ $tool == racecheck || $tool == memcheck ]] && shift 2 # what it counts
"$@" || exit
echo "ran=$tool"
if [[ $tool == memcheck && ${SHARD:-} == 1/* ]]; then echo "========= Invalid read"; exit 99; fi
"#;

/// A bundle with these test binaries; the sanitizer is in its folder `path`.
fn bundle(tests: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    let script = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/usr/bin/env bash\n{text}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    for (name, text) in tests {
        script(&format!("tests/{name}"), text);
    }
    script("examples/01_shows", EXAMPLE);
    script("path/compute-sanitizer", SANITIZER);
    fs::copy(RUN, folder.path().join("run.sh")).unwrap();
    folder
}

/// Exit status and output of `run.sh NAMES`, with `variables`, each `KEY=value`, in the environment.
fn run(bundle: &TempDir, variables: &[&str], names: &[&str]) -> (Option<i32>, String) {
    let path = std::env::var("PATH").unwrap();
    let mut command = Command::new("bash");
    command.arg(bundle.path().join("run.sh"));
    let own = ["GATED_DELTA_SIMULATOR", "ENTRIES"];
    let own = own
        .into_iter()
        .chain(["FILTER", "SANITIZE", "JOBS", "SHARDS", "LIMIT", "SHARD"]);
    for variable in own {
        command.env_remove(variable);
    }
    command.env("PATH", format!("{}/path:{path}", bundle.path().display()));
    command.envs(variables.iter().filter_map(|pair| pair.split_once('=')));
    let output = command.args(names).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).unwrap())
}

/// The line of `text` that has the word `word`, with single spaces between words.
fn line(text: &str, word: &str) -> String {
    let mut lines = text.lines().map(|line| line.split_whitespace());
    let line = lines.find(|words| words.clone().any(|of| of == word));
    line.unwrap_or_else(|| panic!("no {word} in\n{text}"))
        .collect::<Vec<_>>()
        .join(" ")
}

fn log(bundle: &TempDir, name: &str) -> String {
    let path = Path::new("logs").join(name).with_extension("log");
    fs::read_to_string(bundle.path().join(path)).unwrap()
}

#[test]
fn everything_is_run_and_counted() {
    let bundle = bundle(&[("a", PASSES), ("b", PASSES)]);
    for names in [&[][..], &["all"]] {
        let (status, text) = run(&bundle, &[], names);
        assert_eq!(status, Some(0), "{text}");
        assert!(line(&text, "a").starts_with("ok a 2 passed 0 failed"));
        assert!(line(&text, "plain").starts_with("plain 3 processes, 0 failed; 4 tests passed;"));
        assert!(text.contains("\nshown\n"));
    }
    let (_, text) = run(&bundle, &[], &["b"]);
    assert!(line(&text, "plain").starts_with("plain 1 processes, 0 failed; 2 tests passed;"));
    let (_, text) = run(&bundle, &["FILTER=x"], &[]);
    assert!(line(&text, "plain").starts_with("plain 2 processes, 0 failed; 4 tests passed;"));
    assert!(log(&bundle, "a").starts_with("SHARD none filter x\n"));
}

#[test]
fn modules_are_processes_and_what_takes_all_memory_runs_alone() {
    let bundle = bundle(&[("a", PASSES), ("tests-cpu", MODULES)]);
    let (status, text) = run(&bundle, &[], &["list"]);
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(text, "tests-entries\ntests-laws\na\ntests-faults\n");
    let (status, text) = run(&bundle, &[], &[]);
    assert_eq!(status, Some(0), "{text}");
    assert!(line(&text, "plain").starts_with("plain 6 processes, 0 failed; 6 tests passed;"));
    // Exact names: the filter `layer` of libtest would also match the tests in `laws::layer`.
    let wanted = [
        ("tests-entries", "--exact entries::a"),
        ("tests-laws", "--exact laws::entries::a"),
        ("tests-faults", "--exact faults::b"),
        ("tests-faults-alone", "--exact faults::out_of_memory"),
    ];
    for (name, arguments) in wanted {
        let wanted = format!("arguments {arguments} simulator 0 entries all\n");
        assert!(log(&bundle, name).starts_with(&wanted), "{name}");
    }
    assert!(text.starts_with("ok"), "{text}");
    assert!(text.lines().next().unwrap().contains("tests-faults-alone"));

    let (_, text) = run(&bundle, &[], &["tests-entries", "a"]);
    assert!(line(&text, "plain").starts_with("plain 2 processes, 0 failed; 3 tests passed;"));
    let (_, text) = run(&bundle, &[], &["tests-cpu"]);
    assert!(line(&text, "plain").starts_with("plain 4 processes, 0 failed; 4 tests passed;"));
    let (_, text) = run(&bundle, &["FILTER=entries"], &["tests-cpu"]);
    assert!(line(&text, "plain").starts_with("plain 2 processes, 0 failed; 2 tests passed;"));
    assert_eq!(run(&bundle, &["FILTER=b"], &["tests-entries"]).0, Some(2));
    let (_, text) = run(
        &bundle,
        &["SANITIZE=memcheck", "FILTER=a"],
        &["tests-entries"],
    );
    assert!(line(&text, "memcheck").starts_with("memcheck 1 processes, 0 failed; 1 tests passed;"));
    assert!(log(&bundle, "memcheck-tests-entries").contains("entries kinds\n"));
}

#[test]
fn what_fails_is_shown_last_and_fails_the_run() {
    let bundle = bundle(&[("a", FAILS), ("b", PASSES), ("c", HANGS)]);
    let (status, text) = run(&bundle, &["LIMIT=1", "JOBS=2"], &[]);
    assert_eq!(status, Some(1), "{text}");
    assert!(line(&text, "a").starts_with("FAILED a 3 passed 1 failed"));
    assert!(line(&text, "c").starts_with("FAILED c 0 passed 0 failed"));
    assert!(text.contains("== a: exit status 101; the end of logs/a.log:\nwhat went wrong\n"));
    assert!(text.contains("== c: exit status 124 (not done after 1 s)"));
    assert!(line(&text, "plain").starts_with("plain 4 processes, 2 failed; 5 tests passed;"));
    // A test that fails without a sanitizer is not run under one.
    let (status, text) = run(&bundle, &["SANITIZE=all", "FILTER="], &["a"]);
    assert_eq!(status, Some(1));
    assert!(line(&text, "racecheck").starts_with("racecheck 0 processes"));
}

#[test]
fn no_test_is_a_failure() {
    let bundle = bundle(&[("a", PASSES)]);
    assert_eq!(run(&bundle, &["FILTER=none"], &[]).0, Some(1));
    assert_eq!(run(&bundle, &[], &["z"]).0, Some(2));
    assert_eq!(run(&bundle, &["SANITIZE=mem"], &[]).0, Some(2));
}

#[test]
fn sanitizers_share_the_launches_and_their_errors_count() {
    let bundle = bundle(&[("a", PASSES), ("tests-sanitizer", PASSES)]);
    let (status, text) = run(&bundle, &["SANITIZE=all", "SHARDS=1"], &[]);
    assert_eq!(status, Some(0), "{text}");
    for tool in ["racecheck", "memcheck", "initcheck", "synccheck"] {
        let totals = format!("{tool} 2 processes, 0 failed; 4 tests passed;");
        assert!(line(&text, tool).starts_with(&totals), "{text}");
        assert!(log(&bundle, &format!("{tool}-a")).ends_with(&format!("ran={tool}\n")));
    }
    let sharded = &["SANITIZE=memcheck,synccheck", "SHARDS=3"];
    let (status, text) = run(&bundle, sharded, &["tests-sanitizer"]);
    assert_eq!(status, Some(1), "{text}");
    assert!(line(&text, "plain").starts_with("plain 1 processes, 0 failed; 2 tests passed;"));
    assert!(line(&text, "memcheck").starts_with("memcheck 3 processes, 1 failed; 6 tests passed;"));
    assert!(line(&text, "synccheck").starts_with("synccheck 3 processes, 0 failed;"));
    assert!(text.contains("== memcheck-tests-sanitizer-1of3: exit status 99"));
    let second = log(&bundle, "synccheck-tests-sanitizer-1of3");
    assert!(
        second.starts_with("SHARD 1/3 filter sanitizer\n"),
        "{second}"
    );
}

//! PTX as text: its words and its defects.

use std::collections::BTreeMap;

/// Defects in a PTX text, one line for each kind: local memory, generic accesses (whose state space the hardware has to find out),
/// calls.
pub fn defects(text: &str) -> Vec<String> {
    let mut kinds = BTreeMap::<_, Vec<_>>::new();
    for statement in text.split(['\n', ';']) {
        if let Some(kind) = defect(statement) {
            kinds.entry(kind).or_default().push(statement.trim());
        }
    }
    let describe =
        |(kind, lines): (_, Vec<_>)| format!("{kind}, {} times: {}", lines.len(), lines[0]);
    kinds.into_iter().map(describe).collect()
}

fn defect(statement: &str) -> Option<&'static str> {
    let instruction = statement
        .split_whitespace()
        .find(|word| !word.starts_with(['@', '{', '}']))?;
    let mut parts = instruction.split('.');
    let operation = parts.next()?;
    let spaces = ["param", "global", "shared", "shared::cluster", "const"];
    let accesses = ["ld", "st", "atom", "red"];
    if statement.contains(".local") {
        Some("local memory")
    } else if operation == "call" {
        Some("a function that was not inlined")
    } else if accesses.contains(&operation) && !parts.any(|part| spaces.contains(&part)) {
        Some("an access without a state space")
    } else {
        None
    }
}

/// Replaces whole [`words`] of PTX.
pub fn replace_words(text: &str, mut replacement: impl FnMut(&str) -> Option<String>) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(is_word) {
        let (before, from) = rest.split_at(start);
        let (word, after) = from.split_at(from.find(|c| !is_word(c)).unwrap_or(from.len()));
        result += before;
        match replacement(word) {
            Some(new) => result += &new,
            None => result += word,
        }
        rest = after;
    }
    result + rest
}

/// The words of a PTX text: identifiers, registers, labels, numbers.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defects_are_found() {
        let fine = "\tld.param.b64 %rd1, [x];\n\t@%p1 ld.global.nc.b32 %r1, [%rd1];\n\tst.shared.v4.b32 [%r1], {a, b};\n\tret;";
        assert_eq!(defects(fine), [""; 0]);
        for bad in [
            "\t.local .align 4 .b8 depot[8];",
            "@%p1 ld.b32 %r1, [%rd1];",
            "st.v4.b32 [%rd1], {a};",
            "call.uni f, ();",
            "{ .reg .pred p; setp.ne.u32 p, %r1, 0; @p ld.b32 %r1, [%rd1]; }",
        ] {
            assert_eq!(defects(bad).len(), 1, "{bad}");
        }
    }

    #[test]
    fn whole_words_alone_are_replaced() {
        let replaced = replace_words("GD_H, GD_HX;%GD_H [GD_H]", |word| {
            (word == "GD_H").then(|| "16".into())
        });
        assert_eq!(replaced, "16, GD_HX;%GD_H [16]");
    }
}

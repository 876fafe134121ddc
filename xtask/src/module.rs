//! Parses a PTX module and takes it apart into its entries.

use std::collections::HashMap;

use anyhow::{Result, bail};
use gated_delta_kernels::machine;

use crate::text::{replace_words, words};

/// A PTX module, without comments and debug information.
pub struct Module {
    /// `.version`, `.target` and `.address_size`.
    preamble: String,
    /// Variables at module level, in order.
    variables: Vec<Item>,
    entries: Vec<Item>,
}

struct Item {
    name: String,
    text: String,
}

/// Launch bounds of an entry, which the compiler does not write.
pub struct LaunchBounds {
    /// Threads of a block.
    pub block: u32,
    /// Resident blocks per multiprocessor that the register count must allow: a number or a load-time constant. `None` leaves the
    /// register count to the assembler.
    pub min_blocks_per_sm: Option<String>,
    /// Whether the register count need allow one block only, on machines before Hopper.
    pub one_block_before_hopper: bool,
    /// Cluster dimensions, for an entry that runs in clusters.
    pub cluster: Option<Cluster>,
    /// Whether the entry uses warpgroup instructions.
    pub warpgroups: bool,
}

/// Blocks of a cluster, along x and y.
pub struct Cluster {
    /// Blocks along x, one for each tile.
    pub tiles: u32,
    /// Whether the cluster has [`tiles`](Self::tiles) for each value head of a query/key head, along y; otherwise it is 1 along y.
    pub of_heads: bool,
}

/// Replaces the preamble of an entry that runs in clusters. Clusters need sm_90, and sending to a mailbox of another block needs
/// PTX 8.1 (driver 530); LLVM compiles every entry for an older target.
const CLUSTER_PREAMBLE: &str = ".version 8.1\n.target sm_90\n.address_size 64\n";

/// Replaces the preamble of an entry with warpgroup instructions: Hopper alone has them, with PTX 8.0 (driver 525).
const WARPGROUP_PREAMBLE: &str = ".version 8.0\n.target sm_90a\n.address_size 64\n";

/// Replaces the preamble of an entry that serves several machines. The loader fills in both words ([`gated_delta_kernels::machine`]).
const OPEN_PREAMBLE: &str = ".version GD_VERSION\n.target GD_TARGET\n.address_size 64\n";

/// Prefix of the words that mark instructions for some machines only.
const OF_SOME: &str = "GD_SM";

impl Module {
    /// Parses the output of LLVM: one statement a line, functions closed by a brace.
    pub fn parse(text: &str) -> Result<Self> {
        let mut module = Self {
            preamble: String::new(),
            variables: Vec::new(),
            entries: Vec::new(),
        };
        let mut item = String::new();
        let mut depth = 0;
        for line in text.lines() {
            let line = minimal(line.split("//").next().unwrap_or_default());
            let first = line.split_whitespace().next().unwrap_or_default();
            match first {
                "" | ".file" | ".loc" => continue,
                ".version" | ".target" | ".address_size" if item.is_empty() => {
                    module.preamble += &format!("{line}\n");
                    continue;
                }
                _ => {}
            }
            item += &format!("{line}\n");
            depth += line.matches('{').count();
            let closed = line.matches('}').count();
            if closed > depth {
                bail!("a brace closes nothing: {line}");
            }
            depth -= closed;
            if depth == 0 && line.ends_with([';', '}']) {
                module.add(std::mem::take(&mut item));
            }
        }
        if !item.is_empty() {
            bail!("the module ends inside of\n{item}");
        }
        Ok(module)
    }

    /// Files `text` under entries or variables. A function is dropped: [`crate::text::defects`] refuses an entry that calls one.
    fn add(&mut self, text: String) {
        let head = text.split(['(', '[', '=', ';']).next().unwrap_or_default();
        let name = head
            .split_whitespace()
            .next_back()
            .unwrap_or_default()
            .to_owned();
        if head.contains(".entry ") {
            self.entries.push(Item { name, text });
        } else if [".shared ", ".global ", ".const "]
            .iter()
            .any(|space| head.contains(space))
        {
            self.variables.push(Item { name, text });
        }
    }

    /// Names of the entries.
    pub fn entry_names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.name.as_str())
    }

    /// A module of the entry `name` and the variables that it refers to. Labels and the variables defined here get numbers for names,
    /// so that they depend neither on other entries nor on the machine that compiled them.
    pub fn extract(&self, name: &str, bounds: &LaunchBounds) -> Option<String> {
        let entry = self.entries.iter().find(|entry| entry.name == name)?;
        let mut used = vec![false; self.variables.len()];
        let mut unseen = vec![entry];
        while let Some(item) = unseen.pop() {
            for (variable, used) in self.variables.iter().zip(&mut used) {
                if !*used && words(&item.text).any(|word| word == variable.name) {
                    *used = true;
                    unseen.push(variable);
                }
            }
        }
        let variables: Vec<_> = self
            .variables
            .iter()
            .zip(used)
            .filter_map(|(item, used)| used.then_some(item))
            .collect();
        let defined = variables
            .iter()
            .filter(|item| !item.text.starts_with(".extern"));
        let numbered: HashMap<_, _> = defined
            .enumerate()
            .map(|(i, item)| (item.name.as_str(), format!("data_{i}")))
            .collect();

        let is_open = entry.text.lines().any(|line| line.starts_with(OF_SOME));
        let (preamble, body) = match bounds.cluster {
            _ if bounds.warpgroups => (WARPGROUP_PREAMBLE, of_hopper(&entry.text)),
            Some(_) => (CLUSTER_PREAMBLE, of_hopper(&entry.text)),
            None if is_open => (OPEN_PREAMBLE, entry.text.clone()),
            None => (self.preamble.as_str(), entry.text.clone()),
        };
        let mut text = preamble.to_owned();
        for variable in variables {
            text += &variable.text;
        }
        text += &with_launch_bounds(&body, bounds);
        Some(replace_words(&text, |word| {
            match word
                .strip_prefix("$L__BB")
                .and_then(|rest| rest.split_once('_'))
            {
                Some((_, number)) => Some(format!("$L{number}")),
                None => numbered.get(word).cloned(),
            }
        }))
    }
}

/// Text of an entry that needs Hopper or a later machine: the marks of machine-dependent instructions are resolved.
fn of_hopper(text: &str) -> String {
    let mut of_hopper = String::with_capacity(text.len());
    for line in text.lines() {
        let (word, instruction) = line.split_once(' ').unwrap_or((line, ""));
        match machine::word(word, machine::HOPPER) {
            Some("") => of_hopper += instruction,
            Some(_) => continue,
            None => of_hopper += line,
        }
        of_hopper.push('\n');
    }
    of_hopper
}

/// A line without unnecessary white space, which is a tenth of a text.
pub fn minimal(line: &str) -> String {
    let words: Vec<_> = line.split_whitespace().collect();
    words.join(" ").replace(", ", ",")
}

/// Puts the launch bounds between the parameter list and the body.
fn with_launch_bounds(entry: &str, bounds: &LaunchBounds) -> String {
    let mut directives = format!(".maxntid {}, 1, 1\n", bounds.block);
    if let Some(blocks) = &bounds.min_blocks_per_sm {
        directives += &format!(".minnctapersm {blocks}\n");
    }
    if bounds.one_block_before_hopper {
        directives += "GD_SM80 .minnctapersm 1\n";
    }
    if let Some(Cluster { tiles, of_heads }) = &bounds.cluster {
        let heads = if *of_heads { "GD_RATIO" } else { "1" };
        directives += &format!(".reqnctapercluster {tiles}, {heads}, 1\n");
    }
    entry.replacen("\n{\n", &format!("\n{directives}{{\n"), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "
//
.version 7.4
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.global .align 4 .b8 _ZN5table17h0123E[4] = {1, 2, 3, 4};
.global .align 8 .u64 _ZN7pointer17h0123E = _ZN5table17h0123E;
.visible .entry plain(
\t.param .align 8 .b8 plain_param_0[24]
)
{
\tmov.u32 %r1, GD_H; // a number
$L__BB0_1:
\tret;
}
.visible .entry other(
)
{
\t.loc 1 2 3
\tmov.u32 %r1, dynamic;
\tmov.u64 %rd1, _ZN7pointer17h0123E;
\t@%p1 bra $L__BB1_7;
$L__BB1_7:
}
";

    #[test]
    fn entries_are_cut_out_with_what_they_refer_to() {
        let module = Module::parse(MODULE).unwrap();
        assert_eq!(module.entry_names().collect::<Vec<_>>(), ["plain", "other"]);

        let plain = module
            .extract(
                "plain",
                &LaunchBounds {
                    block: 128,
                    min_blocks_per_sm: None,
                    one_block_before_hopper: false,
                    cluster: None,
                    warpgroups: true,
                },
            )
            .unwrap();
        assert!(
            plain.contains(")\n.maxntid 128, 1, 1\n{\nmov.u32 %r1,GD_H;\n$L1:\n"),
            "{plain}"
        );
        assert!(
            plain.starts_with(WARPGROUP_PREAMBLE)
                && !plain.contains("dynamic")
                && !plain.contains("data_"),
            "{plain}"
        );

        let other = module
            .extract(
                "other",
                &LaunchBounds {
                    block: 64,
                    min_blocks_per_sm: Some("4".to_owned()),
                    one_block_before_hopper: false,
                    cluster: Some(Cluster {
                        tiles: 8,
                        of_heads: false,
                    }),
                    warpgroups: false,
                },
            )
            .unwrap();
        assert!(
            other.contains(".maxntid 64, 1, 1\n.minnctapersm 4\n.reqnctapercluster 8, 1, 1\n{\n")
                && other.starts_with(CLUSTER_PREAMBLE),
            "{other}"
        );
        assert!(
            other.contains(
                ".extern .shared .align 16 .b8 dynamic[];\n.global .align 4 .b8 data_0[4]"
            ),
            "{other}"
        );
        assert!(
            other.contains(".global .align 8 .u64 data_1 = data_0;"),
            "{other}"
        );
        assert!(
            other.contains("bra $L7;\n$L7:") && !other.contains("_ZN") && !other.contains(".loc"),
            "{other}"
        );
        assert!(
            module
                .extract(
                    "absent",
                    &LaunchBounds {
                        block: 1,
                        min_blocks_per_sm: None,
                        one_block_before_hopper: false,
                        cluster: None,
                        warpgroups: false,
                    }
                )
                .is_none()
        );
    }

    #[test]
    fn truncated_modules_are_refused() {
        assert!(Module::parse(".visible .entry plain(\n)\n{\n\tret;\n").is_err());
        assert!(Module::parse("}\n").is_err());
    }
}

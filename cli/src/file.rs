//! Problems and results in files: names, metadata, and what contradicts itself.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use gated_delta::DType;
use gated_delta::ops::gdn_decode::GdnDecodeOptions;
use gated_delta::ops::{BetaScale, HeadMap, StateLayout};

use crate::backend::Outputs;
use crate::container::{self, Reader};
use crate::error::Error;
use crate::problem::{INPUTS, Problem};
use crate::tensor::HostTensor;

/// Tensors of the other operators.
const OF_OTHER_OPERATORS: [&str; 10] = [
    "token_slots",
    "accepted",
    "cu_seqlens",
    "keep",
    "prev.k",
    "prev.v",
    "prev.a",
    "prev.b",
    "prev.g",
    "prev.beta",
];

/// What a file's `expected.*` tensors want; `None` for a tensor that is not there.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// `expected.o`, `[B, 1, HV, V]` f32.
    pub o: Option<HostTensor>,
    /// `expected.state`, the whole pool afterwards, f32.
    pub state: Option<HostTensor>,
}

/// Reads the problem of a file.
///
/// # Errors
/// [`Error::Input`] with the file and the tensor or key: no safetensors file, one that is cut off or says more than
/// it has, an operator or value that is not supported, tensors or keys that are unknown, missing or contradictory.
pub fn read(path: &Path) -> Result<Problem, Error> {
    problem(&mut open(path)?)
}

/// As [`read`], with what the file expects.
///
/// # Errors
/// As [`read`]'s; also where an `expected.*` tensor is not f32 of the right shape.
pub fn read_with_expected(path: &Path) -> Result<(Problem, Expected), Error> {
    let mut reader = open(path)?;
    let problem = problem(&mut reader)?;
    let mut expected = |name: &str, like: &'static str| {
        let Some(tensor) = reader.read(name)? else {
            return Ok(None);
        };
        let dims = problem.tensor(like)?.dims();
        if tensor.dtype() != DType::F32 || tensor.dims() != dims {
            let got = format!("{} {:?}", tensor.dtype(), tensor.dims());
            return Err(Error::file(
                path,
                format!("tensor {name}: wanted f32 {dims:?}, got {got}"),
            ));
        }
        Ok(Some(tensor))
    };
    let expected = Expected {
        o: expected("expected.o", "o")?,
        state: expected("expected.state", "state")?,
    };
    Ok((problem, expected))
}

/// Where [`write()`] is to put the results of `input`: `output`, with links followed.
///
/// # Errors
/// [`Error::Input`] where that is the input itself, something else than a file, or in no folder.
pub fn output_path(input: &Path, output: &Path) -> Result<PathBuf, Error> {
    let Some(name) = output.file_name() else {
        return Err(Error::file(output, "wanted the name of a file to write"));
    };
    if let Ok(existing) = output.canonicalize() {
        if !existing.is_file() {
            return Err(Error::file(
                output,
                "wanted a regular file to write, or none yet",
            ));
        }
        if input.canonicalize().is_ok_and(|input| input == existing) {
            return Err(Error::file(
                output,
                "wanted another file than the input, which stays as it is",
            ));
        }
        return Ok(existing);
    }
    let folder = output
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let folder = folder
        .canonicalize()
        .map_err(|error| Error::file(folder, error))?;
    Ok(folder.join(name))
}

/// Writes results: `o` and `state`, with the operator and the layout as metadata.
///
/// # Errors
/// [`Error::Input`] where the file cannot be written; one that was there before is then untouched.
pub fn write(path: &Path, problem: &Problem, outputs: &Outputs) -> Result<(), Error> {
    let metadata = [
        ("op", "gdn_decode".to_owned()),
        ("state_layout", problem.options.state_layout.to_string()),
    ];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into();
    container::write(
        path,
        metadata,
        &[("o", &outputs.o), ("state", &outputs.state)],
    )
}

/// Opens a file of a GDN decode.
fn open(path: &Path) -> Result<Reader, Error> {
    let reader = Reader::open(path)?;
    let wrong = |problem: String| Err(Error::file(path, problem));
    match reader.metadata().get("op").map(String::as_str) {
        Some("gdn_decode") => {}
        Some(op @ ("gdn_mtp" | "kda_recurrent")) => {
            return wrong(format!(
                "metadata op: {op} is not supported yet, gdn_decode is"
            ));
        }
        Some(op) => return wrong(format!("metadata op: wanted gdn_decode, got {op:?}")),
        None => return wrong("metadata op: wanted gdn_decode, got none".to_owned()),
    }
    for name in reader.names() {
        if OF_OTHER_OPERATORS.contains(&name) || name == "expected.snapshots" {
            return wrong(format!("tensor {name}: gdn_decode takes none"));
        }
        let wanted = name
            .strip_prefix("expected.")
            .map_or(&INPUTS[..], |_| &["expected.o", "expected.state"]);
        if !wanted.contains(&name) {
            return wrong(format!(
                "tensor {name}: wanted one of {}",
                wanted.join(", ")
            ));
        }
    }
    Ok(reader)
}

fn problem(reader: &mut Reader) -> Result<Problem, Error> {
    let (options, beta_scale, gate) = options(reader.metadata())
        .map_err(|problem| Error::file(reader.path(), format!("metadata {problem}")))?;
    let mut tensors = BTreeMap::new();
    for name in INPUTS {
        if let Some(tensor) = reader.read(name)? {
            tensors.insert(name, tensor);
        }
    }
    let given = tensors.contains_key("g") || tensors.contains_key("beta");
    let contradiction = match gate {
        Some(Gate::Raw) if given => {
            Some("metadata gate: raw takes a, b, A_log and dt_bias, the file has g or beta")
        }
        Some(Gate::Given) if !given => {
            Some("metadata gate: given takes g and beta, the file has neither")
        }
        _ if given && beta_scale == BetaScale::Two => {
            Some("metadata beta_scale: wanted none with given gates, whose beta is taken as it is")
        }
        _ => None,
    };
    if let Some(contradiction) = contradiction {
        return Err(Error::file(reader.path(), contradiction));
    }
    if let Some(v) = tensors.get("v") {
        let o = HostTensor::new(v.dtype(), v.dims())?;
        tensors.insert("o", o);
    }
    let problem = Problem {
        tensors,
        options,
        beta_scale,
    };
    problem
        .validate()
        .map_err(|error| Error::file(reader.path(), error))?;
    Ok(problem)
}

#[derive(Clone, Copy, PartialEq)]
enum Gate {
    Raw,
    Given,
}

/// The options that metadata sets, or a sentence about the key that cannot be used.
fn options(
    metadata: &BTreeMap<String, String>,
) -> Result<(GdnDecodeOptions, BetaScale, Option<Gate>), String> {
    let mut options = GdnDecodeOptions::default();
    let mut beta_scale = BetaScale::One;
    let mut gate = None;
    for (key, value) in metadata {
        match key.as_str() {
            "op" => {}
            "state_layout" => {
                options.state_layout = one_of(
                    key,
                    value,
                    [
                        ("k_last", StateLayout::KLast),
                        ("v_last", StateLayout::VLast),
                    ],
                )?;
            }
            "head_map" => {
                options.head_map = one_of(
                    key,
                    value,
                    [("grouped", HeadMap::Grouped), ("tiled", HeadMap::Tiled)],
                )?;
            }
            "qk_l2norm" => options.qk_l2norm = flag(key, value)?,
            "update_state" => options.update_state = flag(key, value)?,
            "snapshots" => {
                if flag(key, value)? {
                    return Err("snapshots: gdn_decode has none, wanted false".to_owned());
                }
            }
            "scale" => options.scale = Some(number(key, value, "a number")?),
            "null_slot" => options.null_slot = Some(number(key, value, "a slot, 0 or more")?),
            "gate" => {
                gate = Some(one_of(
                    key,
                    value,
                    [("raw", Gate::Raw), ("given", Gate::Given)],
                )?)
            }
            "beta_scale" => {
                beta_scale = one_of(key, value, [("1", BetaScale::One), ("2", BetaScale::Two)])?
            }
            "beta" | "lower_bound" => {
                return Err(format!("{key}: gdn_decode takes none, kda_recurrent does"));
            }
            _ => return Err(format!("{key:?}: wanted no such key, got {value:?}")),
        }
    }
    Ok((options, beta_scale, gate))
}

fn one_of<T: Copy, const N: usize>(
    key: &str,
    value: &str,
    allowed: [(&str, T); N],
) -> Result<T, String> {
    allowed
        .iter()
        .find(|(name, _)| *name == value)
        .map(|(_, choice)| *choice)
        .ok_or_else(|| {
            let names = allowed.map(|(name, _)| name).join(" or ");
            format!("{key}: wanted {names}, got {value:?}")
        })
}

fn flag(key: &str, value: &str) -> Result<bool, String> {
    one_of(key, value, [("true", true), ("false", false)])
}

fn number<T: FromStr<Err: Display>>(key: &str, value: &str, wanted: &str) -> Result<T, String> {
    value
        .trim()
        .parse()
        .map_err(|error| format!("{key}: wanted {wanted}, got {value:?} ({error})"))
}

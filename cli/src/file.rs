//! Reads problems from files and writes results, and refuses unknown names and contradictions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gated_delta::{DType, MAX_TOKENS};

use crate::backend::Outputs;
use crate::container::{self, Reader};
use crate::error::Error;
use crate::metadata::Metadata;
use crate::op::Op;
use crate::problem::{Problem, RINGS};
use crate::tensor::HostTensor;

/// Prefix of the names of expected results.
const EXPECTED: &str = "expected.";

/// The `expected.*` tensors of a file; `None` for a tensor that is absent.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// `expected.o`, `[B, T, HV, V]` f32.
    pub o: Option<HostTensor>,
    /// `expected.state`, the whole pool after the launch, f32.
    pub state: Option<HostTensor>,
    /// `expected.conv_state`, the whole pool of windows after the launch, f32.
    pub conv_state: Option<HostTensor>,
    /// `expected.snapshots`, `[B, T, HV, V, K]` or `[B, T, HV, K, V]` f32.
    pub snapshots: Option<HostTensor>,
    /// `expected.conv_snapshots`, `[B, T, D, W − 1]` f32.
    pub conv_snapshots: Option<HostTensor>,
    /// `expected.pending.keys`, `expected.pending.updates`, `expected.pending.decays` and `expected.pending.inputs`, all rings after the
    /// launch, f32.
    pub rings: [Option<HostTensor>; 4],
}

/// Reads the problem of a file.
///
/// # Errors
/// [`Error::Input`] with the file and the tensor or key: the file is no safetensors file, or is cut off or inconsistent; an operator or
/// value is not supported; tensors or keys are unknown, missing or contradictory.
pub fn read(path: &Path) -> Result<Problem, Error> {
    let (mut reader, metadata) = open(path)?;
    problem(&mut reader, &metadata)
}

/// As [`read`], with the file's expected results.
///
/// # Errors
/// The errors of [`read`]; an `expected.*` tensor that is not f32 or has the wrong shape.
pub fn read_with_expected(path: &Path) -> Result<(Problem, Expected), Error> {
    let (mut reader, metadata) = open(path)?;
    let problem = problem(&mut reader, &metadata)?;
    let mut expected = |name: &str, like: &str| {
        let Some(tensor) = reader.read(name)? else {
            return Ok(None);
        };
        let Some(dims) = problem.tensors.get(like).map(HostTensor::dims) else {
            let wanted = "wanted none, since the file asks for no such result";
            return Err(Error::file(path, format!("tensor {name}: {wanted}")));
        };
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
        conv_state: expected("expected.conv_state", "conv_state")?,
        snapshots: expected("expected.snapshots", "snapshots")?,
        conv_snapshots: expected("expected.conv_snapshots", "conv_snapshots")?,
        rings: [
            expected("expected.pending.keys", "pending.keys")?,
            expected("expected.pending.updates", "pending.updates")?,
            expected("expected.pending.decays", "pending.decays")?,
            expected("expected.pending.inputs", "pending.inputs")?,
        ],
    };
    Ok((problem, expected))
}

/// The path for [`write()`] to write the results of `input` to: `output`, with links followed.
///
/// # Errors
/// [`Error::Input`] if `output` is the input itself, is not a regular file, or its folder does not exist.
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

/// Writes results: `o`, `state`, `conv_state`, `snapshots`, `conv_snapshots` and rings, with the operator and the layout as
/// metadata.
///
/// # Errors
/// [`Error::Input`] if the file cannot be written; an existing file is then unchanged.
pub fn write(path: &Path, problem: &Problem, outputs: &Outputs) -> Result<(), Error> {
    let metadata = [
        ("op", problem.op.name().to_owned()),
        ("state_layout", problem.options.state_layout.to_string()),
    ];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into();
    let tensors = [
        ("o", outputs.o.as_ref()),
        ("state", Some(&outputs.state)),
        ("conv_state", outputs.conv_state.as_ref()),
        ("snapshots", outputs.snapshots.as_ref()),
        ("conv_snapshots", outputs.conv_snapshots.as_ref()),
    ];
    let rings = RINGS
        .into_iter()
        .zip(outputs.rings.each_ref().map(Option::as_ref));
    let tensors: Vec<_> = tensors
        .into_iter()
        .chain(rings)
        .filter_map(|(name, tensor)| Some((name, tensor?)))
        .collect();
    container::write(path, metadata, &tensors)
}

/// Opens a file and checks that its names are those of its operator's tensors.
fn open(path: &Path) -> Result<(Reader, Metadata), Error> {
    let reader = Reader::open(path)?;
    let metadata = Metadata::parse(reader.metadata())
        .map_err(|problem| Error::file(path, format!("metadata {problem}")))?;
    let op = metadata.op;
    for name in reader.names() {
        let taken = names(op);
        if taken.iter().any(|taken| taken == name) {
            continue;
        }
        let mut others = Op::ALL.into_iter().flat_map(names);
        let problem = if others.any(|other| other == name) {
            format!("{} takes none", op.name())
        } else {
            let expected = name.starts_with(EXPECTED);
            let wanted: Vec<_> = taken
                .into_iter()
                .filter(|taken| taken.starts_with(EXPECTED) == expected)
                .collect();
            format!("wanted one of {}", wanted.join(", "))
        };
        return Err(Error::file(path, format!("tensor {name}: {problem}")));
    }
    Ok((reader, metadata))
}

/// Names of the tensors that a file of operator `op` may have.
fn names(op: Op) -> Vec<String> {
    let expected = op.outputs().map(|name| format!("{EXPECTED}{name}"));
    let inputs = op.inputs().map(str::to_owned);
    inputs.chain(expected).collect()
}

fn problem(reader: &mut Reader, metadata: &Metadata) -> Result<Problem, Error> {
    let has = |name: &str| reader.names().any(|other| other == name);
    let of_metadata = |problem| Error::file(reader.path(), format!("metadata {problem}"));
    let gates = metadata.gates(has).map_err(of_metadata)?;
    let [conv_activation, norm_activation] = metadata.activations(has).map_err(of_metadata)?;
    let mut tensors = BTreeMap::new();
    for name in metadata.op.inputs() {
        if let Some(tensor) = reader.read(name)? {
            tensors.insert(name, tensor);
        }
    }
    let mut problem = Problem {
        op: metadata.op,
        gates,
        tensors,
        update_state: metadata.update_state,
        options: metadata.options,
        max_tokens: metadata.max_tokens,
        checkpoint_every: metadata.checkpoint_every,
        max_pending: metadata.max_pending,
        heads: metadata.heads,
        conv_activation,
        norm_eps: metadata.norm_eps,
        norm_activation,
    };
    let of_file = |error| Error::file(reader.path(), error);
    if let Some(o) = problem.output().map_err(of_file)? {
        problem.tensors.insert("o", o);
    }
    if metadata.snapshots {
        add_snapshots(&mut problem)?;
    }
    problem.add_workspace()?;
    problem.validate().map_err(of_file)?;
    let has_all = !metadata.snapshots || problem.tensors.contains_key("snapshots");
    if !has_all {
        // The problem is whole, so that only its tokens are too many.
        let many = gated_delta::Error::Range {
            what: "T with snapshots",
            wanted: format!("at most {MAX_TOKENS}"),
            got: problem.max_tokens().to_string(),
        };
        return Err(of_file(many.into()));
    }
    Ok(problem)
}

/// Adds tensors for the states and windows after every token, if the kernels' limits allow them. If the shapes contradict each other,
/// nothing is added, so that nothing of a wrong size is allocated: [`Problem::validate`] reports the contradiction.
fn add_snapshots(problem: &mut Problem) -> Result<(), Error> {
    let state = problem.tensor("state")?;
    let (rows, tokens) = (problem.tokens().len(), problem.max_tokens());
    let [key_dim, value_dim] = problem.state_dims();
    let is_whole = match problem.tensors.get("o").map(HostTensor::dims) {
        Some([.., heads, dim]) => {
            [*heads, *dim] == [problem.dim("state", 1), value_dim]
                && state.dims().len() == 4
                && key_dim <= MOST_KEYS
                && tokens <= MAX_TOKENS
        }
        _ => tokens == 0,
    };
    if !is_whole {
        return Ok(());
    }
    let mut dims = vec![rows, tokens];
    dims.extend(state.dims().iter().skip(1));
    let snapshots = HostTensor::new(state.dtype(), &dims)?;
    problem.tensors.insert("snapshots", snapshots);
    if let Some(windows) = problem.tensors.get("conv_state") {
        let inputs = problem.dim("conv_weight", 1).saturating_sub(1);
        let dims = [rows, tokens, problem.dim("conv_state", 1), inputs];
        if inputs >= MOST_TAPS || dims[2] != problem.dim("x", 2) {
            return Ok(());
        }
        let snapshots = HostTensor::new(windows.dtype(), &dims)?;
        problem.tensors.insert("conv_snapshots", snapshots);
    }
    Ok(())
}

/// Largest K of any kernel; below, largest W.
const MOST_KEYS: usize = 128;
const MOST_TAPS: usize = 4;

//! Runs the command as users do, and makes files for it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

/// Output and exit status of a run of the command.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Ran {
    #[track_caller]
    pub fn succeeds(self) -> Self {
        assert_eq!(
            self.code,
            Some(0),
            "stdout: {}\nstderr: {}",
            self.stdout,
            self.stderr
        );
        self
    }

    /// Asserts a failed check: a table, and nothing else.
    #[track_caller]
    pub fn fails_the_check(self, part: &str) {
        assert_eq!(
            self.code,
            Some(1),
            "stdout: {}\nstderr: {}",
            self.stdout,
            self.stderr
        );
        assert!(
            self.stdout.contains("FAILED") && self.stdout.contains(part),
            "{part:?} in {}",
            self.stdout
        );
    }

    /// Asserts bad input: one line on stderr, nothing on stdout.
    #[track_caller]
    pub fn refused(self, part: &str) {
        assert_eq!(
            self.code,
            Some(2),
            "stdout: {}\nstderr: {}",
            self.stdout,
            self.stderr
        );
        let errors: Vec<&str> = self
            .stderr
            .lines()
            .filter(|line| !line.starts_with("backend: "))
            .collect();
        assert_eq!(errors.len(), 1, "{}", self.stderr);
        assert!(
            errors[0].starts_with("error: ") && errors[0].contains(part),
            "{part:?} in {}",
            errors[0]
        );
        assert_eq!(self.stdout, "");
    }
}

/// The command that was built with the tests, or the one that `GATED_DELTA_BIN` names.
pub fn command() -> Command {
    let built = || env!("CARGO_BIN_EXE_gated-delta").into();
    let mut command = Command::new(std::env::var_os("GATED_DELTA_BIN").unwrap_or_else(built));
    command.stdin(Stdio::null());
    command
}

pub fn gated_delta(arguments: &[&str]) -> Ran {
    command().args(arguments).output().unwrap().into()
}

pub fn check(path: &Path, more: &[&str]) -> Ran {
    command()
        .arg("check")
        .arg(path)
        .args(more)
        .output()
        .unwrap()
        .into()
}

pub fn run(input: &Path, output: &Path, more: &[&str]) -> Ran {
    command()
        .arg("run")
        .arg(input)
        .arg("-o")
        .arg(output)
        .args(more)
        .output()
        .unwrap()
        .into()
}

/// A temporary folder, removed at the end of the test.
pub fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

pub fn fixture_path(name: &str) -> PathBuf {
    let folder = std::env::var_os("GATED_DELTA_FIXTURES").map(PathBuf::from);
    let folder =
        folder.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures").into());
    folder.join(name).with_extension("safetensors")
}

/// Contents of a file, to be changed and written.
#[derive(Clone, Default)]
pub struct Contents {
    pub metadata: HashMap<String, String>,
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Contents {
    pub fn read(path: &Path) -> Self {
        let bytes =
            std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let parts = |view: TensorView| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        Self {
            metadata: header.metadata().clone().unwrap_or_default(),
            tensors: tensors
                .iter()
                .map(|(name, view)| (name.to_owned(), parts(view)))
                .collect(),
        }
    }

    pub fn fixture(name: &str) -> Self {
        Self::read(&fixture_path(name))
    }

    pub fn write(&self, folder: &TempDir, name: &str) -> PathBuf {
        let path = folder.path().join(name);
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        std::fs::write(
            &path,
            safetensors::serialize(views, Some(self.metadata.clone())).unwrap(),
        )
        .unwrap();
        path
    }

    pub fn with_metadata(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn without_metadata(mut self, key: &str) -> Self {
        self.metadata.remove(key);
        self
    }

    pub fn with(mut self, name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Self {
        self.tensors
            .insert(name.to_owned(), (dtype, shape.to_vec(), data));
        self
    }

    /// Adds an i32 tensor of this shape.
    pub fn with_indices(self, name: &str, shape: &[usize], indices: &[i32]) -> Self {
        let data = indices.iter().flat_map(|index| index.to_le_bytes());
        self.with(name, Dtype::I32, shape, data.collect())
    }

    /// Adds a copy of the tensor `of` under the name `name`.
    pub fn with_copy(mut self, name: &str, of: &str) -> Self {
        let tensor = self.tensors[of].clone();
        self.tensors.insert(name.to_owned(), tensor);
        self
    }

    /// Changes the dims of a tensor.
    pub fn reshaped(mut self, name: &str, shape: &[usize]) -> Self {
        if let Some(tensor) = self.tensors.get_mut(name) {
            tensor.1 = shape.to_vec();
        }
        self
    }

    pub fn without(mut self, names: &[&str]) -> Self {
        self.tensors
            .retain(|name, _| !names.contains(&name.as_str()));
        self
    }

    pub fn without_expected(mut self) -> Self {
        self.tensors
            .retain(|name, _| !name.starts_with("expected."));
        self
    }

    /// Values of a float tensor.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let (dtype, _, data) = &self.tensors[name];
        match dtype {
            Dtype::F32 => data
                .as_chunks()
                .0
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes))
                .collect(),
            Dtype::BF16 => data
                .as_chunks()
                .0
                .iter()
                .map(|bytes| half::bf16::from_le_bytes(*bytes).into())
                .collect(),
            Dtype::F16 => data
                .as_chunks()
                .0
                .iter()
                .map(|bytes| half::f16::from_le_bytes(*bytes).into())
                .collect(),
            other => panic!("{name} is {other}"),
        }
    }

    /// Adds the tensor `name` of this shape in f32.
    pub fn with_floats(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        self.with(
            name,
            Dtype::F32,
            shape,
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
        )
    }

    /// Changes one element of an f32 tensor.
    pub fn with_float_at(self, name: &str, index: usize, value: f32) -> Self {
        let shape = self.tensors[name].1.clone();
        let mut values = self.floats(name);
        values[index] = value;
        self.with_floats(name, &shape, &values)
    }
}

//! safetensors files. Tensors are read one at a time; a new file is written next to the old one until it is complete.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use gated_delta::DType;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::tensor::HostTensor;

/// Bytes of the header's length, at the beginning of a file.
const LENGTH_BYTES: u64 = 8;
/// Longest header that other readers accept, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of a foreign file that an error shows.
const SHOWN_BYTES: u64 = 16;
/// Beginnings of files of other formats that users pass by mistake, and the names of these formats.
const OTHERS: [(&[u8], &str); 5] = [
    (
        b"PK\x03\x04",
        "a zip archive, which torch.save and np.savez write",
    ),
    (b"\x80", "a pickle"),
    (b"\x93NUMPY", "an npy array"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
];

/// The header of a file.
#[derive(Default, Deserialize, Serialize)]
struct Header {
    #[serde(rename = "__metadata__", default)]
    metadata: BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

/// An open file whose header is consistent with the file's length.
pub(crate) struct Reader {
    path: PathBuf,
    file: File,
    header: Header,
    data_start: u64,
}

impl Reader {
    pub fn open(path: &Path) -> Result<Self, Error> {
        let io = |error| Error::file(path, error);
        let mut file = File::open(path).map_err(io)?;
        let about = file.metadata().map_err(io)?;
        if !about.is_file() {
            return Err(Error::file(path, "wanted a regular file"));
        }
        let wrong = |what: &str, wanted: String, got: u64| {
            Error::file(path, format!("{what}: wanted {wanted}, got {got}"))
        };
        let file_bytes = about.len();
        let mut start = Vec::new();
        let read = (&file).take(SHOWN_BYTES).read_to_end(&mut start);
        read.map_err(io)?;
        let header_bytes = match start.split_first_chunk() {
            Some((length, [b'{', ..])) => u64::from_le_bytes(*length),
            _ => return Err(Error::file(path, foreign(&start))),
        };
        if header_bytes > MAX_HEADER_BYTES {
            return Err(Error::file(path, foreign(&start)));
        }
        let rest = file_bytes.saturating_sub(LENGTH_BYTES);
        if header_bytes > rest {
            return Err(wrong(
                "bytes of the header",
                format!("at most {rest}, which the file has"),
                header_bytes,
            ));
        }
        file.seek(SeekFrom::Start(LENGTH_BYTES)).map_err(io)?;
        let mut text = vec![0; header_bytes as usize];
        file.read_exact(&mut text).map_err(io)?;
        let header: Header = serde_json::from_slice(&text)
            .map_err(|error| Error::file(path, format!("header: {error}")))?;
        let end = header
            .check()
            .map_err(|problem| Error::file(path, problem))?;
        if end != rest - header_bytes {
            return Err(wrong(
                "bytes after the header",
                format!("{end}, as the header says"),
                rest - header_bytes,
            ));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            header,
            data_start: LENGTH_BYTES + header_bytes,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// The tensor `name`, if the file has one.
    pub fn read(&mut self, name: &str) -> Result<Option<HostTensor>, Error> {
        let Some(info) = self.header.tensors.get(name) else {
            return Ok(None);
        };
        let wrong = |problem: String| Error::file(&self.path, format!("tensor {name}: {problem}"));
        let dtype = match info.dtype {
            Dtype::F32 => DType::F32,
            Dtype::BF16 => DType::Bf16,
            Dtype::F16 => DType::F16,
            Dtype::I32 => DType::I32,
            Dtype::I64 => DType::I64,
            Dtype::U32 => DType::U32,
            other => {
                return Err(wrong(format!(
                    "wanted F32, BF16, F16, I32, I64 or U32, got {other}"
                )));
            }
        };
        let mut tensor =
            HostTensor::new(dtype, &info.shape).map_err(|error| wrong(error.to_string()))?;
        let start = self.data_start + info.data_offsets.0 as u64;
        self.file
            .seek(SeekFrom::Start(start))
            .and_then(|_| self.file.read_exact(tensor.bytes_mut()))
            .map_err(|error| wrong(error.to_string()))?;
        Ok(Some(tensor))
    }
}

/// Error message for a file that begins with `start`, which is neither a header's length nor a header.
fn foreign(start: &[u8]) -> String {
    let other = OTHERS.iter().find(|(magic, _)| start.starts_with(magic));
    let other = other.map_or_else(String::new, |(_, name)| format!(" ({name})"));
    let got = match start {
        [] => "an empty one".to_owned(),
        _ => format!("one that begins with \"{}\"{other}", start.escape_ascii()),
    };
    format!(
        "not a safetensors file: wanted one that begins with the 8 bytes of its header's length and a {{, got {got}"
    )
}

impl Header {
    /// Checks that every tensor has the bytes of its shape, without gaps or overlaps. Returns the end of the last tensor.
    fn check(&self) -> Result<u64, String> {
        let mut infos: Vec<_> = self.tensors.iter().collect();
        infos.sort_by_key(|(_, info)| info.data_offsets);
        let mut end = 0;
        for (
            name,
            TensorInfo {
                dtype,
                shape,
                data_offsets: (from, to),
            },
        ) in infos
        {
            if *from != end || to < from {
                return Err(format!(
                    "tensor {name}: wanted bytes from {end} on, got {from}..{to}"
                ));
            }
            let elements = shape
                .iter()
                .try_fold(1usize, |product, dim| product.checked_mul(*dim));
            let bits = elements.and_then(|elements| elements.checked_mul(dtype.bitsize()));
            let wanted = bits.map(|bits| bits.div_ceil(8));
            if wanted != Some(to - from) {
                let wanted = wanted.map_or("more than there can be".to_owned(), |wanted| {
                    wanted.to_string()
                });
                return Err(format!(
                    "tensor {name}: wanted {wanted} bytes for {dtype} {shape:?}, got {}",
                    to - from
                ));
            }
            end = *to;
        }
        Ok(end as u64)
    }
}

/// Writes a file of contiguous tensors. An existing file at `path` is kept until the new one is complete.
pub(crate) fn write(
    path: &Path,
    metadata: BTreeMap<String, String>,
    tensors: &[(&str, &HostTensor)],
) -> Result<(), Error> {
    let mut header = Header {
        metadata,
        ..Header::default()
    };
    let mut end = 0;
    for (name, tensor) in tensors {
        if !tensor.view()?.is_contiguous() {
            return Err(Error::file(
                path,
                format!("tensor {name}: wanted a contiguous one to write"),
            ));
        }
        let from = end;
        end += tensor.bytes().len();
        let info = TensorInfo {
            dtype: match tensor.dtype() {
                DType::F32 => Dtype::F32,
                DType::Bf16 => Dtype::BF16,
                DType::F16 => Dtype::F16,
                DType::I32 => Dtype::I32,
                DType::I64 => Dtype::I64,
                DType::U32 => Dtype::U32,
            },
            shape: tensor.dims().to_vec(),
            data_offsets: (from, end),
        };
        header.tensors.insert((*name).to_owned(), info);
    }
    let mut text = serde_json::to_string(&header).map_err(|error| Error::file(path, error))?;
    let padding = text.len().next_multiple_of(LENGTH_BYTES as usize) - text.len();
    text.extend(std::iter::repeat_n(' ', padding));

    let io = |error| Error::file(path, error);
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let mut temporary = tempfile::Builder::new();
    temporary.prefix(".gated-delta-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        temporary.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut temporary = temporary.tempfile_in(folder).map_err(io)?;
    {
        let mut file = BufWriter::new(temporary.as_file_mut());
        file.write_all(&(text.len() as u64).to_le_bytes())
            .map_err(io)?;
        file.write_all(text.as_bytes()).map_err(io)?;
        for (_, tensor) in tensors {
            file.write_all(tensor.bytes()).map_err(io)?;
        }
        file.flush().map_err(io)?;
    }
    temporary.as_file().sync_all().map_err(io)?;
    temporary
        .persist(path)
        .map_err(|error| Error::file(path, error.error))?;
    Ok(())
}

//! The index tensors of a launch, copied to the host, and the tensors that they index.

use std::ptr;
use std::slice;

use crate::error::Error;
use crate::library::Library;
use crate::step::{Argument, Request, TENSORS, Unit};
use crate::stream::StreamRef;
use crate::tensor::DType;
use crate::tensor_checks::Named;

/// Numbers and tensors that determine which states and windows a launch reads and writes.
pub struct Indices<'a> {
    /// B, the number of rows.
    pub rows: usize,
    /// T, the largest number of new tokens of a row; 0 for a commit.
    pub tokens: usize,
    /// Number of tokens in packed tensors; 0 for dense ones.
    pub total: usize,
    /// T', the number of previous tokens of a row.
    pub previous_tokens: usize,
    /// Whether the state after a row's last (or last kept) token goes to the write slot.
    pub writes_final: bool,
    pub null_slot: Option<u32>,
    pub pool: Named<'a>,
    /// Pool that is written.
    pub write_pool: Named<'a>,
    pub snapshots: Option<Named<'a>>,
    /// Windows that are read, and windows that are written. Each has as many slots as its pool.
    pub windows: Option<[Named<'a>; 2]>,
    /// Windows after every token.
    pub window_snapshots: Option<Named<'a>>,
    /// Number of tokens between checkpoints.
    pub every: usize,
    /// N, the largest number of pending tokens, and R, the number of entries of a ring.
    pub ring: [usize; 2],
    /// Contents of the index tensors, by [`Argument`].
    numbers: [Option<Vec<i64>>; TENSORS],
}

impl<'a> Indices<'a> {
    /// Checks `request` as a launch would, waits until `stream` has finished writing the index tensors, and reads them.
    pub fn of(
        library: &Library,
        stream: StreamRef<'_>,
        request: &Request<'a>,
    ) -> Result<Self, Error> {
        let problem = request.check()?;
        problem.check_workspace(&request.lengths(), request.get(Argument::Workspace))?;
        wait(library, stream)?;
        let mut numbers = [const { None }; TENSORS];
        let indices = Argument::ALL.iter().filter(|it| it.unit() == Unit::Row);
        for tensor in indices.filter_map(|&it| Some((it, request.get(it)?))) {
            numbers[tensor.0 as usize] = Some(read(library, tensor.1)?);
        }
        let total = request.total().unwrap_or(0);
        let tokens = match (problem.is_chunked(), request.has(Argument::CuSeqlens)) {
            (false, _) => problem.constants.tokens as usize,
            (true, false) => request.most_tokens(),
            // T above `total` is only a hint.
            (true, true) => request.most_tokens().min(total),
        };
        Ok(Self {
            rows: request.batch() as usize,
            tokens,
            total,
            previous_tokens: problem.constants.previous_tokens as usize,
            writes_final: problem.writes_final(),
            null_slot: request.options.null_slot,
            pool: request.pool(),
            write_pool: request.written_pool(),
            snapshots: request.get(Argument::Snapshots),
            windows: request.windows(),
            window_snapshots: request.get(Argument::WindowSnapshots),
            every: request.checkpoint_every(),
            ring: [problem.constants.pending, problem.constants.ring].map(|n| n as usize),
            numbers,
        })
    }

    /// Contents of an index tensor. `None` if it is not given.
    pub fn numbers(&self, argument: Argument) -> Option<&[i64]> {
        self.numbers[argument as usize].as_deref()
    }
}

/// Waits until `stream` has finished writing the index tensors.
fn wait(library: &Library, stream: StreamRef<'_>) -> Result<(), Error> {
    let Some(context) = library.context() else {
        return Ok(());
    };
    let _current = context.enter()?;
    // SAFETY: a `StreamRef` is live.
    unsafe { context.driver().stream_synchronize(stream.raw()) }
}

/// Reads an index tensor, `[B]` or `[B, T]`, whose rows have no gaps.
fn read(library: &Library, indices: Named<'_>) -> Result<Vec<i64>, Error> {
    library.check_memory(&[Some(indices)], |_| false)?;
    let tensor = indices.tensor;
    let element = tensor.dtype().size_of();
    let elements: usize = tensor.dims().iter().product();
    let mut bytes = vec![0u8; elements * element];
    let runs = if tensor.is_contiguous() {
        1
    } else {
        tensor.dims()[0]
    };
    if elements > 0 {
        let step = if runs > 1 {
            tensor.strides()[0] * element
        } else {
            0
        };
        let run = bytes.len() / runs;
        for (i, run) in bytes.chunks_exact_mut(run).enumerate() {
            copy(library, tensor.address() + (i * step) as u64, run)?;
        }
    }
    Ok(numbers(&bytes, tensor.dtype()))
}

/// Copies the bytes at `address` to `to`. The caller ensures that they belong to a tensor in the memory of `library`.
fn copy(library: &Library, address: u64, to: &mut [u8]) -> Result<(), Error> {
    match library.context() {
        Some(context) => {
            let _current = context.enter()?;
            let driver = context.driver();
            // SAFETY: the creator of the tensor promised that its elements are at this address; `to` has the length of the copy.
            unsafe { driver.memcpy_dtoh(to.as_mut_ptr().cast(), address, to.len()) }
        }
        None => {
            let from = ptr::with_exposed_provenance::<u8>(address as usize);
            // SAFETY: the tensor borrows this host memory; its address was exposed when the tensor was created.
            to.copy_from_slice(unsafe { slice::from_raw_parts(from, to.len()) });
            Ok(())
        }
    }
}

fn numbers(bytes: &[u8], dtype: DType) -> Vec<i64> {
    if dtype == DType::I64 {
        let (words, _) = bytes.as_chunks();
        return words.iter().map(|&word| i64::from_ne_bytes(word)).collect();
    }
    let (words, _) = bytes.as_chunks();
    let number = |&word| match dtype {
        DType::U32 => u32::from_ne_bytes(word).into(),
        _ => i32::from_ne_bytes(word).into(),
    };
    words.iter().map(number).collect()
}

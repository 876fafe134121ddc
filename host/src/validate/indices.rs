//! Index tensors, read on the host.

use std::ptr;
use std::slice;

use crate::error::Error;
use crate::library::Library;
use crate::shapes::Named;
use crate::stream::StreamRef;
use crate::tensor::DType;

/// Waits for what `stream` still has to do to the indices.
pub fn wait(library: &Library, stream: StreamRef<'_>) -> Result<(), Error> {
    let Some(context) = library.context() else {
        return Ok(());
    };
    let _current = context.enter()?;
    // SAFETY: a `StreamRef` is live.
    unsafe { context.driver().stream_synchronize(stream.raw()) }
}

/// The numbers of an index tensor, `[B]` or `[B, T]`, whose rows have no gaps.
pub fn read(library: &Library, indices: Named<'_>) -> Result<Vec<i64>, Error> {
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

/// Copies what lies at `address`, in the memory of `library`'s tensors: that of a tensor, by the callers.
fn copy(library: &Library, address: u64, to: &mut [u8]) -> Result<(), Error> {
    match library.context() {
        Some(context) => {
            let _current = context.enter()?;
            let driver = context.driver();
            // SAFETY: whoever made the tensor promised that it lies there; `to` has that many bytes.
            unsafe { driver.memcpy_dtoh(to.as_mut_ptr().cast(), address, to.len()) }
        }
        None => {
            let from = ptr::with_exposed_provenance::<u8>(address as usize);
            // SAFETY: the tensor borrows this memory of the host, whose address was exposed when it was made.
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

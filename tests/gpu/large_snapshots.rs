//! Snapshots of more than 2³² elements: 512 rows of 8 tokens and 64 value heads.

use std::io::{self, Write};

use gated_delta::driver::DeviceMemory;
use gated_delta_test_support::backend::{cuda, gpu, launch};
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::Change;
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};

use crate::launches::context_of;

const ROWS: usize = 512;
const TOKENS: usize = 8;
const HEADS: usize = 64;

/// Number (of four) of the row that row `b` is a copy of.
fn original(b: usize) -> usize {
    b / 3 % 4
}

/// Copies of four rows read the four slots of one pool and do not write it. Their o and snapshots have the bits of the four rows
/// alone. Snapshots are compared on both sides of each multiple of 2³⁰ elements.
fn large_snapshots(family: Family) {
    let Some(backend) = cuda() else { return };
    let state = HEADS * family.dim * family.dim;
    let row_bytes = TOKENS * state * family.state.size_of();
    let mut spec = Spec {
        batch: 4,
        tokens: TOKENS,
        heads: HEADS / 4,
        ratio: 4,
        snapshots: Some(0),
        slots: SlotChoice {
            read: true,
            ..SlotChoice::NONE
        },
        ..Spec::plain(family)
    };
    spec.update_state = false;
    let four = spec.problem();
    let alone = backend.run(&four.case(&spec.form), None);
    let mut many = four.take_rows(&(0..ROWS).map(original).collect::<Vec<_>>());
    many.snapshots = None;
    if let Some(convolved) = &mut many.convolved {
        convolved.window_snapshots = None;
    }
    let case = many.case(&spec.form);
    let (rows, after) = backend
        .with(&case, |library, stream, args| {
            let context = context_of(library);
            let mut memory = DeviceMemory::allocate(context, ROWS * row_bytes).unwrap();
            memory.fill(0xff).unwrap();
            let dims = [ROWS, TOKENS, HEADS, family.dim, family.dim];
            let snapshots = Some(memory.tensor_mut(family.state, &dims).unwrap());
            let mut args = *args;
            args.snapshots = snapshots;
            // SAFETY: the buffers and the snapshots are alive until the wait below.
            unsafe { launch(library, stream, &args, None) }.unwrap();
            let _current = context.enter().unwrap();
            // SAFETY: the stream is alive.
            unsafe { context.driver().stream_synchronize(stream.raw()) }.unwrap();
            let read = |b: usize| {
                let mut bytes = vec![0u8; row_bytes];
                let from = memory.address() + (b * row_bytes) as u64;
                let to = bytes.as_mut_ptr().cast();
                // SAFETY: the row lies in the memory.
                unsafe { context.driver().memcpy_dtoh(to, from, row_bytes) }.unwrap();
                (b, bytes)
            };
            let step = (1 << 30) / (TOKENS * state);
            let edges = (0..=ROWS / step).flat_map(|i| [(i * step).saturating_sub(1), i * step]);
            let rows: Vec<_> = edges
                .filter(|b| *b < ROWS)
                .chain([ROWS - 1])
                .map(read)
                .collect();
            rows
        })
        .unwrap();
    let view = alone.snapshots.as_ref().unwrap();
    let wanted: &[u8] = bytemuck::cast_slice(&alone.buffers[view.buffer].words);
    for (b, bytes) in rows {
        assert!(
            bytes == wanted[original(b) * row_bytes..][..row_bytes],
            "{family:?}: the snapshots of row {b} differ"
        );
    }
    for b in 0..ROWS {
        assert!(
            after.bits(&after.o().entry(&[b])) == alone.bits(&alone.o().entry(&[original(b)])),
            "{family:?}: o of row {b} differs"
        );
    }
}

#[test]
fn snapshots_beyond_2_32_elements() {
    const WANTED: usize = 24 << 30;
    let Some(context) = gpu() else { return };
    let memory = context.device().total_memory().unwrap();
    if memory < WANTED {
        let _ = writeln!(
            io::stderr(),
            "SKIPPED: the large snapshots ({memory} bytes of GPU memory, not {WANTED})"
        );
        return;
    }
    let kinds = Family::of_each_kind().into_iter();
    // Larger states reach as many elements with fewer rows.
    let kinds = kinds.map(|family| Family { dim: 128, ..family });
    let wanted = |family: &Family| !family.decode && family.is_recurrent();
    kinds.filter(wanted).for_each(large_snapshots);
}

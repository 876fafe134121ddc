//! A pool of more than 2³² elements.

use std::io::{self, Write};

use gated_delta::driver::{Context, DeviceMemory};
use gated_delta_test_support::backend::{cuda, gpu, launch, on_threads};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::check;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::Array;
use gated_delta_test_support::spec::{Family, Spec};

use crate::launches::wait_for_copies;

/// A pool in GPU memory, of which the host has a copy of some slots.
struct LargePool {
    memory: DeviceMemory,
    /// Bytes between the starts of two slots.
    slot: usize,
}

impl LargePool {
    /// A pool of NaN, with the first slots of `pool`, of `slot` bytes each, copied to the slots `to`.
    fn new(context: &Context, slots: usize, slot: usize, pool: &[u8], to: &[usize]) -> Self {
        let mut memory = DeviceMemory::allocate(context, slots * slot).unwrap();
        memory.fill(0xff).unwrap();
        let _current = context.enter().unwrap();
        for (bytes, to) in pool.chunks(slot).zip(to) {
            let address = memory.address() + (to * slot) as u64;
            // SAFETY: slot `to` lies in the memory.
            unsafe {
                context
                    .driver()
                    .memcpy_htod(address, bytes.as_ptr().cast(), slot)
            }
            .unwrap();
        }
        wait_for_copies(context);
        Self { memory, slot }
    }

    fn read(&self, context: &Context, slot: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.slot];
        let address = self.memory.address() + (slot * self.slot) as u64;
        let _current = context.enter().unwrap();
        // SAFETY: the slot lies in the memory.
        unsafe {
            context
                .driver()
                .memcpy_dtoh(bytes.as_mut_ptr().cast(), address, self.slot)
        }
        .unwrap();
        bytes
    }
}

/// 512 rows whose slots lie at both ends of a pool of more than 2³² elements have the bits of a launch on a small pool. The slots
/// next to them stay unchanged, and so do the slots at offsets truncated to 31 and 32 bits.
fn large_pool(family: Family) {
    let (Some(backend), Some(context)) = (cuda(), gpu()) else {
        return;
    };
    const ROWS: usize = 512;
    let heads = 2 * 128 / family.dim;
    let slot_elements = heads * family.dim * family.dim;
    let slots = (1usize << 32) / slot_elements + 3 * ROWS;
    let spec = Spec {
        batch: ROWS,
        heads,
        ratio: 1,
        // Windows would need equally many slots.
        conv: None,
        ..Spec::plain(family)
    };
    let mut problem = spec.problem();
    problem.read_slots = Some(Array::indices((0..ROWS as i64).rev()));
    let small = problem.case(&spec.form);
    let wanted = backend.run(&small, None);
    check(&small, &wanted);

    // Slot s of the small pool is slot far(s) of the large one: even slots at the front, odd ones at the end.
    let far = |slot: usize| {
        if slot.is_multiple_of(2) {
            slot
        } else {
            slots - 1 - slot
        }
    };
    let far_slots: Vec<usize> = (0..ROWS).map(far).collect();
    let bytes = |case: &Case| {
        bytemuck::cast_slice::<u128, u8>(&case.buffers[case.pool.buffer].words).to_vec()
    };
    let mut pool = LargePool::new(
        context,
        slots,
        slot_elements * family.state.size_of(),
        &bytes(&small),
        &far_slots,
    );

    let slots_buffer = small.read_slots.as_ref().unwrap().buffer;
    let mut moved = small.clone();
    for b in 0..ROWS {
        let slot = far(small.buffers[slots_buffer].index(b) as usize);
        moved.buffers[slots_buffer].set_bits(b, slot as u64);
    }
    let (_, after) = backend
        .with(&moved, |library, stream, args| {
            let tensor = pool
                .memory
                .tensor_mut(family.state, &[slots, heads, family.dim, family.dim])
                .unwrap();
            let mut args = *args;
            args.pool = tensor;
            // SAFETY: the pool is alive until `with` has waited, and live rows write slots of their own.
            unsafe { launch(library, stream, &args, None) }.unwrap();
        })
        .unwrap();
    let (got, want) = (after.o_bits(), wanted.o_bits());
    let row = want.len() / ROWS;
    let differing: Vec<usize> = (0..ROWS)
        .filter(|b| got[b * row..][..row] != want[b * row..][..row])
        .collect();
    assert!(
        differing.is_empty(),
        "{family:?}: o differs in rows {differing:?} of slots {:?}",
        differing
            .iter()
            .map(|b| far(ROWS - 1 - b))
            .collect::<Vec<_>>()
    );
    let wanted = bytes(&wanted);
    for (slot, wanted) in wanted.chunks(pool.slot).take(ROWS).enumerate() {
        assert!(
            pool.read(context, far(slot)) == wanted,
            "{family:?}: the state of row slot {slot} differs"
        );
    }
    let wraps = [1usize << 30, 1 << 31, 1 << 32].map(|wrap| wrap / slot_elements);
    let wrapped = far_slots
        .iter()
        .flat_map(|slot| wraps.map(|wrap| slot % wrap));
    let around = far_slots
        .iter()
        .flat_map(|slot| [slot.saturating_sub(1), slot + 1]);
    for slot in wrapped
        .chain(around)
        .filter(|slot| *slot < slots && !far_slots.contains(slot))
    {
        assert!(
            pool.read(context, slot).iter().all(|byte| *byte == 0xff),
            "{family:?}: slot {slot} is nobody's"
        );
    }
}

#[test]
fn a_pool_beyond_2_32_elements() {
    const WANTED: usize = 24 << 30;
    let Some(context) = gpu() else { return };
    let memory = context.device().total_memory().unwrap();
    if memory < WANTED {
        let _ = writeln!(
            io::stderr(),
            "SKIPPED: the large pools ({memory} bytes of GPU memory, not {WANTED})"
        );
        return;
    }
    // Number of pools in memory at a time. There must be room for other tests too.
    const AT_ONCE: usize = 3;
    for families in
        Family::of_each_kind().chunks((memory / WANTED).saturating_sub(1).clamp(1, AT_ONCE))
    {
        on_threads(families, |&family| large_pool(family));
    }
}

//! States: pool slots, element types, and all index arithmetic on S.
//!
//! A state row is contiguous: the K channels of one v (K-last), or the V columns of one k (V-last). A group of lanes shares a
//! row. Each lane owns a fragment of 8 elements; the fragments are laid out so that every access of the group is a run of whole
//! 16-byte vectors:
//!
//! | state | elements of lane l in a group of L lanes |
//! |---|---|
//! | bf16, f16 | 8l .. 8l+8 |
//! | f32 | 4l .. 4l+4 and 4L+4l .. 4L+4l+4 |
#![allow(unsafe_op_in_unsafe_fn)] // every unsafe function states its requirements

use crate::constants::{Element, Index};
use crate::device::{float, global};
use crate::math::each::each;
use crate::math::elements::{Raw, bytes_of, store};
use crate::step::{StepConstants, StepParams};

/// Number of elements of a row that a lane owns.
pub const FRAGMENT: u32 = 8;

/// A fragment, unconverted: 16-bit elements fill the first four words.
pub type RawFragment = [u32; 8];

/// Element type of a state, by its width; a load-time constant selects between the 16-bit types.
pub trait StateElement {
    /// This type, as a value; bf16 also stands for f16.
    const ELEMENT: Element;
    /// Bytes of an element.
    const BYTES: u32;
    /// Elements in a 16-byte vector.
    const VECTOR: u32 = 16 / Self::BYTES;
    /// Number of 16-byte vectors of a fragment.
    const VECTORS: usize = (FRAGMENT / Self::VECTOR) as usize;

    /// Converts a fragment to f32.
    fn widen(c: &StepConstants, raw: RawFragment) -> [f32; 8];

    /// Rounds values to a fragment, to nearest even; f16 is clamped to ±65504.
    fn narrow(c: &StepConstants, values: [f32; 8]) -> RawFragment;
}

/// bf16 states, or f16 states if the load-time constant `state_f16` is 1: same loads and stores, another conversion.
pub struct B16;

/// f32 states.
pub struct F32;

impl StateElement for B16 {
    const ELEMENT: Element = Element::Bf16;
    const BYTES: u32 = 2;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn widen(c: &StepConstants, raw: RawFragment) -> [f32; 8] {
        let mut values = [0.0; 8];
        each!(i in 0..4 => {
            [values[2 * i], values[2 * i + 1]] = float::b16x2_to_f32(raw[i], c.state_f16 != 0);
        });
        values
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn narrow(c: &StepConstants, values: [f32; 8]) -> RawFragment {
        let mut raw = [0; 8];
        each!(i in 0..4 => {
            raw[i] = float::pack_b16x2(values[2 * i], values[2 * i + 1], c.state_f16 != 0);
        });
        raw
    }
}

impl StateElement for F32 {
    const ELEMENT: Element = Element::F32;
    const BYTES: u32 = 4;

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn widen(_: &StepConstants, raw: RawFragment) -> [f32; 8] {
        let mut values = [0.0; 8];
        each!(i in 0..8 => values[i] = f32::from_bits(raw[i]));
        values
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn narrow(_: &StepConstants, values: [f32; 8]) -> RawFragment {
        let mut raw = [0; 8];
        each!(i in 0..8 => raw[i] = values[i].to_bits());
        raw
    }
}

/// A thread's elements of every row: one fragment, if the group's fragments make a row; otherwise, for K-last rows of several
/// runs of fragments, one fragment of each run (its parts).
#[derive(Clone, Copy)]
pub struct Share {
    /// Position of this thread in the group of lanes that shares a row.
    pub lane: u32,
    /// Lanes of the group.
    pub lanes: u32,
    /// First of the `8 * lanes` elements that the group owns in every row.
    pub first: u32,
}

impl Share {
    /// The share of `thread` in groups of `lanes` lanes, which follow each other and own whole rows.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn of(thread: u32, lanes: u32) -> Self {
        Self {
            lane: thread % lanes,
            lanes,
            first: 0,
        }
    }

    /// The same share in groups that own elements from `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn from(self, first: u32) -> Self {
        Self { first, ..self }
    }

    /// Element offset in a row of vector `i` of this thread's fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn vector<S: StateElement>(self, i: usize) -> u32 {
        self.first + self.column::<S>(i * S::VECTOR as usize)
    }

    /// Position, within the `8 * lanes` elements of the group, of element `i` of this thread's fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn column<S: StateElement>(self, i: usize) -> u32 {
        let (vector, within) = (i as u32 / S::VECTOR, i as u32 % S::VECTOR);
        (vector * self.lanes + self.lane) * S::VECTOR + within
    }

    /// This thread's elements of part `i` of the rows, which is the group's i-th run of `8 * lanes` elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn part(self, i: usize) -> Self {
        Self {
            first: self.first + i as u32 * FRAGMENT * self.lanes,
            ..self
        }
    }

    /// Loads the channels of q or k that match this thread's fragments of a row.
    ///
    /// # Safety
    /// As for [`Self::load_matching`], with a row of `PARTS` parts.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_parts<S: StateElement, const PARTS: usize>(
        self,
        address: u64,
        element: u32,
        wide: bool,
    ) -> [Raw<8>; PARTS] {
        let mut raw = [Raw([0; 8]); PARTS];
        each!(i in 0..PARTS => raw[i] = self.part(i).load_matching::<S>(address, element, wide));
        raw
    }

    /// Loads the channels of q or k that match this thread's fragment of a row.
    ///
    /// # Safety
    /// `address` is a row of at least `first + 8 * lanes` elements that nobody writes during the launch.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_matching<S: StateElement>(
        self,
        address: u64,
        element: u32,
        wide: bool,
    ) -> Raw<8> {
        let mut raw = Raw([0; 8]);
        each!(i in 0..S::VECTORS => {
            let address = address + (self.vector::<S>(i) * bytes_of(element)) as u64;
            if S::VECTORS == 1 {
                raw.load::<8>(0, address, element, wide)
            } else {
                raw.load::<4>(4 * i, address, element, wide)
            }
        });
        raw
    }

    /// Stores channels that match this thread's fragment of a row in the places from which [`Self::load_matching`] loads them,
    /// rounded.
    ///
    /// # Safety
    /// `address` is a row of at least `first + 8 * lanes` elements, a multiple of 16; only this thread writes its channels.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_matching<S: StateElement>(
        self,
        address: u64,
        element: u32,
        values: [f32; 8],
    ) {
        let [a, b, c, d, e, f, g, h] = values;
        let vector = |i| address + (self.vector::<S>(i) * bytes_of(element)) as u64;
        if S::VECTORS == 1 {
            store(values, vector(0), element, true);
        } else {
            store([a, b, c, d], vector(0), element, true);
            store([e, f, g, h], vector(1), element, true);
        }
    }
}

/// Number of lanes of a group whose fragments, `parts` for each lane, make a K-last row. A power of two, because sums over the
/// lanes are butterfly reductions. K = 128 has 16 lanes of 8 channels, K = 96 four lanes of three times 8.
pub const fn lanes_of(k: u32, parts: usize) -> u32 {
    k / (FRAGMENT * parts as u32)
}

/// Compile-time check that K-last states of these dims divide into groups of [`lanes_of`] lanes with `rows` rows each, and these
/// into blocks of `threads` threads.
pub const fn check_k_last((k, parts): (u32, usize), v: u32, rows: u32, threads: u32) {
    let lanes = lanes_of(k, parts);
    assert!(
        k == lanes * FRAGMENT * parts as u32 && lanes.is_power_of_two() && lanes <= 32,
        "K: 8 channels for each part of a power of two of lanes"
    );
    assert!(threads.is_multiple_of(32), "whole warps");
    assert!(
        v.is_multiple_of(threads / lanes * rows),
        "V: whole tiles of rows"
    );
}

/// Compile-time check that V-last states of these dims divide into groups of `lanes` lanes with `rows` rows each, and these into
/// a block of `8 * lanes` columns.
pub const fn check_v_last(k: u32, v: u32, lanes: u32, rows: u32) {
    let (columns, threads) = (FRAGMENT * lanes, k / rows * lanes);
    assert!(
        k == 64 || k == 96 || k == 128,
        "K: a lane of a warp has 2 or 4 channels, or 24 lanes have 4"
    );
    assert!(
        rows.is_power_of_two() && 2 <= rows && rows <= 16,
        "rows are summed pair by pair"
    );
    assert!(
        lanes.is_power_of_two() && 4 <= lanes && lanes <= 32,
        "columns of whole warps"
    );
    assert!(v.is_multiple_of(columns), "V: whole tiles of columns");
    assert!(
        threads.is_multiple_of(32) && threads >= columns && threads <= 512,
        "a thread for each column"
    );
}

/// Fragments of `ROWS` rows, `PARTS` for each row.
pub type RawRows<const ROWS: usize, const PARTS: usize> = [[RawFragment; PARTS]; ROWS];

/// Converts fragments to f32.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn widen_rows<S: StateElement, const ROWS: usize, const PARTS: usize>(
    c: &StepConstants,
    raw: RawRows<ROWS, PARTS>,
) -> [[[f32; 8]; PARTS]; ROWS] {
    raw.map(|parts| parts.map(|raw| S::widen(c, raw)))
}

/// Rows of a head's state, and elements of a row: `[V, K]` (K-last) or `[K, V]` (V-last).
pub type Shape = [u32; 2];

/// One head's state.
#[derive(Clone, Copy)]
pub struct Head {
    /// Address of the state's first element.
    pub address: u64,
    /// Elements of a row.
    pub row_elements: u32,
    /// Whether 16-byte accesses are aligned.
    pub wide: bool,
}

impl Head {
    /// Head `hv`, of `shape`, in `slot` of a pool whose slots are `stride` elements apart. The slot is in range.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn of_slot<S: StateElement>(
        pool: u64,
        slot: u64,
        stride: u32,
        (hv, shape): (u32, Shape),
        wide: bool,
    ) -> Self {
        let [rows, row_elements] = shape;
        let first = slot as u32 as u64 * stride as u64 + (hv * rows * row_elements) as u64;
        Self {
            address: pool + first * S::BYTES as u64,
            row_elements,
            wide,
        }
    }

    /// The fragments of `share` in the rows from `first` on.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn rows<S: StateElement>(self, share: Share, first: u32) -> Rows {
        let elements = first * self.row_elements + share.vector::<S>(0);
        Rows {
            address: self.address + (elements * S::BYTES) as u64,
            row_bytes: self.row_elements * S::BYTES,
            part_bytes: FRAGMENT * share.lanes * S::BYTES,
            vector_bytes: share.lanes * S::VECTOR * S::BYTES,
            wide: self.wide,
        }
    }

    /// Address of 16-byte vector `i` of this thread's fragment of `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn vector_address<S: StateElement>(self, share: Share, row: u32, i: usize) -> u64 {
        self.address + ((row * self.row_elements + share.vector::<S>(i)) * S::BYTES) as u64
    }

    /// Loads this thread's fragment of `row`; unless `live`, reads nothing, and the fragment is undefined.
    ///
    /// # Safety
    /// If `live`, the head's state is global memory, and no other thread writes this fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load<S: StateElement>(self, share: Share, row: u32, live: bool) -> RawFragment {
        let mut raw = [0; 8];
        each!(i in 0..S::VECTORS => {
            let address = self.vector_address::<S>(share, row, i);
            if self.wide {
                [raw[4 * i], raw[4 * i + 1], raw[4 * i + 2], raw[4 * i + 3]] =
                    global::load_state_b128(address, live);
            } else {
                each!(word in 0..4 => {
                    raw[4 * i + word] = load_word::<S>(address + 4 * word as u64, live);
                });
            }
        });
        raw
    }

    /// Loads 16 bytes of the state, from element `element` on.
    ///
    /// # Safety
    /// The head's state is global memory, and no other thread writes these elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_vector<S: StateElement>(self, element: u32) -> [u32; 4] {
        let address = self.address + (element * S::BYTES) as u64;
        if self.wide {
            return global::load_state_b128(address, true);
        }
        let mut words = [0; 4];
        each!(word in 0..4 => words[word] = load_word::<S>(address + 4 * word as u64, true));
        words
    }

    /// Stores 4 elements of 16 bits, from element `element` on, a multiple of 4.
    ///
    /// # Safety
    /// The head's state is live global memory, and no other thread accesses these elements.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_four(self, element: u32, [low, high]: [u32; 2]) {
        let address = self.address + (element * B16::BYTES) as u64;
        if self.wide {
            global::store_state_b64(address, [low, high]);
        } else {
            store_word::<B16>(address, low);
            store_word::<B16>(address + 4, high);
        }
    }

    /// [`Self::load`]; zeros if the row is `fresh`.
    ///
    /// # Safety
    /// As for [`Self::load`], unless the row is fresh.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_start<S: StateElement>(
        self,
        share: Share,
        row: u32,
        (live, fresh): (bool, bool),
    ) -> RawFragment {
        let raw = self.load::<S>(share, row, live && !fresh);
        if fresh { [0; 8] } else { raw }
    }

    /// [`Self::load_start`] for all parts of `ROWS` rows, from `first` on.
    ///
    /// # Safety
    /// As for [`Self::load_start`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load_start_rows<S: StateElement, const ROWS: usize, const PARTS: usize>(
        self,
        share: Share,
        first: u32,
        from: (bool, bool),
    ) -> RawRows<ROWS, PARTS> {
        let mut raw = [[[0; 8]; PARTS]; ROWS];
        each!(r in 0..ROWS => {
            each!(i in 0..PARTS => {
                raw[r][i] = self.load_start::<S>(share.part(i), first + r as u32, from);
            });
        });
        raw
    }

    /// Stores all parts of `row`, rounded.
    ///
    /// # Safety
    /// As for [`Self::store`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_row<S: StateElement, const PARTS: usize>(
        self,
        c: &StepConstants,
        share: Share,
        row: u32,
        values: [[f32; 8]; PARTS],
    ) {
        each!(i in 0..PARTS => self.store::<S>(share.part(i), row, S::narrow(c, values[i])));
    }

    /// [`Self::store_row`]; returns the values of the stored row.
    ///
    /// # Safety
    /// As for [`Self::store`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_rounded<S: StateElement, const PARTS: usize>(
        self,
        c: &StepConstants,
        share: Share,
        row: u32,
        mut values: [[f32; 8]; PARTS],
    ) -> [[f32; 8]; PARTS] {
        each!(i in 0..PARTS => {
            let rounded = S::narrow(c, values[i]);
            self.store::<S>(share.part(i), row, rounded);
            values[i] = S::widen(c, rounded);
        });
        values
    }

    /// Stores this thread's fragment of `row`.
    ///
    /// # Safety
    /// The head's state is live global memory, and no other thread accesses this fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store<S: StateElement>(self, share: Share, row: u32, raw: RawFragment) {
        each!(i in 0..S::VECTORS => {
            let address = self.vector_address::<S>(share, row, i);
            if self.wide {
                global::store_state_b128(
                    address,
                    [raw[4 * i], raw[4 * i + 1], raw[4 * i + 2], raw[4 * i + 3]],
                );
            } else {
                each!(word in 0..4 => {
                    store_word::<S>(address + 4 * word as u64, raw[4 * i + word]);
                });
            }
        });
    }
}

/// A thread's fragments of consecutive rows of a head's state. Rows are counted from the first one. With constant indices, all
/// accesses have one base and constant offsets: an address for each row would take registers from the load to the store.
///
/// Some accesses have an address for each row instead: conditional loads ([`Head::load_start`]), because ptxas puts branches
/// between those with one base, and stores that are faster so ([`Head::store`]; docs/lab-notes.md, "One base for the rows of a
/// state").
#[derive(Clone, Copy)]
pub struct Rows {
    /// Address of the first vector of the first row's first part.
    address: u64,
    row_bytes: u32,
    part_bytes: u32,
    vector_bytes: u32,
    wide: bool,
}

impl Rows {
    /// Address of 16-byte vector `i` of part `part` of `row`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn vector_address(self, row: usize, part: usize, i: usize) -> u64 {
        let (row, part, vector) = (row as u32, part as u32, i as u32);
        let bytes = row * self.row_bytes + part * self.part_bytes + vector * self.vector_bytes;
        self.address + bytes as u64
    }

    /// Loads part `part` of `row`.
    ///
    /// # Safety
    /// The head's state is global memory, and no other thread writes this fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn load<S: StateElement>(self, row: usize, part: usize) -> RawFragment {
        let mut raw = [0; 8];
        each!(i in 0..S::VECTORS => {
            let address = self.vector_address(row, part, i);
            if self.wide {
                [raw[4 * i], raw[4 * i + 1], raw[4 * i + 2], raw[4 * i + 3]] =
                    global::load_state_b128(address, true);
            } else {
                each!(word in 0..4 => {
                    raw[4 * i + word] = load_word::<S>(address + 4 * word as u64, true);
                });
            }
        });
        raw
    }

    /// Stores all parts of `row`, rounded.
    ///
    /// # Safety
    /// As for [`Self::store`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_row<S: StateElement, const PARTS: usize>(
        self,
        c: &StepConstants,
        row: usize,
        values: [[f32; 8]; PARTS],
    ) {
        each!(i in 0..PARTS => self.store::<S>(row, i, S::narrow(c, values[i])));
    }

    /// [`Self::store_row`]; returns the values of the stored row.
    ///
    /// # Safety
    /// As for [`Self::store`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store_rounded<S: StateElement, const PARTS: usize>(
        self,
        c: &StepConstants,
        row: usize,
        mut values: [[f32; 8]; PARTS],
    ) -> [[f32; 8]; PARTS] {
        each!(i in 0..PARTS => {
            let rounded = S::narrow(c, values[i]);
            self.store::<S>(row, i, rounded);
            values[i] = S::widen(c, rounded);
        });
        values
    }

    /// Stores part `part` of `row`.
    ///
    /// # Safety
    /// The head's state is live global memory, and no other thread accesses this fragment.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn store<S: StateElement>(self, row: usize, part: usize, raw: RawFragment) {
        each!(i in 0..S::VECTORS => {
            let address = self.vector_address(row, part, i);
            if self.wide {
                global::store_state_b128(
                    address,
                    [raw[4 * i], raw[4 * i + 1], raw[4 * i + 2], raw[4 * i + 3]],
                );
            } else {
                each!(word in 0..4 => {
                    store_word::<S>(address + 4 * word as u64, raw[4 * i + word]);
                });
            }
        });
    }
}

/// Number of vectors of a state that a thread copies together.
const COPIED: usize = 4;

/// A block's part of a head's state: elements `first` to `first + width` of V, with all of K.
#[derive(Clone, Copy)]
pub struct Tile {
    /// `[V, K]` (K-last) or `[K, V]` (V-last).
    pub shape: Shape,
    v_last: bool,
    first: u32,
    width: u32,
}

impl Tile {
    /// `width` elements of V from `first` on; a multiple of 8.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn new(v_last: bool, [k, v]: [u32; 2], (first, width): (u32, u32)) -> Self {
        Self {
            shape: if v_last { [k, v] } else { [v, k] },
            v_last,
            first,
            width,
        }
    }

    /// Index in the head's state of the tile's `i`-th element.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn element(self, i: u32) -> u32 {
        let [_, row] = self.shape;
        if self.v_last {
            i / self.width * row + self.first + i % self.width
        } else {
            self.first * row + i
        }
    }

    /// Copies the tile from one state to another, bit for bit, or fills it with zeros if `fresh`. All threads that have the tile
    /// call it, with their index and their number.
    ///
    /// # Safety
    /// `to` and, unless `fresh`, `from` are states in live global memory without a common byte. No other thread accesses the tile
    /// in `to`, or writes the tile in `from`.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub unsafe fn copy<S: StateElement>(
        self,
        (from, to): (Head, Head),
        fresh: bool,
        (thread, threads): (u32, u32),
    ) {
        let [rows, row] = self.shape;
        let count = self.width * if self.v_last { rows } else { row };
        let elements = if to.wide { S::VECTOR } else { 1 };
        let mut first = thread * elements;
        while first < count {
            let mut raw = [[0; 4]; COPIED];
            let place = |i: usize| {
                let at = first + i as u32 * threads * elements;
                ((self.element(at) * S::BYTES) as u64, at < count)
            };
            let mut i = 0;
            while i < COPIED && !fresh {
                let (byte, is_there) = place(i);
                let address = from.address + byte;
                if to.wide {
                    raw[i] = global::load_state_b128(address, is_there);
                } else if S::BYTES == 4 {
                    raw[i][0] = global::load_state_b32(address, is_there);
                } else {
                    raw[i][0] = global::load_state_b16(address, is_there) as u32;
                }
                i += 1;
            }
            each!(i in 0..COPIED => {
                let (byte, is_there) = place(i);
                let address = to.address + byte;
                if is_there {
                    if to.wide {
                        global::store_state_b128(address, raw[i]);
                    } else if S::BYTES == 4 {
                        global::store_state_b32(address, raw[i][0]);
                    } else {
                        global::store_state_b16(address, raw[i][0] as u16);
                    }
                }
            });
            first += COPIED as u32 * threads * elements;
        }
    }
}

/// Loads four bytes of a state that is aligned only to its elements; undefined unless `live`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn load_word<S: StateElement>(address: u64, live: bool) -> u32 {
    if S::BYTES == 4 {
        global::load_state_b32(address, live)
    } else {
        global::load_state_b16(address, live) as u32
            | (global::load_state_b16(address + 2, live) as u32) << 16
    }
}

/// Stores four bytes of a state that is aligned only to its elements.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
unsafe fn store_word<S: StateElement>(address: u64, word: u32) {
    if S::BYTES == 4 {
        global::store_state_b32(address, word);
    } else {
        global::store_state_b16(address, word as u16);
        global::store_state_b16(address + 2, (word >> 16) as u16);
    }
}

/// Loads index `i`, sign-extended, so a negative index is out of every range; returns `otherwise` if there are no indices.
///
/// # Safety
/// `indices` has more than `i` elements of kind `index`, or `index` is [`Index::None`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn slot_of(indices: u64, index: u32, i: u64, otherwise: u64) -> u64 {
    if index == Index::None as u32 {
        otherwise
    } else if index == Index::I64 as u32 {
        let [low, high] = global::load_b64(indices + 8 * i);
        low as u64 | (high as u64) << 32
    } else {
        let slot = global::load_b32(indices + 4 * i);
        if index == Index::U32 as u32 {
            slot as u64
        } else {
            slot as i32 as i64 as u64
        }
    }
}

/// Whether row `b` starts from zeros, whatever its slot holds.
///
/// # Safety
/// `params` and `c` describe live tensors.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub unsafe fn is_fresh(c: &StepConstants, params: &StepParams, b: u32) -> bool {
    slot_of(params.fresh, c.fresh_index, b as u64, 0) != 0
}

/// Whether a slot makes its row active: in range, and not the null slot.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn is_live(slot: u64, pool_slots: u32, null_slot: u32) -> bool {
    slot < pool_slots as u64 && slot != null_slot as u64
}

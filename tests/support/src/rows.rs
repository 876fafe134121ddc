//! Tokens and slots of each row of a launch, by the rules of indices and lengths.

use std::ops::Range;

use gated_delta_harness::arguments::Arguments;

use crate::problem::{Array, Problem, Shaped, Sizes, conv, keep};

/// Tokens and slots of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Range of the row's tokens among those of all rows; it may be empty. `None` if the lengths of the row are invalid: then the
    /// launch does not even touch its part of o.
    pub tokens: Option<Range<usize>>,
    /// Slots that the row reads and writes. `None` if it is inactive.
    pub live: Option<Live>,
}

/// Slots that an active row reads and writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    /// Slot of the pool that the row starts from. `None` if it is fresh and starts from zeros.
    pub start: Option<usize>,
    /// Number of kept previous tokens, and the slot of the written pool for the state after them.
    pub commit: Option<(usize, usize)>,
    /// Number of tokens of the row, and the slot of the written pool for the state after that many.
    pub stores: Vec<(usize, usize)>,
    /// Slot of the written pool for the start state of a row without new or previous tokens. `None` if the state stays where it is.
    pub carried: Option<usize>,
    /// As `stores`, for checkpoints. The windows are written there too.
    pub checkpoints: Vec<(usize, usize)>,
    /// Windows that the row reads and writes. `None` without a convolution.
    pub window: Option<Window>,
}

/// Places of the windows that a row reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Slot and column of the window's oldest input. `None` if the row is fresh and its window is zeros.
    pub start: Option<[usize; 2]>,
    /// Slot of the written windows that the final window goes to. `None` if none is written.
    pub end: Option<usize>,
}

impl Live {
    /// The row that touches nothing.
    const NOTHING: Self = Self {
        start: None,
        commit: None,
        stores: Vec::new(),
        carried: None,
        checkpoints: Vec::new(),
        window: None,
    };

    /// All slots of the written pool that the row writes.
    pub fn writes(&self) -> impl Iterator<Item = usize> {
        let commit = self.commit.iter().map(|(_, slot)| *slot);
        let stores = self.stores.iter().chain(&self.checkpoints);
        let stores = stores.map(|(_, slot)| *slot);
        commit.chain(stores).chain(self.carried)
    }
}

/// Tokens and slots of each row of `args`. `integers` gives the values of an index tensor.
pub(crate) fn rows<T: Shaped>(args: &Arguments<T>, integers: impl Fn(&T) -> Vec<i64>) -> Vec<Row> {
    let given = |tensor: &Option<T>| tensor.as_ref().map(&integers);
    let switches = Switches {
        max_tokens: args.max_tokens(),
        total: total(args),
        states_apart: args.write_pool.is_some(),
        windows_apart: conv(args).is_some_and(|conv| conv.write_windows.is_some()),
        pool: args.pool.dims()[0],
        write_pool: args.written_pool().dims()[0],
        read_slots: given(&args.read_slots),
        write_slots: given(&args.write_slots),
        token_slots: given(&args.token_slots),
        accepted: given(&args.accepted),
        fresh: given(&args.fresh),
        cu_seqlens: args
            .packed
            .as_ref()
            .map(|packed| integers(&packed.cu_seqlens)),
        previous: args.previous_tokens().zip(keep(args).map(&integers)),
        null_slot: args.options.null_slot,
        positions: given(&args.positions),
        checkpoints: (args.checkpoints.as_ref()).map(|of| (of.every, integers(&of.slots))),
        batch: args.batch(),
        update_state: args.update_state,
        windows: args.windows().is_some(),
    };
    let row = |b| {
        let tokens = switches.tokens(b);
        let live = tokens
            .as_ref()
            .and_then(|tokens| switches.live(b, tokens.len()));
        Row { tokens, live }
    };
    (0..args.batch()).map(row).collect()
}

/// Number of packed tokens, the dim `total` of `[1, total, …]`.
fn total<T: Shaped>(args: &Arguments<T>) -> usize {
    args.outputs().map_or(0, |o| o.dims()[1])
}

/// Packed tokens that belong to no row: before the first bound and after the last one. A bound outside of the tokens is ignored.
pub(crate) fn tokens_of_no_row<T: Shaped>(
    args: &Arguments<T>,
    integers: impl Fn(&T) -> Vec<i64>,
) -> Vec<usize> {
    let Some(packed) = args.packed.as_ref().filter(|_| args.batch() > 0) else {
        return Vec::new();
    };
    let (bounds, total) = (integers(&packed.cu_seqlens), total(args));
    let within = |bound: i64| usize::try_from(bound).ok().filter(|&bound| bound <= total);
    let first = within(bounds[0]).unwrap_or(0);
    let end = within(bounds[args.batch()]).unwrap_or(total);
    (0..first).chain(end..total).collect()
}

/// Tokens and slots of each row of a problem.
#[must_use]
pub fn of_problem(problem: &Problem) -> Vec<Row> {
    rows(problem, Array::integers)
}

/// Sizes and switches that the rules depend on.
struct Switches {
    /// T.
    max_tokens: usize,
    /// Number of packed tokens, the dim `total` of `[1, total, …]`.
    total: usize,
    /// Whether states and windows are written to other pools than they are read from.
    states_apart: bool,
    windows_apart: bool,
    /// P.
    pool: usize,
    /// P of the written pool.
    write_pool: usize,
    read_slots: Option<Vec<i64>>,
    write_slots: Option<Vec<i64>>,
    token_slots: Option<Vec<i64>>,
    accepted: Option<Vec<i64>>,
    fresh: Option<Vec<i64>>,
    cu_seqlens: Option<Vec<i64>>,
    /// T', and the number of kept previous tokens of each row.
    previous: Option<(usize, Vec<i64>)>,
    null_slot: Option<u32>,
    positions: Option<Vec<i64>>,
    /// Interval of checkpoints in tokens, and their slots.
    checkpoints: Option<(usize, Vec<i64>)>,
    /// B.
    batch: usize,
    update_state: bool,
    /// Whether rows have windows.
    windows: bool,
}

impl Switches {
    fn tokens(&self, b: usize) -> Option<Range<usize>> {
        let Some(bounds) = &self.cu_seqlens else {
            return Some(b * self.max_tokens..(b + 1) * self.max_tokens);
        };
        let [start, end] = [bounds[b], bounds[b + 1]].map(|bound| usize::try_from(bound).ok());
        let (start, end) = (start?, end?);
        let fits = start <= end && end <= self.total && end - start <= self.max_tokens;
        fits.then_some(start..end)
    }

    fn live(&self, b: usize, length: usize) -> Option<Live> {
        let fresh = self.fresh.as_ref().is_some_and(|fresh| fresh[b] != 0);
        if self.token_slots.is_some() && length == 0 {
            return Some(Live::NOTHING);
        }
        if let Some(slots) = &self.token_slots {
            let slots = &slots[b * self.max_tokens..][..self.max_tokens];
            let (start, column) = match fresh {
                true => (None, None),
                false => {
                    let accepted = self.accepted.as_ref().map_or(1, |accepted| accepted[b]);
                    let last = usize::try_from(accepted).ok()?.checked_sub(1)?;
                    (Some(self.slot(*slots.get(last)?, self.pool)?), Some(last))
                }
            };
            let window = match self.windows {
                true => {
                    let first = self.slot(slots[0], self.pool.min(self.write_pool))?;
                    Some(Window {
                        start: column.map(|column| [first, column]),
                        end: Some(first),
                    })
                }
                false => None,
            };
            let store = |(t, slot): (usize, &i64)| Some((t, self.slot(*slot, self.write_pool)?));
            return Some(Live {
                start,
                commit: None,
                window,
                carried: None,
                checkpoints: Vec::new(),
                stores: slots[..length]
                    .iter()
                    .enumerate()
                    .filter_map(store)
                    .collect(),
            });
        }
        let read = self.read_slots.as_ref().map_or(b as i64, |slots| slots[b]);
        let write = self.write_slots.as_ref().map_or(read, |slots| slots[b]);
        let mut live = Live {
            start: match fresh {
                true => None,
                false => Some(self.slot(read, self.pool)?),
            },
            ..Live::NOTHING
        };
        let mut end = None;
        if fresh {
            self.slot(write, self.write_pool)?;
        }
        if let Some((most, keep)) = &self.previous {
            let keep = usize::try_from(keep[b]).ok().filter(|keep| keep <= most)?;
            live.commit = Some((keep, self.slot(write, self.write_pool)?));
        } else if self.update_state {
            let slot = self.slot(write, self.write_pool)?;
            let moves = |apart: bool| (apart || fresh || read != write).then_some(slot);
            match length.checked_sub(1) {
                Some(last) => live.stores = vec![(last, slot)],
                None => (live.carried, end) = (moves(self.states_apart), moves(self.windows_apart)),
            }
        }
        live.checkpoints = self.checkpoints_of(b, length);
        live.window = self.windows.then(|| Window {
            start: live.start.map(|slot| [slot, 0]),
            end: live
                .commit
                .map(|(_, slot)| slot)
                .or(live.stores.first().map(|store| store.1))
                .or(end),
        });
        Some(live)
    }

    /// The checkpoints of row `b` within `length` tokens: number of tokens before each, and its slot.
    fn checkpoints_of(&self, b: usize, length: usize) -> Vec<(usize, usize)> {
        let Some((every, slots)) = &self.checkpoints else {
            return Vec::new();
        };
        let before = self
            .positions
            .as_ref()
            .map_or(0, |positions| positions[b] as usize);
        let of_row = slots.len() / self.batch;
        let ends = (before / every + 1..).map(|multiple| multiple * every - before);
        let ends = ends.take_while(|end| *end <= length);
        let entries = ends.zip(&slots[b * of_row..][..of_row]);
        entries
            .filter_map(|(end, slot)| Some((end - 1, self.slot(*slot, self.write_pool)?)))
            .collect()
    }

    fn slot(&self, slot: i64, slots: usize) -> Option<usize> {
        let null = self.null_slot.map(i64::from) == Some(slot);
        usize::try_from(slot)
            .ok()
            .filter(|&slot| slot < slots && !null)
    }
}

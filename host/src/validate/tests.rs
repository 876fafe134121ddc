use super::*;
use crate::step::pending::Rings;
use crate::step::{
    Convolution, Flush, Gdn, GdnCommit, GdnGates, Inputs, Options, Pending, Previous, States,
    Stored, Update,
};
use crate::tensor::{DeviceElement, Tensor};

const ROWS: usize = 3;
const TOKENS: usize = 2;
const SLOTS: usize = 6;
const DIM: usize = 64;

fn tensor<T: DeviceElement>(values: Vec<T>, dims: &[usize]) -> Tensor<'static> {
    Tensor::from_slice_mut(values.leak(), dims).unwrap()
}

fn floats(dims: &[usize]) -> Tensor<'static> {
    tensor(vec![0.0f32; dims.iter().product()], dims)
}

fn ints(values: &[i32]) -> Tensor<'static> {
    tensor(values.to_vec(), &[values.len()])
}

fn pool() -> Tensor<'static> {
    floats(&[SLOTS, 1, DIM, DIM])
}

fn step([rows, tokens]: [usize; 2], states: impl Into<States<'static>>) -> Gdn<'static> {
    let (x, gate) = (floats(&[rows, tokens, 1, DIM]), floats(&[rows, tokens, 1]));
    Gdn::new(Inputs::qkv(x, x, x), GdnGates::given(gate, gate), x, states)
}

fn decode(states: impl Into<States<'static>>) -> Gdn<'static> {
    step([ROWS, 1], states)
}

fn verify(states: impl Into<States<'static>>) -> Gdn<'static> {
    step([ROWS, TOKENS], states)
}

fn update() -> Update<'static> {
    States::update(pool())
}

/// Row b reads slot `read[b]` and writes slot `write[b]`.
fn slots(read: &[i32], write: &[i32]) -> Update<'static> {
    update().slots(ints(read)).write_slots(ints(write))
}

fn packed(bounds: &[i32]) -> Gdn<'static> {
    step([1, 5], update()).packed(ints(bounds), TOKENS)
}

fn stored() -> Stored<'static> {
    let x = floats(&[ROWS, TOKENS, 1, DIM]);
    Stored::kv(x, x)
}

fn resume(keep: &[i32]) -> Gdn<'static> {
    let gate = floats(&[ROWS, TOKENS, 1]);
    verify(update()).previous(Previous::new(stored(), gate, gate, ints(keep)))
}

fn token_slots(slots: [i32; ROWS * TOKENS]) -> crate::step::PerToken<'static> {
    States::per_token(pool(), tensor(slots.to_vec(), &[ROWS, TOKENS]))
}

fn validate(work: &dyn Work) -> Result<IndexReport, Error> {
    Library::simulator().validate(StreamRef::default_stream(), work)
}

#[track_caller]
fn refused(work: &dyn Work, message: &str) {
    assert_eq!(validate(work).unwrap_err().to_string(), message);
}

/// Checks that `work` is accepted, with this number of active rows and these inactive rows: (row, tensor, index).
#[track_caller]
fn accepted(work: &dyn Work, active: usize, inactive: &[(usize, &str, i64)]) -> IndexReport {
    let report = validate(work).unwrap();
    let got: Vec<_> = report
        .inactive
        .iter()
        .map(|row| (row.row, row.tensor, row.index))
        .collect();
    assert_eq!((report.active, &got[..]), (active, inactive));
    assert_eq!(report.rows, active + inactive.len() + report.empty);
    report
}

#[test]
fn rows_without_slots_have_their_own() {
    accepted(&decode(update()), 3, &[]);
    accepted(&verify(update()), 3, &[]);
    let null = decode(update()).options(Options::default().null_slot(1));
    accepted(&null, 2, &[(1, "row", 1)]);
}

#[test]
fn dead_slots_are_reported() {
    let report = accepted(
        &decode(slots(&[4, -1, 6], &[0, 1, 2])),
        1,
        &[(1, "read_slots", -1), (2, "read_slots", 6)],
    );
    assert_eq!(
        report.inactive[1].to_string(),
        "row 2 is inactive: read_slots = 6"
    );
    accepted(
        &decode(slots(&[4, 0, 5], &[0, 7, i32::MIN])),
        1,
        &[(1, "write_slots", 7), (2, "write_slots", i32::MIN.into())],
    );
    let unsigned = update().slots(tensor(vec![u32::MAX, 1, 2], &[3]));
    accepted(&decode(unsigned), 2, &[(0, "read_slots", u32::MAX.into())]);
    let long = update().slots(tensor(vec![1i64 << 32, i64::MIN, 2], &[3]));
    accepted(
        &decode(long),
        1,
        &[(0, "read_slots", 1 << 32), (1, "read_slots", i64::MIN)],
    );
    let small_pool = update().write_pool(floats(&[2, 1, DIM, DIM]));
    accepted(&decode(small_pool), 2, &[(2, "row", 2)]);
}

#[test]
fn two_rows_that_write_a_slot_are_refused() {
    let states = slots(&[0, 1, 2], &[5, 3, 5]);
    let message =
        "row 0 writes slot 5 of pool, and row 2 writes slot 5 of pool: nothing orders them";
    refused(&decode(states), message);
    let states = states.write_pool(pool());
    refused(&decode(states), &message.replace("pool", "write_pool"));
    // No hazard if one of the rows is inactive.
    let states = states.slots(ints(&[0, 1, -1]));
    accepted(&decode(states), 2, &[(2, "read_slots", -1)]);
}

#[test]
fn a_slot_that_one_row_reads_and_another_writes_is_refused() {
    let states = slots(&[0, 1, 2], &[1, 3, 4]);
    let message =
        "row 1 reads slot 1 of pool, and row 0 writes slot 1 of pool: nothing orders them";
    refused(&decode(states), message);
    // Another pool has other states. The same memory under another name has the same states.
    accepted(&decode(states.write_pool(pool())), 3, &[]);
    let states = states.write_pool(states.pool.narrow(0, 1, SLOTS - 1).unwrap());
    accepted(&decode(states.write_slots(ints(&[4, 3, 1]))), 3, &[]);
    let message =
        "row 1 reads slot 1 of pool, and row 2 writes slot 0 of write_pool: nothing orders them";
    refused(&decode(states.write_slots(ints(&[4, 1, 0]))), message);
    // Rows may share a state that no row writes.
    let shared = States::read_only(pool()).slots(ints(&[1, 1, 1]));
    accepted(&decode(shared), 3, &[]);
}

#[test]
fn token_slots_are_checked_one_by_one() {
    let report = accepted(
        &verify(token_slots([0, -1, 9, 1, 2, 3])),
        2,
        &[(1, "token_slots", 9)],
    );
    assert_eq!(report.skipped_stores, 1);
    refused(
        &verify(token_slots([0, 1, 2, 3, 4, 1])),
        "row 0 writes slot 1 of pool after token 1, and row 2 writes slot 1 of pool after token 1: \
         nothing orders them",
    );
    refused(
        &verify(token_slots([0, 1, 2, 2, 4, 5])),
        "row 1 writes slot 2 of pool after token 0, and row 1 writes slot 2 of pool after token 1: \
         nothing orders them",
    );
    let states = token_slots([0, 1, 2, 3, 4, -1]);
    accepted(
        &verify(states.accepted(ints(&[2, 3, 2]))),
        1,
        &[(1, "accepted", 3), (2, "token_slots", -1)],
    );
    let long = tensor(vec![0, i64::MIN, i64::MAX], &[ROWS]);
    accepted(
        &verify(states.accepted(long)),
        0,
        &[
            (0, "accepted", 0),
            (1, "accepted", i64::MIN),
            (2, "accepted", i64::MAX),
        ],
    );
}

/// The rows of token slots may have a stride.
#[test]
fn a_row_stride_is_minded() {
    let wide = tensor(vec![0, 1, 77, 2, 3, 77, 4, 5, 77], &[ROWS, 3]);
    let states = States::per_token(pool(), wide.narrow(1, 0, TOKENS).unwrap());
    let report = accepted(&verify(states), 3, &[]);
    assert_eq!(report.skipped_stores, 0);
}

/// A decode after a convolution. Windows are read from `windows`, and written to `written` if it is given.
fn convolved(
    states: impl Into<States<'static>>,
    windows: Tensor<'static>,
    written: Option<Tensor<'static>>,
) -> Gdn<'static> {
    let x = floats(&[ROWS, 1, 3 * DIM]);
    let mut conv = Convolution::new(x, 1, floats(&[3 * DIM, 4]), windows);
    conv.write_windows = written;
    let mut step = decode(states);
    step.inputs = Inputs::conv(conv);
    step
}

/// States in another pool do not race, but windows in place do.
#[test]
fn windows_race_as_states_do() {
    let windows = || floats(&[SLOTS, 3 * DIM, 3]);
    accepted(
        &convolved(slots(&[4, -1, 5], &[4, 1, 5]), windows(), None),
        2,
        &[(1, "read_slots", -1)],
    );
    let split = |read: &[i32], write: &[i32]| slots(read, write).write_pool(pool());
    let message =
        "row 1 reads slot 1 of windows, and row 0 writes slot 1 of windows: nothing orders them";
    let crossed = split(&[0, 1, 2], &[1, 3, 4]);
    refused(&convolved(crossed, windows(), None), message);
    accepted(&convolved(crossed, windows(), Some(windows())), 3, &[]);
    let written_alone = slots(&[0, 1, 2], &[0, 1, 2]);
    accepted(
        &convolved(written_alone, windows(), Some(windows())),
        3,
        &[],
    );
    // The same memory under another name is a race.
    let both = windows();
    refused(
        &convolved(crossed, both, Some(both)),
        &message.replace("slot 1 of windows:", "slot 1 of write_windows:"),
    );
    let shared = States::read_only(pool()).slots(ints(&[1, 1, 1]));
    accepted(&convolved(shared, both, None), 3, &[]);

    // Token-major windows, and windows whose channels are interleaved with those of other slots.
    for strides in [[9 * DIM, 1, 3 * DIM], [3, 3 * SLOTS, 1]] {
        let windows = windows().with_strides(&strides).unwrap();
        accepted(
            &convolved(slots(&[0, 1, 2], &[0, 1, 2]), windows, None),
            3,
            &[],
        );
        refused(&convolved(crossed, windows, None), message);
    }
}

#[test]
fn fresh_rows_have_no_slot_to_read() {
    let fresh = |states: Update<'static>| decode(states).fresh(ints(&[1, 0, -1]));
    accepted(
        &fresh(slots(&[-1, -1, 9], &[0, 1, 2])),
        2,
        &[(1, "read_slots", -1)],
    );
    accepted(
        &fresh(slots(&[0, 1, 2], &[-1, 3, 6])),
        1,
        &[(0, "write_slots", -1), (2, "write_slots", 6)],
    );
    accepted(
        &fresh(update().slots(ints(&[-1, 1, 2]))),
        2,
        &[(0, "read_slots", -1)],
    );
    // A slot that no row reads may be written by another row.
    accepted(&fresh(slots(&[1, 1, 3], &[0, 1, 2])), 3, &[]);
    refused(
        &fresh(slots(&[0, 1, 2], &[3, 3, 2])),
        "row 0 writes slot 3 of pool, and row 1 writes slot 3 of pool: nothing orders them",
    );
    let read_only = States::read_only(pool()).slots(ints(&[-1, 1, 2]));
    let step = decode(read_only).fresh(ints(&[1, 0, 0]));
    accepted(&step, 2, &[(0, "read_slots", -1)]);
}

#[test]
fn kept_tokens_are_checked() {
    accepted(&resume(&[0, 2, 1]), 3, &[]);
    accepted(&resume(&[-1, 3, 1]), 1, &[(0, "keep", -1), (1, "keep", 3)]);
    let gate = floats(&[ROWS, TOKENS, 1]);
    let commit = |slots: &[i32]| {
        let states = update().slots(ints(slots));
        GdnCommit::new(
            stored(),
            GdnGates::given(gate, gate),
            ints(&[0, 3, 1]),
            states,
        )
    };
    refused(
        &commit(&[2, 0, 2]),
        "row 0 writes slot 2 of pool, and row 2 writes slot 2 of pool: nothing orders them",
    );
    accepted(&commit(&[2, 0, 1]), 2, &[(1, "keep", 3)]);
}

#[test]
fn snapshots_over_the_pool_are_refused() {
    let states = floats(&[ROWS * TOKENS + 1, 1, DIM, DIM]);
    let of_rows = |states: Tensor<'static>| states.split(0, TOKENS).unwrap();
    let step = verify(States::read_only(states.narrow(0, 0, ROWS).unwrap()));
    let message = "row 1 reads slot 1 of pool, and row 0 writes state 0 of snapshots after token 0: \
                   nothing orders them";
    let over = of_rows(states.narrow(0, 1, ROWS * TOKENS).unwrap());
    refused(&step.snapshots(over), message);
    let beside = of_rows(floats(&[ROWS * TOKENS, 1, DIM, DIM]));
    accepted(&step.snapshots(beside), 3, &[]);
}

#[test]
fn bounds_rise_from_0_within_the_tensors() {
    let report = accepted(&packed(&[0, 2, 2, 4]), 2, &[]);
    assert_eq!((report.empty, report.unused_tokens), (1, 1));
    assert_eq!(accepted(&packed(&[0, 2, 3, 5]), 3, &[]).unused_tokens, 0);
    for (bounds, message) in [
        ([1, 2, 3, 4], "cu_seqlens[0]: wanted 0, got 1"),
        ([-1, 2, 3, 4], "cu_seqlens[0]: wanted 0, got -1"),
        ([0, 2, 1, 3], "cu_seqlens[2]: wanted 2..=4 "),
        ([0, 1, 4, 5], "cu_seqlens[2]: wanted 1..=3 "),
        ([0, 2, 4, 6], "cu_seqlens[3]: wanted 4..=5 "),
        ([0, 2, 4, i32::MIN], "cu_seqlens[3]: wanted 4..=5 "),
    ] {
        let got = validate(&packed(&bounds)).unwrap_err().to_string();
        assert!(got.starts_with(message), "{got}");
    }
}

/// A row without tokens reads and writes like any other row, but touches nothing in place.
#[test]
fn a_row_without_tokens_carries_its_state() {
    let step = |read, write| step([1, 5], slots(read, write)).packed(ints(&[0, 2, 2, 4]), TOKENS);
    assert_eq!(accepted(&step(&[0, 1, 2], &[0, 3, 2]), 2, &[]).empty, 1);
    assert_eq!(accepted(&step(&[0, 0, 2], &[0, 0, 2]), 2, &[]).empty, 1);
    let fresh = |fresh| step(&[0, 1, 2], &[0, 1, 2]).fresh(ints(fresh));
    accepted(&fresh(&[0, 1, 0]), 2, &[]);
    let inactive = accepted(&step(&[0, -1, 2], &[0, 1, 2]), 2, &[(1, "read_slots", -1)]);
    assert_eq!(inactive.empty, 0);
    refused(
        &step(&[0, 1, 2], &[0, 2, 3]),
        "row 2 reads slot 2 of pool, and row 1 writes slot 2 of pool: nothing orders them",
    );
    refused(
        &step(&[0, 0, 2], &[0, 0, 2]).fresh(ints(&[0, 1, 0])),
        "row 0 writes slot 0 of pool, and row 1 writes slot 0 of pool: nothing orders them",
    );
}

#[test]
fn what_a_launch_refuses_is_refused() {
    let two = update().slots(ints(&[0, 1]));
    refused(&decode(two), "read_slots: wanted shape [B] = [3], got [2]");
    // SAFETY: never read.
    let elsewhere = unsafe { Tensor::from_raw(0x1000, crate::DType::I32, &[ROWS]) };
    refused(
        &decode(update().slots(elsewhere.unwrap())),
        "read_slots: wanted host memory, got device memory",
    );
}

#[test]
fn no_rows_are_nothing() {
    let none = step([0, 1], update().slots(ints(&[])));
    assert_eq!(validate(&none).unwrap(), IndexReport::default());
}

/// Rows of two tokens after a convolution.
fn convolved_tokens(
    states: impl Into<States<'static>>,
    inputs: usize,
    written: Option<Tensor<'static>>,
) -> Gdn<'static> {
    let windows = floats(&[SLOTS, 3 * DIM, inputs]);
    let x = floats(&[ROWS, TOKENS, 3 * DIM]);
    let mut conv = Convolution::new(x, 1, floats(&[3 * DIM, 4]), windows);
    conv.write_windows = written;
    let mut step = verify(states);
    step.inputs = Inputs::conv(conv);
    step
}

/// A row's window is in the slot of its first token, whichever slot its state starts from.
#[test]
fn a_window_has_one_of_the_token_slots() {
    let step = |slots, accepted: [i32; ROWS]| {
        let states = token_slots(slots).accepted(ints(&accepted));
        convolved_tokens(states, 4, None)
    };
    let report = accepted(&step([0, -1, 2, 3, 4, 5], [1, 2, 1]), 3, &[]);
    assert_eq!(report.skipped_stores, 1);
    // A row that starts from another slot still needs the first one.
    accepted(
        &step([-1, 1, 2, 3, SLOTS as i32, 5], [2, 2, 2]),
        1,
        &[(0, "token_slots", -1), (2, "token_slots", 6)],
    );
    let null = step([0, 1, 2, 3, 4, 5], [2, 2, 1]).options(Options::default().null_slot(2));
    accepted(&null, 2, &[(1, "token_slots", 2)]);
    accepted(
        &step([0, 1, 2, 3, 4, 5], [3, 1, 1]),
        2,
        &[(0, "accepted", 3)],
    );
    // A slot that only an inactive row would read may be written.
    accepted(
        &step([-1, 2, 2, 3, 4, 5], [2, 1, 1]),
        2,
        &[(0, "token_slots", -1)],
    );

    // A slot that `write_windows` does not have makes the row inactive too.
    let small = |slots| floats(&[slots, 3 * DIM, 4]);
    let states = token_slots([0, 1, 3, 2, 4, 5]).write_pool(floats(&[3, 1, DIM, DIM]));
    let one = convolved_tokens(states, 4, Some(small(3)));
    accepted(&one, 1, &[(1, "token_slots", 3), (2, "token_slots", 4)]);
    let mut fresh = one.fresh(ints(&[0, 1, 0]));
    accepted(&fresh, 1, &[(1, "token_slots", 3), (2, "token_slots", 4)]);
    fresh = step([0, 1, 2, 3, 4, -1], [9, 0, 2]).fresh(ints(&[1, 1, 0]));
    accepted(&fresh, 2, &[(2, "token_slots", -1)]);
    // Without a convolution a fresh row needs no first slot.
    let states = token_slots([-1, 1, 2, 3, 4, 5]).accepted(ints(&[9, 1, 1]));
    accepted(&verify(states).fresh(ints(&[1, 0, 0])), 3, &[]);
    accepted(&verify(states), 2, &[(0, "accepted", 9)]);

    // A slot of the read pool and the same slot of the written pool are two states.
    let states = token_slots([0, 1, 2, 3, 4, 5]).write_pool(pool());
    accepted(&convolved_tokens(states, 4, Some(small(SLOTS))), 3, &[]);
    let shared = token_slots([1, 0, 1, 2, 3, 4]).write_pool(pool());
    refused(
        &convolved_tokens(shared, 4, Some(small(SLOTS))),
        "row 0 writes slot 1 of write_pool after token 0, and row 1 writes slot 1 of write_pool after token 0: \
         nothing orders them",
    );
}

#[test]
fn a_window_of_a_resume_and_a_commit_races_as_its_state_does() {
    let x = floats(&[ROWS, TOKENS, 3 * DIM]);
    let gate = floats(&[ROWS, TOKENS, 1]);
    let windows = floats(&[SLOTS, 3 * DIM, 3]);
    let conv = Convolution::new(x, 1, floats(&[3 * DIM, 4]), windows);
    let split = |read: &[i32], write: &[i32]| slots(read, write).write_pool(pool());
    let (crossed, message) = (
        split(&[0, 1, 2], &[1, 3, 4]),
        "row 1 reads slot 1 of windows, and row 0 writes slot 1 of windows: nothing orders them",
    );
    let commit = |states, keep: &[i32]| {
        let gates = GdnGates::given(gate, gate);
        GdnCommit::new(Stored::conv(conv), gates, ints(keep), states)
    };
    refused(&commit(crossed, &[1; ROWS]), message);
    accepted(&commit(crossed, &[1, 3, 1]), 2, &[(1, "keep", 3)]);
    let fresh = commit(crossed, &[0; ROWS]).fresh(ints(&[0, 1, 0]));
    accepted(&fresh, 3, &[]);
    let resume = |states| {
        let mut step = verify(states);
        step.inputs = Inputs::conv(conv);
        step.previous(Previous::new(Stored::x(x), gate, gate, ints(&[1; ROWS])))
    };
    refused(&resume(crossed), message);
    accepted(&resume(split(&[0, 1, 2], &[0, 1, 2])), 3, &[]);
    // `keep` of a fresh row is checked.
    let fresh = resume(split(&[-1, 1, 2], &[0, 1, 2])).fresh(ints(&[1, 0, 0]));
    accepted(&fresh, 3, &[]);
}

#[test]
fn window_snapshots_over_the_windows_are_refused() {
    let (channels, window) = (3 * DIM, 3 * DIM * 3);
    let all = floats(&[SLOTS + 2 * ROWS * TOKENS, channels, 3]);
    let states = States::read_only(pool());
    let step = |windows: Tensor<'static>, snapshots: Tensor<'static>| {
        let mut step = convolved_tokens(states, 3, None);
        if let Inputs::Conv(conv) = &mut step.inputs {
            (conv.windows, conv.window_snapshots) = (windows, Some(snapshots));
        }
        step.snapshots(floats(&[ROWS, TOKENS, 1, DIM, DIM]))
    };
    let windows = all.narrow(0, 0, SLOTS).unwrap();
    let of_rows = |first: usize| {
        let snapshots = all.narrow(0, first, ROWS * TOKENS).unwrap();
        snapshots.split(0, TOKENS).unwrap()
    };
    accepted(&step(windows, of_rows(SLOTS)), 3, &[]);
    accepted(&step(windows, of_rows(ROWS)), 3, &[]);
    refused(
        &step(windows, of_rows(2)),
        "row 2 reads slot 2 of windows, and row 0 writes window 0 of window_snapshots after token 0: \
         nothing orders them",
    );
    // Token-major snapshots.
    let apart = floats(&[ROWS, TOKENS, channels, 3]);
    let swapped = apart.with_strides(&[window, ROWS * window, 3, 1]).unwrap();
    accepted(&step(windows, swapped), 3, &[]);
    // Snapshots in which inputs of other tokens lie between the inputs of one token.
    let between = swapped
        .with_strides(&[1, ROWS, ROWS * TOKENS * 3, ROWS * TOKENS])
        .unwrap();
    accepted(&step(windows, between), 3, &[]);

    // With token slots: rows 0 to 2 have their windows in the first, third and fifth slot.
    let all = floats(&[SLOTS + ROWS * TOKENS, channels, 4]);
    let per_token = |first: usize| {
        let mut step = convolved_tokens(token_slots([0, 1, 2, 3, 4, 5]), 4, None);
        let snapshots = all.narrow(0, first, ROWS * TOKENS).unwrap();
        let snapshots = snapshots.split(0, TOKENS).unwrap().narrow(3, 0, 3);
        if let Inputs::Conv(conv) = &mut step.inputs {
            conv.windows = all.narrow(0, 0, SLOTS).unwrap();
            conv.window_snapshots = Some(snapshots.unwrap());
        }
        step.snapshots(floats(&[ROWS, TOKENS, 1, DIM, DIM]))
    };
    accepted(&per_token(SLOTS), 3, &[]);
    accepted(&per_token(SLOTS - 1), 3, &[]);
    refused(
        &per_token(SLOTS - 2),
        "row 0 writes window 0 of window_snapshots after token 0, and row 2 writes slot 4 of windows: \
         nothing orders them",
    );
}

/// Three rows of `tokens` tokens. Row b has slot b.
fn prefill(tokens: usize) -> Gdn<'static> {
    let chunked = Options::default().formulation(crate::step::Formulation::Chunked);
    step([ROWS, tokens], update()).options(chunked)
}

/// One checkpoint slot per row, every 64 tokens, for rows of 60 tokens after `positions` tokens.
fn checkpoints(positions: &[i32], slots: &[i32]) -> Gdn<'static> {
    let slots = tensor(slots.to_vec(), &[ROWS, slots.len() / ROWS]);
    prefill(60)
        .positions(ints(positions))
        .checkpoints(64, slots)
}

#[test]
fn rows_of_a_prefill_are_of_any_length() {
    accepted(&prefill(60), 3, &[]);
    let report = accepted(&prefill(0), 0, &[]);
    assert_eq!(report.empty, 3);
    let of = |bounds: &[i32], most| {
        let chunked = Options::default().formulation(crate::step::Formulation::Chunked);
        step([1, 60], update())
            .packed(ints(bounds), most)
            .options(chunked)
    };
    let report = accepted(&of(&[0, 40, 40, 59], usize::MAX), 2, &[]);
    assert_eq!((report.empty, report.unused_tokens), (1, 1));
    accepted(&of(&[0, 40, 41, 42], 40), 3, &[]);
    refused(
        &of(&[0, 41, 42, 43], 40),
        "cu_seqlens[1]: wanted 0..=40 (no less than the bound before, at most T = 40 more, within total = 60), got 41",
    );
    refused(
        &of(&[0, 61, 61, 61], usize::MAX),
        "cu_seqlens[1]: wanted 0..=60 (no less than the bound before, at most T = 60 more, within total = 60), got 61",
    );
    refused(
        &checkpoints(&[0, -1, 0], &[]),
        "positions[1]: wanted 0 or more, got -1",
    );
}

/// Positions decide which entries are used: row 0 reaches no multiple of 64, row 1 reaches one at its fourth token, and row 2 at
/// its last token.
#[test]
fn slots_of_checkpoints_are_those_of_no_other_store() {
    let at = [0, 60, 4];
    let report = accepted(&checkpoints(&at, &[0, 4, 5]), 3, &[]);
    assert_eq!(report.skipped_stores, 0);
    let report = accepted(&checkpoints(&at, &[0, -1, 6]), 3, &[]);
    assert_eq!(report.skipped_stores, 2);
    // Entries after the last multiple are not checked.
    accepted(&checkpoints(&at, &[0, 0, 4, 0, 5, 0]), 3, &[]);
    refused(
        &checkpoints(&at, &[0, 4, 4]),
        "row 1 writes slot 4 of pool after token 3, and row 2 writes slot 4 of pool after token 59: nothing orders them",
    );
    refused(
        &checkpoints(&at, &[0, 2, 5]),
        "row 1 writes slot 2 of pool after token 3, and row 2 writes slot 2 of pool: nothing orders them",
    );
    refused(
        &checkpoints(&at, &[0, 1, 5]),
        "row 1 writes slot 1 of pool, and row 1 writes slot 1 of pool after token 3: nothing orders them",
    );
    // The slot is one that another row starts from.
    let states = slots(&[0, 1, 3], &[0, 1, 2]);
    let step = Gdn {
        states: states.into(),
        ..checkpoints(&at, &[0, 3, 5])
    };
    refused(
        &step,
        "row 2 reads slot 3 of pool, and row 1 writes slot 3 of pool after token 3: nothing orders them",
    );
    // An inactive row has no checkpoints.
    let step = Gdn {
        states: slots(&[0, -1, 2], &[0, 1, 2]).into(),
        ..checkpoints(&at, &[0, 2, 5])
    };
    accepted(&step, 2, &[(1, "read_slots", -1)]);
}

#[test]
fn windows_of_checkpoints_are_written_where_states_are() {
    let channels = 3 * DIM;
    let conv = |windows| {
        let x = floats(&[ROWS, 60, channels]);
        Inputs::conv(Convolution::new(x, 1, floats(&[channels, 4]), windows))
    };
    // Slots of windows overlap (stride 0) while slots of states do not.
    let step = Gdn {
        inputs: conv(floats(&[SLOTS, channels, 3])),
        ..checkpoints(&[0, 60, 4], &[0, 4, 5])
    };
    accepted(&step, 3, &[]);
    let step = Gdn {
        inputs: conv(floats(&[SLOTS, channels, 3])),
        ..checkpoints(&[0, 60, 4], &[0, 4, 4])
    };
    assert!(validate(&step).is_err());
}

/// Decodes with deferred write-back: up to 4 pending tokens, rings of 6 entries.
fn waiting(slots: &[i32], len: &[i32], base: &[i32]) -> Gdn<'static> {
    let rings = Rings {
        keys: floats(&[SLOTS, 1, 6, DIM]),
        updates: floats(&[SLOTS, 1, 6, DIM]),
        decays: floats(&[SLOTS, 1, 6]),
        len: ints(len),
        base: ints(base),
    };
    let pending = Pending::new(rings).most(4);
    decode(update().slots(ints(slots))).pending(pending)
}

#[test]
fn rows_whose_ring_has_no_such_entry_are_reported() {
    let rows = waiting(&[0, 1, 2], &[4, 5, -1], &[5, 0, 0]);
    let dead = [(1, "pending len", 5), (2, "pending len", -1)];
    accepted(&rows, 1, &dead);
    let rows = waiting(&[0, 1, 2], &[4, 0, 0], &[6, 5, -1]);
    let dead = [(0, "pending base", 6), (2, "pending base", -1)];
    accepted(&rows, 1, &dead);
    // A fresh row has no pending tokens, whatever its `len`.
    let rows = waiting(&[0, 1, 2], &[9, 9, 4], &[0, 0, 0]).fresh(ints(&[1, 0, 1]));
    accepted(&rows, 2, &[(1, "pending len", 9)]);
    let flush = Flush::new(
        update().slots(ints(&[0, 9, 2])),
        waiting(&[], &[4, 4, 5], &[0; 3]).pending.unwrap(),
    );
    let dead = [(1, "read_slots", 9), (2, "pending len", 5)];
    accepted(&flush, 1, &dead);
}

#[test]
fn no_two_rows_wait_in_one_slot() {
    refused(
        &waiting(&[3, 1, 3], &[0; 3], &[0; 3]),
        "row 0 writes slot 3 of pool, and row 2 writes slot 3 of pool: nothing orders them",
    );
}

//! Tests of the launches of a prefill: kernels, grids and workspaces.

use super::prefill::{dense, full, layer, of_total};
use super::*;
use crate::raw::PrefillParams;

/// Rows of more than 64 tokens take two launches and a workspace, and one launch more with a convolution. Short rows take one
/// launch and no workspace. If rows of one token may be among longer rows, one more launch is added.
#[test]
fn launches_and_workspaces_follow_from_lengths() {
    let names = |step: &Gdn<'_>| -> Vec<&'static str> {
        let recipe = step.recipe().unwrap();
        let launches = recipe.launches();
        launches.map(|launch| launch.kernel.symbol()).collect()
    };
    let long = ["gdn_prefill_prepare_k64", "gdn_prefill_chain_k64_tile64"];
    let short = ["gdn_prefill_short_k64_tile64"];
    assert_eq!(names(&full()), long);
    let finish = "prefill_finish_k64";
    let whole = layer().workspace(tensor(F32, &[1 << 20]));
    let convolve = "prefill_convolve_k64";
    let single = "prefill_single_k64";
    assert_eq!(names(&whole), [convolve, long[0], long[1], single, finish]);
    let launches: Vec<_> = whole.recipe().unwrap().launches().collect();
    let overlaps = |launches: &[crate::raw::Launch]| -> Vec<bool> {
        launches.iter().map(|it| it.shape.overlaps).collect()
    };
    assert_eq!(overlaps(&launches), [false, false, true, true, false]);
    let of_short_rows = layer().packed(tensor(I32, &[4]), 64);
    let launches_of_short: Vec<_> = of_short_rows.recipe().unwrap().launches().collect();
    assert_eq!(overlaps(&launches_of_short), [false, true]);
    let [convolve, prepare] = [0, 1].map(|i: usize| launches[i].shape.grid[0]);
    // Two query/key heads with q and k, and four value heads with v: 2 + 2 + 4. A block of the intra-chunk pass has two value
    // heads.
    assert_eq!(convolve, prepare / 2 * (2 + 2 + 4));
    // The grid has blocks for the windows of three rows of 512 channels, and for the norm one block per chunk and value head.
    let shape = launches[4].shape;
    let (of_windows, of_norm) = (3 * 512_u32.div_ceil(shape.block), prepare / 2 * 4);
    assert_eq!(shape.grid, [of_windows + of_norm, 1, 1]);
    // Without a norm, the launch writes only windows; without a convolution, only o. For short rows, the kernel that computes o
    // also applies the norm.
    let grid = |step: Gdn<'static>| {
        let last = step.recipe().unwrap().launches().last().unwrap();
        (last.kernel.symbol() == finish).then_some(last.shape.grid)
    };
    let workspace = || tensor(F32, &[1 << 20]);
    let mut without_norm = layer().workspace(workspace());
    without_norm.norm = None;
    assert_eq!(grid(without_norm), Some([of_windows, 1, 1]));
    let mut without_conv = layer().workspace(workspace());
    without_conv.inputs = of_total(300, 300).inputs;
    assert_eq!(grid(without_conv), Some([of_norm, 1, 1]));
    let mut short_norm = of_total(64, 64);
    short_norm.norm = Some(Norm::new(
        tensor(Bf16, &[1, 64, 4, 64]),
        tensor(F32, &[64]),
        1e-6,
    ));
    assert_eq!(grid(short_norm), None);
    assert_eq!(names(&dense(64)), short);
    assert_eq!(names(&of_total(4096, 64)), short);
    // Short rows need a workspace only on GPUs other than Hopper.
    assert!(dense(64).workspace_bytes().unwrap() > 0);
    assert!(dense(64).recipe_for(132, (8, 0)).is_err());
    assert_eq!(gdn().workspace_bytes().unwrap(), 0);
    assert_eq!(names(&gdn()).len(), 1);

    // A chunk has at most 64 tokens of a row, and the workspace has room for each of the two query/key heads.
    let bytes = |step: &Gdn<'_>| step.workspace_bytes().unwrap();
    let of_unit = bytes(&of_total(66, 66)) / (2 * 3);
    assert_eq!(of_unit % 128, 0);
    assert!(of_unit > 0);
    let recipe = full().recipe().unwrap();
    let shape = recipe.launches().next().unwrap().shape;
    let units = bytes(&full()) / 2 / of_unit;
    // A block has two value heads of a query/key head; the layer has two query/key heads.
    assert_eq!(shape.grid, [2 * units as u32, 1, 1]);
    assert!((10..=13).contains(&units), "{units}");
    assert_eq!(recipe.shape.grid, [2, 2, 2]);
    let more = [65, 66, 128, 1000, 4096].map(|tokens| bytes(&dense(tokens)));
    assert!(more.is_sorted(), "{more:?}");
    assert!(bytes(&dense(300).positions(tensor(I32, &[2]))) >= bytes(&dense(300)));
}

/// If rows have on average at most half of the longest row's tokens, the scan leaves rows of one token to a launch of their own.
#[test]
fn rows_of_one_token_have_a_launch_beside_longer_ones() {
    let launches = |most: usize| -> Vec<crate::raw::Launch> {
        let step = of_total(300, most).workspace(tensor(F32, &[1 << 20]));
        let recipe = step.recipe_for(8, (9, 0)).unwrap();
        recipe.launches().collect()
    };
    let said = |launch: &crate::raw::Launch| (launch.params.turns, launch.params.has_singles);
    // Three rows.
    let [prepare, chain] = launches(199).try_into().unwrap();
    assert_eq!((said(&chain), chain.shape.grid), ((3, 0), [2, 2, 3]));
    assert!(!prepare.shape.overlaps && chain.shape.overlaps);
    let [_, chain, single] = launches(200).try_into().unwrap();
    // A row has four blocks, and the GPU has eight multiprocessors.
    assert_eq!((said(&chain), chain.shape.grid), ((2, 1), [2, 2, 2]));
    assert_eq!(chain.shape.shared_bytes, 227 << 10);
    assert_eq!(single.kernel.symbol(), "prefill_single_k64");
    assert_eq!(single.shape.grid, [4, 1, 3]);
    assert!(single.shape.overlaps);
    // The grid's z extent is the largest possible number of rows of the largest length; for dense rows, all rows.
    let [_, chain, _] = launches(300).try_into().unwrap();
    assert_eq!(said(&chain), (2, 1));
    let step = dense(300).workspace(tensor(F32, &[1 << 20]));
    assert_eq!(step.recipe().unwrap().launches().count(), 2);
}

/// B rows of T tokens, packed if there is a total: H = 16, HV = 32, K = V = 128. The scan has 32 blocks for each row.
fn batch(rows: usize, tokens: usize, total: Option<usize>) -> Gdn<'static> {
    let dims = total.map_or([rows, tokens], |total| [1, total]);
    let of = |dtype, inner: &[usize]| tensor(dtype, &[&dims[..], inner].concat());
    let (qk, v) = (of(Bf16, &[16, 128]), of(Bf16, &[32, 128]));
    let gate = of(F32, &[32]);
    let step = Gdn::new(
        Inputs::qkv(qk, qk, v),
        GdnGates::given(gate, gate),
        v,
        States::update(tensor(F32, &[300, 32, 128, 128])),
    )
    .options(Options::default().formulation(Formulation::Chunked))
    .workspace(tensor(F32, &[1 << 30]));
    match total {
        Some(_) => step.packed(tensor(I32, &[rows + 1]), tokens),
        None => step,
    }
}

/// Blocks of a batch are persistent if rows are about equally long and persistent blocks take no more turns than separate blocks.
#[test]
fn blocks_of_a_batch_go_on_where_that_takes_no_longer() {
    let turns = |step: Gdn<'_>, multiprocessors| {
        let recipe = step.recipe_for(multiprocessors, (9, 0)).unwrap();
        let chain = recipe.launches().last().unwrap();
        assert!(chain.kernel.symbol().ends_with("chain_k128_tile128"));
        assert_eq!(chain.shape.grid, [2, 16, chain.params.turns]);
        assert_eq!(chain.params.has_singles, 0);
        chain.params.turns
    };
    // (Rows, concurrent rows): 5 and 32 take as many turns as separate blocks; 33 would take nine instead of eight, 256 take 64
    // instead of 63.
    for (rows, wanted) in [(5, 4), (8, 4), (32, 4), (33, 33), (36, 4), (256, 4)] {
        assert_eq!(turns(batch(rows, 100, None), 132), wanted, "{rows} rows");
    }
    // One row at a time if the GPU has no room for two; all rows if it has no room even for one.
    assert_eq!(turns(batch(8, 100, None), 63), 8);
    assert_eq!(turns(batch(8, 100, None), 33), 1);
    assert_eq!(turns(batch(8, 100, None), 31), 8);
    // Rows have on average seven eighths of the longest row's tokens.
    assert_eq!(turns(batch(8, 100, Some(700)), 132), 4);
    assert_eq!(turns(batch(8, 100, Some(699)), 132), 8);
}

/// If all rows have one token, only the launch for such rows remains, and it does not overlap earlier work. Windows are written
/// after it.
#[test]
fn rows_of_one_token_alone_have_that_launch_alone() {
    let launches = |step: &Gdn<'_>| -> Vec<crate::raw::Launch> {
        let recipe = step.recipe_for(132, (9, 0)).unwrap();
        recipe.launches().collect()
    };
    let names = |launches: &[crate::raw::Launch]| -> Vec<&'static str> {
        launches.iter().map(|it| it.kernel.symbol()).collect()
    };
    let single = "prefill_single_k64";
    for (step, rows) in [(dense(1), 2), (of_total(3, 1), 3), (of_total(300, 1), 3)] {
        let launches = launches(&step);
        assert_eq!(names(&launches), [single]);
        let variants = step.variants().unwrap();
        assert!(
            variants.contains(&launches[0].kernel.entry()),
            "{variants:?}"
        );
        assert_eq!(launches[0].shape.grid, [4, 1, rows]);
        assert!(!launches[0].shape.overlaps);
        assert_eq!(step.workspace_bytes().unwrap(), 0);
    }
    let short = ["gdn_prefill_short_k64_tile64"];
    assert_eq!(names(&launches(&dense(2))), short);
    assert_eq!(names(&launches(&of_total(3, 2))), short);
    let step = layer().packed(tensor(I32, &[4]), 1);
    let launches = launches(&step);
    assert_eq!(names(&launches), [single, "prefill_finish_k64"]);
    assert_eq!(launches[1].shape.grid, [3 * 512_u32.div_ceil(256), 1, 1]);
}

/// One row of T tokens: H = 2, HV = 4, K = V = 64. The scan has four blocks.
fn prompt(tokens: usize) -> Gdn<'static> {
    let of_heads = |heads| tensor(Bf16, &[1, tokens, heads, 64]);
    let gate = tensor(F32, &[1, tokens, 4]);
    Gdn::new(
        Inputs::qkv(of_heads(2), of_heads(2), of_heads(4)),
        GdnGates::given(gate, gate),
        of_heads(4),
        States::update(pool()),
    )
    .options(Options::default().formulation(Formulation::Chunked))
    .workspace(tensor(F32, &[1 << 24]))
}

#[test]
fn a_long_prompt_by_itself_is_launched_in_stretches() {
    let with_norm = prompt(16_384).norm(Norm::new(
        tensor(Bf16, &[1, 16_384, 4, 64]),
        tensor(F32, &[64]),
        1e-6,
    ));
    let recipe = with_norm.recipe().unwrap();
    let mut launches: Vec<_> = recipe.launches().collect();
    let finish = launches.pop().unwrap();
    assert_eq!(finish.kernel.symbol(), "prefill_finish_k64");
    assert!(!finish.shape.overlaps);
    // The norm covers all chunks of all segments.
    let all = 16_384 / 64;
    assert_eq!(finish.shape.grid, [all * 4, 1, 1]);
    let mut end = 0;
    for pair in launches.chunks(2) {
        let [prepare, chain] = pair else {
            panic!("a preparation has a chain")
        };
        assert_eq!(prepare.kernel.symbol(), "gdn_prefill_prepare_k64");
        assert_eq!(chain.kernel, recipe.kernel);
        assert_eq!(chain.shape, recipe.shape);
        // The first intra-chunk pass does not overlap work before the prefill.
        assert_eq!(prepare.shape.overlaps, end != 0);
        assert!(chain.shape.overlaps && chain.shape.shared_bytes == 227 << 10);
        let stretch = |launch: &crate::raw::Launch| {
            let params: PrefillParams = bytemuck::pod_read_unaligned(launch.parameter());
            (params.first_chunk, params.end_chunk)
        };
        assert_eq!(stretch(prepare), stretch(chain));
        let (first, next) = stretch(chain);
        assert_eq!(first, end);
        // A block has both value heads of a query/key head.
        let count = prepare.shape.grid[0] / 2;
        assert_eq!(prepare.shape.grid, [2 * count, 1, 1]);
        end += count;
        let wanted = if end == all { u32::MAX } else { end };
        assert_eq!(next, wanted);
    }
    assert_eq!((end, launches.len()), (all, 2 * 7));
}

#[test]
fn other_rows_are_launched_at_once() {
    let count = |step: &Gdn<'_>, multiprocessors| {
        let recipe = step.recipe_for(multiprocessors, (9, 0)).unwrap();
        for launch in recipe.launches() {
            let params = launch.params;
            let all = (params.first_chunk, params.end_chunk) == (0, u32::MAX);
            assert_eq!(all, recipe.launches().count() == 2);
        }
        recipe.launches().count()
    };
    // 31 chunks and 32 chunks; the scan occupies half of the multiprocessors, and more than half.
    assert_eq!(count(&prompt(31 * 64), 132), 2);
    assert_eq!(count(&prompt(32 * 64), 132), 4);
    assert_eq!(count(&prompt(32 * 64), 8), 4);
    assert_eq!(count(&prompt(32 * 64), 7), 2);
    let two = dense(16_384).workspace(tensor(F32, &[1 << 25]));
    assert_eq!(count(&two, 132), 2);
}

/// Rows in splits have a scan for transitions, a carry of states, and a scan for outputs. Rows that reach no end of a split have
/// only the last of these.
#[test]
fn rows_in_splits_have_two_passes() {
    let of = |rows, tokens, split| {
        let mut step = batch(rows, tokens, None);
        step.options.split = split;
        step
    };
    let names = |step: &Gdn<'_>| -> Vec<&'static str> {
        let recipe = step.recipe().unwrap();
        let launches = recipe.launches();
        launches.map(|launch| launch.kernel.symbol()).collect()
    };
    let chain = "gdn_prefill_chain_k128_tile64";
    let all = [
        "gdn_prefill_prepare_k128",
        chain,
        "prefill_carry_k128",
        chain,
    ];
    // 30 chunks or 1,024: no segments, and the same tile.
    for tokens in [1920, 65_536] {
        assert_eq!(names(&of(2, tokens, Some(1920))), all);
    }
    assert_eq!(names(&of(2, 1919, Some(1920))), [all[0], chain]);
    // Short rows also have the bits of their splits. A row at a position may reach the end of a split with any token.
    assert_eq!(names(&of(2, 64, Some(64))), all);
    assert_eq!(
        names(&of(2, 64, Some(1920)).positions(tensor(I32, &[2]))),
        all
    );
    let said = |step: &Gdn<'_>| -> Vec<_> {
        let recipe = step.recipe().unwrap();
        let launches = recipe.launches().skip(1);
        let said = launches.map(|it| {
            let pass = it.kernel.constants().find(|(name, _)| *name == "GD_PASS");
            (
                pass.map_or(0, |(_, pass)| pass),
                it.params.splits,
                it.shape.grid[2],
                it.shape.overlaps,
            )
        });
        said.collect()
    };
    // Five splits of three rows: 15 rows in the scan's grid, and twice as many in the pass for transitions.
    assert_eq!(
        said(&of(3, 5 * 1920, Some(1920))),
        [(1, 5, 30, true), (0, 5, 3, false), (0, 5, 15, false)]
    );
    let at = of(3, 5 * 1920, Some(1920)).positions(tensor(I32, &[3]));
    assert_eq!(said(&at)[2], (0, 6, 18, false));
    // States at the starts of rows and after splits, each with a transition.
    let bytes = |split| of(3, 5 * 1920, split).workspace_bytes().unwrap();
    let state = 32 * 128 * 128 * size_of::<f32>();
    let carried = state;
    assert_eq!(
        bytes(Some(1920)) - (bytes(None) - carried),
        (15 + 6) * 2 * state
    );
}

/// The workspace has room for the states between segments if there may be segments. More rows, or more tokens, never need less.
#[test]
fn a_workspace_has_a_place_for_what_stretches_leave() {
    let bytes = |step: &Gdn<'_>| step.workspace_bytes().unwrap();
    let of_unit = bytes(&prompt(64 + 2)) / 2;
    assert_eq!(bytes(&prompt(31 * 64)), 31 * of_unit);
    let carried = 4 * 64 * 64 * size_of::<f32>();
    assert_eq!(bytes(&prompt(32 * 64)), 32 * of_unit + carried);
    for total in [64 * 31, 64 * 32, 64 * 64, 64 * 200] {
        assert!(bytes(&of_total(total, usize::MAX)) >= bytes(&prompt(total)));
    }
    let sizes: Vec<usize> = (1..6000).map(|tokens| bytes(&prompt(tokens))).collect();
    assert!(sizes.is_sorted());
    let enough = bytes(&prompt(4096));
    let of = |bytes: usize| prompt(4096).workspace(tensor(F32, &[bytes / 4]));
    of(enough).recipe().unwrap();
    assert!(of(enough - 4).recipe().is_err());
}

#[test]
fn a_workspace_that_is_missing_or_too_small_is_refused_by_name() {
    let message = |step: Gdn<'static>| step.recipe().map(drop).unwrap_err().to_string();
    let bytes = dense(300).workspace_bytes().unwrap();
    let wanted =
        format!("bytes of workspace: wanted at least {bytes} (Work::workspace_bytes), got ");
    assert_eq!(message(dense(300)), wanted.clone() + "no workspace");
    let of = |elements: usize| dense(300).workspace(tensor(F32, &[elements]));
    assert_eq!(
        message(of(bytes / 4 - 1)),
        wanted + &(bytes - 4).to_string()
    );
    of(bytes / 4).recipe().unwrap();
    let enough = tensor(F32, &[2, bytes / 8]);
    dense(300).workspace(enough).recipe().unwrap();
    dense(64).recipe().unwrap();
    of_total(300, 64).recipe().unwrap();
}

/// GPUs other than Hopper process all rows by the scan that serves every GPU, in the 99 KB of shared memory that each of them has.
/// Launches overlap from compute capability 9.0 on.
#[test]
fn every_gpu_has_a_chain() {
    let workspace = || tensor(F32, &[1 << 24]);
    let launches = |step: Gdn<'static>, capability| -> Vec<crate::raw::Launch> {
        let recipe = step.workspace(workspace()).recipe_for(132, capability);
        recipe.unwrap().launches().collect()
    };
    let names = |launches: &[crate::raw::Launch]| -> Vec<&'static str> {
        launches.iter().map(|it| it.kernel.symbol()).collect()
    };
    for (capability, machine) in [
        ((8, 0), 80),
        ((8, 6), 80),
        ((8, 9), 80),
        ((10, 0), 100),
        ((12, 0), 100),
        ((13, 0), 100),
    ] {
        let of_batch = launches(batch(2, 300, None), capability);
        let [prepare, chain] = [
            "gdn_prefill_prepare_k128",
            "gdn_prefill_chain_k128_tile64_mma",
        ];
        assert_eq!(names(&of_batch), [prepare, chain]);
        let constant = |name| {
            let mut constants = of_batch[1].kernel.constants();
            constants.find(|(symbol, _)| *symbol == name).unwrap().1
        };
        assert_eq!(constant("GD_MACHINE"), machine, "{capability:?}");
        let most = gated_delta_kernels::machine::shared_bytes(capability);
        assert!(of_batch[1].shape.shared_bytes <= most, "{capability:?}");
        assert_eq!(of_batch[1].shape.overlaps, machine == 100);
        // Short rows and one long row take the same launches.
        assert_eq!(
            names(&launches(batch(2, 40, None), capability)),
            [prepare, chain]
        );
        let of_one = names(&launches(batch(1, 4096, None), capability));
        assert_eq!(of_one.len() > 2, machine == 100, "{of_one:?}");
        // Rows of one token only.
        assert_eq!(
            names(&launches(dense(1), capability)),
            ["prefill_single_k64"]
        );
    }
    full().recipe_for(132, (9, 0)).unwrap();
}

/// A block of short rows has two value heads of a query/key head if blocks of one would need more than one wave.
#[test]
fn short_rows_take_two_heads_a_block_from_a_wave_on() {
    let across = |rows, multiprocessors| {
        let step = batch(rows, 40, None);
        let recipe = step.recipe_for(multiprocessors, (9, 0)).unwrap();
        let launch = recipe.launches().last().unwrap();
        let symbol = launch.kernel.symbol();
        assert_eq!(symbol, "gdn_prefill_short_k128_tile128");
        launch.shape.grid[0]
    };
    // Rows have 32 value heads. An H200 has 132 multiprocessors, an H100 PCIe 114, an H20 78.
    for (multiprocessors, most) in [(132, 4), (114, 3), (78, 2)] {
        assert_eq!(across(most, multiprocessors), 2);
        assert_eq!(across(most + 1, multiprocessors), 1);
    }
}

/// A prewarm covers every length and every promise: no launch finds a kernel missing.
#[test]
fn a_prewarm_is_of_every_length() {
    let entries = |step: &Gdn<'_>| {
        let problem = step.request().check().unwrap();
        problem.entries(MEASURED_ON)
    };
    let all = entries(&dense(1));
    for step in [dense(1), dense(65), dense(4096), of_total(9, 9)] {
        let workspace = tensor(F32, &[1 << 24]);
        for launch in step.workspace(workspace).recipe().unwrap().launches() {
            let kernel = launch.kernel;
            assert!(all.contains(&kernel.entry()), "{}", kernel.symbol());
        }
    }
    assert_eq!(all.len(), 4);
    // A convolution adds one launch before and one after.
    assert_eq!(entries(&layer()).len(), 6);
    // A norm without a convolution adds one launch after.
    let mut without_conv = layer();
    without_conv.inputs = of_total(300, 300).inputs;
    assert_eq!(entries(&without_conv).len(), 5);
}

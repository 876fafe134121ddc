//! What a prefill is launched as: kernels, grids and workspaces.

use super::prefill::{dense, full, layer, of_total};
use super::*;

/// Rows of more than 64 tokens take two launches and a workspace, with a convolution one more, of short ones one launch and none.
#[test]
fn launches_and_workspaces_follow_from_lengths() {
    let names = |step: &Gdn<'_>| -> Vec<&'static str> {
        let recipe = step.recipe().unwrap();
        let launches = recipe.launches();
        launches.map(|(kernel, _)| kernel.symbol()).collect()
    };
    let long = [
        "gdn_prefill_prepare_k64",
        "gdn_prefill_chain_klast_bf16_k64_tile64",
    ];
    let short = ["gdn_prefill_short_klast_bf16_k64_tile64"];
    assert_eq!(names(&full()), long);
    let finish = "gdn_prefill_finish_k64";
    let whole = layer().workspace(tensor(F32, &[1 << 20]));
    let convolve = "gdn_prefill_convolve_k64";
    assert_eq!(names(&whole), [convolve, long[0], long[1], finish]);
    let recipe = whole.recipe().unwrap();
    let [convolve, prepare] = recipe.before.map(|launch| launch.unwrap().1.grid[0]);
    // Of two query/key heads q and k, and of the four value heads v; two of these are a block of the preparation's.
    assert_eq!(convolve, prepare / 2 * (2 + 2 + 4));
    // The windows of three rows of 512 channels, and a block of each unit and value head for the norm.
    let (_, shape) = recipe.after.unwrap();
    let (of_windows, of_norm) = (3 * 512_u32.div_ceil(shape.block), prepare / 2 * 4);
    assert_eq!(shape.grid, [of_windows + of_norm, 1, 1]);
    // Without a norm windows alone, without a convolution o alone; of short rows o is normed where it is made.
    let grid = |step: Gdn<'static>| step.recipe().unwrap().after.map(|(_, shape)| shape.grid);
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
    assert_eq!(dense(64).workspace_bytes().unwrap(), 0);
    assert_eq!(of_total(4096, 64).workspace_bytes().unwrap(), 0);
    assert_eq!(gdn().workspace_bytes().unwrap(), 0);
    assert_eq!(names(&gdn()).len(), 1);

    // A unit has at most 64 tokens of a row; a head of q and k has one of each.
    let bytes = |step: &Gdn<'_>| step.workspace_bytes().unwrap();
    let of_unit = bytes(&of_total(66, 66)) / (2 * 3);
    assert_eq!(of_unit % 128, 0);
    assert!(of_unit > 0);
    let recipe = full().recipe().unwrap();
    let [None, Some((_, shape))] = recipe.before else {
        panic!("{:?}", recipe.before);
    };
    let units = bytes(&full()) / 2 / of_unit;
    // A block has two value heads of a query/key head, of which there are two.
    assert_eq!(shape.grid, [2 * units as u32, 1, 1]);
    assert!((10..=13).contains(&units), "{units}");
    assert_eq!(recipe.shape.grid, [2, 2, 2]);
    let more = [65, 66, 128, 1000, 4096].map(|tokens| bytes(&dense(tokens)));
    assert!(more.is_sorted(), "{more:?}");
    assert!(bytes(&dense(300).positions(tensor(I32, &[2]))) >= bytes(&dense(300)));
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

#[test]
fn another_gpu_than_hopper_is_refused_by_name() {
    for capability in [(8, 0), (8, 9), (10, 0), (12, 0)] {
        for step in [full(), dense(16)] {
            let message = step.recipe_for(132, capability).unwrap_err().to_string();
            let wanted = format!(
                "compute capability with formulation = chunked = {}.{} is not supported: 9.0",
                capability.0, capability.1
            );
            assert!(message.starts_with(&wanted), "{message}");
        }
    }
    full().recipe_for(132, (9, 0)).unwrap();
}

/// No length and no promise makes one that is missing at a launch.
#[test]
fn a_prewarm_is_of_every_length() {
    let entries = |step: &Gdn<'_>| {
        let problem = step.request().check().unwrap();
        problem.entries(select::MEASURED_ON)
    };
    let all = entries(&dense(1));
    for step in [dense(1), dense(65), dense(4096), of_total(9, 9)] {
        let workspace = tensor(F32, &[1 << 24]);
        for (kernel, _) in step.workspace(workspace).recipe().unwrap().launches() {
            assert!(all.contains(&kernel.entry()), "{}", kernel.symbol());
        }
    }
    assert_eq!(all.len(), 3);
    // With a convolution, one before and one behind.
    assert_eq!(entries(&layer()).len(), 5);
    // With a norm alone, one behind.
    let mut without_conv = layer();
    without_conv.inputs = of_total(300, 300).inputs;
    assert_eq!(entries(&without_conv).len(), 4);
}

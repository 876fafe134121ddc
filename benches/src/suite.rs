//! All cells that a release shows, for one run.

use anyhow::{Context as _, Result};
use clap::Parser;

use crate::cell::Cell;
use crate::options::Options;
use crate::peers::Peers;

/// Tables with a cold level-2 cache, as the options that select them.
const TABLES: [&str; 21] = [
    "--op gdn_decode --model qwen3-next,qwen3.5-397b",
    "--op gdn_decode --model qwen3.5-27b --state bf16 --layout k_last",
    "--op gdn_mtp --model qwen3-next,qwen3.5-397b --state bf16 --layout k_last",
    "--op gdn_mtp --model qwen3-next,qwen3.5-397b --state f32 --layout k_last --modes snapshots,update",
    "--op gdn_mtp --model qwen3.5-27b --state bf16 --layout k_last --tokens 4 --modes verify,resume \
     --formulation parallel",
    "--op kda_recurrent --model kimi-linear,kda-gva --dim 128,64 --tokens 1 --modes update --state bf16 --layout k_last",
    "--op kda_recurrent --model kimi-linear,kda-gva --dim 128,64 --tokens 1 --modes update --state f32",
    "--op kda_recurrent --model kimi-k3-tp8 --tokens 1 --modes update --state bf16 --layout k_last",
    "--op kda_recurrent --model glm-5.3-flash --gate lower_bound --tokens 1 --modes update --state bf16 --layout k_last",
    "--op kda_recurrent --model kimi-linear,kda-gva --tokens 2,4,8 --modes token_slots --state bf16 --layout k_last",
    "--op kda_recurrent --tokens 4,8 --modes snapshots --state bf16 --layout k_last",
    "--op kda_recurrent --tokens 8 --modes verify,update,resume --state bf16 --layout k_last",
    "--op kda_recurrent --tokens 4,16 --modes verify --state bf16 --layout k_last --batch 1,16,64,256",
    "--op gdn_mtp,kda_recurrent --tokens 8,16 --modes verify,update --formulation parallel --state bf16 --layout v_last \
     --batch 1,16,64,256",
    "--op gdn_mtp --tokens 4 --modes verify,update --formulation parallel --state f16 --layout k_last --batch 16,256",
    "--op kda_recurrent --tokens 4 --modes verify,update --formulation parallel --state f16 --layout k_last \
     --batch 16,256",
    "--step",
    "--op gdn_layer --model qwen3.5-397b --state bf16 --layout k_last",
    "--op gdn_layer,kda_layer --tokens 4,8 --modes snapshots --gate softplus",
    "--op gdn_layer,kda_layer --tokens 4,8 --modes resume --state bf16 --layout k_last --gate softplus",
    "--op gdn_layer,kda_layer --dim 64 --batch 1,4,16,64,256 --gate softplus",
];

/// The layer step of one token for each published model, with 16- and 32-bit states.
const MODELS: [&str; 3] = [
    "--op gdn_layer --model qwen3-next,qwen3.5-27b,qwen4-exp,olmo-hybrid --batch 1,16,256 \
     --state bf16,f16,f32 --layout k_last",
    "--op kda_layer --model kimi-linear --batch 1,16,256 --gate softplus --state bf16,f16,f32 --layout k_last",
    "--op kda_layer --model glm-5.3-flash --batch 1,16,256 --gate lower_bound --state bf16,f16,f32 --layout k_last",
];

/// The cells of the models' tables.
pub fn models() -> Result<Vec<Cell>> {
    of_tables(&MODELS)
}

fn of_tables(tables: &[&str]) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    for &table in tables {
        let words = ["bench"].into_iter().chain(table.split_whitespace());
        let options = Options::try_parse_from(words).context(table.to_owned())?;
        cells.extend(options.cells().context(table.to_owned())?);
    }
    Ok(cells)
}

/// The cells of all tables, followed by those of them that a peer was recorded for with a warm cache.
pub fn cells() -> Result<Vec<Cell>> {
    let peers = Peers::recorded()?;
    let mut cells = of_tables(&TABLES)?;
    let warm = cells.iter().map(|&cell| Cell {
        cold: false,
        ..cell
    });
    let warm: Vec<Cell> = warm.filter(|cell| peers.of(cell).is_some()).collect();
    cells.extend(warm);
    Ok(cells)
}

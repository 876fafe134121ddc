//! Times of other libraries' prefills, from `record/<gpu>/prefill_peers.csv`.

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::peers::TIED;
use crate::record;

const RECORDED: [(&str, &str); 2] = [
    (
        "record/h100/prefill_peers.csv",
        include_str!("../../record/h100/prefill_peers.csv"),
    ),
    (
        "record/h200/prefill_peers.csv",
        include_str!("../../record/h200/prefill_peers.csv"),
    ),
];

/// Gate values of a time that holds only if every decay is fast. With `slow` ones such a kernel takes longest.
const FAST: &str = "fast";

/// A recorded time of another library. The file's other columns repeat what `case` says.
#[derive(Debug, Deserialize)]
struct Peer {
    /// Name of the GPU, as in its driver.
    card: String,
    /// Title of the case that is the same work.
    case: String,
    /// Dtype of the states.
    state: String,
    /// Work that the time includes and a row of the case does not.
    more: String,
    /// Values of the gates, if the time depends on them.
    values: String,
    /// Time per launch in µs, measured as in a row.
    us: f64,
    /// Name of the library.
    peer: String,
}

impl Peer {
    fn name(&self) -> String {
        match &*self.more {
            "" => self.peer.clone(),
            more => format!("{} + {more}", self.peer),
        }
    }
}

/// All recorded times.
pub struct Peers(Vec<Peer>);

impl Peers {
    /// Reads the recorded times.
    ///
    /// # Errors
    /// A malformed line.
    pub fn recorded() -> Result<Self> {
        let mut peers = Vec::new();
        for (path, text) in RECORDED {
            for peer in csv::Reader::from_reader(text.as_bytes()).deserialize() {
                peers.push(peer.context(path)?);
            }
        }
        Ok(Self(peers))
    }

    /// Name of the GPU whose records are in `folder`, if a peer was recorded on it.
    #[must_use]
    pub fn card(&self, folder: &str) -> Option<&str> {
        let mut cards = self.0.iter().map(|peer| &*peer.card);
        cards.find(|card| record::folder(card) == folder)
    }

    /// Time of the fastest peer of a case for any gate values, and the peer's name. If a peer is faster with fast gates, the name
    /// says so.
    #[must_use]
    pub fn best(&self, card: &str, case: &str, state: &str) -> Option<(f64, String)> {
        let fastest = |if_fast: bool| {
            let same =
                |peer: &&Peer| (&*peer.card, &*peer.case, &*peer.state) == (card, case, state);
            let peers = self.0.iter().filter(same);
            let peers = peers.filter(|peer| (peer.values == FAST) == if_fast);
            peers.min_by(|one, two| one.us.total_cmp(&two.us))
        };
        let best = fastest(false)?;
        let mut name = best.name();
        let with_fast = fastest(true).filter(|peer| peer.us < (1.0 - TIED) * best.us);
        if let Some(peer) = with_fast {
            name += &format!("; {:.1} {} with fast gates", peer.us, peer.name());
        }
        Some((best.us, name))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use gated_delta::KdaBeta;
    use gated_delta_harness::arguments::{DecayKind, Operator};

    use super::*;
    use crate::prefill::{cases, others};

    /// Each recorded time is of a case here, and of the card of its file.
    #[test]
    fn a_peer_includes_what_its_case_says() {
        let mut cases = cases();
        cases.extend(others());
        for (path, text) in RECORDED {
            for peer in csv::Reader::from_reader(text.as_bytes()).deserialize() {
                let peer: HashMap<String, String> = peer.unwrap();
                let case = cases.iter().find(|case| case.title() == peer["case"]);
                let case = case.unwrap_or_else(|| panic!("{peer:?}"));
                let folder = record::folder(&peer["card"]);
                assert!(path.contains(&folder), "{peer:?}");
                assert_eq!(peer["layout"], case.layout.to_string(), "{peer:?}");
                let norm = if case.qk_l2norm { "inside" } else { "before" };
                assert_eq!(peer["qk_norm"], norm, "{peer:?}");
                let ours = match (case.operator, case.gate, case.beta) {
                    (Operator::Gdn, ..) => "gates",
                    (_, DecayKind::Log, _) => "gates and sigmoid of β",
                    (.., KdaBeta::Given) => "sigmoid of β",
                    _ => "",
                };
                let more = if peer["gates"] == "given" { "" } else { ours };
                assert_eq!(peer["more"], more, "{peer:?}");
                assert!(["", FAST, "slow"].contains(&&*peer["values"]), "{peer:?}");
            }
        }
    }

    /// A bare time and one with the norms, and times of two cards, are never each other's.
    #[test]
    fn a_peer_is_of_the_same_work_and_card() {
        let peers = Peers::recorded().unwrap();
        let [h100, h200] = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"];
        let best = |card: &str, case: &str| peers.best(card, case, "f32");
        for case in ["8x1024", "2/8 1x4096", "KDA 8x1024"] {
            let bare = format!("{case}, bare");
            let [(with_norms, _), (bare, _)] = [case, &*bare].map(|case| best(h200, case).unwrap());
            assert!(bare < 0.95 * with_norms, "{case}: {bare}, {with_norms}");
            assert!(best(h100, case).is_none(), "{case}");
        }
        let [(h100, _), (h200, name)] =
            [h100, h200].map(|card| best(card, "8x1024, layer").unwrap());
        assert!(h200 < 0.95 * h100, "{h200}, {h100}");
        assert_eq!(name, "vLLM + gates");
        assert!(best("NVIDIA H200 as sm_80", "8x1024").is_none());
        assert!(peers.best("NVIDIA H200", "8x1024", "bf16").is_none());
        let of_kda = |case: &str| best("NVIDIA H200", case).unwrap().1;
        assert_eq!(of_kda("KDA 1x1024"), "vLLM; 42.0 cuDNN with fast gates");
        assert_eq!(of_kda("KDA 8x1024"), "cuDNN");
        assert_eq!(of_kda("KDA 4 1x65536, lower_bound, logits"), "FlashKDA");
    }
}

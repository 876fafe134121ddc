//! Thresholds: the entry for each number of states. `build.rs` generates the `match` from `tiles.txt`.

use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::launch::{Family, Form, Stage};

use super::{ANY, ELSEWHERE, Row};
use crate::step::args::StateLayout;
use crate::step::kind::{Kind, Mode};
use crate::tensor::DType;

include!(concat!(env!("OUT_DIR"), "/tiles.rs"));

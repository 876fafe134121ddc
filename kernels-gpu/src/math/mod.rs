//! What kernel bodies are made of: element conversion, gates, powers of two, reductions.

pub mod delta_rule;
pub mod elements;
pub mod gate;
pub mod power;
pub mod reduce;

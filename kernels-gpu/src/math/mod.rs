//! What kernel bodies are made of: element conversion, gates, reductions.

pub mod delta_rule;
pub mod elements;
pub mod gate;
pub mod reduce;

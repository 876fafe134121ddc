//! The command from outside: files in, exit status and text out.
//!
//! `GATED_DELTA_FIXTURES` names the folder of the known answers where it is not the workspace's, `GATED_DELTA_BIN` the
//! command where it is not the one just built; with `GATED_DELTA_REQUIRE_GPU=1`, having no GPU is a failure.

mod bad_input;
mod bench;
mod check;
mod command;
mod deferred;
mod layer;
mod recurrent;
mod recurrent_bad_input;

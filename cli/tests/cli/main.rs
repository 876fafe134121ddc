//! Tests of the command from outside: files as input, exit status and text as output.
//!
//! `GATED_DELTA_FIXTURES` names the folder of the known answers (by default the workspace's), and `GATED_DELTA_BIN` the command (by
//! default the one just built). With `GATED_DELTA_REQUIRE_GPU=1`, having no GPU is a failure.

mod bad_input;
mod bench;
mod check;
mod command;
mod deferred;
mod layer;
mod recurrent;
mod recurrent_bad_input;

//! Properties that only a GPU shows: graphs, long prompts, foreign streams and threads, plans, pools and snapshots beyond 2³²
//! elements, registers, faults, and launches for the sanitizers. Without a GPU the launches are skipped.

mod device_contract;
mod faults;
mod large_pool;
mod large_snapshots;
mod launches;
mod plans;
mod prompts;
mod replays;
mod sanitizer;

//! What the latency bench is made of: [`timing`] (graph replays, ceilings), [`shapes`] (named models),
//! [`gdn_decode`] (buffers, check and launch of one cell).

pub mod gdn_decode;
pub mod host_cost;
pub mod shapes;
pub mod timing;

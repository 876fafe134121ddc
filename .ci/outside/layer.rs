//! A layer whose token is decoded in the simulator and, where there is a GPU, on it.

use std::error::Error;

use gated_delta::{Gdn, GdnGates, Inputs, Library, Options, States, StreamRef, Tensor};

/// States of the pool.
pub const SLOTS: usize = 4;
/// The one that the row has.
const SLOT: usize = 2;

/// A layer of one head, K = V = 64, with one row whose key is the first channel's unit vector.
pub struct Layer {
    pub key: [f32; 64],
    pub value: [f32; 64],
    pub log_decay: [f32; 1],
    pub beta: [f32; 1],
    pub slot: [i32; 1],
    pub output: [f32; 64],
    pub states: [f32; SLOTS * 64 * 64],
}

impl Layer {
    fn new() -> Self {
        let mut key = [0.0; 64];
        key[0] = 1.0;
        Self {
            key,
            value: [0.5; 64],
            log_decay: [0.0],
            beta: [1.0],
            slot: [SLOT as i32],
            output: [f32::NAN; 64],
            states: [0.0; SLOTS * 64 * 64],
        }
    }

    /// The value was stored at the key, in the row's slot and no other, and read from there.
    fn check(&self, place: &str) {
        assert_eq!(self.output, self.value, "{place}: output");
        for (i, &element) in self.states.iter().enumerate() {
            let written = i / (64 * 64) == SLOT && i % 64 == 0;
            assert_eq!(
                element,
                if written { 0.5 } else { 0.0 },
                "{place}: element {i} of the states"
            );
        }
        println!("{place}: right");
    }
}

/// A decode: key, value, log decay, beta, slot, output and states of a layer, wherever they are.
pub fn step([key, value, g, beta, slot, o, pool]: [Tensor<'_>; 7]) -> Gdn<'_> {
    Gdn::new(
        Inputs::qkv(key, key, value),
        GdnGates::given(g, beta),
        o,
        States::update(pool).slots(slot),
    )
    .options(Options::default().scale(1.0).qk_l2norm(false))
}

/// Decodes in the simulator, and by `decode` where there is a GPU.
pub fn decode_everywhere(
    decode: impl FnOnce(&mut Layer) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let mut layer = Layer::new();
    let step = step([
        Tensor::from_slice(&layer.key, &[1, 1, 1, 64])?,
        Tensor::from_slice(&layer.value, &[1, 1, 1, 64])?,
        Tensor::from_slice(&layer.log_decay, &[1, 1, 1])?,
        Tensor::from_slice(&layer.beta, &[1, 1, 1])?,
        Tensor::from_slice(&layer.slot, &[1])?,
        Tensor::from_slice_mut(&mut layer.output, &[1, 1, 1, 64])?,
        Tensor::from_slice_mut(&mut layer.states, &[SLOTS, 1, 64, 64])?,
    ]);
    // SAFETY: a simulated launch is done when it returns.
    unsafe { Library::simulator().launch(StreamRef::default_stream(), &step) }?;
    layer.check("simulator");

    let mut layer = Layer::new();
    match decode(&mut layer) {
        Ok(()) => layer.check("GPU"),
        Err(error) => match error.downcast_ref() {
            Some(gated_delta::Error::NoDriver { .. } | gated_delta::Error::NoDevice) => {
                println!("GPU: skipped: {error}");
            }
            _ => return Err(error),
        },
    }
    Ok(())
}

//! Tests that the preparation is timed for everything that a layer is launched with.

use std::collections::BTreeSet;

use gated_delta::Library;
use gated_delta_benches::buffers::Buffers;
use gated_delta_benches::prewarm::{cells, millis};

#[test]
fn the_layer_is_launched_in_each_way() {
    let library = Library::simulator();
    let mut selected = BTreeSet::new();
    for cell in cells() {
        assert!(cell.exists(), "{}", cell.title());
        let buffers = Buffers::new(&library, cell).unwrap();
        let work = buffers.work(0).unwrap();
        selected.insert((cell.mode.name(), work.selected().unwrap().name().to_owned()));
    }
    assert_eq!(selected.len(), 4, "{selected:?}");
    assert!(millis(&library).unwrap() >= 0.0);
}

//! A program or shared library with gated-delta links without CUDA, starts without a driver, and exports no driver function.
#![cfg(all(feature = "cust", target_os = "linux"))]

mod fixtures;

use object::{Object, ObjectSection, ObjectSymbol};

/// Whether `name` looks like `cuInit`.
fn is_driver_function(name: &str) -> bool {
    name.strip_prefix("cu")
        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

#[test]
fn no_driver_function_is_exported_or_imported() {
    for file in ["libfixture_plugin.so", "fixture_client"] {
        let data = std::fs::read(fixtures::path(file)).unwrap();
        let binary = object::File::parse(&*data).unwrap();

        let names = binary
            .dynamic_symbols()
            .map(|symbol| symbol.name().unwrap().to_owned());
        let shown: Vec<_> = names.filter(|name| is_driver_function(name)).collect();
        assert!(shown.is_empty(), "{file} shows {shown:?}");

        let strings = binary.section_by_name(".dynstr").unwrap();
        let strings = String::from_utf8_lossy(strings.data().unwrap()).into_owned();
        assert!(
            !strings.contains("libcuda"),
            "{file} needs the driver to start"
        );

        let forwarders = binary
            .symbols()
            .filter(|symbol| symbol.name().is_ok_and(is_driver_function));
        assert!(
            forwarders.count() > 0,
            "{file} has no forwarder: the test looks at the wrong file"
        );
    }
}

#[test]
fn the_plugin_loads_and_reports_what_the_driver_says() {
    // SAFETY: the plugin has no initialisers, and the function has this type.
    let result = unsafe {
        let plugin = libloading::Library::new(fixtures::path("libfixture_plugin.so")).unwrap();
        let init = plugin.get::<extern "C" fn() -> i32>("plugin_init").unwrap();
        init()
    };
    const NO_DEVICE: i32 = 100;
    assert_eq!(
        result,
        if gated_delta::driver::driver().is_ok() {
            0
        } else {
            NO_DEVICE
        }
    );
}

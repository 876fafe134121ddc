//! Calls with a stand-in for the driver's library: arguments arrive unchanged, and refusals become errors that say how to
//! continue.
#![cfg(all(feature = "cust", target_os = "linux"))]

mod fixtures;
#[path = "fixtures/stand_in.rs"]
mod stand_in;

use std::process::Command;

/// Output of the client if loading PTX returns `load_result`. The output is the same with both stand-ins.
fn client(load_result: i32) -> String {
    let [old, new] = stand_in::DRIVERS.map(|driver| client_on(driver, load_result));
    assert_eq!(old, new);
    new
}

fn client_on(driver: &str, load_result: i32) -> String {
    let output = Command::new(fixtures::path("fixture_client"))
        .env(
            "LD_LIBRARY_PATH",
            stand_in::folder(driver, &load_result.to_string()),
        )
        .env("FIXTURE_LOAD_RESULT", load_result.to_string())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn all_arguments_reach_the_driver() {
    let printed = client(0);
    let lines: Vec<_> = printed.lines().collect();
    assert_eq!(
        lines,
        [
            "launch: 0",
            "launch: 0",
            "missing: 100",
            "device 1: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)",
            "name: the CUDA driver has no cuDeviceGetName: it is too old, or the library is not NVIDIA's",
            "load: done",
        ]
    );
}

#[test]
fn refusals_say_what_to_do() {
    let refusal = |result| client(result).lines().last().unwrap().to_owned();
    assert_eq!(
        refusal(222),
        "load: PTX ISA 7.4 needs CUDA 11.4 (driver 470) or newer, the driver is for CUDA 11.2: update the driver"
    );
    assert_eq!(
        refusal(209),
        "load: no kernel image for this GPU: the PTX targets sm_90, the device is sm_86"
    );
    assert_eq!(
        refusal(218),
        "load: the driver could not compile the PTX of gdn_decode: cuModuleLoadDataEx: CUDA_ERROR_INVALID_PTX \
         (218): ptxas application ptx input, line 7; fatal   : Parsing error near 'GD': syntax error"
    );
    assert_eq!(
        refusal(4242),
        "load: cuModuleLoadDataEx: unknown driver error (4242)"
    );
}

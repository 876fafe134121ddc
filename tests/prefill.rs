//! Prefills against the reference: every entry on every backend, over random problems: ragged rows, positions,
//! checkpoints, with and without a convolution and a norm.

use gated_delta_kernels::for_each_entry;

/// GDN's, and the windows of both.
mod gdn {
    use super::for_each_entry;

    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(gdn_prefill: $($table)*); };
    }
    for_each_entry!(entries);
}

/// KDA's.
mod kda {
    use super::for_each_entry;

    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(kda_prefill: $($table)*); };
    }
    for_each_entry!(entries);
}

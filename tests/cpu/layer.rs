//! The layer step against the reference: every entry on every backend, over random problems with a convolution, a norm or
//! both.

use gated_delta_kernels::for_each_entry;

mod one_token {
    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(layer: $($table)*); };
    }
    super::for_each_entry!(entries);
}

mod several_tokens {
    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(layer_mtp: $($table)*); };
    }
    super::for_each_entry!(entries);
}

//! The layer step against the reference: every entry on every backend, over random problems with a convolution, a norm or
//! both.

use gated_delta_kernels::for_each_entry;

mod gdn {
    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(gdn_layer: $($table)*); };
    }
    super::for_each_entry!(entries);
}

mod gdn_several_tokens {
    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(gdn_layer_mtp: $($table)*); };
    }
    super::for_each_entry!(entries);
}

mod kda_several_tokens {
    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(kda_layer_mtp: $($table)*); };
    }
    super::for_each_entry!(entries);
}

mod kda {
    macro_rules! entries {
        ($($table:tt)*) => { gated_delta_test_support::differential_tests!(kda_layer: $($table)*); };
    }
    super::for_each_entry!(entries);
}

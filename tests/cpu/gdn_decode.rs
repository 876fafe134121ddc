//! GDN decode against the reference: every entry on every backend, over random problems.

use gated_delta_kernels::for_each_entry;

macro_rules! entries {
    ($($table:tt)*) => { gated_delta_test_support::differential_tests!(gdn_decode: $($table)*); };
}
for_each_entry!(entries);

//! GDN's tokens at once, verify, resume and commit, against the reference: every entry on every backend, over random problems and switches.

use gated_delta_kernels::for_each_entry;

macro_rules! entries {
    ($($table:tt)*) => { gated_delta_test_support::differential_tests!(gdn_mtp: $($table)*); };
}
for_each_entry!(entries);

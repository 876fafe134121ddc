//! A loop macro for kernels.

/// `each!(r in 0..ROWS => body)` is the `while` loop of `body` with r = 0, 1, … `ROWS` − 1, without the iterator of a range. `body`
/// may `break` and `return`; it neither continues nor changes `r`.
macro_rules! each {
    ($i:ident in 0..$end:expr => $body:expr) => {{
        let mut $i = 0;
        while $i < $end {
            $body;
            $i += 1;
        }
    }};
}
pub(crate) use each;

//! Errors are candle's, with the text of this crate or of gated-delta in them.

/// candle's error of gated-delta's.
pub fn wrap(error: gated_delta::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// An error by its text.
macro_rules! bail {
    ($($text:tt)*) => {
        Err(candle_core::Error::msg(format!($($text)*)))
    };
}

pub(crate) use bail;

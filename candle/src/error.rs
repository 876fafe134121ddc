//! Errors. They are candle's; their text comes from this crate or from gated-delta.

/// Turns an error of gated-delta into one of candle.
pub fn wrap(error: gated_delta::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// Returns an error with this text.
macro_rules! bail {
    ($($text:tt)*) => {
        Err(candle_core::Error::msg(format!($($text)*)))
    };
}

pub(crate) use bail;

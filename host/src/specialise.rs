//! PTX text with the load-time constants of a layer written into it.

use std::ffi::CString;

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::entries::Entry;
use gated_delta_kernels::machine;
use gated_delta_kernels::step::StepConstants;

use crate::error::Error;
use crate::ptx;

/// Prefix of every load-time constant's symbol.
const SYMBOL_PREFIX: &str = "GD_";

/// The load-time constant for the instruction set of a GPU.
const MACHINE: &str = "GD_MACHINE";
/// Load-time constant that every entry reduces to its own value: see [`Entry::blocks_per_sm`].
const BLOCKS_PER_SM: &str = "GD_BLOCKS_PER_SM";

/// An entry with the load-time constants of a layer. Both together determine the compiled code, so this value is the key for a
/// cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    entry: Entry,
    constants: StepConstants,
}

impl Kernel {
    pub(crate) const fn new(entry: Entry, constants: StepConstants) -> Self {
        Self { entry, constants }
    }

    /// The entry.
    #[must_use]
    pub fn entry(&self) -> Entry {
        self.entry
    }

    /// Name of the function in the PTX.
    #[must_use]
    pub fn symbol(&self) -> &'static str {
        self.entry.name()
    }

    /// The PTX, with the constants written into it.
    ///
    /// # Errors
    /// [`Error::Specialise`] if a constant has no value, which is a defect of this library.
    pub fn ptx(&self) -> Result<String, Error> {
        let text = text(self.entry, self.constants.words())?.into_string();
        text.map_err(|_| Error::Specialise("the PTX is no UTF-8".to_owned()))
    }

    /// Name and value of every load-time constant; an f32 as its bits.
    pub fn constants(&self) -> impl Iterator<Item = (&'static str, u32)> {
        let symbols = self.entry.symbols().iter().copied();
        symbols.zip(words_of(self.entry, self.constants.words()))
    }
}

/// The PTX of `entry` with `constants` written into it, NUL-terminated.
pub(crate) fn text(entry: Entry, constants: &[u32]) -> Result<CString, Error> {
    specialise(
        &template(entry)?,
        entry.symbols(),
        &words_of(entry, constants),
    )
}

/// `constants`, with the number of blocks per multiprocessor reduced to the value for this entry: see [`Entry::blocks_per_sm`].
fn words_of(entry: Entry, constants: &[u32]) -> Vec<u32> {
    let mut words = constants.to_vec();
    let blocks = (entry.symbols().iter()).position(|symbol| *symbol == BLOCKS_PER_SM);
    if let Some(word) = blocks.and_then(|at| words.get_mut(at)) {
        *word = entry.blocks_per_sm(*word);
    }
    words
}

/// The PTX of `entry` before the constants are written into it. Each constant is a symbol of [`Entry::symbols`], and the text
/// compiles only when all of them are replaced by numbers. Every call decompresses the text.
///
/// # Errors
/// [`Error::Specialise`] for an entry newer than this library.
pub fn template(entry: Entry) -> Result<String, Error> {
    ptx::text(entry)
}

/// Replaces each of `symbols` in `ptx`, as a whole word, by the number at the same position in `words`. If `GD_MACHINE` is one of
/// the symbols, its number also selects the instructions, the target and the PTX version (`gated_delta_kernels::machine`).
///
/// # Errors
/// [`Error::Specialise`] if another `GD_` word is in the text, the counts differ, or the text has a NUL.
pub fn specialise(ptx: &str, symbols: &[&str], words: &[u32]) -> Result<CString, Error> {
    if symbols.len() != words.len() {
        let (symbols, words) = (symbols.len(), words.len());
        return Err(Error::Specialise(format!(
            "{words} values for {symbols} symbols"
        )));
    }
    let machine = symbols.iter().position(|known| *known == MACHINE);
    let machine = machine.map(|position| words[position]);
    let mut text = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(start) = rest.find(SYMBOL_PREFIX) {
        let (before, tail) = rest.split_at(start);
        let (symbol, after) = tail.split_at(tail.find(|c| !in_word(c)).unwrap_or(tail.len()));
        text.push_str(before);
        if before.ends_with(in_word) {
            text.push_str(symbol);
        } else if let Some(position) = symbols.iter().position(|known| *known == symbol) {
            text.push_str(&words[position].to_string());
        } else {
            let word = machine.and_then(|machine| machine::word(symbol, machine));
            let word = word.ok_or_else(|| Error::Specialise(format!("no value for {symbol}")))?;
            text.push_str(word);
        }
        rest = after;
    }
    text.push_str(rest);
    CString::new(text).map_err(|_| Error::Specialise("the PTX text has a NUL".to_owned()))
}

/// Whether `c` can be part of a PTX identifier.
fn in_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_machine_follow_from_its_constant() {
        let ptx =
            ".version GD_VERSION\n.target GD_TARGET\nGD_SM90 new;\nGD_SM80 old;\nGD_MACHINE GD_H\n";
        let symbols = ["GD_H", MACHINE];
        let special = |machine| specialise(ptx, &symbols, &[3, machine]).unwrap();
        let old = c".version 7.4\n.target sm_80\n// new;\n old;\n80 3\n";
        assert_eq!(special(machine::AMPERE).as_c_str(), old);
        let new = c".version 8.0\n.target sm_90\n new;\n// old;\n90 3\n";
        assert_eq!(special(machine::HOPPER).as_c_str(), new);
        // Without `GD_MACHINE` the words for machines have no meaning.
        let error = specialise("GD_SM90 new;", &["GD_H"], &[3]).unwrap_err();
        assert!(
            error.to_string().contains("no value for GD_SM90"),
            "{error}"
        );
    }
}

//! PTX text made special to a layer, and a cache of what the driver compiled from it.

use std::{
    borrow::Borrow,
    collections::HashMap,
    ffi::CString,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use rustc_hash::FxBuildHasher;

use crate::error::Error;

/// First letters of every load-time constant.
const SYMBOL_PREFIX: &str = "GD_";

/// Compiled values by key: each is compiled once, however many threads ask for it first.
///
/// A hit costs one read lock and one look-up. No lock is held while another key compiles. A failure goes
/// to the caller and is not kept: the next caller tries again.
#[derive(Debug)]
pub struct ModuleCache<K, V> {
    ready: RwLock<HashMap<K, V, FxBuildHasher>>,
    /// One per key ever asked for: held while that key compiles.
    gates: Mutex<HashMap<K, Arc<Mutex<()>>, FxBuildHasher>>,
}

impl<K, V> Default for ModuleCache<K, V> {
    fn default() -> Self {
        Self {
            ready: RwLock::default(),
            gates: Mutex::default(),
        }
    }
}

impl<K: Eq + Hash, V: Clone> ModuleCache<K, V> {
    /// The value of `key`, from `compile` where there is none yet.
    ///
    /// # Errors
    /// What `compile` returns.
    pub fn get_or_compile<Q, E>(
        &self,
        key: &Q,
        compile: impl FnOnce() -> Result<V, E>,
    ) -> Result<V, E>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        if let Some(value) = self.get(key) {
            return Ok(value);
        }
        let gate = lock(&self.gates).entry(key.to_owned()).or_default().clone();
        let _turn = lock(&gate);
        if let Some(value) = self.get(key) {
            return Ok(value);
        }
        let value = compile()?;
        let mut ready = self.ready.write().unwrap_or_else(PoisonError::into_inner);
        ready.insert(key.to_owned(), value.clone());
        Ok(value)
    }

    /// The value of `key`, where it is compiled.
    pub fn get<Q>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.ready
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned()
    }
}

/// Locks; a panic of an earlier holder left nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `ptx` with each of `symbols`, as a whole word, replaced by the word of the same position.
///
/// # Errors
/// [`Error::Specialise`] where a `GD_` word is none of `symbols`, the counts differ, or the text has a NUL.
pub fn specialise(ptx: &str, symbols: &[&str], words: &[u32]) -> Result<CString, Error> {
    if symbols.len() != words.len() {
        let (symbols, words) = (symbols.len(), words.len());
        return Err(Error::Specialise(format!(
            "{words} values for {symbols} symbols"
        )));
    }
    let mut text = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(start) = rest.find(SYMBOL_PREFIX) {
        let (before, tail) = rest.split_at(start);
        let (symbol, after) = tail.split_at(tail.find(|c| !in_word(c)).unwrap_or(tail.len()));
        text.push_str(before);
        if before.ends_with(in_word) {
            text.push_str(symbol);
        } else {
            let position = symbols.iter().position(|known| *known == symbol);
            let position =
                position.ok_or_else(|| Error::Specialise(format!("no value for {symbol}")))?;
            text.push_str(&words[position].to_string());
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

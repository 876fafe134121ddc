//! A cache of kernels that the driver has compiled.

use std::{
    borrow::Borrow,
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use rustc_hash::FxBuildHasher;

/// Compiled values by key. Each is compiled once, even if several threads ask for it first.
///
/// A hit costs one read lock and one look-up. No lock is held while another key compiles. An error is returned and not kept: the
/// next caller tries again.
#[derive(Debug)]
pub struct ModuleCache<K, V> {
    ready: RwLock<HashMap<K, V, FxBuildHasher>>,
    /// One lock per key that was ever asked for, held while the key compiles.
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
    /// The value of `key`; the first call for the key gets it from `compile`.
    ///
    /// # Errors
    /// The errors of `compile`.
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

    /// The value of `key`, if it is compiled.
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

    /// Number of compiled keys.
    pub fn compiled(&self) -> usize {
        let ready = self.ready.read();
        ready.unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// Locks `mutex`, also after a panic of an earlier holder, which leaves nothing half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

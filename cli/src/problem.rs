//! A GDN decode in host memory: tensors by name, and what is fixed for a layer.

use std::collections::BTreeMap;

use gated_delta::ops::gdn_decode::{GdnDecode, GdnDecodeOptions};
use gated_delta::ops::{BetaScale, GdnGates};
use gated_delta::{Entry, Tensor};

use crate::error::Error;
use crate::tensor::HostTensor;

/// Names of the tensors of a GDN decode that come from a file; `o` and `write_state` are the others.
pub const INPUTS: [&str; 12] = [
    "q",
    "k",
    "v",
    "a",
    "b",
    "A_log",
    "dt_bias",
    "g",
    "beta",
    "state",
    "read_slots",
    "write_slots",
];

/// Views of a problem's tensors, by name, for the library.
pub type Views<'a> = BTreeMap<&'static str, Tensor<'a>>;

/// A GDN decode. Tensors are those of [`GdnDecode`], under the names of [`INPUTS`]: `state` is its pool, `write_state`
/// its write pool; gates are given where there is a `g` or `beta`, else raw.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The tensors, `o` among them.
    pub tensors: BTreeMap<&'static str, HostTensor>,
    /// What is fixed for the layer.
    pub options: GdnDecodeOptions,
    /// Factor of sigmoid(b), for raw gates.
    pub beta_scale: BetaScale,
}

/// The slots of an active row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Slot of `state` to start from.
    pub read: usize,
    /// Slot of `write_state`, or else of `state`, for the new state.
    pub write: usize,
}

impl Problem {
    /// The tensor of that name.
    ///
    /// # Errors
    /// [`gated_delta::Error::MissingTensor`].
    pub fn tensor(&self, name: &'static str) -> Result<&HostTensor, Error> {
        Ok(self.tensors.get(name).ok_or_else(|| missing(name, false))?)
    }

    /// Whether a launch writes the tensor of that name.
    #[must_use]
    pub fn writes(&self, name: &str) -> bool {
        name == "o" || (self.options.update_state && name == self.written_pool())
    }

    /// Name of the pool that new states go to.
    #[must_use]
    pub fn written_pool(&self) -> &'static str {
        if self.tensors.contains_key("write_state") {
            "write_state"
        } else {
            "state"
        }
    }

    /// The library's arguments, from views of the problem's tensors.
    ///
    /// # Errors
    /// [`gated_delta::Error::MissingTensor`]; [`gated_delta::Error::Contradiction`] for raw and given gates at once.
    pub fn args<'a>(&self, views: &Views<'a>) -> Result<GdnDecode<'a>, gated_delta::Error> {
        let given = self.has_given_gates();
        let view = |name| views.get(name).copied().ok_or_else(|| missing(name, given));
        let gates = if given {
            if let Some(other) = ["a", "b", "A_log", "dt_bias"]
                .into_iter()
                .find(|name| views.contains_key(name))
            {
                let why = "gates are raw or given, and g is the log decay as it is";
                return Err(gated_delta::Error::Contradiction {
                    one: "g, beta",
                    other,
                    why,
                });
            }
            GdnGates::Given {
                g: view("g")?,
                beta: view("beta")?,
            }
        } else {
            GdnGates::Raw {
                a: view("a")?,
                b: view("b")?,
                a_log: view("A_log")?,
                dt_bias: view("dt_bias")?,
                beta_scale: self.beta_scale,
            }
        };
        Ok(GdnDecode {
            q: view("q")?,
            k: view("k")?,
            v: view("v")?,
            gates,
            o: view("o")?,
            pool: view("state")?,
            write_pool: views.get("write_state").copied(),
            read_slots: views.get("read_slots").copied(),
            write_slots: views.get("write_slots").copied(),
            options: self.options,
        })
    }

    /// Read-only views of the host tensors.
    ///
    /// # Errors
    /// As [`HostTensor::view`]'s.
    pub fn views(&self) -> Result<Views<'_>, gated_delta::Error> {
        self.tensors
            .iter()
            .map(|(&name, tensor)| Ok((name, tensor.view()?)))
            .collect()
    }

    /// Checks everything that the library checks, and that no two rows meet in a slot; the variant that the library
    /// selects.
    ///
    /// # Errors
    /// As [`GdnDecode::selected`]'s; [`Error::Input`] that names the rows and the slot.
    pub fn validate(&self) -> Result<Entry, Error> {
        let views = self.views()?;
        let selected = self.args(&views)?.selected()?;
        if self.options.update_state {
            check_slots(&self.rows(), self.written_pool() == "state")?;
        }
        Ok(selected)
    }

    /// Slots of each row; `None` for an inactive one. Meaningful for a problem that the library takes.
    #[must_use]
    pub fn rows(&self) -> Vec<Option<Slots>> {
        let indices = |name| self.tensors.get(name).map(HostTensor::to_i64);
        let slots = |name| {
            self.tensors
                .get(name)
                .and_then(|pool| pool.dims().first())
                .copied()
                .unwrap_or(0)
        };
        let (read_slots, write_slots) = (indices("read_slots"), indices("write_slots"));
        let (read_pool, write_pool) = (slots("state"), slots(self.written_pool()));
        let null_slot = self.options.null_slot.map(|slot| slot as usize);
        let live = |slot: i64, pool: usize| {
            usize::try_from(slot)
                .ok()
                .filter(|&slot| slot < pool && Some(slot) != null_slot)
        };
        (0..slots("q"))
            .map(|row| {
                let read = read_slots
                    .as_ref()
                    .map_or(Some(row as i64), |slots| slots.get(row).copied())?;
                let write = write_slots
                    .as_ref()
                    .map_or(Some(read), |slots| slots.get(row).copied())?;
                let read = live(read, read_pool)?;
                Some(Slots {
                    read,
                    write: if self.options.update_state {
                        live(write, write_pool)?
                    } else {
                        read
                    },
                })
            })
            .collect()
    }

    fn has_given_gates(&self) -> bool {
        self.tensors.contains_key("g") || self.tensors.contains_key("beta")
    }
}

fn missing(tensor: &'static str, given_gates: bool) -> gated_delta::Error {
    let needed_by = match tensor {
        "g" | "beta" => "given gates",
        "a" | "b" | "A_log" | "dt_bias" if !given_gates => "raw gates",
        _ => "all GDN decodes",
    };
    gated_delta::Error::MissingTensor { tensor, needed_by }
}

/// No slot is written by two rows, or written by one and read by another: what is left in it would depend on
/// which comes first.
fn check_slots(rows: &[Option<Slots>], one_pool: bool) -> Result<(), Error> {
    let mut writers = BTreeMap::new();
    for (row, slots) in rows.iter().enumerate() {
        let Some(slots) = slots else { continue };
        if let Some(other) = writers.insert(slots.write, row) {
            return Err(Error::Input(format!(
                "slots: wanted a slot to be written by one row, got rows {other} and {row} for slot {}",
                slots.write
            )));
        }
    }
    for (row, slots) in rows.iter().enumerate().filter(|_| one_pool) {
        let Some(slots) = slots else { continue };
        match writers.get(&slots.read) {
            Some(writer) if *writer != row => {
                return Err(Error::Input(format!(
                    "slots: wanted no row to read what another writes, got row {row} reading slot {} and row {writer} \
                     writing it",
                    slots.read
                )));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Slots, check_slots};

    fn slots(read: usize, write: usize) -> Option<Slots> {
        Some(Slots { read, write })
    }

    #[test]
    fn rows_that_meet_in_a_slot_are_named() {
        assert!(check_slots(&[slots(0, 0), None, slots(2, 2)], true).is_ok());
        let message = check_slots(&[slots(0, 3), None, slots(1, 3)], true)
            .unwrap_err()
            .to_string();
        assert!(message.contains("rows 0 and 2 for slot 3"), "{message}");
        let crossed = [slots(0, 1), slots(1, 0)];
        let message = check_slots(&crossed, true).unwrap_err().to_string();
        assert!(
            message.contains("row 0 reading slot 0 and row 1 writing it"),
            "{message}"
        );
        assert!(check_slots(&crossed, false).is_ok());
    }
}

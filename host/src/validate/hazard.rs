//! Hazards: states that one row writes and another row reads or writes, without an order between them.

use std::fmt;

use crate::error::Error;
use crate::tensor::Tensor;

/// Access of a row to a state or a window: a range of addresses in bytes.
#[derive(Clone, Copy)]
pub struct Access {
    /// First address.
    start: u64,
    /// Address after the last one.
    end: u64,
    place: Place,
}

/// Location of an access, for messages.
#[derive(Clone, Copy)]
pub struct Place {
    pub tensor: &'static str,
    /// Slot of a pool, or number of a snapshot.
    pub index: usize,
    pub row: usize,
    /// Token after which the state is written. `None`: the last one.
    pub token: Option<usize>,
}

impl Access {
    /// Access to `len` elements of `tensor`, from element `first` on.
    pub fn new(tensor: &Tensor<'_>, first: usize, len: usize, place: Place) -> Self {
        let address =
            |element: usize| tensor.address() + (element * tensor.dtype().size_of()) as u64;
        Self {
            start: address(first),
            end: address(first + len),
            place,
        }
    }

    /// Whether both accesses are to the same state.
    pub fn is_of(&self, other: &Self) -> bool {
        (self.start, self.end) == (other.start, other.end)
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// All accesses to states, or all to windows.
#[derive(Default)]
pub struct Accesses {
    reads: Vec<Access>,
    writes: Vec<Access>,
}

impl Accesses {
    pub fn read(&mut self, access: Access) {
        self.reads.push(access);
    }

    pub fn write(&mut self, access: Access) {
        self.writes.push(access);
    }

    /// Checks that no state is written twice, and that no state is written by one row and read by another.
    pub fn check(mut self) -> Result<(), Error> {
        self.writes.sort_by_key(|access| access.start);
        // In order of addresses, if any two overlap, then two neighbours do.
        for pair in self.writes.windows(2) {
            if pair[0].overlaps(&pair[1]) {
                let mut places = [pair[0].place, pair[1].place];
                places.sort_by_key(|place| (place.row, place.token));
                return Err(hazard(Verb("writes", places[0]), Verb("writes", places[1])));
            }
        }
        for read in &self.reads {
            let first = self.writes.partition_point(|write| write.end <= read.start);
            for write in self.writes[first..]
                .iter()
                .take_while(|write| write.overlaps(read))
            {
                let in_place = write.start == read.start && write.place.row == read.place.row;
                if !in_place {
                    return Err(hazard(
                        Verb("reads", read.place),
                        Verb("writes", write.place),
                    ));
                }
            }
        }
        Ok(())
    }
}

struct Verb(&'static str, Place);

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(verb, place) = self;
        let Place {
            tensor,
            index,
            row,
            token,
        } = place;
        let part = match *tensor {
            "snapshots" => "state",
            "window_snapshots" => "window",
            _ => "slot",
        };
        write!(f, "row {row} {verb} {part} {index} of {tensor}")?;
        match token {
            Some(token) => write!(f, " after token {token}"),
            None => Ok(()),
        }
    }
}

fn hazard(one: Verb, other: Verb) -> Error {
    Error::Hazard {
        one: one.to_string(),
        other: other.to_string(),
    }
}

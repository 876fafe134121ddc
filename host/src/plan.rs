//! What a launch is compiled for, and its kernels compiled: the part of a plan that every operator shares.

use gated_delta_kernels::constants::Constants;
use gated_delta_kernels::kernels::gdn_decode::GdnDecodeConstants;
use gated_delta_kernels::launch::LaunchShape;
use gated_delta_kernels::recurrent::RecurrentConstants;

use crate::Entry;
use crate::driver::RawFunction;
use crate::error::Error;
use crate::launch;
use crate::library::{KernelResources, Library, OperatorConstants};
use crate::ops::checks;
use crate::select::Kind;
use crate::shapes::unsupported;
use crate::stream::StreamRef;

/// Load-time constants of an operator on states.
pub(crate) trait LayerConstants: Constants {
    /// H, and HV / H.
    fn heads(&self) -> (u32, u32);

    /// Tokens of a row that a kernel's shared memory depends on.
    fn tokens(&self) -> u32;

    /// With the operator that they are of.
    fn of_operator(self) -> OperatorConstants;
}

impl LayerConstants for GdnDecodeConstants {
    fn heads(&self) -> (u32, u32) {
        (self.h, self.ratio)
    }

    fn tokens(&self) -> u32 {
        0
    }

    fn of_operator(self) -> OperatorConstants {
        OperatorConstants::GdnDecode(self)
    }
}

impl LayerConstants for RecurrentConstants {
    fn heads(&self) -> (u32, u32) {
        (self.h, self.ratio)
    }

    fn tokens(&self) -> u32 {
        self.tokens + self.previous_tokens
    }

    fn of_operator(self) -> OperatorConstants {
        OperatorConstants::Recurrent(self)
    }
}

/// What a launch is compiled for: everything but the addresses, B and P, and `total` of packed rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Problem<C> {
    pub kind: Kind,
    pub constants: C,
}

impl<C: LayerConstants> Problem<C> {
    pub fn value_heads(&self) -> u32 {
        let (heads, ratio) = self.constants.heads();
        heads * ratio
    }

    /// The variant for `batch` rows.
    pub fn entry(&self, batch: u32) -> Result<Entry, Error> {
        self.kind.entry(batch * self.value_heads())
    }

    pub fn shape(&self, entry: Entry, batch: u32) -> LaunchShape {
        let (heads, ratio) = self.constants.heads();
        let grid = [entry.tiles() * ratio, heads, batch];
        launch::shape(entry, grid, self.constants.tokens())
    }

    /// Dynamic shared memory of a block of `entry`, bytes.
    pub fn shared_bytes(&self, entry: Entry) -> u32 {
        launch::shared_bytes(entry, self.constants.tokens())
    }

    /// Bytes of a slot.
    pub fn state_bytes(&self) -> u64 {
        let state = u64::from(self.kind.k_dim).pow(2) * self.kind.state.size_of() as u64;
        u64::from(self.value_heads()) * state
    }
}

/// A problem with every kernel that some batch size gets.
#[derive(Clone, Debug)]
pub(crate) struct Planned<C> {
    library: Library,
    pub problem: Problem<C>,
    functions: Vec<(Entry, RawFunction)>,
}

impl Library {
    /// Compiles the kernels of `problem`.
    pub(crate) fn plan<C: LayerConstants>(&self, problem: Problem<C>) -> Result<Planned<C>, Error> {
        let constants = problem.constants.words();
        let functions = problem
            .kind
            .entries()
            .map(|entry| {
                let shared_bytes = problem.shared_bytes(entry);
                Ok((entry, self.function(entry, constants, shared_bytes)?))
            })
            .collect::<Result<_, Error>>()?;
        Ok(Planned {
            library: self.clone(),
            problem,
            functions,
        })
    }

    /// Registers and memory of every variant of `problem`.
    pub(crate) fn variant_resources<C: LayerConstants>(
        &self,
        problem: &Problem<C>,
    ) -> Result<Vec<(Entry, KernelResources)>, Error> {
        let constants = problem.constants.words();
        problem
            .kind
            .variants()
            .map(|entry| {
                let shared_bytes = problem.shared_bytes(entry);
                Ok((entry, self.resources(entry, constants, shared_bytes)?))
            })
            .collect()
    }
}

impl<C: LayerConstants> Planned<C> {
    /// The compiled function for `batch` rows and its launch shape.
    pub fn raw(&self, batch: usize) -> Result<(RawFunction, LaunchShape), Error> {
        checks::batch(batch)?;
        let entry = self.problem.entry(batch as u32)?;
        let planned = self
            .functions
            .iter()
            .find(|(candidate, _)| *candidate == entry);
        match planned {
            Some((_, function)) => Ok((*function, self.problem.shape(entry, batch as u32))),
            None => Err(unsupported(
                "B",
                batch,
                "a batch size that the plan has a kernel for",
            )),
        }
    }

    /// Enqueues the function for `batch` rows.
    ///
    /// # Safety
    /// As [`Library::launch_function`]'s, with the bytes of the operator's parameters.
    pub unsafe fn launch(
        &self,
        stream: StreamRef<'_>,
        batch: usize,
        params: &[u8],
    ) -> Result<(), Error> {
        let (function, shape) = self.raw(batch)?;
        // SAFETY: the caller's promise; the function was compiled for these constants.
        unsafe {
            self.library
                .launch_function(stream, function, shape, params)
        }
    }
}

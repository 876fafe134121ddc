//! Global memory: the tensors of a launch, and checks of accesses to them.

use std::cell::Cell;
use std::fmt;

use super::Region;
use super::fault::Problem;
use super::race::Observer;
use super::shadow::Shadow;
use super::view::View;

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A load of data that nobody writes during the launch.
    ReadOnlyLoad,
    /// A load.
    Load,
    /// A store.
    Store,
}

/// An access of one thread.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub address: u64,
    pub size: u64,
    pub op: Op,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = if self.op == Op::Store {
            "store"
        } else {
            "load"
        };
        write!(f, "{}-byte {op}", self.size)
    }
}

/// The runs of elements that a block accessed last, by page: the next access is mostly in the same run.
#[derive(Default)]
pub struct LastRuns([Cell<Run>; 1 << LAST_BITS]);

const LAST_BITS: u32 = 4;

/// Elements of a view without gaps between them.
#[derive(Clone, Copy, Default)]
struct Run {
    start: u64,
    bytes: u64,
    view: u32,
    writable: bool,
}

impl Run {
    #[inline]
    fn allows(&self, Request { address, size, op }: Request) -> bool {
        let offset = address.wrapping_sub(self.start);
        offset < self.bytes && size <= self.bytes - offset && (op != Op::Store || self.writable)
    }
}

impl LastRuns {
    #[inline]
    fn of(&self, address: u64) -> &Cell<Run> {
        let page = (address / 4096).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.0[(page >> (64 - LAST_BITS)) as usize]
    }
}

/// The tensors of a launch and the records of accesses to them.
pub struct GlobalMemory<'a> {
    views: Vec<View<'a>>,
    shadows: Vec<Shadow>,
}

impl<'a> GlobalMemory<'a> {
    pub fn new(regions: &'a [Region]) -> Self {
        let mut views: Vec<_> = regions.iter().filter_map(View::new).collect();
        let spans = views
            .iter()
            .map(|view| (view.start()..view.end(), view.region.writable));
        let shadows = Shadow::of_spans(spans);
        for view in &mut views {
            view.shadow = shadows.partition_point(|shadow| shadow.is_below(view.start()));
        }
        Self { views, shadows }
    }

    /// Checks the address of an access; returns the view if its accesses are recorded. `last_runs` are the caller's own.
    #[inline]
    pub fn check(
        &self,
        request: Request,
        last_runs: &LastRuns,
    ) -> Result<Option<&View<'a>>, Box<Problem>> {
        if !request.address.is_multiple_of(request.size) {
            return Err(self.misaligned(request));
        }
        let last = last_runs.of(request.address);
        let mut run = last.get();
        if !run.allows(request) {
            let found = self.find(request, run.view as usize);
            run = found.ok_or_else(|| self.outside(request))?;
            last.set(run);
        }
        let view = &self.views[run.view as usize];
        Ok(self.shadows[view.shadow].remembers().then_some(view))
    }

    /// The run that permits an access, in view `last` or in another one; empty if the access spans several runs.
    #[inline(never)]
    fn find(&self, Request { address, size, op }: Request, last: usize) -> Option<Run> {
        let run_in = |at: usize| {
            let view = &self.views[at];
            let writable = view.region.writable;
            if op == Op::Store && !writable {
                return None;
            }
            let several = || view.covers(address, size).then_some(address..address);
            let run = view.run_of(address, size).or_else(several)?;
            Some(Run {
                start: run.start,
                bytes: run.end - run.start,
                view: at as u32,
                writable,
            })
        };
        let again = (last < self.views.len()).then(|| run_in(last)).flatten();
        again.or_else(|| (0..self.views.len()).find_map(run_in))
    }

    /// Records an access to `view`, a view with records.
    #[inline]
    pub fn record(
        &self,
        view: &View<'_>,
        request: Request,
        by: &Observer<'_>,
    ) -> Result<(), Box<Problem>> {
        let Request { address, size, op } = request;
        self.shadows[view.shadow].change(address, size, |granule, at| {
            let what = || format!("{request} of {view} at element {:?}", view.element(at).0);
            let recorded = if op == Op::Store {
                granule.store(by)
            } else {
                granule.load(by)
            };
            recorded.map_err(|conflict| by.race(conflict, &what()))?;
            if let (Op::ReadOnlyLoad, Some(writer)) = (op, granule.writer()) {
                let (what, who) = (what(), by.name(writer));
                return Err(Problem::race(format!(
                    "{what} through the read-only path: {who} has stored to it"
                )));
            }
            Ok(())
        })
    }

    #[cold]
    fn misaligned(&self, request: Request) -> Box<Problem> {
        let Request { address, size, .. } = request;
        let place = match self.views.iter().find(|view| view.covers(address, 1)) {
            Some(view) => format!("element {:?} of {view}", view.element(address).0),
            None => format!("{address:#x}, outside every tensor"),
        };
        let has = 1_u64 << address.trailing_zeros();
        Problem::memory(format!(
            "misaligned {request} at {place}: the address is a multiple of {has}, not of {size}"
        ))
    }

    /// The error of an access that no tensor permits.
    #[cold]
    fn outside(&self, request: Request) -> Box<Problem> {
        const NULL_BYTES: u64 = 4096;
        const FAR: u64 = 16 << 20;
        let Request { address, size, op } = request;
        if address < NULL_BYTES {
            let message = format!("{request} through a null pointer, at {address:#x}");
            return Problem::memory(message);
        }
        let covering = self.views.iter().find(|view| view.covers(address, size));
        if let (Op::Store, Some(view)) = (op, covering) {
            let element = view.element(address).0;
            let message = format!("{request} to the read-only {view} at element {element:?}");
            return Problem::memory(message);
        }
        let covered = |view: &View<'_>| {
            (address..address + size)
                .take_while(|&byte| view.covers(byte, 1))
                .count() as u64
        };
        let nearest = self
            .views
            .iter()
            .min_by_key(|view| (size - covered(view), view.distance(address)));
        let Some(view) = nearest.filter(|view| view.distance(address) <= FAR) else {
            return Problem::memory(format!("{request} at {address:#x}, far from every tensor"));
        };
        if let Some(before @ 1..) = view.start().checked_sub(address) {
            let message =
                format!("out-of-bounds {request}: {before} bytes before the start of {view}");
            return Problem::memory(message);
        }
        let covered = covered(view);
        let (element, element_end) = view.element(address + covered);
        let place = match (covered, address.checked_sub(view.end())) {
            (1.., _) => format!("its last {} bytes are outside {view}", size - covered),
            (0, Some(0)) => format!("just past the end of {view}"),
            (0, Some(past)) => format!("{past} bytes past the end of {view}"),
            (0, None) => {
                let into = address - element_end;
                format!("{into} bytes into a gap between the rows of {view}")
            }
        };
        let message = format!("out-of-bounds {request}: {place} (nearest element {element:?})");
        Problem::memory(message)
    }
}

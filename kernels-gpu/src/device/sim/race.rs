//! Race detection: every two bytes remember their last write and two reads since.

use std::cell::Cell;

use super::cluster::Cluster;
use super::fault::Problem;
use super::mailbox::MAILBOXES;

/// Bytes of a [`Granule`]: the narrowest access.
pub const GRANULE_BYTES: u64 = 2;
/// Blocks that an [`Access`] can tell apart.
pub const MAX_BLOCKS: u32 = 1 << 24;
/// Threads that an [`Access`] can tell apart.
pub const MAX_THREADS: u32 = 1 << 10;
/// Warps of [`MAX_THREADS`].
pub const WARPS: usize = MAX_THREADS as usize / 32;
const TIME_BITS: u32 = 30;

/// Block, thread and time of an access, packed in this order. Time counts the barriers of a block, including those of its warps,
/// from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Access(u64);

impl Access {
    const NONE: Self = Self(0);
    /// Later than every barrier.
    const IN_FLIGHT: u32 = (1 << TIME_BITS) - 1;
    const MAILBOX: u32 = Self::IN_FLIGHT - 1;
    /// Time of data sent to the first mailbox of a cluster; the other mailboxes follow. Later than every barrier, like the two
    /// above.
    const SENT: u32 = Self::MAILBOX - MAILBOXES;

    #[inline]
    pub fn new(block: u32, thread: u32, time: u32) -> Self {
        Self(u64::from(block) << 40 | u64::from(thread) << TIME_BITS | u64::from(time))
    }

    /// Linear index of the block.
    #[inline]
    pub fn block(self) -> u32 {
        (self.0 >> 40) as u32
    }

    #[inline]
    pub fn thread(self) -> u32 {
        (self.0 >> TIME_BITS) as u32 % MAX_THREADS
    }

    #[inline]
    pub fn time(self) -> u32 {
        self.0 as u32 & Self::IN_FLIGHT
    }

    /// Whether it is the write of an asynchronous copy that its thread has not waited for.
    #[inline]
    pub fn is_in_flight(self) -> bool {
        self.time() == Self::IN_FLIGHT
    }

    /// Whether it initialized a mailbox.
    #[inline]
    fn is_mailbox(self) -> bool {
        self.time() == Self::MAILBOX
    }

    /// The mailbox of the cluster with which the data were sent, if they were.
    #[inline]
    fn mailbox(self) -> Option<u32> {
        (Self::SENT..Self::MAILBOX)
            .contains(&self.time())
            .then(|| self.time() - Self::SENT)
    }
}

/// Index along x, y, z of the block with this linear index.
pub fn block_index([x, y, _]: [u32; 3], linear: u32) -> [u32; 3] {
    [linear % x, linear / x % y, linear / x / y]
}

/// An access about to happen, and the accesses ordered before it.
pub struct Observer<'a> {
    pub access: Access,
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Time of the block's last barrier: all accesses up to it happened before.
    pub block_barrier: u32,
    /// For each warp of the block, the time up to which its accesses happened before.
    pub warp_clock: &'a [Cell<u32>; WARPS],
    /// The same for each lane of the warp.
    pub lane_barriers: &'a [Cell<u32>; 32],
    /// The cluster of the block.
    pub cluster: &'a Cluster,
    /// Phases of the cluster's barrier that happened before.
    pub phases: u32,
    /// Mailboxes of the cluster, a bit each, whose wait returned before.
    pub mail: u64,
}

impl Observer<'_> {
    /// Whether `earlier` happened before.
    #[inline]
    pub fn is_after(&self, earlier: Access) -> bool {
        if earlier == Access::NONE {
            return true;
        }
        if earlier.time() >= Access::SENT {
            let has_come = |mailbox: u32| self.mail >> mailbox & 1 == 1;
            return earlier.mailbox().is_some_and(has_come);
        }
        let in_block = earlier.block() == self.access.block() && self.is_after_in_block(earlier);
        in_block || self.cluster.puts_before(earlier, self.phases)
    }

    /// Whether `earlier`, an access of the same block, is ordered before by the block's own barriers.
    #[inline]
    fn is_after_in_block(&self, earlier: Access) -> bool {
        let (thread, my_thread) = (earlier.thread(), self.access.thread());
        let lane_barrier = || self.lane_barriers[thread as usize % 32].get();
        thread == my_thread
            || earlier.time() <= self.block_barrier
            || earlier.time() <= self.warp_clock[thread as usize / 32].get()
            || (thread / 32 == my_thread / 32 && earlier.time() <= lane_barrier())
    }

    /// This access as an asynchronous copy: no access is ordered after it, not even its own thread's, until the wait.
    #[inline]
    pub fn in_flight(&self) -> Access {
        self.at(Access::IN_FLIGHT)
    }

    /// This access as the initialization of a mailbox: nobody may access it afterwards.
    #[inline]
    pub fn mailbox(&self) -> Access {
        self.at(Access::MAILBOX)
    }

    /// This access as data sent with a mailbox: threads that have waited for the mailbox are after it.
    pub fn sent(&self, mailbox: u32) -> Access {
        self.at(Access::SENT + mailbox)
    }

    #[inline]
    fn at(&self, time: u32) -> Access {
        Access::new(self.access.block(), self.access.thread(), time)
    }

    /// Names the thread that made `access`.
    pub fn name(&self, access: Access) -> String {
        let [x, y, z] = block_index(self.grid, access.block());
        format!("thread {} of block ({x}, {y}, {z})", access.thread())
    }

    /// The fault that this access, described by `what`, is not ordered with an earlier one.
    #[cold]
    pub fn race(&self, conflict: Conflict, what: &str) -> Box<Problem> {
        let (op, other) = match conflict {
            Conflict::Load(other) => ("load", other),
            Conflict::Store(other) => ("store", other),
        };
        let who = self.name(other);
        if other.is_mailbox() {
            return Problem::memory(format!(
                "{what}: it is in a mailbox, which {who} has opened"
            ));
        }
        if let Some(mailbox) = other.mailbox() {
            let byte = self.cluster.mailbox_byte(mailbox);
            return Problem::race(format!(
                "race: {what}: {who} sends to it, and nothing orders the wait for the mailbox at byte {byte} before"
            ));
        }
        Problem::race(if other.is_in_flight() {
            format!("{what}: {who} copies to it and has not waited for the copy")
        } else if other.block() == self.access.block() {
            format!("race: {what}, and a {op} by {who}: no barrier between them")
        } else if self.cluster.made(other) {
            format!("race: {what}, and a {op} by {who}: no cluster barrier between them")
        } else {
            format!("race: {what}, and a {op} by {who}: blocks are not ordered")
        })
    }
}

/// An access that the new one is not ordered with.
#[derive(Clone, Copy, Debug)]
pub enum Conflict {
    Load(Access),
    Store(Access),
}

/// The accesses of two bytes of memory that a later one may race with.
///
/// Of several unordered readers two are kept: those that the cluster's barrier cannot order yet, else the lowest and the highest.
/// A write that races with any reader races with one of these. Two exceptions: the mask of a `sync_warp` has both but not a lane
/// between them, or more than two threads of a cluster arrive at its barrier relaxed or before they read.
#[derive(Clone, Copy, Debug)]
pub struct Granule {
    writer: Access,
    readers: [Access; 2],
}

impl Granule {
    pub const UNTOUCHED: Self = Self::written(Access::NONE);

    /// The state after a store that is ordered with all earlier accesses.
    #[inline]
    pub const fn written(by: Access) -> Self {
        Self {
            writer: by,
            readers: [Access::NONE; 2],
        }
    }

    /// Equality; a comparison of arrays would be a call.
    #[inline]
    pub fn is(&self, other: &Self) -> bool {
        let [a, b] = self.readers;
        let [c, d] = other.readers;
        (self.writer, a, b) == (other.writer, c, d)
    }

    /// The last write, if there is one.
    #[inline]
    pub fn writer(&self) -> Option<Access> {
        (self.writer != Access::NONE).then_some(self.writer)
    }

    /// Records a load.
    #[inline]
    pub fn load(&mut self, by: &Observer<'_>) -> Result<(), Conflict> {
        let me = by.access;
        let [a, b] = self.readers;
        if a == me || b == me {
            // A store since then would have removed it.
            return Ok(());
        }
        if !by.is_after(self.writer) {
            return Err(Conflict::Store(self.writer));
        }
        self.readers = match (by.is_after(a), by.is_after(b)) {
            (true, true) => [me, Access::NONE],
            (true, false) => [me, b],
            (false, true) => [a, me],
            (false, false) => by.cluster.lasting([a, b, me]),
        };
        Ok(())
    }

    /// Records a store.
    #[inline]
    pub fn store(&mut self, by: &Observer<'_>) -> Result<(), Conflict> {
        if !by.is_after(self.writer) {
            return Err(Conflict::Store(self.writer));
        }
        if let Some(&reader) = self.readers.iter().find(|reader| !by.is_after(**reader)) {
            return Err(Conflict::Load(reader));
        }
        *self = Self::written(by.access);
        Ok(())
    }
}

/// Memoized transition of one granule: the next granule of an access is mostly in the same state, and gets the same new state.
#[derive(Default)]
pub struct Same(Option<[Granule; 2]>);

impl Same {
    /// `granule` after `change`.
    #[inline]
    pub fn change<E>(
        &mut self,
        granule: Granule,
        change: impl FnOnce(&mut Granule) -> Result<(), E>,
    ) -> Result<Granule, E> {
        if let Some([was, became]) = self.0
            && was.is(&granule)
        {
            return Ok(became);
        }
        let mut became = granule;
        change(&mut became)?;
        self.0 = Some([granule, became]);
        Ok(became)
    }
}

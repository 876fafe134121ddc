//! Mailboxes of a cluster's blocks: who may send, how many bytes have arrived, and who may read them.

use std::cell::Cell;

use super::block::{Block, Thread};
use super::cluster::{Cluster, PORTABLE_BLOCKS};
use super::fault::{Fault, Problem};
use super::fibers::At;
use super::shared::BASE;

/// Mailboxes of a block.
const OF_A_BLOCK: usize = 8;
/// Mailboxes of a cluster: one bit each in a `u64`.
pub const MAILBOXES: u32 = (PORTABLE_BLOCKS * OF_A_BLOCK) as u32;
/// The largest byte count of a mailbox.
const MAX_BYTES: u32 = (1 << 20) - 1;
/// Phase of a mailbox that its opener has not yet announced at the cluster's barrier.
const NO_PHASE: u32 = u32::MAX;

/// The mailboxes of a cluster, block by block.
#[derive(Default)]
pub struct Mailboxes {
    /// Number of open mailboxes of each block.
    open: [Cell<usize>; PORTABLE_BLOCKS],
    boxes: [[Mailbox; OF_A_BLOCK]; PORTABLE_BLOCKS],
    /// Mailboxes, a bit each, whose wait returned before an arrival at the cluster's barrier.
    released: Cell<u64>,
    /// `released` as of the last even and the last odd phase.
    before: [Cell<u64>; 2],
}

#[derive(Default)]
struct Mailbox {
    /// Byte offset in its block's shared memory.
    byte: Cell<u32>,
    /// The thread that opened it.
    opener: Cell<usize>,
    /// The phase of the opener's next arrival: threads that have waited for it may use the mailbox.
    phase: Cell<u32>,
    expected: Cell<u32>,
    arrived: Cell<u32>,
    /// Whether a thread has returned from a wait for it.
    is_awaited: Cell<bool>,
}

impl Mailbox {
    fn is_complete(&self) -> bool {
        self.arrived.get() == self.expected.get()
    }
}

impl Mailboxes {
    pub fn clear(&self) {
        self.open.iter().for_each(|count| count.set(0));
    }

    pub fn clear_released(&self) {
        self.released.set(0);
    }

    /// Orders the mailboxes in `mail` before threads that wait for the current phase.
    pub fn release(&self, mail: u64) {
        self.released.set(self.released.get() | mail);
    }

    pub fn complete(&self, phase: u32) {
        self.before[phase as usize % 2].set(self.released.get());
    }

    /// The mailboxes that `phase`, the last one or the last but one, orders before threads that wait for it.
    pub fn before(&self, phase: u32) -> u64 {
        self.before[phase as usize % 2].get()
    }

    /// The open mailboxes of a block.
    fn of(&self, rank: usize) -> &[Mailbox] {
        &self.boxes[rank][..self.open[rank].get()]
    }

    /// The number of block `rank`'s mailbox at `byte`, if it is open.
    fn find(&self, rank: usize, byte: u32) -> Option<u32> {
        let found = |mailbox: &Mailbox| mailbox.byte.get() == byte;
        let at = self.of(rank).iter().position(found)?;
        Some((rank * OF_A_BLOCK + at) as u32)
    }

    fn get(&self, number: u32) -> &Mailbox {
        let number = number as usize;
        &self.boxes[number / OF_A_BLOCK][number % OF_A_BLOCK]
    }
}

impl Cluster {
    /// Byte offset of a mailbox in its block's shared memory.
    pub fn mailbox_byte(&self, number: u32) -> u32 {
        self.mailboxes.get(number).byte.get()
    }
}

/// The mailboxes that are ordered before any of `threads`.
pub fn all_mail<'a>(threads: impl IntoIterator<Item = &'a Thread>) -> u64 {
    let mail = threads.into_iter().map(|thread| thread.mail.get());
    mail.fold(0, |all, mail| all | mail)
}

impl Block<'_> {
    fn mailboxes(&self) -> &[Mailbox] {
        self.cluster.mailboxes.of(self.rank)
    }

    /// Releases the threads whose mailboxes are complete; returns whether there were any.
    pub(super) fn take_mail(&self) -> bool {
        if self.mailboxes().is_empty() {
            return false;
        }
        let has_come = |thread: &&Thread| match thread.at.get() {
            At::Mailbox(number) => self.cluster.mailboxes.get(number).is_complete(),
            _ => false,
        };
        let woken = self.threads.iter().filter(has_come);
        woken.map(|thread| thread.at.set(At::Running)).count() > 0
    }

    /// Checks, when no thread can send any more, that none waits for a mailbox.
    pub(super) fn check_awaited(&self) -> Result<(), Fault> {
        let waits = |thread: &Thread| matches!(thread.at.get(), At::Mailbox(_));
        match self.threads.iter().position(waits) {
            None => Ok(()),
            Some(thread) => Err(self.starved(thread)),
        }
    }

    /// Checks that the block waited for each mailbox to which something was sent.
    pub(super) fn check_sent(&self) -> Result<(), Fault> {
        let is_lost = |mailbox: &&Mailbox| mailbox.arrived.get() > 0 && !mailbox.is_awaited.get();
        let Some(lost) = self.mailboxes().iter().find(is_lost) else {
            return Ok(());
        };
        let message = format!(
            "{} of {} bytes were sent to the mailbox at byte {}, and the block might have ended before: \
             no thread of it waits for them",
            lost.arrived.get(),
            lost.expected.get(),
            lost.byte.get()
        );
        Err(self.fault(lost.opener.get(), *Problem::sync(message)))
    }

    /// The fault of `thread`, which waits for a mailbox in vain.
    pub(super) fn starved(&self, thread: usize) -> Fault {
        let At::Mailbox(number) = self.threads[thread].at.get() else {
            return self.diverged(thread, thread);
        };
        let mailbox = self.cluster.mailboxes.get(number);
        let expected = mailbox.expected.get();
        let message = format!(
            "diverged: the mailbox at byte {} waits for {} of {expected} bytes, and no thread goes on to send them",
            mailbox.byte.get(),
            expected - mailbox.arrived.get(),
        );
        self.fault(thread, *Problem::sync(message))
    }
}

/// Operations of the running thread.
impl Block<'_> {
    pub fn open_mailbox(&self, address: u32, bytes: u32) {
        let mailboxes = &self.cluster.mailboxes;
        let byte = address.wrapping_sub(BASE);
        if mailboxes.find(self.rank, byte).is_some() {
            let message = format!("opens the mailbox at byte {byte}, which is open");
            Problem::sync(message).raise();
        }
        if bytes > MAX_BYTES {
            let message = format!("a mailbox for {bytes} bytes: wanted at most {MAX_BYTES}");
            Problem::sync(message).raise();
        }
        let open = &mailboxes.open[self.rank];
        let Some(mailbox) = mailboxes.boxes[self.rank].get(open.get()) else {
            let message = format!("the simulator has at most {OF_A_BLOCK} mailboxes for a block");
            Problem::sync(message).raise();
        };
        let recorded = self.memory_of("mailbox", self.rank as u32);
        let recorded = recorded.open_mailbox(address, &self.observer());
        mailbox
            .byte
            .set(recorded.unwrap_or_else(|problem| problem.raise()));
        mailbox.opener.set(self.running.get());
        mailbox.phase.set(NO_PHASE);
        mailbox.expected.set(bytes);
        mailbox.arrived.set(0);
        mailbox.is_awaited.set(false);
        open.set(open.get() + 1);
    }

    /// Announces the mailboxes that the running thread has opened, as it arrives at `phase`.
    pub(super) fn announce_mailboxes(&self, phase: u32) {
        let opener = self.running.get();
        let is_new =
            |mailbox: &&Mailbox| mailbox.opener.get() == opener && mailbox.phase.get() == NO_PHASE;
        let new = self.mailboxes().iter().filter(is_new);
        new.for_each(|mailbox| mailbox.phase.set(phase));
    }

    /// The number of block `rank`'s mailbox at `address`, if the thread may use it; else a fault.
    fn mailbox(&self, op: &str, rank: usize, address: u32) -> u32 {
        let byte = address.wrapping_sub(BASE);
        let fault = |what: &str| -> ! {
            let block = self.name_in_cluster(rank);
            let message = format!("{op} the mailbox at byte {byte} of {block}, which {what}");
            Problem::sync(message).raise()
        };
        let Some(number) = self.cluster.mailboxes.find(rank, byte) else {
            fault("is not open");
        };
        let phase = self.cluster.mailboxes.get(number).phase.get();
        if self.threads[self.running.get()].phases.get() < phase {
            fault("might not be open: the thread has not waited for the cluster since");
        }
        number
    }

    pub fn send(&self, address: u32, rank: u32, value: u32, mailbox: u32) {
        let memory = self.memory_of("send", rank);
        let rank = rank as usize;
        let number = self.mailbox("sends to", rank, mailbox);
        let mailbox = self.cluster.mailboxes.get(number);
        let (arrived, expected) = (mailbox.arrived.get() + 4, mailbox.expected.get());
        if arrived > expected {
            let message = format!(
                "sends to the mailbox at byte {} of {}: {arrived} bytes, and it was opened for {expected}",
                mailbox.byte.get(),
                self.name_in_cluster(rank)
            );
            Problem::sync(message).raise();
        }
        if let Err(mut problem) = memory.send(address, value, number, &self.observer()) {
            let place = format!("in the shared memory of {}: ", self.name_in_cluster(rank));
            problem.message.insert_str(0, &place);
            problem.raise();
        }
        mailbox.arrived.set(arrived);
    }

    pub fn wait_mailbox(&self, address: u32) {
        let number = self.mailbox("waits for", self.rank, address);
        let mailbox = self.cluster.mailboxes.get(number);
        if !mailbox.is_complete() {
            self.wait(At::Mailbox(number));
        }
        mailbox.is_awaited.set(true);
        let mail = &self.threads[self.running.get()].mail;
        mail.set(mail.get() | 1 << number);
    }
}

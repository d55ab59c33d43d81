//! Asynchronous copies of a thread into shared memory, which run as late as permitted.

use std::collections::VecDeque;

use crate::memory::POISON;

/// One copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Late {
    pub(super) to: *mut u8,
    pub(super) from: *const u8,
    pub(super) bytes: usize,
}

impl Late {
    /// Fills the destination with poison, so that a thread that does not wait reads poison.
    ///
    /// # Safety
    /// The destination is writable.
    pub(super) unsafe fn poison(self) {
        for at in 0..self.bytes {
            // SAFETY: the caller's contract. Volatile, so that no `memset` is made of it, which
            // AddressSanitizer would look at.
            unsafe { self.to.add(at).write_volatile(POISON[at % POISON.len()]) };
        }
    }

    /// Executes the copy.
    ///
    /// # Safety
    /// Source and destination are valid for `bytes` bytes.
    pub(super) unsafe fn run(self) {
        // SAFETY: the caller's contract.
        unsafe { self.from.copy_to_nonoverlapping(self.to, self.bytes) };
    }
}

/// Copies of one thread that are not done, in groups.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    open: Vec<Late>,
    groups: VecDeque<Vec<Late>>,
}

impl Copies {
    pub(super) fn issue(&mut self, copy: Late) {
        self.open.push(copy);
    }

    /// Ends the group.
    pub(super) fn commit(&mut self) {
        self.groups.push_back(std::mem::take(&mut self.open));
    }

    /// Removes and returns the copies of all groups but the `prior` youngest.
    pub(super) fn wait(&mut self, prior: usize) -> Vec<Late> {
        let done = self.groups.len().saturating_sub(prior);
        self.groups.drain(..done).flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_leaves_the_youngest_groups() {
        let copy = |at: usize| Late { to: at as *mut u8, from: std::ptr::null(), bytes: 4 };
        let mut copies = Copies::default();
        for at in 0..3 {
            copies.issue(copy(at));
            copies.commit();
        }
        copies.issue(copy(3));
        assert_eq!(copies.wait(1), [copy(0), copy(1)]);
        assert_eq!(copies.wait(1), []);
        assert_eq!(copies.wait(0), [copy(2)]);
        copies.commit();
        assert_eq!(copies.wait(0), [copy(3)]);
    }
}

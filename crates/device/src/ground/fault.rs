//! Faults that tests plant in the engine, to show their effects and that the race sanitizer finds
//! them: safe code cannot contain a race with this API. Outside of this crate's own tests there are
//! no faults, and the compiler removes the checks.

/// An ordering that the engine omits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineFault {
    /// The pool forgets pending accesses to a freed block, so that its next tenant does not wait
    /// for them (S2).
    PoolForgets = 1,
    /// Readers do not wait for the producer.
    NoWaitForProducer = 2,
    /// Writers do not wait for readers.
    NoWaitForReaders = 4,
    /// Writers do not wait for the previous writer.
    NoWaitForWriter = 8,
    /// A read-back takes the result without a wait.
    NoWaitForReadBack = 16,
}

/// Faults of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct EngineFaults(u8);

impl EngineFaults {
    #[cfg(test)]
    pub(crate) fn planted(faults: &[EngineFault]) -> Self {
        EngineFaults(faults.iter().fold(0, |all, &fault| all | fault as u8))
    }

    /// Whether `fault` is planted.
    pub(crate) fn has(self, fault: EngineFault) -> bool {
        cfg!(test) && self.0 & fault as u8 != 0
    }
}

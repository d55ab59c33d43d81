//! Sizes of messages.

/// Largest message in bytes; longer messages are split, because counts of MPI are i32 and each
/// arriving message proves that its sender is alive.
pub(super) const CHUNK: usize = 16 << 20;

/// Sizes of the messages that carry `len` bytes; sender and receiver split alike.
pub(super) fn chunks(len: usize) -> impl Iterator<Item = usize> {
    let whole = std::iter::repeat_n(CHUNK, len / CHUNK);
    whole.chain((!len.is_multiple_of(CHUNK)).then_some(len % CHUNK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_and_few() {
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, (1 << 31) - 1, 1 << 31, (1 << 40) + 7] {
            let pieces = || chunks(len);
            assert_eq!(pieces().sum::<usize>(), len);
            assert_eq!(pieces().count(), len.div_ceil(CHUNK));
            assert!(pieces().all(|piece| (1..=CHUNK).contains(&piece)));
        }
        assert!(i32::try_from(CHUNK).is_ok());
    }
}

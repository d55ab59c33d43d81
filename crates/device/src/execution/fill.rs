//! Patterns to fill memory with.

/// A pattern of bytes to fill memory with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// The bytes of a word, in native order, repeated from the first byte on.
    Word(u32),
}

impl Fill {
    /// Fills `bytes`; the last word may be cut off.
    pub(crate) fn write(self, bytes: &mut [u8]) {
        match self {
            Fill::Zero => bytes.fill(0),
            Fill::Word(word) => {
                let word = word.to_ne_bytes();
                let (words, rest) = bytes.as_chunks_mut();
                words.fill(word);
                rest.copy_from_slice(&word[..rest.len()]);
            }
        }
    }
}

//! Shape of a value.

/// Shape of a value per sample: channels, height, width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Channels (or features).
    pub c: usize,
    /// Rows.
    pub h: usize,
    /// Columns.
    pub w: usize,
}

impl Dims {
    /// Elements per sample.
    pub fn numel(self) -> usize {
        self.c * self.h * self.w
    }

    /// Whether each channel has one element.
    pub(crate) fn is_vector(self) -> bool {
        self.h * self.w == 1
    }
}

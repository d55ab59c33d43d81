//! Sizes of windows along rows and columns.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A size along rows and columns: one number for both, or `[rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "AxisText", into = "AxisText")]
pub struct PerAxis {
    /// Number of rows, for a height.
    pub rows: usize,
    /// Number of columns, for a width.
    pub columns: usize,
}

/// The form in files.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a whole number, or [rows, columns]")]
enum AxisText {
    Both(usize),
    Each([usize; 2]),
}

impl PerAxis {
    /// The same size along both axes.
    pub fn both(size: usize) -> Self {
        Self { rows: size, columns: size }
    }

    /// A size for a signal, which is an image of one row: `points` along its points. `rows` is 1
    /// for a window, stride or dilation, 0 for padding.
    pub(super) fn of_signal(rows: usize, points: usize) -> Self {
        Self { rows, columns: points }
    }

    /// Rows, then columns.
    pub fn pair(self) -> [usize; 2] {
        [self.rows, self.columns]
    }
}

impl From<usize> for PerAxis {
    fn from(size: usize) -> Self {
        Self::both(size)
    }
}

impl From<AxisText> for PerAxis {
    fn from(text: AxisText) -> Self {
        match text {
            AxisText::Both(size) => Self::both(size),
            AxisText::Each([rows, columns]) => Self { rows, columns },
        }
    }
}

impl From<PerAxis> for AxisText {
    fn from(size: PerAxis) -> Self {
        if size.rows == size.columns {
            AxisText::Both(size.rows)
        } else {
            AxisText::Each(size.pair())
        }
    }
}

impl fmt::Display for PerAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}×{}", self.rows, self.columns)
    }
}

/// Zeros around an image or a signal; `S` is [`PerAxis`] for images, a number of points for
/// signals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Padding<S = PerAxis> {
    /// Half a window: with stride 1 the image keeps its size. The window must be odd.
    #[default]
    Same,
    /// None.
    Valid,
    /// A number of zeros on each side.
    #[serde(untagged)]
    Each(S),
}

impl Padding<usize> {
    /// The same padding for the signal as an image of one row.
    pub(super) fn of_row(self) -> Padding {
        match self {
            Padding::Same => Padding::Same,
            Padding::Valid => Padding::Valid,
            Padding::Each(points) => Padding::Each(PerAxis::of_signal(0, points)),
        }
    }
}

impl Padding {
    /// Zeros before and after the rows and the columns, for this window.
    pub(super) fn around(self, window: PerAxis, dilation: PerAxis) -> Result<PerAxis, String> {
        match self {
            Padding::Same if window.rows.is_multiple_of(2) || window.columns.is_multiple_of(2) => {
                Err(format!("padding `same` needs an odd kernel, got {window}"))
            }
            Padding::Same => Ok(PerAxis {
                rows: window.rows / 2 * dilation.rows,
                columns: window.columns / 2 * dilation.columns,
            }),
            Padding::Valid => Ok(PerAxis::both(0)),
            Padding::Each(size) => Ok(size),
        }
    }
}

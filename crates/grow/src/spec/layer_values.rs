//! Values of the keys of layers.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

/// Slope of a leaky ReLU, 0.01 by default. Slopes are equal if their bits are.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slope(pub f32);

impl Default for Slope {
    fn default() -> Self {
        Self(0.01)
    }
}

/// Probability that dropout drops an element. Probabilities are equal if their bits are.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DropRate(pub f32);

macro_rules! equal_by_bits {
    ($($number:ty),*) => {$(
        impl PartialEq for $number {
            fn eq(&self, other: &Self) -> bool {
                self.0.to_bits() == other.0.to_bits()
            }
        }

        impl Eq for $number {}

        impl Hash for $number {
            fn hash<H: Hasher>(&self, state: &mut H) {
                self.0.to_bits().hash(state);
            }
        }
    )*};
}
equal_by_bits!(Slope, DropRate);

/// Formula that joins branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BranchJoin {
    /// The sum; all have one shape.
    Add,
    /// The product, element by element; all have one shape. A vector may also scale the channels of
    /// an image with as many channels.
    Multiply,
    /// Channels side by side; all have the same rows and columns.
    Concat,
}

impl fmt::Display for BranchJoin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BranchJoin::Add => "sum",
            BranchJoin::Multiply => "product",
            BranchJoin::Concat => "concatenation",
        })
    }
}

/// Output features of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Features {
    /// One per class of the dataset.
    Classes,
    /// A fixed number of features.
    #[serde(untagged)]
    Count(usize),
}

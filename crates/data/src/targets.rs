//! Targets of samples: kinds, standardisation, and the copies that are read from files.

use std::fmt;
use std::ops::Range;

use meristem_device::{DType, Owner, Shape, Stream, Tensor};
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// Largest number of classes, and of labels or numbers of a sample; a class index that is not
/// below it is damage.
pub(crate) const OUTPUTS_MAX: u32 = 65_536;

/// Kind of the targets of a dataset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TargetKind {
    /// One class for each sample: u32 \[N\].
    #[default]
    Classes,
    /// Several labels, each present or absent: f32 \[N, K\], 0 to 1.
    Labels,
    /// Numbers: f32 \[N, K\], standardised.
    Numbers,
}

impl fmt::Display for TargetKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Classes => "classes",
            Self::Labels => "labels",
            Self::Numbers => "numbers",
        })
    }
}

/// Targets of N samples in memory, for a dataset with K names of outputs. A slice of u32 converts
/// to classes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SampleTargets<'a> {
    /// Class of each sample, \[N\], below K.
    Classes(&'a [u32]),
    /// Labels of each sample, \[N, K\], 0 (absent) to 1 (present).
    Labels(&'a [f32]),
    /// Numbers of each sample, \[N, K\], finite, as they are; the dataset standardises them.
    Numbers(&'a [f64]),
}

impl<'a> From<&'a [u32]> for SampleTargets<'a> {
    fn from(classes: &'a [u32]) -> Self {
        Self::Classes(classes)
    }
}

impl<'a> From<&'a Vec<u32>> for SampleTargets<'a> {
    fn from(classes: &'a Vec<u32>) -> Self {
        Self::Classes(classes)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for SampleTargets<'a> {
    fn from(classes: &'a [u32; N]) -> Self {
        Self::Classes(classes)
    }
}

impl SampleTargets<'_> {
    pub(crate) fn kind(&self) -> TargetKind {
        match self {
            Self::Classes(_) => TargetKind::Classes,
            Self::Labels(_) => TargetKind::Labels,
            Self::Numbers(_) => TargetKind::Numbers,
        }
    }

    /// Number of values, of all samples together.
    pub(crate) fn values(&self) -> usize {
        match self {
            Self::Classes(classes) => classes.len(),
            Self::Labels(labels) => labels.len(),
            Self::Numbers(numbers) => numbers.len(),
        }
    }

    /// The targets as a device stores them, `width` values for each sample, and the constants with
    /// which numbers were standardised.
    pub(crate) fn store(&self, width: usize) -> (StoredTargets, Standardization) {
        let none = Standardization::default();
        match *self {
            Self::Classes(classes) => (StoredTargets::Classes(classes.to_vec()), none),
            Self::Labels(labels) => {
                (StoredTargets::Values { values: labels.to_vec(), width }, none)
            }
            Self::Numbers(numbers) => {
                let mut moments = OutputMoments::new(width);
                numbers.iter().for_each(|number| moments.add(*number));
                let constants = moments.standardization();
                let outputs = (0..width).cycle();
                let values = numbers.iter().zip(outputs).map(|(y, k)| constants.apply(k, *y));
                (StoredTargets::Values { values: values.collect(), width }, constants)
            }
        }
    }
}

/// Kind of the targets, and their number for each sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TargetForm {
    pub(crate) kind: TargetKind,
    /// Values of a sample: 1 for a class, else the number of labels or numbers.
    pub(crate) width: usize,
}

impl TargetForm {
    /// The form of targets with `outputs` classes, labels or numbers.
    pub(crate) fn new(kind: TargetKind, outputs: usize) -> Self {
        Self { kind, width: if kind == TargetKind::Classes { 1 } else { outputs } }
    }

    /// Type of a value; both types have 4 bytes.
    pub(crate) fn dtype(self) -> DType {
        match self.kind {
            TargetKind::Classes => DType::U32,
            TargetKind::Labels | TargetKind::Numbers => DType::F32,
        }
    }

    /// Bytes of the targets of one sample.
    pub(crate) fn bytes(self) -> usize {
        self.width.saturating_mul(size_of::<u32>())
    }

    /// Shape of the targets of `n` samples: \[n\] for classes, else \[n, width\].
    pub(crate) fn batch(self, n: usize) -> Shape {
        match self.kind {
            TargetKind::Classes => Shape::from([n]),
            TargetKind::Labels | TargetKind::Numbers => Shape::from([n, self.width]),
        }
    }
}

/// Targets of consecutive samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TargetChunk<'a> {
    /// Class of each sample.
    Classes(&'a [u32]),
    /// `width` values of each sample: labels, or standardised numbers.
    Values { values: &'a [f32], width: usize },
}

impl TargetChunk<'_> {
    /// Number of samples.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Classes(classes) => classes.len(),
            Self::Values { values, width } => values.len() / (*width).max(1),
        }
    }

    /// Adds to the number of samples of each class, or of those in which each label is present
    /// (above ½). `counts` has no entries for numbers.
    pub(crate) fn count(&self, counts: &mut [usize]) {
        match self {
            Self::Classes(classes) => classes.iter().for_each(|class| counts[*class as usize] += 1),
            Self::Values { values, width } => {
                for labels in values.chunks_exact((*width).max(1)) {
                    counts.iter_mut().zip(labels).for_each(|(n, v)| *n += usize::from(*v > 0.5));
                }
            }
        }
    }

    /// Adds the values, little-endian, to a checksum.
    pub(crate) fn add_to(&self, crc: &mut crc32fast::Hasher) {
        match self {
            Self::Classes(classes) => classes.iter().for_each(|c| crc.update(&c.to_le_bytes())),
            Self::Values { values, .. } => values.iter().for_each(|v| crc.update(&v.to_le_bytes())),
        }
    }
}

/// Counts for [`TargetChunk::count`]: one for each class or label, none for numbers.
pub(crate) fn empty_counts(kind: TargetKind, outputs: usize) -> Vec<usize> {
    if kind == TargetKind::Numbers { vec![] } else { vec![0; outputs] }
}

/// Targets of a split, as they are stored on a device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum StoredTargets {
    /// As [`TargetChunk::Classes`].
    Classes(Vec<u32>),
    /// As [`TargetChunk::Values`].
    Values { values: Vec<f32>, width: usize },
}

impl Default for StoredTargets {
    fn default() -> Self {
        Self::Classes(vec![])
    }
}

impl StoredTargets {
    /// No targets of this form, with room for those of `samples` samples.
    pub(crate) fn with_capacity(form: TargetForm, samples: usize) -> Self {
        match form.kind {
            TargetKind::Classes => Self::Classes(Vec::with_capacity(samples)),
            TargetKind::Labels | TargetKind::Numbers => {
                let values = Vec::with_capacity(samples.saturating_mul(form.width));
                Self::Values { values, width: form.width }
            }
        }
    }

    /// Number of samples.
    pub(crate) fn len(&self) -> usize {
        self.all().len()
    }

    /// All targets.
    pub(crate) fn all(&self) -> TargetChunk<'_> {
        match self {
            Self::Classes(classes) => TargetChunk::Classes(classes),
            Self::Values { values, width } => TargetChunk::Values { values, width: *width },
        }
    }

    /// The targets of the samples in `range`, which must exist.
    pub(crate) fn part(&self, range: Range<usize>) -> TargetChunk<'_> {
        match self {
            Self::Classes(classes) => TargetChunk::Classes(&classes[range]),
            Self::Values { values, width } => {
                let values = &values[range.start * width..range.end * width];
                TargetChunk::Values { values, width: *width }
            }
        }
    }

    /// The targets in chunks of `samples` samples, the last one shorter.
    pub(crate) fn chunks(&self, samples: usize) -> impl Iterator<Item = TargetChunk<'_>> {
        let len = self.len();
        let starts = (0..len).step_by(samples);
        starts.map(move |start| self.part(start..len.min(start + samples)))
    }

    /// Adds the targets of further samples, of the same form.
    pub(crate) fn extend(&mut self, more: TargetChunk<'_>) {
        match (self, more) {
            (Self::Classes(all), TargetChunk::Classes(classes)) => all.extend_from_slice(classes),
            (Self::Values { values: all, .. }, TargetChunk::Values { values, .. }) => {
                all.extend_from_slice(values);
            }
            // A reader's targets have the form of its layout.
            (Self::Classes(_), _) | (Self::Values { .. }, _) => debug_assert!(false, "{more:?}"),
        }
    }

    /// A tensor of the targets, of the shape of [`TargetForm::batch`]. Copies to the device.
    pub(crate) fn to_tensor(&self, stream: &Stream) -> Result<Tensor> {
        Ok(match self {
            Self::Classes(classes) => {
                Tensor::from_slice(stream, classes, [classes.len()], Owner::Dataset)?
            }
            Self::Values { values, width } => {
                Tensor::from_slice(stream, values, [self.len(), *width], Owner::Dataset)?
            }
        })
    }
}

/// Mean and population standard deviation of each number of the targets of the training split;
/// empty for classes and labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Standardization {
    pub(crate) mean: Vec<f64>,
    /// Positive; 1 for a number that is constant.
    pub(crate) std: Vec<f64>,
}

impl Standardization {
    /// The stored value of a number: (y − mean) / std in f64, rounded to f32.
    pub(crate) fn apply(&self, output: usize, number: f64) -> f32 {
        ((number - self.mean[output]) / self.std[output]) as f32
    }
}

/// Mean and squared deviations of each number of a target, updated number by number
/// (B. P. Welford, "Note on a method for calculating corrected sums of squares and products",
/// Technometrics 4, 1962), so that a large mean does not cancel a small deviation.
pub(crate) struct OutputMoments {
    /// Numbers added, of all outputs together.
    added: usize,
    mean: Vec<f64>,
    /// Sums of squared deviations.
    squares: Vec<f64>,
}

impl OutputMoments {
    /// Moments of no targets of `width` numbers.
    pub(crate) fn new(width: usize) -> Self {
        Self { added: 0, mean: vec![0.0; width], squares: vec![0.0; width] }
    }

    /// Adds the next number: targets are added one after another, each from its first number on.
    pub(crate) fn add(&mut self, number: f64) {
        let width = self.mean.len();
        let (output, count) = (self.added % width, self.added / width + 1);
        let difference = number - self.mean[output];
        self.mean[output] += difference / count as f64;
        self.squares[output] += difference * (number - self.mean[output]);
        self.added += 1;
    }

    /// The constants of the targets that were added; without any mean 0, std 1.
    pub(crate) fn standardization(self) -> Standardization {
        let count = (self.added / self.mean.len().max(1)) as f64;
        let std = |squares: &f64| {
            let std = (squares / count).sqrt();
            // A constant number becomes 0, not a division by zero.
            if std > 0.0 { std } else { 1.0 }
        };
        Standardization { std: self.squares.iter().map(std).collect(), mean: self.mean }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Errors of Welford's update are at most about n · 2⁻⁵³ of the deviation's scale, here with
    /// the mean (1e9) as the scale of each of 1,000 roundings: 1e9 · 1000 · 1.1e-16 ≈ 1e-4.
    #[test]
    fn moments_match_two_passes() {
        let number = |i: usize, output: usize| match output {
            0 => 1e9 + (i * i % 89) as f64,
            1 => -0.1,
            _ => (i as f64).sin() * 1e-3,
        };
        let mut moments = OutputMoments::new(3);
        (0..1000).for_each(|i| (0..3).for_each(|output| moments.add(number(i, output))));
        let Standardization { mean, std } = moments.standardization();
        for output in 0..3 {
            let own: Vec<f64> = (0..1000).map(|i| number(i, output)).collect();
            let expected = own.iter().sum::<f64>() / 1000.0;
            let variance = own.iter().map(|y| (y - expected).powi(2)).sum::<f64>() / 1000.0;
            let scale = if output == 0 { 1e9 } else { 1.0 };
            assert!((mean[output] - expected).abs() < 1e-13 * scale);
            let expected = if output == 1 { 1.0 } else { variance.sqrt() };
            assert!((std[output] - expected).abs() < 1e-13 * scale, "{std:?}");
        }
        assert_eq!((mean[1], std[1]), (-0.1, 1.0), "exactly, for a constant");
    }
}

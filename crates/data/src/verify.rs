//! Complete check of a dataset on disk: `meristem data verify`.

use serde::Serialize;

use crate::error::{Error, Result};
use crate::source::{DatasetFiles, DatasetSpec, Split};
use crate::targets::{self, TargetKind};

/// Result of a complete check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VerifyReport {
    /// Name of the source.
    pub name: String,
    /// (channels, height, width) of every sound image.
    pub image: [usize; 3],
    /// Kind of the targets.
    pub targets: TargetKind,
    /// Train, then test if there is one.
    pub splits: Vec<SplitReport>,
}

impl VerifyReport {
    /// Whether no damage was found.
    pub fn is_sound(&self) -> bool {
        self.splits.iter().all(|split| split.damaged.is_empty())
    }
}

/// One split of a [`VerifyReport`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SplitReport {
    /// The split.
    pub split: Split,
    /// Sound samples.
    pub images: usize,
    /// Names of classes or labels, with the number of sound samples of each; empty for numbers.
    pub per_class: Vec<(String, usize)>,
    /// Damage found. Image files list every damaged or missing one, CIFAR every bad label; other
    /// damage ends the split, and the samples before it are counted.
    pub damaged: Vec<Damage>,
}

/// One damaged file or label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// The message of the error: file, offset, expected and actual value, remedy.
    pub error: String,
}

/// Decodes every sample of every split without storing any. Waits for no device; `spec.skip_bad`
/// has no effect.
///
/// # Errors
/// The errors of [`DatasetFiles::open`]: damage to images is in the report, but missing files and
/// damaged headers are errors. [`Error::Io`] if the system refuses to read a file that is not one
/// of many images; [`Error::Changed`].
pub fn verify(spec: &DatasetSpec) -> Result<VerifyReport> {
    let files = DatasetFiles::open(&DatasetSpec { no_cache: true, ..spec.clone() })?;
    let layout = files.layout().clone();
    let mut splits = vec![];
    for split in Split::ALL.into_iter().filter(|split| files.has(*split)) {
        let mut damaged = vec![];
        let mut samples = 0;
        let mut per_class = targets::empty_counts(layout.targets, layout.classes.len());
        // Called for any error of one file among many: damaged, missing, or not readable.
        let mut note = |error: Error| {
            damaged.push(Damage { error: error.to_string() });
            Ok(())
        };
        let read = files.read_with(split, &mut note, &mut |_, targets| {
            samples += targets.len();
            targets.count(&mut per_class);
            Ok(())
        });
        match read {
            Ok(_) => {}
            // Damage that ends the split.
            Err(error @ (Error::Damaged { .. } | Error::Layout { .. })) => note(error)?,
            Err(error) => return Err(error),
        }
        splits.push(SplitReport {
            split,
            images: samples,
            per_class: layout.classes.iter().cloned().zip(per_class).collect(),
            damaged,
        });
    }
    let (name, shape) = (spec.source.name().to_string(), layout.shape);
    let image = [shape.channels, shape.height, shape.width];
    Ok(VerifyReport { name, image, targets: layout.targets, splits })
}

//! Arrays of targets: classes, labels or numbers.

use std::path::Path;

use super::array_file::ArrayFile;
use super::array_samples::{ArrayForm, Number};
use super::input::Input;
use super::npy::{ElementType, IntType, NpyHeader};
use super::{CHUNK_BYTES, Source, missing_files};
use crate::error::{Error, Mismatch, Result};
use crate::targets::{OUTPUTS_MAX, OutputMoments, Standardization, StoredTargets, TargetKind};

/// Names of arrays of classes or labels, train then test.
const LABELS: [&str; 2] = ["train_labels", "test_labels"];
/// Names of arrays of numbers, train then test.
const NUMBERS: [&str; 2] = ["train_targets", "test_targets"];

/// Names of the arrays of targets of the file, train then test: labels for a file without
/// targets.
///
/// # Errors
/// [`Error::Layout`] for a file with arrays of both kinds.
pub(super) fn target_arrays(path: &Path, names: &[String]) -> Result<[&'static str; 2]> {
    let has = |name: &&str| names.iter().any(|other| other == name);
    match [LABELS, NUMBERS].map(|pair| pair.into_iter().find(has)) {
        [Some(label), Some(number)] => {
            let got = format!("`{label}` and `{number}`");
            Err(Mismatch::new("the targets", "in one pair of arrays", got)
                .remedy("keep the labels, or the numbers")
                .in_layout(path))
        }
        [None, Some(_)] => Ok(NUMBERS),
        _ => Ok(LABELS),
    }
}

/// Targets of a file of arrays.
pub(super) struct ArrayTargets {
    pub(super) kind: TargetKind,
    /// Labels or numbers of a sample; 1 for classes.
    pub(super) width: usize,
    /// Train, then test.
    pub(super) splits: [StoredTargets; 2],
    pub(super) standardization: Standardization,
}

impl ArrayTargets {
    /// Reads the targets `names` of the samples in `forms`, train and perhaps test. Training
    /// numbers are read twice: for their constants, and to be standardised.
    ///
    /// # Errors
    /// [`Error::Missing`] names an array that the file lacks; [`Error::Layout`] for
    /// another shape or type, or a value out of range, with its place; the errors of reading.
    pub(super) fn read(
        file: &dyn ArrayFile,
        names: [&'static str; 2],
        forms: &[ArrayForm],
    ) -> Result<Self> {
        let mut train: Option<TargetArray> = None;
        let mut standardization = Standardization::default();
        let mut splits = [StoredTargets::default(), StoredTargets::default()];
        for ((name, form), targets) in names.into_iter().zip(forms).zip(&mut splits) {
            let open = |header: &NpyHeader, input: &Input<'_>| {
                let array = TargetArray::of(name, header, input, form.len)?;
                train.map_or(Ok(array), |train| array.check_like(&train, input))
            };
            let mut found = None;
            file.visit(name, &mut |header, input| {
                let array = *found.insert(open(header, input)?);
                if train.is_none() && array.kind == TargetKind::Numbers {
                    standardization = array.read_standardization(input)?;
                }
                Ok(())
            })?;
            file.visit(name, &mut |header, input| {
                *targets = open(header, input)?.read(&standardization, input)?;
                Ok(())
            })?;
            train = train.or(found);
        }
        let (kind, width) = train.map_or_else(Default::default, |train| (train.kind, train.width));
        Ok(Self { kind, width, splits, standardization })
    }

    /// Whether every training sample has exactly one of several labels.
    pub(super) fn is_one_hot(&self) -> bool {
        let StoredTargets::Values { values, width } = &self.splits[0] else { return false };
        let is_one_hot = |row: &[f32]| {
            let count = |number: f32| row.iter().filter(|value| **value == number).count();
            count(1.0) == 1 && count(0.0) == width - 1
        };
        self.kind == TargetKind::Labels
            && *width > 1
            && !values.is_empty()
            && values.chunks_exact(*width).all(is_one_hot)
    }
}

/// The error for a file without targets of its training samples.
pub(super) fn missing_targets(path: &Path) -> Error {
    let expected = format!("an array `{}` or `{}`", LABELS[0], NUMBERS[0]);
    missing_files(Source::Arrays, path, vec![expected])
}

/// An array of targets of a form that a dataset can have.
#[derive(Clone, Copy)]
struct TargetArray {
    name: &'static str,
    kind: TargetKind,
    samples: usize,
    /// Labels or numbers of a sample; 1 for classes.
    width: usize,
    number: Number,
}

impl TargetArray {
    /// The form of the array `name`, which should have the targets of `samples` samples.
    ///
    /// # Errors
    /// [`Error::Layout`] for another shape or type, with expressions of numpy that change it.
    fn of(
        name: &'static str,
        header: &NpyHeader,
        input: &Input<'_>,
        samples: usize,
    ) -> Result<Self> {
        let number = match header.element {
            // A byte of 0 or 1.
            ElementType::Bool => Some(Number::Int(IntType::U8)),
            ref other => Number::of(other),
        };
        let is_numbers = NUMBERS.contains(&name);
        let form = match (&header.element, &header.shape[..]) {
            (ElementType::Int(_), &[n]) if !is_numbers => Some((TargetKind::Classes, n, 1)),
            // Refused, because one integer per sample may be meant as a class.
            (ElementType::Int(_), [_, 1]) if !is_numbers => None,
            (_, &[n, k]) if !is_numbers && k > 0 && !header.is_fortran => {
                Some((TargetKind::Labels, n, k))
            }
            (ElementType::Bool, _) => None,
            (_, &[n]) if is_numbers => Some((TargetKind::Numbers, n, 1)),
            (_, &[n, k]) if is_numbers && k > 0 && !header.is_fortran => {
                Some((TargetKind::Numbers, n, k))
            }
            _ => None,
        };
        let wrong = |expected: String, remedy: &str| {
            Err(Mismatch::new(format!("`{name}`"), expected, header.to_string())
                .remedy(remedy)
                .in_layout(input.path()))
        };
        match (form, number) {
            (Some((_, n, width)), Some(_)) if n == samples && width > OUTPUTS_MAX as usize => {
                wrong(format!("of at most {OUTPUTS_MAX} columns"), "leave out some columns")
            }
            (Some((kind, n, width)), Some(number)) if n == samples => {
                Ok(Self { name, kind, samples, width, number })
            }
            _ if is_numbers => {
                let expected =
                    format!("numbers [{samples}] or [{samples}, K], a row for each sample");
                wrong(expected, remedy_of_numbers(header, samples))
            }
            _ => {
                let expected = format!(
                    "integers [{samples}], one for each sample, or labels [{samples}, K] from 0 to \
                     1"
                );
                wrong(expected, remedy_of_labels(header, samples))
            }
        }
    }

    /// This array, if its targets have the form of those in `train`.
    fn check_like(self, train: &Self, input: &Input<'_>) -> Result<Self> {
        if (self.kind, self.width) == (train.kind, train.width) {
            return Ok(self);
        }
        let expected = format!("{} as in training", train.describe());
        Err(Mismatch::new(format!("a row of `{}`", self.name), expected, self.describe())
            .remedy("give both splits the same columns")
            .in_layout(input.path()))
    }

    /// Targets of one sample in words.
    fn describe(&self) -> String {
        match self.kind {
            TargetKind::Classes => "one class".into(),
            kind => format!("{} {kind}", self.width),
        }
    }

    /// The error for the value at `place` of the array.
    fn out_of_range(&self, place: usize, input: &Input<'_>, wrong: Wrong) -> Error {
        let (sample, column, name) = (place / self.width, place % self.width, self.name);
        let what = match self.kind {
            TargetKind::Classes => format!("label {sample} of `{name}`"),
            TargetKind::Labels => format!("label {column} of sample {sample} of `{name}`"),
            TargetKind::Numbers => format!("number {column} of sample {sample} of `{name}`"),
        };
        let Wrong { expected, got, remedy } = wrong;
        Mismatch::new(what, expected, got).remedy(remedy).in_layout(input.path())
    }

    /// Passes the bytes of all elements to `each`, in order and with their places.
    fn read_elements(&self, input: &mut Input<'_>, each: OnElement<'_>) -> Result<()> {
        let element = self.number.bytes();
        // The header agrees with the number of bytes, so this does not overflow.
        let elements = self.samples * self.width;
        let mut piece = vec![0; CHUNK_BYTES.min(elements * element)];
        let mut done = 0;
        while done < elements {
            let count = (elements - done).min(piece.len() / element);
            let piece = &mut piece[..count * element];
            input.read_exact(piece, "targets")?;
            for (i, bytes) in piece.chunks_exact(element).enumerate() {
                each(done + i, bytes, input)?;
            }
            done += count;
        }
        input.expect_end()
    }

    /// The constants of an array of numbers.
    fn read_standardization(&self, input: &mut Input<'_>) -> Result<Standardization> {
        let mut moments = OutputMoments::new(self.width);
        self.read_elements(input, &mut |place, bytes, input| {
            moments.add(self.number_at(place, bytes, input)?);
            Ok(())
        })?;
        Ok(moments.standardization())
    }

    /// The number of `bytes`, which is finite as f32.
    fn number_at(&self, place: usize, bytes: &[u8], input: &Input<'_>) -> Result<f64> {
        let number = self.number.value(bytes);
        if (number as f32).is_finite() {
            return Ok(number);
        }
        let expected = "a finite number of at most 3.4e38".into();
        let remedy = "leave the sample out, or replace the value".into();
        let wrong = Wrong { expected, got: number.to_string(), remedy };
        Err(self.out_of_range(place, input, wrong))
    }

    /// All targets, as they are stored.
    fn read(&self, constants: &Standardization, input: &mut Input<'_>) -> Result<StoredTargets> {
        if let (TargetKind::Classes, Number::Int(int)) = (self.kind, self.number) {
            return self.read_classes(int, input);
        }
        let mut values = vec![];
        self.read_elements(input, &mut |place, bytes, input| {
            values.push(match self.kind {
                TargetKind::Numbers => self.standardized_at(place, bytes, (constants, input))?,
                TargetKind::Labels | TargetKind::Classes => self.label_at(place, bytes, input)?,
            });
            Ok(())
        })?;
        Ok(StoredTargets::Values { values, width: self.width })
    }

    fn read_classes(&self, int: IntType, input: &mut Input<'_>) -> Result<StoredTargets> {
        let mut classes = vec![];
        self.read_elements(input, &mut |place, bytes, input| {
            let value = int.value(bytes);
            let class = u32::try_from(value).ok().filter(|class| *class < OUTPUTS_MAX);
            classes.push(class.ok_or_else(|| {
                let expected = format!("from 0 to {}", OUTPUTS_MAX - 1);
                let remedy =
                    "number the classes from 0, and leave out samples without one".to_string();
                let got = format!("{value} ({int})");
                self.out_of_range(place, input, Wrong { expected, got, remedy })
            })?);
            Ok(())
        })?;
        Ok(StoredTargets::Classes(classes))
    }

    fn label_at(&self, place: usize, bytes: &[u8], input: &Input<'_>) -> Result<f32> {
        let label = self.number.value(bytes);
        let (is_label, expected) = match self.number {
            Number::Int(_) => (label == 0.0 || label == 1.0, "0 or 1"),
            Number::Float(_) => ((0.0..=1.0).contains(&label), "from 0 to 1"),
        };
        if is_label {
            return Ok(label as f32);
        }
        let numbers = self.name.replace("labels", "targets");
        let remedy = format!("name the array {numbers} if its columns are numbers");
        let wrong = Wrong { expected: expected.into(), got: label.to_string(), remedy };
        Err(self.out_of_range(place, input, wrong))
    }

    fn standardized_at(
        &self,
        place: usize,
        bytes: &[u8],
        (constants, input): (&Standardization, &Input<'_>),
    ) -> Result<f32> {
        let (output, number) = (place % self.width, self.number_at(place, bytes, input)?);
        let stored = constants.apply(output, number);
        if stored.is_finite() {
            return Ok(stored);
        }
        let expected = "within 3.4e38 standard deviations of the training mean".into();
        let remedy = "leave the sample out, or bring the column to another unit".into();
        let got = format!("{number} where the deviation is {}", constants.std[output]);
        Err(self.out_of_range(place, input, Wrong { expected, got, remedy }))
    }
}

/// Receiver of elements: place, bytes, and the input for errors.
type OnElement<'a> = &'a mut dyn FnMut(usize, &[u8], &Input<'_>) -> Result<()>;

/// Description of a value out of range.
struct Wrong {
    expected: String,
    got: String,
    remedy: String,
}

/// Instructions, with expressions of numpy, that turn an array `y` into classes or labels.
fn remedy_of_labels(header: &NpyHeader, samples: usize) -> &'static str {
    match (&header.element, &header.shape[..]) {
        (ElementType::Text(_), _) => {
            "number the classes: classes, train_labels = numpy.unique(y, return_inverse=True); the \
             file may have `classes`, too"
        }
        (ElementType::Int(_) | ElementType::Float(_) | ElementType::Bool, [n, k])
            if *n == samples && *k > 1 && header.is_fortran =>
        {
            "save numpy.ascontiguousarray(y)"
        }
        (ElementType::Float(_), [n]) if *n == samples => {
            "make them integers, such as with y.astype('i8'), or name numbers train_targets"
        }
        (ElementType::Float(_) | ElementType::Other(_) | ElementType::Bool, _) => {
            "make them integers, such as with y.astype('i8')"
        }
        (_, [n, 1]) if *n == samples => {
            "bring classes to that shape with y.reshape(-1), or make one label y.astype(bool)"
        }
        (_, [1, n]) if *n == samples => "bring them to that shape with y.reshape(-1)",
        _ => "give each sample one label, or one row of labels",
    }
}

/// Instructions, with expressions of numpy, that turn an array `y` into numbers.
fn remedy_of_numbers(header: &NpyHeader, samples: usize) -> &'static str {
    match (&header.element, &header.shape[..]) {
        (ElementType::Bool, _) => {
            "name labels train_labels, or make them numbers with y.astype('f4')"
        }
        (ElementType::Text(_) | ElementType::Other(_), _) => {
            "make them numbers, such as with y.astype('f4')"
        }
        (_, [n, _]) if *n == samples && header.is_fortran => "save numpy.ascontiguousarray(y)",
        (_, [1, n]) if *n == samples => "bring them to that shape with y.reshape(-1)",
        _ => "give each sample one number, or one row of numbers",
    }
}

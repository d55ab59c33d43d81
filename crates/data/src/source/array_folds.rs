//! The array of folds: for each fold of a cross-validation, the samples to train on and to hold
//! out.

use std::sync::Arc;

use super::array_file::ArrayFile;
use super::input::Input;
use super::npy::{ElementType, IntType, NpyHeader};
use crate::error::{Error, Mismatch, Result};
use crate::parts::Fold;

/// Name of the array.
pub(super) const FOLDS: &str = "train_folds";
/// Most folds of a file: most envs of a run.
const FOLDS_MAX: usize = 4096;

/// Reads the folds of `samples` training samples, if `names` has the array. Each row is a fold, and
/// each element the role of a sample in it: 0 for none, 1 to train on, 2 to hold out.
///
/// # Errors
/// [`Error::Layout`] for another shape, type or role, or a fold without samples to train on;
/// samples to hold out in some folds and not in others; the errors of reading.
pub(super) fn read(
    file: &dyn ArrayFile,
    names: &[String],
    samples: usize,
) -> Result<Option<Arc<[Fold]>>> {
    if !names.iter().any(|name| name == FOLDS) {
        return Ok(None);
    }
    let mut folds = vec![];
    file.visit(FOLDS, &mut |header, input| {
        let (int, count) = check_form(header, input, samples)?;
        // The header agrees with the number of bytes, so a row is no longer than the file.
        let mut row = vec![0; samples * int.bytes];
        for fold in 0..count {
            input.read_exact(&mut row, "folds")?;
            folds.push(fold_of(fold, &row, (int, input))?);
        }
        let holds_out = |fold: &Fold| !fold.held_out.is_empty();
        if let Some(fold) = folds.iter().position(|fold| holds_out(fold) != holds_out(&folds[0])) {
            let (what, expected) = (format!("samples with 2 in fold {fold} of `{FOLDS}`"), "some");
            let [expected, got] =
                if holds_out(&folds[0]) { [expected, "none"] } else { ["none", expected] };
            let expected = format!("{expected}, as in fold 0");
            return Err(wrong(input, what, &expected, got.into()));
        }
        input.expect_end()
    })?;
    Ok(Some(folds.into()))
}

/// The type of an element, and the number of folds.
fn check_form(header: &NpyHeader, input: &Input<'_>, samples: usize) -> Result<(IntType, usize)> {
    match (&header.element, &header.shape[..]) {
        (ElementType::Int(int), &[count, n])
            if n == samples && (2..=FOLDS_MAX).contains(&count) && !header.is_fortran =>
        {
            Ok((*int, count))
        }
        _ => {
            let expected = format!("integers [K, {samples}], K from 2 to {FOLDS_MAX}");
            Err(Mismatch::new(format!("`{FOLDS}`"), expected, header.to_string())
                .remedy("give a row for each fold, in C order, such as with y.astype('u1')")
                .in_layout(input.path()))
        }
    }
}

/// The fold of a row of roles.
fn fold_of(fold: usize, row: &[u8], (int, input): (IntType, &Input<'_>)) -> Result<Fold> {
    let (mut train, mut held_out) = (vec![], vec![]);
    for (sample, element) in (0..).zip(row.chunks_exact(int.bytes)) {
        match int.value(element) {
            0 => {}
            1 => train.push(sample),
            2 => held_out.push(sample),
            role => {
                let what = format!("sample {sample} in fold {fold} of `{FOLDS}`");
                return Err(wrong(input, what, "0, 1 or 2", role.to_string()));
            }
        }
    }
    if train.is_empty() {
        let what = format!("fold {fold} of `{FOLDS}`");
        return Err(wrong(input, what, "samples with 1, to train on", "none".into()));
    }
    Ok(Fold { train: train.into(), held_out: held_out.into() })
}

fn wrong(input: &Input<'_>, what: String, expected: &str, got: String) -> Error {
    Mismatch::new(what, expected, got)
        .remedy("0 leaves a sample out of a fold, 1 trains on it, 2 holds it out")
        .in_layout(input.path())
}

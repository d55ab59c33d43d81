//! Scores as text: accuracies in percent, F1 and R² as numbers with their names.

use meristem::nn::ScoreKind;
use meristem::train::name_scores;
use meristem::train::reading::Overview;
use meristem::train::summary::FoldSummary;
use serde_json::Value;

/// A score where the text around it does not name it, such as `81.2 %` or `R² 0.873`; `–` if it
/// was not measured.
pub(crate) fn named(kind: ScoreKind, score: Option<f64>) -> String {
    match (kind, score) {
        (ScoreKind::Accuracy, Some(_)) | (_, None) => value(kind, score),
        (_, Some(number)) if number.is_nan() => value(kind, score),
        _ => format!("{kind} {}", value(kind, score)),
    }
}

/// A score after its name, such as `81.2 %` or `0.873`; `–` if it was not measured or is NaN.
pub(crate) fn value(kind: ScoreKind, score: Option<f64>) -> String {
    score
        .filter(|score| !score.is_nan())
        .map_or("–".into(), |score| format!("{}{}", figure(kind, score), unit(kind)))
}

/// A score without its unit, such as `81.2` or `0.873`; `–` for NaN.
pub(crate) fn figure(kind: ScoreKind, score: f64) -> String {
    match kind {
        _ if score.is_nan() => "–".into(),
        ScoreKind::Accuracy => format!("{:.1}", 100.0 * score),
        _ => format!("{score:.3}"),
    }
}

/// A mean with a deviation from it, such as `81.2 ± 1.3 %`.
pub(crate) fn spread(kind: ScoreKind, mean: f64, deviation: f64) -> String {
    let [mean, deviation] = [mean, deviation].map(|score| figure(kind, score));
    format!("{mean} ± {deviation}{}", unit(kind))
}

/// Mean and standard deviation over the held-out folds.
pub(crate) fn over_folds(kind: ScoreKind, folds: &FoldSummary) -> String {
    spread(kind, folds.control_score_mean, folds.control_score_std)
}

/// Line about the held-out folds.
pub(crate) fn folds(kind: ScoreKind, folds: &FoldSummary) -> String {
    let spread = over_folds(kind, folds);
    format!("{} folds held out: {kind} {spread} (mean ± standard deviation)", folds.count)
}

/// Unit after a figure.
pub(crate) fn unit(kind: ScoreKind) -> &'static str {
    if kind == ScoreKind::Accuracy { " %" } else { "" }
}

/// Factor of a score in a chart whose axis has a name of [`axes`].
pub(crate) fn factor(kind: ScoreKind) -> f64 {
    if kind == ScoreKind::Accuracy { 100.0 } else { 1.0 }
}

/// Names of axes with scores times [`factor`]: on the control split, on the test split. `kind` is
/// `None` for scores of several kinds.
pub(crate) fn axes(kind: Option<ScoreKind>) -> [&'static str; 2] {
    match kind {
        Some(ScoreKind::Accuracy) => ["control accuracy, %", "test accuracy, %"],
        Some(ScoreKind::F1) => ["control F1", "test F1"],
        Some(ScoreKind::R2) => ["control R²", "test R²"],
        _ => ["control score", "test score"],
    }
}

/// The kind of the scores of all runs; `None` if their tasks have different scores.
pub(crate) fn common<'a>(runs: impl IntoIterator<Item = &'a Overview>) -> Option<ScoreKind> {
    let mut kinds = runs.into_iter().map(|run| run.task.score());
    let first = kinds.next().unwrap_or_default();
    kinds.all(|kind| kind == first).then_some(first)
}

/// A row as JSON, in which its scores have their names.
pub(crate) fn row(row: &Overview) -> Value {
    let named = |text: String| serde_json::from_str(&name_scores(text, row.task.score()));
    serde_json::to_string(row).and_then(named).unwrap_or_default()
}

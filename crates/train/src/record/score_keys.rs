//! Keys of scores in JSON: `control_accuracy` in a run that classifies, `control_r2` in a run whose
//! targets are numbers. So no file has R² under a key with `accuracy`.
//!
//! The fields of events, summaries and studies are declared once, with the keys of accuracy and
//! aliases for the others. So any score is read, and [`name_scores`] names it when it is written.

use meristem_nn::ScoreKind;

/// Text before and after `accuracy` in each key with a score.
const KEYS: [(&str, &str); 9] = [
    ("", ""),
    ("train_", ""),
    ("control_", ""),
    ("test_", ""),
    ("twin_", ""),
    ("twin_control_", ""),
    ("", "_without"),
    ("control_", "_mean"),
    ("control_", "_std"),
];

/// JSON in which the keys of accuracies have the name of `score` instead.
///
/// A key is its name in quotes and a colon. No text can contain that, because its own quotes are
/// escaped.
pub fn name_scores(json: String, score: ScoreKind) -> String {
    // Most events have no score, such as the events of batches.
    if score == ScoreKind::Accuracy || !json.contains(ScoreKind::Accuracy.key()) {
        return json;
    }
    KEYS.iter().fold(json, |json, (before, after)| {
        let key = |score: ScoreKind| format!("\"{before}{}{after}\":", score.key());
        json.replace(&key(ScoreKind::Accuracy), &key(score))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_named_and_texts_stay() {
        let text = r#"{"accuracy": 1, "control_accuracy":2,"why":"\"accuracy\": x",
            "accuracy_without":null, "a":"test_accuracy"}"#;
        assert_eq!(name_scores(text.into(), ScoreKind::Accuracy), text);
        let named = r#"{"r2": 1, "control_r2":2,"why":"\"accuracy\": x",
            "r2_without":null, "a":"test_accuracy"}"#;
        assert_eq!(name_scores(text.into(), ScoreKind::R2), named);
    }
}

//! The known name nearest to a mistyped one, for "did you mean …" in errors.

/// The known name with the smallest edit distance to `given`, if a typo is likely: at most two
/// edits, or a third of the longer name. Among equals the earlier name wins.
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let given = given.to_ascii_lowercase();
    known
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(&given, &name.to_ascii_lowercase()), name))
        .filter(|(distance, name)| *distance <= (given.len().max(name.len()) / 3).max(2))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// The text `; did you mean `x`?`, or empty text, for the end of an error's first sentence.
pub(crate) fn hint(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or(String::new(), |name| format!("; did you mean `{name}`?"))
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn the_nearest_name_is_suggested_only_for_likely_typos() {
        let known = ["baseline", "wide", "deep", "large", "impaired", "minimal"];
        assert_eq!(nearest("basline", known), Some("baseline"));
        assert_eq!(nearest("Deep", known), Some("deep"));
        assert_eq!(nearest("minmial", known), Some("minimal"));
        assert_eq!(nearest("transformer", known), None);
        assert_eq!(nearest("x", []), None);
    }
}

//! Addresses: what the path and the query of a request ask for. Nothing is looked up here.

use percent_encoding::percent_decode_str;

/// Path before the path of a view: parts as they change.
const LIVE: &str = "/live";
/// Path before the path of a view: the same as JSON.
const API: &str = "/api";
/// Key of a run in a query whose name is not UTF-8, as no form can send it: the name as in a path.
pub(super) const BYTES: &str = "encoded";

/// Reason why a URL shows nothing.
pub(super) type Missing = String;

/// Form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerForm {
    Page,
    Live,
    Json,
}

impl AnswerForm {
    /// The form that a path asks for, and the path of the view.
    pub(super) fn of(path: &str) -> (Self, &str) {
        let below = |prefix: &str| path.strip_prefix(prefix).filter(|rest| rest.starts_with('/'));
        match (below(LIVE), below(API)) {
            (Some(rest), _) => (Self::Live, rest),
            (_, Some(rest)) => (Self::Json, rest),
            _ => (Self::Page, path),
        }
    }
}

/// Subject of a page, with the names of runs as bytes of paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    List,
    Run(Vec<u8>),
    Compare(Vec<Vec<u8>>),
}

impl Subject {
    /// The subject of the path of a view, and of a query.
    ///
    /// # Errors
    /// There is no such page.
    pub(super) fn of(path: &str, query: &str) -> Result<Self, Missing> {
        let bytes = |name: &str| percent_decode_str(name).collect();
        if let Some(name) = path.strip_prefix("/run/") {
            return Ok(Self::Run(bytes(name)));
        }
        match path {
            "/" => Ok(Self::List),
            "/compare" => {
                let names = query.split('&').filter_map(name_in);
                Ok(Self::Compare(names.map(|name| bytes(&name)).collect()))
            }
            _ => Err("there is no such page".into()),
        }
    }
}

/// The name of a run in a part of a query, encoded as in a path.
fn name_in(pair: &str) -> Option<String> {
    match pair.split_once('=')? {
        // As a form writes it.
        ("run", name) => Some(name.replace('+', "%20")),
        (BYTES, name) => Some(percent_decode_str(name).decode_utf8_lossy().into_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bytes_of_paths() {
        let of = |path, query| Subject::of(path, query).unwrap();
        assert_eq!(of("/", "x"), Subject::List);
        assert_eq!(of("/run/a%2Fb%FF", ""), Subject::Run(b"a/b\xff".into()));
        let names = vec![b"a b".to_vec(), b"\xff".to_vec()];
        assert_eq!(of("/compare", "run=a+b&encoded=%25FF&other=c&d"), Subject::Compare(names));
        Subject::of("/runs", "").unwrap_err();
    }

    #[test]
    fn the_form_stands_before_the_view() {
        assert_eq!(AnswerForm::of("/live/run/a"), (AnswerForm::Live, "/run/a"));
        assert_eq!(AnswerForm::of("/api/"), (AnswerForm::Json, "/"));
        assert_eq!(AnswerForm::of("/apis"), (AnswerForm::Page, "/apis"));
        assert_eq!(AnswerForm::of("/live"), (AnswerForm::Page, "/live"));
    }
}

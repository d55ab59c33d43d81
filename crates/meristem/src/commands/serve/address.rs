//! Parser of addresses: form and subject from the path and the query of a request, without file
//! access.

use percent_encoding::percent_decode_str;

/// Prefix of the path of a view for the stream of changed parts.
const LIVE: &str = "/live";
/// Prefix of the path of a view for JSON.
const API: &str = "/api";
/// Query key for a run whose name is not UTF-8, which no form can send. The value is
/// percent-encoded as in a path.
pub(super) const BYTES: &str = "encoded";

/// Reason for a 404 response.
pub(super) type Missing = String;

/// Form of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerForm {
    Page,
    Live,
    Json,
}

impl AnswerForm {
    /// Splits a path into the form and the path of the view.
    pub(super) fn of(path: &str) -> (Self, &str) {
        let below = |prefix: &str| path.strip_prefix(prefix).filter(|rest| rest.starts_with('/'));
        match (below(LIVE), below(API)) {
            (Some(rest), _) => (Self::Live, rest),
            (_, Some(rest)) => (Self::Json, rest),
            _ => (Self::Page, path),
        }
    }
}

/// Subject of a page. The name of a run is its path as bytes, which need not be UTF-8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    List,
    Run(Vec<u8>),
    Compare(Vec<Vec<u8>>),
}

impl Subject {
    /// Parses the path of a view and a query.
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

/// The name of a run in one pair of a query, encoded as in a path.
fn name_in(pair: &str) -> Option<String> {
    match pair.split_once('=')? {
        // Encoding of forms.
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
    fn the_form_is_a_prefix_of_the_view() {
        assert_eq!(AnswerForm::of("/live/run/a"), (AnswerForm::Live, "/run/a"));
        assert_eq!(AnswerForm::of("/api/"), (AnswerForm::Json, "/"));
        assert_eq!(AnswerForm::of("/apis"), (AnswerForm::Page, "/apis"));
        assert_eq!(AnswerForm::of("/live"), (AnswerForm::Page, "/live"));
    }
}

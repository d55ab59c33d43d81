//! Base path of the server for browsers behind a proxy.

use std::str::FromStr;

use meristem::train::settings::BadValue;

/// Prefix of all paths of a server: empty, or `/` and names, without a `/` at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BasePath(String);

impl FromStr for BasePath {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let base = text.strip_suffix('/').unwrap_or(text);
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.~".contains(c);
        let is_name = |name: &str| !["", ".", ".."].contains(&name) && name.chars().all(is_plain);
        let is_base = base.is_empty()
            || base.strip_prefix('/').is_some_and(|names| names.split('/').all(is_name));
        if is_base {
            Ok(Self(base.into()))
        } else {
            let expected = "/ and names of letters, digits, - _ . ~, such as /runs";
            Err(BadValue::new(text, expected))
        }
    }
}

#[cfg(feature = "serve")]
impl BasePath {
    /// Whether this server is below a path of another server, which is the proxy.
    pub(crate) fn is_below_another(&self) -> bool {
        !self.0.is_empty()
    }

    /// Prepends the base to `path`, which begins with `/`.
    pub(crate) fn to(&self, path: &str) -> String {
        format!("{}{path}", self.0)
    }

    /// Strips the base from `address`; `None` if the address is not below the base.
    pub(crate) fn below<'a>(&self, address: &'a str) -> Option<&'a str> {
        match address.strip_prefix(&self.0)? {
            "" => Some("/"),
            path => path.starts_with('/').then_some(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_has_plain_names_only() {
        for (text, base) in [("/", ""), ("/runs", "/runs"), ("/a/b-c/", "/a/b-c")] {
            assert_eq!(text.parse::<BasePath>().unwrap().0, base, "{text}");
        }
        for text in ["runs", "//", "//evil.example", "/a//b", "/..", "/a b", "/a?b", "/\\a", "/é"]
        {
            assert!(text.parse::<BasePath>().is_err(), "{text}");
        }
    }

    #[test]
    #[cfg(feature = "serve")]
    fn addresses_are_below_the_base() {
        let base: BasePath = "/runs".parse().unwrap();
        assert_eq!(base.to("/run/a"), "/runs/run/a");
        assert_eq!(base.below("/runs/run/a"), Some("/run/a"));
        assert_eq!(base.below("/runs"), Some("/"));
        assert_eq!((base.below("/runsa"), base.below("/a")), (None, None));
        assert_eq!(BasePath::default().below("/a"), Some("/a"));
    }
}

//! Admission of requests, and the headers of all responses.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use crate::cli::BasePath;

/// Content security policy of all pages: no external resources, no inline scripts or styles.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
];

/// Rules for the admission of requests.
pub(super) struct Guard {
    token: Option<String>,
    /// Name of the cookie, which includes the port, because all ports of a host share cookies.
    cookie: String,
    is_loopback: bool,
    base: BasePath,
}

/// Result of the admission rules for a request.
#[derive(Debug, PartialEq)]
enum Admission {
    Admitted,
    /// The token is in the URL: set the cookie and redirect to the URL without the token.
    Enters(String),
    /// `Host` is not a name of this machine, as in DNS rebinding.
    OtherHost,
    /// The path is not below the base.
    OtherPath,
    NoToken,
}

impl Guard {
    /// Creates the guard of a server at `address`, with a new token if required.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(super) fn new(
        address: SocketAddr,
        needs_token: bool,
        base: &BasePath,
    ) -> Result<Self, getrandom::Error> {
        let token = needs_token.then(|| {
            let mut bytes = [0; 32];
            getrandom::fill(&mut bytes)?;
            Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
        });
        Ok(Self {
            token: token.transpose()?,
            cookie: format!("meristem-{}", address.port()),
            is_loopback: address.ip().is_loopback(),
            base: base.clone(),
        })
    }

    /// The URL of the server, with the token.
    pub(super) fn url(&self, address: SocketAddr) -> String {
        let token = self.token.as_ref().map_or(String::new(), |token| format!("?token={token}"));
        let path = self.base.to("/") + &token;
        if address.ip().is_unspecified() {
            format!("http://localhost:{}{path}", address.port())
        } else {
            format!("http://{address}{path}")
        }
    }

    fn admission(&self, uri: &Uri, headers: &HeaderMap) -> Admission {
        if self.is_loopback && !names_this_machine(uri, headers) {
            return Admission::OtherHost;
        }
        let admitted = || match self.base.below(uri.path()) {
            Some(_) => Admission::Admitted,
            None => Admission::OtherPath,
        };
        let Some(token) = &self.token else { return admitted() };
        let is_token = |given: &str| bool::from(given.trim().as_bytes().ct_eq(token.as_bytes()));
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        // Names of schemes are case-insensitive (RFC 9110, 11.1).
        let scheme = |value: &str| value.eq_ignore_ascii_case("bearer");
        let credentials = text(header::AUTHORIZATION).and_then(|value| value.split_once(' '));
        let bearer = credentials.filter(|(name, _)| scheme(name)).map(|(_, token)| token);
        let cookies =
            headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let cookie_value = |pair: &str| {
            let (name, value) = pair.split_once('=')?;
            (name.trim() == self.cookie).then(|| value.to_string())
        };
        if bearer.is_some_and(is_token)
            || cookies
                .flat_map(|all| all.split(';'))
                .filter_map(cookie_value)
                .any(|value| is_token(&value))
        {
            return admitted();
        }
        let pairs = || uri.query().unwrap_or("").split('&');
        if pairs().filter_map(|pair| pair.strip_prefix("token=")).any(is_token) {
            let others: Vec<&str> = pairs().filter(|pair| !pair.starts_with("token=")).collect();
            let query = others.join("&");
            let mark = if query.is_empty() { "" } else { "?" };
            let target = format!("{}{mark}{query}", uri.path());
            let is_below = self.base.below(uri.path()).is_some() && is_own_path(&target);
            return Admission::Enters(if is_below { target } else { self.base.to("/") });
        }
        Admission::NoToken
    }
}

/// Whether a redirect to `target` stays on this server. Browsers treat a backslash as a slash and
/// two slashes as the start of a host name, and ignore some control characters.
fn is_own_path(target: &str) -> bool {
    let is_plain = |c: char| c != '\\' && !c.is_control();
    target.starts_with('/') && !target.starts_with("//") && target.chars().all(is_plain)
}

/// Whether `Host` is `localhost` or a loopback address, which cannot name another machine.
fn names_this_machine(uri: &Uri, headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let is_own = |authority: &str| {
        let name = match authority.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => authority,
        };
        let name = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
        name.eq_ignore_ascii_case("localhost")
            || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    };
    host.to_str().is_ok_and(is_own)
        && uri.authority().is_none_or(|authority| is_own(authority.as_str()))
}

/// Forwards the admitted requests, and adds the headers of all responses.
pub(super) async fn admit(
    State(guard): State<Arc<Guard>>,
    request: Request,
    next: Next,
) -> Response {
    let base = &guard.base;
    let mut response = match guard.admission(request.uri(), request.headers()) {
        Admission::Admitted => next.run(request).await,
        Admission::Enters(url) => {
            let token = guard.token.as_deref().unwrap_or("");
            let below = base.to("");
            let cookie = format!(
                "{}={token}; Path={}; HttpOnly; SameSite=Strict; Max-Age=2592000",
                guard.cookie,
                if below.is_empty() { "/" } else { &below }
            );
            let headers = [(header::LOCATION, url), (header::SET_COOKIE, cookie)];
            (StatusCode::SEE_OTHER, headers).into_response()
        }
        Admission::OtherHost => {
            let words = "this server answers to localhost and to loopback addresses only\n";
            (StatusCode::MISDIRECTED_REQUEST, words).into_response()
        }
        Admission::OtherPath => {
            let words =
                format!("this server is at {}; a proxy must forward this path\n", base.to("/"));
            (StatusCode::NOT_FOUND, words).into_response()
        }
        Admission::NoToken => {
            let words = "open the URL that `meristem serve` printed, or send its token as \
                         `Authorization: Bearer TOKEN`\n";
            (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], words)
                .into_response()
        }
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(guard: &Guard, url: &str, headers: &[(HeaderName, &str)]) -> Admission {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, HeaderValue::from_str(value).unwrap());
        }
        guard.admission(&url.parse().unwrap(), &map)
    }

    fn guard(address: &str, needs_token: bool) -> Guard {
        Guard::new(address.parse().unwrap(), needs_token, &BasePath::default()).unwrap()
    }

    #[test]
    fn only_names_of_this_machine_are_admitted() {
        let open = guard("127.0.0.1:80", false);
        for host in ["localhost", "LocalHost:80", "127.0.0.1:9", "[::1]:80", "[::1]", "127.9.9.9"] {
            assert_eq!(judged(&open, "/", &[(header::HOST, host)]), Admission::Admitted, "{host}");
        }
        for host in ["evil.example", "localhost.evil.example", "10.0.0.1", "", "evil:80", "[::2]"] {
            assert_eq!(judged(&open, "/", &[(header::HOST, host)]), Admission::OtherHost, "{host}");
        }
        assert_eq!(judged(&open, "/", &[]), Admission::OtherHost);
        let both = [(header::HOST, "localhost"), (header::HOST, "evil.example")];
        assert_eq!(judged(&open, "/", &both), Admission::OtherHost);
        assert_eq!(judged(&open, "http://evil.example/", &both[..1]), Admission::OtherHost);
    }

    #[test]
    fn a_token_is_accepted_as_header_as_cookie_and_once_in_the_url() {
        let closed = guard("10.0.0.1:7", true);
        let token = closed.token.clone().unwrap();
        assert_eq!(token.len(), 64);
        assert_ne!(guard("10.0.0.1:7", true).token, closed.token);
        assert!(closed.url("10.0.0.1:7".parse().unwrap()).ends_with(&format!("/?token={token}")));
        let bearer = format!("Bearer {token}");
        let cookie = format!("a=b; meristem-7={token}; c");
        for (name, value) in [(header::AUTHORIZATION, &bearer), (header::COOKIE, &cookie)] {
            assert_eq!(judged(&closed, "/", &[(name, value)]), Admission::Admitted);
        }
        for (name, value) in [
            (header::AUTHORIZATION, bearer[..bearer.len() - 1].to_string()),
            (header::AUTHORIZATION, token.clone()),
            (header::COOKIE, format!("meristem-8={token}")),
            (header::COOKIE, "meristem-7=".into()),
        ] {
            assert_eq!(judged(&closed, "/", &[(name, &value)]), Admission::NoToken, "{value}");
        }
        let entered = judged(&closed, &format!("/compare?run=a&token={token}&run=b"), &[]);
        assert_eq!(entered, Admission::Enters("/compare?run=a&run=b".into()));
        for path in ["//evil.example/", "/\\evil.example/", "/\\/evil", "///", "/run/a\\b"] {
            let Ok(uri) = format!("{path}?token={token}").parse::<Uri>() else { continue };
            let judged = closed.admission(&uri, &HeaderMap::new());
            assert_eq!(judged, Admission::Enters("/".into()), "{path}");
        }
        for scheme in ["bearer", "BEARER", "Bearer "] {
            let value = format!("{scheme} {token}");
            let judged = judged(&closed, "/", &[(header::AUTHORIZATION, &value)]);
            assert_eq!(judged, Admission::Admitted, "{scheme}");
        }
        assert_eq!(judged(&closed, "/?token=", &[]), Admission::NoToken);
        assert_eq!(judged(&closed, "/?token=0&x", &[]), Admission::NoToken);
    }

    #[test]
    fn a_server_below_a_base_answers_there_only() {
        let base = "/runs".parse().unwrap();
        let of = |needs_token| Guard::new("127.0.0.1:7".parse().unwrap(), needs_token, &base);
        let (open, closed) = (of(false).unwrap(), of(true).unwrap());
        let host = [(header::HOST, "localhost")];
        for (path, expected) in [
            ("/runs", Admission::Admitted),
            ("/runs/run/a", Admission::Admitted),
            ("/", Admission::OtherPath),
            ("/runsa/", Admission::OtherPath),
        ] {
            assert_eq!(judged(&open, path, &host), expected, "{path}");
        }
        let token = closed.token.clone().unwrap();
        let url = closed.url("127.0.0.1:7".parse().unwrap());
        assert_eq!(url, format!("http://127.0.0.1:7/runs/?token={token}"));
        assert_eq!(judged(&closed, "/", &host), Admission::NoToken, "a stranger learns no path");
        for (path, target) in [("/runs/run/a", "/runs/run/a"), ("/other", "/runs/")] {
            let judged = judged(&closed, &format!("{path}?token={token}"), &host);
            assert_eq!(judged, Admission::Enters(target.into()), "{path}");
        }
    }
}

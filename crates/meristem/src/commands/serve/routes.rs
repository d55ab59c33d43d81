//! Addresses of the server. All are read with GET or HEAD; nothing can be written.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::guard::{Guard, admit};
use super::library::Library;
use super::live::{Drawn, Gallery, events};
use super::view::{Missing, View};
use crate::page::{Html, STYLE};

const SCRIPT: &str = include_str!("live.js");
const SERVED_STYLE: &str = include_str!("serve.css");
/// Time between two signs of life on a stream on which nothing happens.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// Path before the path of a view: parts as they change.
const LIVE: &str = "/live";
/// Path before the path of a view: the same as JSON.
const API: &str = "/api";

pub(super) fn router(library: Arc<Library>, guard: Guard) -> Router {
    let of_type = |kind: &'static str, text: String| {
        get(move || async move { ([(header::CONTENT_TYPE, kind)], text) })
    };
    let style = format!("{STYLE}{SERVED_STYLE}");
    Router::new()
        .route("/style.css", of_type("text/css; charset=utf-8", style))
        .route("/live.js", of_type("text/javascript; charset=utf-8", SCRIPT.into()))
        .fallback_service(get(show).with_state(Arc::new(Gallery::new(library))))
        .layer(from_fn_with_state(Arc::new(guard), admit))
}

/// Form of an answer.
#[derive(Clone, Copy)]
enum Form {
    Page,
    Live,
    Json,
}

async fn show(State(gallery): State<Arc<Gallery>>, uri: Uri) -> Response {
    let path = uri.path();
    let below = |prefix: &str| path.strip_prefix(prefix).filter(|rest| rest.starts_with('/'));
    let (form, rest) = match (below(LIVE), below(API)) {
        (Some(rest), _) => (Form::Live, rest),
        (_, Some(rest)) => (Form::Json, rest),
        _ => (Form::Page, path),
    };
    let (rest, query) = (rest.to_string(), uri.query().unwrap_or("").to_string());
    let of = gallery.clone();
    // Folders are read, which may take long on a shared disk.
    let done = tokio::task::spawn_blocking(move || {
        let view = View::of(&rest, &query, &of.library)?;
        let answer = match form {
            Form::Page => Answer::Page(page(&of, &view)?),
            Form::Json => Answer::Json(view.json(&of.library)?.to_string()),
            Form::Live => Answer::Live(view),
        };
        Ok::<_, Missing>(answer)
    });
    match done.await {
        Ok(Ok(Answer::Page(html))) => {
            ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], html).into_response()
        }
        Ok(Ok(Answer::Json(json))) => {
            ([(header::CONTENT_TYPE, "application/json")], json).into_response()
        }
        Ok(Ok(Answer::Live(view))) => {
            let alive = KeepAlive::new().interval(SIGN_OF_LIFE);
            Sse::new(events(gallery, view)).keep_alive(alive).into_response()
        }
        Ok(Err(missing)) => not_found(form, &missing),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

enum Answer {
    Page(String),
    Json(String),
    Live(View),
}

fn page(gallery: &Gallery, view: &View) -> Result<String, Missing> {
    let parts = gallery.parts(view)?;
    let title = view.title(&gallery.library);
    let mut sections = Html::default();
    for Drawn { id, hash, html } in parts.iter() {
        sections.push(Html::section(id, hash, html.clone()));
    }
    let sections = Html::element("div", "id=\"parts\"", sections);
    let mut body = Html::default();
    if *view != View::List {
        let back = Html::anchor("/", "All runs");
        body.push(Html::element("nav", "aria-label=\"Pages\"", back));
    }
    body.push(Html::of("h1", &title));
    let how = "Without scripts this page is updated when it is loaded again.";
    body.push(Html::element("p", "id=\"live\" role=\"status\"", Html::text(how)));
    match view {
        View::List => {
            let button = Html::element("button", "type=\"submit\"", Html::text("Compare"));
            let mut form = Html::element("p", "", button);
            form.push(sections);
            body.push(Html::element("form", "action=\"/compare\" method=\"get\"", form));
        }
        _ => body.push(sections),
    }
    Ok(Html::served(&format!("{title} – Meristem"), body))
}

fn not_found(form: Form, missing: &str) -> Response {
    let json = serde_json::json!({ "error": missing }).to_string();
    let mut body = Html::of("h1", "Not found");
    body.push(Html::of("p", missing));
    body.push(Html::element("p", "", Html::anchor("/", "All runs")));
    let (kind, text) = match form {
        Form::Json => ("application/json", json),
        Form::Page | Form::Live => ("text/html; charset=utf-8", Html::served("Not found", body)),
    };
    (StatusCode::NOT_FOUND, [(header::CONTENT_TYPE, kind)], text).into_response()
}

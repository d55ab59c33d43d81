//! Routes of the server. All accept only GET and HEAD; nothing is written.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::address::{AnswerForm, Missing, Subject};
use super::guard::{Guard, admit};
use super::library::Library;
use super::live::{Drawn, LiveViews, events};
use super::places::ConnectionPermit;
use super::view::View;
use super::work::{CancelToken, JobLock, WorkError, work};
use crate::cli::BasePath;
use crate::colours::css_variables;
use crate::page::{Html, STYLE};

const SCRIPT: &str = include_str!("live.js");
const SERVED_STYLE: &str = include_str!("serve.css");
/// Interval of keep-alive messages on an idle stream.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(15);

const STYLE_PATH: &str = "/style.css";
const SCRIPT_PATH: &str = "/live.js";

pub(super) fn router(library: Arc<Library>, guard: Guard) -> Router {
    Router::new()
        .fallback_service(get(show).with_state(Arc::new(LiveViews::new(library))))
        .layer(from_fn_with_state(Arc::new(guard), admit))
}

async fn show(State(views): State<Arc<LiveViews>>, request: Request) -> Response {
    let base = &views.library.base;
    let Some(path) = base.below(request.uri().path()) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let of_type =
        |kind: &'static str, text: String| ([(header::CONTENT_TYPE, kind)], text).into_response();
    match path {
        STYLE_PATH => {
            let style = format!("{STYLE}{}{SERVED_STYLE}", css_variables());
            return of_type("text/css; charset=utf-8", style);
        }
        SCRIPT_PATH => return of_type("text/javascript; charset=utf-8", SCRIPT.into()),
        _ => {}
    }
    let (form, path) = AnswerForm::of(path);
    let subject = match Subject::of(path, request.uri().query().unwrap_or("")) {
        Ok(subject) => subject,
        Err(missing) => return not_found(base, form, &missing),
    };
    let shared = views.clone();
    let permit = request.extensions().get::<Arc<ConnectionPermit>>().cloned();
    let job_lock = permit.as_ref().map_or_else(JobLock::default, |permit| permit.job_lock());
    // Reading folders may take long on a shared disk.
    let done = work(job_lock.clone(), move |cancel| {
        let view = View::of(&subject, &shared.library, cancel)?;
        let answer = match form {
            AnswerForm::Page => Answer::Page(page(&shared, &view, cancel)?),
            AnswerForm::Json => Answer::Json(view.json(&shared.library, cancel)?.to_string()),
            AnswerForm::Live => Answer::Live(view),
        };
        Ok::<_, Missing>(answer)
    });
    match done.await {
        Ok(Ok(Answer::Page(html))) => of_type("text/html; charset=utf-8", html),
        Ok(Ok(Answer::Json(json))) => of_type("application/json", json),
        Ok(Ok(Answer::Live(view))) => {
            if request.method() == Method::GET && !permit.is_some_and(|permit| permit.goes_live()) {
                return busy("too many pages follow runs; load this one again later\n");
            }
            let alive = KeepAlive::new().interval(KEEP_ALIVE_EVERY);
            Sse::new(events(views, view, job_lock)).keep_alive(alive).into_response()
        }
        Ok(Err(missing)) => not_found(base, form, &missing),
        Err(WorkError::TooLate) => busy("reading takes too long; try again later\n"),
        Err(WorkError::Failed) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Response 503, if there is no place or no time.
fn busy(words: &'static str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "5")], words).into_response()
}

enum Answer {
    Page(String),
    Json(String),
    Live(View),
}

fn page(views: &LiveViews, view: &View, cancel: &CancelToken) -> Result<String, Missing> {
    let parts = views.parts(view, cancel)?;
    let base = &views.library.base;
    let title = view.title(&views.library);
    let mut sections = Html::default();
    for Drawn { id, hash, html } in parts.iter() {
        sections.push(Html::section(id, hash, html.clone()));
    }
    let sections = Html::element("div", "id=\"parts\"", sections);
    let mut body = Html::default();
    if *view != View::List {
        let back = Html::anchor(&base.to("/"), "All runs");
        body.push(Html::element("nav", "aria-label=\"Pages\"", back));
    }
    body.push(Html::of("h1", &title));
    let hint = "Without scripts, reload this page to update it.";
    body.push(Html::element("p", "id=\"live\" role=\"status\"", Html::text(hint)));
    match view {
        View::List => {
            let button = Html::element("button", "type=\"submit\"", Html::text("Compare"));
            let mut form = Html::element("p", "", button);
            form.push(sections);
            body.push(Html::form(&base.to("/compare"), form));
        }
        _ => body.push(sections),
    }
    Ok(served(base, &format!("{title} – Meristem"), body))
}

fn served(base: &BasePath, title: &str, body: Html) -> String {
    let [style, script] = [STYLE_PATH, SCRIPT_PATH].map(|path| base.to(path));
    Html::served(title, &style, &script, body)
}

fn not_found(base: &BasePath, form: AnswerForm, missing: &str) -> Response {
    let json = serde_json::json!({ "error": missing }).to_string();
    let mut body = Html::of("h1", "Not found");
    body.push(Html::of("p", missing));
    body.push(Html::element("p", "", Html::anchor(&base.to("/"), "All runs")));
    let (kind, text) = match form {
        AnswerForm::Json => ("application/json", json),
        AnswerForm::Page | AnswerForm::Live => {
            ("text/html; charset=utf-8", served(base, "Not found", body))
        }
    };
    (StatusCode::NOT_FOUND, [(header::CONTENT_TYPE, kind)], text).into_response()
}

#[cfg(test)]
mod tests {
    use std::future::Future;

    use axum::body::Body;
    use futures_util::StreamExt;

    use super::super::places::Places;
    use super::*;

    /// Asserts that a job of `future` waits for the lock of its address, and not for the reader.
    /// Returns the result of `future`.
    async fn after_the_lock<T: Send + 'static>(
        lock: &JobLock,
        future: impl Future<Output = T> + Send + 'static,
    ) -> T {
        let held = lock.clone().lock_owned().await;
        let task = tokio::spawn(future);
        // The only reader takes jobs in order: a job that did not wait would end first.
        for _ in 0..10 {
            tokio::task::yield_now().await;
            work(JobLock::default(), |_| ()).await.unwrap();
        }
        assert!(!task.is_finished(), "it has read while another job had the lock");
        drop(held);
        task.await.unwrap()
    }

    /// A page and the first event of a stream, of one address.
    #[test]
    fn pages_and_streams_of_an_address_are_read_in_turn() {
        let folder = tempfile::tempdir().unwrap();
        let library = Library::open(folder.path(), &BasePath::default()).unwrap();
        let views = Arc::new(LiveViews::new(Arc::new(library)));
        let places = Arc::new(Places::new(false));
        let permit = places.enter([10, 0, 0, 1].into()).unwrap();
        let lock = permit.job_lock();
        let _answering = permit.answers();
        let ask = |path: &str| {
            let mut request = Request::builder().uri(path).body(Body::empty()).unwrap();
            request.extensions_mut().insert(permit.clone());
            show(State(views.clone()), request)
        };
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let page = after_the_lock(&lock, ask("/")).await;
            assert_eq!(page.status(), StatusCode::OK);
            let live = ask("/live/").await;
            assert_eq!(live.status(), StatusCode::OK);
            let mut events = live.into_body().into_data_stream();
            let first = after_the_lock(&lock, async move { events.next().await }).await;
            assert!(first.is_some_and(|event| event.is_ok()));
        });
    }
}

//! Streams of changed parts of pages.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::sse::Event;
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::json;

use super::address::Missing;
use super::library::{Library, READING_TIME, SharedCache, lock};
use super::view::View;
use super::work::{CancelToken, JobLock, work};
use crate::page::{Html, Part};

/// Minimum time between two drawings of a view. It grows with the time of a drawing, so that
/// drawing the view takes at most a tenth of a core for any number of its viewers. Reading a long
/// file to its end is not delayed.
const DRAW_EVERY: Duration = Duration::from_secs(1);

/// A part with a hash of its contents. A page compares the hash with the hash of its current part.
pub(super) struct Drawn {
    pub(super) id: String,
    pub(super) hash: String,
    pub(super) html: Html,
}

impl Drawn {
    fn of(Part { id, html }: Part) -> Self {
        let mut hasher = DefaultHasher::new();
        html.as_str().hash(&mut hasher);
        Self { id, hash: format!("{:016x}", hasher.finish()), html }
    }
}

/// The last drawing of a view.
#[derive(Default)]
struct LastDrawing {
    parts: Option<Result<Arc<Vec<Drawn>>, Missing>>,
    until: Option<Instant>,
}

/// The served folder and the views in use.
pub(super) struct LiveViews {
    pub(super) library: Arc<Library>,
    drawings: SharedCache<View, LastDrawing>,
}

impl LiveViews {
    pub(super) fn new(library: Arc<Library>) -> Self {
        Self { library, drawings: SharedCache::new() }
    }

    /// Returns the parts of a view, which are drawn again after [`DRAW_EVERY`] or, if drawing is
    /// slow, later. Blocks while it reads and draws.
    ///
    /// # Errors
    /// A run no longer exists.
    pub(super) fn parts(
        &self,
        view: &View,
        cancel: &CancelToken,
    ) -> Result<Arc<Vec<Drawn>>, Missing> {
        let Ok(kept) = self.drawings.get(view, || Ok::<_, Infallible>(LastDrawing::default()));
        let mut last = lock(&kept);
        let started = Instant::now();
        let known = last.parts.clone();
        if let (Some(parts), true) = (known, last.until.is_some_and(|until| started < until)) {
            return parts;
        }
        let parts = view.parts(&self.library, cancel);
        let parts = parts.map(|parts| parts.into_iter().map(Drawn::of).collect::<Vec<_>>());
        let bytes = parts.iter().flatten().map(|part| part.html.as_str().len()).sum();
        let parts = parts.map(Arc::new);
        last.parts = Some(parts.clone());
        let drawing = started.elapsed().saturating_sub(READING_TIME);
        last.until = Some(Instant::now() + DRAW_EVERY.max(10 * drawing));
        drop(last);
        self.drawings.set_bytes(view, bytes);
        parts
    }
}

/// Returns the events for one page: each has the names of all parts in order, and the changed
/// parts.
pub(super) fn events(
    views: Arc<LiveViews>,
    view: View,
    job_lock: JobLock,
) -> impl Stream<Item = Result<Event, Infallible>> {
    unfold((HashMap::new(), false), move |(mut seen, mut waits)| {
        let (views, view, job_lock) = (views.clone(), view.clone(), job_lock.clone());
        async move {
            loop {
                if waits {
                    tokio::time::sleep(DRAW_EVERY).await;
                }
                waits = true;
                let (shared, current) = (views.clone(), view.clone());
                let drawn =
                    work(job_lock.clone(), move |cancel| shared.parts(&current, cancel)).await;
                // After a timeout or lack of memory the page sends another request.
                let parts = match drawn.ok()? {
                    Ok(parts) => parts,
                    Err(problem) => Arc::new(vec![Drawn::of(gone(&problem))]),
                };
                if let Some(event) = changes(&parts, &mut seen) {
                    return Some((Ok(event), (seen, waits)));
                }
            }
        }
    })
}

fn gone(problem: &str) -> Part {
    Part::new("now", Html::element("p", "class=\"problem\"", Html::text(problem)))
}

/// Returns the event with the parts that changed since the last event; `None` without changes.
fn changes(parts: &[Drawn], seen: &mut HashMap<String, String>) -> Option<Event> {
    let is_new = |part: &&Drawn| seen.get(&part.id) != Some(&part.hash);
    let changed: Vec<_> = parts
        .iter()
        .filter(is_new)
        .map(|part| json!({"id": part.id, "hash": part.hash, "html": part.html.as_str()}))
        .collect();
    if changed.is_empty() && seen.len() == parts.len() {
        return None;
    }
    *seen = parts.iter().map(|part| (part.id.clone(), part.hash.clone())).collect();
    let ids: Vec<&String> = parts.iter().map(|part| &part.id).collect();
    Some(Event::default().data(json!({"ids": ids, "changed": changed}).to_string()))
}

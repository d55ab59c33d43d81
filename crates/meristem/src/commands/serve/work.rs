//! Work for a request on a reader's thread. It ends when nobody waits for it any more.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time in which a request is answered.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// Patience of those who wait for some work.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    request: Weak<()>,
    until: Instant,
}

impl Patience {
    /// Patience that lasts as long as `request` for a minute at most.
    pub(super) fn of(request: &Arc<()>) -> Self {
        Self { request: Arc::downgrade(request), until: Instant::now() + ANSWER_TIME }
    }

    /// Whether nobody waits any more, or the time is over. Work asks it before each block.
    pub(super) fn is_over(&self) -> bool {
        self.request.strong_count() == 0 || Instant::now() >= self.until
    }
}

/// Reason why there is no result.
#[derive(Debug, PartialEq)]
pub(super) enum Unanswered {
    /// The readers had no time for it.
    TooLate,
    /// The work panicked, or there was no thread for it.
    Failed,
}

/// Runs `job` on a reader's thread. When this future is dropped, as for a client that went away,
/// the job does not begin, or finds its patience over.
pub(super) async fn work<T: Send + 'static>(
    job: impl FnOnce(&Patience) -> T + Send + 'static,
) -> Result<T, Unanswered> {
    let request = Arc::new(());
    let patience = Patience::of(&request);
    let done = tokio::task::spawn_blocking(move || (!patience.is_over()).then(|| job(&patience)));
    let answer = tokio::time::timeout(ANSWER_TIME, done).await;
    drop(request);
    match answer {
        Ok(Ok(Some(answer))) => Ok(answer),
        Ok(Ok(None)) | Err(_) => Err(Unanswered::TooLate),
        Ok(Err(_)) => Err(Unanswered::Failed),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn work_ends_when_its_request_is_gone_and_does_not_begin_after_that() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(1)
            .build()
            .unwrap();
        let (begun, has_begun) = sync_channel(4);
        let (ended, has_ended) = sync_channel(4);
        runtime.block_on(async {
            let end = ended.clone();
            let endless = tokio::spawn(work(move |patience| {
                begun.send(()).unwrap();
                while !patience.is_over() {
                    std::thread::yield_now();
                }
                let in_time = Instant::now() < patience.until;
                end.send(if in_time { "endless" } else { "ended by its time only" }).unwrap();
            }));
            let end = ended.clone();
            let waiting = tokio::spawn(work(move |_| end.send("gone before it began").unwrap()));
            tokio::task::yield_now().await;
            has_begun.recv_timeout(Duration::from_secs(30)).unwrap();
            waiting.abort();
            endless.abort();
            assert!(waiting.await.is_err() && endless.await.is_err());
            assert_eq!(work(move |_| ended.send("last").unwrap()).await, Ok(()));
        });
        assert_eq!(has_ended.iter().collect::<Vec<_>>(), ["endless", "last"]);
    }
}

//! Work for a request on a reader thread. It is cancelled when its client has disconnected.
//!
//! An address has at most one job, running or queued for the readers. So the queue alternates
//! between addresses, and no address can occupy all readers. Behind a proxy each connection has
//! at most one job.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

/// Time limit of a response.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// Token that cancels work when its request is dropped or its time limit has passed.
#[derive(Clone, Debug)]
pub(super) struct CancelToken {
    request: Weak<()>,
    until: Instant,
}

impl CancelToken {
    /// Creates a token that is cancelled with `request`, or after a minute.
    pub(super) fn of(request: &Arc<()>) -> Self {
        Self { request: Arc::downgrade(request), until: Instant::now() + ANSWER_TIME }
    }

    /// Whether the request was dropped or the time has passed. Work checks this between its parts.
    pub(super) fn is_cancelled(&self) -> bool {
        self.request.strong_count() == 0 || Instant::now() >= self.until
    }
}

/// Lock held by the one job of an address that runs or is queued for the readers. Its other jobs
/// wait in the order of their requests.
pub(super) type JobLock = Arc<Mutex<()>>;

/// Reason why there is no result.
#[derive(Debug, PartialEq)]
pub(super) enum WorkError {
    /// The time limit passed.
    TooLate,
    /// The work panicked, or no thread could be started.
    Failed,
}

/// Runs `job` on a reader thread when it holds the lock of its address. If this future is dropped
/// because the client disconnected, the job does not begin, or its token is cancelled.
pub(super) async fn work<T: Send + 'static>(
    job_lock: JobLock,
    job: impl FnOnce(&CancelToken) -> T + Send + 'static,
) -> Result<T, WorkError> {
    let request = Arc::new(());
    let cancel = CancelToken::of(&request);
    let done = async move {
        let job_lock = job_lock.lock_owned().await;
        // The job keeps the lock even after its client has disconnected.
        let run = move || {
            let _job_lock = job_lock;
            (!cancel.is_cancelled()).then(|| job(&cancel))
        };
        tokio::task::spawn_blocking(run).await
    };
    let answer = tokio::time::timeout(ANSWER_TIME, done).await;
    drop(request);
    match answer {
        Ok(Ok(Some(answer))) => Ok(answer),
        Ok(Ok(None)) | Err(_) => Err(WorkError::TooLate),
        Ok(Err(_)) => Err(WorkError::Failed),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    fn runtime(readers: usize) -> tokio::runtime::Runtime {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().max_blocking_threads(readers).build().unwrap()
    }

    #[test]
    fn one_address_cannot_occupy_all_readers() {
        let (mine, others) = (JobLock::default(), JobLock::default());
        let (begun, has_begun) = sync_channel(4);
        runtime(2).block_on(async {
            let endless = |job_lock: &JobLock| {
                let begun = begun.clone();
                tokio::spawn(work(job_lock.clone(), move |cancel| {
                    begun.send(()).unwrap();
                    while !cancel.is_cancelled() {
                        std::thread::yield_now();
                    }
                }))
            };
            let all = [0; 3].map(|_| endless(&mine));
            tokio::task::yield_now().await;
            has_begun.recv_timeout(Duration::from_secs(30)).unwrap();
            assert_eq!(work(others, |_| "answered").await, Ok("answered"));
            assert!(has_begun.try_recv().is_err(), "a second job of the address");
            all.iter().for_each(|job| job.abort());
            assert_eq!(work(mine, |_| "next").await, Ok("next"));
        });
    }

    #[test]
    fn work_is_cancelled_with_its_request() {
        let (begun, has_begun) = sync_channel(4);
        let (ended, has_ended) = sync_channel(4);
        runtime(1).block_on(async {
            let end = ended.clone();
            let endless = tokio::spawn(work(JobLock::default(), move |cancel| {
                begun.send(()).unwrap();
                while !cancel.is_cancelled() {
                    std::thread::yield_now();
                }
                let in_time = Instant::now() < cancel.until;
                end.send(if in_time { "endless" } else { "ended by its time only" }).unwrap();
            }));
            let end = ended.clone();
            let gone = move |_: &CancelToken| end.send("gone before it began").unwrap();
            let waiting = tokio::spawn(work(JobLock::default(), gone));
            tokio::task::yield_now().await;
            has_begun.recv_timeout(Duration::from_secs(30)).unwrap();
            waiting.abort();
            endless.abort();
            assert!(waiting.await.is_err() && endless.await.is_err());
            let last = move |_: &CancelToken| ended.send("last").unwrap();
            assert_eq!(work(JobLock::default(), last).await, Ok(()));
        });
        assert_eq!(has_ended.iter().collect::<Vec<_>>(), ["endless", "last"]);
    }
}

//! The runs below the served folder, read once for all viewers.

use std::collections::HashMap;
use std::fs;
use std::hash::Hash;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use meristem::train;
use meristem::train::reading::{
    Follower, FoundRuns, Overview, UnreadableFolder, find, is_in_progress,
};

use super::work::CancelToken;
use crate::cli::BasePath;

/// Minimum time between two updates of the list. It grows with the time of an update, so that
/// updates take at most a tenth of a core. Until the rows of all runs are read, there is no pause.
const LIST_EVERY: Duration = Duration::from_secs(2);
/// Time limit for reading rows of the list in one update. Very many runs take several updates.
const LIST_TIME: Duration = Duration::from_secs(2);
/// Limits of the caches of runs and views: number, and size in bytes.
const KEPT_MAX: usize = 64;
const KEPT_BYTES_MAX: usize = 256 << 20;
/// Bytes of events that are read between two checks of the clock.
const PART_BYTES: u64 = 1 << 20;
/// Time limit for reading the events of a run in one update. A long file takes several updates.
pub(super) const READING_TIME: Duration = Duration::from_millis(300);

/// Files of a run that are read; the empty name is the folder itself.
const FILES: [&str; 4] = ["", "config.toml", "events.jsonl", "summary.json"];

/// Least-recently-used cache of shared values.
pub(super) struct SharedCache<K, V>(Mutex<HashMap<K, CacheEntry<V>>>);

struct CacheEntry<V> {
    used: Instant,
    bytes: usize,
    value: Arc<Mutex<V>>,
}

impl<K: Eq + Hash + Clone, V> SharedCache<K, V> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    /// Returns the value of a key, and creates it if it is missing.
    pub(super) fn get<E>(
        &self,
        key: &K,
        make: impl FnOnce() -> Result<V, E>,
    ) -> Result<Arc<Mutex<V>>, E> {
        let mut all = lock(&self.0);
        let (value, bytes) = match all.remove(key) {
            Some(kept) => (kept.value, kept.bytes),
            None => (Arc::new(Mutex::new(make()?)), 0),
        };
        all.insert(key.clone(), CacheEntry { used: Instant::now(), bytes, value: value.clone() });
        evict(&mut all);
        Ok(value)
    }

    /// Sets the size of the value of a key, and removes other values to stay within the limit.
    pub(super) fn set_bytes(&self, key: &K, bytes: usize) {
        let mut all = lock(&self.0);
        if let Some(kept) = all.get_mut(key) {
            (kept.bytes, kept.used) = (bytes, Instant::now());
        }
        evict(&mut all);
    }
}

/// Removes the least recently used values beyond the limits. The newest value always stays.
fn evict<K: Eq + Hash + Clone, V>(all: &mut HashMap<K, CacheEntry<V>>) {
    let is_too_much = |all: &HashMap<K, CacheEntry<V>>| {
        let bytes = all.values().fold(0, |sum: usize, kept| sum.saturating_add(kept.bytes));
        all.len() > 1 && (all.len() > KEPT_MAX || bytes > KEPT_BYTES_MAX)
    };
    while is_too_much(all) {
        let oldest = all.iter().min_by_key(|(_, kept)| kept.used);
        let Some(oldest) = oldest.map(|(key, _)| key.clone()) else { return };
        all.remove(&oldest);
    }
}

/// Locks a value. A poisoned lock is ignored, because a panic while drawing leaves the value
/// consistent.
pub(super) fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The list of runs at some time.
#[derive(Clone, Default)]
pub(super) struct List {
    pub(super) rows: Vec<Overview>,
    pub(super) found: FoundRuns,
    /// Number of runs whose rows have not been read yet.
    pub(super) unread: usize,
}

/// Identity of a file, which differs after any change of the contents. Size and mtime alone do not
/// suffice, because a file that replaces another may have the same size and mtime.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    device: u64,
    inode: u64,
    bytes: u64,
    /// mtime, in seconds and nanoseconds since 1970.
    modified: (i64, i64),
    /// ctime, in the same units. Programs cannot set it.
    changed: (i64, i64),
}

/// Identities of the files from which a row is derived, and whether a process writes to the run.
type Stamp = ([Option<FileStamp>; 3], bool);

#[derive(Default)]
struct Listed {
    list: Arc<List>,
    /// Rows by run, each with the time of reading.
    known: HashMap<PathBuf, (Stamp, Instant, Overview)>,
    /// Time of the next update.
    until: Option<Instant>,
}

/// The served folder.
pub(super) struct Library {
    /// Folder as given on the command line.
    root: PathBuf,
    /// The same folder with links resolved.
    real: PathBuf,
    listed: Mutex<Listed>,
    followers: SharedCache<PathBuf, Follower>,
    /// Base of all addresses.
    pub(super) base: BasePath,
}

impl Library {
    /// Opens a folder.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(super) fn open(root: &Path, base: &BasePath) -> train::Result<Self> {
        find(root)?;
        let real = fs::canonicalize(root).unwrap_or_else(|_| root.into());
        let listed = Mutex::new(Listed::default());
        let (root, base) = (root.into(), base.clone());
        Ok(Self { root, real, listed, followers: SharedCache::new(), base })
    }

    /// Returns the list, which is updated after [`LIST_EVERY`] or, if an update is slow, later.
    /// Rows that exceed the time limit are read by the next call.
    pub(super) fn list(&self, cancel: &CancelToken) -> Arc<List> {
        let mut listed = lock(&self.listed);
        let now = Instant::now();
        if listed.until.is_some_and(|until| now < until) {
            return listed.list.clone();
        }
        let mut found = find(&self.root).unwrap_or_else(|error| FoundRuns {
            unreadable: vec![UnreadableFolder::new(self.root.clone(), error.to_string())],
            ..FoundRuns::default()
        });
        let (inside, outside) = found.runs.into_iter().partition(|run| self.is_inside(run));
        found.runs = inside;
        let leads_out = |run: PathBuf| {
            UnreadableFolder::new(run, "a link in it leads out of the served folder")
        };
        found.unreadable.extend::<Vec<_>>(Vec::into_iter(outside).map(leads_out).collect());
        let mut before = std::mem::take(&mut listed.known);
        let (mut rows, mut unread) = (vec![], 0);
        for run in &found.runs {
            let is_over = now.elapsed() >= LIST_TIME || cancel.is_cancelled();
            let (stamp, read, row) = match (before.remove(run), is_over) {
                (Some(known), true) => known,
                (None, true) => {
                    unread += 1;
                    continue;
                }
                (known, false) => {
                    let stamp = stamp(run);
                    let same = known.filter(|(known, ..)| *known == stamp);
                    same.unwrap_or_else(|| (stamp, now, Overview::read(run)))
                }
            };
            let age = row.age_seconds.map(|age| age + read.elapsed().as_secs_f64());
            let mut aged = row.clone();
            aged.age_seconds = age;
            rows.push(aged);
            listed.known.insert(run.clone(), (stamp, read, row));
        }
        // The newest run is the first.
        let age = |row: &Overview| row.age_seconds.unwrap_or(f64::MAX);
        rows.sort_by(|a, b| age(a).total_cmp(&age(b)).then_with(|| a.run.cmp(&b.run)));
        let pause = if unread > 0 { Duration::ZERO } else { LIST_EVERY.max(10 * now.elapsed()) };
        listed.list = Arc::new(List { rows, found, unread });
        listed.until = Some(Instant::now() + pause);
        listed.list.clone()
    }

    /// Name of a run: its path below the folder, empty for the folder itself.
    pub(super) fn name<'a>(&self, run: &'a Path) -> &'a Path {
        run.strip_prefix(&self.root).unwrap_or(run)
    }

    /// Finds a run by name in the list of runs, so no path outside the folder can be reached.
    pub(super) fn run(&self, name: &[u8], cancel: &CancelToken) -> Option<PathBuf> {
        let list = self.list(cancel);
        let is_named = |run: &&PathBuf| self.name(run).as_os_str().as_encoded_bytes() == name;
        list.found.runs.iter().find(is_named).cloned()
    }

    /// Returns a run, after reading its new events for a limited time.
    ///
    /// # Errors
    /// The path is not a run, or a link in it leads out of the served folder.
    pub(super) fn follow(
        &self,
        run: &PathBuf,
        cancel: &CancelToken,
    ) -> train::Result<Arc<Mutex<Follower>>> {
        let follower = self.followers.get(run, || Follower::open(run))?;
        let mut reader = lock(&follower);
        if !self.is_inside(run) {
            let problem = "a link in it leads out of the served folder".into();
            return Err(train::Error::NotARun { path: run.clone(), problem });
        }
        let started = Instant::now();
        let is_over = || started.elapsed() >= READING_TIME || cancel.is_cancelled();
        while !is_over() && !reader.look(PART_BYTES) {}
        let bytes = reader.run.history.bytes();
        drop(reader);
        self.followers.set_bytes(run, bytes);
        Ok(follower)
    }

    /// Whether a run and all of its files that are read are below the folder. Missing files are
    /// ignored.
    fn is_inside(&self, run: &Path) -> bool {
        FILES.iter().all(|name| {
            let real = fs::canonicalize(run.join(name));
            real.map_or(true, |real| real.starts_with(&self.real))
        })
    }
}

fn stamp(run: &Path) -> Stamp {
    let file_stamp = |name: &str| {
        let file = run.join(name).metadata().ok()?;
        Some(FileStamp {
            device: file.dev(),
            inode: file.ino(),
            bytes: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        })
    };
    let [_, config, events, summary] = FILES;
    ([file_stamp(config), file_stamp(events), file_stamp(summary)], is_in_progress(run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_evicted_by_number_and_by_size_the_oldest_first() {
        let cache: SharedCache<usize, usize> = SharedCache::new();
        let get = |key| *lock(&cache.get(&key, || Ok::<_, ()>(key)).unwrap());
        let known = |key| lock(&cache.0).contains_key(&key);
        (0..100).for_each(|key| assert_eq!(get(key), key));
        assert_eq!(lock(&cache.0).len(), KEPT_MAX);
        assert!(!known(35) && known(36));
        (97..100).for_each(|key| cache.set_bytes(&key, KEPT_BYTES_MAX / 2));
        assert!(!known(96) && !known(97) && known(98) && known(99));
        cache.set_bytes(&99, usize::MAX);
        assert!(!known(98) && known(99), "the newest stays");
        get(1);
        assert!(known(1) && !known(99));
    }

    #[test]
    fn files_of_equal_size_and_time_are_distinguished() {
        let run = tempfile::tempdir().unwrap();
        let summary = run.path().join("summary.json");
        let mut stamps = vec![];
        for text in ["a", "b"] {
            fs::write(run.path().join(text), text).unwrap();
            let file = fs::File::options().write(true).open(run.path().join(text)).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
            fs::rename(run.path().join(text), &summary).unwrap();
            stamps.push(stamp(run.path()));
        }
        assert!(stamps[0].0[2].is_some() && stamps[0] != stamps[1]);
    }

    #[test]
    fn the_next_update_continues_a_list_after_a_time_limit() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            fs::write(folder.path().join(name).join("events.jsonl"), "").unwrap();
        }
        let library = Library::open(folder.path(), &BasePath::default()).unwrap();
        let over = CancelToken::of(&Arc::new(()));
        let list = library.list(&over);
        assert_eq!((list.rows.len(), list.unread, list.found.runs.len()), (0, 2, 2));
        assert!(library.run(b"a", &over).is_some(), "a run is found before its row is read");
        let request = Arc::new(());
        let list = library.list(&CancelToken::of(&request));
        assert_eq!((list.rows.len(), list.unread), (2, 0));
    }
}

//! One copy of a dataset for each open device and [`CacheKey`], shared by the process (D1). If the
//! files of a dataset have changed, it is loaded again; holders of the older copy keep that copy.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use meristem_device::{Device, DeviceId};

use crate::dataset::{self, Dataset, Residency};
use crate::error::Result;
use crate::source::table_rules::TableOptions;
use crate::source::{self, DatasetFiles, DatasetSpec, Generated, Source, Split};

/// Identity of a cached dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheKey {
    /// The device's name. Opening one device twice gives two devices with their own entries.
    pub device: DeviceId,
    /// The kind of dataset.
    pub source: Source,
    /// Canonical path; `None` for a dataset without files.
    pub root: Option<PathBuf>,
    /// Whether undecodable files were left out.
    pub skip_bad: bool,
    /// Rows and columns to which images are scaled.
    pub resize: Option<u32>,
    /// Whether decoded images on disk are neither read nor written.
    pub no_cache: bool,
    /// Targets, missing values and rules of a table.
    pub table: TableOptions,
    /// Options of a generated dataset.
    pub generated: Generated,
    /// The split.
    pub split: Split,
    /// Storage of the samples; never `Auto`.
    pub residency: Residency,
}

/// A dataset, or `None` until the first holder of the lock has loaded it.
type Loading = Arc<Mutex<Option<Arc<Dataset>>>>;

struct Entry {
    device: Device,
    key: CacheKey,
    files: Arc<DatasetFiles>,
    loading: Loading,
}

/// Checked files, shared by the splits and devices of a dataset.
struct KnownFiles {
    spec: DatasetSpec,
    files: Arc<DatasetFiles>,
}

struct Cache {
    entries: Vec<Entry>,
    files: Vec<KnownFiles>,
}

static CACHE: Mutex<Cache> = Mutex::new(Cache { entries: vec![], files: vec![] });

/// Locks `mutex`. A panic of another holder leaves no partial entry, because entries are pushed
/// whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The split on the device: loaded at the first request, shared by all later ones until [`clear`]
/// or a change of the files. Requests made during the load wait for it. Waits for the device.
///
/// The cache keeps datasets, and with them their devices, until they are cleared.
///
/// # Errors
/// The errors of [`DatasetFiles::open`] and of reading the samples, and device errors. A load that
/// fails leaves nothing in the cache: the next request starts over.
pub fn load(
    device: &Device,
    spec: &DatasetSpec,
    split: Split,
    residency: Residency,
) -> Result<Arc<Dataset>> {
    load_files(device, &files(spec)?, split, residency)
}

/// Like [`load`], from files that [`files`] returned, so that several splits come from one version
/// of the files.
///
/// # Errors
/// As [`load`], and [`Error::Changed`](crate::Error::Changed) if the contents of the files have
/// changed since they were opened, and the split was not loaded before.
pub fn load_files(
    device: &Device,
    files: &Arc<DatasetFiles>,
    split: Split,
    residency: Residency,
) -> Result<Arc<Dataset>> {
    let residency = match residency {
        Residency::Auto { budget } => {
            let fits = dataset::resident_bytes(files.layout(), split) <= budget;
            if fits { Residency::Resident } else { Residency::Streamed }
        }
        given => given,
    };
    let DatasetSpec { source, root, skip_bad, resize, no_cache, table, generated } =
        files.spec().clone();
    let key = CacheKey {
        device: device.id(),
        source,
        root,
        skip_bad,
        resize,
        no_cache,
        table,
        generated,
        split,
        residency,
    };
    let loading = entry(device, &key, files);
    let mut slot = lock(&loading);
    if let Some(dataset) = &*slot {
        return Ok(dataset.clone());
    }
    match Dataset::load(device, files, split, residency) {
        Ok(dataset) => {
            let bytes = dataset::resident_bytes(files.layout(), split);
            tracing::info!(?key, samples = dataset.len(), bytes, "dataset loaded");
            Ok(slot.insert(Arc::new(dataset)).clone())
        }
        Err(error) => {
            let mut cache = lock(&CACHE);
            cache.entries.retain(|entry| !Arc::ptr_eq(&entry.loading, &loading));
            Err(error)
        }
    }
}

/// The checked files of a dataset, from the cache or checked now. If a file in the cache has
/// changed, the cache drops the data that was loaded from it, and the files are checked again.
///
/// # Errors
/// The errors of [`DatasetFiles::open`].
pub fn files(spec: &DatasetSpec) -> Result<Arc<DatasetFiles>> {
    let root = source::canonical_root(spec)?;
    let spec = DatasetSpec { root, ..spec.clone() };
    let find = |cache: &Cache| {
        cache.files.iter().find(|known| known.spec == spec).map(|known| known.files.clone())
    };
    let known = find(&lock(&CACHE));
    match known {
        Some(files) if files.are_current() => return Ok(files),
        Some(files) => forget(&files),
        None => {}
    }
    // Opened outside of the lock, so that other datasets do not wait for these files.
    let opened = DatasetFiles::open(&spec)?;
    let mut cache = lock(&CACHE);
    if let Some(files) = find(&cache) {
        // Another thread has opened them meanwhile.
        return Ok(files);
    }
    cache.files.push(KnownFiles { spec, files: opened.clone() });
    Ok(opened)
}

/// Removes checked files that have changed, and the data that was loaded from them.
fn forget(files: &Arc<DatasetFiles>) {
    let mut cache = lock(&CACHE);
    cache.files.retain(|known| !Arc::ptr_eq(&known.files, files));
    let entries = std::mem::take(&mut cache.entries);
    let (gone, left) = entries.into_iter().partition(|entry| Arc::ptr_eq(&entry.files, files));
    cache.entries = left;
    drop(cache);
    // Dropped outside of the lock: a device's last handle waits for its workers.
    drop::<Vec<Entry>>(gone);
}

/// The cached dataset for `key`, or a new entry without a dataset, for the caller to load.
fn entry(device: &Device, key: &CacheKey, files: &Arc<DatasetFiles>) -> Loading {
    let mut cache = lock(&CACHE);
    let same = |entry: &&Entry| {
        entry.device == *device && entry.key == *key && Arc::ptr_eq(&entry.files, files)
    };
    if let Some(entry) = cache.entries.iter().find(same) {
        return entry.loading.clone();
    }
    let loading = Loading::default();
    cache.entries.push(Entry {
        device: device.clone(),
        key: key.clone(),
        files: files.clone(),
        loading: loading.clone(),
    });
    loading
}

/// Removes every cached dataset that `filter` accepts, and its checked files unless a dataset that
/// stays has the same; returns the number of datasets removed. Their memory is freed when the last
/// user drops them. A dataset that is being loaded is removed too, but not counted. `filter` must
/// not call this module.
pub fn clear(mut filter: impl FnMut(&CacheKey) -> bool) -> usize {
    let mut gone = vec![];
    {
        let mut cache = lock(&CACHE);
        let entries = std::mem::take(&mut cache.entries);
        for entry in entries {
            if filter(&entry.key) { gone.push(entry) } else { cache.entries.push(entry) }
        }
        let left: Vec<DatasetSpec> = cache.entries.iter().map(|e| spec_of(&e.key)).collect();
        let cleared: Vec<DatasetSpec> = gone.iter().map(|e| spec_of(&e.key)).collect();
        cache.files.retain(|known| left.contains(&known.spec) || !cleared.contains(&known.spec));
    }
    // Dropped outside of the lock: a device's last handle waits for its workers.
    gone.iter().filter(|entry| entry.loading.try_lock().is_ok_and(|slot| slot.is_some())).count()
}

fn spec_of(key: &CacheKey) -> DatasetSpec {
    let &CacheKey { source, ref root, skip_bad, resize, no_cache, ref table, .. } = key;
    let (root, table, generated) = (root.clone(), table.clone(), key.generated.clone());
    DatasetSpec { source, root, skip_bad, resize, no_cache, table, generated }
}

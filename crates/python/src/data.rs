//! Datasets and gathered batches.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use meristem_data::{
    self as data, Augment, DatasetSpec, GatherConfig, InputKind, Normalization, Residency, Split,
    Subset, TableOptions, cache,
};
use meristem_device::{Device, DeviceOptions};
use meristem_train::dataset_spec;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::calls::detached;
use crate::dlpack::Array;
use crate::errors::{Failure, Kind};

/// Devices that this process has opened for datasets and collectives. They stay open, because the
/// resident copies belong to them.
static DEVICES: Mutex<Vec<Device>> = Mutex::new(vec![]);

/// Returns the device with this name, and opens it on the first call.
pub(crate) fn device(name: &str) -> Result<Device, Failure> {
    let id = name.parse()?;
    let mut open = DEVICES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(known) = open.iter().find(|device| device.id() == id) {
        return Ok(known.clone());
    }
    open.push(Device::open(id, &DeviceOptions::default())?);
    Ok(open[open.len() - 1].clone())
}

/// A split of a dataset, with one copy on its device.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct Resident {
    data: Arc<data::Dataset>,
}

#[pymethods]
impl Resident {
    #[new]
    fn new(
        py: Python<'_>,
        dataset: &str,
        split: &str,
        place: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let split =
            Split::ALL.into_iter().find(|known| known.to_string() == split).ok_or_else(|| {
                Failure::usage(
                    Kind::Data,
                    format!("`split`: got `{split}`, expected train or test"),
                    "give one of the two",
                )
            })?;
        let place: DatasetPlace = place.extract()?;
        let DatasetPlace { root, skip_bad, resize, budget, device: name, .. } = place;
        let DatasetPlace { target, missing, numbers, .. } = place;
        let residency = budget.map_or(Residency::Resident, |budget| Residency::Auto { budget });
        let data = detached(py, || {
            let missing = missing.parse()?;
            let table = TableOptions { target, missing, numbers, rules: None };
            let files = DatasetSpec { root, skip_bad, resize, table, ..DatasetSpec::embedded() };
            let spec = dataset_spec(dataset, files)?;
            let files = cache::files(&spec)?;
            files.check_has(split)?;
            Ok::<_, Failure>(cache::load_files(&device(&name)?, &files, split, residency)?)
        })?;
        Ok(Self { data })
    }

    fn __len__(&self) -> usize {
        self.data.len()
    }

    /// Name, kind and shape of a sample, classes, mean and standard deviation.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = self.data.info();
        let (about, shape) = (PyDict::new(py), self.data.shape());
        about.set_item("name", &info.name)?;
        about.set_item("kind", info.kind.to_string())?;
        about.set_item("shape", info.kind.dims(shape))?;
        about.set_item("targets", info.targets.to_string())?;
        about.set_item("classes", &info.classes)?;
        about.set_item("target_mean", &info.target_mean)?;
        about.set_item("target_std", &info.target_std)?;
        about.set_item("mean", &info.mean)?;
        about.set_item("std", &info.std)?;
        about.set_item("device", self.data.device().id().to_string())?;
        Ok(about)
    }
}

/// Files and device of a dataset.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct DatasetPlace {
    root: Option<PathBuf>,
    skip_bad: bool,
    resize: Option<u32>,
    target: Vec<String>,
    missing: String,
    numbers: bool,
    budget: Option<usize>,
    device: String,
}

/// Folder of the user's caches, if an environment variable gives one.
#[pyfunction]
pub(crate) fn user_cache() -> Option<PathBuf> {
    meristem_device::user_cache()
}

/// Clears the cache of resident copies. Copies in use are freed with their last user. Returns the
/// number of removed copies.
#[pyfunction]
pub(crate) fn clear_cache(py: Python<'_>) -> PyResult<usize> {
    detached(py, || Ok::<_, Failure>(cache::clear(|_| true)))
}

/// Number of batches that are gathered ahead of the caller, so that the device does not wait for
/// the caller to wake up.
const AHEAD: usize = 4;
/// Number of batches that are awaited together. A caller that is faster than the device then wakes
/// up half as often, and the device gathers the other batches meanwhile.
const AT_ONCE: usize = 2;

/// Settings of a gather.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    batch: usize,
    envs: usize,
    epoch: String,
    shuffle: bool,
    drop_last: bool,
    seed: u64,
    subset: Option<Vec<u32>>,
    parts: Option<Vec<Vec<u32>>>,
    crop: usize,
    flip: bool,
    cutout: usize,
    max_batches: Option<usize>,
    normalize: Option<(Vec<f32>, Vec<f32>)>,
}

/// Renames the argument in an error to the name in Python.
fn renamed(mut error: data::Error) -> data::Error {
    if let data::Error::Argument { argument, .. } = &mut error {
        *argument = match *argument {
            "batch_per_env" => "batch",
            "epoch_mode" => "epoch",
            "normalization" => "normalize",
            "crop_padding" => "crop",
            other => other,
        };
    }
    error
}

/// The samples of one list for all envs, or of a list for each.
fn subset_of(shared: Option<Vec<u32>>, parts: Option<Vec<Vec<u32>>>) -> Subset {
    match (shared, parts) {
        (_, Some(parts)) => Subset::PerEnv(parts.into_iter().map(Into::into).collect()),
        (Some(list), None) => Subset::Shared(list.into()),
        (None, None) => Subset::All,
    }
}

/// Batches of an epoch, gathered ahead of the caller.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct Gather {
    len: usize,
    state: Mutex<State>,
}

/// An env's inputs and targets.
type Part = (usize, Array, Array);

struct State {
    batches: data::GatherBatches,
    /// Whether the samples are vectors.
    is_vectors: bool,
    /// Batches whose gathers are enqueued; fewer at the end of an epoch.
    ahead: VecDeque<Vec<data::Batch>>,
    /// Batches whose gathers are completed; they come before the batches in `ahead`.
    done: VecDeque<Vec<Part>>,
    /// Number of started epochs, which identifies the current one.
    begun: u64,
}

impl State {
    /// Enqueues gathers, which run while the caller uses a batch. At the end of the epoch this does
    /// nothing, because the engine then returns `None` again.
    fn gather_ahead(&mut self) -> Result<(), Failure> {
        while self.done.len() + self.ahead.len() < AHEAD {
            match self.batches.next()? {
                Some(batch) => self.ahead.push_back(batch),
                None => break,
            }
        }
        Ok(())
    }

    fn end(&mut self) {
        self.ahead.clear();
        self.done.clear();
    }

    /// The next batch, after its gather. `None` at the end of the epoch.
    fn next(&mut self) -> Result<Option<Vec<Part>>, Failure> {
        if self.done.is_empty() {
            let is_vectors = self.is_vectors;
            let part = |batch: data::Batch| {
                let inputs = match *batch.inputs.dims() {
                    [n, features, ..] if is_vectors => batch.inputs.view(0, [n, features])?,
                    _ => batch.inputs,
                };
                Ok((batch.env, Array::lent(&inputs)?, Array::lent(&batch.targets)?))
            };
            let count = AT_ONCE.min(self.ahead.len());
            // Batches complete in order, so one wait for the last suffices.
            for batch in self.ahead.drain(..count).rev() {
                let mut parts =
                    batch.into_iter().rev().map(part).collect::<Result<Vec<_>, Failure>>()?;
                parts.reverse();
                self.done.push_front(parts);
            }
        }
        let batch = self.done.pop_front();
        self.gather_ahead()?;
        Ok(batch)
    }
}

#[pymethods]
impl Gather {
    #[new]
    fn new(py: Python<'_>, dataset: &Resident, options: &Bound<'_, PyDict>) -> PyResult<Self> {
        let given: Options = options.extract()?;
        let data = &dataset.data;
        let batches = detached(py, || {
            let device = data.device();
            let normalization = given.normalize.map(|(mean, std)| Normalization { mean, std });
            let config = GatherConfig {
                epoch_mode: given.epoch.parse().map_err(renamed)?,
                shuffle: given.shuffle,
                drop_last: given.drop_last,
                seed: given.seed,
                subset: subset_of(given.subset, given.parts),
                augment: Augment {
                    crop_padding: given.crop,
                    flip: given.flip,
                    cutout: given.cutout,
                },
                max_batches: given.max_batches,
                normalization,
                // The batches ahead, the one in use by the caller, and the one before it, which the
                // caller may still hold.
                ring_depth: AHEAD + 2,
                ..GatherConfig::new(given.batch, vec![device.id(); given.envs])
            };
            let streams: Vec<_> =
                (0..given.envs).map(|env| device.stream(&format!("batches {env}"))).collect();
            data::GatherBatches::new(&config, std::slice::from_ref(data), &streams).map_err(renamed)
        })?;
        let is_vectors = data.info().kind == InputKind::Vector;
        let len = batches.len();
        Ok(Self {
            len,
            state: Mutex::new(State {
                batches,
                is_vectors,
                ahead: VecDeque::new(),
                done: VecDeque::new(),
                begun: 0,
            }),
        })
    }

    fn __len__(&self) -> usize {
        self.len
    }

    /// Starts an epoch. Returns the number of started epochs, which `next` compares.
    fn start(&self, py: Python<'_>, epoch: u64) -> PyResult<u64> {
        self.with(py, |state| {
            state.end();
            state.begun += 1;
            state.batches.start_epoch(epoch)?;
            state.gather_ahead()?;
            Ok(state.begun)
        })
    }

    /// Inputs and targets of each env in the next batch; `None` at the end of the epoch.
    fn next(&self, py: Python<'_>, begun: u64) -> PyResult<Option<Vec<Part>>> {
        self.with(py, |state| {
            if begun != state.begun {
                let message = "this epoch was ended by the start of another";
                let remedy = "iterate over one epoch at a time, or make another GatherBatches";
                return Err(Failure::usage(Kind::State, message, remedy));
            }
            // An error ends the epoch, so that no batch is skipped silently.
            state.next().inspect_err(|_| state.end())
        })
    }

    /// Number of buffers that were added because the caller held all buffers of an env.
    fn added_buffers(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |state| Ok(state.batches.ring_growth()))
    }
}

impl Gather {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut State) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        detached(py, || match self.state.try_lock() {
            Ok(mut state) => work(&mut state),
            Err(_) => Err(Failure::usage(
                Kind::State,
                "this GatherBatches is in use by another thread",
                "give each thread a separate GatherBatches; all share the dataset",
            )),
        })
    }
}

//! The folder of a training: the request, the state after the last round, curves, the policy.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use meristem_control::ControllerState;
use meristem_nn::safetensors::{self, Metadata};
use meristem_nn::{HostData, HostTensor, StateDict};
use serde::{Deserialize, Serialize};

use super::report::CurveLine;
use super::request::PolicyTraining;
use crate::error::{Error, Result};
use crate::record::directory::{Directory, part_of};
use crate::record::plain_file;
use crate::record::run_folder::{LOCK, POLICY, lock, write_whole};

/// The request, as JSON.
const REQUEST: &str = "training.json";
/// The state from which the training goes on.
const STATE: &str = "state.safetensors";
/// Curves as JSON lines.
const CURVES: &str = "curves.jsonl";
/// Limit of the size of the request.
const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// Limit of the size of the curves.
const CURVES_BYTES_MAX: u64 = 1 << 30;

const FORMAT: &str = "meristem policy training";
const MEMORY: &str = "memory";

/// State between two rounds.
pub(super) struct TrainingState {
    /// Next round.
    pub(super) round: usize,
    /// Transitions so far.
    pub(super) transitions: u64,
    pub(super) policy: ControllerState,
}

#[derive(Serialize, Deserialize)]
struct Counters {
    round: usize,
    transitions: u64,
}

/// The request of the training in a folder; `None` if there is none that can be read.
pub(super) fn request_in(folder: &Path) -> Option<PolicyTraining> {
    let text = plain_file::text(&folder.join(REQUEST), REQUEST_BYTES_MAX).ok()??;
    serde_json::from_str(&text).ok()
}

/// The open folder of a training, which no other process writes.
pub(super) struct TrainingFolder {
    path: PathBuf,
    _lock: File,
}

impl TrainingFolder {
    /// Creates the folder, or opens that of an earlier training with the same request.
    ///
    /// # Errors
    /// [`Error::RunFolderExists`]: something else is there. [`Error::Resume`]: another process
    /// writes to it, or the request differs in more than its number of rounds, or has fewer.
    pub(super) fn open(path: &Path, request: &PolicyTraining) -> Result<Self> {
        let fail = |action, source| Error::RunFolder { action, path: path.into(), source };
        std::fs::create_dir_all(path).map_err(|source| fail("create", source))?;
        let directory = Directory::open(path).map_err(|source| fail("open", source))?;
        let names = directory.names().map_err(|source| fail("read", source))?;
        // A kill may have left a lock and an unfinished request. Other folders get no lock.
        let is_own = |name: &String| name == LOCK || part_of(name) == Some(REQUEST);
        let is_begun = names.iter().any(|name| name == REQUEST);
        if !is_begun && !names.iter().all(is_own) {
            return Err(Error::RunFolderExists { path: path.into() });
        }
        let it = Self { path: path.to_owned(), _lock: lock(&directory)? };
        let file = path.join(REQUEST);
        let read = plain_file::text(&file, REQUEST_BYTES_MAX);
        match read.map_err(|source| it.fail("read", &file, source))? {
            Some(began) => it.check_same(&began, request)?,
            None if is_begun => return Err(Error::RunFolderExists { path: path.into() }),
            None => {}
        }
        let is_part = |name: &str| [REQUEST, STATE, CURVES, POLICY].contains(&name);
        directory.remove_parts(is_part).map_err(|source| fail("read", source))?;
        write_whole(&file, text(request).as_bytes())?;
        Ok(it)
    }

    fn check_same(&self, began: &str, request: &PolicyTraining) -> Result<()> {
        let refuse = |problem| Err(Error::Resume { path: self.path.clone(), problem });
        let Ok(began) = serde_json::from_str::<PolicyTraining>(began) else {
            return refuse(format!("its {REQUEST} cannot be read; give another folder"));
        };
        let began = began.clone().with_version_of(Some(&began));
        if request.rounds < began.rounds {
            return refuse(format!(
                "it has {} rounds, but {} were requested; give at least as many",
                began.rounds, request.rounds
            ));
        }
        let length = |of: &PolicyTraining| text(&PolicyTraining { rounds: 1, ..of.clone() });
        let [one, other] = [length(&began), length(request)];
        if one == other {
            return Ok(());
        }
        let differs = one.lines().zip(other.lines()).find(|(one, other)| one != other);
        let what = differs.map_or("it began with another file".into(), |(one, other)| {
            format!("it began with `{}`, but now there is `{}`", one.trim(), other.trim())
        });
        refuse(format!("{what}; give the file that it began with, or another folder"))
    }

    /// The state after the last round; `None` before the first one.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: a damaged file.
    pub(super) fn read_state(&self) -> Result<Option<TrainingState>> {
        let path = self.path.join(STATE);
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let unfit = |problem: String| Error::Checkpoint { path: path.clone(), problem };
        let (mut tensors, metadata) =
            safetensors::load(&path).map_err(|error| unfit(error.without_path().to_string()))?;
        let counters = metadata.get(FORMAT).ok_or_else(|| unfit(format!("it is no {FORMAT}")))?;
        let Counters { round, transitions } =
            serde_json::from_str(counters).map_err(|error| unfit(error.to_string()))?;
        let Some(HostData::U8(memory)) = tensors.0.remove(MEMORY).map(|tensor| tensor.data) else {
            return Err(unfit(format!("it has no `{MEMORY}`")));
        };
        Ok(Some(TrainingState { round, transitions, policy: ControllerState { memory, tensors } }))
    }

    /// Writes the state; the file is always whole.
    pub(super) fn write_state(&self, state: &TrainingState) -> Result<()> {
        let TrainingState { round, transitions, policy } = state;
        let path = self.path.join(STATE);
        let mut tensors: StateDict = policy.tensors.clone();
        tensors.insert(MEMORY, HostTensor::bytes(policy.memory.clone()));
        let counters = Counters { round: *round, transitions: *transitions };
        let counters = serde_json::to_string(&counters).unwrap_or_default();
        let metadata: Metadata = [(FORMAT.to_string(), counters)].into();
        write_whole(&path, &safetensors::to_bytes(&path, &tensors, &metadata)?)
    }

    /// The lines of the curves; those after a damaged line are left out.
    pub(super) fn read_curves(&self) -> Result<Vec<CurveLine>> {
        let path = self.path.join(CURVES);
        let text = plain_file::text(&path, CURVES_BYTES_MAX);
        let text = text.map_err(|source| self.fail("read", &path, source))?.unwrap_or_default();
        Ok(text.lines().map_while(|line| serde_json::from_str(line).ok()).collect())
    }

    /// Adds a line to the curves. A kill may leave a part of it, which is left out when the curves
    /// are read.
    pub(super) fn add_curve(&self, line: &CurveLine) -> Result<()> {
        let path = self.path.join(CURVES);
        let fail = |source| self.fail("write", &path, source);
        let line = serde_json::to_string(line).map_err(|error| fail(error.into()))? + "\n";
        let mut file = OpenOptions::new().append(true).open(&path).map_err(fail)?;
        file.write_all(line.as_bytes()).map_err(fail)?;
        file.sync_data().map_err(fail)
    }

    /// Writes all lines of the curves.
    pub(super) fn write_curves(&self, lines: &[CurveLine]) -> Result<()> {
        let lines = lines.iter().filter_map(|line| serde_json::to_string(line).ok());
        let text: String = lines.map(|line| line + "\n").collect();
        write_whole(&self.path.join(CURVES), text.as_bytes())
    }

    /// Writes the policy.
    pub(super) fn write_policy(&self, weights: &StateDict, metadata: &Metadata) -> Result<()> {
        let path = self.path.join(POLICY);
        write_whole(&path, &safetensors::to_bytes(&path, weights, metadata)?)
    }

    fn fail(&self, action: &'static str, path: &Path, source: io::Error) -> Error {
        Error::RunFolder { action, path: path.into(), source }
    }
}

fn text(request: &PolicyTraining) -> String {
    serde_json::to_string_pretty(request).unwrap_or_default() + "\n"
}

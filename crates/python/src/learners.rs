//! Networks that the Python program trains with its own loop.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, TryLockError};

use meristem_control::EnvView;
use meristem_train::Error;
use meristem_train::config::ConfigLayer;
use meristem_train::external::SeenEnv;
use meristem_train::learners::{EnvBatch, LearnerShape, Learners, OwnScores};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::calls::{check_process, detached};
use crate::dlpack::{Array, Borrowed};
use crate::env;
use crate::errors::{Failure, Kind};
use crate::settings;

/// Scores of an env: the score of its network, and for some slots the index of the slot and the
/// score without its module.
type GivenScores = (Option<f64>, Vec<(usize, f64)>);

/// Learners, which one thread at a time may use.
#[pyclass(frozen, module = "meristem")]
pub(crate) struct LearnerLoop(Mutex<Learners>);

#[pymethods]
impl LearnerLoop {
    /// Creates networks with fresh weights.
    #[new]
    fn new(
        py: Python<'_>,
        input: Vec<usize>,
        outputs: usize,
        given: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let (layer, shape) = (settings::layer(given)?, LearnerShape { input, outputs });
        Ok(Self(Mutex::new(detached(py, || Learners::new(layer, shape))?)))
    }

    /// Restores the networks in a file of [`LearnerLoop::checkpoint`].
    #[staticmethod]
    fn resume(py: Python<'_>, path: PathBuf, given: &Bound<'_, PyDict>) -> PyResult<Self> {
        let layer: ConfigLayer = settings::layer(given)?;
        Ok(Self(Mutex::new(detached(py, || Learners::resume(&path, layer))?)))
    }

    /// Runs forward passes of some envs on float32 inputs, channels last. Returns the outputs of
    /// each env.
    fn forward(
        &self,
        py: Python<'_>,
        envs: Vec<usize>,
        inputs: &Bound<'_, PyList>,
    ) -> PyResult<Vec<Array>> {
        self.pass(py, &envs, inputs, |learners, batches| learners.forward(batches))
    }

    /// Runs forward passes in evaluation mode, like `forward`; `without` is the index of a slot
    /// whose module is left out.
    fn eval(
        &self,
        py: Python<'_>,
        envs: Vec<usize>,
        inputs: &Bound<'_, PyList>,
        without: Option<usize>,
    ) -> PyResult<Vec<Array>> {
        self.pass(py, &envs, inputs, |learners, batches| learners.eval(batches, without))
    }

    /// Runs backward passes of some envs.
    fn backward(
        &self,
        py: Python<'_>,
        envs: Vec<usize>,
        gradients: &Bound<'_, PyList>,
    ) -> PyResult<()> {
        let given = borrowed(gradients)?;
        self.with(py, |learners| Ok(learners.backward(&batches(&envs, &given)?)?))
    }

    /// Updates the parameters of some envs.
    fn update(&self, py: Python<'_>, envs: Vec<usize>) -> PyResult<()> {
        self.with(py, |learners| Ok(learners.update(&envs)?))
    }

    /// Drops gradients and activations of some envs.
    fn drop_gradients(&self, py: Python<'_>, envs: Vec<usize>) -> PyResult<()> {
        self.with(py, |learners| Ok(learners.drop_gradients(&envs)?))
    }

    /// Ends a step of growth.
    fn step(&self, py: Python<'_>, scores: Vec<GivenScores>) -> PyResult<()> {
        let scores = scores.into_iter().map(|(score, without)| OwnScores { score, without });
        let scores: Vec<OwnScores> = scores.collect();
        self.with(py, |learners| Ok(learners.step(&scores).map(drop)?))
    }

    /// Executes an action for each env. Returns the rewards.
    fn act(&self, py: Python<'_>, actions: &Bound<'_, PyList>) -> PyResult<Vec<f32>> {
        let parsed = self.look(|learners| {
            let seen = learners.seen();
            let views: Vec<EnvView<'_>> = seen.iter().map(SeenEnv::view).collect();
            let remedy = "an action is None, a dictionary as in a script (docs/control.md), or one \
                          choice per head";
            env::actions(actions, &views)
                .map_err(|problem| Failure::usage(Kind::Controller, problem, remedy))
        })?;
        self.with(py, |learners| Ok(learners.act(parsed)?))
    }

    /// Adds `by` output features to a layer of an env.
    fn widen(&self, py: Python<'_>, env: usize, layer: String, by: usize) -> PyResult<()> {
        self.with(py, |learners| Ok(learners.widen(env, &layer, by)?))
    }

    /// The view of each env.
    fn envs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let seen = self.look(|learners| Ok(learners.seen()))?;
        seen.iter().map(|seen| env::to_python(py, &seen.view())).collect()
    }

    /// Returns the shape of a sample, the number of outputs, and the number of envs.
    fn shape(&self) -> PyResult<(Vec<usize>, usize, usize)> {
        self.look(|learners| {
            let LearnerShape { input, outputs } = learners.shape().clone();
            Ok((input, outputs, learners.envs()))
        })
    }

    /// Whether actions are due.
    fn decides(&self) -> PyResult<bool> {
        self.look(|learners| Ok(learners.decides()))
    }

    /// For each env the parameters of the host and of its modules, and the number of rollbacks.
    fn counts(&self) -> PyResult<Vec<(usize, usize, usize)>> {
        self.look(|learners| {
            let all = learners.seen().into_iter().zip(learners.rollbacks());
            Ok(all
                .map(|(SeenEnv { figures, .. }, rollbacks)| {
                    (figures.host_parameters, figures.grown_parameters, rollbacks)
                })
                .collect())
        })
    }

    /// Names of slots and blueprints, and the sizes of the heads of an action.
    fn names(&self) -> PyResult<(Vec<String>, Vec<String>, Vec<usize>)> {
        self.look(|learners| {
            let seen = learners.seen();
            let Some(first) = seen.first() else { return Ok((vec![], vec![], vec![])) };
            let slots = first.host.slots().iter().map(|slot| slot.name.to_string()).collect();
            let blueprints = first.host.blueprints().iter().map(|b| b.name.clone()).collect();
            Ok((slots, blueprints, env::head_sizes(&first.view())))
        })
    }

    /// The contents of an env's weights file.
    fn weights<'py>(&self, py: Python<'py>, env: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.with(py, |learners| Ok(learners.weights(env)?))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Sets the weights of an env to the contents of a weights file. Errors refer to the file as
    /// `name`.
    fn load(&self, py: Python<'_>, env: usize, name: &str, contents: &[u8]) -> PyResult<()> {
        self.with(py, |learners| Ok(learners.load(env, Path::new(name), contents)?))
    }

    /// Writes the state of all envs to a file.
    fn checkpoint(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |learners| Ok(learners.checkpoint(&path)?))
    }
}

impl LearnerLoop {
    fn lock(&self) -> Result<std::sync::MutexGuard<'_, Learners>, Failure> {
        match self.0.try_lock() {
            Ok(learners) => Ok(learners),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Failure::usage(
                Kind::State,
                "these learners are in use by another thread",
                "use them from one thread at a time",
            )),
        }
    }

    /// Calls `work` with the learners, without the GIL.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Learners) -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        detached(py, || work(&mut *self.lock()?))
    }

    /// Calls `work` with the learners, with the GIL held.
    fn look<T>(&self, work: impl FnOnce(&Learners) -> Result<T, Failure>) -> PyResult<T> {
        check_process()?;
        Ok(work(&*self.lock()?)?)
    }

    /// Runs a pass over inputs. Returns the outputs `[n, outputs]` of each env.
    fn pass(
        &self,
        py: Python<'_>,
        envs: &[usize],
        inputs: &Bound<'_, PyList>,
        run: impl FnOnce(&mut Learners, &[EnvBatch<'_>]) -> Result<Vec<Vec<f32>>, Error> + Send,
    ) -> PyResult<Vec<Array>> {
        let given = borrowed(inputs)?;
        let (all, outputs) = self.with(py, |learners| {
            let all = run(learners, &batches(envs, &given)?)?;
            Ok((all, learners.shape().outputs))
        })?;
        let shaped = |values: Vec<f32>| {
            let samples = values.len() / outputs;
            Array::shaped(values, &[samples, outputs])
        };
        Ok(all.into_iter().map(shaped).collect())
    }
}

/// Borrows the memory of arrays.
fn borrowed(arrays: &Bound<'_, PyList>) -> PyResult<Vec<Borrowed>> {
    arrays.iter().map(|array| Borrowed::of(&array)).collect()
}

/// The numbers of arrays, each with its env.
fn batches<'a>(envs: &[usize], arrays: &'a [Borrowed]) -> Result<Vec<EnvBatch<'a>>, Failure> {
    let numbers = |array: &'a Borrowed| {
        array.numbers().ok_or_else(|| {
            let message = "`inputs`: got another array, expected contiguous float32";
            Failure::usage(Kind::Argument, message, "convert it: numpy.ascontiguousarray(x, 'f4')")
        })
    };
    let pairs = envs.iter().zip(arrays);
    pairs.map(|(&env, array)| Ok(EnvBatch { env, values: numbers(array)? })).collect()
}

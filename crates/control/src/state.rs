//! A controller's state in a checkpoint.

use meristem_nn::StateDict;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// The state that determines a controller's next decisions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ControllerState {
    /// Memory of the controller in CBOR, which is exact for every float, NaN included.
    pub memory: Vec<u8>,
    /// Tensors of the controller by name: weights, optimiser, rollout.
    pub tensors: StateDict,
}

impl ControllerState {
    /// A state with this memory and no tensors.
    ///
    /// # Errors
    /// [`Error::BadState`] for a value that serde cannot serialise.
    pub fn from_memory(controller: &str, memory: &impl Serialize) -> Result<Self> {
        let mut bytes = vec![];
        ciborium::into_writer(memory, &mut bytes).map_err(|error| bad(controller, &error))?;
        Ok(Self { memory: bytes, tensors: StateDict::default() })
    }

    /// Deserialises the memory.
    ///
    /// # Errors
    /// [`Error::BadState`], which names `controller`, if the memory is not the CBOR of a `T`.
    pub fn memory<T: DeserializeOwned>(&self, controller: &str) -> Result<T> {
        ciborium::from_reader(&self.memory[..]).map_err(|error| bad(controller, &error))
    }
}

fn bad(controller: &str, problem: &impl ToString) -> Error {
    Error::BadState { controller: controller.into(), problem: problem.to_string() }
}

//! Messages between the processes of a run: values as CBOR, and errors that travel.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An error on its way to the other processes.
#[derive(Serialize, Deserialize)]
pub(super) struct Failure {
    problem: String,
    remedy: Option<String>,
    exit_code: u8,
}

impl Failure {
    /// The report of an error, for the others.
    pub(super) fn of(error: &Error) -> Self {
        let (problem, remedy) = (error.to_string(), error.remedy());
        Self { problem, remedy, exit_code: error.exit_code() }
    }

    /// The error, named after the rank that it comes from.
    pub(super) fn at(self, rank: usize) -> Error {
        let Self { problem, remedy, exit_code } = self;
        Error::OfRank { rank, problem, remedy, exit_code }
    }
}

/// The bytes of a message.
///
/// # Errors
/// None for what a run sends.
pub(super) fn pack(said: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    ciborium::into_writer(said, &mut bytes).map_err(|error| garbled(0, &error))?;
    Ok(bytes)
}

/// The message of a rank.
///
/// # Errors
/// [`Error::OfRank`]: bytes of another program.
pub(super) fn unpack<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T> {
    ciborium::from_reader(bytes).map_err(|error| garbled(rank, &error))
}

/// The messages of all ranks.
///
/// # Errors
/// As [`unpack`].
pub(super) fn unpack_all<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>> {
    all.iter().enumerate().map(|(rank, bytes)| unpack(rank, bytes)).collect()
}

/// The error of a message that cannot be read.
pub(super) fn garbled(rank: usize, error: &impl ToString) -> Error {
    let problem = format!("what it says cannot be read ({})", error.to_string());
    let remedy = Some("start the same program everywhere".to_string());
    Failure { problem, remedy, exit_code: 1 }.at(rank)
}

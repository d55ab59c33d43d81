//! Messages between the processes of a run: values in CBOR, and errors.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An error, as sent to the other processes.
#[derive(Serialize, Deserialize)]
pub(super) struct RankFailure {
    problem: String,
    remedy: Option<String>,
    exit_code: u8,
}

impl RankFailure {
    /// The report of an error.
    pub(super) fn from_error(error: &Error) -> Self {
        let (problem, remedy) = (error.to_string(), error.remedy());
        Self { problem, remedy, exit_code: error.exit_code() }
    }

    /// The error, with the rank that it comes from.
    pub(super) fn at(self, rank: usize) -> Error {
        let Self { problem, remedy, exit_code } = self;
        Error::OfRank { rank, problem, remedy, exit_code }
    }
}

/// Serialises a message.
///
/// # Errors
/// Never for the types that a run sends.
pub(super) fn pack(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    ciborium::into_writer(value, &mut bytes).map_err(|error| garbled(0, &error))?;
    Ok(bytes)
}

/// Deserialises the message of a rank.
///
/// # Errors
/// [`Error::OfRank`]: the bytes come from another program.
pub(super) fn unpack<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T> {
    ciborium::from_reader(bytes).map_err(|error| garbled(rank, &error))
}

/// Deserialises the messages of all ranks.
///
/// # Errors
/// As [`unpack`].
pub(super) fn unpack_all<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>> {
    all.iter().enumerate().map(|(rank, bytes)| unpack(rank, bytes)).collect()
}

/// The error of a message that cannot be deserialised.
pub(super) fn garbled(rank: usize, error: &impl ToString) -> Error {
    let problem = format!("its message cannot be read: {}", error.to_string());
    let remedy = Some("start the same version of meristem on every rank".to_string());
    RankFailure { problem, remedy, exit_code: 1 }.at(rank)
}

//! Checks of what several settings must be together.

use std::path::Path;

use super::devices::Devices;
use super::table::TrainConfig;
use super::types::{CommKind, ControllerKind, ExchangeKind};
use crate::error::{Error, Result};

/// Checks what settings say together.
///
/// # Errors
/// [`Error::Value`] names a setting, its value, and what was expected.
pub(crate) fn together(config: &TrainConfig) -> Result<()> {
    if config.controller != ControllerKind::None && config.control_share() == 0.0 {
        let expected = "above 0: the controller judges modules on the control split";
        return Err(Error::value("control-split", 0, expected));
    }
    if config.policy.is_some() && config.controller != ControllerKind::Ppo {
        let expected = "ppo, the only one that starts from a `policy`";
        return Err(Error::value("controller", &config.controller, expected));
    }
    if config.trace.is_some() && config.trace == config.export {
        let got = config.trace.as_deref().unwrap_or(Path::new("")).display();
        return Err(Error::value("trace", got, "another file than that of `export`"));
    }
    check_ranks(config)?;
    Devices::of(config).map(drop)
}

/// Checks that envs, or the samples of a batch, can be dealt out to the ranks. Done again when processes have met,
/// if their number is left open.
fn check_ranks(config: &TrainConfig) -> Result<()> {
    if config.comm == CommKind::Mpi && config.ranks.is_none() {
        return Ok(());
    }
    let (ranks, envs, batch) = (config.ranks(), config.envs, config.batch);
    if config.data_parallel {
        if envs != 1 {
            let expected = "1: with data-parallel all ranks train one host";
            return Err(Error::value("envs", envs, expected));
        }
        if !batch.is_multiple_of(ranks) {
            let expected = format!(
                "a divisor of the {batch} samples of a batch, of which each rank has its part"
            );
            return Err(Error::value("ranks", ranks, expected));
        }
    } else if ranks > 1 && config.controller != ControllerKind::Ppo {
        let expected = "1, or controller ppo, which learns over ranks, or data-parallel, where they train one host";
        return Err(Error::value("ranks", ranks, expected));
    } else if !envs.is_multiple_of(ranks) {
        return Err(Error::value("ranks", ranks, format!("a divisor of the {envs} envs")));
    }
    if ranks == 1 && config.exchange != ExchangeKind::Dense {
        let expected = "dense: a single rank has nobody to exchange with (ranks)";
        return Err(Error::value("exchange", config.exchange, expected));
    }
    Ok(())
}

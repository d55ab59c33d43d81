//! Results of a run in its events and its summary.

use super::episode::EndedEpisode;
use crate::config::TrainConfig;
use crate::config::types::{ControllerKind, Member};
use crate::error::Result;
use crate::record::events::{Event, RunStarted};
use crate::record::summary::{DatasetSummary, EnvSummary, RoundSummary};
use crate::resources::Resources;
use crate::setup::Setup;
use crate::sweep::{EndReason, Sweep};

/// The first event of a run.
pub(super) fn run_started(setup: &Setup, resources: &Resources) -> Event {
    let config = &setup.config;
    Event::RunStarted(RunStarted {
        program_version: env!("CARGO_PKG_VERSION").into(),
        dataset: setup.info.name.clone(),
        task: setup.task.kind,
        normalize: config.normalize.clone(),
        train_samples: resources.train_samples,
        control_samples: resources.control_samples,
        test_samples: resources.test_samples,
        parts: resources.parts.clone(),
        host: setup.member(0).host.clone().into(),
        host_parameters: setup.member(0).host_parameters,
        envs: config.envs,
        members: config
            .members
            .iter()
            .flat_map(|members| members.all())
            .map(Member::to_string)
            .collect(),
        rounds: config.rounds,
        steps: config.steps_of_round(),
        places: config.places,
        batches: resources.train.len(),
        epoch: config.epoch,
        images_per_step: resources.images_per_step,
        controller: config.controller.clone().into(),
        policy: config.policy.clone().filter(|_| config.controller == ControllerKind::Ppo),
        instruction_set: setup.isa.into(),
        devices: resources.devices.env_devices().into_iter().map(Into::into).collect(),
        precision: config.precision,
        threads: resources.devices.threads(),
        ranks: config.ranks(),
        exchange: config.exchange.to_string(),
        seed: config.seed,
    })
}

/// Describes the dataset. Waits for the device.
pub(super) fn dataset_summary(setup: &Setup, resources: &Resources) -> Result<DatasetSummary> {
    let info = &setup.info;
    let checksums = resources.datasets.iter().map(|data| Ok(format!("{:08x}", data.checksum()?)));
    Ok(DatasetSummary {
        name: info.name.clone(),
        train_samples: resources.train_samples,
        control_samples: resources.control_samples,
        test_samples: resources.test_samples,
        skipped: info.skipped,
        image: [info.channels, info.height, info.width],
        targets: info.targets,
        classes: info.classes.clone(),
        normalize: setup.config.normalize.to_string(),
        mean: setup.interface.normalization.mean.clone(),
        std: setup.interface.normalization.std.clone(),
        target_mean: info.target_mean.clone(),
        target_std: info.target_std.clone(),
        checksums: checksums.collect::<Result<_>>()?,
    })
}

/// The last event of an env's episode.
pub(super) fn episode_ended(env: &EnvSummary, round: usize) -> Event {
    Event::EpisodeEnded {
        env: env.env,
        round,
        control_score: env.control_score,
        test_score: env.test_score,
        test_loss: env.test_loss,
        host_parameters: env.host_parameters,
        grown_parameters: env.grown_parameters,
    }
}

/// Results of a round.
pub(super) fn round_summary(
    envs: &[EnvSummary],
    round: usize,
    ended: &EndedEpisode,
) -> RoundSummary {
    RoundSummary {
        round,
        steps: ended.steps,
        policy: ended.policy.clone(),
        control_score: envs.iter().map(|env| env.control_score).collect(),
        test_score: envs.iter().map(|env| env.test_score).collect(),
        parameters: envs.iter().map(|env| env.parameters).collect(),
    }
}

/// The results of an env with number, steps and end of its member.
pub(super) fn in_sweep(sweep: &Sweep, config: &TrainConfig, env: EnvSummary) -> EnvSummary {
    let Some(number) = env.env.checked_rem(sweep.members.len()) else { return env };
    let member = &sweep.members[number];
    EnvSummary {
        member: Some(sweep.settings(config, number).to_string()),
        member_number: Some(number),
        steps: Some(member.scores.len()),
        ended: member.ended.filter(|reason| *reason != EndReason::Complete).map(Into::into),
        ..env
    }
}

//! A run in progress, from its checkpoint.

use std::path::Path;

use super::PreparedRun;
use crate::checkpoint::Checkpoint;
use crate::env::{EnvTensors, SavedEnv};
use crate::error::{Error, Result};
use crate::input_file::InputFile;
use crate::record::summary::Stretch;
use crate::resources::Replicas;
use crate::run::begin::Resumed;
use crate::run::extend::RunLength;
use crate::settings::Member;
use crate::setup::Hosts;

impl PreparedRun {
    /// Restores this process's part of a checkpoint, if it belongs to this run.
    ///
    /// # Errors
    /// [`Error::OtherSettings`] or [`Error::OtherInput`]: the checkpoint belongs to another run.
    /// [`Error::Checkpoint`]: it lacks a part of this run's state. [`Error::Value`]: `end_members`
    /// names a member that the run does not have.
    pub(in crate::run) fn restore(
        &mut self,
        file: &Path,
        checkpoint: Checkpoint,
    ) -> Result<Resumed> {
        let indices = checkpoint.env_indices(self.setup.config.envs);
        let Checkpoint { progress, envs, controller } = checkpoint;
        let unfit = |problem| Error::Checkpoint { path: file.into(), problem };
        self.checkpoints.identity.check(file, &progress.identity)?;
        let in_a_round = progress.next.step > 0;
        if in_a_round && envs.len() != indices.len() {
            return Err(unfit(format!("it has {} envs", envs.len())));
        }
        let saved = |env: &EnvTensors, rank| Replicas::has_saved(&env.exchange, rank);
        let replicas = Some(self.setup.config.replicas()).filter(|replicas| *replicas > 1);
        let mut ranks = 0..replicas.unwrap_or(0);
        if let Some(rank) = ranks.find(|rank| envs.iter().any(|env| !saved(env, *rank))) {
            return Err(unfit(format!("it has no exchange state for rank {rank}")));
        }
        self.controller.get().restore(&controller).map_err(|error| unfit(error.to_string()))?;
        let files = &mut self.checkpoints.identity.files;
        // A file that is not needed any more may be needed again once the run is extended.
        let unread = |began: &InputFile| !files.iter().any(|file| file.path == began.path);
        let unread: Vec<InputFile> = progress.identity.files.into_iter().filter(unread).collect();
        files.extend(unread);
        self.setup.files.clone_from(files);
        self.totals = progress.totals;
        self.ended_envs = progress.ended_envs;
        if !progress.sweep.is_without_members() {
            for (number, member) in progress.sweep.members.iter().enumerate() {
                let settings = member.settings.as_deref().map(Member::parse).transpose();
                let settings = settings.map_err(|error| unfit(error.to_string()))?;
                settings
                    .map_or(Ok(()), |own| self.setup.set_member(number, &own, Hosts::InProgress))?;
            }
            self.checkpoints.identity.files.clone_from(&self.setup.files);
            self.sweep = progress.sweep;
            if !in_a_round {
                // Checkpoints of older versions say that all members have begun.
                self.sweep.members.iter_mut().for_each(|member| member.begun = None);
            }
        }
        let ended = self.sweep.end_now(&self.setup.config)?;
        let config = &self.setup.config;
        self.checkpoints.computed = progress.computed;
        self.checkpoints.computed.retain(|stretch| stretch.is_before(progress.next));
        if !self.checkpoints.computed.last().is_some_and(|last| last.goes_on(config)) {
            self.checkpoints.computed.push(Stretch::new(progress.next, config));
        }
        self.checkpoints.extended = progress.extended;
        let length = RunLength::from_config(config);
        let longer = Some(length) != RunLength::in_text(&progress.identity.config);
        let extended = longer.then(|| length.extension_at(progress.next));
        self.checkpoints.extended.extend(extended);
        (self.checkpoints.rounds, self.checkpoints.envs) = (progress.rounds, progress.last_envs);
        let own = self.resources.devices.envs();
        let envs = indices.into_iter().zip(progress.envs.into_iter().zip(envs));
        let envs = envs.filter(|(index, _)| own.contains(index));
        let envs = envs.map(|(index, (state, tensors))| SavedEnv { index, state, tensors });
        let envs = envs.collect();
        Ok(Resumed { next: progress.next, envs, events: progress.events, extended, ended })
    }
}

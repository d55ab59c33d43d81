//! One policy on several ranks. Each rank has its own envs and thread, and all ranks learn together
//! at the end of a round. The ranks may belong to several processes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use meristem_comm::{Communicator, ExchangeOptions};
use meristem_device::{Tensor, read_back_as};
use meristem_nn::StateDict;

use super::ranks::Ranks;
use super::{NAME, Ppo, four_tensors, protocol};
use crate::action::Action;
use crate::controller::Controller;
use crate::error::{Error, Result};
use crate::report::RoundReport;
use crate::state::ControllerState;
use crate::view::EnvView;

/// The ranks of a policy in this process. Ranks exchange gradients; after every update their
/// weights are equal, bit for bit. Rank `r` has the `r`-th block of consecutive envs.
#[derive(Debug)]
pub struct PpoGroup {
    ranks: Vec<Ppo>,
    /// Rank of the first policy of this process.
    first: usize,
    /// Number of ranks in all processes.
    ranks_total: usize,
    /// Number of envs of each rank.
    envs_per_rank: usize,
}

impl PpoGroup {
    /// A group of new policies that differ only in their streams, which may be of several devices.
    /// `members` has one communicator per policy: all ranks, or consecutive ones. Does not wait for
    /// a device.
    ///
    /// # Errors
    /// [`Error::Protocol`] without policies, for a wrong number of members, or for policies with
    /// different numbers of envs.
    pub fn new(
        mut ranks: Vec<Ppo>,
        members: Vec<Communicator>,
        options: &ExchangeOptions,
    ) -> Result<Self> {
        let envs = ranks.first().map_or(0, Ppo::envs);
        if ranks.is_empty() || ranks.iter().any(|rank| rank.envs() != envs) {
            let got: Vec<usize> = ranks.iter().map(Ppo::envs).collect();
            return Err(protocol(
                "ranks with the same number of envs each".into(),
                format!("{got:?}"),
            ));
        }
        let (first, of) = members.first().map_or((0, 0), |comm| (comm.rank(), comm.size()));
        let got: Vec<usize> = members.iter().map(Communicator::rank).collect();
        if !(first..first + ranks.len()).eq(got.iter().copied()) {
            let expected = format!("{} members, one for each rank", ranks.len());
            return Err(protocol(expected, format!("{} with ranks {got:?}", got.len())));
        }
        for (rank, comm) in ranks.iter_mut().zip(members) {
            rank.first_env = comm.rank() * envs;
            rank.ranks = Some(Ranks::new(comm, rank.policy.stream(), options));
        }
        Ok(Self { ranks, first, ranks_total: of, envs_per_rank: envs })
    }

    /// Joins the saved states of all processes, in rank order, into one state.
    ///
    /// # Errors
    /// [`Error::BadState`] for the state of another controller.
    pub fn join(parts: Vec<ControllerState>) -> Result<ControllerState> {
        let (mut tensors, mut memories) = (StateDict::default(), vec![]);
        for part in parts {
            memories.extend(part.memory::<Vec<Vec<u8>>>(NAME)?);
            tensors.0.extend(part.tensors.0);
        }
        Ok(ControllerState { tensors, ..ControllerState::from_memory(NAME, &memories)? })
    }

    /// The first policy of this process; all ranks have the same weights.
    pub fn first(&self) -> &Ppo {
        &self.ranks[0]
    }

    /// The rank of an env.
    fn rank_of(&mut self, env: usize) -> Result<&mut Ppo> {
        let (all, first) = (self.ranks.len() * self.envs_per_rank, self.first * self.envs_per_rank);
        let own = env.checked_sub(first).map(|env| env / self.envs_per_rank.max(1));
        let rank = own.and_then(|rank| self.ranks.get_mut(rank));
        let expected = || format!("one of {all} envs from {first} on");
        rank.ok_or_else(|| protocol(expected(), format!("env {env}")))
    }

    /// Splits a list with one element per env into the parts of the ranks.
    fn parts<'a, T>(
        &'a mut self,
        all: &'a [T],
    ) -> Result<impl Iterator<Item = (&'a mut Ppo, &'a [T])>> {
        let expected = self.ranks.len() * self.envs_per_rank;
        if all.len() != expected {
            return Err(protocol(format!("{expected} envs"), all.len().to_string()));
        }
        Ok(self.ranks.iter_mut().zip(all.chunks(self.envs_per_rank.max(1))))
    }
}

impl Controller for PpoGroup {
    fn name(&self) -> &str {
        NAME
    }

    fn begin_episode(&mut self, env: usize) {
        if let Ok(rank) = self.rank_of(env) {
            rank.begin_episode(env);
        }
    }

    /// Decides for all ranks, with one read-back for consecutive ranks on one device. All devices
    /// compute before the first is waited for.
    fn decide_all(&mut self, views: &[EnvView<'_>]) -> Result<Vec<Action>> {
        let begun = self.parts(views)?.map(|(rank, views)| rank.begin_decision(views));
        let outputs = begun.collect::<Result<Vec<[Tensor; 4]>>>()?;
        let mut words = vec![];
        for of_device in outputs.chunk_by(|a, b| a[0].device() == b[0].device()) {
            let tensors: Vec<&Tensor> = of_device.as_flattened().iter().collect();
            words.extend(read_back_as::<u32>(&tensors)?);
        }
        let mut words = words.drain(..);
        let mut actions = vec![];
        for (rank, views) in self.parts(views)? {
            actions.extend(rank.end_decision(views, &four_tensors(&mut words))?);
        }
        Ok(actions)
    }

    fn reward_all(&mut self, rewards: &[f32]) -> Result<()> {
        self.parts(rewards)?.try_for_each(|(rank, rewards)| rank.reward_all(rewards))
    }

    fn roll_back(&mut self, env: usize, cause: Option<usize>, penalty: f32) -> Result<()> {
        self.rank_of(env)?.roll_back(env, cause, penalty)
    }

    fn save(&self) -> Result<ControllerState> {
        let mut tensors = StateDict::default();
        let mut memories = vec![];
        for (index, rank) in (self.first..).zip(&self.ranks) {
            let state = rank.save()?;
            memories.push(state.memory);
            for (name, tensor) in state.tensors.0 {
                tensors.insert(format!("rank.{index}.{name}"), tensor);
            }
        }
        Ok(ControllerState { tensors, ..ControllerState::from_memory(NAME, &memories)? })
    }

    /// Restores the ranks of this process from the state of all ranks.
    fn restore(&mut self, state: &ControllerState) -> Result<()> {
        let memories: Vec<Vec<u8>> = state.memory(NAME)?;
        if memories.len() != self.ranks_total {
            let problem =
                format!("it has {} ranks, this run has {}", memories.len(), self.ranks_total);
            return Err(Error::BadState { controller: NAME.into(), problem });
        }
        let before = self.save()?;
        let part = |state: &ControllerState, index: usize, memory: Vec<u8>| {
            let prefix = format!("rank.{index}.");
            let own = state.tensors.iter();
            let own = own.filter_map(|(name, t)| Some((name.strip_prefix(&prefix)?, t)));
            let own = own.map(|(name, tensor)| (name.to_string(), tensor.clone()));
            ControllerState { memory, tensors: StateDict(own.collect()) }
        };
        let first = self.first;
        let mut all = (first..).zip(&mut self.ranks).zip(memories.into_iter().skip(first));
        let failed = all.find_map(|((i, rank), m)| rank.restore(&part(state, i, m)).err());
        let Some(error) = failed else { return Ok(()) };
        // All or nothing: a failure resets the ranks that were already restored.
        let memories: Vec<Vec<u8>> = before.memory(NAME)?;
        for ((i, rank), memory) in (first..).zip(&mut self.ranks).zip(memories) {
            rank.restore(&part(&before, i, memory))?;
        }
        Err(error)
    }

    fn end_round(&mut self, last: &[EnvView<'_>]) -> Result<Option<RoundReport>> {
        let parts = self.parts(last)?;
        let panicked = || Err(protocol("a report of each rank".into(), "a panic".into()));
        let reports: Vec<Result<Option<RoundReport>>> = thread::scope(|scope| {
            let ranks: Vec<_> = parts
                .map(|(rank, views)| {
                    scope.spawn(move || {
                        let report = catch_unwind(AssertUnwindSafe(|| rank.end_round(views)));
                        let report = report.unwrap_or_else(|_| panicked());
                        if report.is_err() {
                            rank.ranks.iter_mut().for_each(Ranks::leave);
                        }
                        report
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| panicked())).collect()
        });
        // A rank's own failure explains more than the errors of ranks that lost a partner.
        let (mut first, mut lost_partner) = (None, None);
        for report in reports {
            match report {
                Ok(report) => first = first.or(Some(report)),
                Err(Error::Ranks(error)) if !error.is_own() => {
                    lost_partner = lost_partner.or(Some(Error::Ranks(error)));
                }
                Err(error) => return Err(error),
            }
        }
        lost_partner.map_or(Ok(first.flatten()), Err)
    }
}

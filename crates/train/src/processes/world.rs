//! The processes of a run and their collectives.
//!
//! With `comm = "mpi"` or `"nccl"` every process is one rank. It has a part of the envs, or with
//! `data_parallel` all envs and a part of each batch. Otherwise there is one process with all envs.
//! Only rank 0 writes the run folder, the console and the trace. Messages are small compared with
//! the computation. They use a separate communicator and device, apart from the policy's gradients
//! and the envs. [`meeting`](super::meeting) has the protocol and the handling of failures.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use meristem_comm::{CommOptions, Communicator};
use meristem_device::{Device, DeviceId, DeviceOptions};
use meristem_nn::StateDict;
use meristem_nn::safetensors::{self, Metadata};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::link::ProcessLink;
use super::meeting::{Meetings, Receivers};
use super::message::{RankFailure, pack, unpack, unpack_all};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::settings::CommKind;

/// All processes of a run, seen from one of them.
pub(crate) struct World {
    /// Meetings with the other processes, if there are any.
    meetings: Option<Meetings<ProcessLink>>,
    /// This process's member of the communicator for gradients, until the policy takes it.
    member: Option<Communicator>,
    /// Whether all processes have the same envs and divide the samples; otherwise they divide the
    /// envs.
    same_envs: bool,
}

impl World {
    /// A single process.
    pub(crate) fn alone() -> Self {
        Self { meetings: None, member: None, same_envs: false }
    }

    /// Joins the processes of a run with this kind of ranks. Waits until all have started.
    ///
    /// # Errors
    /// MPI or NCCL, whichever `comm` names, is not in this build; a second run in this process,
    /// environment variables that do not fit, or processes that were started together but cannot
    /// communicate.
    pub(crate) fn join(comm: CommKind, deadline: Duration) -> Result<Self> {
        if comm == CommKind::Threads {
            Self::check_alone("mpi, so that the processes are the ranks of one run")?;
            return Ok(Self::alone());
        }
        let options = CommOptions { deadline };
        let mut all = match comm {
            CommKind::Nccl => Communicator::rendezvous(&options)?,
            _ => Communicator::mpi(&options)?,
        };
        if all.size() == 1 {
            let expected = "mpi from the MPI library that this program was built with";
            Self::check_alone(expected)?;
            return Ok(Self::alone());
        }
        let member = all.split(0, 0)?;
        let member = Some(match comm {
            CommKind::Nccl => Communicator::nccl(member)?,
            _ => member,
        });
        let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
        let stream = Device::open(DeviceId::Cpu(0), &options)?.stream("ranks");
        let transport = all.into_transport();
        let meetings = Some(Meetings::over(ProcessLink { transport, stream }));
        Ok(Self { meetings, member, same_envs: false })
    }

    /// Checks that no other process was started together with this one, from the environment
    /// variables of the usual MPI libraries. `expected` is for the error.
    ///
    /// # Errors
    /// [`Error::Value`] if there are other processes.
    pub(crate) fn check_alone(expected: &str) -> Result<()> {
        let size = |name| std::env::var(name).ok()?.parse::<usize>().ok();
        // Set by Open MPI, by MPICH and its derivatives, and by both.
        let sizes =
            ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"].into_iter().filter_map(size);
        match sizes.max().filter(|size| *size > 1) {
            Some(size) => {
                let got = format!("{size} unconnected processes started by mpirun");
                Err(Error::value("comm", got, expected))
            }
            None => Ok(()),
        }
    }

    /// Rank of this process.
    pub(crate) fn rank(&self) -> usize {
        self.meetings.as_ref().map_or(0, Meetings::rank)
    }

    /// Number of processes.
    pub(crate) fn size(&self) -> usize {
        self.meetings.as_ref().map_or(1, Meetings::size)
    }

    /// Whether this is rank 0, which writes the run folder and reports progress.
    pub(crate) fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Whether all processes have the same envs.
    pub(crate) fn has_same_envs(&self) -> bool {
        self.same_envs
    }

    /// Range of this process's envs.
    pub(crate) fn part(&self, envs: usize) -> Range<usize> {
        if self.same_envs {
            return 0..envs;
        }
        let each = envs / self.size();
        self.rank() * each..(self.rank() + 1) * each
    }

    /// The settings, with the number of processes as the number of ranks.
    ///
    /// # Errors
    /// [`Error::Value`]: another number was set, or the envs cannot be divided by it.
    pub(crate) fn resolve(&mut self, config: &TrainConfig) -> Result<TrainConfig> {
        let mut config = config.clone();
        self.same_envs = config.data_parallel;
        if config.comm.is_processes() {
            let size = self.size();
            if let Some(ranks) = config.ranks.filter(|ranks| *ranks != size) {
                let expected = format!(
                    "{size}, the number of processes; start {ranks} (`mpirun -n {ranks}`), or \
                     leave `ranks` out"
                );
                return Err(Error::value("ranks", ranks, expected));
            }
            config.ranks = Some(size);
            config.validate()?;
        }
        Ok(config)
    }

    /// This process's members of the communicator that exchanges gradients over `ranks` ranks. May
    /// be called once.
    ///
    /// # Errors
    /// Never for at least one rank.
    pub(crate) fn members(
        &mut self,
        ranks: usize,
        options: &CommOptions,
    ) -> Result<Vec<Communicator>> {
        match &self.meetings {
            None => Ok(Communicator::threads(ranks, options)?),
            Some(_) => Ok(self.member.take().into_iter().collect()),
        }
    }

    /// The values of all processes, by rank, on every process.
    ///
    /// # Errors
    /// A process failed or is gone.
    pub(crate) fn all_gather<T: Serialize + DeserializeOwned>(
        &mut self,
        own: Result<T>,
    ) -> Result<Vec<T>> {
        match &mut self.meetings {
            None => own.map(|own| vec![own]),
            Some(meetings) => {
                unpack_all(&meetings.meet(own.and_then(|own| pack(&own)), Receivers::All)?)
            }
        }
    }

    /// The values of all processes, by rank, on rank 0; nothing on the others.
    ///
    /// # Errors
    /// A process failed or is gone.
    pub(crate) fn gather<T: Serialize + DeserializeOwned>(&mut self, own: T) -> Result<Vec<T>> {
        match &mut self.meetings {
            None => Ok(vec![own]),
            Some(meetings) => unpack_all(&meetings.meet(pack(&own), Receivers::Root)?),
        }
    }

    /// The bytes of all processes; like [`World::gather`].
    ///
    /// # Errors
    /// A process failed or is gone.
    fn gather_bytes(&mut self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match &mut self.meetings {
            None => Ok(vec![own]),
            Some(meetings) => meetings.meet(Ok(own), Receivers::Root),
        }
    }

    /// The processes' values for their envs, by rank, on rank 0. If all have the same envs, only
    /// the process's own value.
    ///
    /// # Errors
    /// A process failed or is gone.
    pub(crate) fn gather_envs<T: Serialize + DeserializeOwned>(
        &mut self,
        own: T,
    ) -> Result<Vec<T>> {
        if self.same_envs { Ok(vec![own]) } else { self.gather(own) }
    }

    /// The processes' bytes for their envs; like [`World::gather_envs`]. `own` runs only where its
    /// result is needed.
    ///
    /// # Errors
    /// A process failed or is gone, or `own` failed.
    pub(crate) fn gather_env_bytes(
        &mut self,
        own: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>> {
        match (self.same_envs, self.is_first()) {
            (false, _) => self.gather_bytes(own()?),
            (true, true) => Ok(vec![own()?]),
            (true, false) => Ok(vec![]),
        }
    }

    /// The tensors of all processes, whose names are distinct, as one dictionary on rank 0.
    ///
    /// # Errors
    /// A process failed or is gone.
    pub(crate) fn merge(&mut self, own: StateDict) -> Result<StateDict> {
        if self.meetings.is_none() {
            return Ok(own);
        }
        let path = Path::new("state of a rank's exchange");
        let own = safetensors::to_bytes(path, &own, &Metadata::new())?;
        let mut all = StateDict::default();
        for part in self.gather_bytes(own)? {
            all.0.extend(safetensors::from_bytes(path, &part)?.0.0);
        }
        Ok(all)
    }

    /// The value of rank 0, on all processes. `first` runs only on rank 0.
    ///
    /// # Errors
    /// `first` failed, or a process is gone.
    pub(crate) fn broadcast<T: Serialize + DeserializeOwned>(
        &mut self,
        first: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.meetings.is_none() {
            return first();
        }
        unpack(0, &self.broadcast_bytes(|| first().and_then(|value| pack(&value)))?)
    }

    /// The bytes of rank 0, on all processes; like [`World::broadcast`].
    ///
    /// # Errors
    /// `first` failed, or a process is gone.
    pub(crate) fn broadcast_bytes(
        &mut self,
        first: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let own = if self.is_first() { first() } else { Ok(vec![]) };
        match &mut self.meetings {
            None => own,
            Some(meetings) => Ok(meetings.meet(own, Receivers::All)?.swap_remove(0)),
        }
    }

    /// Returns `own` if all processes are well, and an error on every process otherwise.
    ///
    /// # Errors
    /// This process's error, or else the error of another rank.
    pub(crate) fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        match &mut self.meetings {
            None => own,
            Some(meetings) => meetings.agree(own),
        }
    }

    /// Ends the run in this process; an error gets the rank if that is not 0. Waits for the others,
    /// because `mpirun` ends all processes once one of them exits with an error.
    ///
    /// # Errors
    /// The error of the result.
    pub(crate) fn leave<T>(self, result: Result<T>) -> Result<T> {
        let rank = self.rank();
        let Some(meetings) = self.meetings else { return result };
        meetings.leave(result).map_err(|error| match error {
            error @ Error::OfRank { .. } => error,
            error if rank == 0 => error,
            error => RankFailure::from_error(&error).at(rank),
        })
    }
}

#[cfg(test)]
mod tests {
    use meristem_comm::Communicator;

    use super::*;

    /// Ranks as threads, which meet as processes do.
    fn worlds(ranks: usize) -> Vec<World> {
        let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
        let device = Device::open(DeviceId::Cpu(0), &options).unwrap();
        let all = Communicator::threads(ranks, &CommOptions::default()).unwrap().into_iter();
        let world = |all: Communicator| {
            let (stream, transport) = (device.stream("rank"), all.into_transport());
            let meetings = Some(Meetings::over(ProcessLink { transport, stream }));
            World { meetings, member: None, same_envs: false }
        };
        all.map(world).collect()
    }

    /// Runs `act` on each rank and returns the results.
    fn each<T: Send>(ranks: usize, act: impl Fn(&mut World) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let act = &act;
            let all =
                worlds(ranks).into_iter().map(|mut world| scope.spawn(move || act(&mut world)));
            all.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn bad(rank: usize) -> Error {
        Error::value("seed", rank, "another")
    }

    #[test]
    fn collectives_give_each_rank_its_values() {
        for ranks in 1..=3 {
            let message = |rank: usize| vec![rank as u8; 3 * rank];
            let all: Vec<Vec<u8>> = (0..ranks).map(message).collect();
            let heard = each(ranks, |world| {
                let rank = world.rank();
                let shared = world.all_gather(Ok(message(rank))).unwrap();
                let collected = world.gather(message(rank)).unwrap();
                assert_eq!(collected, world.gather_bytes(message(rank)).unwrap());
                let broadcast = world.broadcast(|| Ok((world_is_first(rank), 7.5))).unwrap();
                assert!(world.agree(Ok(rank)).unwrap() == rank);
                (shared, collected, broadcast, world.part(6))
            });
            for (rank, (shared, collected, broadcast, part)) in heard.into_iter().enumerate() {
                assert_eq!(shared, all);
                assert_eq!(collected, if rank == 0 { all.clone() } else { vec![] });
                assert_eq!(broadcast, (true, 7.5));
                assert_eq!(part, rank * 6 / ranks..(rank + 1) * 6 / ranks);
            }
        }
    }

    /// Panics on every rank but 0: only rank 0 evaluates the value of a broadcast.
    fn world_is_first(rank: usize) -> bool {
        assert_eq!(rank, 0);
        true
    }

    /// A failure reaches every other rank once, at its next meeting of any kind, and all ranks
    /// leave in order.
    #[test]
    fn a_failure_reaches_the_other_ranks_at_their_next_meeting() {
        let meetings: [fn(&mut World) -> Result<()>; 4] = [
            |world| world.all_gather(Ok(1)).map(drop),
            |world| world.gather(vec![0.5]).map(drop),
            |world| world.broadcast(|| Ok(2)).map(drop),
            |world| world.agree(Ok(())),
        ];
        for meeting in meetings {
            let errors = each(3, |world| {
                let result = match world.rank() {
                    1 => Err(bad(1)),
                    _ => meeting(world),
                };
                let agreed = world.agree(result).unwrap_err();
                std::mem::replace(world, World::alone()).leave::<()>(Err(agreed)).unwrap_err()
            });
            for error in errors {
                assert!(matches!(error, Error::OfRank { rank: 1, .. }), "{error:?}");
                assert_eq!(error.to_string(), format!("rank 1: {}", bad(1)));
                assert_eq!((error.exit_code(), error.remedy()), (2, bad(1).remedy()));
            }
        }
    }

    /// The error of a rank that failed by itself takes precedence over the errors that follow from
    /// it; each of several failed ranks keeps its own.
    #[test]
    fn the_cause_of_a_failure_is_named() {
        let lonely = || meristem_comm::Error::RankGone { operation: "x", rank: 2, reason: "y" };
        let errors = each(3, |world| {
            let own = if world.rank() == 2 { bad(2) } else { Error::from(lonely()) };
            world.agree::<()>(Err(own)).unwrap_err()
        });
        let [reported @ .., own] = &errors[..] else { panic!("{errors:?}") };
        for error in reported {
            assert!(matches!(error, Error::OfRank { rank: 2, .. }), "{error:?}");
            assert_eq!(error.to_string(), format!("rank 2: {}", bad(2)));
        }
        assert!(matches!(own, Error::Value { .. }), "{own:?}");
        assert_eq!(own.to_string(), bad(2).to_string());
        let errors = each(2, |world| world.agree::<()>(Err(bad(world.rank()))).unwrap_err());
        for (rank, error) in errors.iter().enumerate() {
            assert!(matches!(error, Error::Value { .. }), "{error:?}");
            assert_eq!(error.to_string(), bad(rank).to_string());
        }
    }

    #[test]
    fn a_rank_that_is_gone_or_does_something_else_is_named() {
        let errors = each(3, |world| match world.rank() {
            1 => None,
            _ => Some(world.all_gather(Ok(1)).unwrap_err()),
        });
        assert!(errors[1].is_none());
        for error in errors.into_iter().flatten() {
            let gone =
                matches!(error, Error::Ranks(meristem_comm::Error::RankGone { rank: 1, .. }));
            assert!(gone && error.to_string().contains("rank 1 is gone"), "{error:?}");
        }
    }
}

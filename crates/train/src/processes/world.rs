//! The processes of a run: who else there is, and how they come together.
//!
//! With `comm = "mpi"` every process is one rank and has its part of the envs; otherwise there is one, which has all.
//! All processes do the same steps. Where one needs the others, all *meet*: each says something, or that it has failed,
//! and then all of them know. So a failure is heard of wherever the others are; a process that is gone is named by the
//! transport. Run folder, console and trace are the first rank's alone. What ranks say is bytes and small beside what
//! they compute; it goes over a group and a device of its own, apart from the policy's gradients and the envs.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use meristem_comm::{Call, CommOptions, Communicator, Parcel, Transport};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};
use meristem_nn::StateDict;
use meristem_nn::safetensors::{self, Metadata};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::checkpoint::Identity;
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::settings::CommKind;

/// All processes of a run, seen from one of them.
pub(crate) struct World {
    /// To the others, if there are any.
    link: Option<Link>,
    /// All have the same envs, of which each trains its part of the samples; otherwise each has envs of its own.
    alike: bool,
}

/// A process' link to the others.
struct Link {
    transport: Box<dyn Transport>,
    /// Of a device that nothing else is done on.
    stream: Stream,
    /// Its place among those who exchange gradients, until the policy has it.
    member: Option<Communicator>,
    /// All know that one of them has failed.
    failed: bool,
}

/// What a process is about to do.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) identity: Identity,
    /// What it does it with: names, and what tells one from another.
    pub(crate) inputs: Vec<(String, String)>,
}

/// How a process comes to a meeting, and how much it has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Opening {
    state: u64,
    bytes: u64,
}

/// It is well.
const WELL: u64 = 0;
/// It has failed.
const FAILED: u64 = 1;
/// It has failed for what became of another.
const LEFT_ALONE: u64 = 2;

/// An error on its way to the other processes.
#[derive(Serialize, Deserialize)]
struct Failure {
    problem: String,
    remedy: Option<String>,
    exit_code: u8,
}

/// Who hears what is said in a meeting.
#[derive(Clone, Copy, PartialEq)]
enum Heard {
    ByAll,
    ByTheFirst,
}

impl World {
    /// One process.
    pub(crate) fn alone() -> Self {
        Self { link: None, alike: false }
    }

    /// The processes of a run whose ranks are these. Waits for all of them to start.
    ///
    /// # Errors
    /// No MPI in this build; a second run in this process; processes that were started together and would not hear of
    /// each other.
    pub(crate) fn join(comm: CommKind, deadline: Duration) -> Result<Self> {
        if comm == CommKind::Threads {
            Self::check_alone("mpi: each would be a run of its own (`--comm mpi` makes them one)")?;
            return Ok(Self::alone());
        }
        let mut all = Communicator::mpi(&CommOptions { deadline })?;
        if all.size() == 1 {
            let expected =
                "threads: this program was built with another MPI library than that of mpirun";
            Self::check_alone(expected)?;
            return Ok(Self::alone());
        }
        let member = Some(all.split(0, 0)?);
        let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
        let stream = Device::open(DeviceId::Cpu(0), &options)?.stream("ranks");
        let transport = all.into_transport();
        let link = Some(Link { transport, stream, member, failed: false });
        Ok(Self { link, alike: false })
    }

    /// Whether no others were started together with this process, by what the MPI libraries' `mpirun` leave in the
    /// environment; `expected` is the remedy.
    ///
    /// # Errors
    /// [`Error::Value`].
    pub(crate) fn check_alone(expected: &str) -> Result<()> {
        let size = |name| std::env::var(name).ok()?.parse::<usize>().ok();
        // Open MPI, MPICH and its kin, and what both of them set.
        let sizes =
            ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"].into_iter().filter_map(size);
        match sizes.max().filter(|size| *size > 1) {
            Some(size) => {
                let got = format!(
                    "{size} processes that mpirun started, which would not hear of each other"
                );
                Err(Error::value("comm", got, expected))
            }
            None => Ok(()),
        }
    }

    /// Number of this process.
    pub(crate) fn rank(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.transport.rank())
    }

    /// Number of processes.
    pub(crate) fn size(&self) -> usize {
        self.link.as_ref().map_or(1, |link| link.transport.size())
    }

    /// Whether this process writes the run folder and tells of the run.
    pub(crate) fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Whether all have the same envs.
    pub(crate) fn is_alike(&self) -> bool {
        self.alike
    }

    /// The envs of this process.
    pub(crate) fn part(&self, envs: usize) -> Range<usize> {
        if self.alike {
            return 0..envs;
        }
        let each = envs / self.size();
        self.rank() * each..(self.rank() + 1) * each
    }

    /// The settings, with as many ranks as there are processes.
    ///
    /// # Errors
    /// [`Error::Value`]: another number was asked for, or the envs cannot be dealt out to so many.
    pub(crate) fn settle(&mut self, config: &TrainConfig) -> Result<TrainConfig> {
        let mut config = config.clone();
        self.alike = config.data_parallel;
        if config.comm == CommKind::Mpi {
            let size = self.size();
            if let Some(ranks) = config.ranks.filter(|ranks| *ranks != size) {
                let expected = format!(
                    "{size}, the number of processes: start {ranks} of them (`mpirun -n {ranks}`), or leave it out"
                );
                return Err(Error::value("ranks", ranks, expected));
            }
            config.ranks = Some(size);
            config.validate()?;
        }
        Ok(config)
    }

    /// The members of the group that exchanges gradients over so many ranks, as far as they are in this process.
    /// Once.
    ///
    /// # Errors
    /// None for at least one rank.
    pub(crate) fn members(
        &mut self,
        ranks: usize,
        options: &CommOptions,
    ) -> Result<Vec<Communicator>> {
        match &mut self.link {
            None => Ok(Communicator::threads(ranks, options)?),
            Some(link) => Ok(link.member.take().into_iter().collect()),
        }
    }

    /// Whether all processes are about to do the same: `own` is what this one is about to do, which is not asked where
    /// there is one.
    ///
    /// # Errors
    /// [`Error::OfRank`] names the rank and the setting.
    pub(crate) fn agree_on(&mut self, own: impl FnOnce() -> Result<Plan>) -> Result<()> {
        if self.link.is_none() {
            return Ok(());
        }
        let all = self.share(own())?;
        let Some((first, others)) = all.split_first() else { return Ok(()) };
        let differs = |(rank, other)| {
            let problem = difference(first, other)?;
            let remedy = Some("start all with the same settings, data and kernels".to_string());
            Some(Failure { problem, remedy, exit_code: 2 }.at(rank))
        };
        (1..).zip(others).find_map(differs).map_or(Ok(()), Err)
    }

    /// What every process says, by rank.
    ///
    /// # Errors
    /// One has failed, or is gone.
    pub(crate) fn share<T: Serialize + DeserializeOwned>(
        &mut self,
        own: Result<T>,
    ) -> Result<Vec<T>> {
        match &mut self.link {
            None => own.map(|own| vec![own]),
            Some(link) => unpack_all(&link.meet(own.and_then(|own| pack(&own)), Heard::ByAll)?),
        }
    }

    /// What every process says, by rank, to the first; the others hear nothing.
    ///
    /// # Errors
    /// One has failed, or is gone.
    pub(crate) fn collect<T: Serialize + DeserializeOwned>(&mut self, own: T) -> Result<Vec<T>> {
        match &mut self.link {
            None => Ok(vec![own]),
            Some(link) => unpack_all(&link.meet(pack(&own), Heard::ByTheFirst)?),
        }
    }

    /// As [`World::collect`], of bytes.
    ///
    /// # Errors
    /// One has failed, or is gone.
    pub(crate) fn collect_bytes(&mut self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        match &mut self.link {
            None => Ok(vec![own]),
            Some(link) => link.meet(Ok(own), Heard::ByTheFirst),
        }
    }

    /// What there is of every env, to the first, by rank: each process has that of its own envs. Where all have the same,
    /// nobody needs to hear it.
    ///
    /// # Errors
    /// One has failed, or is gone.
    pub(crate) fn of_envs<T: Serialize + DeserializeOwned>(&mut self, own: T) -> Result<Vec<T>> {
        if self.alike { Ok(vec![own]) } else { self.collect(own) }
    }

    /// As [`World::of_envs`], of bytes, which are made where they are needed.
    ///
    /// # Errors
    /// One has failed, or is gone; bytes that cannot be made.
    pub(crate) fn bytes_of_envs(
        &mut self,
        own: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>> {
        match (self.alike, self.is_first()) {
            (false, _) => self.collect_bytes(own()?),
            (true, true) => Ok(vec![own()?]),
            (true, false) => Ok(vec![]),
        }
    }

    /// The tensors of all processes, which have names of their own, to the first.
    ///
    /// # Errors
    /// One has failed, or is gone.
    pub(crate) fn unite(&mut self, own: StateDict) -> Result<StateDict> {
        if self.link.is_none() {
            return Ok(own);
        }
        let path = Path::new("what a rank has not sent");
        let own = safetensors::to_bytes(path, &own, &Metadata::new())?;
        let mut all = StateDict::default();
        for part in self.collect_bytes(own)? {
            all.0.extend(safetensors::from_bytes(path, &part)?.0.0);
        }
        Ok(all)
    }

    /// What the first rank has to say, to all.
    ///
    /// # Errors
    /// It has failed, or one is gone.
    pub(crate) fn tell<T: Serialize + DeserializeOwned>(
        &mut self,
        first: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.link.is_none() {
            return first();
        }
        unpack(0, &self.tell_bytes(|| first().and_then(|said| pack(&said)))?)
    }

    /// As [`World::tell`], of bytes.
    ///
    /// # Errors
    /// The first rank has failed, or one is gone.
    pub(crate) fn tell_bytes(
        &mut self,
        first: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let own = if self.is_first() { first() } else { Ok(vec![]) };
        match &mut self.link {
            None => own,
            Some(link) => Ok(link.meet(own, Heard::ByAll)?.swap_remove(0)),
        }
    }

    /// This process' result, if all have one. If one has failed, all have; where all know of it, they do not meet.
    ///
    /// # Errors
    /// This process', or one that another has failed with.
    pub(crate) fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        let Some(link) = &mut self.link else { return own };
        match own {
            Ok(value) => link.meet(Ok(vec![]), Heard::ByAll).map(|_| value),
            Err(error) if link.failed => Err(error),
            Err(error) => {
                // A meeting to which one comes that has failed is never well.
                link.meet(Err(error), Heard::ByAll).and_then(|_| Err(garbled(0, &"nothing")))
            }
        }
    }

    /// Ends the run in this process, with its error named where it is not the first's. Waits for the others: `mpirun`
    /// ends them all with the first one that ends by an error.
    ///
    /// # Errors
    /// That of the result.
    pub(crate) fn leave<T>(mut self, result: Result<T>) -> Result<T> {
        let rank = self.rank();
        let result = match result {
            Err(error) => self.agree(Err(error)),
            fine => fine,
        };
        if let Some(link) = &mut self.link
            && !result.as_ref().is_err_and(Error::is_of_a_late_rank)
        {
            // Whoever is gone by now is no reason to fail.
            let _ = link.transport.barrier(&call());
        }
        result.map_err(|error| match error {
            error @ Error::OfRank { .. } => error,
            error if rank == 0 => error,
            error => Failure::of(&error).at(rank),
        })
    }
}

impl Link {
    /// All come together: each says `own`, and hears what all say, by rank, or nothing.
    ///
    /// # Errors
    /// That in `own`; another rank's; the transport's.
    fn meet(&mut self, own: Result<Vec<u8>>, heard: Heard) -> Result<Vec<Vec<u8>>> {
        let (said, error) = match own {
            Ok(said) => (said, None),
            // All have waited for it. They would again.
            Err(error) if error.is_of_a_late_rank() => {
                self.failed = true;
                return Err(error);
            }
            Err(error) => (pack(&Failure::of(&error))?, Some(error)),
        };
        let state = match &error {
            None => WELL,
            Some(error) if error.is_of_another_rank() => LEFT_ALONE,
            Some(_) => FAILED,
        };
        let met = self.open(Opening { state, bytes: said.len() as u64 }).and_then(|openings| {
            let well = openings.iter().all(|opening| opening.state == WELL);
            let heard = if well { heard } else { Heard::ByAll };
            let speaks = |opening: &Opening| well || opening.state != WELL;
            let bytes = |opening| if speaks(opening) { opening.bytes as usize } else { 0 };
            let bytes: Vec<usize> = openings.iter().map(bytes).collect();
            Ok((openings, self.say(&said, &bytes, heard)?))
        });
        let (openings, all) = match met {
            Ok(met) => met,
            Err(gone) => {
                self.failed = true;
                return Err(error.unwrap_or(gone));
            }
        };
        let rank_of = |state| openings.iter().position(|opening| opening.state == state);
        // Who failed says more than those that it left.
        let Some(rank) = rank_of(FAILED).or(rank_of(LEFT_ALONE)) else { return Ok(all) };
        self.failed = true;
        match error {
            Some(error) if state == FAILED || state == openings[rank].state => Err(error),
            _ => Err(unpack::<Failure>(rank, &all[rank])?.at(rank)),
        }
    }

    /// How everybody comes to this meeting, by rank.
    fn open(&mut self, own: Opening) -> Result<Vec<Opening>> {
        let own = [own.state.to_le_bytes(), own.bytes.to_le_bytes()].concat();
        let all = self.say(&own, &vec![own.len(); self.transport.size()], Heard::ByAll)?;
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let opening = |bytes: &Vec<u8>| {
            let (state, bytes) = bytes.split_at(8);
            Opening { state: number(state), bytes: number(bytes) }
        };
        Ok(all.iter().map(opening).collect())
    }

    /// What everybody says, which is of so many bytes, by rank.
    fn say(&mut self, own: &[u8], bytes: &[usize], heard: Heard) -> Result<Vec<Vec<u8>>> {
        let (me, all) = (self.transport.rank(), 0..self.transport.size());
        let hears = |rank: usize| heard == Heard::ByAll || rank == 0;
        let mut sends = vec![];
        if bytes[me] > 0 {
            let tensor = Tensor::from_slice(&self.stream, own, [own.len()], Owner::Collectives)?;
            let peers = all.clone().filter(|peer| *peer != me && hears(*peer));
            sends = peers.map(|peer| Parcel::new(peer, &tensor)).collect::<Result<_, _>>()?;
        }
        let (mut receives, mut places) = (vec![], vec![]);
        for peer in all.clone().filter(|peer| hears(me) && *peer != me && bytes[*peer] > 0) {
            let tensor = Tensor::zeros(&self.stream, [bytes[peer]], DType::U8, Owner::Collectives)?;
            receives.push(Parcel::new(peer, &tensor)?);
            places.push((peer, tensor));
        }
        self.transport.exchange(&call(), &self.stream, &sends, &receives)?;
        if !hears(me) {
            return Ok(vec![]);
        }
        let mut heard = vec![vec![]; all.len()];
        heard[me] = own.to_vec();
        for (peer, tensor) in places {
            heard[peer] = tensor.to_vec::<u8>()?;
        }
        Ok(heard)
    }
}

impl Failure {
    fn of(error: &Error) -> Self {
        let (problem, remedy) = (error.to_string(), error.remedy());
        Self { problem, remedy, exit_code: error.exit_code() }
    }

    fn at(self, rank: usize) -> Error {
        let Self { problem, remedy, exit_code } = self;
        Error::OfRank { rank, problem, remedy, exit_code }
    }
}

/// How every meeting is known to the transport, which names it in its errors.
fn call() -> Call {
    Call::of("train")
}

fn pack(said: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    ciborium::into_writer(said, &mut bytes).map_err(|error| garbled(0, &error))?;
    Ok(bytes)
}

fn unpack<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T> {
    ciborium::from_reader(bytes).map_err(|error| garbled(rank, &error))
}

fn unpack_all<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>> {
    all.iter().enumerate().map(|(rank, bytes)| unpack(rank, bytes)).collect()
}

fn garbled(rank: usize, error: &impl ToString) -> Error {
    let problem = format!("what it says cannot be read ({})", error.to_string());
    let remedy = Some("start the same program everywhere".to_string());
    Failure { problem, remedy, exit_code: 1 }.at(rank)
}

/// What `other` is about to do otherwise than the first rank.
fn difference(first: &Plan, other: &Plan) -> Option<String> {
    let both = first.inputs.iter().zip(&other.inputs);
    let differs = both.into_iter().find(|(first, other)| first != other);
    difference_of_runs(&first.identity, &other.identity)
        .or_else(|| differs.map(|((name, _), _)| format!("its {name} is not that of rank 0")))
}

fn difference_of_runs(first: &Identity, other: &Identity) -> Option<String> {
    let missing = |of: &Identity, from: &Identity| {
        let lines: Vec<&str> = from.config.lines().collect();
        let mut own = of.config.lines();
        own.find(|line| !lines.contains(line)).map(str::to_string)
    };
    match (missing(other, first), missing(first, other)) {
        (Some(other), Some(first)) => return Some(format!("it has `{other}`, rank 0 `{first}`")),
        (Some(line), None) | (None, Some(line)) => {
            return Some(format!("`{line}` is not set on it and on rank 0 alike"));
        }
        (None, None) => {}
    }
    let (own, isa) = (&other.instruction_set, &first.instruction_set);
    if own != isa {
        let how = "MERISTEM_ISA sets one for all";
        return Some(format!("its kernels are {own}, those of rank 0 {isa}: {how}"));
    }
    (other.dataset != first.dataset).then(|| "its data are others than those of rank 0".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use meristem_comm::Communicator;

    /// Ranks of threads, which meet as processes do.
    fn worlds(ranks: usize) -> Vec<World> {
        let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
        let device = Device::open(DeviceId::Cpu(0), &options).unwrap();
        let all = Communicator::threads(ranks, &CommOptions::default()).unwrap().into_iter();
        let world = |all: Communicator| {
            let (stream, transport) = (device.stream("rank"), all.into_transport());
            let link = Some(Link { transport, stream, member: None, failed: false });
            World { link, alike: false }
        };
        all.map(world).collect()
    }

    /// What each rank gets of it.
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
    fn what_is_said_is_heard_by_whom_it_is_for() {
        for ranks in 1..=3 {
            let said = |rank: usize| vec![rank as u8; 3 * rank];
            let all: Vec<Vec<u8>> = (0..ranks).map(said).collect();
            let heard = each(ranks, |world| {
                let rank = world.rank();
                let shared = world.share(Ok(said(rank))).unwrap();
                let collected = world.collect(said(rank)).unwrap();
                assert_eq!(collected, world.collect_bytes(said(rank)).unwrap());
                let told = world.tell(|| Ok((world_is_first(rank), 7.5))).unwrap();
                assert!(world.agree(Ok(rank)).unwrap() == rank);
                (shared, collected, told, world.part(6))
            });
            for (rank, (shared, collected, told, part)) in heard.into_iter().enumerate() {
                assert_eq!(shared, all);
                assert_eq!(collected, if rank == 0 { all.clone() } else { vec![] });
                assert_eq!(told, (true, 7.5));
                assert_eq!(part, rank * 6 / ranks..(rank + 1) * 6 / ranks);
            }
        }
    }

    /// The first rank alone is asked.
    fn world_is_first(rank: usize) -> bool {
        assert_eq!(rank, 0);
        true
    }

    /// Wherever the others are when a rank fails: they hear of it there, once, and still part in order.
    #[test]
    fn a_failure_is_heard_of_where_the_others_are() {
        let meetings: [fn(&mut World) -> Result<()>; 4] = [
            |world| world.share(Ok(1)).map(drop),
            |world| world.collect(vec![0.5]).map(drop),
            |world| world.tell(|| Ok(2)).map(drop),
            |world| world.agree(Ok(())),
        ];
        for meeting in meetings {
            let errors = each(3, |world| {
                let result = match world.rank() {
                    1 => Err(bad(1)),
                    _ => meeting(world),
                };
                let agreed = world.agree(result).unwrap_err();
                let link = world.link.take();
                World { link, alike: false }.leave::<()>(Err(agreed)).unwrap_err()
            });
            for error in errors {
                assert_eq!(error.to_string(), format!("rank 1: {}", bad(1)));
                assert_eq!((error.exit_code(), error.remedy()), (2, bad(1).remedy()));
            }
        }
    }

    /// Who failed says more than those that it left, and each of several says its own.
    #[test]
    fn the_cause_of_a_failure_is_named() {
        let lonely = || meristem_comm::Error::RankGone { operation: "x", rank: 2, reason: "y" };
        let errors = each(3, |world| {
            let own = if world.rank() == 2 { bad(2) } else { Error::from(lonely()) };
            world.agree::<()>(Err(own)).unwrap_err().to_string()
        });
        let told = format!("rank 2: {}", bad(2));
        assert_eq!(errors, [told.clone(), told, bad(2).to_string()]);
        let errors =
            each(2, |world| world.agree::<()>(Err(bad(world.rank()))).unwrap_err().to_string());
        assert_eq!(errors, [bad(0).to_string(), bad(1).to_string()]);
    }

    #[test]
    fn a_rank_that_is_gone_or_does_something_else_is_named() {
        let errors = each(3, |world| match world.rank() {
            1 => String::new(),
            _ => world.share(Ok(1)).unwrap_err().to_string(),
        });
        assert!(errors[0].contains("rank 1 is gone") && errors[2] == errors[0], "{errors:?}");
        let errors = each(3, |world| {
            let config = format!("a = 1\nseed = {}\n", world.rank() / 2);
            let (dataset, instruction_set) = (Default::default(), "portable".into());
            let identity = Identity { config, dataset, instruction_set };
            world.agree_on(|| Ok(Plan { identity, inputs: vec![] })).unwrap_err().to_string()
        });
        let expected = "rank 2: it has `seed = 1`, rank 0 `seed = 0`";
        assert!(errors.iter().all(|error| error == expected), "{errors:?}");
        let errors = each(2, |world| {
            let (config, dataset, instruction_set) = Default::default();
            let identity = Identity { config, dataset, instruction_set };
            let inputs =
                vec![("version".into(), "1".into()), ("data".into(), world.rank().to_string())];
            world.agree_on(|| Ok(Plan { identity, inputs })).unwrap_err().to_string()
        });
        assert_eq!(errors, ["rank 1: its data is not that of rank 0"; 2]);
    }
}

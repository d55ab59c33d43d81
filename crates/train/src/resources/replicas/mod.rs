//! One host on several ranks (`data_parallel`). Each rank has a replica and trains it on its part
//! of every batch.
//!
//! Rank 0 is the leader. Its network is the env's own: it is measured, grown, rolled back and saved
//! by the same code as an env without replicas. At the start of a step the followers copy graph,
//! weights, statistics and, unless they train locally, the optimiser's state from it: within a
//! device in its memory, from another device through host memory.
//!
//! **Devices**: ranks that are threads may be on several devices (`devices`). All have the order of
//! samples of rank 0's device, so the bits are those of one device. Between devices everything
//! passes through host memory, and the inner loop waits for it.
//!
//! **Batches**: a batch of n samples is distributed over the ranks as over envs
//! ([`order`](meristem_data::order)). Rank r has n_r samples, and g_r is the gradient of their
//! mean loss. Before the optimiser's step it becomes `1/R Σ_r (n_r R/n) g_r`, the gradient of the
//! whole batch, as far as the exchange sends it; unsent elements are kept, by rank and parameter,
//! for the next batch. If the exchange sends the whole gradient, the result is clipped; otherwise
//! each rank clips before the exchange ([`trainer`]). So `batch` is the size of the whole batch,
//! and the number of ranks only changes the order of additions, the samples that batch norm sees
//! together, and the draws of dropout. A rank without samples, as may happen in a small last batch,
//! contributes zeros.
//!
//! **Local training** (`diloco:H`) exchanges no gradients: each rank trains on its part of every
//! batch with an optimiser of its own, and clips its own gradient. After every H batches and at the
//! end of the epoch an outer step averages the differences of weights
//! ([`meristem_comm::OuterStep`]). So after an epoch all ranks have one network again, which is
//! measured, grown and saved; the synchronised weights are those at the start of a step, so a
//! checkpoint needs no copy of them. A rank without samples in a small last batch makes its step
//! with a gradient of zeros, so that all ranks count equally many steps.
//!
//! **Batch norm** normalises each rank's part on its own, as PyTorch's DistributedDataParallel
//! does. Running statistics are averaged over the ranks at the end of the epoch. They are
//! recursions that are linear in the batch's statistics, `s ← (1−m)s + m b_r`, so the result equals
//! averaging after each batch: the running mean is the mean of whole batches if all ranks have
//! equally many samples, and the running variance is the mean of the replicas' variances. Training
//! does not read them.
//!
//! **Consistency**: after an epoch the replicas' weights, statistics and, unless they are local,
//! optimisers are hashed on the device. The hashes are gathered with the other metrics and read
//! back with them; a difference ends the run.
//!
//! **Processes**: each process has the env itself and leads one rank. All measure, decide, grow and
//! roll back from the same numbers; rank 0 writes the results. An exchange over MPI waits for the
//! device, in the inner loop too, and `hot_path` in the summary counts these waits. Between GPUs
//! over NCCL it does not wait for the device.
//!
//! Each rank's inner loop runs in a separate thread, because an exchange waits for the other
//! ranks' calls. Between ranks of one process on one device an exchange does not wait for the
//! device. If the program computes the loss, the ranks of a process wait for the device and call
//! the program's function one at a time, each for its part of a batch.

mod exchange;
mod metrics;
#[cfg(test)]
mod tests;
mod trainer;

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};
use std::thread;

use meristem_comm::{Communicator, ExchangeState};
use meristem_data::order::EpochOrder;
use meristem_data::{Dataset, GatherBatches, GatherConfig};
use meristem_device::{HotScope, Stream, Tensor};
use meristem_nn::{HostData, HostTensor, Metrics, Network, StateDict};

use self::exchange::LazyExchange;
use self::metrics::merge;
pub(crate) use self::trainer::Epoch;
use self::trainer::Trainer;
use crate::config::{STATISTICS_BATCHES, TrainConfig};
use crate::error::{Error, Result};
use crate::own_loss::ProgramLoss;
use crate::resources::open_devices::OpenDevices;
use crate::resources::serving::{PassBatches, batch_sizes};

/// Parts of an epoch that the threads of all ranks use.
pub(crate) struct SharedEpoch<'a> {
    /// Opens the hot scopes around the inner loop, for the calling thread.
    pub(crate) train_scopes: &'a (dyn Fn() -> Vec<HotScope> + Sync),
    /// Opens the hot scopes around the passes that recompute running statistics.
    pub(crate) statistics_scopes: &'a (dyn Fn(PassBatches) -> Vec<HotScope> + Sync),
    /// The loss of the program, if it computes one, which one rank calls at a time.
    pub(crate) loss: Option<Mutex<&'a mut ProgramLoss>>,
}

/// Ranks of this process that train one host.
pub(crate) struct Replicas {
    leader: Trainer,
    followers: Vec<ReplicaRank>,
}

/// Rank with a replica of the leader's network.
struct ReplicaRank {
    trainer: Trainer,
    stream: Stream,
    gather: GatherBatches,
    /// `None` before the first step.
    network: Option<Network>,
}

impl Replicas {
    /// The ranks of this process, each on its device. `gather` is the gather of all ranks together.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn new(
        config: &TrainConfig,
        devices: &OpenDevices,
        gather: &GatherConfig,
        datasets: &[Arc<Dataset>],
        members: Vec<Communicator>,
    ) -> Result<Self> {
        let trainer = |comm: Communicator| Trainer {
            rank: comm.rank(),
            ranks: comm.size(),
            comm: Some(comm),
            kind: config.exchange,
            // Unless whole gradients are exchanged, statistics are always recomputed; `trainer` has
            // the reason.
            statistics_batches: match config.statistics_batches {
                0 if !config.exchange.sends_whole_gradients() => STATISTICS_BATCHES,
                batches => batches,
            },
            exchange: LazyExchange::default(),
            optimiser: None,
            metrics: None,
        };
        let mut trainers = members.into_iter().map(trainer);
        let leader = trainers.next().ok_or_else(|| Error::value("ranks", 0, "at least 1"))?;
        let follower = |trainer: Trainer| {
            let stream = devices.of_rank(trainer.rank).stream(&format!("rank {}", trainer.rank));
            let served = Some(trainer.rank..trainer.rank + 1);
            let config = GatherConfig { served, ..gather.clone() };
            let gather = GatherBatches::new(&config, datasets, std::slice::from_ref(&stream))?;
            Ok(ReplicaRank { trainer, stream, gather, network: None })
        };
        Ok(Self { leader, followers: trainers.map(follower).collect::<Result<_>>()? })
    }

    /// Drops unsent gradients and replicas, because the optimiser is reset or the host is replaced.
    pub(crate) fn forget(&mut self) {
        self.followers.iter_mut().for_each(|follower| follower.network = None);
        for trainer in self.trainers() {
            (trainer.exchange, trainer.optimiser) = (LazyExchange::default(), None);
        }
    }

    /// Leaves the other processes, which notice it at once instead of waiting.
    pub(crate) fn leave(&mut self) {
        self.trainers().for_each(|trainer| trainer.comm = None);
    }

    fn trainers(&mut self) -> impl Iterator<Item = &mut Trainer> {
        let followers = self.followers.iter_mut().map(|follower| &mut follower.trainer);
        std::iter::once(&mut self.leader).chain(followers)
    }

    /// Copies the leader's network to all replicas, and allocates memory for epochs of `batches`
    /// batches, of which the leader's part has one of the given sizes. Waits for the device if the
    /// host's parameters have changed, after a resume of local training, and in every call if a
    /// replica is on another device than the leader.
    ///
    /// # Errors
    /// Out of memory, a device failure.
    pub(crate) fn open(
        &mut self,
        network: &mut Network,
        sizes: &[usize],
        batches: usize,
    ) -> Result<()> {
        for follower in &mut self.followers {
            let replica = match &mut follower.network {
                Some(replica) => replica,
                none => none.insert(network.replica(&follower.stream)?),
            };
            match follower.trainer.kind.local_steps {
                Some(_) => replica.follow_weights(network)?,
                None => replica.follow(network)?,
            }
            let sizes = batch_sizes(&follower.gather, follower.trainer.rank);
            follower.trainer.open(replica, &sizes, batches)?;
        }
        self.leader.open(network, sizes, batches)
    }

    /// Runs the inner loops of an epoch. `observed` is called with the leader's network after every
    /// batch. Waits for a device only for a loss that the program computes, for a host buffer of
    /// streamed images, and for exchanges between several devices or processes, except between GPUs
    /// over NCCL.
    ///
    /// # Errors
    /// An error of a rank, which ends the other ranks as well.
    pub(crate) fn train_epoch(
        &mut self,
        epoch: u64,
        gather: &mut GatherBatches,
        network: &mut Network,
        shared: &SharedEpoch<'_>,
        observed: &mut dyn FnMut(&Network) -> Result<()>,
    ) -> Result<Epoch> {
        let Self { leader, followers } = self;
        gather.start_epoch(epoch)?;
        followers.iter_mut().try_for_each(|follower| follower.gather.start_epoch(epoch))?;
        let all: Vec<Result<Epoch>> = thread::scope(|threads| {
            let follow = |follower: &'_ mut ReplicaRank| {
                let ReplicaRank { trainer, gather, network, .. } = follower;
                let network = network.as_mut().ok_or_else(|| trainer.not_open())?;
                trainer.train(gather, network, shared, &mut |_| Ok(()))
            };
            let others: Vec<_> = followers
                .iter_mut()
                .map(|follower| threads.spawn(move || follow(follower)))
                .collect();
            let own = leader.train(gather, network, shared, observed);
            let joined = others.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => resume_unwind(panic),
            });
            std::iter::once(own).chain(joined).collect()
        });
        let mut whole = Epoch { batches: 0, counts: vec![], sent_bytes: 0 };
        for epoch in first_cause(all)? {
            whole.batches = whole.batches.max(epoch.batches);
            whole.counts.extend(epoch.counts);
            whole.sent_bytes += epoch.sent_bytes;
        }
        Ok(whole)
    }

    /// Metrics of the epoch over all ranks. Losses, numbers of samples and sums of scores are sums
    /// over the ranks; everything else is the leader's, and equal on all ranks. Only gradient norms
    /// differ between ranks if each rank clips its own gradient, as it does unless whole gradients
    /// are exchanged. Measurements since the end of the epoch are the leader's. One read-back.
    ///
    /// # Errors
    /// [`Error::ReplicasDiffer`], or a device failure.
    pub(crate) fn read(
        &self,
        devices: &OpenDevices,
        order: &EpochOrder,
        network: &Network,
    ) -> Result<Metrics> {
        let of_ranks = self.leader.metrics(network)?;
        let tensors: Vec<&Tensor> = std::iter::once(network.metrics()).chain(&of_ranks).collect();
        let mut all = devices.read_metrics(&tensors)?;
        let own = all.remove(0);
        if all.iter().any(|metrics| metrics.fingerprint != all[0].fingerprint) {
            let texts: Vec<String> =
                all.iter().map(|m| format!("{:016x}", m.fingerprint)).collect();
            return Err(Error::ReplicasDiffer { fingerprints: texts.join(", ") });
        }
        let merged = merge(&all, |batch, rank| order.part(batch, rank).len() as f64);
        Ok(Metrics { eval: own.eval, non_finite: own.non_finite, ..merged })
    }

    /// State for a checkpoint: the exchange of each rank, and in local training also the optimisers
    /// of all ranks but 0. `leader` is the optimiser's state of the env's network. Waits for the
    /// device.
    ///
    /// # Errors
    /// A device failure.
    pub(crate) fn save(&mut self, leader: &StateDict) -> Result<StateDict> {
        let mut tensors = StateDict::default();
        let own = self.leader.own_optimiser(|| Ok(Some(leader.clone())))?;
        put_rank(&mut tensors, &self.leader, own)?;
        for ReplicaRank { trainer, network, .. } in &self.followers {
            let own = trainer.own_optimiser(|| {
                network.as_ref().map(|network| Ok(network.momentum_dict()?)).transpose()
            })?;
            put_rank(&mut tensors, trainer, own)?;
        }
        Ok(tensors)
    }

    /// Whether `tensors` has the state of this rank: at least its number of exchanges.
    pub(crate) fn has_saved(tensors: &StateDict, rank: usize) -> bool {
        tensors.get(&step_name(rank)).is_some()
    }

    /// Restores the tensors from [`Replicas::save`].
    pub(crate) fn restore(&mut self, tensors: &StateDict) {
        for trainer in self.trainers() {
            let step = match tensors.get(&step_name(trainer.rank)).map(|t| &t.data) {
                Some(HostData::I64(step)) => step.first().copied().unwrap_or(0) as u64,
                _ => 0,
            };
            let prefix = optimiser_name(trainer.rank, "");
            let optimiser = tensors.iter().filter_map(|(name, tensor)| {
                Some((name.strip_prefix(&prefix)?.to_owned(), tensor.clone()))
            });
            let optimiser = StateDict(optimiser.collect());
            trainer.optimiser = (!optimiser.0.is_empty()).then_some(optimiser);
            let prefix = format!("{}.", trainer.rank);
            let parts = tensors.iter().filter_map(|(name, tensor)| match &tensor.data {
                HostData::U8(bytes) => Some((name.strip_prefix(&prefix)?, &bytes[..])),
                _ => None,
            });
            trainer.exchange = LazyExchange::Saved(ExchangeState::from_parts(step, parts));
        }
    }
}

/// Name of a rank's number of exchanges in a checkpoint.
fn step_name(rank: usize) -> String {
    format!("{rank}.step")
}

/// Name of a part of a rank's optimiser in a checkpoint.
fn optimiser_name(rank: usize, part: &str) -> String {
    format!("{rank}.optimiser.{part}")
}

/// Adds the state of a rank to a checkpoint.
fn put_rank(all: &mut StateDict, trainer: &Trainer, own: Option<StateDict>) -> Result<()> {
    let (rank, state) = (trainer.rank, trainer.exchange.state()?);
    all.insert(step_name(rank), HostTensor::scalar_i64(state.step as i64));
    for (name, bytes) in state.into_parts() {
        all.insert(format!("{rank}.{name}"), HostTensor::bytes(bytes));
    }
    for (name, tensor) in own.unwrap_or_default().0 {
        all.insert(optimiser_name(rank, &name), tensor);
    }
    Ok(())
}

/// All results, or the first error that does not merely report another rank's failure.
fn first_cause(all: Vec<Result<Epoch>>) -> Result<Vec<Epoch>> {
    let (fine, mut errors): (Vec<_>, Vec<_>) = all.into_iter().partition(Result::is_ok);
    errors.sort_by_key(|result| result.as_ref().is_err_and(Error::is_of_another_rank));
    errors.into_iter().chain(fine).collect()
}

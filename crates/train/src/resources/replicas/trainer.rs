//! Training of one rank: its exchange, and its epoch.
//!
//! If the exchange sends the whole gradient, the result is clipped in the optimiser's step, as for
//! one network on the whole batch. A sparse exchange differs from that in the three ways below, an
//! exchange with eight bits in the last two, and local training in the last; local training with a
//! sparse method also has the first.
//!
//! **Warm-up**: the first epochs of a host send more
//! ([`ExchangeMethod::warming_up`](crate::settings::ExchangeMethod)).
//!
//! **Clipping**: each rank clips its own gradient before the exchange, at √R times the norm, and
//! the sum is not clipped (Lin et al., "Deep Gradient Compression", ICLR 2018, 3.2). An element
//! that is sent late is a sum over many batches, and clipping after the exchange would remove most
//! of it. Momentum and weight decay stay in the optimiser, after the exchange (as in Vogels et al.,
//! "PowerSGD", NeurIPS 2019), and need no correction there.
//!
//! **Running statistics** are always recomputed at the end of an epoch with fixed weights, by
//! forward passes over the first batches of epoch 0 (Ioffe and Szegedy, "Batch Normalization",
//! 2015, algorithm 2; Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021). If the exchange
//! sends the whole gradient, the setting `statistics_batches` may turn that off. The reason: the
//! full gradient of a layer before batch norm has no component along the shifts and scales that
//! batch norm removes, but a few elements of the gradient have one. So weights drift in directions
//! that training does not notice, because it normalises by each batch; running averages over the
//! last ten batches lag behind that drift and fit the weights badly. After an outer step of local
//! training, the running averages belong to weights that no rank has any more.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

use meristem_comm::{Communicator, Reduction};
use meristem_data::{Batch, GatherBatches};
use meristem_device::{Counts, DType, HotScope, Owner, Tensor};
use meristem_nn::{HostTensor, Metrics, Network, StateDict, observed_weight};

use crate::error::{Error, Result};
use crate::own_loss::{OwnResults, ProgramLoss, backward};
use crate::resources::STATISTICS_EPOCH;
use crate::resources::replicas::SharedEpoch;
use crate::resources::replicas::exchange::LazyExchange;
use crate::resources::serving::PassBatches;
use crate::settings::ExchangeKind;

/// Training of one rank. The network belongs to the caller.
pub(super) struct Trainer {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// `None` once this rank has failed.
    pub(super) comm: Option<Communicator>,
    pub(super) kind: ExchangeKind,
    /// Batches with which running statistics are recomputed at the end of an epoch.
    pub(super) statistics_batches: usize,
    pub(super) exchange: LazyExchange,
    /// Optimiser's state from a checkpoint, until the network gets it. Only in local training does
    /// each rank have an optimiser of its own; the optimiser of rank 0 is that of the env.
    pub(super) optimiser: Option<StateDict>,
    /// Metrics of all ranks at the end of an epoch.
    pub(super) metrics: Option<Tensor>,
}

/// The program's loss on a rank's parts of the batches.
struct OwnLosses<'a, 'l> {
    loss: &'a Mutex<&'l mut ProgramLoss>,
    results: OwnResults,
}

impl<'a, 'l> OwnLosses<'a, 'l> {
    fn new(loss: &'a Mutex<&'l mut ProgramLoss>) -> Self {
        Self { loss, results: OwnResults::default() }
    }

    /// As [`Network::differentiate`]. Waits for outputs and targets.
    fn differentiate(&mut self, network: &mut Network, part: &Batch, weight: f32) -> Result<()> {
        let outputs = network.forward(&part.inputs)?;
        // After a panic of another rank the run ends with it.
        let mut loss = self.loss.lock().unwrap_or_else(PoisonError::into_inner);
        let sums = backward(&mut loss, network, &outputs, &part.targets, weight)?;
        drop(loss);
        network.keep_gradient()?;
        self.results.add_training(&sums, network.options().batch_log);
        Ok(())
    }

    /// Counts of the rank's training.
    fn metrics(&self) -> Metrics {
        let mut all = Metrics::default();
        self.results.add_to(&mut all);
        all
    }
}

/// Work done in the inner loops of an epoch.
pub(crate) struct Epoch {
    /// Number of batches.
    pub(crate) batches: u64,
    /// Counts of each scope, over all ranks of this process.
    pub(crate) counts: Vec<Counts>,
    /// Bytes that the ranks of this process sent to exchange gradients or weights.
    pub(crate) sent_bytes: u64,
}

impl Trainer {
    /// Prepares steps over parts of these sizes, and creates the exchange for the current
    /// parameters, with epochs of `batches` batches. Unsent gradients of parameters that still
    /// exist are kept.
    pub(super) fn open(
        &mut self,
        network: &mut Network,
        sizes: &[usize],
        batches: usize,
    ) -> Result<()> {
        if let Some(saved) = self.optimiser.take() {
            load_optimiser(network, &saved)?;
        }
        let share = network.options().batch_max.div_ceil(self.ranks);
        network.set_first_sample(self.rank * share)?;
        let clips = self.clips();
        sizes.iter().try_for_each(|size| network.prepare_halves(*size, clips))?;
        let len = self.ranks * network.metrics().numel();
        if self.metrics.as_ref().is_none_or(|metrics| metrics.numel() != len) {
            let stream = network.metrics().stream();
            let metrics = Tensor::zeros(stream, [len], DType::F64, Owner::Collectives)?;
            self.metrics = Some(metrics);
        }
        let Some(comm) = &self.comm else { return Err(self.not_open()) };
        self.exchange.open(self.kind, comm, network, batches)
    }

    /// Whether gradients are clipped before they are exchanged.
    fn clips(&self) -> bool {
        self.kind.local_steps.is_none() && !self.kind.sends_whole_gradients()
    }

    /// State of this rank's optimiser in local training; `None` in other training, and on rank 0,
    /// whose optimiser is that of the env. `network` reads the state from the rank's network, if
    /// the rank has a network. Waits for the device.
    pub(super) fn own_optimiser(
        &self,
        network: impl FnOnce() -> Result<Option<StateDict>>,
    ) -> Result<Option<StateDict>> {
        match &self.optimiser {
            _ if self.kind.local_steps.is_none() || self.rank == 0 => Ok(None),
            Some(saved) => Ok(Some(saved.clone())),
            None => network(),
        }
    }

    /// Trains an epoch. If it fails, the other ranks notice it at once instead of waiting.
    pub(super) fn train(
        &mut self,
        gather: &mut GatherBatches,
        network: &mut Network,
        shared: &SharedEpoch<'_>,
        observed: &mut dyn FnMut(&Network) -> Result<()>,
    ) -> Result<Epoch> {
        let mut all = || {
            let hot = (shared.train_scopes)();
            let mut own = shared.loss.as_ref().map(OwnLosses::new);
            let (batches, sent_bytes) = self.batches(gather, network, own.as_mut(), observed)?;
            let counts = hot.into_iter().map(|scope| scope.finish().counts).collect();
            own.map_or(Ok(()), |own| network.add_training_metrics(&own.metrics()))?;
            let weight = self.recompute_statistics(gather, network, shared.statistics_scopes)?;
            self.finish_epoch(network, weight)?;
            Ok(Epoch { batches, counts, sent_bytes })
        };
        let done = catch_unwind(AssertUnwindSafe(&mut all));
        if !matches!(done, Ok(Ok(_))) {
            self.comm = None;
        }
        done.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Runs the inner loop. Returns the number of batches, and of bytes sent.
    fn batches(
        &mut self,
        gather: &mut GatherBatches,
        network: &mut Network,
        mut loss: Option<&mut OwnLosses<'_, '_>>,
        observed: &mut dyn FnMut(&Network) -> Result<()>,
    ) -> Result<(u64, u64)> {
        let (order, clips) = (gather.order().clone(), self.clips());
        let (Some(comm), LazyExchange::Open { exchange, .. }) =
            (&mut self.comm, &mut self.exchange)
        else {
            return Err(self.not_open());
        };
        let sent_before = comm.traffic().sent_bytes;
        let mut batch = 0;
        while let Some(served) = gather.next()? {
            match served.first() {
                Some(part) => {
                    let own = order.part(batch, self.rank).len();
                    let weight = match self.kind.local_steps {
                        // The gradient of the rank's own mean loss.
                        Some(_) => 1.0,
                        // The exchange averages over ranks, so this weight n_r R/n gives the mean
                        // over all samples.
                        None => {
                            let all: usize =
                                (0..self.ranks).map(|rank| order.part(batch, rank).len()).sum();
                            ((own * self.ranks) as f64 / all as f64) as f32
                        }
                    };
                    match &mut loss {
                        Some(loss) => loss.differentiate(network, part, weight)?,
                        None => network.differentiate(&part.inputs, &part.targets, weight)?,
                    }
                }
                // A rank without samples in a small last batch.
                None => network.differentiate_nothing()?,
            }
            exchange.update(comm, network, clips, (batch, order.batches()))?;
            observed(network)?;
            batch += 1;
        }
        Ok((batch as u64, comm.traffic().sent_bytes - sent_before))
    }

    /// Begins to recompute running statistics, if the network has some, on this rank's part of the
    /// first batches of [`STATISTICS_EPOCH`]. Returns the mean of [`observed_weight`] over the
    /// ranks; `None` if nothing is recomputed.
    fn recompute_statistics(
        &self,
        gather: &mut GatherBatches,
        network: &mut Network,
        scopes: &dyn Fn(PassBatches) -> Vec<HotScope>,
    ) -> Result<Option<f64>> {
        if self.statistics_batches == 0 || !network.has_statistics() {
            return Ok(None);
        }
        let _scopes = scopes(PassBatches::new(gather, self.statistics_batches, 0));
        gather.start_epoch(STATISTICS_EPOCH)?;
        network.begin_statistics()?;
        for _ in 0..self.statistics_batches {
            let Some(served) = gather.next()? else { break };
            served.first().map_or(Ok(()), |part| network.observe(&part.inputs))?;
        }
        let order = gather.order();
        let batches = 0..self.statistics_batches.min(order.batches());
        let weight = |rank: usize| {
            let observed = batches.clone().filter(|batch| !order.part(*batch, rank).is_empty());
            observed_weight(observed.count())
        };
        Ok(Some((0..self.ranks).map(weight).sum::<f64>() / self.ranks as f64))
    }

    /// Averages running statistics over the ranks, divides them by `weight` if they were
    /// recomputed, and gathers metrics and fingerprints on all ranks.
    fn finish_epoch(&mut self, network: &mut Network, weight: Option<f64>) -> Result<()> {
        let (Some(comm), Some(metrics)) = (&mut self.comm, &self.metrics) else {
            return Err(self.not_open());
        };
        for (state, counters) in network.statistics() {
            comm.all_reduce(state, Reduction::Mean)?;
            // Counters of batches: rank 0 has samples in every batch.
            comm.broadcast(counters, 0)?;
        }
        weight.map_or(Ok(()), |weight| network.finish_statistics(weight))?;
        match self.kind.local_steps {
            Some(_) => network.fingerprint_weights()?,
            None => network.fingerprint()?,
        }
        Ok(comm.all_gather(network.metrics(), metrics)?)
    }

    /// Metrics of the epoch, by rank.
    pub(super) fn metrics(&self, network: &Network) -> Result<Vec<Tensor>> {
        let len = network.metrics().numel();
        let Some(metrics) = &self.metrics else { return Err(self.not_open()) };
        (0..self.ranks).map(|rank| Ok(metrics.view(rank * len, [len])?)).collect()
    }

    pub(super) fn not_open(&self) -> Error {
        let got = format!("rank {}, which failed or was not opened", self.rank);
        Error::value("ranks", got, "ranks that are opened before they train")
    }
}

/// Loads the saved optimiser state of the parameters that still exist into a network; the state of
/// all other parameters becomes zero, as in growth. Waits for the device.
fn load_optimiser(network: &mut Network, saved: &StateDict) -> Result<()> {
    network.clear_momentum()?;
    let mut state = network.momentum_dict()?;
    for (name, tensor) in &mut state.0 {
        let is_like = |saved: &&HostTensor| {
            saved.shape == tensor.shape
                && std::mem::discriminant(&saved.data) == std::mem::discriminant(&tensor.data)
        };
        if let Some(saved) = saved.get(name).filter(is_like) {
            tensor.clone_from(saved);
        }
    }
    Ok(network.load_momentum_dict(&state)?)
}

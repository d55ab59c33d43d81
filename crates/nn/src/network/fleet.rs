//! Networks that train side by side, taken as one.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use meristem_device::{Launches, Tensor};

use super::pass::{BatchLaunch, BatchTensors};
use super::{LabelledBatch, Network, Snapshot};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::ops::PlanTarget;

/// Whether the launches of a network become parts of CUDA graphs.
fn has_graphs(network: &Network) -> bool {
    PlanTarget::for_device(network.stream.device()) == PlanTarget::Cuda
}

/// The tensors of a pass over a labelled batch.
fn of_batch<'t>((inputs, targets): &'t LabelledBatch<'t>) -> BatchTensors<'t> {
    (std::slice::from_ref(inputs), Some(targets))
}

/// Networks that run the same pass at the same time, each on its stream. On a CUDA device a step of
/// all of them is one graph, in which networks of one plan share the calls of its kernels; on the
/// CPU each network's plan is launched on that network's stream. Nothing here waits for the device,
/// except the methods that prepare passes, which wait as [`Launches::prepare`] does.
///
/// The networks are borrowed: a fleet is made where it is used, and costs one list of references.
#[derive(Debug)]
pub struct NetworkFleet<'a> {
    pub(super) networks: Vec<&'a mut Network>,
}

impl<'a> NetworkFleet<'a> {
    /// A fleet of these networks, in this order.
    pub fn new(networks: impl IntoIterator<Item = &'a mut Network>) -> Self {
        Self { networks: networks.into_iter().collect() }
    }

    /// Number of networks.
    pub fn len(&self) -> usize {
        self.networks.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.networks.is_empty()
    }

    /// The networks, in order.
    pub fn networks(&self) -> impl Iterator<Item = &Network> {
        self.networks.iter().map(|network| &**network)
    }

    /// The networks with these numbers, which are in ascending order, as a fleet.
    pub fn select(&mut self, numbers: &[usize]) -> NetworkFleet<'_> {
        let all = self.networks.iter_mut().enumerate();
        let chosen = all.filter(|(number, _)| numbers.binary_search(number).is_ok());
        NetworkFleet::new(chosen.map(|(_, network)| &mut **network))
    }

    /// One training step of the first `batches.len()` networks; see [`Network::train_step`]. The
    /// last batch of an epoch may be there for some of them only: these are the first ones.
    ///
    /// # Errors
    /// [`Error::Argument`] for more batches than networks; the errors of [`Network::train_step`]:
    /// nothing has run then. A failed stream, and the errors of
    /// [`Launches::run`](meristem_device::Launches::run): earlier networks may have taken their
    /// step.
    #[track_caller]
    pub fn train_step(&mut self, batches: &[LabelledBatch<'_>]) -> Result<()> {
        self.check("train_step", "batches", batches.len(), 0..=self.len())?;
        let pairs = self.networks.iter_mut().zip(batches);
        let passes = pairs.map(|(network, &batch)| network.training(batch));
        let passes = passes.collect::<Result<_>>()?;
        self.run(passes, batches.iter().map(of_batch))
    }

    /// Prepares a training step of the first networks, network i over `sizes[i]` samples: compiles
    /// plans, allocates memory, and builds CUDA graphs, where they do not exist. Does nothing on
    /// the CPU.
    ///
    /// # Errors
    /// [`Error::Argument`] for more sizes than networks; as [`Network::prepare_training`] and
    /// [`Launches::prepare`].
    #[track_caller]
    pub fn prepare_training(&mut self, sizes: &[usize]) -> Result<()> {
        self.prepare_sizes("prepare_training", sizes, Network::training_of)
    }

    /// Prepares observations of the first networks, network i of `sizes[i]` samples: see
    /// [`NetworkFleet::prepare_training`] and [`NetworkFleet::observe`].
    ///
    /// # Errors
    /// As [`NetworkFleet::prepare_training`].
    #[track_caller]
    pub fn prepare_statistics(&mut self, sizes: &[usize]) -> Result<()> {
        let method = "prepare_statistics";
        self.check(method, "sizes", sizes.len(), 0..=self.len())?;
        let (mut observing, sizes) = self.observing(sizes);
        observing.prepare_sizes(method, &sizes, Network::observation_of)
    }

    /// Prepares an evaluation with the given rows of the alphas, which must be set: see
    /// [`NetworkFleet::prepare_training`] and [`NetworkFleet::eval_rows`].
    ///
    /// # Errors
    /// As [`NetworkFleet::prepare_training`], and [`Network::eval_rows`]; [`Error::Argument`] for
    /// more sizes than ranges of rows.
    #[track_caller]
    pub fn prepare_evaluation(&mut self, sizes: &[usize], rows: &[Range<usize>]) -> Result<()> {
        self.check("prepare_evaluation", "sizes", sizes.len(), 0..=self.len().min(rows.len()))?;
        let all = self.networks.iter_mut().zip(sizes).zip(rows);
        let passes: Vec<_> = all
            .filter(|((network, _), _)| has_graphs(network))
            .map(|((network, &size), rows)| network.evaluation_of(size, rows))
            .collect::<Result<_>>()?;
        self.prepare(passes)
    }

    /// Prepares the pass of the method `method` of the first networks, network i of `sizes[i]`
    /// samples.
    #[track_caller]
    fn prepare_sizes(
        &mut self,
        method: &'static str,
        sizes: &[usize],
        pass: fn(&mut Network, usize) -> Result<BatchLaunch>,
    ) -> Result<()> {
        self.check(method, "sizes", sizes.len(), 0..=self.len())?;
        let pairs = self.networks.iter_mut().zip(sizes).filter(|(network, _)| has_graphs(network));
        let passes = pairs.map(|(network, &size)| pass(network, size)).collect::<Result<_>>()?;
        self.prepare(passes)
    }

    /// Builds the backend's graphs for passes of the first networks.
    #[track_caller]
    fn prepare(&self, passes: Vec<BatchLaunch>) -> Result<()> {
        let networks = self.networks.iter().filter(|network| has_graphs(network));
        let ahead = networks.zip(passes).map(|(network, pass)| network.ahead(pass));
        Ok(Launches::prepare(ahead.collect())?)
    }

    /// The forward pass of a training step of the first `inputs.len()` networks, for their running
    /// statistics; see [`Network::observe`]. Networks without statistics make no pass.
    ///
    /// # Errors
    /// As [`NetworkFleet::train_step`], and [`Network::observe`].
    #[track_caller]
    pub fn observe(&mut self, inputs: &[&Tensor]) -> Result<()> {
        self.check("observe", "inputs", inputs.len(), 0..=self.len())?;
        let (mut observing, inputs) = self.observing(inputs);
        let pairs = observing.networks.iter_mut().zip(&inputs);
        let passes = pairs.map(|(network, inputs)| network.observation(inputs));
        let passes = passes.collect::<Result<_>>()?;
        observing.run(passes, inputs.iter().map(|inputs| (std::slice::from_ref(inputs), None)))
    }

    /// The networks with running statistics, of the first `items.len()`, and their items.
    fn observing<T: Copy>(&mut self, items: &[T]) -> (NetworkFleet<'_>, Vec<T>) {
        let pairs = self.networks.iter_mut().zip(items);
        let (networks, items): (Vec<&mut Network>, Vec<T>) = pairs
            .filter(|(network, _)| network.has_statistics())
            .map(|(network, item)| (&mut **network, *item))
            .unzip();
        (NetworkFleet::new(networks), items)
    }

    /// Begins to recompute the running statistics of all; see [`Network::begin_statistics`].
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn begin_statistics(&self) -> Result<()> {
        self.networks.iter().try_for_each(|network| network.begin_statistics())
    }

    /// Divides the running statistics of each network by its weight; see
    /// [`Network::finish_statistics`].
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of weights than networks; a failed stream.
    #[track_caller]
    pub fn finish_statistics(&self, weights: &[f64]) -> Result<()> {
        self.check("finish_statistics", "weights", weights.len(), self.len()..=self.len())?;
        let mut pairs = self.networks.iter().zip(weights);
        pairs.try_for_each(|(network, weight)| network.finish_statistics(*weight))
    }

    /// Evaluates a batch of each of the first `batches.len()` networks with these rows of its
    /// alphas; see [`Network::eval_rows`].
    ///
    /// # Errors
    /// As [`NetworkFleet::train_step`], and [`Network::eval_rows`].
    #[track_caller]
    pub fn eval_rows(
        &mut self,
        batches: &[LabelledBatch<'_>],
        rows: &[Range<usize>],
    ) -> Result<()> {
        self.check("eval_rows", "batches", batches.len(), 0..=self.len())?;
        if rows.len() < batches.len() {
            let expected = format!("one range for each of {} batches", batches.len());
            return Err(Error::argument("eval_rows", "rows", expected, rows.len()));
        }
        let pairs = self.networks.iter_mut().zip(batches).zip(rows);
        let passes = pairs.map(|((network, &batch), rows)| network.evaluation(batch, rows));
        let passes = passes.collect::<Result<_>>()?;
        self.run(passes, batches.iter().map(of_batch))
    }

    /// Runs passes of the first networks, with the tensors of each.
    #[track_caller]
    fn run<'t>(
        &'t self,
        passes: Vec<BatchLaunch>,
        tensors: impl Iterator<Item = BatchTensors<'t>>,
    ) -> Result<()> {
        let mut launches = Launches::default();
        for ((network, tensors), pass) in self.networks.iter().zip(tensors).zip(passes) {
            network.add(&mut launches, pass, tensors)?;
        }
        Ok(launches.run()?)
    }

    /// Empties the metrics of all; see [`Network::reset_metrics`].
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn reset_metrics(&self) -> Result<()> {
        self.networks.iter().try_for_each(|network| network.reset_metrics())
    }

    /// Sets the alphas of each; see [`Network::set_alphas`].
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of tables than networks; as [`Network::set_alphas`].
    #[track_caller]
    pub fn set_alphas(&mut self, tables: &[Vec<Vec<f32>>]) -> Result<()> {
        self.check("set_alphas", "tables", tables.len(), self.len()..=self.len())?;
        for (network, rows) in self.networks.iter_mut().zip(tables) {
            network.set_alphas(rows)?;
        }
        Ok(())
    }

    /// Takes a snapshot of each, of the groups that a graph has; see [`Snapshot::take`].
    ///
    /// # Errors
    /// [`Error::Argument`] for another number of snapshots than networks; as [`Snapshot::take`].
    #[track_caller]
    pub fn take_snapshots(&self, snapshots: Vec<(&mut Snapshot, Arc<Graph>)>) -> Result<()> {
        self.check("take_snapshots", "snapshots", snapshots.len(), self.len()..=self.len())?;
        for (network, (snapshot, graph)) in self.networks.iter().zip(snapshots) {
            snapshot.take(network, &graph)?;
        }
        Ok(())
    }

    /// Counts the elements that are not finite in each; see [`Network::count_non_finite`].
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn count_non_finite(&self) -> Result<()> {
        self.networks.iter().try_for_each(|network| network.count_non_finite())
    }

    /// Refuses a number `got` of arguments that is not in `fits`.
    pub(super) fn check(
        &self,
        operation: &'static str,
        argument: &'static str,
        got: usize,
        fits: RangeInclusive<usize>,
    ) -> Result<()> {
        if fits.contains(&got) {
            return Ok(());
        }
        let most = if fits.start() == fits.end() { "" } else { "at most " };
        let expected = format!("{most}{}, one per network", fits.end());
        Err(Error::argument(operation, argument, expected, got))
    }
}

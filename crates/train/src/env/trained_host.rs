//! A host in training: the grown one of an env, or its bare twin.

use std::sync::Arc;

use meristem_device::Stream;
use meristem_grow::{Host, ParameterCounts, TopologyKey};
use meristem_nn::graph::{Graph, StepFactors, WidthInit};
use meristem_nn::{
    EvalMetrics, FurtherFeatures, Metrics, Network, NetworkOptions, Score, WidthProbe,
};

use super::new_features::{NewFeatures, step_factors};
use super::state::TrainedTensors;
use crate::config::types::{GrowthLr, GrowthMomentum};
use crate::error::Result;
use crate::own_loss::OwnResults;
use crate::setup::Setup;

/// Env of a host, and options of its network.
#[derive(Clone, Copy)]
pub(crate) struct HostOptions<'a> {
    /// Index of the env in the run.
    pub(crate) index: usize,
    pub(crate) stream: &'a Stream,
    /// Seed of the host's weights.
    pub(crate) seed: u64,
    /// Number of batch losses that the network keeps.
    pub(crate) batch_log: usize,
    /// Step of the round at which the env began.
    pub(crate) begun: usize,
}

/// A host with its network, and the results of the network's last step.
pub(crate) struct TrainedHost {
    /// Index of the env in the run.
    index: usize,
    /// Step of the round at which the env began.
    begun: usize,
    pub(crate) host: Host,
    pub(crate) network: Network,
    /// Topology that `network` was compiled for.
    key: TopologyKey,
    /// Factor that the learning rates of `network` have now.
    lr_factor: f64,
    /// Features that layers got in this episode; empty with the setting `growth_lr = "uniform"`.
    pub(super) new_features: Vec<NewFeatures>,
    /// Factors of the learning rates of these features' elements, for the widths of `key`.
    step_factors: Option<Arc<StepFactors>>,
    /// Trained parameters of the network, whose topology is `key`; an action changes them only in
    /// the next [`TrainedHost::sync`].
    pub(crate) parameters: ParameterCounts,
    /// Results since the last reset of batches whose loss the program computes; they are in host
    /// memory, beside the metrics of the network.
    pub(crate) own_results: OwnResults,
    /// Metrics of the last step: of training, and in `eval` of every configuration that was
    /// evaluated.
    pub(crate) metrics: Metrics,
    /// Evaluation on the control split in the last step; `None` without a control split.
    pub(crate) control: Option<EvalMetrics>,
    /// Floating-point operations of training in this episode.
    pub(crate) training_flops: u64,
    /// Whether a loss or a weight was not finite since the start or the last rollback.
    pub(crate) diverged: bool,
    /// Score on the training and control splits.
    pub(crate) score: Score,
}

impl TrainedHost {
    /// Compiles a network for `host`, with metrics for `configurations` configurations.
    ///
    /// # Errors
    /// Out of memory.
    pub(super) fn new(
        setup: &Setup,
        host: Host,
        options: HostOptions<'_>,
        configurations: usize,
    ) -> Result<Self> {
        let HostOptions { index, stream, seed, batch_log, begun } = options;
        let (number, member) = (setup.config.env_number(index), setup.member(index));
        let options = NetworkOptions {
            configs: configurations,
            batch_log,
            precision: setup.config.precision,
            winograd: setup.config.winograd.0,
            loss: member.loss.clone(),
            ..NetworkOptions::new(seed, number as u64, setup.isa, member.config.batch)
        };
        let (key, parameters, lr_factor) = (host.topology_key(), host.parameters()?, 1.0);
        let graph = setup.graph(index, &host, lr_factor)?;
        let network = Network::with_plans(stream, graph, options, &setup.plans)?;
        let (metrics, control) = (Metrics::default(), None);
        Ok(Self {
            index,
            begun,
            host,
            network,
            key,
            lr_factor,
            new_features: vec![],
            step_factors: None,
            parameters,
            own_results: OwnResults::default(),
            metrics,
            control,
            training_flops: 0,
            diverged: false,
            score: setup.task.score,
        })
    }

    /// Compiles the network for the host's current topology, if that changed. If it changed, waits
    /// for the device on CUDA, where giving memory back waits, and on a processor only if a layer
    /// has become wider. Between two calls either slots or a width may change, not both.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn sync(&mut self, setup: &Setup) -> Result<()> {
        self.sync_with(setup, None)
    }

    /// As [`TrainedHost::sync`]. If a layer has become wider, its new features get the values
    /// `further`, from the probe of [`TrainedHost::width_probe`]; with `None` they are initialised
    /// without a measurement.
    ///
    /// # Errors
    /// As [`TrainedHost::sync`].
    pub(crate) fn sync_with(
        &mut self,
        setup: &Setup,
        further: Option<&FurtherFeatures>,
    ) -> Result<()> {
        let key = self.host.topology_key();
        if key != self.key {
            let is_wider = key.host != self.key.host;
            if is_wider {
                self.step_factors = None;
            }
            let graph = self.graph(setup)?;
            match further {
                _ if !is_wider => self.network.set_graph(graph)?,
                Some(further) => self.network.widen_with(graph, further)?,
                None => self.network.widen(graph, self.host.rules().width_init)?,
            }
            let momentum = setup.member(self.index).config.growth_momentum;
            if is_wider && momentum == GrowthMomentum::Reset {
                self.network.clear_momentum()?;
            }
            self.key = key;
            self.parameters = self.host.parameters()?;
            // Memory blocks of the smaller network do not fit the larger one, and would accumulate.
            self.network.stream().device().trim();
        }
        Ok(())
    }

    /// The graph of the host with its learning rates.
    fn graph(&self, setup: &Setup) -> Result<Arc<Graph>> {
        let graph = setup.graph(self.index, &self.host, self.lr_factor)?;
        let Some(factors) = &self.step_factors else { return Ok(graph) };
        let graph = Arc::unwrap_or_clone(graph).with_step_factors(Some(Arc::clone(factors)))?;
        Ok(Arc::new(graph))
    }

    /// Records that an action of step `step` of the round has given a layer further features, which
    /// the network does not have yet.
    ///
    /// # Errors
    /// Never for a host that was checked.
    pub(crate) fn note_wider(&mut self, setup: &Setup, step: usize) -> Result<()> {
        if setup.member(self.index).config.growth_lr != GrowthLr::Uniform {
            let wide = setup.graph(self.index, &self.host, self.lr_factor)?;
            let first = self.own_step(step) + 1;
            self.new_features.push(NewFeatures::new(self.network.graph(), &wide, first));
        }
        Ok(())
    }

    /// Sets the learning rates of features that layers got in this episode, for step `step` of the
    /// round. The network must be up to date. Waits for the device if rates depend on norms.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(super) fn set_step_factors(&mut self, setup: &Setup, step: usize) -> Result<()> {
        if self.new_features.is_empty() {
            return Ok(());
        }
        let rule = setup.member(self.index).config.growth_lr;
        let weights = (rule == GrowthLr::Norm).then(|| self.network.state_dict()).transpose()?;
        let at = (self.own_step(step), weights.as_ref());
        let factors = step_factors(self.network.graph(), &self.new_features, rule, at);
        self.step_factors = factors.map(Arc::new);
        Ok(self.network.set_graph(self.graph(setup)?)?)
    }

    /// A probe for the further features of a layer that has become wider since the last
    /// [`TrainedHost::sync`], if its initialisation measures them. Waits for the device.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn width_probe(&self, setup: &Setup) -> Result<Option<WidthProbe>> {
        let init = self.host.rules().width_init;
        let wider = self.host.wider_than(&self.key.host).filter(|_| init.measures());
        wider.map(|wider| self.probe(setup, &self.host, wider, init)).transpose()
    }

    /// A probe for the score of a layer; `None` if it has none, or cannot get wider now. The
    /// network must be up to date. Waits for the device.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn score_probe(
        &self,
        setup: &Setup,
        layer: usize,
        init: WidthInit,
    ) -> Result<Option<WidthProbe>> {
        if !self.host.can_score(layer, init) {
            return Ok(None);
        }
        let wide = self.host.with_features(layer, 1).ok();
        wide.map(|wide| self.probe(setup, &wide, (layer, 1), init)).transpose()
    }

    /// A probe for a network that is to become the one of `wide`, where `layer` has `by` further
    /// features.
    fn probe(
        &self,
        setup: &Setup,
        wide: &Host,
        (layer, by): (usize, usize),
        init: WidthInit,
    ) -> Result<WidthProbe> {
        let graph = setup.graph(self.index, wide, self.lr_factor)?;
        let features = WidthProbe::features(&self.network, &graph, init)?;
        let measured = wide.with_features(layer, features - by);
        let measured = measured.map_err(meristem_grow::Error::from)?;
        let measured = setup.graph(self.index, &measured, self.lr_factor)?;
        Ok(WidthProbe::new(&self.network, &graph, measured, init)?)
    }

    /// Converts a step of the round to the host's own step, counted from the step at which the env
    /// began.
    pub(crate) fn own_step(&self, step: usize) -> usize {
        step.saturating_sub(self.begun)
    }

    /// Converts a step of the host to the step of the round; the inverse of [`Self::own_step`].
    pub(crate) fn step_of_round(&self, own_step: usize) -> usize {
        self.begun + own_step
    }

    /// Sets the learning rates of a step of the round.
    ///
    /// # Errors
    /// Out of memory, a failed stream.
    pub(crate) fn open_step(&mut self, setup: &Setup, step: usize) -> Result<()> {
        let config = &setup.member(self.index).config;
        let lr_factor = config.lr_factor(self.own_step(step));
        let ages = matches!(config.growth_lr, GrowthLr::Age { .. });
        if lr_factor == self.lr_factor && !ages {
            return Ok(());
        }
        self.lr_factor = lr_factor;
        self.apply_rate(setup)
    }

    /// Copies the current learning rates to the device, unless [`TrainedHost::sync`] will do so
    /// because the topology has changed.
    pub(super) fn apply_rate(&mut self, setup: &Setup) -> Result<()> {
        if self.host.topology_key() == self.key {
            self.network.set_graph(self.graph(setup)?)?;
        }
        Ok(())
    }

    /// Compiles the training plans for batches of these sizes.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn prepare_training(&mut self, sizes: &[usize]) -> Result<()> {
        sizes.iter().try_for_each(|&size| Ok(self.network.prepare_training(size)?))
    }

    /// Counts the operations of `passes` forward passes over `images` images. Returns them.
    ///
    /// # Errors
    /// Never for the network of an env.
    pub(crate) fn count_flops(&mut self, passes: u64, images: u64) -> Result<u64> {
        let flops = passes * images * self.network.eval_flops(0..1)?.1;
        self.training_flops += flops;
        Ok(flops)
    }

    /// Empties the metrics of the network, and the results of batches whose loss the program
    /// computes. Does not wait.
    ///
    /// # Errors
    /// A failed stream.
    pub(crate) fn reset_metrics(&mut self) -> Result<()> {
        self.own_results = OwnResults::default();
        Ok(self.network.reset_metrics()?)
    }

    /// Records the metrics of a step or of a report.
    pub(crate) fn note(&mut self, metrics: Metrics, has_control: bool) {
        self.note_control(&metrics, has_control);
        self.diverged |= !metrics.loss_sum.is_finite() || metrics.non_finite != 0;
        self.metrics = metrics;
    }

    /// Records an evaluation on the control split.
    pub(super) fn note_control(&mut self, metrics: &Metrics, has_control: bool) {
        self.control = metrics.eval.first().copied().filter(|_| has_control);
    }

    /// This host; `None` if it has diverged, because a twin that diverged has no results from then
    /// on.
    pub(crate) fn unless_diverged(&self) -> Option<&Self> {
        (!self.diverged).then_some(self)
    }

    /// Mean training loss over the last step.
    pub(crate) fn train_loss(&self) -> f64 {
        self.metrics.loss_sum / self.metrics.samples.max(1) as f64
    }

    /// Training score over the last step; NaN where there is none.
    pub(crate) fn train_score(&self) -> f64 {
        let Metrics { correct, samples, ref sums, .. } = self.metrics;
        match self.score {
            // Without samples, before the first step, the accuracy is 0, as in files of earlier
            // versions.
            Score::Accuracy => correct as f64 / samples.max(1) as f64,
            score => score.of(correct, samples, sums).unwrap_or(f64::NAN),
        }
    }

    /// Mean loss on the control split after the last step.
    pub(crate) fn control_loss(&self) -> Option<f64> {
        self.control.and_then(|control| control.loss())
    }

    /// Score on the control split after the last step.
    pub(crate) fn control_score(&self) -> Option<f64> {
        self.control.and_then(|control| control.score(self.score))
    }

    /// A score on the control split in percentage points, see [`EvalMetrics::points`]; NaN where
    /// there is none.
    pub(crate) fn score_pp(&self, metrics: &EvalMetrics) -> f64 {
        metrics.points(self.score).unwrap_or(f64::NAN)
    }

    /// Metrics of a configuration; without samples if it was not evaluated.
    pub(crate) fn evaluation(&self, configuration: usize) -> EvalMetrics {
        self.metrics.eval.get(configuration).copied().unwrap_or_default()
    }

    /// Weights and optimiser for a checkpoint. Waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub(super) fn tensors(&self) -> Result<TrainedTensors> {
        let (weights, optimiser) = (self.network.state_dict()?, self.network.momentum_dict()?);
        Ok(TrainedTensors { weights, optimiser })
    }

    /// Loads weights and optimiser from a checkpoint.
    ///
    /// # Errors
    /// Tensors that do not fit.
    pub(super) fn load(&mut self, tensors: &TrainedTensors) -> Result<()> {
        self.network.load_state_dict(&tensors.weights, true)?;
        Ok(self.network.load_momentum_dict(&tensors.optimiser)?)
    }
}

//! The bare twin of an env: the same host without growth, trained on the same batches.

use meristem_grow::Host;
use meristem_nn::{EvalMetrics, Metrics, Network, NetworkOptions};

use super::EnvOptions;
use super::state::{TwinState, TwinTensors};
use crate::error::Result;
use crate::setup::Setup;

/// Row of a twin's metrics for the control split.
const CONTROL: usize = 0;

/// Row of a twin's metrics for the test split.
pub(crate) const TEST: usize = 1;

/// The host as the env had it at the start of the episode, with the same initial weights, on the
/// env's stream. No controller and no governor acts on it.
pub(crate) struct Twin {
    /// Its network.
    pub(crate) network: Network,
    host: Host,
    /// Trained parameters.
    pub(crate) parameters: usize,
    /// Floating-point operations of training in this episode.
    pub(crate) training_flops: u64,
    /// Measurements of the last step.
    measured: Metrics,
    /// Whether a loss or a weight was not finite. It has no results from then on.
    diverged: bool,
}

impl Twin {
    /// A twin with the initial weights of the env.
    ///
    /// # Errors
    /// Weights that do not fit, out of memory.
    pub(super) fn new(setup: &Setup, options: EnvOptions<'_>) -> Result<Self> {
        let EnvOptions { index, stream, seed, .. } = options;
        let host = setup.fresh_host(index)?;
        let rows = [CONTROL, TEST];
        let options = NetworkOptions {
            configs: rows.len(),
            batch_log: 1,
            precision: setup.config.precision,
            winograd: setup.config.winograd.0,
            ..NetworkOptions::new(seed, index as u64, setup.isa, setup.config.batch)
        };
        let graph = setup.graph(&host, 1.0)?;
        let mut network = Network::with_plans(stream, graph, options, &setup.plans)?;
        network.set_alphas(&rows.map(|_| host.alphas()))?;
        setup.initialise(&mut network)?;
        let parameters = host.parameters()?.total();
        let measured = Metrics::default();
        Ok(Self { network, host, parameters, training_flops: 0, measured, diverged: false })
    }

    /// A twin restored from a checkpoint.
    ///
    /// # Errors
    /// Tensors that do not fit this run, out of memory.
    pub(super) fn restore(
        setup: &Setup,
        options: EnvOptions<'_>,
        TwinState { training_flops, diverged }: TwinState,
        tensors: &TwinTensors,
    ) -> Result<Self> {
        let mut twin = Self::new(setup, options)?;
        if !diverged {
            twin.network.load_state_dict(&tensors.weights, true)?;
            twin.network.load_momentum_dict(&tensors.optimiser)?;
        }
        Ok(Self { training_flops, diverged, ..twin })
    }

    /// The state for a checkpoint.
    pub(super) fn state(&self) -> TwinState {
        TwinState { training_flops: self.training_flops, diverged: self.diverged }
    }

    /// The tensors for a checkpoint, none of a twin that diverged. Waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub(super) fn save(&self) -> Result<TwinTensors> {
        if self.diverged {
            return Ok(TwinTensors::default());
        }
        let (weights, optimiser) = (self.network.state_dict()?, self.network.momentum_dict()?);
        Ok(TwinTensors { weights, optimiser })
    }

    /// Compiles the network for learning rates scaled by `rate`.
    pub(super) fn set_rate(&mut self, setup: &Setup, rate: f64) -> Result<()> {
        Ok(self.network.set_graph(setup.graph(&self.host, rate)?)?)
    }

    /// Adds the operations of `passes` forward passes over `images` images. Returns them.
    pub(super) fn count_flops(&mut self, passes: u64, images: u64) -> Result<u64> {
        let flops = passes * images * self.network.eval_flops(0..1)?.1;
        self.training_flops += flops;
        Ok(flops)
    }

    /// Records the measurements of a step, or of the report.
    pub(crate) fn note(&mut self, metrics: Metrics) {
        self.diverged |= !metrics.loss_sum.is_finite() || metrics.non_finite != 0;
        self.measured = metrics;
    }

    /// Images that it was trained on in the last step.
    pub(crate) fn images(&self) -> u64 {
        self.measured.samples
    }

    /// Mean training loss over the last step; `None` if it diverged.
    pub(crate) fn train_loss(&self) -> Option<f64> {
        let mean = self.measured.loss_sum / self.measured.samples.max(1) as f64;
        (!self.diverged).then_some(mean)
    }

    /// Evaluation on the control split in the last step; without samples if there is no such split.
    pub(crate) fn control(&self) -> EvalMetrics {
        self.row(CONTROL)
    }

    /// Evaluation on the test split in the report; without samples if there is no such split.
    pub(crate) fn test(&self) -> EvalMetrics {
        self.row(TEST)
    }

    fn row(&self, row: usize) -> EvalMetrics {
        self.measured.eval.get(row).filter(|_| !self.diverged).copied().unwrap_or_default()
    }
}

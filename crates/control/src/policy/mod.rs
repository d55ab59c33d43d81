//! The policy: a recurrent network on the device. It turns observations into logits and a value.
//!
//! `network` and `set_network` describe the network and `loss` its objective, all as data; `layers`
//! has what both networks share. [`Policy`] holds the parameters, which serve two kinds of passes.
//! [`Policy::act`] advances all envs by one step, carries the LSTM state, and draws actions.
//! [`Policy::differentiate`] unrolls whole episodes and computes the gradient of the loss.

mod layers;
mod loss;
mod network;
mod set_network;

use std::sync::Arc;

use meristem_device::{DType, Owner, Stream, Tensor, read_back_f64};
use meristem_nn::kernels::ppo::{PpoLoss, PpoReport, report_len};
use meristem_nn::kernels::sample::Sampler;
pub use meristem_nn::ops::ppo::PpoPass;
use meristem_nn::{
    Error, Isa, Metrics, Result, SequenceDraw, SequenceNetwork, SequenceOptions, SequenceRun,
    StateDict,
};

pub use self::loss::LossConfig;
pub use self::network::{ADAM, LayerSet, PolicyConfig, PolicyForm, PolicyInput, PolicyShape};
use crate::heads::Floors;

/// Inputs of a pass, on the policy's stream. Rows are `[steps][sequences]`, with one sequence per
/// env.
#[derive(Clone, Debug)]
pub struct PolicyInputs<'a> {
    /// The inputs of [`PolicyShape::inputs`] in their order, `[rows, width]` each. In `keep`, f32
    /// `[rows]`, 0 resets the state to zero, where a trajectory begins; all other rows have 1. In
    /// the form [`PolicyForm::Vector`], `blueprints` has [`PolicyShape::empty`] for an empty slot.
    pub rows: Vec<&'a Tensor>,
    /// State before the first step, f32 `[sequences, 2·hidden]`.
    pub state: &'a Tensor,
}

impl<'a> PolicyInputs<'a> {
    fn all(&self) -> Vec<&'a Tensor> {
        self.rows.iter().copied().chain([self.state]).collect()
    }
}

/// Inputs of a pass of an update, on the policy's stream: the round of all envs, or of the envs of
/// one minibatch.
#[derive(Clone, Debug)]
pub struct PolicyBatch<'a> {
    /// Steps of every sequence.
    pub steps: usize,
    /// Observations and state.
    pub inputs: PolicyInputs<'a>,
    /// Choice of each head, u32 `[rows, heads]`.
    pub choices: &'a Tensor,
    /// 1 for a legal choice, u8 `[rows, logits]`; a row without a legal op is ignored.
    pub legal: &'a Tensor,
    /// f32 `[rows]`, normalised.
    pub advantages: &'a Tensor,
    /// Targets of V, f32 `[rows]`.
    pub returns: &'a Tensor,
}

/// Tensors of one acting step, on the policy's stream, with one row per env: the inputs of the draw
/// that the network does not compute, and the results. See [`meristem_nn::kernels::sample`].
#[derive(Clone, Debug)]
pub struct ActTensors<'a> {
    /// Legality, u32 `[rows, places · words]`: [`crate::Legality::write_places`] for the slots,
    /// then [`crate::Legality::write_layers`] for the layers, if the policy observes them.
    pub legality: &'a Tensor,
    /// Key of the random numbers, and scale of V:
    /// [`SampleStep`](meristem_nn::kernels::sample::SampleStep), u32 `[4]`.
    pub step: &'a Tensor,
    /// Output: choice of each head, u32 `[rows, heads]`.
    pub choices: &'a Tensor,
    /// Output: masks of the draw, u8 `[rows, logits]`.
    pub legal: &'a Tensor,
    /// Output: log-probabilities of the choices, f32 `[rows, heads]`.
    pub log_probs: &'a Tensor,
    /// Output: normalised entropies, f32 `[rows, heads]`.
    pub entropies: &'a Tensor,
    /// Output: V in units of reward, f32 `[rows]`.
    pub values: &'a Tensor,
    /// Outputs: copies of [`PolicyInputs::rows`].
    pub seen: Vec<&'a Tensor>,
}

/// A policy network with its parameters and optimiser, on one stream.
#[derive(Debug)]
pub struct Policy {
    network: SequenceNetwork,
    shape: PolicyShape,
    loss: Arc<PpoLoss>,
    /// The loss of [`Policy::imitate`].
    imitation: Arc<PpoLoss>,
    /// Draws the actions; has the same heads as the loss.
    sampler: Arc<Sampler>,
    /// Statistics of the last pass, f64 `[report_len]`.
    report: Tensor,
    /// Log-probabilities of the first pass, f32 `[rows, heads]`.
    reference: Option<Tensor>,
}

impl Policy {
    /// A new policy. Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Argument`] for an invalid loss configuration or a width of 0; memory.
    pub fn new(
        stream: &Stream,
        shape: PolicyShape,
        config: &PolicyConfig,
        loss: &LossConfig,
        isa: Isa,
    ) -> Result<Self> {
        let imitation = Arc::new(loss.imitation().build(&shape)?);
        let loss = Arc::new(loss.build(&shape)?);
        let (heads, PolicyConfig { seed, greedy, values, .. }) = (loss.heads.clone(), *config);
        let sampler = Arc::new(Sampler { heads, seed, greedy });
        let graph = Arc::new(shape.graph(config)?);
        let options = SequenceOptions { seed, isa, owner: Owner::Policy, values };
        let network = SequenceNetwork::new(stream, graph, options)?;
        let len = report_len(loss.heads.len());
        let report = Tensor::zeros(stream, [len], DType::F64, Owner::Policy)?;
        Ok(Self { network, shape, loss, imitation, sampler, report, reference: None })
    }

    /// Words per slot of [`crate::Legality::write_places`].
    pub fn legality_words(&self) -> usize {
        self.sampler.words()
    }

    /// Sets the probability floors for all later draws and passes. Does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`] for a floor that is negative or not finite.
    pub fn set_floors(&mut self, floors: &Floors) -> Result<()> {
        if self.loss.heads.iter().map(|head| head.floor).eq(floors.iter().copied()) {
            return Ok(());
        }
        loss::check(floors.map(|floor| ("floors", floor)))?;
        let mut loss = PpoLoss::clone(&self.loss);
        loss.heads.iter_mut().zip(floors).for_each(|(head, floor)| head.floor = *floor);
        self.sampler = Arc::new(Sampler { heads: loss.heads.clone(), ..*self.sampler });
        self.loss = Arc::new(loss);
        Ok(())
    }

    /// Zero LSTM state of `sequences` envs, f32 `[sequences, 2·hidden]`.
    ///
    /// # Errors
    /// Memory.
    pub fn initial_state(&self, sequences: usize) -> Result<Tensor> {
        let shape = [sequences, 2 * self.shape.hidden];
        Ok(Tensor::zeros(self.stream(), shape, DType::F32, Owner::Policy)?)
    }

    /// Advances all envs by one step and draws an action for each. `next` `[envs, 2·hidden]`
    /// receives the state after the step; it may not be the tensor of the state before the step, so
    /// keep two and swap them. One launch; does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`], memory, a failed stream.
    pub fn act(
        &mut self,
        inputs: &PolicyInputs<'_>,
        tensors: &ActTensors<'_>,
        next: &Tensor,
    ) -> Result<()> {
        let &ActTensors { legality, step, choices, legal, log_probs, entropies, values, .. } =
            tensors;
        let draw = SequenceDraw {
            sampler: &self.sampler,
            from: [legality, step],
            to: [choices, legal, log_probs, entropies, values],
            seen: &tensors.seen,
        };
        self.network.act(&SequenceRun { steps: 1, inputs: &inputs.all() }, &draw, &[next])
    }

    /// Runs the network over whole sequences; rows are `[steps][envs]`. `output` `[rows, logits +
    /// 1]` receives the logits of all heads, then V. `next` `[envs, 2·hidden]` receives the state
    /// after the last step. One launch; does not wait.
    ///
    /// # Errors
    /// The errors of [`Policy::act`].
    pub fn forward(
        &mut self,
        steps: usize,
        inputs: &PolicyInputs<'_>,
        output: &Tensor,
        next: &Tensor,
    ) -> Result<()> {
        self.network.forward(&SequenceRun { steps, inputs: &inputs.all() }, output, &[next])
    }

    /// Computes the gradient of one pass of an update: forward, loss and backward in one launch.
    /// The parameters are unchanged. Read [`Policy::report`] before [`Policy::apply`]. Does not
    /// wait.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor of another shape or type, or for a later pass without a
    /// first pass of the same number of rows; memory, a failed stream.
    pub fn differentiate(&mut self, batch: &PolicyBatch<'_>, pass: PpoPass) -> Result<()> {
        let loss = self.loss.clone();
        self.pass(&loss, batch, pass)
    }

    /// Like a later pass of [`Policy::differentiate`], with probability ratios relative to
    /// `log_probs`, f32 `[rows, heads]`: those that [`Policy::act`] wrote when it drew the choices.
    ///
    /// # Errors
    /// The errors of [`Policy::differentiate`].
    pub fn differentiate_from(
        &mut self,
        batch: &PolicyBatch<'_>,
        log_probs: &Tensor,
    ) -> Result<()> {
        let loss = self.loss.clone();
        self.check_batch(batch)?;
        self.run_loss(&loss, batch, PpoPass::Later, log_probs)
    }

    /// Computes the gradient of behaviour cloning: the loss is −Σ A·ln p(choice), averaged per head
    /// over the decisions that use the head, plus the value loss. It has no floors and no entropy
    /// bonus. All probability ratios r are 1, as in a first pass of [`Policy::differentiate`], so
    /// the gradient of r equals that of ln p.
    ///
    /// # Errors
    /// The errors of [`Policy::differentiate`].
    pub fn imitate(&mut self, batch: &PolicyBatch<'_>) -> Result<()> {
        let loss = self.imitation.clone();
        self.pass(&loss, batch, PpoPass::First)
    }

    fn pass(&mut self, loss: &Arc<PpoLoss>, batch: &PolicyBatch<'_>, pass: PpoPass) -> Result<()> {
        let rows = self.check_batch(batch)?;
        let heads = self.loss.heads.len();
        let known = self.reference.take().filter(|reference| reference.dims() == [rows, heads]);
        let reference = match (known, pass) {
            (Some(reference), _) => reference,
            (None, PpoPass::First) => {
                Tensor::empty(self.stream(), [rows, heads], DType::F32, Owner::Policy)?
            }
            (None, PpoPass::Later) => {
                let expected = format!("a first pass of {rows} rows before it");
                return Err(argument("pass", expected, "none".into()));
            }
        };
        self.run_loss(loss, batch, pass, &reference)?;
        self.reference = Some(reference);
        Ok(())
    }

    fn run_loss(
        &mut self,
        loss: &Arc<PpoLoss>,
        batch: &PolicyBatch<'_>,
        pass: PpoPass,
        reference: &Tensor,
    ) -> Result<()> {
        let data = [batch.choices, batch.legal, batch.advantages, batch.returns];
        let results = [reference, &self.report];
        let run = SequenceRun { steps: batch.steps, inputs: &batch.inputs.all() };
        self.network.differentiate(&run, loss, pass, &data, &results)
    }

    /// Statistics of the last pass, and the L2 norm of its gradient before clipping. One read-back;
    /// waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub fn report(&self) -> Result<(PpoReport, f64)> {
        let raw = read_back_f64(&[&self.report, self.network.metrics()])?;
        let [report, metrics] = [0, 1].map(|i| raw.get(i).map_or(&[][..], Vec::as_slice));
        let norm = Metrics::parse(metrics).groups.first().map_or(0.0, |host| host.last_norm);
        Ok((PpoReport::parse(report), norm))
    }

    /// Gradient of every parameter in the last pass, by name; see [`SequenceNetwork::gradients`].
    ///
    /// # Errors
    /// [`Error::Argument`] without a pass.
    pub fn gradients(&self) -> Result<Vec<(&str, Tensor)>> {
        self.network.gradients()
    }

    /// Recomputes the L2 norm of the gradient, after the tensors of [`Policy::gradients`] were
    /// overwritten. Does not wait.
    ///
    /// # Errors
    /// [`Error::Argument`] without a pass.
    pub fn measure(&mut self) -> Result<()> {
        self.network.measure()
    }

    /// Clips the last pass's gradient and applies Adam's step. Does not wait. Do not call this
    /// after a loss or norm that is not finite.
    ///
    /// # Errors
    /// [`Error::Argument`] without a pass before it, a failed stream.
    pub fn apply(&mut self) -> Result<()> {
        self.network.apply()
    }

    /// Parameters under PyTorch's names. One read-back; waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub fn state_dict(&self) -> Result<StateDict> {
        self.network.state_dict()
    }

    /// Sets the parameters, all or nothing. Does not wait.
    ///
    /// # Errors
    /// [`meristem_nn::StateError`] lists every tensor that does not fit.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.network.load_state_dict(state)
    }

    /// Adam's averages (`{parameter}.exp_avg`, `.exp_avg_sq`) and steps (`{parameter}.step`). One
    /// read-back.
    ///
    /// # Errors
    /// A failed stream.
    pub fn optimiser_dict(&self) -> Result<StateDict> {
        self.network.momentum_dict()
    }

    /// Sets Adam's averages and steps from [`Policy::optimiser_dict`]. Does not wait.
    ///
    /// # Errors
    /// The errors of [`Policy::load_state_dict`].
    pub fn load_optimiser_dict(&mut self, state: &StateDict) -> Result<()> {
        self.network.load_momentum_dict(state)
    }

    /// Gradient of every parameter in the last pass, before clipping. One read-back.
    ///
    /// # Errors
    /// [`Error::Argument`] without a pass.
    pub fn gradient_dict(&self) -> Result<StateDict> {
        self.network.gradient_dict()
    }

    /// Number of trained parameters.
    pub fn parameters(&self) -> usize {
        self.network.graph().parameters(None)
    }

    /// Sizes of the inputs and outputs.
    pub fn shape(&self) -> &PolicyShape {
        &self.shape
    }

    /// The stream of the policy.
    pub fn stream(&self) -> &Stream {
        self.network.stream()
    }

    /// Checks the tensors of a batch and returns the number of rows. The network checks the inputs.
    fn check_batch(&self, batch: &PolicyBatch<'_>) -> Result<usize> {
        let first = batch.inputs.rows.first().and_then(|input| input.dims().first());
        let rows = first.copied().unwrap_or(0);
        let wide = |n: usize| vec![rows, n];
        for (name, tensor, dtype, shape) in [
            ("choices", batch.choices, DType::U32, wide(self.loss.heads.len())),
            ("legal", batch.legal, DType::U8, wide(self.loss.logits())),
            ("advantages", batch.advantages, DType::F32, vec![rows]),
            ("returns", batch.returns, DType::F32, vec![rows]),
        ] {
            if tensor.dtype() != dtype || tensor.dims() != shape {
                let got = format!("{} {:?}", tensor.dtype(), tensor.dims());
                return Err(argument(name, format!("{dtype} {shape:?}"), got));
            }
        }
        Ok(rows)
    }
}

fn argument(argument: &'static str, expected: String, got: String) -> Error {
    Error::Argument { operation: "policy", argument, expected, got }
}

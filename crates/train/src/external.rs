//! Blueprints, controllers, searchers and losses that a program passes to a run.
//!
//! A controller needs only the trait [`Controller`]. With [`External`] it also receives the envs at
//! two points of each step, and may wait there: before the step, and before the decision.

use std::sync::Arc;

use meristem_control::{ActionOp, Controller, EnvFacts, EnvView, SlotHistory, WidthScores};
use meristem_device::Tensor;
use meristem_grow::{BlueprintSet, GateInputs, Host};
use meristem_nn::ScoreKind;

use crate::config::types::Member;
use crate::error::Result;
use crate::sweep::EndReason;

/// Blueprints and code of the calling program for a run, which are not settings.
#[derive(Default)]
pub struct Custom {
    /// Blueprints of the run; `None` for the blueprints of its settings.
    pub blueprints: Option<BlueprintSet>,
    /// The controller of a run whose setting `controller` is
    /// [`External`](crate::settings::ControllerKind::External); `None` for any other.
    pub controller: Option<OwnController>,
    /// The program's search, which chooses the settings of members and ends members.
    pub searcher: Option<Box<dyn Searcher>>,
    /// The loss of a run whose setting `loss` is
    /// [`External`](crate::settings::LossKind::External); `None` for any other.
    pub loss: Option<Box<dyn OwnLoss>>,
}

/// Loss that a program computes, in host memory. A run makes one call at a time, in the order of
/// the envs: for each batch of training, for each configuration of modules on a batch of the
/// control split, and on the test split. With `data_parallel` each rank calls it in training from
/// the rank's thread, with the rank's part of the batch; ranks call in any order. A run with
/// twins calls it for their batches as well. Before the first step the run calls it with outputs
/// that are all 0: the mean over the training split is the loss of guessing.
///
/// The loss of a batch is the mean over its samples. The results of a run have the same bits for
/// any number of workers, and after it was resumed, if the loss depends only on its arguments.
///
/// ```
/// use meristem_train::external::{LossBatch, LossTargets, OwnLoss};
///
/// /// Pinball loss: its best constant output has this share of the targets below it.
/// struct Pinball(f32);
///
/// impl OwnLoss for Pinball {
///     fn compute(
///         &mut self,
///         batch: &LossBatch,
///         losses: &mut [f32],
///         gradient: Option<&mut [f32]>,
///     ) -> meristem_train::Result<()> {
///         let LossTargets::Numbers(targets) = &batch.targets else {
///             let problem = "expected targets that are numbers, got classes".into();
///             return Err(meristem_train::Error::OwnLoss { problem });
///         };
///         let (share, width) = (self.0, batch.width as f32);
///         let slope = |(target, output): (&f32, &f32)| {
///             (if target > output { -share } else { 1.0 - share }) / width
///         };
///         let slopes = || targets.iter().zip(batch.outputs.iter()).map(slope);
///         let distances = batch.outputs.iter().zip(targets.iter()).map(|(o, t)| o - t);
///         let all: Vec<f32> = slopes().zip(distances).map(|(slope, by)| slope * by).collect();
///         for (loss, row) in losses.iter_mut().zip(all.chunks(batch.width)) {
///             *loss = row.iter().sum();
///         }
///         if let Some(gradient) = gradient {
///             gradient.iter_mut().zip(slopes()).for_each(|(to, slope)| *to = slope);
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait OwnLoss: Send {
    /// Writes the loss of each sample to `losses`, `[samples]`, and in training the derivative of
    /// each sample's loss with respect to the outputs of that sample to `gradient`,
    /// `[samples][width]`. A value that is not finite is a failure of the training, as with a
    /// built-in loss.
    ///
    /// # Errors
    /// An error of the program, such as [`Error::OwnLoss`](crate::Error::OwnLoss). It ends the run,
    /// which can be resumed from its last checkpoint.
    fn compute(
        &mut self,
        batch: &LossBatch,
        losses: &mut [f32],
        gradient: Option<&mut [f32]>,
    ) -> Result<()>;

    /// Whether the run calls [`OwnLoss::compute_on_device`] instead.
    fn is_on_device(&self) -> bool {
        false
    }

    /// As [`OwnLoss::compute`], for tensors in the memory of the device. The derivatives are
    /// multiplied by the batch's factor and written to `gradient`, f32 `[samples, width]`, in the
    /// order of its stream.
    ///
    /// # Errors
    /// As [`OwnLoss::compute`]. By default [`Error::OwnLoss`](crate::Error::OwnLoss).
    fn compute_on_device(
        &mut self,
        _batch: &DeviceLossBatch<'_>,
        _losses: &mut [f32],
        _gradient: Option<&Tensor>,
    ) -> Result<()> {
        let problem = "expected `compute_on_device`, because `is_on_device` returns true".into();
        Err(crate::Error::OwnLoss { problem })
    }
}

/// Outputs of a network and targets of a batch on a device. No enqueued work writes them.
#[derive(Clone, Copy, Debug)]
pub struct DeviceLossBatch<'a> {
    /// Outputs of the network, f32 `[samples, width]`.
    pub outputs: &'a Tensor,
    /// Numbers of the classes, u32 `[samples]`, or labels or standardised numbers, f32
    /// `[samples, width]`.
    pub targets: &'a Tensor,
    /// Factor of the derivatives: the weight of a sample in the loss of the batch.
    pub factor: f32,
}

/// Outputs of a network and targets of a batch.
#[derive(Clone, Debug)]
pub struct LossBatch {
    /// Number of samples.
    pub samples: usize,
    /// Outputs of a sample: classes, labels or numbers.
    pub width: usize,
    /// Outputs of the network, `[samples][width]`.
    pub outputs: Arc<Vec<f32>>,
    /// Targets.
    pub targets: LossTargets,
}

/// Targets of a batch.
#[derive(Clone, Debug)]
pub enum LossTargets {
    /// Number of the class of each sample, `[samples]`.
    Classes(Arc<Vec<u32>>),
    /// Labels from 0 to 1, or standardised numbers, `[samples][width]`.
    Numbers(Arc<Vec<f32>>),
}

impl From<Box<dyn OwnLoss>> for Custom {
    fn from(loss: Box<dyn OwnLoss>) -> Self {
        Self { loss: Some(loss), ..Self::default() }
    }
}

/// Search over settings of members by a program, such as an optimiser of hyperparameters. It is
/// called after each step, in the order of the members' numbers.
pub trait Searcher: Send {
    /// Settings of the next member, which override those of the run. Called when a member begins,
    /// in a run whose setting `sampler` is [`External`](crate::settings::Sampler::External).
    ///
    /// # Errors
    /// An error of the searcher, which ends the run.
    fn suggest(&mut self, member: usize) -> Result<Member>;

    /// Reports the control score of a member after a step of its own, counted from 1: the mean over
    /// its envs, or `None` without a control split or if training failed. Returns whether the
    /// member goes on.
    ///
    /// # Errors
    /// An error of the searcher, which ends the run.
    fn report(&mut self, _member: usize, _steps: usize, _score: Option<f64>) -> Result<bool> {
        Ok(true)
    }

    /// Reports that a member is not trained any more: it has made all its steps (`None`), or has
    /// ended.
    ///
    /// # Errors
    /// An error of the searcher, which ends the run.
    fn complete(&mut self, _member: usize, _ended: Option<EndReason>) -> Result<()> {
        Ok(())
    }
}

impl From<Box<dyn Searcher>> for Custom {
    fn from(searcher: Box<dyn Searcher>) -> Self {
        Self { searcher: Some(searcher), ..Self::default() }
    }
}

/// A controller that is code of the program.
pub enum OwnController {
    /// A controller that only decides.
    Deciding(Box<dyn Controller>),
    /// A controller that also receives the envs before each step and before each decision.
    Looking(Box<dyn External>),
}

impl From<BlueprintSet> for Custom {
    fn from(blueprints: BlueprintSet) -> Self {
        Self { blueprints: Some(blueprints), ..Self::default() }
    }
}

impl From<Box<dyn Controller>> for Custom {
    fn from(controller: Box<dyn Controller>) -> Self {
        Self { controller: Some(OwnController::Deciding(controller)), ..Self::default() }
    }
}

impl From<Box<dyn External>> for Custom {
    fn from(controller: Box<dyn External>) -> Self {
        Self { controller: Some(OwnController::Looking(controller)), ..Self::default() }
    }
}

/// Answer to [`External::before_step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// Run the step.
    Step,
    /// Write a checkpoint, then call [`External::before_step`] again. Before the first step of a
    /// round nothing is written.
    Checkpoint,
    /// End the run here, with weights and summary, and with a checkpoint if the run has made a
    /// step.
    Stop,
}

/// A controller of the program that receives the envs of a run. Each process of a run has one, and
/// all must return the same values.
pub trait External: Controller {
    /// Called before every step. The envs are as the last step left them, or fresh.
    ///
    /// # Errors
    /// An error of the controller, which ends the run.
    fn before_step(&mut self, _envs: &mut dyn Envs) -> Result<Continuation> {
        Ok(Continuation::Step)
    }

    /// Called in every step after training and measurement, before [`Controller::decide_all`].
    ///
    /// # Errors
    /// An error of the controller, which ends the run.
    fn before_decision(&mut self, _envs: &mut dyn Envs) -> Result<()> {
        Ok(())
    }

    /// Whether the run stops. Called at the end of each round. A resumed run begins the next round.
    fn stops_after_round(&mut self) -> bool {
        false
    }
}

/// The envs of a process, as an external controller sees them.
pub trait Envs {
    /// State and measurements of each env.
    fn seen(&self) -> Vec<SeenEnv>;

    /// An env's weights, `env` counted from 0 in this process, as the contents of a weights file.
    /// Waits for the device.
    ///
    /// # Errors
    /// A failed device.
    fn weights(&mut self, env: usize) -> Result<Vec<u8>>;
}

/// State and measurements of an env, copied out of a run.
#[derive(Clone, Debug)]
pub struct SeenEnv {
    /// Number of the env.
    pub env: usize,
    /// Round, from 0.
    pub round: usize,
    /// Step within the episode, from 0.
    pub step: u32,
    /// Steps of an episode.
    pub episode_steps: u32,
    /// The host and its modules.
    pub host: Host,
    /// Results of the last step.
    pub figures: StepFigures,
    /// Reward of the last action.
    pub reward: f32,
    // The other fields of an `EnvView`, except `width_scores`.
    pub(crate) scores_pp: Vec<f32>,
    pub(crate) losses: Vec<f32>,
    pub(crate) twin_loss: Option<f32>,
    pub(crate) train_losses: Vec<f32>,
    pub(crate) measured: Vec<GateInputs>,
    pub(crate) history: Vec<SlotHistory>,
    pub(crate) facts: EnvFacts,
    pub(crate) last: Option<(ActionOp, bool)>,
}

/// Results of an env's step.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct StepFigures {
    /// Mean training loss over the step.
    pub train_loss: f64,
    /// Kind of the scores. The Python attribute is `score`.
    #[serde(rename = "score")]
    pub score_kind: ScoreKind,
    /// Training score over the step.
    pub train_score: f64,
    /// Control loss after the step; `None` without a control split.
    pub control_loss: Option<f64>,
    /// Control score after the step; `None` without a control split.
    pub control_score: Option<f64>,
    /// Trained parameters of the host without modules.
    pub host_parameters: usize,
    /// Trained parameters of the modules.
    pub grown_parameters: usize,
}

impl SeenEnv {
    /// A copy of a view, with the results that a view lacks.
    pub(crate) fn from_view(
        view: &EnvView<'_>,
        round: usize,
        figures: StepFigures,
        reward: f32,
    ) -> Self {
        Self {
            env: view.env,
            round,
            step: view.step,
            episode_steps: view.episode_steps,
            host: view.host.clone(),
            figures,
            reward,
            scores_pp: view.scores_pp.to_vec(),
            losses: view.losses.to_vec(),
            twin_loss: view.twin_loss,
            train_losses: view.train_losses.to_vec(),
            measured: view.measured.to_vec(),
            history: view.history.to_vec(),
            facts: view.facts,
            last: view.last,
        }
    }

    /// The view that a controller gets, without scores of the layers.
    pub fn view(&self) -> EnvView<'_> {
        EnvView {
            env: self.env,
            host: &self.host,
            step: self.step,
            episode_steps: self.episode_steps,
            scores_pp: &self.scores_pp,
            losses: &self.losses,
            twin_loss: self.twin_loss,
            train_losses: &self.train_losses,
            measured: &self.measured,
            history: &self.history,
            width_scores: WidthScores::NONE,
            facts: self.facts,
            last: self.last,
        }
    }
}

//! A run that the calling program steps, and whose actions it chooses.
//!
//! The run is started with [`run_with`] on a separate thread. Its external controller waits for the
//! program before each step and before each decision. Results, events and folder do not differ from
//! other runs.
//!
//! ```no_run
//! use meristem_control::Action;
//! use meristem_train::config::{ConfigLayer, TrainConfig};
//! use meristem_train::session::Session;
//! use meristem_train::settings::ControllerKind;
//!
//! # fn main() -> meristem_train::Result<()> {
//! let controller = Some(ControllerKind::External);
//! let flags = ConfigLayer { controller, ..ConfigLayer::default() };
//! let config = TrainConfig::resolve(ConfigLayer::default(), flags)?;
//! let mut session = Session::start(&config)?;
//! for _ in 0..3 {
//!     let actions = vec![Action::Wait; session.step(&mut || {})?.len()];
//!     let rewards = session.act(actions, &mut || {})?;
//!     println!("{rewards:?}");
//! }
//! let summary = session.close()?;
//! # Ok(())
//! # }
//! ```

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use meristem_control::{Action, Controller, EnvView, RoundReport, legal};

use crate::config::{ConfigLayer, TrainConfig};
use crate::error::{Error, Result};
use crate::external::{Continuation, Custom, Envs, External, OwnController, SeenEnv};
use crate::record::observer::{Notice, Observer};
use crate::record::summary::Summary;
use crate::run::{resume_with, run_with};

/// Time between two calls of the function `idle`.
const IDLE: Duration = Duration::from_millis(20);

/// Most warnings that are kept until the program takes them; later warnings are dropped.
const WARNINGS_MAX: usize = 16;

/// Observer of a session: forwards warnings.
struct SessionWarnings(SyncSender<String>);

impl Observer for SessionWarnings {
    fn notice(&mut self, notice: &Notice<'_>) {
        if let Some(warning) = notice.warning() {
            _ = self.0.try_send(warning);
        }
    }
}

/// Request of the program to the run.
enum SessionRequest {
    Step,
    Act(Vec<Action>),
    Weights(usize),
    Checkpoint,
    Stop,
}

/// Reply of the run.
enum SessionReply {
    /// The run waits before a step.
    Boundary(Vec<SeenEnv>),
    /// The run waits for actions.
    Decision(Vec<SeenEnv>),
    /// The run waits at the end of a round.
    End(Vec<SeenEnv>),
    Weights(Vec<u8>),
    /// A checkpoint was written.
    Written,
}

/// Point at which a run waits for its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before a step: [`Session::step`] is next.
    Boundary,
    /// Before the decision of a step: [`Session::act`] is next.
    Decision,
    /// After the last step of a round: [`Session::step`] begins the next round.
    End,
}

/// A run that waits for its program before each step, before each decision, and at the end of each
/// round. Dropping it ends the run as [`Session::close`] does.
pub struct Session {
    requests: SyncSender<SessionRequest>,
    replies: Receiver<SessionReply>,
    thread: Option<JoinHandle<Result<Summary>>>,
    /// Results of a run that is over.
    summary: Option<Summary>,
    point: Point,
    envs: Vec<SeenEnv>,
    warned: Receiver<String>,
}

impl Session {
    /// Starts a run with the settings of `config`, whose controller is
    /// [`External`](crate::settings::ControllerKind::External). Blocks until it waits before its
    /// first step.
    ///
    /// # Errors
    /// As [`run`](crate::run); another setting `controller`.
    pub fn start(config: &TrainConfig) -> Result<Self> {
        Self::start_with(config, Custom::default())
    }

    /// Like [`Session::start`], with code of the calling program: blueprints, loss, searcher. The
    /// session itself is the controller.
    ///
    /// # Errors
    /// As [`Session::start`], and the errors of [`run_with`].
    pub fn start_with(config: &TrainConfig, custom: impl Into<Custom>) -> Result<Self> {
        let config = config.clone();
        let run = move |custom, observer: &mut dyn Observer| run_with(&config, custom, observer);
        Self::with_run(custom.into(), run)
    }

    /// Resumes the run of an earlier session, at the boundary after its last checkpoint.
    ///
    /// # Errors
    /// As [`resume`](crate::resume), also for a complete run.
    pub fn resume(folder: PathBuf, options: ConfigLayer) -> Result<Self> {
        Self::resume_with(folder, options, Custom::default())
    }

    /// Like [`Session::resume`], with the code that [`Session::start_with`] was called with.
    ///
    /// # Errors
    /// As [`Session::resume`], and the errors of [`resume_with`].
    pub fn resume_with(
        folder: PathBuf,
        options: ConfigLayer,
        custom: impl Into<Custom>,
    ) -> Result<Self> {
        Self::with_run(custom.into(), move |custom, observer: &mut dyn Observer| {
            resume_with(&folder, &options, custom, observer)
        })
    }

    fn with_run(
        custom: Custom,
        run: impl FnOnce(Custom, &mut dyn Observer) -> Result<Summary> + Send + 'static,
    ) -> Result<Self> {
        // Each side waits for the other, so that neither is ever two messages ahead.
        let (requests, asked) = sync_channel(1);
        let (answers, replies) = sync_channel(1);
        let remote = Remote {
            asked,
            answers,
            seen: vec![],
            actions: vec![],
            rewards: vec![],
            point: Point::Boundary,
            written: false,
            stops: false,
        };
        let controller = Some(OwnController::Looking(Box::new(remote)));
        let custom = Custom { controller, ..custom };
        // The notices of a run are few, and come before its first step.
        let (warnings, warned) = sync_channel(WARNINGS_MAX);
        let thread = std::thread::Builder::new().name("session".into());
        let thread = thread.spawn(move || run(custom, &mut SessionWarnings(warnings)));
        let thread = thread.map_err(|source| Error::RunFolder {
            action: "start a thread for",
            path: PathBuf::new(),
            source,
        })?;
        let (point, envs) = (Point::Boundary, vec![]);
        let (thread, summary) = (Some(thread), None);
        let mut session = Self { requests, replies, thread, summary, point, envs, warned };
        session.arrive(&mut || {})?;
        Ok(session)
    }

    /// Point at which the run waits.
    pub fn point(&self) -> Point {
        self.point
    }

    /// Warnings of the run that were not taken yet, for example that its results will differ from
    /// a run that was never moved or extended ([`Notice::warning`]).
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.warned.try_iter().collect()
    }

    /// The envs at this point.
    pub fn envs(&self) -> &[SeenEnv] {
        &self.envs
    }

    /// Trains and measures all envs for one step; at the end of a round, for the first step of the
    /// next round. Returns the envs before their actions. Calls `idle` regularly while it waits.
    ///
    /// # Errors
    /// Actions are due ([`Session::act`]); the run is over; a failure of the run, which ends it.
    pub fn step(&mut self, idle: &mut dyn FnMut()) -> Result<&[SeenEnv]> {
        self.check(self.point != Point::Decision, "step")?;
        self.ask(SessionRequest::Step)?;
        self.arrive(idle)?;
        Ok(&self.envs)
    }

    /// Executes an action for each env, in order. Returns their rewards. After the last step of a
    /// round the point is [`Point::End`]. Calls `idle` regularly while it waits.
    ///
    /// # Errors
    /// [`Error::Session`]: an action that is not legal, too many or too few actions, or no actions
    /// are due; nothing was executed. A failure of the run, which ends it.
    pub fn act(&mut self, actions: Vec<Action>, idle: &mut dyn FnMut()) -> Result<Vec<f32>> {
        self.check(self.point == Point::Decision, "act")?;
        let wrong = |problem: String| Err(Error::Session { problem });
        if actions.len() != self.envs.len() {
            let (expected, got) = (self.envs.len(), actions.len());
            return wrong(format!("expected an action for each of {expected} envs, got {got}"));
        }
        for (action, seen) in actions.iter().zip(&self.envs) {
            if let Err(reason) = legal(action, &seen.host) {
                let op = action.op();
                return wrong(format!("{op} is not legal in env {}: {reason}", seen.env));
            }
        }
        self.ask(SessionRequest::Act(actions))?;
        self.arrive(idle)?;
        Ok(self.envs.iter().map(|seen| seen.reward).collect())
    }

    /// Weights of an env, as the contents of a weights file. `env` is its position in
    /// [`Session::envs`]. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Session`]: there is no such env, the round has ended, or the run is over. A failure
    /// of the run, which ends it.
    pub fn weights(&mut self, env: usize) -> Result<Vec<u8>> {
        self.check(self.point != Point::End, "weights")?;
        if env >= self.envs.len() {
            let problem = format!("there is no env {env}: the run has {}", self.envs.len());
            return Err(Error::Session { problem });
        }
        self.ask(SessionRequest::Weights(env))?;
        match self.receive(&mut || {})? {
            SessionReply::Weights(bytes) => Ok(bytes),
            _ => unreachable!("a run answers a request with its reply"),
        }
    }

    /// Writes a checkpoint, from which the run resumes at this boundary. At the first step of a
    /// round there is nothing to write.
    ///
    /// # Errors
    /// [`Error::Session`]: the run does not wait before a step ([`Point::Boundary`]), or is over. A
    /// failure of the run, such as a full disk, which ends it.
    pub fn checkpoint(&mut self) -> Result<()> {
        self.check(self.point == Point::Boundary, "checkpoint")?;
        self.ask(SessionRequest::Checkpoint)?;
        self.receive(&mut || {}).map(|_| ())
    }

    /// Ends the run at this boundary, with weights, summary and checkpoint, from which it resumes.
    /// If actions are due, all of them are WAIT.
    ///
    /// # Errors
    /// A failure of the run.
    pub fn close(mut self) -> Result<Summary> {
        self.end()
    }

    /// Ends the run, if it is not over, and waits for its thread. Returns the summary once.
    fn end(&mut self) -> Result<Summary> {
        // Fails if the run is over.
        _ = self.requests.send(SessionRequest::Stop);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => self.summary.take().ok_or_else(over),
        }
    }

    fn check(&self, fits: bool, call: &str) -> Result<()> {
        if fits {
            return Ok(());
        }
        let point = match self.point {
            Point::Boundary => "no actions are due; train a step first",
            Point::Decision => "the actions of this step are due; execute them first",
            Point::End => "the round has ended; train a step of the next round first",
        };
        Err(Error::Session { problem: format!("`{call}`: {point}") })
    }

    fn ask(&mut self, request: SessionRequest) -> Result<()> {
        match self.requests.send(request) {
            Ok(()) => Ok(()),
            Err(_) => Err(self.failure()),
        }
    }

    /// Waits until the run reaches its next point.
    fn arrive(&mut self, idle: &mut dyn FnMut()) -> Result<()> {
        (self.point, self.envs) = match self.receive(idle)? {
            SessionReply::Boundary(envs) => (Point::Boundary, envs),
            SessionReply::Decision(envs) => (Point::Decision, envs),
            SessionReply::End(envs) => (Point::End, envs),
            SessionReply::Weights(_) | SessionReply::Written => {
                unreachable!("a run answers a request with its reply")
            }
        };
        Ok(())
    }

    fn receive(&mut self, idle: &mut dyn FnMut()) -> Result<SessionReply> {
        loop {
            match self.replies.recv_timeout(IDLE) {
                Ok(reply) => return Ok(reply),
                Err(RecvTimeoutError::Timeout) => idle(),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failure()),
            }
        }
    }

    /// The error for a request to a run that has ended: the run's own, or that it is over.
    fn failure(&mut self) -> Error {
        match self.end() {
            Ok(summary) => {
                self.summary = Some(summary);
                over()
            }
            Err(error) => error,
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.thread.is_some() {
            // A failure is recorded in the run folder.
            _ = self.end();
        }
    }
}

fn over() -> Error {
    Error::Session { problem: "the run is over".into() }
}

/// The program, as the run's controller.
struct Remote {
    asked: Receiver<SessionRequest>,
    answers: SyncSender<SessionReply>,
    /// The envs of the last decision.
    seen: Vec<SeenEnv>,
    actions: Vec<Action>,
    rewards: Vec<f32>,
    /// Point at which the run last waited for the program.
    point: Point,
    /// Whether the last request was a checkpoint, so that the next reply says that it is written.
    written: bool,
    /// Whether the run is to end at the next boundary.
    stops: bool,
}

impl Remote {
    /// The next request other than for weights, which are answered here. A program that is gone
    /// counts as a request to stop.
    fn next(&mut self, envs: &mut dyn Envs) -> Result<SessionRequest> {
        loop {
            match self.asked.recv() {
                Ok(SessionRequest::Weights(env)) => {
                    let weights = envs.weights(env)?;
                    _ = self.answers.send(SessionReply::Weights(weights));
                }
                Ok(request) => return Ok(request),
                Err(_) => return Ok(SessionRequest::Stop),
            }
        }
    }
}

impl External for Remote {
    fn before_step(&mut self, envs: &mut dyn Envs) -> Result<Continuation> {
        if self.stops {
            return Ok(Continuation::Stop);
        }
        if std::mem::replace(&mut self.point, Point::Boundary) == Point::End {
            // The program requested this step at the end of the round before.
            return Ok(Continuation::Step);
        }
        let written = std::mem::take(&mut self.written);
        let reply =
            if written { SessionReply::Written } else { SessionReply::Boundary(envs.seen()) };
        _ = self.answers.send(reply);
        match self.next(envs)? {
            SessionRequest::Checkpoint => {
                self.written = true;
                Ok(Continuation::Checkpoint)
            }
            SessionRequest::Stop => Ok(Continuation::Stop),
            _ => Ok(Continuation::Step),
        }
    }

    fn before_decision(&mut self, envs: &mut dyn Envs) -> Result<()> {
        self.point = Point::Decision;
        self.seen = envs.seen();
        self.actions = vec![Action::Wait; self.seen.len()];
        _ = self.answers.send(SessionReply::Decision(self.seen.clone()));
        match self.next(envs)? {
            SessionRequest::Act(actions) => self.actions = actions,
            _ => self.stops = true,
        }
        Ok(())
    }

    fn stops_after_round(&mut self) -> bool {
        self.stops
    }
}

impl Controller for Remote {
    fn name(&self) -> &str {
        "external"
    }

    fn decide_all(&mut self, _views: &[EnvView<'_>]) -> meristem_control::Result<Vec<Action>> {
        Ok(std::mem::take(&mut self.actions))
    }

    fn reward_all(&mut self, rewards: &[f32]) -> meristem_control::Result<()> {
        self.rewards = rewards.to_vec();
        Ok(())
    }

    fn end_round(&mut self, last: &[EnvView<'_>]) -> meristem_control::Result<Option<RoundReport>> {
        if self.stops {
            return Ok(None);
        }
        let last = self.seen.iter().zip(last).zip(&self.rewards);
        let seen = last.map(|((seen, view), reward)| {
            SeenEnv::from_view(view, seen.round, seen.figures, *reward)
        });
        let seen = seen.collect();
        self.point = Point::End;
        _ = self.answers.send(SessionReply::End(seen));
        self.stops = !matches!(self.asked.recv(), Ok(SessionRequest::Step));
        Ok(None)
    }
}

#[cfg(test)]
mod tests;

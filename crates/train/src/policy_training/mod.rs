//! Training of a policy of the form `set` or `set-widen`, which serves any host, on many cheap
//! tasks.
//!
//! A round draws a dataset with its difficulty and a fleet of members with hosts and settings of
//! their own, trains them for one episode in which the policy acts, and updates the policy. At
//! intervals the policy is evaluated on other tasks, beside the heuristic and random actions. A
//! round is an ordinary run without a folder; the policy is its controller.
//!
//! - `request`: the file with the request;
//! - `task`: drawn tasks;
//! - `folder`: state, curves and policy on disk;
//! - `report`: the lines of the curves;
//! - `episode`: observers and the shared policy.

mod episode;
mod folder;
mod report;
mod request;
mod task;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use meristem_control::{
    Heuristic, Learning, PolicyDomain, Ppo, PpoOptions, RoundReport, TeacherRules,
};
use meristem_data::{Source, cache};
use meristem_device::Stream;
use meristem_nn::Isa;

use self::episode::{EpisodeObserver, SharedPolicy};
use self::folder::{TrainingFolder, TrainingState};
use self::report::TaskResult;
pub use self::report::{CurveLine, Evaluated, Evaluation, TrainedRound};
use self::request::Use;
pub use self::request::{PolicyTraining, TaskFamily};
use self::task::{draw, family};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::external::Custom;
use crate::processes::World;
use crate::record::observer::Observer;
use crate::record::summary::Status;
use crate::resources::OpenDevices;
use crate::run::run_without_folder;
use crate::settings::{ControllerKind, ObservationForm};
use crate::setup::{Hosts, OtherInputs, ResolvedNames};

/// Controllers of an evaluation that do not learn, by name.
const REFERENCES: [(&str, ControllerKind); 2] =
    [("heuristic", ControllerKind::Heuristic), ("random", ControllerKind::Random)];

/// Forms of the policy in an evaluation, by name.
const FORMS: [(&str, Learning); 2] = [("policy", Learning::Off), ("greedy", Learning::Greedy)];

/// Receives the lines of the curves, and may request a stop. The events of the runs are not
/// reported.
pub trait TrainingObserver: Observer {
    /// Reports a round or an evaluation that has ended. If a training continues, the lines of the
    /// earlier processes are reported first.
    fn line(&mut self, _line: &CurveLine) {}
}

impl TrainingObserver for crate::record::observer::Silent {}

/// Result of a training.
#[derive(Clone, Debug)]
pub struct TrainedPolicy {
    /// Completed or interrupted.
    pub status: Status,
    /// Lines of the curves.
    pub lines: Vec<CurveLine>,
}

/// Trains a policy, or goes on in the folder of an earlier training with the same request. The
/// policy has the same bits as without an interruption, even if the earlier process was killed.
/// Blocks until it is done, or until the observer requests a stop.
///
/// # Errors
/// Errors in the request are found before the first round. [`Error::Resume`]: the folder belongs to
/// another request, or another process writes to it. [`Error::RunFolderExists`]: the folder has
/// other files. A round whose training diverges is counted, and the policy does not learn from it;
/// any other failure of a round ends the training.
pub fn train_policy(
    request: &PolicyTraining,
    folder: &Path,
    observer: &mut dyn TrainingObserver,
) -> Result<TrainedPolicy> {
    World::check_alone("one process, without mpirun")?;
    request.check()?;
    let request = &request.clone().with_version_of(folder::request_in(folder).as_ref());
    let plan = Plan::new(request)?;
    let folder = TrainingFolder::open(folder, request)?;
    let trained = Training::open(&plan, &folder)?.run(observer);
    clear_cache();
    trained
}

/// Rules of the heuristic in each env of a run.
fn teacher_rules(config: &TrainConfig) -> Vec<TeacherRules> {
    let members = config.of_members();
    let rules = |config: &TrainConfig| TeacherRules {
        // `max_parameters` is that for 0 training samples here; the policy replaces it by that for
        // the training samples of the env.
        heuristic: config.heuristic_config(0),
        parameters_per_image: config.parameters_per_image,
    };
    (0..config.envs).map(|env| rules(&members[env % members.len()])).collect()
}

/// Removes generated data from the cache; a training has many datasets.
fn clear_cache() {
    cache::clear(|key| !key.source.has_files() && key.source != Source::Embedded);
}

/// A checked request.
struct Plan<'a> {
    request: &'a PolicyTraining,
    /// Settings of the first round.
    first: TrainConfig,
    /// Slots, blueprints and layers of the hosts with the most of them, in any round or evaluation.
    domain: PolicyDomain,
    /// Steps of the longest episode.
    steps: usize,
    isa: Isa,
}

impl<'a> Plan<'a> {
    /// Draws all tasks, so that errors are found before the first round.
    fn new(request: &'a PolicyTraining) -> Result<Self> {
        let task = |of, number| draw(request, of, number, ControllerKind::External);
        let (mut domain, mut steps) = (PolicyDomain::default(), 0);
        let rounds = (0..request.rounds).map(|number| (Use::Round, number));
        let evaluations = (0..request.last_tasks()).map(|number| (Use::Evaluation, number));
        for (of, number) in rounds.chain(evaluations) {
            let config = task(of, number)?;
            let names = ResolvedNames::resolve(&config, OtherInputs::default(), Hosts::Fresh)?;
            names.check_can_grow(&TrainConfig {
                controller: ControllerKind::Ppo,
                ..config.clone()
            })?;
            domain = domain.with_more(names.domain());
            steps = steps.max(config.steps);
        }
        let isa = Isa::from_env().map_err(meristem_device::Error::from)?;
        Ok(Self { request, first: task(Use::Round, 0)?, domain, steps, isa })
    }

    /// A new policy on a stream.
    fn policy(&self, stream: &Stream, learning: Learning) -> Result<Ppo> {
        let of = if learning == Learning::On { Use::Round } else { Use::Evaluation };
        let (envs, seed) = (self.request.envs_of(of), self.request.seed);
        let values = self.first.precision.value_type();
        let options = PpoOptions { envs, steps: self.steps, seed, isa: self.isa, learning, values };
        let (config, domain) = (self.first.ppo_config(), self.domain.clone());
        let policy = match self.first.policy_form() {
            ObservationForm::SetWiden => Ppo::of_sets_and_layers(stream, config, domain, options)?,
            _ => Ppo::of_sets(stream, config, domain, options)?,
        };
        Ok(match learning {
            Learning::On => {
                let PolicyTraining { envs, envs_per_member, teacher_rounds, .. } = *self.request;
                let policy = policy.with_teacher(Heuristic::default(), teacher_rounds);
                match envs_per_member {
                    1 => policy,
                    of_each => policy.with_member_baseline(envs / of_each),
                }
            }
            Learning::Off | Learning::Greedy => policy,
        })
    }

    /// Whether the heuristic acts in a round.
    fn is_taught(&self, round: usize) -> bool {
        round < self.request.teacher_rounds
    }
}

/// A training in progress.
struct Training<'a> {
    plan: &'a Plan<'a>,
    folder: &'a TrainingFolder,
    devices: OpenDevices,
    stream: Stream,
    policy: SharedPolicy,
    state: TrainingState,
    lines: Vec<CurveLine>,
}

impl<'a> Training<'a> {
    fn open(plan: &'a Plan<'a>, folder: &'a TrainingFolder) -> Result<Self> {
        let names = ResolvedNames::resolve(&plan.first, OtherInputs::default(), Hosts::Fresh)?;
        let (devices, envs) = (&names.devices, 0..plan.request.envs);
        let devices = OpenDevices::open(devices, envs, &plan.first.device_options(None))?;
        let stream = devices.of_policies()[0].stream("policy");
        let policy = SharedPolicy::new(plan.policy(&stream, Learning::On)?);
        let state = match folder.read_state()? {
            None => TrainingState { round: 0, transitions: 0, policy: policy.save_learned()? },
            Some(state) => {
                policy.restore(&state.policy)?;
                state
            }
        };
        let mut lines = folder.read_curves()?;
        // A process that was killed may have written lines after its last state.
        let whole = lines.iter().take_while(|line| match line {
            CurveLine::Round(round) => round.round < state.round,
            CurveLine::Evaluation(evaluation) => evaluation.round <= state.round,
        });
        lines.truncate(whole.count());
        folder.write_curves(&lines)?;
        Ok(Self { plan, folder, devices, stream, policy, state, lines })
    }

    fn run(mut self, observer: &mut dyn TrainingObserver) -> Result<TrainedPolicy> {
        self.lines.iter().for_each(|line| observer.line(line));
        let PolicyTraining { rounds, evaluate_every, .. } = *self.plan.request;
        loop {
            let round = self.state.round;
            let every = evaluate_every > 0 && round.is_multiple_of(evaluate_every);
            let is_due = every || round == 0 || round >= rounds;
            if is_due && self.evaluation_tasks() > 0 && !self.is_evaluated(round) {
                let Some(evaluation) = self.evaluate(observer)? else { break };
                // The policy is written before the line of its evaluation, so that a line implies a
                // written policy.
                let (weights, metadata) = self.policy.export()?;
                self.folder.write_policy(&weights, &metadata)?;
                self.add(CurveLine::Evaluation(evaluation), observer)?;
            }
            if round >= rounds {
                let (weights, metadata) = self.policy.export()?;
                self.folder.write_policy(&weights, &metadata)?;
                return Ok(TrainedPolicy { status: Status::Completed, lines: self.lines });
            }
            let Some(trained) = self.round(observer)? else { break };
            self.state = TrainingState {
                round: round + 1,
                transitions: trained.transitions_total,
                policy: self.policy.save_learned()?,
            };
            self.add(CurveLine::Round(Box::new(trained)), observer)?;
            self.folder.write_state(&self.state)?;
        }
        Ok(TrainedPolicy { status: Status::Interrupted, lines: self.lines })
    }

    fn add(&mut self, line: CurveLine, observer: &mut dyn TrainingObserver) -> Result<()> {
        observer.line(&line);
        self.folder.add_curve(&line)?;
        self.lines.push(line);
        Ok(())
    }

    fn is_evaluated(&self, round: usize) -> bool {
        self.lines.iter().any(
            |line| matches!(line, CurveLine::Evaluation(evaluation) if evaluation.round == round),
        )
    }

    /// Trains a round; `None` if it was stopped. A round that diverges leaves the policy as it was.
    fn round(&mut self, observer: &mut dyn TrainingObserver) -> Result<Option<TrainedRound>> {
        let started = Instant::now();
        let round = self.state.round;
        let mut config = draw(self.plan.request, Use::Round, round, ControllerKind::External)?;
        if self.plan.is_taught(round) {
            self.policy.set_teacher_rules(teacher_rules(&config));
            // With this setting the hot scope permits the additional copies of a demonstration.
            config.ppo_demonstrations = 1;
        }
        let mut watching = EpisodeObserver::new(observer, self.plan.request.envs);
        let custom = Custom::from(self.policy.controller());
        let ran = run_without_folder(&self.devices, &config, custom, &mut watching);
        clear_cache();
        let (report, setup_seconds) = (watching.report.take(), watching.first_step_seconds());
        let report: Option<RoundReport> = match ran {
            Ok(summary) if summary.status == Status::Completed => report,
            Ok(_) => {
                self.policy.restore(&self.state.policy)?;
                return Ok(None);
            }
            Err(Error::Diverged { .. }) => {
                self.policy.restore(&self.state.policy)?;
                None
            }
            Err(error) => return Err(error),
        };
        let learned = report.as_ref().map_or(0, |report| report.transitions as u64);
        Ok(Some(TrainedRound {
            round,
            transitions_total: self.state.transitions + learned,
            seconds: started.elapsed().as_secs_f64(),
            setup_seconds,
            dataset: config.dataset,
            steps: config.steps,
            report,
        }))
    }

    /// Number of tasks of the evaluation at this point of the training.
    fn evaluation_tasks(&self) -> usize {
        let request = self.plan.request;
        let is_last = self.state.round >= request.rounds;
        if is_last { request.last_tasks() } else { request.evaluation_tasks }
    }

    /// Evaluates the policy, and the controllers that do not learn, unless an earlier line has
    /// their results. `None` if it was stopped.
    fn evaluate(&mut self, observer: &mut dyn TrainingObserver) -> Result<Option<Evaluation>> {
        let mut controllers = BTreeMap::new();
        let tasks = self.evaluation_tasks();
        let known = |name: &str| {
            let mut evaluations = self.lines.iter().filter_map(|line| match line {
                CurveLine::Evaluation(evaluation) => evaluation.controllers.get(name),
                CurveLine::Round(_) => None,
            });
            evaluations.rfind(|known| known.returns.len() == tasks).cloned()
        };
        for (name, kind) in REFERENCES {
            let evaluated = match known(name) {
                Some(known) => known,
                None => match self.evaluate_one(&kind, None, observer)? {
                    Some(evaluated) => evaluated,
                    None => return Ok(None),
                },
            };
            controllers.insert(name.to_string(), evaluated);
        }
        let (weights, metadata) = self.policy.export()?;
        for (name, learning) in FORMS {
            let mut policy = self.plan.policy(&self.stream, learning)?;
            policy.import(&weights, &metadata)?;
            let policy = SharedPolicy::new(policy);
            let kind = ControllerKind::External;
            let Some(evaluated) = self.evaluate_one(&kind, Some(&policy), observer)? else {
                return Ok(None);
            };
            controllers.insert(name.to_string(), evaluated);
        }
        let (round, transitions_total) = (self.state.round, self.state.transitions);
        let families = match self.plan.request.families.len() {
            0 => vec![],
            _ => (0..tasks).map(|n| family(self.plan.request, Use::Evaluation, n)).collect(),
        };
        Ok(Some(Evaluation { round, transitions_total, families, controllers }))
    }

    /// Runs the tasks of the evaluation with one controller; `None` if it was stopped.
    fn evaluate_one(
        &self,
        kind: &ControllerKind,
        policy: Option<&SharedPolicy>,
        observer: &mut dyn TrainingObserver,
    ) -> Result<Option<Evaluated>> {
        let request = self.plan.request;
        let devices = self.devices.of_first_envs(request.envs_of(Use::Evaluation));
        let mut tasks: Vec<Option<TaskResult>> = vec![];
        for number in 0..self.evaluation_tasks() {
            let config = draw(request, Use::Evaluation, number, kind.clone())?;
            let custom = policy.map_or_else(Custom::default, |p| Custom::from(p.controller()));
            let mut watching = EpisodeObserver::new(observer, config.envs);
            let ran = run_without_folder(&devices, &config, custom, &mut watching);
            clear_cache();
            tasks.push(match ran {
                Ok(summary) if summary.status == Status::Completed => Some(watching.result()),
                Ok(_) => return Ok(None),
                Err(Error::Diverged { .. }) => None,
                Err(error) => return Err(error),
            });
        }
        Ok(Some(Evaluated::new(&tasks)))
    }
}

//! Checks of settings against each other.

use std::fmt;
use std::path::Path;

use meristem_control::{HeuristicConfig, RewardMode, WidenTrigger};
use meristem_data::order::EpochMode;
use meristem_device::DeviceId;
use meristem_nn::Precision;

use super::devices::Devices;
use super::table::TrainConfig;
use super::types::{
    CommKind, ControllerKind, ExchangeKind, LossKind, MeasuringRule, Member, PlannedChange,
    PlannedChanges, PolicyStart, Sampler, Scheduler,
};
use crate::error::{Error, Result};

/// Checks settings against each other.
///
/// # Errors
/// [`Error::Value`] names a setting, its value and the accepted values.
pub(crate) fn together(config: &TrainConfig) -> Result<()> {
    check_folds(config)?;
    config.check_optimizer()?;
    if config.controller != ControllerKind::None && config.control_share() == 0.0 {
        let expected = "above 0, because the controller judges modules on the control split";
        return Err(Error::value("control-split", 0, expected));
    }
    let starts = config.policy.as_ref().is_some_and(|policy| *policy != PolicyStart::New);
    if starts && config.controller != ControllerKind::Ppo {
        let expected = "ppo, the only controller that starts from a `policy`";
        return Err(Error::value("controller", &config.controller, expected));
    }
    if config.trace.is_some() && config.trace == config.export {
        let got = config.trace.as_deref().unwrap_or(Path::new("")).display();
        return Err(Error::value("trace", got, "a file other than that of `export`"));
    }
    if config.data_parallel && config.twin() {
        let expected = "off with data-parallel, whose ranks train one network";
        return Err(Error::value("twin", "on", expected));
    }
    if config.reward.mode == RewardMode::Shaped
        && config.controller == ControllerKind::Ppo
        && !config.twin()
    {
        let expected = "on with reward shaped, which compares each env with its twin";
        return Err(Error::value("twin", "off", expected));
    }
    check_width(config)?;
    check_width_init(config)?;
    check_members(config)?;
    check_sweep(config)?;
    check_numbers(config)?;
    check_ranks(config)?;
    let devices = Devices::assign(config)?;
    check_precision(config.precision, devices.all())?;
    let on_processor = |device: &&DeviceId| matches!(device, DeviceId::Cpu(_));
    let other = devices.of_envs.iter().find(on_processor);
    if let (CommKind::Nccl, Some(device)) = (config.comm, other) {
        let expected = "CUDA devices only with `comm` nccl, such as cuda:0; on a processor use mpi";
        return Err(Error::value("devices", device, expected));
    }
    Ok(())
}

/// Settings that members may have only with epoch full, because with epoch dealt the envs of a
/// device divide the batches of one order.
const OF_EPOCH_FULL: [&str; 4] = ["seed", "batch", "train_share", "bootstrap"];

/// Checks that all members have equally many envs, and settings that fit the division of samples.
fn check_members(config: &TrainConfig) -> Result<()> {
    let Some(members) = &config.members else { return Ok(()) };
    let count = members.all().len();
    if config.data_parallel && count > 1 {
        let expected = "1 with data-parallel, whose ranks train one network";
        return Err(Error::value("members", count, expected));
    }
    if !config.envs.is_multiple_of(count) {
        let expected = format!("a multiple of {count}, the number of members");
        return Err(Error::value("envs", config.envs, expected));
    }
    for (n, member) in config.of_members().iter().enumerate() {
        check_member(config, member).map_err(|error| error.in_member(n))?;
    }
    let mut keys = members.all().iter().flat_map(Member::settings).map(|(key, _)| key);
    match keys.find(|key| OF_EPOCH_FULL.contains(key)) {
        Some(key) if config.epoch == EpochMode::Dealt && !config.data_parallel => {
            let expected = format!("full with `{key}` of members: with dealt they share samples");
            Err(Error::value("epoch", config.epoch, expected))
        }
        _ => Ok(()),
    }
}

/// Checks that a run can have a member with these settings.
///
/// # Errors
/// [`Error::Value`]: another controller than the run's, if one of the two looks at all envs.
pub(super) fn check_member(run: &TrainConfig, member: &TrainConfig) -> Result<()> {
    let own = &member.controller;
    if *own == run.controller {
        return Ok(());
    }
    let expected = if run.controller.sees_all_envs() {
        format!("{}, the run's controller, which decides about all envs", run.controller)
    } else if own.sees_all_envs() {
        "heuristic, random, fixed:FILE or none: policies belong to the run".into()
    } else {
        return Ok(());
    };
    Err(Error::value("controller", own, expected))
}

/// Checks that the run meets the requirements of its scheduler, and that planned changes name
/// members of the run.
fn check_sweep(config: &TrainConfig) -> Result<()> {
    let count = config.members.as_ref().map_or(0, |members| members.all().len());
    let changes = config.member_changes.iter().flat_map(PlannedChanges::all);
    for PlannedChange { member, steps, copy } in changes {
        let from = copy.iter().map(|(from, _)| *from);
        if let Some(unknown) = from.chain([*member]).find(|member| *member >= count) {
            let expected = format!("members below {count}, the number of members");
            return Err(Error::value("member-changes", unknown, expected));
        }
        if *steps > config.steps || (copy.is_some() && *steps == 0) {
            let expected = format!("a change after at most {} steps", config.steps);
            return Err(Error::value("member-changes", steps, expected));
        }
        if copy.is_some() && config.envs != count {
            let expected = "one env for each member, because members are copied";
            return Err(Error::value("envs", config.envs, expected));
        }
    }
    check_planned_copies(config)?;
    check_places(config, count)?;
    let scheduler = config.scheduler;
    if scheduler == Scheduler::None {
        return match config.member_changes {
            None => Ok(()),
            Some(_) => check_member_changes(config, "member-changes", &"given"),
        };
    }
    if config.member_changes.is_some() {
        let expected = "none with member-changes, which replace it";
        return Err(Error::value("scheduler", scheduler, expected));
    }
    let needs =
        |problem: &str| Err(Error::value("scheduler", scheduler, format!("none, or {problem}")));
    if count < 2 {
        return needs("at least 2 members; give --members, or --space and --samples");
    }
    if config.control_share() == 0.0 {
        return needs("a control split, whose score it ranks members by; give --control-split 0.1");
    }
    check_member_changes(config, "scheduler", &scheduler)?;
    if let Scheduler::Pbt(_) = scheduler {
        if config.space.is_none() {
            return needs("a space, within which the settings of copies change");
        }
        if config.envs != count {
            return needs("one env for each member");
        }
    }
    Ok(())
}

/// Checks that planned copies have origins in training.
fn check_planned_copies(config: &TrainConfig) -> Result<()> {
    let changes = || config.member_changes.iter().flat_map(PlannedChanges::all);
    let mut ended = vec![];
    for PlannedChange { member, copy, .. } in changes() {
        match copy {
            None => ended.push(*member),
            Some((from, _)) if ended.contains(from) => {
                let expected = format!("copies of members in training; member {from} has ended");
                return Err(Error::value("member-changes", format!("a copy of {from}"), expected));
            }
            Some(_) => ended.retain(|other| other != member),
        }
    }
    Ok(())
}

/// Checks that a run with places, or with members of a program, can begin members later.
fn check_places(config: &TrainConfig, count: usize) -> Result<()> {
    if config.sampler == Sampler::External {
        check_member_changes(config, "sampler", &config.sampler)?;
    }
    let Some(places) = config.places else { return Ok(()) };
    let needs = |what: &str| Err(Error::value("places", places, format!("none, or {what}")));
    if count == 0 {
        return needs("members to train in them; give --members, or --space and --samples");
    }
    if let Scheduler::Pbt(_) = config.scheduler {
        return needs("another scheduler, because pbt copies members that train side by side");
    }
    if config.member_changes.is_some() {
        return needs("no member-changes, which count the steps of the run");
    }
    check_member_changes(config, "places", &places)
}

/// Checks that a layer may become wider at all.
fn check_width(config: &TrainConfig) -> Result<()> {
    let HeuristicConfig { widen_by, widen_up_to, .. } = config.heuristic;
    let first = 1.0 + widen_by;
    // Decimal fractions are not exact.
    if widen_by > 0.0 && first > widen_up_to * (1.0 + 1e-9) {
        let expected = format!("at least {first}, to which widen-by {widen_by} widens a layer");
        return Err(Error::value("widen-up-to", widen_up_to, expected));
    }
    check_width_rules(config)
}

/// Checks that trigger and place of growth in width have what they need.
fn check_width_rules(config: &TrainConfig) -> Result<()> {
    let HeuristicConfig { widen_trigger, plateau_steps, .. } = config.heuristic;
    if config.heuristic.widen_by > 0.0
        && widen_trigger == WidenTrigger::Plateau
        && plateau_steps == 0
    {
        let expected = "schedule, or plateau with plateau-steps of at least 1";
        return Err(Error::value("widen-trigger", "plateau", expected));
    }
    for MeasuringRule { key, value, score } in MeasuringRule::all(&config.heuristic) {
        let is_own_loss = config.loss == LossKind::External;
        let expected = match (config.data_parallel, score.gradients_of(), key) {
            (true, _, "widen-trigger") => {
                "schedule or plateau with data-parallel, whose ranks have different batches"
            }
            (true, ..) => "smallest with data-parallel, whose ranks have different batches",
            (false, Some(_), "widen-trigger") if is_own_loss => {
                "schedule, plateau or orthogonality with a loss of the program"
            }
            (false, Some(_), _) if is_own_loss => {
                "smallest or orthogonality with a loss of the program"
            }
            _ => continue,
        };
        return Err(Error::value(key, value, expected));
    }
    Ok(())
}

/// Checks that all ranks have the same batches, and that the loss is built in, if the
/// initialisation measures gradients.
fn check_width_init(config: &TrainConfig) -> Result<()> {
    let init = config.rules.width_init;
    let problem = match (config.data_parallel, config.loss == LossKind::External) {
        _ if !init.measures() => return Ok(()),
        (true, _) => "with data-parallel, whose ranks have different batches",
        (_, true) => "with a loss of the program",
        _ => return Ok(()),
    };
    Err(Error::value(
        "width-init",
        init.name(),
        format!("zero, net2wider or variance_transfer {problem}"),
    ))
}

/// Checks that a run has a loss of the program if its settings say so, and none otherwise.
///
/// # Errors
/// [`Error::Value`]: the setting `loss`.
pub(crate) fn check_loss(config: &TrainConfig, is_given: bool) -> Result<()> {
    let expected = match (config.loss == LossKind::External, is_given) {
        (true, false) => {
            "auto, or a loss of the task; with external a program computes it, in which the run is \
             started and resumed: meristem.train(loss=function) in Python, an OwnLoss in Rust"
        }
        (false, true) => "external, because the program gives a loss",
        _ => return Ok(()),
    };
    Err(Error::value("loss", config.loss, expected))
}

/// Checks that a program can search over the settings of the run's members.
///
/// # Errors
/// [`Error::Value`]: no members, or settings with which a member cannot end before the
/// others.
pub(crate) fn check_searcher(config: &TrainConfig) -> Result<()> {
    if config.members.is_none() {
        let expected = "members to search over; give samples, or members";
        return Err(Error::value("samples", "none", expected));
    }
    check_member_changes(config, "search", &"a searcher")
}

/// Checks that members may end or change during a run. `key` and `value` are the setting that
/// causes these changes, for the error.
fn check_member_changes(
    config: &TrainConfig,
    key: &'static str,
    value: &dyn fmt::Display,
) -> Result<()> {
    let needs = |what: &str| Err(Error::value(key, value, format!("none, or {what}")));
    if config.rounds > 1 {
        return needs("1 round, in which members end");
    }
    if config.epoch == EpochMode::Dealt {
        return needs("epoch full, so that no sample belongs to a member that ends");
    }
    if config.comm.is_processes() || config.ranks() > 1 {
        return needs("one process with one rank");
    }
    if config.controller.sees_all_envs() {
        return needs("a controller other than a policy or a program, which count on all envs");
    }
    Ok(())
}

/// Checks that there is a number for each env, and that envs depend only on their own number.
fn check_numbers(config: &TrainConfig) -> Result<()> {
    let Some(numbers) = &config.env_numbers else { return Ok(()) };
    let needs = |what: String| Err(Error::value("env-numbers", numbers, what));
    if numbers.all().len() != config.envs {
        return needs(format!("one for each of {} envs", config.envs));
    }
    if config.epoch == EpochMode::Dealt {
        return needs("none with epoch dealt, where samples depend on the other envs".into());
    }
    if config.comm.is_processes() || config.ranks() > 1 {
        return needs("none with several ranks".into());
    }
    if config.controller.is_policy() {
        return needs("none with a policy, whose results depend on all envs".into());
    }
    Ok(())
}

/// Checks the settings that folds exclude, and that every fold is held out equally often.
fn check_folds(config: &TrainConfig) -> Result<()> {
    let Some(folds) = config.folds else { return Ok(()) };
    if let Some(share) = config.control_split {
        let expected = format!("none with folds, whose control split is one of {folds} folds");
        return Err(Error::value("control-split", share, expected));
    }
    if config.data_parallel {
        let expected = "none with data-parallel, which trains one host";
        return Err(Error::value("folds", folds, expected));
    }
    let multiple = folds * config.members_len();
    if !config.envs.is_multiple_of(multiple) {
        let expected =
            format!("a multiple of {multiple}, so that every fold is held out equally often");
        return Err(Error::value("envs", config.envs, expected));
    }
    Ok(())
}

/// Checks that networks on all of these devices can have this precision.
///
/// # Errors
/// [`Error::Value`] names the precision, the first device that lacks it, and devices that have it.
pub fn check_precision(
    precision: Precision,
    devices: impl IntoIterator<Item = DeviceId>,
) -> Result<()> {
    match devices.into_iter().find(|device| !precision.runs_on(*device)) {
        Some(device) => {
            let expected =
                format!("f32 on {device}; {precision} needs CUDA devices only, such as cuda:0");
            Err(Error::value("precision", precision, expected))
        }
        None => Ok(()),
    }
}

/// Checks that the envs, or the samples of a batch, divide evenly among the ranks. An unset number
/// of ranks is checked after the processes have joined.
fn check_ranks(config: &TrainConfig) -> Result<()> {
    if config.comm.is_processes() && config.ranks.is_none() {
        return Ok(());
    }
    let (ranks, envs, batch) = (config.ranks(), config.envs, config.batch);
    if config.data_parallel {
        if envs != 1 {
            let expected = "1, because with data-parallel all ranks train one host";
            return Err(Error::value("envs", envs, expected));
        }
        if !batch.is_multiple_of(ranks) {
            let expected = format!("a divisor of {batch}, the samples of a batch");
            return Err(Error::value("ranks", ranks, expected));
        }
    } else if ranks > 1 && config.controller != ControllerKind::Ppo {
        let expected = "1; several ranks need controller ppo or data-parallel";
        return Err(Error::value("ranks", ranks, expected));
    } else if !envs.is_multiple_of(ranks) {
        return Err(Error::value(
            "ranks",
            ranks,
            format!("a divisor of {envs}, the number of envs"),
        ));
    }
    if config.exchange.local_steps.is_some() && !config.data_parallel {
        let expected = "an exchange of gradients, such as topk:0.01; diloco needs data-parallel";
        return Err(Error::value("exchange", config.exchange, expected));
    }
    if ranks == 1 && config.exchange != ExchangeKind::default() {
        let expected = "dense; every other exchange needs at least 2 `ranks`";
        return Err(Error::value("exchange", config.exchange, expected));
    }
    Ok(())
}

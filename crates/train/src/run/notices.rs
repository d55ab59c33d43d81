//! Notices about settings that have no effect, or not the expected one.

use std::collections::{BTreeMap, BTreeSet};

use meristem_control::{Controller, Script};

use crate::config::{IdleSetting, TrainConfig};
use crate::error::Result;
use crate::record::observer::{Notice, Observer};
use crate::resources::Resources;
use crate::settings::{ControllerKind, TaskKind};
use crate::setup::Setup;

/// Notes settings that have no effect in this run.
pub(super) fn idle_settings(setup: &Setup, observer: &mut dyn Observer) {
    let TrainConfig { steps, controller, heuristic, .. } = &setup.config;
    for (script, (parsed, envs)) in scripts(setup) {
        let (lines, envs) = (parsed.idle_lines(*steps, &envs), Vec::from_iter(envs));
        if !lines.is_empty() {
            let (lines, envs) = (&lines, &envs);
            observer.notice(&Notice::IdleScriptLines { script, lines, steps: *steps, envs });
        }
    }
    let members = 0..setup.config.members_len();
    let warmups: BTreeSet<usize> =
        members.clone().map(|number| setup.member(number).config.lr_warmup).collect();
    for warmup in warmups.into_iter().filter(|warmup| warmup > steps) {
        observer.notice(&Notice::WarmupBeyondEpisode { warmup, steps: *steps });
    }
    let is_used = |number| {
        let config = &setup.member(number).config;
        config.controller == ControllerKind::Heuristic || config.policy_widens()
    };
    if heuristic.widen_by > 0.0 && !members.clone().any(is_used) {
        let reason = format!(
            "only the heuristic, and a policy of the form set-widen, make layers wider by it, and \
             the controller is {controller}"
        );
        let (key, members) = ("widen_by", &[][..]);
        observer.notice(&Notice::IdleSetting { key, members, reason: &reason });
    }
    for IdleSetting { key, members, reason } in setup.config.idle_settings() {
        let (key, members, reason) = (&*key, &*members, &*reason);
        observer.notice(&Notice::IdleSetting { key, members, reason });
    }
}

/// Notes the envs that the heuristic never grows, because of its limit of parameters.
///
/// # Errors
/// [`Error::Value`](crate::error::Error::Value), for a host that was not checked.
pub(super) fn no_room(
    setup: &Setup,
    resources: &Resources,
    observer: &mut dyn Observer,
) -> Result<()> {
    let mut envs_by_size = BTreeMap::<(usize, usize), Vec<usize>>::new();
    for env in 0..setup.config.envs {
        let config = &setup.member(env).config;
        if config.controller != ControllerKind::Heuristic {
            continue;
        }
        let rules = config.heuristic_config(resources.train_samples_of(setup, env));
        let host = setup.fresh_host(env)?;
        if let Some(limit) = rules.max_parameters.filter(|_| rules.lacks_room(&host)) {
            let envs = envs_by_size.entry((host.bare_parameters(), limit)).or_default();
            envs.push(setup.config.env_number(env));
        }
    }
    for ((parameters, limit), envs) in &envs_by_size {
        let (parameters, limit) = (*parameters, *limit);
        observer.notice(&Notice::NoRoomToGrow { envs, parameters, limit });
    }
    Ok(())
}

/// The scripts of the run by their controllers, with the numbers of the envs that follow them.
fn scripts(setup: &Setup) -> BTreeMap<&str, (&Script, BTreeSet<usize>)> {
    let config = &setup.config;
    let mut scripts = BTreeMap::new();
    for env in 0..config.envs {
        if let Some(script) = &setup.member(env).script {
            let (_, envs) =
                scripts.entry(script.name()).or_insert_with(|| (&**script, BTreeSet::new()));
            envs.insert(config.env_number(env));
        }
    }
    scripts
}

/// Notes the least frequent class, if it has fewer samples than there are folds.
pub(super) fn rare_class(setup: &Setup, observer: &mut dyn Observer) {
    let Setup { config, info, task, .. } = setup;
    let Some(folds) = config.folds.filter(|_| task.kind == TaskKind::Classify) else { return };
    let wanted = |class: usize| {
        task.classes.as_ref().is_none_or(|classes| classes.contains(&(class as u32)))
    };
    let counts = info.classes.iter().zip(&info.per_class).enumerate();
    let counts = counts.filter(|(class, (_, samples))| wanted(*class) && **samples > 0);
    let least = counts.map(|(_, (name, samples))| (name, *samples)).min_by_key(|least| least.1);
    if let Some((class, samples)) = least.filter(|(_, samples)| *samples < folds) {
        observer.notice(&Notice::RareClass { class, samples, folds });
    }
}

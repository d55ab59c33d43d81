//! The choice of the networks of an ensemble.

use std::collections::BTreeSet;

use super::EnsembleConfig;
use crate::error::{Error, Result};
use crate::record::summary::{EnvSummary, Summary};
use crate::sweep::EndReason;

/// The envs of the ensemble, by number.
pub(super) fn choose<'s>(
    config: &EnsembleConfig,
    summary: &'s Summary,
) -> Result<Vec<&'s EnvSummary>> {
    let number = |env: &EnvSummary| env.member_number.unwrap_or(env.env);
    let mut all: Vec<&EnvSummary> = summary.envs.iter().collect();
    all.sort_by_key(|env| env.env);
    let diverged =
        |env: &EnvSummary| env.ended.as_ref().is_some_and(|end| *end == EndReason::Diverged);
    let mut envs = match &config.members {
        Some(members) => {
            let known: BTreeSet<usize> = all.iter().map(|env| number(env)).collect();
            if let Some(other) = members.iter().find(|member| !known.contains(member)) {
                let last = known.last().copied().unwrap_or_default();
                let expected = format!("numbers from 0 to {last}, of members of the run");
                return Err(Error::value("members", other, expected));
            }
            all.into_iter().filter(|env| members.contains(&number(env))).collect::<Vec<_>>()
        }
        // Also networks that ended early, because the best may be among them.
        None if config.top.is_some() => all.into_iter().filter(|env| !diverged(env)).collect(),
        None if all.iter().any(|env| env.ended.is_none()) => {
            all.into_iter().filter(|env| env.ended.is_none()).collect()
        }
        None => all,
    };
    if let Some(top) = config.top {
        // Stable: of equal scores the first envs are taken.
        envs.sort_by(|a, b| selection_score(b).total_cmp(&selection_score(a)));
        envs.truncate(top);
        envs.sort_by_key(|env| env.env);
    }
    if envs.len() < 2 {
        let got = format!("{} of the {} networks of the run", envs.len(), summary.envs.len());
        let expected =
            "at least two; by default those that made all steps, others with members or top";
        return Err(Error::value("ensemble", got, expected));
    }
    Ok(envs)
}

/// The score by which networks are chosen: the control score, or the training score without a
/// control split; negative infinity for NaN.
pub(super) fn selection_score(env: &EnvSummary) -> f64 {
    let score = env.control_score.unwrap_or(env.train_score);
    if score.is_nan() { f64::NEG_INFINITY } else { score }
}

//! Part of a page about the members of a run: table, parallel coordinates, importance of settings,
//! curves by rung, lineage of copies.

use meristem::export::drawing::inline_svg;
use std::collections::BTreeSet;

use meristem::train::EndReason;
use meristem::train::reading::{MemberHistory, MembersHistory, Run, RunState};
use meristem::train::statistics::{Spread, explained_share, groups};

use super::chart;
use super::html::Html;
use crate::plain::{counted, mean};
use crate::plot::{Chart, Parallel, Series, lineage};
use crate::score;

/// Maximum number of rows of the table.
const ROWS_MAX: usize = 64;
/// Maximum number of groups of members that ended; each has a colour and a name.
const GROUPS_MAX: usize = 6;
/// Largest number of bins for the numbers of a setting, and number of members for each bin. There
/// are at least two bins.
const BINS: [usize; 2] = [5, 3];

/// The members of a run with their numbers, by their last control score, best first; those that
/// diverged, and those without a score, last.
pub(crate) fn ranked(run: &Run) -> Vec<(usize, &MemberHistory)> {
    let key = |member: &MemberHistory| match member.score() {
        Some(score) if !diverged(member) => score,
        _ => f64::NEG_INFINITY,
    };
    let mut ranked: Vec<(usize, &MemberHistory)> = run.history.members.all().collect();
    ranked.sort_by(|(_, a), (_, b)| key(b).total_cmp(&key(a)));
    ranked
}

/// The part; empty without members.
pub(super) fn members(run: &Run) -> Html {
    let (members, ranked) = (&run.history.members, ranked(run));
    if ranked.is_empty() {
        return Html::default();
    }
    let mut body = table(run, &ranked);
    body.push(over_seeds(run));
    body.push(parallel(run, &ranked));
    body.push(importance(run));
    body.push(rungs(run));
    let rows: Vec<(usize, usize)> =
        ranked.iter().map(|(number, member)| (*number, member.steps().unwrap_or(0))).collect();
    if let Some(picture) = lineage(&rows, members.copies()) {
        let label = "Lineage of the members: copies over the steps";
        body.push(Html::of("h3", "Lineage"));
        body.push(Html::of(
            "p",
            "A row for each of the best members, in the colour of the member from which its \
             weights descend; a line leads from the copied member to the copy.",
        ));
        body.push(Html::picture(inline_svg(&picture, label), label));
    }
    body
}

/// Table of the members by the last control score of their envs, best first.
fn table(run: &Run, ranked: &[(usize, &MemberHistory)]) -> Html {
    let kind = run.history.score_kind();
    let score = format!("control {kind}");
    let mut rows =
        vec![["member", "settings", &score, "steps", "state"].map(String::from).to_vec()];
    rows.extend(ranked.iter().take(ROWS_MAX).map(|(number, member)| {
        vec![
            number.to_string(),
            member.settings.clone(),
            score::value(kind, member.score()),
            member.steps().map_or("–".into(), |steps| steps.to_string()),
            state(run.overview.state, member),
        ]
    }));
    let (trained, count) = (run.history.members.trained(), ranked.len());
    // With places a member that has made all steps ends; without, it is there until the run ends.
    let complete = |(_, member): &&(usize, &MemberHistory)| has_ended(member, EndReason::Complete);
    let left = ranked.iter().filter(complete).count();
    let (number, reached) = match run.overview.state {
        RunState::Complete => (trained + left, "made all steps"),
        _ => (trained, "began and have not ended"),
    };
    Html::table(&format!("Members; {number} of {count} {reached}"), &rows)
}

/// State of a member in words: its end, the origin of its weights, or else the state of its run.
fn state(run: RunState, member: &MemberHistory) -> String {
    match (&member.ended, member.copied, member.begun) {
        (Some((_, reason)), ..) => format!("ended: {reason}"),
        (None, Some((from, step)), _) => {
            format!("copy of {from} after step {}", step.saturating_add(1))
        }
        (None, None, None) => "not begun".into(),
        (None, None, Some(_)) if run == RunState::Running => "in training".into(),
        (None, None, Some(_)) => run.name().into(),
    }
}

/// Table with a row for each group of members that differ only by their seed, best first: the last
/// control scores of the envs of all their seeds. Empty if no two members differ only by their
/// seed.
fn over_seeds(run: &Run) -> Html {
    let (history, kind) = (&run.history, run.history.score_kind());
    let mut groups: Vec<(String, BTreeSet<usize>, Vec<f64>)> = vec![];
    for (env, of_env) in &history.envs {
        let Some((member, number)) =
            history.members.of_env(*env).zip(history.members.number_of_env(*env))
        else {
            continue;
        };
        let settings = member.values().filter(|(name, _)| *name != "seed");
        let settings = settings.map(|(name, value)| format!("{name}={value}"));
        let settings = settings.collect::<Vec<_>>().join("; ");
        let last = of_env.control_score.points().last().map(|[_, score]| *score);
        let score = last.filter(|score| score.is_finite());
        match groups.iter_mut().find(|(known, ..)| *known == settings) {
            Some((_, numbers, scores)) => {
                numbers.insert(number);
                scores.extend(score);
            }
            None => groups.push((settings, BTreeSet::from([number]), Vec::from_iter(score))),
        }
    }
    // Equal settings without a seed are several envs of one member, or members that are alike.
    let has_seeds = |number: &usize| {
        let member = history.members.all().nth(*number);
        member.is_some_and(|(_, member)| value(member, "seed").is_some())
    };
    if !groups.iter().any(|(_, numbers, _)| numbers.len() > 1 && numbers.iter().any(has_seeds)) {
        return Html::default();
    }
    let mean = |scores: &[f64]| mean(scores.iter().copied()).unwrap_or(f64::NEG_INFINITY);
    groups.sort_by(|(.., a), (.., b)| mean(b).total_cmp(&mean(a)));
    let [score, interval] = [format!("control {kind}"), "95 % interval of the mean".into()];
    let mut rows = vec![vec!["settings".into(), "seeds".into(), score, interval]];
    rows.extend(groups.iter().take(ROWS_MAX).map(|(settings, numbers, scores)| {
        let spread = Spread::from_values(scores);
        let shown = |deviation: fn(&Spread) -> Option<f64>| {
            let known = spread.and_then(|spread| Some((spread.mean, deviation(&spread)?)));
            known.map_or("–".into(), |(mean, own)| score::spread(kind, mean, own))
        };
        let [deviation, interval] = [shown(|spread| spread.std), shown(|spread| spread.ci95)];
        vec![settings.clone(), numbers.len().to_string(), deviation, interval]
    }));
    Html::table("Members over their seeds: mean and standard deviation over the envs", &rows)
}

/// Names of the settings that differ between members, in the order in which they first occur.
fn varied(members: &MembersHistory) -> Vec<&str> {
    /// Maximum number of names; damaged events may have any number of them.
    const NAMES_MAX: usize = 256;
    let mut names: Vec<&str> = vec![];
    for (name, _) in members.all().flat_map(|(_, member)| member.values()) {
        if names.len() < NAMES_MAX && !names.contains(&name) {
            names.push(name);
        }
    }
    let differs = |name: &&str| {
        let mut values = members.all().map(|(_, member)| value(member, name));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    names.retain(differs);
    names
}

/// The value of a setting of a member, if it has the setting.
fn value<'m>(member: &'m MemberHistory, name: &str) -> Option<&'m str> {
    member.values().find(|(known, _)| *known == name).map(|(_, value)| value)
}

fn parallel(run: &Run, ranked: &[(usize, &MemberHistory)]) -> Html {
    let history = &run.history;
    let settings = varied(&history.members);
    let kind = history.score_kind();
    let factor = score::factor(kind);
    let of_member = |(_, member): &(usize, &MemberHistory)| {
        let values = settings.iter().map(|name| value(member, name).map(String::from));
        // The score is rounded to the digits that are written.
        let score = member.score().map(|score| (factor * score * 1e3).round() / 1e3);
        (values.collect(), score)
    };
    let plot = Parallel {
        settings: settings.iter().map(ToString::to_string).collect(),
        score: score::axes(Some(kind))[0].into(),
        members: ranked.iter().map(of_member).collect(),
    };
    let Some(picture) = plot.draw() else { return Html::default() };
    let label = "Settings and scores of the members, in parallel coordinates";
    let mut body = Html::of("h3", "Settings and scores");
    body.push(Html::of(
        "p",
        "A line for each member, from orange for the lowest to blue for the highest rank by \
         control score; grey without a score.",
    ));
    body.push(Html::picture(inline_svg(&picture, label), label));
    body
}

/// The last step that was made by every member that did not diverge; `None` if one of them made no
/// step.
fn common_step(members: &MembersHistory) -> Option<usize> {
    let steps = members.all().filter(|(_, member)| !diverged(member));
    steps.map(|(_, member)| member.steps()).min().flatten()?.checked_sub(1)
}

fn diverged(member: &MemberHistory) -> bool {
    has_ended(member, EndReason::Diverged)
}

fn has_ended(member: &MemberHistory, why: EndReason) -> bool {
    member.ended.as_ref().is_some_and(|(_, reason)| *reason == why)
}

/// Table of the share of the variance of the scores that each setting explains alone. Empty with
/// copies, which change their settings, and with too few members.
fn importance(run: &Run) -> Html {
    let history = &run.history;
    let members = &history.members;
    let Some(step) = common_step(members).filter(|_| members.copies().len() == 0) else {
        return Html::default();
    };
    let mut of_envs: Vec<Vec<f64>> = vec![vec![]; members.all().len()];
    for (env, history) in &history.envs {
        let points = history.control_score.points();
        let at = points.iter().rev().find(|[x, _]| *x <= step as f64);
        if let (Some(number), Some([_, score])) = (members.number_of_env(*env), at) {
            of_envs[number].push(*score);
        }
    }
    let measured: Vec<(&MemberHistory, f64)> = members
        .all()
        .filter(|(_, member)| !diverged(member))
        .filter_map(|(number, member)| Some((member, mean(of_envs[number].iter().copied())?)))
        .collect();
    let share = |name: &str| {
        let with = measured.iter().filter_map(|(own, score)| Some((value(own, name)?, *score)));
        let (values, scores): (Vec<&str>, Vec<f64>) = with.unzip();
        let [bins, least] = BINS;
        let bins = bins.min(values.len() / least).max(2);
        let share = explained_share(&scores, &groups(&values, bins))?;
        Some((name.to_string(), share, values.len()))
    };
    let mut shares: Vec<(String, f64, usize)> =
        varied(members).into_iter().filter_map(share).collect();
    if shares.is_empty() {
        return Html::default();
    }
    shares.sort_by(|(_, a, _), (_, b, _)| b.total_cmp(a));
    let mut rows = vec![["setting", "explains alone", "of members"].map(String::from).to_vec()];
    rows.extend(shares.into_iter().map(|(name, share, count)| {
        vec![name, format!("{:.0} %", 100.0 * share), count.to_string()]
    }));
    let steps = counted(step.saturating_add(1), ["step", "steps"]);
    let of = counted(measured.len(), ["member", "members"]);
    let kind = history.score_kind();
    Html::table(
        &format!("Share of the variance of the control {kind} of {of} after {steps}"),
        &rows,
    )
}

/// Curves of the members, coloured by the step after which they ended; empty if none has ended.
fn rungs(run: &Run) -> Html {
    let history = &run.history;
    let members = &history.members;
    let mut ends: Vec<usize> =
        members.all().filter_map(|(_, member)| Some(member.ended.as_ref()?.0)).collect();
    ends.sort_unstable();
    ends.dedup();
    if ends.is_empty() {
        return Html::default();
    }
    let groups: Vec<&[usize]> = ends.chunks(ends.len().div_ceil(GROUPS_MAX)).collect();
    let group_of = |member: &MemberHistory| match &member.ended {
        None => groups.len(),
        Some((step, _)) => groups.partition_point(|group| group.last() < Some(step)),
    };
    let count = |group: usize| members.all().filter(|(_, own)| group_of(own) == group).count();
    let name = |group: usize| match groups.get(group) {
        None => format!("{} not ended", count(group)),
        Some([step]) => format!("step {}: {} ended", step.saturating_add(1), count(group)),
        Some(steps) => {
            let [first, last] = [steps.first(), steps.last()]
                .map(|step| step.map_or(0, |own| own.saturating_add(1)));
            format!("{first} to {last}: {} ended", count(group))
        }
    };
    let kind = history.score_kind();
    let factor = score::factor(kind);
    let mut series = vec![];
    for group in 0..=groups.len() {
        let of_group = history.envs.iter().filter(|(env, _)| {
            members.of_env(**env).is_some_and(|member| group_of(member) == group)
        });
        let mut name = Some(name(group));
        for (_, env) in of_group {
            let points = env.control_score.points().into_iter();
            let points: Vec<[f64; 2]> = points.map(|[x, y]| [x + 1.0, factor * y]).collect();
            if !points.is_empty() {
                let shade = Some(group as f64 / groups.len() as f64);
                series.push(Series { name: name.take().unwrap_or_default(), points, shade });
            }
        }
    }
    let title = "control scores by the end of the member".to_string();
    let labels = ["step", score::axes(Some(kind))[0]];
    chart(&Chart { title, labels, series })
}

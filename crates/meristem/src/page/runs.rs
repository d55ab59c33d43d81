//! Comparison of several runs.

use std::time::Duration;

use meristem::train::reading::{MemberHistory, Overview, Run, Settings, Skipped};

use super::html::Html;
use super::members::ranked;
use super::{Part, chart, series};
use crate::plain::{self, counted, duration, thousands};
use crate::plot::{Chart, Series};
use crate::score;

/// Settings that differ between runs, with the value of each run.
pub(crate) fn differences(runs: &[&Run]) -> Vec<(String, Vec<String>)> {
    let settings: Vec<&Settings> = runs.iter().map(|run| &run.settings).collect();
    let differ = Settings::differences(&settings);
    let plain = |value: Option<String>| value.unwrap_or("–".into());
    differ.into_iter().map(|(key, values)| (key, values.into_iter().map(plain).collect())).collect()
}

/// Chart of the runs' mean control scores; not in percent if their kinds of scores differ.
pub(crate) fn scores(runs: &[&Run]) -> Chart {
    let kind = score::common(runs.iter().map(|run| &run.overview));
    let name = kind.map_or("score".into(), |kind| kind.to_string());
    let factor = kind.map_or(1.0, score::factor);
    let scaled = |[x, y]: [f64; 2]| [x + 1.0, factor * y];
    let series = runs.iter().enumerate().map(|(number, run)| Series {
        name: format!("{} {}", number + 1, run.overview.controller.as_deref().unwrap_or("")),
        points: run.history.score.points().into_iter().map(scaled).collect(),
        shade: None,
    });
    Chart {
        title: format!("mean control {name} of the envs"),
        labels: ["step, over all rounds", score::axes(kind)[0]],
        series: series.collect(),
    }
}

/// Describes lines of the events that were skipped or not read; `None` if there are none.
pub(crate) fn skipped(skipped: Skipped) -> Option<String> {
    let Skipped { damaged, unknown, newer, unread_from } = skipped;
    let parts = [
        (damaged, "damaged"),
        (unknown, "of kinds that this version does not know"),
        (newer, "of a newer format"),
    ];
    let parts = parts.iter().filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts.map(|(count, kind)| format!("{count} {kind}")).collect();
    let lines = format!("lines of events.jsonl left out: {}", parts.join(", "));
    let rest = unread_from.map(|from| {
        let from = thousands(from);
        format!("the rest from byte {from} on was not read, because damaged lines take 64 MiB")
    });
    let all = (!parts.is_empty()).then_some(lines).into_iter().chain(rest);
    let all: Vec<String> = all.collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// Results by name, each with its value for every run.
pub(crate) fn results(runs: &[&Run]) -> Vec<(String, Vec<String>)> {
    let kind = score::common(runs.iter().map(|run| &run.overview));
    let [control, test] = ["control", "test"].map(|split| match kind {
        Some(kind) => format!("{split} {kind}"),
        None => format!("{split} score"),
    });
    // The row's name has the score's name. If kinds of scores differ, each value has its own.
    let show = if kind.is_some() { score::value } else { score::named };
    let number = |value: Option<f64>| value.map_or("–".into(), |n| thousands(n.round() as u64));
    type Figure = fn(&Overview) -> String;
    let rows: [(&'static str, Figure); 6] = [
        ("state", |row| row.state.name().into()),
        ("steps", |row| row.steps.map_or("–".into(), |[done, all]| format!("{done}/{all}"))),
        ("training compute", |row| {
            row.training_flops.map_or("–".into(), |flops| plain::flops(flops as f64))
        }),
        ("time", |row| {
            let known = row.wall_seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
            known.map_or("–".into(), duration)
        }),
        ("seed", |row| row.seed.map_or("–".into(), |seed| seed.to_string())),
        ("controller", |row| row.controller.clone().unwrap_or("–".into())),
    ];
    let values = |figure: Figure| runs.iter().map(|run| figure(&run.overview)).collect();
    let mut rows: Vec<_> =
        rows.into_iter().map(|(name, figure)| (name.to_string(), values(figure))).collect();
    let overviews = || runs.iter().map(|run| &run.overview);
    let inserted = [
        (control, overviews().map(|run| show(run.task.score(), run.control_score)).collect()),
        (test, overviews().map(|run| show(run.task.score(), run.test_score)).collect()),
        ("parameters".into(), overviews().map(|run| number(run.parameters)).collect()),
    ];
    // After the state.
    rows.splice(1..1, inserted);
    if overviews().any(|run| run.folds.is_some()) {
        let spread = |run: &Overview| {
            let folds = run.folds.as_ref();
            folds.map_or("–".into(), |folds| score::over_folds(run.task.score(), folds))
        };
        rows.insert(2, ("control over folds".into(), overviews().map(spread).collect()));
    }
    rows.extend(best_members(runs));
    rows
}

/// Number of members of each run, and settings and score of the best; empty if none has members.
fn best_members(runs: &[&Run]) -> Vec<(String, Vec<String>)> {
    let best: Vec<_> = runs.iter().map(|run| ranked(run).into_iter().next()).collect();
    if best.iter().all(Option::is_none) {
        return vec![];
    }
    let with = |figure: &dyn Fn(&Run, usize, &MemberHistory) -> String| {
        let both = runs.iter().zip(&best);
        let figures = both.map(|(run, best)| best.map_or("–".into(), |(n, m)| figure(run, n, m)));
        figures.collect()
    };
    let score = |run: &Run, _: usize, member: &MemberHistory| {
        score::named(run.history.score_kind(), member.score())
    };
    vec![
        ("members".into(), with(&|run, _, _| run.history.members.all().len().to_string())),
        ("best member".into(), with(&|_, number, _| number.to_string())),
        ("its settings".into(), with(&|_, _, member| member.settings.clone())),
        ("its control score".into(), with(&score)),
    ]
}

/// Formats an age, such as `12 min`, `3 h` or `5 days`.
pub(crate) fn age(seconds: f64) -> String {
    let minutes = (seconds / 60.0) as usize;
    match minutes {
        0..120 => format!("{minutes} min"),
        120..2880 => format!("{} h", minutes / 60),
        _ => counted(minutes / 1440, ["day", "days"]),
    }
}

/// A table with a column for each run.
pub(crate) fn side_by_side(caption: &str, rows: &[(impl AsRef<str>, Vec<String>)]) -> Html {
    let runs = rows.first().map_or(0, |(_, values)| values.len());
    let numbers = (1..=runs).map(|number| format!("run {number}"));
    let mut all: Vec<Vec<String>> = vec![[String::new()].into_iter().chain(numbers).collect()];
    for (name, values) in rows {
        all.push([name.as_ref().to_string()].into_iter().chain(values.iter().cloned()).collect());
    }
    Html::table(caption, &all)
}

/// Comparison of several runs: results, settings that differ, curves.
pub(crate) fn comparison(runs: &[&Run]) -> Vec<Part> {
    let differ = differences(runs);
    let settings = if differ.is_empty() {
        Html::of("p", "All settings are equal.")
    } else {
        side_by_side("Settings that differ", &differ)
    };
    let parameters = runs.iter().enumerate();
    let parameters = parameters.map(|(n, run)| series(n + 1, &run.history.parameters, 1.0));
    let mut charts = chart(&scores(runs));
    charts.push(chart(&Chart {
        title: "mean number of parameters".into(),
        labels: ["step, over all rounds", "parameters"],
        series: parameters.collect(),
    }));
    vec![
        Part::new("results", side_by_side("Results", &results(runs))),
        Part::new("differences", settings),
        Part::new("curves", charts),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_formatted() {
        let all = [30.0, 3000.0, 10_000.0, 100_000.0, 200_000.0, 1e6].map(age);
        assert_eq!(all, ["0 min", "50 min", "2 h", "27 h", "2 days", "11 days"]);
    }
}

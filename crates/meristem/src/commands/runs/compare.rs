//! `meristem runs compare`.

use std::ops::RangeInclusive;
use std::process::ExitCode;

use comfy_table::CellAlignment;
use meristem::nn::ScoreKind;
use meristem::train::reading::{MemberHistory, Run};
use serde_json::{Map, json};

use super::super::{Outcome, print_json};
use super::read;
use crate::cli::CompareArguments;
use crate::page::{differences, ranked, results, scores, skipped};
use crate::plain::{self, printable};
use crate::plot::SIZE;
use crate::{score, table};

/// Columns of a curve in text.
const COLUMNS: usize = 60;

pub(super) fn run(arguments: &CompareArguments) -> Outcome {
    arguments.plot.as_ref().map_or(Ok(()), |plot| plot.check())?;
    let runs = read(&arguments.runs)?;
    let runs: Vec<&Run> = runs.iter().collect();
    if arguments.json {
        print_json(&as_json(&runs))?
    } else {
        plain::out(&text(&runs))
    }
    if let Some(plot) = &arguments.plot {
        match scores(&runs).draw(SIZE) {
            Some(picture) => plot.write(&picture)?,
            None => plain::err("no plot was written, because no run has a control score"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn text(runs: &[&Run]) -> String {
    let mut lines = vec![];
    for (number, run) in runs.iter().enumerate() {
        lines.push(printable(&format!("{}  {}", number + 1, run.path.display())));
        lines.extend(run.overview.problem.as_ref().map(|p| printable(&format!("   {p}"))));
        lines.extend(skipped(run.skipped).map(|words| format!("   {words}")));
    }
    let differ = differences(runs);
    if differ.is_empty() {
        lines.push("all settings are equal".into())
    } else {
        lines.push(side_by_side("settings that differ", &differ))
    }
    lines.push(side_by_side("results", &results(runs)));
    lines.extend(curves(runs));
    lines.join("\n")
}

/// A table with a column for each run.
fn side_by_side(title: &str, rows: &[(impl AsRef<str>, Vec<String>)]) -> String {
    let mut table = table::new();
    let runs = rows.first().map_or(0, |(_, values)| values.len());
    let numbers = (1..=runs).map(|number| number.to_string());
    table.set_header([title.to_string()].into_iter().chain(numbers));
    for (name, values) in rows {
        let cells = [name.as_ref()].into_iter().chain(values.iter().map(String::as_str));
        table.add_row(cells.map(printable));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Curves of the control score as lines of text, on one scale.
fn curves(runs: &[&Run]) -> Vec<String> {
    let all: Vec<Vec<[f64; 2]>> = runs.iter().map(|run| run.history.score.points()).collect();
    let values = || all.iter().flatten().map(|point| point[1]);
    let ends = (f64::INFINITY, f64::NEG_INFINITY);
    let (least, most) = values().fold(ends, |(a, b), y| (a.min(y), b.max(y)));
    let kind = score::common(runs.iter().map(|run| &run.overview));
    let name = kind.map_or("score".into(), |kind| kind.to_string());
    let show = |score: Option<f64>| match kind {
        Some(kind) => score::value(kind, score),
        None => score.map_or("–".into(), |score| format!("{score:.3}")),
    };
    let last = all.iter().flatten().map(|point| point[0]).fold(0.0, f64::max);
    if values().next().is_none() {
        return vec![];
    }
    let mut lines = vec![format!(
        "control {name} over {} steps, from {} to {}",
        plain::thousands(last as u64 + 1),
        show(Some(least)),
        show(Some(most))
    )];
    for (number, points) in all.iter().enumerate() {
        let end = show(points.last().map(|point| point[1]));
        lines.push(format!("{}  {}  {end}", number + 1, bars(points, least..=most, last)));
    }
    lines
}

/// Draws a curve as one line of bars with eight heights over the range `scores`. A column shows
/// the last value within its interval of steps, or else the previous value.
fn bars(points: &[[f64; 2]], scores: RangeInclusive<f64>, last: f64) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let columns = COLUMNS.min(last as usize + 1);
    let end = points.last().map_or(-1.0, |point| point[0]);
    let column = |column: usize| {
        let (from, to) =
            [column, column + 1].map(|c| c as f64 * (last + 1.0) / columns as f64).into();
        let before = points.partition_point(|point| point[0] < to);
        let known = before.checked_sub(1).filter(|_| from <= end);
        known.map_or(' ', |at| {
            let share =
                (points[at][1] - scores.start()) / (scores.end() - scores.start()).max(1e-9);
            BARS[((share * 7.0).round() as usize).min(7)]
        })
    };
    (0..columns).map(column).collect()
}

/// The comparison as JSON, for `--json` and for `serve`.
pub(in crate::commands) fn as_json(runs: &[&Run]) -> serde_json::Value {
    let differ = differences(runs).into_iter().map(|(key, values)| (key, json!(values)));
    let key = score::common(runs.iter().map(|run| &run.overview)).map_or("score", ScoreKind::key);
    let scores = runs.iter().map(|run| run.history.score.points());
    json!({
        "runs": runs.iter().map(|run| score::row(&run.overview)).collect::<Vec<_>>(),
        "settings": differ.collect::<Map<_, _>>(),
        "members": runs.iter().map(|run| members(run)).collect::<Vec<_>>(),
        &*format!("control_{key}"): scores.collect::<Vec<_>>(),
    })
}

/// The members of a run, best first.
fn members(run: &Run) -> Vec<serde_json::Value> {
    let key = run.history.score_kind().key();
    let member = |(number, member): (usize, &MemberHistory)| {
        json!({
            "number": number,
            "settings": member.settings,
            "steps": member.steps(),
            "ended": member.ended.as_ref().map(|(_, reason)| reason),
            &*format!("control_{key}"): member.score(),
        })
    };
    ranked(run).into_iter().map(member).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_in_text_ends_where_the_run_ended() {
        let points: Vec<[f64; 2]> = (0..4).map(|i| [f64::from(i), f64::from(i) / 10.0]).collect();
        assert_eq!(bars(&points, 0.0..=0.3, 5.0), "▁▃▆█  ");
        assert_eq!(bars(&points, 0.0..=0.3, 3.0), "▁▃▆█");
        assert_eq!(bars(&[], 0.0..=0.3, 1.0), "  ");
        let long: Vec<[f64; 2]> = (0..6000).map(|i| [f64::from(i), 0.5]).collect();
        assert_eq!(bars(&long, 0.5..=0.5, 5999.0), "▁".repeat(COLUMNS));
    }
}

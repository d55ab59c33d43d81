//! Tables at the end of a run.

use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use meristem::device::Owner;
use meristem::nn::ScoreKind;
use meristem::train::statistics::Spread;
use meristem::train::summary::{
    EnvSummary, MemorySummary, ModuleSummary, OwnerMemory, Place, PlacesSummary, Status, Summary,
    TwinSummary,
};
use meristem::train::trace::TraceSummary;

use crate::escape::quoted;
use crate::plain::{counted, duration, flops, mean, megabytes, printable, shown, thousands};
use crate::score;

/// Width of a table if stdout is not a terminal.
const COLUMNS: u16 = 100;

/// Maximum number of rows of a leaderboard.
const PLACES_MAX: usize = 20;

/// Creates an empty table, at most as wide as the terminal.
pub(crate) fn new() -> Table {
    let columns = console::Term::stdout().size_checked().map_or(COLUMNS, |(_, columns)| columns);
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(columns);
    table
}

/// Formats the report of a run.
pub(crate) fn report(summary: &Summary) -> String {
    // In a run with members the leaderboard takes the place of the table of envs.
    let mut text = leaderboard(summary).unwrap_or_else(|| vec![envs(summary).to_string()]);
    text.extend(comparison(summary).map(|table| table.to_string()));
    text.extend(summary.folds.as_ref().map(|folds| score::folds(summary.task.score(), folds)));
    text.extend(summary.places.map(|PlacesSummary { count, busy }| {
        format!(
            "{} in use for {:.1} % of the steps",
            counted(count, ["place", "places"]),
            100.0 * busy
        )
    }));
    if summary.status == Status::Interrupted {
        let steps = counted(summary.steps as usize, ["step", "steps"]);
        text.push(format!("stopped at a step boundary after {steps}"));
    }
    text.push(format!(
        "trained {} samples in {} ({} samples/s); peak memory {} in tensors{}",
        thousands(summary.images),
        duration(Duration::from_secs_f64(summary.wall_seconds)),
        thousands(summary.images_per_s as u64),
        megabytes(summary.memory.peak),
        summary
            .memory
            .process_peak
            .map_or(String::new(), |bytes| format!(", {} in the process", megabytes(bytes))),
    ));
    if summary.events_dropped > 0 {
        text.push(format!(
            "warning: {} events are missing in events.jsonl, because the disk was too slow",
            summary.events_dropped
        ));
    }
    text.push(format!("run folder: {}", shown(&summary.run_dir)));
    text.extend(summary.trace.as_ref().map(trace));
    text.push(next(summary));
    text.join("\n")
}

/// Formats the line about the trace.
pub(crate) fn trace(trace: &TraceSummary) -> String {
    let (path, events) = (shown(&trace.path), thousands(trace.events));
    format!("trace: {path} ({events} events; open it at ui.perfetto.dev or chrome://tracing)")
}

/// Table of the device memory of each owner.
pub(crate) fn memory(memory: &MemorySummary) -> Table {
    let mut table = new();
    table.set_header(["memory", "now", "peak"]);
    let row = |name: &str, now: Option<usize>, peak: Option<usize>| {
        [name.to_string(), now.map_or("–".into(), megabytes), peak.map_or("–".into(), megabytes)]
    };
    for owner in Owner::ALL {
        let OwnerMemory { current, peak } =
            memory.owners.get(owner.name()).copied().unwrap_or_default();
        table.add_row(row(owner.name(), Some(current), Some(peak)));
    }
    table.add_row(row("all tensors", Some(memory.current), Some(memory.peak)));
    table.add_row(row("taken from the system", None, Some(memory.reserved_peak)));
    table.add_row(row("resident in the process", None, memory.process_peak));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn envs(summary: &Summary) -> Table {
    let mut table = new();
    table.set_header([
        "env",
        "control",
        "test",
        "parameters: host + modules",
        "modules: slot, blueprint, stage, contribution in points",
    ]);
    let kind = summary.task.score();
    let test = |score| match summary.dataset.test_samples {
        Some(_) => score::named(kind, score),
        None => "no test split".into(),
    };
    for env in &summary.envs {
        table.add_row([
            number(env),
            score::named(kind, env.control_score),
            test(env.test_score),
            parameters(env),
            modules(env),
        ]);
    }
    for column in table.column_iter_mut().take(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Table of the best members, and a line if there are more. If some members differ only by their
/// seed, a second table follows, in which these members are one row. `None` without members.
fn leaderboard(summary: &Summary) -> Option<Vec<String>> {
    let places = summary.leaderboard();
    if places.is_empty() {
        return None;
    }
    let kind = summary.task.score();
    let of_member = |place: &Place| place.number.map_or("–".into(), |number| number.to_string());
    let mut text = board(kind, "member", &places, of_member);
    let over_seeds = summary.over_seeds();
    if !over_seeds.is_empty() {
        let of_seeds = |place: &Place| counted(place.envs.len(), ["env", "envs"]);
        text.extend(board(kind, "over seeds", &over_seeds, of_seeds));
    }
    Some(text)
}

/// Table of the best places, with `first` in its first column, and a line if there are more.
fn board(
    kind: ScoreKind,
    header: &str,
    places: &[Place],
    first: impl Fn(&Place) -> String,
) -> Vec<String> {
    let mut table = new();
    table.set_header([header, "settings", "steps", "train", "control", "test", "parameters"]);
    let spread = |spread: Option<Spread>| {
        let mean = score::named(kind, spread.map(|spread| spread.mean));
        match spread.and_then(|spread| spread.std) {
            Some(deviation) => format!("{mean} ± {}", score::figure(kind, deviation)),
            None => mean,
        }
    };
    for place in places.iter().take(PLACES_MAX) {
        let Place { member, control, train, test, parameters, steps, ended, .. } = place;
        let count = |steps: &Option<usize>| steps.map_or("–".into(), |own| own.to_string());
        let reason = ended.as_ref().map_or(String::new(), |reason| format!(" {reason}"));
        table.add_row([
            first(place),
            printable(member),
            format!("{}{}", count(steps), printable(&reason)),
            spread(*train),
            spread(*control),
            spread(*test),
            thousands(parameters.round() as u64),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = vec![table.to_string()];
    if places.len() > PLACES_MAX {
        let more = places.len() - PLACES_MAX;
        text.push(format!("{more} more members are in summary.json"));
    }
    text
}

/// Table with the means over the twins, the means over the envs, and the difference; `None` without
/// twins.
fn comparison(summary: &Summary) -> Option<Table> {
    let (envs, kind) = (&summary.envs, summary.task.score());
    let twins: Vec<&TwinSummary> = envs.iter().filter_map(|env| env.twin.as_ref()).collect();
    if envs.is_empty() || twins.len() < envs.len() {
        return None;
    }
    let grown = Means::of(envs.iter().map(|env| Figures {
        scores: [env.control_score, env.test_score],
        parameters: env.parameters,
        training_flops: env.training_flops,
    }));
    let bare = Means::of(twins.iter().map(|twin| Figures {
        scores: [twin.control_score, twin.test_score],
        parameters: twin.parameters,
        training_flops: twin.training_flops,
    }));
    let mut table = new();
    let count = counted(envs.len(), ["env", "envs"]);
    let name = if envs.len() == 1 { count } else { format!("mean of {count}") };
    table.set_header([name.as_str(), "control", "test", "parameters", "training compute"]);
    table.add_row(bare.row("bare", kind));
    table.add_row(grown.row("grown", kind));
    table.add_row(grown.over(&bare));
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    Some(table)
}

/// Results of a network, for the comparison with a bare host.
struct Figures {
    /// Score on the control split and on the test split.
    scores: [Option<f64>; 2],
    parameters: usize,
    training_flops: u64,
}

/// Means of [`Figures`].
struct Means {
    scores: [Option<f64>; 2],
    parameters: f64,
    training_flops: f64,
}

impl Means {
    fn of(figures: impl Iterator<Item = Figures> + Clone) -> Self {
        let score = |split: usize| mean(figures.clone().filter_map(move |f| f.scores[split]));
        Self {
            scores: [0, 1].map(score),
            parameters: mean(figures.clone().map(|f| f.parameters as f64)).unwrap_or(0.0),
            training_flops: mean(figures.clone().map(|f| f.training_flops as f64)).unwrap_or(0.0),
        }
    }

    fn row(&self, name: &str, kind: ScoreKind) -> [String; 5] {
        let [control, test] = self.scores.map(|score| score::named(kind, score));
        let parameters = thousands(self.parameters.round() as u64);
        [name.into(), control, test, parameters, flops(self.training_flops)]
    }

    /// Row of the differences from a bare host: hundredths of the score, and ratios of
    /// parameters and compute.
    fn over(&self, bare: &Self) -> [String; 5] {
        let points = |split: usize| match (self.scores[split], bare.scores[split]) {
            (Some(grown), Some(bare)) => format!("{:+.1} points", 100.0 * (grown - bare)),
            _ => "–".into(),
        };
        let ratio = |grown: f64, bare: f64| format!("× {:.2}", grown / bare);
        let parameters = ratio(self.parameters, bare.parameters);
        let compute = ratio(self.training_flops, bare.training_flops);
        ["difference".into(), points(0), points(1), parameters, compute]
    }
}

/// Number of an env, and number of the fold that the env holds out.
fn number(env: &EnvSummary) -> String {
    let fold = env.part.as_ref().and_then(|part| part.fold);
    fold.map_or(env.env.to_string(), |fold| format!("{}, fold {fold}", env.env))
}

fn parameters(env: &EnvSummary) -> String {
    let (host, grown) = (env.host_parameters as u64, env.grown_parameters as u64);
    format!("{} + {}", thousands(host), thousands(grown))
}

fn modules(env: &EnvSummary) -> String {
    let mut lines: Vec<String> = env.modules.iter().map(module).collect();
    if env.history.pruned > 0 {
        lines.push(format!("({} pruned)", env.history.pruned));
    }
    if lines.is_empty() {
        lines.push("none".into());
    }
    if env.rollbacks > 0 {
        lines.push(format!("(rolled back {})", counted(env.rollbacks, ["time", "times"])));
    }
    lines.join("\n")
}

fn module(module: &ModuleSummary) -> String {
    let ModuleSummary { slot, blueprint, stage, alpha, contribution, .. } = module;
    let effect = match contribution {
        Some(pp) => format!(" {pp:+.1}"),
        None if *alpha == 0.0 => ", no effect on the output yet".into(),
        None => ", contribution not measured".into(),
    };
    printable(&format!("{slot} {blueprint} ({stage}){effect}"))
}

/// Suggests further commands.
fn next(summary: &Summary) -> String {
    let best = summary.envs.iter().max_by(|a, b| {
        let score = |env: &EnvSummary| env.control_score.unwrap_or(env.train_score);
        score(a).total_cmp(&score(b))
    });
    let mut lines = vec!["next:".to_string()];
    if summary.status == Status::Interrupted {
        let run = quoted(&summary.run_dir);
        lines.push(format!("  meristem train --resume {run}    continue this run"));
    }
    if let Some(env) = best.filter(|_| summary.dataset.name == "embedded") {
        let weights = summary.run_dir.join(&env.weights);
        lines.push(format!("  meristem eval --weights {} --split test", quoted(&weights)));
    }
    for (command, purpose) in [
        ("--preset full", "longer episodes, stricter gates"),
        ("--dataset cifar10 --data-root DIR", "other images; see `meristem data info`"),
    ] {
        lines.push(format!("  meristem train {command:<36}{purpose}"));
    }
    lines.join("\n")
}

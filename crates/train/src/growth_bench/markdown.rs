//! The results as Markdown.

use std::fmt::Write;

use meristem_nn::ScoreKind;

use super::method::HEURISTIC;
use super::report::{GrowthTable, MethodReport, TaskReport};
use crate::record::summary::Status;
use crate::statistics::Spread;

/// Method with which the first column of differences compares.
const NONE: &str = "none";

impl GrowthTable {
    /// The results as Markdown, with a section for each task.
    pub fn markdown(&self) -> String {
        let mut text = format!("# Growth bench, suite {}\n\n", self.suite);
        if self.status == Status::Interrupted {
            text.push_str("Not complete: the table has the complete runs only.\n\n");
        }
        let (tuning, seeds) = (range(&self.tuning_seeds), range(&self.seeds));
        let _ = writeln!(
            text,
            "Test scores at the end of training, mean ± 95 % interval (Student's t) over the seeds \
             {seeds}; differences are in\npoints (hundredths of the score), paired by seed. Each \
             method has the learning rate with the best control score on the\nseeds {tuning}; test \
             data decides nothing. Compute is training and counterfactual evaluations, in \
             multiply-accumulates."
        );
        if !self.settings.is_empty() {
            let settings: Vec<String> =
                self.settings.iter().map(|(key, value)| format!("`{key} = {value}`")).collect();
            let _ = writeln!(text, "Settings over the suite's: {}.", settings.join(", "));
        }
        self.tasks.iter().for_each(|task| task.write(&mut text));
        text
    }
}

impl TaskReport {
    fn write(&self, text: &mut String) {
        let Self { task, host, large, steps, .. } = self;
        let _ =
            writeln!(text, "\n## {task}\n\nHost `{host}`, large host `{large}`, {steps} steps.\n");
        let has = |name: &str| self.methods.iter().any(|own| own.method == name);
        let bases: Vec<&str> = [NONE, HEURISTIC].into_iter().filter(|name| has(name)).collect();
        let mut head = vec![
            "method".into(),
            "rate".into(),
            "seeds".into(),
            format!("test {}{}", self.score, unit(self.score)),
        ];
        head.extend(bases.iter().map(|base| format!("over {base}")));
        head.extend(["parameters", "training compute, GMAC", "seconds"].map(String::from));
        write_row(text, &head);
        let _ = writeln!(text, "|---|{}", "---:|".repeat(head.len() - 1));
        self.methods.iter().for_each(|own| write_row(text, &own.row(self.score, &bases)));
        let notes: Vec<String> = self.methods.iter().flat_map(MethodReport::notes).collect();
        if !notes.is_empty() {
            text.push('\n');
            for note in notes {
                let _ = writeln!(text, "- {note}.");
            }
        }
        self.write_tuning(text);
    }

    /// Control scores of the rates.
    fn write_tuning(&self, text: &mut String) {
        let tuned = || self.methods.iter().filter(|own| !own.tuning.is_empty());
        let Some(longest) = tuned().map(|own| &own.tuning).max_by_key(|tuning| tuning.len()) else {
            return;
        };
        text.push('\n');
        let mut head = vec![format!("control {}{} with rate", self.score, unit(self.score))];
        head.extend(longest.iter().map(|rate| rate.lr.to_string()));
        write_row(text, &head);
        let _ = writeln!(text, "|---|{}", "---:|".repeat(head.len() - 1));
        for own in tuned() {
            let score = |place: usize| match own.tuning.get(place) {
                None => String::new(),
                Some(rate) => rate.control_score.map_or("failed".into(), |score| {
                    let bold = if own.lr == Some(rate.lr) { "**" } else { "" };
                    format!("{bold}{}{bold}", figure(self.score, score))
                }),
            };
            let scores = (0..longest.len()).map(score);
            write_row(text, &[own.method.clone()].into_iter().chain(scores).collect::<Vec<_>>());
        }
    }
}

impl MethodReport {
    fn row(&self, kind: ScoreKind, bases: &[&str]) -> Vec<String> {
        let rate = self.lr.map_or("–".into(), |lr| lr.to_string());
        let mut row = vec![self.method.clone(), rate, self.runs.len().to_string()];
        row.push(spread(self.test_score, |score| figure(kind, score)));
        row.extend(bases.iter().map(|base| match self.difference_pp.get(*base) {
            Some(difference) => spread(Some(difference.spread), |points| format!("{points:+.2}")),
            None => String::new(),
        }));
        row.push(spread(self.parameters, |count| thousands(count.round() as u64)));
        row.push(spread(self.macs, |macs| format!("{:.3}", macs / 1e9)));
        row.push(self.seconds.map_or("–".into(), |seconds| format!("{:.1}", seconds.mean)));
        row
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = vec![];
        if self.at_edge {
            let rate = self.lr.map_or(String::new(), |lr| lr.to_string());
            notes.push(format!(
                "{}: the best rate, {rate}, is at the edge of those tried, so a better one may be \
                 outside",
                self.method
            ));
        }
        if !self.diverged.is_empty() {
            let seeds: Vec<String> = self.diverged.iter().map(u64::to_string).collect();
            notes.push(format!(
                "{}: no result with seeds {}: its training failed, or the training of a method \
                 that it needs",
                self.method,
                seeds.join(", ")
            ));
        }
        if self.lr.is_none() && !self.tuning.is_empty() {
            notes.push(format!("{}: training failed with all rates", self.method));
        }
        notes
    }
}

fn write_row(text: &mut String, cells: &[String]) {
    let _ = writeln!(text, "| {} |", cells.join(" | "));
}

/// Seeds, which are consecutive.
fn range(seeds: &[u64]) -> String {
    match seeds {
        [] => "–".into(),
        [only] => only.to_string(),
        [first, .., last] => format!("{first} to {last}"),
    }
}

/// Mean and interval, the interval without its sign.
fn spread(value: Option<Spread>, format: impl Fn(f64) -> String) -> String {
    let Some(Spread { mean, ci95, .. }) = value else { return "–".into() };
    let half = ci95.map_or("–".into(), |half| format(half).trim_start_matches('+').to_string());
    format!("{} ± {half}", format(mean))
}

fn figure(kind: ScoreKind, score: f64) -> String {
    match kind {
        ScoreKind::Accuracy => format!("{:.2}", 100.0 * score),
        _ => format!("{score:.4}"),
    }
}

/// Unit of [`figure`], for a heading.
fn unit(kind: ScoreKind) -> &'static str {
    if kind == ScoreKind::Accuracy { ", %" } else { "" }
}

/// A number with commas, such as `1,234`.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

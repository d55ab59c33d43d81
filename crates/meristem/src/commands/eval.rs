//! `meristem eval`.

use std::process::ExitCode;

use meristem::data::Split;
use meristem::train::eval::{EvalConfig, NormalizedBy, evaluate};

use super::{Outcome, insight, print_json, warn_dropped};
use crate::cli::EvalArguments;
use crate::failure::Failure;
use crate::plain;

pub(crate) fn run(arguments: &EvalArguments) -> Outcome {
    let config = EvalConfig {
        weights: arguments.weights.clone(),
        host: arguments.host.clone(),
        dataset: arguments.dataset.spec()?,
        split: split(&arguments.split)?,
        batch: arguments.batch,
        normalize: arguments.normalize.clone(),
        logits: arguments.logits.clone(),
        device: arguments.network.device()?,
        precision: arguments.network.precision,
        threads: arguments.threads,
        trace: arguments.insight.trace.clone(),
    };
    let mut report = evaluate(&config)?;
    report.memory = report.memory.filter(|_| arguments.insight.memory);
    if arguments.json {
        print_json(&report)?
    } else {
        plain::out(&format!(
            "{}: accuracy {} on {} {} samples, loss {:.4}",
            plain::shown(&arguments.weights),
            plain::percent(Some(report.accuracy)),
            plain::thousands(report.samples),
            config.split,
            report.loss
        ))
    }
    if report.normalization == NormalizedBy::Dataset {
        plain::err(
            "note: the weights file has no normalisation constants, so pixels were normalised with \
             those of the dataset",
        );
    }
    if !arguments.json {
        insight(report.memory.as_ref(), report.trace.as_ref());
    }
    report.trace.as_ref().inspect(|trace| warn_dropped(trace));
    Ok(ExitCode::SUCCESS)
}

fn split(name: &str) -> Result<Split, Failure> {
    Split::ALL
        .into_iter()
        .find(|split| split.name() == name)
        .ok_or_else(|| Failure::value("split", name, "train or test"))
}

//! `meristem eval`.

mod ensemble;

use std::process::ExitCode;

use meristem::data::Split;
use meristem::train::eval::{EvalConfig, NormalizedBy, evaluate};

use super::{Outcome, insight, print_scores, warn_dropped};
use crate::cli::EvalArguments;
use crate::failure::Failure;
use crate::{plain, score};

pub(crate) fn run(arguments: &EvalArguments) -> Outcome {
    if let Some(run) = &arguments.ensemble {
        return ensemble::run(arguments, run);
    }
    // One of the two is required.
    let weights = arguments.weights.clone().unwrap_or_default();
    let config = EvalConfig {
        weights,
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
    let kind = report.score_kind;
    if arguments.json {
        print_scores(&report, kind)?
    } else {
        plain::out(&format!(
            "{}: {kind} {} on {} {} samples, loss {:.4}",
            plain::shown(&config.weights),
            score::value(kind, Some(report.score)),
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

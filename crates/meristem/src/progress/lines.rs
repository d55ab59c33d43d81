//! Texts of the progress output.

use meristem::control::{ActionOp, HEADS, RoundReport};
use meristem::device::DeviceId;
use meristem::grow::Stage;
use meristem::nn::ScoreKind;
use meristem::train::events::{Event, Extension, Recorded, RunStarted, SlotState, StepCompleted};
use meristem::train::settings::{Normalize, PolicyStart, TaskKind};
use meristem::train::summary::PartSummary;

use crate::plain::{self, counted, mean, printable, thousands};
use crate::score;

/// Formats the first lines of a run: hosts, data, number of steps, devices.
pub(super) fn beginning(run: &RunStarted) -> [String; 3] {
    let ranks = match run.ranks {
        1 => String::new(),
        ranks => format!(", {ranks} ranks ({})", run.exchange),
    };
    let devices = match &run.devices[..] {
        [one] if *one == DeviceId::Cpu(0) => String::new(),
        [one] => format!("on {} with ", printable(&one.to_string())),
        devices => {
            let names: Vec<String> = devices.iter().map(Recorded::to_string).collect();
            format!("{} devices ({}) of ", names.len(), printable(&names.join(", ")))
        }
    };
    let task = match run.task {
        TaskKind::Classify => String::new(),
        task => format!(" (task {task})"),
    };
    let normalize = match &run.normalize {
        Normalize::Data => String::new(),
        constants => format!(", normalize {constants}"),
    };
    [
        format!(
            "{} of `{}` ({} parameters) on {}{task}, each with {} samples per step (epoch {})",
            counted(run.envs, ["env", "envs"]),
            printable(&run.host.to_string()),
            thousands(run.host_parameters as u64),
            printable(&run.dataset),
            images_per_step(run.images_per_step),
            run.epoch,
        ),
        format!(
            "{} training, {} control{}{}{normalize}; {} of {} of {}",
            samples(run, run.train_samples, |part| part.train_samples),
            samples(run, run.control_samples, |part| part.control_samples),
            test_images(run.test_samples),
            parts(run),
            counted(run.rounds, ["round", "rounds"]),
            counted(run.steps, ["step", "steps"]),
            counted(run.batches, ["batch", "batches"]),
        ),
        format!(
            "controller {}{}, {devices}{}{ranks}, {}, seed {}",
            printable(&run.controller.to_string()),
            run.policy.as_ref().map_or(String::new(), policy),
            counted(run.threads, ["thread", "threads"]),
            run.instruction_set,
            run.seed,
        ),
    ]
}

/// Describes the initial policy.
fn policy(start: &PolicyStart) -> String {
    match start {
        PolicyStart::New => " from a new policy".into(),
        PolicyStart::BuiltIn(policy) => format!(" from the policy `{}`", policy.name()),
        PolicyStart::File(path) => {
            format!(" from the policy in {}", printable(&path.display().to_string()))
        }
    }
}

/// Formats `9,000`, or `2,176 to 2,250` if envs differ.
fn images_per_step([least, most]: [usize; 2]) -> String {
    if least == most {
        thousands(most as u64)
    } else {
        format!("{} to {}", thousands(least as u64), thousands(most as u64))
    }
}

/// Formats a number of samples, or the range of it if envs have different parts.
fn samples(run: &RunStarted, all: usize, of_part: fn(&PartSummary) -> usize) -> String {
    let [least, most] = [run.parts.iter().map(of_part).min(), run.parts.iter().map(of_part).max()];
    images_per_step([least.unwrap_or(all), most.unwrap_or(all)])
}

/// Describes the parts of the envs, if they differ.
fn parts(run: &RunStarted) -> String {
    let folds = run.parts.iter().filter_map(|part| part.fold).max();
    match folds {
        Some(last) => format!(", {} folds", last + 1),
        None if run.parts.is_empty() => String::new(),
        None => ", other training samples for each env".into(),
    }
}

/// Formats the size of the test split.
fn test_images(samples: Option<usize>) -> String {
    match samples {
        Some(samples) => format!(", {} test samples", thousands(samples as u64)),
        None => " samples, no test split".into(),
    }
}

/// Text of an event with a separate line; `None` for other events.
pub(super) fn event_text(event: &Event) -> Option<String> {
    Some(match event {
        Event::ModuleGerminated { env, slot, blueprint, parameters, .. } => format!(
            "  env {env}: {blueprint} germinates in {slot} ({} parameters)",
            thousands(*parameters as u64)
        ),
        Event::LayerWidened { env, layer, from, to, host_parameters, .. } => format!(
            "  env {env}: {layer} has {to} features instead of {from} (host: {} parameters)",
            thousands(*host_parameters as u64)
        ),
        Event::StageChanged { env, slot, to: Recorded::Known(to), .. }
            if matches!(to, Stage::Training | Stage::Blending | Stage::Holding) =>
        {
            format!("  env {env}: {slot} is {to}")
        }
        Event::ModulePruned { env, slot, blueprint, contribution, .. } => {
            format!("  env {env}: {blueprint} in {slot} is pruned{}", in_points(*contribution))
        }
        Event::ModuleFossilized { env, slot, blueprint, contribution, .. } => {
            format!("  env {env}: {blueprint} in {slot} is fossilized{}", in_points(*contribution))
        }
        Event::GovernorRollback { env, failure, restored_step, .. } => {
            let to = restored_step.map_or("the start of its episode".into(), |step| {
                format!("its state after step {}", step + 1)
            });
            format!("  env {env}: {}; it is rolled back to {to}", failure.describe())
        }
        Event::MembersEnded { members, reason, left, .. } => {
            let reason = reason.known().map_or(reason.to_string(), |known| known.describe().into());
            let ended = match members[..] {
                [member] => format!("member {member} ends"),
                _ => format!("{} members end", members.len()),
            };
            format!("  {ended}: {reason}; {left} left")
        }
        Event::MemberBegun { member, step: 1.., settings, .. } => {
            format!("  member {member} begins: {}", printable(settings))
        }
        Event::MemberCopied { member, from, settings, .. } => {
            format!("  member {member} copies member {from}: {}", printable(settings))
        }
        Event::RunExtended(Extension { round, step, steps, rounds }) => format!(
            "  extended to {} of {}; it continues with round {}, step {}",
            counted(*rounds, ["round", "rounds"]),
            counted(*steps, ["step", "steps"]),
            round + 1,
            step + 1
        ),
        Event::Anomaly { env, what, .. } => format!("  env {env}: {what}"),
        _ => return None,
    })
}

/// Formats the results of a round in which a policy learned.
pub(super) fn round_ended(
    round: usize,
    (kind, mean): (ScoreKind, Option<f64>),
    report: &RoundReport,
) -> String {
    let skipped = if report.skipped > 0 { "; update skipped" } else { "" };
    let (number, mean) = (round + 1, score::value(kind, mean));
    format!("  round {number}: mean {kind} {mean}, return {:.3}{skipped}", report.mean_return)
}

/// Formats the statistics of a policy's update on one line, with the entropies of all heads that
/// had more than one choice.
pub(super) fn update_statistics(report: &RoundReport) -> String {
    let heads = HEADS.iter().zip(report.entropies).filter(|(_, entropy)| *entropy > 0.0);
    let entropies: Vec<String> =
        heads.map(|(head, entropy)| format!("{} {entropy:.2}", head.name)).collect();
    let ops = ActionOp::ALL.iter().zip(report.ops).filter(|(_, count)| *count > 0);
    let ops: Vec<String> = ops.map(|(op, count)| format!("{op} {count}")).collect();
    let ranks = report.fingerprint.as_ref();
    let ranks = ranks.map_or(String::new(), |hash| format!("; fingerprint {hash} on all ranks"));
    format!(
        "    KL {:.4}, explained variance {:.2}, entropy {}; actions {}{ranks}",
        report.kl,
        report.explained_variance,
        entropies.join(" "),
        ops.join(" ")
    )
}

/// Mean control score over all envs after the last step.
pub(super) fn mean_score(envs: &[Option<StepCompleted>]) -> Option<f64> {
    mean(envs.iter().flatten().filter_map(|step| step.control_score))
}

/// Formats a contribution, such as ` (contribution +1.8 points)`; empty without a measurement.
fn in_points(contribution: Option<f64>) -> String {
    contribution.map_or(String::new(), |pp| format!(" (contribution {pp:+.1} points)"))
}

/// Formats scores, such as `control accuracy 81.2 80.4 %, bare 78.5 %` or `control R² 0.873`; with
/// more than eight envs, as a range. `bare` is the mean over the twins.
pub(super) fn scores(kind: ScoreKind, envs: &[Option<StepCompleted>]) -> String {
    let all: Vec<f64> =
        envs.iter().flatten().map(|step| step.control_score.unwrap_or(step.train_score)).collect();
    let split = if envs.iter().flatten().any(|step| step.control_score.is_some()) {
        "control"
    } else {
        "training"
    };
    let (median, least, greatest) = plain::spread(&all);
    let figure = |score: &f64| score::figure(kind, *score);
    let figures = match all.len() {
        0..=8 => all.iter().map(|s| format!("{:>4}", figure(s))).collect::<Vec<_>>().join(" "),
        _ => format!("{} to {}, median {}", figure(&least), figure(&greatest), figure(&median)),
    };
    let twins = envs.iter().flatten().filter_map(|step| step.twin?.control_score);
    let bare = mean(twins)
        .map_or(String::new(), |twin| format!(", bare {}", score::value(kind, Some(twin))));
    format!("{split} {kind} {figures}{}{bare}", score::unit(kind))
}

/// Formats score, modules and parameters of an env. Parameters are last, because the end may be
/// cut off at 80 columns.
pub(super) fn env_status(kind: ScoreKind, step: &StepCompleted) -> String {
    let score = match step.control_score {
        Some(score) => format!("control {}", score::named(kind, Some(score))),
        None => format!("training {}", score::named(kind, Some(step.train_score))),
    };
    let grown = match step.grown_parameters {
        0 => String::new(),
        grown => format!(" + {}", thousands(grown as u64)),
    };
    let host = thousands(step.host_parameters as u64);
    let slots = step.slots.iter().map(slot);
    let parts = std::iter::once(score).chain(slots).chain([format!("{host}{grown} parameters")]);
    parts.collect::<Vec<_>>().join("  ")
}

/// Formats a slot, with α instead of the stage for a blending module.
fn slot(state: &SlotState) -> String {
    let blueprint = state.blueprint.as_deref().unwrap_or("");
    let stage = if state.stage == Stage::Blending {
        format!("α {:.2}", state.alpha)
    } else {
        state.stage.to_string()
    };
    format!("{} {blueprint} {stage}", state.slot).replace("  ", " ")
}

#[cfg(test)]
mod tests {
    use meristem::train::events::TwinStep;

    use super::*;

    fn step(env: usize, control_score: Option<f64>) -> Option<StepCompleted> {
        Some(StepCompleted {
            env,
            round: 0,
            step: 0,
            train_loss: 1.0,
            train_score: 0.5,
            control_loss: None,
            control_score,
            host_gradient_norm: None,
            host_parameters: 6418,
            grown_parameters: 0,
            slots: vec![],
            action: "WAIT".into(),
            reward: Default::default(),
            step_seconds: Some(1.0),
            images_per_s: Some(1.0),
            phases: None,
            gradients: None,
            fingerprint: None,
            twin: None,
        })
    }

    #[test]
    fn a_step_is_one_line() {
        let few = [step(0, Some(0.812)), step(1, Some(0.5))];
        assert_eq!(scores(ScoreKind::Accuracy, &few), "control accuracy 81.2 50.0 %");
        let bare = [step(0, None)];
        assert_eq!(scores(ScoreKind::Accuracy, &bare), "training accuracy 50.0 %");
        assert_eq!(mean_score(&few), Some(0.656));
        let twin = |share| {
            let twin = TwinStep { train_loss: None, control_loss: None, control_score: share };
            step(0, Some(0.812)).map(|step| StepCompleted { twin: Some(twin), ..step })
        };
        let beside = [twin(Some(0.7)), twin(Some(0.71))];
        assert_eq!(
            scores(ScoreKind::Accuracy, &beside),
            "control accuracy 81.2 81.2 %, bare 70.5 %"
        );
        assert_eq!(scores(ScoreKind::Accuracy, &[twin(None)]), "control accuracy 81.2 %");
        assert_eq!(mean_score(&bare), None);
        let many: Vec<_> = (0..9).map(|env| step(env, Some(env as f64 / 10.0))).collect();
        assert_eq!(
            scores(ScoreKind::Accuracy, &many),
            "control accuracy 0.0 to 80.0, median 40.0 %"
        );
    }

    #[test]
    fn modules_are_within_80_columns() {
        let slot = |slot: &str| SlotState {
            slot: slot.into(),
            stage: Stage::Blending.into(),
            blueprint: Some("conv_light".into()),
            alpha: 0.25,
            contribution: None,
            gradient_health: None,
        };
        let mut growing = step(0, Some(0.8)).unwrap();
        growing.slots = vec![slot("r0c1"), slot("r1c2")];
        let text = env_status(ScoreKind::Accuracy, &growing);
        let expected = "control 80.0 %  r0c1 conv_light α 0.25  r1c2 conv_light α 0.25";
        assert_eq!(text, format!("{expected}  6,418 parameters"));
        // The prefix is `   env 0 `.
        assert!(9 + expected.chars().count() < 80);
    }

    #[test]
    fn a_round_of_a_policy_is_one_line_and_a_verbose_line() {
        let mut report = RoundReport { mean_return: 1.25, kl: 0.0123, ..RoundReport::default() };
        report.explained_variance = 0.5;
        (report.entropies[0], report.entropies[2]) = (0.75, 1.0);
        (report.ops[0], report.ops[1]) = (7, 1);
        let expected = "  round 2: mean accuracy 50.0 %, return 1.250";
        assert_eq!(round_ended(1, (ScoreKind::Accuracy, Some(0.5)), &report), expected);
        assert_eq!(
            update_statistics(&report),
            "    KL 0.0123, explained variance 0.50, entropy op 0.75 blueprint 1.00; \
             actions WAIT 7 GERMINATE 1"
        );
        report.skipped = 1;
        assert_eq!(
            round_ended(1, (ScoreKind::Accuracy, Some(0.5)), &report),
            format!("{expected}; update skipped")
        );
    }
}

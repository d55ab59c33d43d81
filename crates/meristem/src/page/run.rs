//! Parts of a page about one run.

use meristem::control::{ActionOp, HEADS, counted_ops};
use meristem::export::drawing::{DrawnSlot, inline_svg, topology};
use meristem::nn::ScoreKind;
use meristem::train::reading::{Curve, EnvHistory, Run};
use meristem::train::summary::EnvSummary;

use super::html::Html;
use super::members::members;
use super::runs::skipped;
use super::{Part, chart, series};
use crate::plain::{counted, thousands};
use crate::plot::{Chart, Series, lifecycle};
use crate::score;

/// Maximum number of envs with a separate part; further envs are only in the charts.
const ENVS_MAX: usize = 64;

/// All parts about one run.
pub(crate) fn about(run: &Run) -> Vec<Part> {
    let mut parts = vec![Part::new("run", description(run)), Part::new("members", members(run))];
    parts.push(Part::new("curves", env_charts(run)));
    parts.push(Part::new("policy", policy(run)));
    let history = &run.history;
    for (number, env) in history.envs.iter().take(ENVS_MAX) {
        let html = Html::details(&format!("Env {number}"), true, one_env(run, *number, env));
        parts.push(Part::new(format!("env-{number}"), html));
    }
    if history.envs.len() > ENVS_MAX {
        let more = counted(history.envs.len() - ENVS_MAX, ["env", "envs"]);
        let words = format!("Only in the charts: {more}.");
        parts.push(Part::new("more-envs", Html::of("p", &words)));
    }
    parts.push(Part::new("incidents", incidents(run)));
    let settings = run.settings.all().into_iter().map(|(key, value)| vec![key.into(), value]);
    let header = [vec!["setting".to_string(), "value".to_string()]];
    let settings: Vec<Vec<String>> = header.into_iter().chain(settings).collect();
    let settings = Html::details("Settings", false, Html::table("Settings", &settings));
    parts.push(Part::new("settings", settings));
    parts
}

/// Problems of the folder, and a sentence about the run.
fn description(run: &Run) -> Html {
    let mut body = Html::default();
    for words in run.overview.problem.iter().cloned().chain(skipped(run.skipped)) {
        body.push(Html::of("p", &words));
    }
    let history = &run.history;
    if let Some(started) = &history.started {
        body.push(Html::of(
            "p",
            &format!(
                "{} of {} ({} parameters) on {}, {} of {}; controller {}, seed {}",
                counted(started.envs, ["env", "envs"]),
                started.host,
                thousands(started.host_parameters as u64),
                started.dataset,
                counted(started.rounds, ["round", "rounds"]),
                counted(started.steps, ["step", "steps"]),
                started.controller,
                started.seed,
            ),
        ));
    }
    body
}

/// Rollbacks and anomalies; empty if there are none.
fn incidents(run: &Run) -> Html {
    let incidents = &run.history.incidents;
    if incidents.is_empty() {
        return Html::default();
    }
    let mut rows = vec![["env", "round", "step", "incident"].map(String::from).to_vec()];
    rows.extend(incidents.iter().map(|i| {
        let [round, step] = [i.round, i.step].map(|n| (n.saturating_add(1)).to_string());
        vec![i.env.to_string(), round, step, i.what.clone()]
    }));
    Html::table("Rollbacks and anomalies", &rows)
}

/// The mean curve over all rounds, then curves of all envs in the newest round.
fn env_charts(run: &Run) -> Html {
    type Of = fn(&EnvHistory) -> &Curve;
    let history = &run.history;
    let kind = history.score_kind();
    let (score, factor) = (format!("control {kind}"), score::factor(kind));
    let axis = score::axes(Some(kind))[0];
    let loss = match kind {
        ScoreKind::Accuracy => "mean cross-entropy",
        _ => "mean loss",
    };
    let charts: [(&str, &'static str, Of, f64); 3] = [
        (&score, axis, |env| &env.control_score, factor),
        ("training loss", loss, |env| &env.train_loss, 1.0),
        ("parameters of host and modules", "parameters", |env| &env.parameters, 1.0),
    ];
    let mut body = Html::default();
    if history.round > 0 {
        body.push(chart(&Chart {
            title: format!("mean {score} of the envs, over all rounds"),
            labels: ["step, over all rounds", axis],
            series: vec![series("envs", &history.score, factor)],
        }));
    }
    for (title, label, of, factor) in charts {
        let envs = history.envs.iter();
        let mut all: Vec<Series> =
            envs.map(|(number, env)| series(format!("env {number}"), of(env), factor)).collect();
        if title == score {
            all.extend(
                history.envs.iter().map(|(number, env)| {
                    series(format!("twin of {number}"), &env.twin_score, factor)
                }),
            );
            all.retain(|series| !series.points.is_empty());
        }
        let title = if history.started.as_ref().is_some_and(|started| started.rounds > 1) {
            format!("{title} in round {}", history.round.saturating_add(1))
        } else {
            title.into()
        };
        body.push(chart(&Chart { title, labels: ["step", label], series: all }));
    }
    body
}

/// Statistics of the policy over the rounds; empty without a policy.
fn policy(run: &Run) -> Html {
    let policy = &run.history.policy;
    let Some(last) = &policy.last else { return Html::default() };
    let mut body = Html::of("h3", "Policy");
    let charts = [
        ("mean return", vec![series("return", &policy.mean_return, 1.0)]),
        ("KL divergence", vec![series("KL", &policy.kl, 1.0)]),
        ("explained variance", vec![series("value function", &policy.explained_variance, 1.0)]),
        (
            "normalised entropy of the heads",
            HEADS.iter().zip(&policy.entropies).map(|(h, c)| series(h.name, c, 1.0)).collect(),
        ),
    ];
    for (title, series) in charts {
        body.push(chart(&Chart { title: title.into(), labels: ["round", ""], series }));
    }
    let ops = ActionOp::ALL
        .iter()
        .zip(counted_ops(&last.ops))
        .map(|(op, count)| vec![op.to_string(), thousands(*count)]);
    let header = [vec!["op".to_string(), "actions".to_string()]];
    let rows: Vec<Vec<String>> = header.into_iter().chain(ops).collect();
    body.push(Html::table("Actions in the newest round", &rows));
    body
}

fn one_env(run: &Run, number: usize, env: &EnvHistory) -> Html {
    let mut body = Html::default();
    let slots: Vec<DrawnSlot> = env
        .last
        .iter()
        .flat_map(|step| &step.slots)
        .map(|slot| DrawnSlot {
            slot: slot.slot.clone(),
            stage: slot.stage.known(),
            text: slot.blueprint.clone().unwrap_or_else(|| slot.stage.to_string()),
        })
        .collect();
    let started = run.history.started.as_ref();
    let host = started.and_then(|started| started.host.known());
    if let Some(host) = &host {
        let label = format!("Network of env {number}, from the image to the classes");
        body.push(Html::of("h3", "Network"));
        body.push(Html::picture(inline_svg(&topology(host, &slots), &label), &label));
    }
    if let Some(picture) = lifecycle(&env.spans, host.as_ref()) {
        let label = format!("Stages of the slots of env {number} over the steps");
        body.push(Html::of("h3", "Stages over steps"));
        body.push(Html::picture(inline_svg(&picture, &label), &label));
    }
    let ended = run.summary.as_ref().and_then(|s| s.envs.iter().find(|env| env.env == number));
    body.push(contributions(env, ended, run.history.score_kind()));
    body
}

/// Table of the modules of an env with their contributions, from the summary if the run has ended.
fn contributions(env: &EnvHistory, ended: Option<&EnvSummary>, kind: ScoreKind) -> Html {
    let Some(last) = &env.last else { return Html::default() };
    if last.slots.is_empty() {
        return Html::of("p", "No module is in the network.");
    }
    let header = [
        "slot",
        "blueprint",
        "stage",
        "alpha",
        "parameters",
        "contribution in points",
        "in control loss",
        "Shapley value in points",
    ];
    let mut rows = vec![header.map(String::from).to_vec()];
    let points = |value: Option<f64>| value.map_or("–".into(), |pp| format!("{pp:+.1}"));
    for slot in &last.slots {
        let measured = env.modules.iter().find(|module| module.slot == slot.slot);
        let loss = measured.and_then(|module| module.contribution_loss);
        let result = ended.and_then(|env| env.modules.iter().find(|m| m.slot == slot.slot));
        let contribution = result.and_then(|module| module.contribution).or(slot.contribution);
        let parameters = env.module_parameters.get(&slot.slot);
        rows.push(vec![
            slot.slot.clone(),
            slot.blueprint.clone().unwrap_or("–".into()),
            slot.stage.to_string(),
            format!("{:.2}", slot.alpha),
            parameters.map_or("–".into(), |count| thousands(*count as u64)),
            points(contribution),
            loss.map_or("–".into(), |l| {
                format!("{:+.4} ± {:.4}", l.difference, l.standard_error)
            }),
            points(measured.and_then(|module| module.shapley)),
        ]);
    }
    let score = score::value(kind, last.control_score);
    Html::table(&format!("Contributions of modules; control {kind} {score}"), &rows)
}

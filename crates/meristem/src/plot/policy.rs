//! Plot of the training of a policy.

use std::collections::BTreeSet;

use meristem::train::policy_training::{CurveLine, Evaluation};

use super::{Chart, Picture, SIZE, Series};

/// Returns of each controller on the tasks of the evaluation, against the transitions of the
/// training; `None` without an evaluation. The line of a controller that does not learn is
/// horizontal, except that the last evaluation may have more tasks.
pub(crate) fn policy_training(lines: &[CurveLine]) -> Option<Picture> {
    let evaluations = || {
        lines.iter().filter_map(|line| match line {
            CurveLine::Evaluation(evaluation) => Some(evaluation),
            CurveLine::Round(_) => None,
        })
    };
    let names: BTreeSet<&String> =
        evaluations().flat_map(|evaluation| evaluation.controllers.keys()).collect();
    let point = |of: &Evaluation, name: &String| {
        let evaluated = of.controllers.get(name)?;
        let at = evaluated.mean_return;
        at.is_finite().then_some([of.transitions_total as f64, at])
    };
    let series = names.into_iter().map(|name| Series {
        name: name.clone(),
        points: evaluations().filter_map(|evaluation| point(evaluation, name)).collect(),
        shade: None,
    });
    let title = "mean return on tasks that no round has".into();
    let chart = Chart { title, labels: ["transitions", "return"], series: series.collect() };
    chart.draw(SIZE)
}

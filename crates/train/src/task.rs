//! Task of a run: its loss and score, from the settings and the dataset.

use meristem_data::{Dataset, DatasetInfo, Source, TargetKind};
use meristem_grow::nearest;
use meristem_nn::{Loss, Score, ScoreKind, target_squares};
use serde::{Deserialize, Serialize};

use crate::config::TrainConfig;
use crate::config::types::{ClassWeights, LossKind, TaskKind};
use crate::error::{Error, Result};

/// Halvings of the interval in which the best constant for the Huber loss is sought: more than the
/// 53 bits of the significand of an f64.
const HALVINGS: usize = 60;

/// Settings of a task.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TaskSettings {
    pub(crate) task: TaskKind,
    pub(crate) loss: LossKind,
    pub(crate) huber_delta: f32,
    pub(crate) label_smoothing: f32,
    pub(crate) class_weights: ClassWeights,
    /// Names or numbers of the classes that the run is restricted to.
    pub(crate) classes: Option<Vec<String>>,
}

/// The task that the targets are for, with its first loss.
impl Default for TaskSettings {
    fn default() -> Self {
        Self {
            task: TaskKind::Auto,
            loss: LossKind::Auto,
            huber_delta: 1.0,
            label_smoothing: 0.0,
            class_weights: ClassWeights::None,
            classes: None,
        }
    }
}

impl From<&TrainConfig> for TaskSettings {
    fn from(config: &TrainConfig) -> Self {
        let &TrainConfig { task, loss, huber_delta, label_smoothing, .. } = config;
        let (class_weights, classes) = (config.class_weights.clone(), config.classes.clone());
        Self { task, loss, huber_delta, label_smoothing, class_weights, classes }
    }
}

/// Task of a run: its loss, and the scores of its outputs.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    /// The task; not [`TaskKind::Auto`].
    pub(crate) kind: TaskKind,
    /// Loss of training, and of the control and test splits. If the program computes the loss, this
    /// is the first loss of the task, which determines the form of targets and scores.
    pub(crate) loss: Loss,
    /// Score on the training and control splits. R² compares with the variance of all training
    /// targets.
    pub(crate) score: Score,
    /// Score on the test split. R² compares with the variance of the test targets.
    pub(crate) test_score: Score,
    /// Loss of guessing: the loss of the best constant prediction on the training split; for
    /// classes that of equal probabilities; for a loss of the program that of outputs of 0.
    pub(crate) guessing: f64,
    /// Constants that the targets were standardised with.
    pub(crate) targets: Option<TargetScale>,
    /// Numbers of the classes that the run is restricted to, ascending; `None` for all.
    pub(crate) classes: Option<Vec<u32>>,
}

/// Mean and standard deviation of the training targets for each output of a network: an output
/// stands for `output · std + mean`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TargetScale {
    pub(crate) mean: Vec<f64>,
    pub(crate) std: Vec<f64>,
}

impl TargetScale {
    /// Constants of a dataset whose targets are numbers.
    pub(crate) fn of(info: &DatasetInfo) -> Option<Self> {
        let DatasetInfo { target_mean: mean, target_std: std, .. } = info;
        (info.targets == TargetKind::Numbers).then(|| Self { mean: mean.clone(), std: std.clone() })
    }

    /// Scale and shift of each output.
    pub(crate) fn scale_and_shift(&self) -> Vec<(f32, f32)> {
        self.std.iter().zip(&self.mean).map(|(std, mean)| (*std as f32, *mean as f32)).collect()
    }
}

/// The task that targets of a kind are for.
pub(crate) fn task_of(targets: TargetKind) -> TaskKind {
    match targets {
        TargetKind::Classes => TaskKind::Classify,
        TargetKind::Labels => TaskKind::Multilabel,
        TargetKind::Numbers => TaskKind::Regress,
    }
}

impl Task {
    /// The task of a run on a dataset. [`Self::measure`] completes it for targets other than
    /// classes.
    ///
    /// # Errors
    /// [`Error::Value`]: a task that the targets are not for, or a loss, a smoothing or weights
    /// that the task does not have.
    pub(crate) fn new(settings: &TaskSettings, info: &DatasetInfo) -> Result<Self> {
        let kind = check_task(settings.task, &info.name, info.targets)?;
        let loss = loss_of(settings, info, kind)?;
        let score = match kind.score() {
            ScoreKind::F1 => Score::F1,
            ScoreKind::R2 => Score::R2 { variance: 0.0 },
            _ => Score::Accuracy,
        };
        let classes = classes_of(settings, info, kind)?;
        let count = classes.as_ref().map_or(info.classes.len(), Vec::len);
        // One class is trained like two.
        let guessing = (count.max(2) as f64).ln();
        let targets = TargetScale::of(info);
        Ok(Self { kind, loss, score, test_score: score, guessing, targets, classes })
    }

    /// Measures the variance of the targets, and the loss of guessing. Reads targets other than
    /// classes from the device, and waits for it.
    ///
    /// # Errors
    /// A device failure.
    pub(crate) fn measure(&mut self, train: &Dataset, test: Option<&Dataset>) -> Result<()> {
        if self.kind == TaskKind::Classify {
            return Ok(());
        }
        let outputs = train.info().classes.len();
        let targets = train.targets().to_vec::<f32>()?;
        self.guessing = guessing(&self.loss, &targets, outputs);
        if let Score::R2 { variance } = &mut self.score {
            *variance = variance_of(&targets, outputs);
        }
        if let (Score::R2 { .. }, Some(test)) = (self.score, test) {
            self.test_score = test_score(self.score, test)?;
        }
        Ok(())
    }
}

/// The score of a task on a split: R² compares with the variance of the split's targets. Reads the
/// targets from the device for R², and waits for it.
///
/// # Errors
/// A device failure.
pub(crate) fn test_score(score: Score, split: &Dataset) -> Result<Score> {
    let Score::R2 { .. } = score else { return Ok(score) };
    let targets = split.targets().to_vec::<f32>()?;
    Ok(Score::R2 { variance: variance_of(&targets, split.info().classes.len()) })
}

fn variance_of(targets: &[f32], outputs: usize) -> f64 {
    let samples = targets.len() / outputs.max(1);
    target_squares(targets, outputs) / samples.max(1) as f64
}

/// The task of a run on a dataset with these targets, if the setting `task` is `asked`.
///
/// # Errors
/// [`Error::Value`]: a task that the targets are not for.
pub fn check_task(asked: TaskKind, dataset: &str, targets: TargetKind) -> Result<TaskKind> {
    let own = task_of(targets);
    if asked == TaskKind::Auto || asked == own {
        return Ok(own);
    }
    let has = match targets {
        TargetKind::Classes => "one class for each sample",
        TargetKind::Labels => "several labels for each sample",
        TargetKind::Numbers => "numbers",
    };
    let is_table = dataset == Source::Table.name();
    let source = match asked {
        TaskKind::Classify if is_table => "one target column of text or of whole numbers",
        TaskKind::Multilabel if is_table => "a file of arrays, because tables have no labels",
        _ if is_table => "target columns of numbers",
        TaskKind::Multilabel => "a file of arrays train_labels [N, K] of 0 and 1",
        TaskKind::Regress => "a file of arrays train_targets",
        _ => "a file of arrays train_labels [N] of integers",
    };
    let expected =
        format!("auto or {own}, because dataset {dataset} has {has}; for {asked} give {source}");
    Err(Error::value("task", asked, expected))
}

fn loss_of(settings: &TaskSettings, info: &DatasetInfo, kind: TaskKind) -> Result<Loss> {
    let known = kind.losses();
    if settings.loss == LossKind::External {
        check_plain(settings)?;
    }
    let loss = match settings.loss {
        // The first loss of the task determines the form of targets and scores.
        LossKind::Auto | LossKind::External => known.first().copied().unwrap_or_default(),
        given if known.contains(&given) => given,
        given => {
            let names: Vec<String> = known.iter().map(ToString::to_string).collect();
            let expected = format!("{}, of task {kind}", names.join(", "));
            return Err(Error::value("loss", given, expected));
        }
    };
    if loss != LossKind::Huber && settings.huber_delta != TaskSettings::default().huber_delta {
        let expected = format!("loss huber, instead of {loss}");
        return Err(Error::value("huber-delta", settings.huber_delta, expected));
    }
    if kind != TaskKind::Classify {
        let expected = |what| format!("{what} with task {kind}; only classify has this setting");
        if settings.label_smoothing != 0.0 {
            let key = "label-smoothing";
            return Err(Error::value(key, settings.label_smoothing, expected("0")));
        }
        if settings.class_weights != ClassWeights::None {
            let key = "class-weights";
            return Err(Error::value(key, &settings.class_weights, expected("none")));
        }
    }
    Ok(match loss {
        LossKind::Auto | LossKind::External | LossKind::CrossEntropy => Loss::CrossEntropy {
            label_smoothing: settings.label_smoothing,
            class_weights: settings.class_weights.of(info)?,
        },
        LossKind::BinaryCrossEntropy => Loss::BinaryCrossEntropy,
        LossKind::MeanSquaredError => Loss::MeanSquaredError,
        LossKind::Huber => Loss::Huber { delta: settings.huber_delta },
        LossKind::L1 => Loss::L1,
    })
}

/// Refuses settings of cross-entropy, which a loss of the program does not have.
fn check_plain(settings: &TaskSettings) -> Result<()> {
    let expected = |what| format!("{what} with loss external, in which the program computes it");
    if settings.label_smoothing != 0.0 {
        return Err(Error::value("label-smoothing", settings.label_smoothing, expected("0")));
    }
    if settings.class_weights != ClassWeights::None {
        return Err(Error::value("class-weights", &settings.class_weights, expected("none")));
    }
    Ok(())
}

/// Numbers of the classes that a run is restricted to: each is a name, or else a number.
fn classes_of(
    settings: &TaskSettings,
    info: &DatasetInfo,
    kind: TaskKind,
) -> Result<Option<Vec<u32>>> {
    const KEY: &str = "classes";
    let Some(wanted) = &settings.classes else { return Ok(None) };
    if kind != TaskKind::Classify {
        let expected = format!("none with task {kind}; only classify has classes");
        return Err(Error::value(KEY, wanted.join(","), expected));
    }
    let known = &info.classes;
    let number = |text: &String| {
        let text = text.trim();
        let named = known.iter().position(|name| name == text);
        let number = named.or_else(|| text.parse().ok().filter(|number| *number < known.len()));
        number.map(|number| number as u32).ok_or_else(|| {
            let is_number = text.parse::<u64>().is_ok();
            let near = nearest(text, known.iter().map(String::as_str)).filter(|_| !is_number);
            let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            let last = known.len().saturating_sub(1);
            let expected = format!("names of classes, or numbers from 0 to {last}{hint}");
            Error::value(KEY, format!("`{text}`"), expected)
        })
    };
    let mut numbers = wanted.iter().map(number).collect::<Result<Vec<u32>>>()?;
    numbers.sort_unstable();
    match numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            let name = &known[pair[0] as usize];
            Err(Error::value(KEY, format!("`{name}` twice"), "each class once"))
        }
        None => Ok(Some(numbers)),
    }
}

/// Loss of the best constant prediction of targets `[n][outputs]`: the mean over the outputs.
fn guessing(loss: &Loss, targets: &[f32], outputs: usize) -> f64 {
    let of_output = |output: usize| {
        let column = targets.iter().skip(output).step_by(outputs);
        let mut column: Vec<f64> = column.map(|target| f64::from(*target)).collect();
        column.sort_by(f64::total_cmp);
        of_column(loss, &column)
    };
    (0..outputs).map(of_output).sum::<f64>() / outputs.max(1) as f64
}

/// Loss of the best constant prediction of sorted targets of one output.
fn of_column(loss: &Loss, sorted: &[f64]) -> f64 {
    let mean_of = |of: &dyn Fn(f64) -> f64| {
        sorted.iter().map(|target| of(*target)).sum::<f64>() / sorted.len().max(1) as f64
    };
    match *loss {
        Loss::BinaryCrossEntropy => {
            let present = mean_of(&|target| target);
            let bits = |share: f64| if share > 0.0 { -share * share.ln() } else { 0.0 };
            bits(present) + bits(1.0 - present)
        }
        Loss::Huber { delta } => {
            let delta = f64::from(delta);
            let (mut low, mut high) = (
                sorted.first().copied().unwrap_or_default(),
                sorted.last().copied().unwrap_or_default(),
            );
            // The derivative with respect to the constant increases with the constant.
            for _ in 0..HALVINGS {
                let middle = 0.5 * (low + high);
                let slope = mean_of(&|target| (middle - target).clamp(-delta, delta));
                if slope > 0.0 {
                    high = middle;
                } else {
                    low = middle;
                }
            }
            mean_of(&|target| {
                let distance = (low - target).abs();
                let inside = distance.min(delta);
                inside * (distance - 0.5 * inside)
            })
        }
        Loss::L1 => {
            let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
            mean_of(&|target| (median - target).abs())
        }
        _ => {
            let mean = mean_of(&|target| target);
            mean_of(&|target| (target - mean) * (target - mean))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, with two outputs: 0, 0, 0, 4 and 1, 1, 1, 1.
    #[test]
    fn the_loss_of_guessing_is_that_of_the_best_constant() {
        let targets = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 4.0, 1.0];
        let of = |loss: Loss| guessing(&loss, &targets, 2);
        // Mean 1, variance (3·1 + 9)/4.
        assert_eq!(of(Loss::MeanSquaredError), 3.0 / 2.0);
        // Median 0.
        assert_eq!(of(Loss::L1), 1.0 / 2.0);
        // With δ = 1 the slope 3c − 1 is 0 at c = 1/3: (3·(1/18) + (11/3 − 1/2))/4.
        let huber = (3.0 / 18.0 + 11.0 / 3.0 - 0.5) / 4.0 / 2.0;
        assert!((of(Loss::Huber { delta: 1.0 }) - huber).abs() < 1e-12);
        // One of four labels in the first column, all in the second.
        let labels = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0];
        let entropy = -(0.25 * 0.25_f64.ln() + 0.75 * 0.75_f64.ln()) / 2.0;
        let found = guessing(&Loss::BinaryCrossEntropy, &labels, 2);
        assert!((found - entropy).abs() < 1e-12);
    }

    #[test]
    fn no_other_constant_is_better() {
        let targets: Vec<f32> = (0..40).map(|i| ((i * i) % 17) as f32 / 5.0).collect();
        for loss in [Loss::MeanSquaredError, Loss::L1, Loss::Huber { delta: 0.7 }] {
            let best = guessing(&loss, &targets, 1);
            let at = |constant: f64| {
                let of = |target: &f32| {
                    let distance = (constant - f64::from(*target)).abs();
                    match loss {
                        Loss::L1 => distance,
                        Loss::Huber { delta } if distance > f64::from(delta) => {
                            f64::from(delta) * (distance - 0.5 * f64::from(delta))
                        }
                        Loss::Huber { .. } => 0.5 * distance * distance,
                        _ => distance * distance,
                    }
                };
                targets.iter().map(of).sum::<f64>() / targets.len() as f64
            };
            let others = (0..400).map(|i| at(f64::from(i) * 0.01));
            let least = others.fold(f64::INFINITY, f64::min);
            assert!(best <= least + 1e-12 && least - best < 1e-2, "{loss:?}: {best}, {least}");
        }
    }
}

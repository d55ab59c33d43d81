//! `meristem data info | verify | import | plan | cache`.

use std::path::PathBuf;
use std::process::ExitCode;

use meristem::data::order::{self, OrderConfig};
use meristem::data::table::FeatureRule;
use meristem::data::{
    DatasetFiles, DatasetInfo, DatasetSpec, InputKind, Normalization, Source, Split, StoredType,
    TargetKind, VerifyReport, import_cifar10, verify,
};
use meristem::data::{decoded, path_text};
use meristem::train::check_task;
use meristem::train::settings::{Normalize, TaskKind};
use serde::Serialize;

use super::{Outcome, print_json};
use crate::cli::{
    CacheArguments, DataCommand, DatasetArguments, ImportArguments, InfoArguments, PlanArguments,
    VerifyArguments,
};
use crate::escape::quoted;
use crate::failure::Failure;
use crate::plain::{self, counted, printable, shown, thousands};
use crate::table;

/// Maximum number of constants that are printed.
const CONSTANTS_SHOWN: usize = 8;

pub(crate) fn run(command: &DataCommand) -> Outcome {
    match command {
        DataCommand::Info(arguments) => match &arguments.dataset.dataset {
            Some(_) => info(arguments),
            None => overview(arguments),
        },
        DataCommand::Verify(arguments) => verify_dataset(arguments),
        DataCommand::Import(arguments) => import(arguments),
        DataCommand::Plan(arguments) => plan(arguments),
        DataCommand::Cache(arguments) => cache(arguments),
    }
}

/// The selected dataset. With task regress a target column of whole numbers has numbers, not
/// classes.
fn spec_of(dataset: &DatasetArguments, task: TaskKind) -> Result<DatasetSpec, Failure> {
    let mut spec = dataset.spec()?;
    spec.table.numbers = task == TaskKind::Regress;
    Ok(spec)
}

fn info(arguments: &InfoArguments) -> Outcome {
    let info = DatasetFiles::open(&spec_of(&arguments.dataset, arguments.task)?)?.info()?;
    check_task(arguments.task, &info.name, info.targets)?;
    let Normalization { mean, std } = arguments.normalize.constants(&info)?;
    if arguments.json {
        let normalize = arguments.normalize.to_string();
        print_json(&DatasetDescription {
            info,
            normalization: NormalizationConstants { normalize, mean, std },
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let DatasetInfo { kind, stored, train_len, test_len, skipped, .. } = info;
    plain::out(&format!("dataset   {}", info.name));
    let (shape, axes) = (
        kind.describe(info.shape()),
        match kind {
            InputKind::Vector => "",
            InputKind::Signal => " (channels × points)",
            InputKind::Image => " (channels × rows × columns)",
        },
    );
    plain::out(&format!("{:<9} {shape}{axes}", kind.plural()));
    if stored != StoredType::U8 {
        plain::out(&format!("stored    as {stored}"));
    }
    let test = test_len.map_or("no test split".into(), |n| format!("{} test", thousands(n as u64)));
    plain::out(&format!("samples   {} training, {test}", thousands(train_len as u64)));
    if skipped > 0 {
        plain::out(&format!("skipped   {skipped} images that do not decode or have a bad label"));
    }
    let classes: Vec<String> = info.classes.iter().map(|name| printable(name)).collect();
    plain::out(&format!("{:<9} {}: {}", info.targets, classes.len(), classes.join(", ")));
    if info.targets == TargetKind::Numbers {
        let [mean, std] = [&info.target_mean, &info.target_std].map(|values| constants(values));
        plain::out(&format!("          mean {mean}, std {std}; networks learn (y - mean) / std"));
    }
    for column in info.table.iter().flat_map(|rules| &rules.features) {
        if let FeatureRule::Categorical { .. } = column.rule {
            plain::out(&printable(&format!("column    {column}")));
        }
    }
    let (data_mean, data_std) = (constants(&info.mean), constants(&info.std));
    let per = if kind == InputKind::Vector { "feature" } else { "channel" };
    let (of, unit) = match stored {
        StoredType::U8 if kind == InputKind::Image => ("images,", "  with pixels in 0 to 1)"),
        StoredType::U8 => ("samples,", "  with bytes as 0 to 1)"),
        StoredType::I16 | StoredType::F16 | StoredType::F32 => ("samples)", ""),
    };
    plain::out(&format!("mean      {data_mean} (per {per} of these training {of}"));
    plain::out(&format!("std       {data_std}{unit}"));
    plain::out(&match &arguments.normalize {
        Normalize::Data => "normalize data: training uses this mean and std".into(),
        Normalize::Constants(_) => format!("normalize {}", arguments.normalize),
        published => {
            format!("normalize {published}: mean {}, std {}", constants(&mean), constants(&std))
        }
    });
    Ok(ExitCode::SUCCESS)
}

/// Constants per channel in one line, the first [`CONSTANTS_SHOWN`] of them.
fn constants<T: Copy + Into<f64>>(values: &[T]) -> String {
    let shown = values.iter().take(CONSTANTS_SHOWN).map(|value| constant((*value).into()));
    let rest = values.len().saturating_sub(CONSTANTS_SHOWN);
    let rest = (rest > 0).then(|| format!("and {rest} more"));
    shown.chain(rest).collect::<Vec<String>>().join(", ")
}

/// A constant with four decimals, or four digits if it is tiny or huge.
fn constant(value: f64) -> String {
    match value.abs() {
        0.0 | 1e-3..1e6 => format!("{value:.4}"),
        _ => format!("{value:.3e}"),
    }
}

/// Output of `data info --json`.
#[derive(Serialize)]
struct DatasetDescription {
    #[serde(flatten)]
    info: DatasetInfo,
    normalization: NormalizationConstants,
}

/// Constants of the normalisation, with the value of `--normalize`.
#[derive(Serialize)]
struct NormalizationConstants {
    normalize: String,
    mean: Vec<f32>,
    std: Vec<f32>,
}

/// Description of one kind of dataset.
#[derive(Serialize)]
struct DatasetEntry {
    dataset: &'static str,
    /// Whether the dataset was found in the given folder; true for one without files.
    found: bool,
    expected: Vec<String>,
    where_to_get: &'static str,
}

fn overview(arguments: &InfoArguments) -> Outcome {
    let known: Vec<DatasetEntry> =
        Source::ALL.map(|source| known(source, &arguments.dataset)).into();
    if arguments.json {
        print_json(&known)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = table::new();
    table.set_header(["dataset", "found", "files in --data-root"]);
    for DatasetEntry { dataset, found, expected, where_to_get } in known {
        let mut files = expected;
        files.push(where_to_get.into());
        let found = if found { "yes" } else { "no" };
        table.add_row([dataset.to_string(), found.into(), files.join("\n")]);
    }
    plain::out(&table.to_string());
    match &arguments.dataset.data_root {
        Some(root) => plain::out(&format!("searched in {}", shown(root))),
        None => plain::out("add --data-root DIR to search a folder, --dataset NAME for details"),
    }
    Ok(ExitCode::SUCCESS)
}

fn known(source: Source, arguments: &DatasetArguments) -> DatasetEntry {
    let spec = DatasetSpec { source, ..arguments.options() };
    let has_files = !source.has_files() || spec.root.is_some();
    DatasetEntry {
        dataset: source.name(),
        found: has_files && DatasetFiles::open(&spec).is_ok(),
        expected: source.expected_files(),
        where_to_get: source.where_to_get(),
    }
}

fn verify_dataset(arguments: &VerifyArguments) -> Outcome {
    let dataset = &arguments.dataset;
    let report = verify(&spec_of(dataset, arguments.task)?)?;
    check_task(arguments.task, &report.name, report.targets)?;
    if arguments.json {
        print_json(&report)?
    } else {
        print_verification(&report)
    }
    let tolerated = dataset.skip_bad || report.is_sound();
    Ok(if tolerated { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_verification(report: &VerifyReport) {
    for split in &report.splits {
        let damaged = split.damaged.len();
        let counts: Vec<u64> = split.per_class.iter().map(|(_, count)| *count as u64).collect();
        let least = counts.iter().min().copied().unwrap_or(0);
        let most = counts.iter().max().copied().unwrap_or(0);
        let (outputs, least, most) = (counts.len(), thousands(least), thousands(most));
        let targets = match report.targets {
            TargetKind::Classes => format!("in {outputs} classes ({least} to {most} each)"),
            TargetKind::Labels => format!("with {outputs} labels ({least} to {most} each)"),
            TargetKind::Numbers => "with numbers".into(),
        };
        let samples = thousands(split.images as u64);
        plain::out(&format!(
            "{} {}: {samples} sound samples {targets}, {damaged} damaged",
            report.name, split.split,
        ));
        split
            .damaged
            .iter()
            .for_each(|damage| plain::out(&format!("  {}", printable(&damage.error.to_string()))));
    }
    if report.splits.iter().all(|split| split.split != Split::Test) {
        plain::out(&format!("{}: no test split", report.name));
    }
    plain::out(if report.is_sound() { "sound" } else { "damaged" });
}

fn import(arguments: &ImportArguments) -> Outcome {
    let report = import_cifar10(&arguments.from, &arguments.to, arguments.skip_bad)?;
    if arguments.json {
        print_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let counts = [report.train_len, report.test_len].map(|n| thousands(n as u64));
    plain::out(&format!(
        "wrote {} training and {} test images to {} ({} skipped)",
        counts[0],
        counts[1],
        shown(&report.folder),
        report.skipped
    ));
    let root = quoted(&arguments.to);
    plain::out(&format!("next: meristem train --dataset cifar10 --data-root {root}"));
    Ok(ExitCode::SUCCESS)
}

/// Output of `data cache --json`.
#[derive(Serialize)]
struct DecodedCache {
    /// The folder; null if no environment variable gives one.
    #[serde(serialize_with = "path_text::serialize_some")]
    folder: Option<PathBuf>,
    #[serde(skip_serializing_if = "path_text::is_exact")]
    path_is_lossy: bool,
    files: usize,
    bytes: u64,
    bytes_max: u64,
}

fn cache(arguments: &CacheArguments) -> Outcome {
    let folder = decoded::folder();
    let failed = |error: std::io::Error| {
        let place = folder.clone().unwrap_or_default();
        let message = format!("decoded images in {}: {error}", place.display());
        Failure::failed(message, "check the folder, or set MERISTEM_CACHE to another")
    };
    let (files, bytes) = if arguments.clear {
        decoded::clear().map_err(failed)?
    } else {
        let files = decoded::files().map_err(failed)?;
        (files.len(), files.iter().map(|(_, bytes)| bytes).sum())
    };
    if arguments.json {
        let path_is_lossy = folder.as_deref().is_some_and(path_text::is_lossy);
        let bytes_max = decoded::BYTES_MAX;
        print_json(&DecodedCache { folder, path_is_lossy, files, bytes, bytes_max })?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(folder) = folder else {
        plain::out("no images are cached: MERISTEM_CACHE, XDG_CACHE_HOME and HOME are not set");
        return Ok(ExitCode::SUCCESS);
    };
    let label = if arguments.clear { "removed" } else { "decoded images" };
    let splits = counted(files, ["split", "splits"]);
    let [bytes, most] = [bytes, decoded::BYTES_MAX].map(|n| n.div_ceil(1 << 20));
    let (bytes, most) = (thousands(bytes), thousands(most));
    plain::out(&format!("{label}: {splits}, {bytes} of at most {most} MiB, in {}", shown(&folder)));
    Ok(ExitCode::SUCCESS)
}

fn plan(arguments: &PlanArguments) -> Outcome {
    let (batch, max_batches) = (arguments.batch, arguments.max_batches.count());
    for (flag, number) in [("batch", Some(batch)), ("max-batches", max_batches)] {
        if number == Some(0) {
            let message = format!("`{flag}`: got 0, expected at least 1");
            return Err(Failure::usage(message, format!("give `{flag}` another value")));
        }
    }
    let devices = arguments.devices.iter().map(|name| name.trim().parse());
    let config = OrderConfig {
        ranks: None,
        own: None,
        len: arguments.len,
        parts: None,
        batch_per_env: batch,
        devices: devices.collect::<Result<_, meristem::device::Error>>()?,
        epoch_mode: arguments.epoch,
        seed: arguments.seed,
        shuffle: arguments.shuffle.0,
        drop_last: arguments.drop_last,
        max_batches,
    };
    let plan = order::plan(&config, arguments.epochs)?;
    if arguments.json {
        print_json(&plan)?;
        return Ok(ExitCode::SUCCESS);
    }
    for epoch in &plan.epochs {
        plain::out(&format!("epoch {}: {} batches", epoch.epoch, epoch.batches.len()));
        for (batch, envs) in epoch.batches.iter().enumerate() {
            for (env, indices) in envs.iter().enumerate() {
                plain::out(&format!("  batch {batch} env {env}: {indices:?}"));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

//! The dataset of a run.

use meristem_data::{
    DatasetInfo, DatasetSpec, Generated, MissingValues, Residency, Source, TableOptions,
};
use meristem_grow::{TaskShape, nearest};

use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::settings::TaskKind;

/// Residency of the images: on the device, or streamed if they exceed the budget.
pub(crate) fn residency(config: &TrainConfig) -> Residency {
    match config.data_budget {
        Some(budget) => Residency::Auto { budget: budget.0 },
        None => Residency::Resident,
    }
}

/// Shape of a dataset's images, for hosts.
pub(crate) fn image_shape(info: &DatasetInfo) -> TaskShape {
    let &DatasetInfo { channels, height, width, ref classes, .. } = info;
    TaskShape { channels, height, width, classes: classes.len() }
}

/// The dataset of a run.
///
/// # Errors
/// As [`dataset_spec`].
pub(crate) fn dataset_of(config: &TrainConfig) -> Result<DatasetSpec> {
    let options = DatasetSpec {
        root: config.data_root.clone(),
        skip_bad: config.skip_bad,
        resize: config.resize.map(|side| side as u32),
        no_cache: config.no_cache,
        table: TableOptions {
            target: config.target.clone().unwrap_or_default(),
            missing: config.missing,
            numbers: config.task == TaskKind::Regress,
            rules: None,
        },
        ..DatasetSpec::embedded()
    };
    dataset_spec(&config.dataset, options)
}

/// The dataset with the given name, which has options after it if it is generated:
/// `spirals:train=800,noise=2` ([`Generated`]).
///
/// # Errors
/// [`Error::Value`]: an unknown name, for which the nearest is suggested, or an unknown option; a
/// root for a dataset that reads no files, or an option of another dataset.
pub fn dataset_spec(name: &str, options: DatasetSpec) -> Result<DatasetSpec> {
    let (name, generated) = match name.split_once(':') {
        Some((name, generated)) => (name, Some(generated)),
        None => (name, None),
    };
    let source: Source = name.parse().map_err(|_| {
        let known = Source::ALL.map(Source::name);
        let hint = nearest(name, known).map(|near| format!("; did you mean `{near}`?"));
        let expected = format!("one of {}{}", known.join(", "), hint.unwrap_or_default());
        Error::value("dataset", format!("`{name}`"), expected)
    })?;
    let root = options.root.as_deref();
    if let Some(root) = root.filter(|_| !source.has_files()) {
        let found = Source::found_in(root).into_iter().map(|s| format!("`--dataset {s}`"));
        let found = found.collect::<Vec<_>>().join(" or ");
        let which = match &*found {
            "" => "no dataset fits the files there".into(),
            found => format!("{found} fits the files there"),
        };
        let expected = format!("no data root for dataset {source}, or another dataset; {which}");
        return Err(Error::value("data-root", root.display(), expected));
    }
    if let Some(side) = options.resize.filter(|_| !source.is_of_image_files()) {
        let expected = format!("no --resize with dataset {source}, whose images have one size");
        return Err(Error::value("resize", side, expected));
    }
    if source != Source::Table {
        let TableOptions { target, missing, .. } = &options.table;
        let expected = |flag| format!("no --{flag} with dataset {source}, only with dataset table");
        if !target.is_empty() {
            return Err(Error::value("target", target.join(","), expected("target")));
        }
        if *missing != MissingValues::Refuse {
            return Err(Error::value("missing", missing, expected("missing")));
        }
    }
    let parse = |options: &str| Generated::parse(source.options(), options).map_err(refused_option);
    let generated = generated.map(parse).transpose()?;
    Ok(DatasetSpec { source, generated: generated.unwrap_or_default(), ..options })
}

/// The error for an option that a dataset does not have, or does not accept.
fn refused_option(error: meristem_data::Error) -> Error {
    match error {
        meristem_data::Error::Argument { expected, got, .. } => {
            Error::value("dataset", got, expected)
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_generated_dataset_follow_its_name() {
        let spec = |name| dataset_spec(name, DatasetSpec::embedded());
        assert_eq!(spec("blobs:train=50").unwrap().generated.train, Some(50));
        for (name, words) in [("blobs:trian=50", "seed, train"), ("cifar10:train=9", "nothing")] {
            let error = spec(name).unwrap_err();
            assert!(matches!(&error, Error::Value { key, .. } if key == "dataset"), "{error:?}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn a_wrong_dataset_names_the_nearest() {
        let error = dataset_spec("cifar-10", DatasetSpec::embedded()).unwrap_err();
        assert!(matches!(&error, Error::Value { key, .. } if key == "dataset"), "{error:?}");
        assert!(error.to_string().contains("did you mean `cifar10`?"), "{error}");
    }
}

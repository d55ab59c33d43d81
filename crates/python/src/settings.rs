//! Settings from Python values, through the text forms of the command line.

use std::path::PathBuf;

use meristem_train::config::{ConfigLayer, TrainConfig};
use meristem_train::settings::Member;
use meristem_train::{Error, config_file};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::errors::{Failure, Kind};

/// Resolves the settings of a run from a file or a mapping; settings given by name override it.
///
/// # Errors
/// An unknown name, a value that its setting does not accept, an unreadable file.
pub(crate) fn resolve(
    config: Option<&Bound<'_, PyAny>>,
    given: &Bound<'_, PyDict>,
) -> PyResult<TrainConfig> {
    let file = match config {
        None => ConfigLayer::default(),
        Some(config) => match config.cast::<PyDict>() {
            Ok(mapping) => layer(mapping)?,
            Err(_) => config_file::read(&config.extract::<PathBuf>()?).map_err(Failure::from)?,
        },
    };
    Ok(TrainConfig::resolve(file, layer(given)?).map_err(Failure::from)?)
}

/// Converts settings given by name. `None` omits a setting.
///
/// # Errors
/// An unknown name, a value that its setting does not accept.
pub(crate) fn layer(given: &Bound<'_, PyDict>) -> PyResult<ConfigLayer> {
    let mut layer = ConfigLayer::default();
    for (key, value) in given.iter().filter(|(_, value)| !value.is_none()) {
        let key = key.str()?.to_string_lossy().into_owned();
        config_file::check_keys([key.as_str()].into_iter()).map_err(|problem| {
            Failure::usage(Kind::Setting, problem, "`docs/settings.md` lists all settings")
        })?;
        // A `meristem.Dataset`, which stands for several settings.
        match value.getattr_opt("_dataset_settings")? {
            Some(settings) if key == "dataset" => {
                for (key, value) in settings.cast::<PyDict>()?.iter() {
                    let key: String = key.extract()?;
                    let beside = given.get_item(&key)?.is_some_and(|value| !value.is_none());
                    if key != "dataset" && beside {
                        return Err(twice(&key));
                    }
                    set(&mut layer, &key, &value)?;
                }
            }
            _ => set(&mut layer, &key, &value)?,
        }
    }
    Ok(layer)
}

/// Converts settings of a member given by name.
///
/// # Errors
/// A value without a text form, a key that was given twice, a text with the separator of settings.
/// The run checks whether a member may have the setting, and whether the setting accepts the value.
pub(crate) fn member(given: &Bound<'_, PyDict>) -> PyResult<Member> {
    let mut member = Member::default();
    for (key, value) in given.iter() {
        let key = key.str()?.to_string_lossy().into_owned();
        let accepts = |text: &&String| ConfigLayer::default().set(&key, text).is_ok();
        let texts = texts(&key, &value)?;
        // If the setting accepts none of the texts, the first is kept, and the run reports it.
        let text = texts.iter().find(accepts).or(texts.first());
        let text = text.map(String::as_str).unwrap_or_default();
        member.push(&key, text).map_err(|error| {
            let message = format!("`{key}`: {error}");
            Failure::usage(Kind::Setting, message, "suggest each setting once, as for `members`")
        })?;
    }
    Ok(member)
}

fn twice(key: &str) -> PyErr {
    let message = format!("`{key}`: got a value beside a `meristem.Dataset`, which has its own");
    let remedy = "give the setting, or the dataset object, and not both";
    Failure::usage(Kind::Setting, message, remedy).into()
}

fn set(layer: &mut ConfigLayer, key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    // The values of these settings may be mappings, and lists of lists.
    let is_nested = ["members", "space", "member_changes"].contains(&key);
    let texts = if is_nested && !value.is_instance_of::<PyString>() {
        vec![json(key, value)?]
    } else {
        texts(key, value)?
    };
    let mut result = Ok(());
    for text in texts {
        result = layer.set(key, &text).map_err(|error| {
            let remedy = Error::value(key, "", "").remedy().unwrap_or_default();
            Failure::usage(Kind::Setting, format!("`{key}`: {error}"), remedy)
        });
        if result.is_ok() {
            break;
        }
    }
    Ok(result?)
}

/// Converts lists and mappings to JSON, and each value in them to its text form. The keys of a
/// mapping keep their order, which determines the order of the members.
fn json(key: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(mapping) = value.cast::<PyDict>() {
        let entry = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            let name = serde_json::Value::String(name.str()?.to_string_lossy().into_owned());
            Ok(format!("{name}:{}", json(key, &value)?))
        };
        let entries = mapping.iter().map(entry).collect::<PyResult<Vec<_>>>()?;
        return Ok(format!("{{{}}}", entries.join(",")));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items =
            value.try_iter()?.map(|item| json(key, &item?)).collect::<PyResult<Vec<_>>>()?;
        return Ok(format!("[{}]", items.join(",")));
    }
    let text = texts(key, value)?.pop().unwrap_or_default();
    Ok(serde_json::Value::String(text).to_string())
}

/// Text forms of a value. A boolean has two: true or false for flags, on or off for switches.
fn texts(key: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
    // A `meristem.Host`.
    if let Some(text) = value.getattr_opt("_setting")? {
        return Ok(vec![text.extract()?]);
    }
    if let Ok(truth) = value.cast::<PyBool>() {
        let [flag, switch] = if truth.is_true() { ["true", "on"] } else { ["false", "off"] };
        return Ok(vec![flag.into(), switch.into()]);
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let mut items = vec![];
        for item in value.try_iter()? {
            let item = item?;
            if item.is_instance_of::<PyList>() || item.is_instance_of::<PyTuple>() {
                return Err(unfit(key, "a list of lists"));
            }
            items.push(texts(key, &item)?.swap_remove(0));
        }
        return Ok(vec![items.join(",")]);
    }
    let is_plain = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyInt>()
        || value.is_instance_of::<PyFloat>()
        || value.hasattr("dtype")? && value.hasattr("__float__")?;
    if is_plain {
        return encodable(key, value.str()?.to_str());
    }
    if value.hasattr("__fspath__")? {
        let path = value.extract::<PathBuf>()?;
        let text = path.to_str().map(String::from).ok_or_else(|| {
            let got = path.display();
            let message = format!("`{key}`: got `{got}`, expected a path that is UTF-8");
            Failure::usage(Kind::Setting, message, "rename the file or its folder")
        })?;
        return Ok(vec![text]);
    }
    Err(unfit(key, &format!("a {}", value.get_type().qualname()?)))
}

/// Checks that a text is UTF-8, because the run's `config.toml` is UTF-8.
fn encodable<E>(key: &str, text: Result<&str, E>) -> PyResult<Vec<String>> {
    let text = text.map_err(|_| unfit(key, "text that is not UTF-8"))?;
    Ok(vec![text.to_owned()])
}

fn unfit(key: &str, got: &str) -> PyErr {
    let message = format!("`{key}`: got {got}, expected text, a number, a path or a list");
    let remedy = "docs/settings.md lists the values of every setting";
    Failure::usage(Kind::Setting, message, remedy).into()
}

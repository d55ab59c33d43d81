//! Flags of settings, derived from their table.

use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use meristem::train::config::declare::Setting;
use meristem::train::config::reference::differences;
use meristem::train::config::{ConfigLayer, FlagForm, all};
use meristem::train::settings::{BadValue, Preset};
use meristem::train::{self, config_file};

use crate::plain::{self, printable};

/// Settings as flags and from a file: with `SINGLE_RUN` the settings of `train`, otherwise the
/// settings of `control eval` with its defaults.
#[derive(Debug)]
pub(crate) struct SettingArguments<const SINGLE_RUN: bool> {
    /// Settings from a TOML or JSON file.
    pub(crate) config: Option<PathBuf>,
    flags: ConfigLayer,
    /// Flags that were given several times with different values, each with its last value.
    repeated: Vec<(&'static str, String)>,
}

impl<const SINGLE_RUN: bool> SettingArguments<SINGLE_RUN> {
    /// The settings of the configuration file; empty without a file.
    ///
    /// # Errors
    /// As [`config_file::read`].
    pub(crate) fn file(&self) -> Result<ConfigLayer, train::Error> {
        self.config.as_deref().map_or_else(|| Ok(ConfigLayer::default()), config_file::read)
    }

    /// Prints a note on stderr for each repeated flag, with the value in effect.
    pub(crate) fn note_repeated(&self) {
        for (flag, value) in &self.repeated {
            let value = printable(value);
            plain::err(&format!(
                "note: --{flag} was given more than once; the value {value} is used"
            ));
        }
    }

    /// The settings given as flags.
    pub(crate) fn layer(&self) -> ConfigLayer {
        self.flags.clone()
    }

    fn settings() -> impl Iterator<Item = &'static Setting> {
        all().iter().filter(|setting| SINGLE_RUN || !setting.train_only)
    }
}

impl<const SINGLE_RUN: bool> Args for SettingArguments<SINGLE_RUN> {
    fn augment_args(command: Command) -> Command {
        let config = Arg::new("config").long("config").value_name("FILE").help_heading("Run");
        let config = config.value_parser(clap::value_parser!(PathBuf));
        let config = config.help("Settings from a TOML or JSON file; flags override it");
        command.arg(config).args(Self::settings().map(|setting| {
            if SINGLE_RUN {
                flag(setting, &setting.default.to_string())
            } else {
                flag(setting, &setting.default_in_study())
            }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const SINGLE_RUN: bool> FromArgMatches for SettingArguments<SINGLE_RUN> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let (mut flags, mut repeated) = (ConfigLayer::default(), vec![]);
        for setting in Self::settings() {
            let text = match setting.form {
                FlagForm::Switch => matches.get_flag(setting.key).then(|| true.to_string()),
                FlagForm::Value => {
                    let mut given = matches.get_many::<String>(setting.key).unwrap_or_default();
                    let last = given.clone().next_back().cloned();
                    if let Some(last) =
                        last.as_ref().filter(|last| given.any(|value| value != *last))
                    {
                        repeated.push((setting.flag.as_str(), last.clone()));
                    }
                    last
                }
                FlagForm::List => joined(matches, setting.key, ","),
                FlagForm::Axes => joined(matches, setting.key, ";"),
            };
            let set = text.map_or(Ok(()), |text| flags.set(setting.key, &text));
            set.map_err(|error| clap::Error::raw(clap::error::ErrorKind::InvalidValue, error))?;
        }
        Ok(Self { config: matches.get_one::<PathBuf>("config").cloned(), flags, repeated })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// All values of a flag, joined by `separator`; `None` if the flag was not given.
fn joined(matches: &ArgMatches, key: &str, separator: &str) -> Option<String> {
    let given = matches.get_many::<String>(key)?;
    Some(given.map(String::as_str).collect::<Vec<_>>().join(separator))
}

/// Builds the flag of a setting, with the default of its command.
fn flag(setting: &'static Setting, default: &str) -> Arg {
    let help = setting.help.trim_end_matches('.');
    let help = match setting.form {
        FlagForm::Switch => help.to_string(),
        FlagForm::Value | FlagForm::List | FlagForm::Axes => format!("{help} [{default}]"),
    };
    let arg =
        Arg::new(setting.key).long(setting.flag.as_str()).help_heading(setting.heading).help(help);
    let arg = match setting.key {
        "preset" => arg.long_help(presets(setting)),
        _ => arg,
    };
    let arg = match setting.form {
        FlagForm::Switch => return arg.action(ArgAction::SetTrue).overrides_with(setting.key),
        // Of several values of a setting the last takes effect, so a flag can be appended to a
        // command. Lists and axes are joined.
        FlagForm::Value | FlagForm::List | FlagForm::Axes => arg.action(ArgAction::Append),
    };
    let parser = move |text: &str| -> Result<String, BadValue> {
        ConfigLayer::default().set(setting.key, text).map(|()| text.to_string())
    };
    let arg = arg.value_parser(ValueParser::new(parser));
    setting.unit.map_or_else(|| arg.clone(), |unit| arg.clone().value_name(unit))
}

/// Help of `--preset`, with the meaning and the settings of each preset.
fn presets(setting: &Setting) -> String {
    let mut help = format!("{} [{}]", setting.help.trim_end_matches('.'), setting.default);
    for (name, preset) in Preset::NAMES {
        help.push_str(&format!("\n- {name}: {}", preset.meaning()));
        let differences = differences(preset);
        if !differences.is_empty() {
            help.push_str(&format!(" Sets {}.", differences.replace('_', "-")));
        }
    }
    help
}

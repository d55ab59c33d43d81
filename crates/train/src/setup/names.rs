//! Names in settings, looked up before the dataset is read: hosts, slots, devices and files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_control::PolicyDomain;
use meristem_data::DatasetSpec;
use meristem_grow::{BlueprintSet, HostSpec, SlotName};
use meristem_nn::Isa;

use super::blueprints::Blueprints;
use super::dataset::dataset_of;
use super::script::ScriptFile;
use super::weights::Weights;
use crate::config::devices::Devices;
use crate::config::{PolicyFile, TrainConfig};
use crate::error::{Error, Result, is_no_file};
use crate::hosts::read_host;
use crate::input_file::{InputFile, Moved, check_files};
use crate::record::run_folder::{WEIGHTS, weights_name};
use crate::settings::{ControllerKind, ObservationForm};

/// Reads the weights file of a setting, if it is given.
fn weights_of(key: &'static str, path: Option<&Path>) -> Result<Option<Arc<Weights>>> {
    let Some(path) = path else { return Ok(None) };
    match Weights::load(path) {
        Err(Error::Nn(meristem_nn::Error::Io { source, .. })) if is_no_file(&source) => {
            let got = format!("{} ({source})", path.display());
            Err(Error::value(key, got, "an existing weights file"))
        }
        loaded => Ok(Some(Arc::new(loaded?))),
    }
}

/// State of the members' hosts. Fresh hosts need their initial weights, hosts in progress do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hosts {
    Fresh,
    InProgress,
}

/// Files that were read, by path. Members may share a file. A file that is needed again is not read
/// again: its first contents are used.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadFiles {
    weights: BTreeMap<PathBuf, Arc<Weights>>,
    scripts: BTreeMap<PathBuf, Arc<ScriptFile>>,
}

impl ReadFiles {
    /// Reads the initial weights of a member, if it has some.
    fn init(&mut self, config: &TrainConfig) -> Result<Option<Arc<Weights>>> {
        let Some(path) = &config.init else { return Ok(None) };
        if let Some(known) = self.weights.get(path) {
            return Ok(Some(known.clone()));
        }
        let weights = weights_of("init", Some(path))?;
        self.weights.extend(weights.clone().map(|weights| (path.clone(), weights)));
        Ok(weights)
    }

    /// Reads the script of a member's controller, if it has one.
    fn script(&mut self, config: &TrainConfig) -> Result<Option<Arc<ScriptFile>>> {
        let ControllerKind::Fixed(path) = &config.controller else { return Ok(None) };
        if let Some(known) = self.scripts.get(path) {
            return Ok(Some(known.clone()));
        }
        let script = Arc::new(ScriptFile::read(path)?);
        self.scripts.insert(path.clone(), script.clone());
        Ok(Some(script))
    }
}

/// Reads the weights files whose topologies the envs start from: none, one for all envs, or one
/// for each of them from the folder of a run.
fn starts_of(config: &TrainConfig) -> Result<Vec<Arc<Weights>>> {
    const KEY: &str = "start-topology";
    let Some(path) = config.start_topology.as_deref() else { return Ok(vec![]) };
    if !path.is_dir() {
        return Ok(weights_of(KEY, Some(path))?.into_iter().collect());
    }
    let of_env = |env: usize| {
        let file = path.join(WEIGHTS).join(weights_name(env));
        if !file.is_file() {
            let expected = format!("the folder of a run with weights of {} envs", config.envs);
            return Err(Error::value(KEY, format!("no {}", file.display()), expected));
        }
        Weights::load(&file).map(Arc::new)
    };
    (0..config.envs).map(|env| of_env(config.env_number(env))).collect()
}

/// Inputs of a run other than its settings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OtherInputs<'a> {
    /// Blueprints of the program, if it brings some.
    pub(crate) blueprints: Option<&'a BlueprintSet>,
    /// Move of the study that the run belongs to, if it was moved since the run began.
    pub(crate) moved: Option<&'a Moved>,
}

/// Objects that a configuration names, found before the dataset is read.
#[derive(Clone, Debug)]
pub(crate) struct ResolvedNames {
    /// Device of each env.
    pub(crate) devices: Devices,
    /// Dataset to train on.
    pub(crate) spec: DatasetSpec,
    /// Instruction set of the kernels.
    pub(crate) isa: Isa,
    pub(super) members: Vec<ResolvedMember>,
    pub(super) starts: Vec<Arc<Weights>>,
    pub(super) blueprints: Blueprints,
    /// Policy that a new run starts from.
    pub(crate) policy: Option<Arc<PolicyFile>>,
    pub(super) read: ReadFiles,
    moved: Option<Moved>,
}

/// Objects that the settings of a member name.
#[derive(Clone, Debug)]
pub(super) struct ResolvedMember {
    pub(super) config: TrainConfig,
    pub(super) host: HostSpec,
    pub(super) slots: Vec<SlotName>,
    /// Initial weights; `None` also for hosts in progress.
    pub(super) init: Option<Arc<Weights>>,
    /// Script of the controller, if it has one.
    pub(super) script: Option<Arc<ScriptFile>>,
}

impl ResolvedMember {
    pub(super) fn resolve(config: TrainConfig, hosts: Hosts, read: &mut ReadFiles) -> Result<Self> {
        let host = read_host(&config.host)?;
        let slots = parse_slots(&host, &config.slots())?;
        let init = match hosts {
            Hosts::Fresh => read.init(&config)?,
            Hosts::InProgress => None,
        };
        let script = read.script(&config)?;
        Ok(Self { config, host, slots, init, script })
    }

    /// The files that were read for the member, with absolute paths.
    ///
    /// # Errors
    /// As [`InputFile::with_absolute_path`].
    pub(super) fn files(&self) -> Result<Vec<InputFile>> {
        let init = self.init.iter().map(|weights| weights.input("init"));
        let script = self.script.iter().map(|script| script.input());
        init.chain(script).map(InputFile::with_absolute_path).collect()
    }
}

impl ResolvedNames {
    /// Looks up the names of a new run. Also reads its policy, and fills in the settings that
    /// follow from the policy.
    ///
    /// # Errors
    /// As [`ResolvedNames::resolve`], and for an unreadable policy.
    pub(crate) fn of_new(
        config: &TrainConfig,
        others: OtherInputs<'_>,
    ) -> Result<(TrainConfig, Self)> {
        let mut names = Self::resolve(config, others, Hosts::Fresh)?;
        let relocated = others.moved.map(|moved| config.moved(moved));
        let readable = relocated.as_ref().unwrap_or(config);
        let slots = common_slots(&names.members).map(<[SlotName]>::len);
        let policy = PolicyFile::find(readable, slots, &names.blueprints.set)?;
        let config = config.starting_from(policy.as_deref());
        for member in &mut names.members {
            member.config = member.config.starting_from(policy.as_deref());
        }
        names.check_can_grow(&config)?;
        check_same_slots(&config, &names.members)?;
        Ok((config, Self { policy, ..names }))
    }

    /// Checks that hosts without slots, in which no module can grow, can become wider under the
    /// controllers of `config`, whose policy has its form. A host without growth has the controller
    /// `none`, or `random`, which is a reference for others.
    ///
    /// # Errors
    /// [`Error::Value`] with the first member whose host can never grow.
    pub(crate) fn check_can_grow(&self, config: &TrainConfig) -> Result<()> {
        for (number, (member, own)) in self.members.iter().zip(config.of_members()).enumerate() {
            let grows = !matches!(own.controller, ControllerKind::None | ControllerKind::Random);
            if grows && member.slots.is_empty() {
                check_can_widen(&own, &member.host)
                    .map_err(|error| of_member(config, number, error))?;
            }
        }
        Ok(())
    }

    /// Slots of the member with the most slots, blueprints of the run, and widenable layers of the
    /// member with the most such layers.
    pub(crate) fn domain(&self) -> PolicyDomain {
        let most = self.members.iter().map(|member| &member.slots).max_by_key(|slots| slots.len());
        let names = |slots: &Vec<SlotName>| slots.iter().map(SlotName::to_string).collect();
        let blueprints = self.blueprints.set.iter().map(|blueprint| blueprint.name.clone());
        let layers = self.members.iter().map(|member| member.host.widenable());
        let layers = layers.max_by_key(Vec::len).unwrap_or_default();
        PolicyDomain {
            slots: most.map(names).unwrap_or_default(),
            blueprints: blueprints.collect(),
            layers: layers.into_iter().map(|layer| layer.name).collect(),
        }
    }

    /// Looks up the names of a run that resumes from the checkpoint at `path`, and compares its
    /// input files with `began`, the files that the run began with. The initial weights and start
    /// topologies may be missing or changed unless `fresh_hosts` is set, because the hosts in
    /// progress do not need them.
    ///
    /// # Errors
    /// As [`ResolvedNames::resolve`], and [`Error::OtherInput`] for a file that changed.
    pub(crate) fn of_checkpoint(
        config: &TrainConfig,
        others: OtherInputs<'_>,
        path: &Path,
        began: &[InputFile],
        fresh_hosts: bool,
    ) -> Result<Self> {
        let found = Self::resolve(config, others, Hosts::Fresh)
            .and_then(|names| check_files(path, &names.files()?, began).map(|()| names));
        let names = match found {
            Err(_) if !fresh_hosts => {
                let names = Self::resolve(config, others, Hosts::InProgress)?;
                check_files(path, &names.files()?, began).map(|()| names)
            }
            found => found,
        }?;
        check_same_slots(config, &names.members)?;
        Ok(names)
    }

    /// All input files of a run: [`ResolvedNames::files`] and the initial policy. A resumed run has
    /// its policy from the checkpoint, so only a new run reads the file of the policy.
    ///
    /// # Errors
    /// As [`InputFile::with_absolute_path`].
    pub(crate) fn input_files(&self) -> Result<Vec<InputFile>> {
        let mut files = self.files()?;
        if let Some(policy) = &self.policy {
            let input = policy.input();
            files.push(if policy.is_built_in() { input } else { self.as_it_began(input)? });
        }
        Ok(files)
    }

    /// The file with the absolute path that it had when the run began.
    fn as_it_began(&self, file: InputFile) -> Result<InputFile> {
        let file = file.with_absolute_path()?;
        let path = self.moved.as_ref().map(|moved| moved.then(&file.path));
        Ok(InputFile { path: path.unwrap_or(file.path), ..file })
    }

    /// Input files of hosts and controllers except the initial policy, with the absolute paths that
    /// they had when the run began.
    fn files(&self) -> Result<Vec<InputFile>> {
        let inits = self.members.iter().filter_map(|member| member.init.as_deref());
        let inits: BTreeMap<_, _> = inits.map(|file| (file.path(), file)).collect();
        let init = inits.into_values().map(|file| file.input("init"));
        let starts = self.starts.iter().map(|file| file.input("start-topology"));
        let scripts = self.members.iter().filter_map(|member| member.script.as_deref());
        let scripts: BTreeMap<_, _> = scripts.map(|file| (file.path(), file)).collect();
        let script = scripts.into_values().map(ScriptFile::input);
        let blueprints = self.blueprints.files.iter().cloned();
        let files = init.chain(starts).chain(script).chain(blueprints);
        files.map(|file| self.as_it_began(file)).collect()
    }

    /// Looks up all names. Reads script and blueprints, and for fresh hosts initial weights and
    /// start topologies, but neither policy nor dataset.
    ///
    /// # Errors
    /// An unknown name, impossible sizes, or an unreadable file.
    pub(crate) fn resolve(
        config: &TrainConfig,
        others: OtherInputs<'_>,
        hosts: Hosts,
    ) -> Result<Self> {
        let relocated = others.moved.map(|moved| config.moved(moved));
        let config = relocated.as_ref().unwrap_or(config);
        let devices = Devices::assign(config)?;
        let mut read = ReadFiles::default();
        let members: Vec<_> = config
            .of_members()
            .into_iter()
            .enumerate()
            .map(|(n, member)| {
                let names = ResolvedMember::resolve(member, hosts, &mut read);
                names.map_err(|error| of_member(config, n, error))
            })
            .collect::<Result<_>>()?;
        let isa = Isa::from_env().map_err(meristem_device::Error::from)?;
        let spec = dataset_of(config)?;
        let starts = match hosts {
            Hosts::Fresh => starts_of(config)?,
            Hosts::InProgress => vec![],
        };
        if members.iter().any(|member| member.init.is_some()) && !starts.is_empty() {
            let expected = "one of --init, which brings its own topology, and --start-topology";
            return Err(Error::value("start-topology", "with --init", expected));
        }
        let blueprints = Blueprints::read(config, others.blueprints)?;
        let (policy, moved) = (None, others.moved.cloned());
        Ok(Self { devices, spec, isa, members, starts, blueprints, policy, read, moved })
    }
}

/// The slots of all members, if they have the same ones.
fn common_slots(members: &[ResolvedMember]) -> Option<&[SlotName]> {
    let [first, others @ ..] = members else { return None };
    others.iter().all(|other| other.slots == first.slots).then_some(&first.slots)
}

/// Checks that a controller that knows slots by their number gets the same slots from all members.
fn check_same_slots(config: &TrainConfig, members: &[ResolvedMember]) -> Result<()> {
    let by_number =
        config.controller.is_policy() && config.policy_form() == ObservationForm::Vector;
    let [first, others @ ..] = members else { return Ok(()) };
    match others.iter().find(|other| by_number && other.slots != first.slots) {
        None => Ok(()),
        Some(other) => {
            let names = |slots: &[SlotName]| {
                slots.iter().map(SlotName::to_string).collect::<Vec<_>>().join(",")
            };
            let got =
                format!("hosts with slots {} and {}", names(&first.slots), names(&other.slots));
            let expected = format!(
                "hosts with the same slots, for controller {} of the form vector; a policy of the \
                 form set serves any hosts (--policy-form set)",
                config.controller
            );
            Err(Error::value("members", got, expected))
        }
    }
}

/// The error with the number of the member, if the configuration has members.
fn of_member(config: &TrainConfig, number: usize, error: Error) -> Error {
    if config.members.is_some() { error.in_member(number) } else { error }
}

/// Checks that a controller may make layers of a host without slots wider, if one is to grow it.
fn check_can_widen(config: &TrainConfig, host: &HostSpec) -> Result<()> {
    let expected = if host.widenable().is_empty() {
        "a host with slots or with layers that can become wider, or --controller none"
    } else if !config.may_widen() {
        "a host with slots; or, with --widen-by, the heuristic or a policy of the form set-widen; \
         or a script; or --controller none"
    } else {
        return Ok(());
    };
    Err(Error::value("host", host.name(), expected))
}

/// Looks up slots by name, by the beginning of their names (`r0`, `r1`), or `all`.
fn parse_slots(host: &HostSpec, wanted: &[String]) -> Result<Vec<SlotName>> {
    if wanted.iter().all(|name| name.trim().is_empty()) {
        return Err(Error::value("slots", "none", "slot names, `r0`, `r1` or `all`"));
    }
    let names = wanted.iter().flat_map(|list| list.split(','));
    Ok(host.select_slots(names).map_err(meristem_grow::Error::from)?)
}

#[cfg(test)]
mod tests {
    use meristem_grow::HostError;

    use super::*;

    fn slots(wanted: &[&str]) -> Result<String> {
        let wanted: Vec<String> = wanted.iter().map(|name| name.to_string()).collect();
        let host = "baseline".parse().unwrap();
        let names: Vec<String> =
            parse_slots(&host, &wanted)?.iter().map(SlotName::to_string).collect();
        Ok(names.join(","))
    }

    #[test]
    fn slots_by_name_and_by_the_beginning_of_names() {
        assert_eq!(slots(&["r0"]).unwrap(), "r0c0,r0c1,r0c2");
        assert_eq!(slots(&["r1c2", "r0"]).unwrap(), "r0c0,r0c1,r0c2,r1c2");
        assert_eq!(slots(&["r1c2,r0c1"]).unwrap(), "r0c1,r1c2");
        assert_eq!(slots(&["all"]).unwrap(), "r0c0,r0c1,r0c2,r1c0,r1c1,r1c2");
        for (bad, unknown) in [(["r0c7"], "`r0c7`"), (["r2"], "`r2`")] {
            let error = slots(&bad).unwrap_err();
            assert!(error.to_string().contains(unknown), "{error}");
            assert_eq!(error.exit_code(), 2, "{error}");
            let Error::Grow(meristem_grow::Error::Host(host)) = error else { panic!("{error}") };
            assert!(matches!(host, HostError::UnknownSlot { .. }), "{host:?}");
        }
        let twice = slots(&["r0", "r0c1"]).unwrap_err();
        assert_eq!(twice.exit_code(), 2, "{twice}");
        let Error::Grow(meristem_grow::Error::Host(host)) = twice else { panic!("{twice}") };
        assert_eq!(host, HostError::DuplicateSlot("r0c1".into()));
        let none = slots(&[""]).unwrap_err();
        assert!(matches!(none, Error::Value { .. }), "{none:?}");
        assert!(none.to_string().contains("slot names, `r0`, `r1` or `all`"), "{none}");
        assert_eq!(none.exit_code(), 2, "{none}");
    }
}

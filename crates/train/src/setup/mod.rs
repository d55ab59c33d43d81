//! Conversion of settings to objects: looks up all names, and finds every error that can be found
//! without training.

pub(crate) mod blueprints;
pub(crate) mod controllers;
mod script;
pub(crate) mod weights;

use std::path::Path;
use std::sync::Arc;

use meristem_control::RewardConfig;
use meristem_data::{
    Augment, DatasetInfo, DatasetSpec, MissingValues, Normalization, Residency, Source,
    TableOptions,
};
use meristem_device::Stream;
use meristem_grow::{
    BlueprintSet, Host, HostSpec, NetworkSize, Rules, SlotName, TaskShape, Topology, nearest,
};
use meristem_nn::graph::Graph;
use meristem_nn::{Isa, Loss, Network, NetworkOptions, Plans};

use crate::config::PolicyFile;
use crate::config::TrainConfig;
use crate::config::devices::Devices;
use crate::error::{Error, Result, is_no_file};
use crate::hosts::{misfit, read_host};
use crate::input_file::{InputFile, Moved, check_files};
use crate::record::run_folder::{WEIGHTS, weights_name};
use crate::settings::{self, Augmentations, ControllerKind, TaskKind};
use crate::setup::blueprints::Blueprints;
use crate::setup::script::ScriptFile;
use crate::setup::weights::{InputForm, Interface, OutputForm, Wanted, Weights};
use crate::task::{Task, TaskSettings};

/// Padding of the random crop in pixels, as usual for images of 32 pixels.
const CROP_PADDING: usize = 4;

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
pub(crate) struct Names {
    /// Device of each env.
    pub(crate) devices: Devices,
    /// Dataset to train on.
    pub(crate) spec: DatasetSpec,
    /// Instruction set of the kernels.
    pub(crate) isa: Isa,
    members: Vec<MemberNames>,
    init: Option<Arc<Weights>>,
    starts: Vec<Arc<Weights>>,
    script: Option<Arc<ScriptFile>>,
    blueprints: Blueprints,
    /// Policy that a new run starts from.
    pub(crate) policy: Option<Arc<PolicyFile>>,
    moved: Option<Moved>,
}

/// Objects that the settings of a member name.
#[derive(Clone, Debug)]
struct MemberNames {
    config: TrainConfig,
    host: HostSpec,
    slots: Vec<SlotName>,
}

impl MemberNames {
    fn resolve(config: TrainConfig) -> Result<Self> {
        let host = read_host(&config.host)?;
        let slots = parse_slots(&host, &config.slots())?;
        if slots.is_empty() && config.controller != ControllerKind::None {
            let expected = "a host with slots, or --controller none";
            return Err(Error::value("host", host.name(), expected));
        }
        Ok(Self { config, host, slots })
    }
}

impl Names {
    /// Looks up the names of a new run. Also reads its policy, and fills in the settings that
    /// follow from the policy.
    ///
    /// # Errors
    /// As [`Names::resolve`], and for an unreadable policy.
    pub(crate) fn of_new(
        config: &TrainConfig,
        others: OtherInputs<'_>,
    ) -> Result<(TrainConfig, Self)> {
        let names = Self::resolve(config, others)?;
        let relocated = others.moved.map(|moved| config.moved(moved));
        let readable = relocated.as_ref().unwrap_or(config);
        let slots = names.members.first().map_or(0, |member| member.slots.len());
        let policy = PolicyFile::find(readable, slots, &names.blueprints.set)?;
        let config = config.starting_from(policy.as_deref());
        Ok((config, Self { policy, ..names }))
    }

    /// Looks up the names of a run that resumes from the checkpoint at `path`, and compares its
    /// input files with `began`, the files that the run began with. The initial weights and start
    /// topologies may be missing or changed unless `fresh_hosts` is set, because the hosts in
    /// progress do not need them.
    ///
    /// # Errors
    /// As [`Names::resolve`], and [`Error::OtherInput`] for a file that changed.
    pub(crate) fn of_checkpoint(
        config: &TrainConfig,
        others: OtherInputs<'_>,
        path: &Path,
        began: &[InputFile],
        fresh_hosts: bool,
    ) -> Result<Self> {
        let found = Self::resolve(config, others)
            .and_then(|names| check_files(path, &names.files()?, began).map(|()| names));
        match found {
            Err(_) if !fresh_hosts => {
                let without = TrainConfig { init: None, start_topology: None, ..config.clone() };
                let names = Self::resolve(&without, others)?;
                check_files(path, &names.files()?, began).map(|()| names)
            }
            found => found,
        }
    }

    /// All input files of a run: [`Names::files`] and the initial policy. A resumed run has its
    /// policy from the checkpoint, so only a new run reads that file.
    ///
    /// # Errors
    /// As [`InputFile::with_absolute_path`].
    pub(crate) fn input_files(&self) -> Result<Vec<InputFile>> {
        let mut files = self.files()?;
        for policy in self.policy.iter().map(|policy| policy.input()) {
            files.push(self.as_it_began(policy)?);
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
        let weights = |setting: &str, weights: &Weights| InputFile {
            setting: setting.into(),
            path: weights.path().into(),
            checksum: weights.checksum(),
        };
        let init = self.init.iter().map(|file| weights("init", file));
        let starts = self.starts.iter().map(|file| weights("start-topology", file));
        let script = self.script.iter().map(|script| script.input());
        let blueprints = self.blueprints.files.iter().cloned();
        let files = init.chain(starts).chain(script).chain(blueprints);
        files.map(|file| self.as_it_began(file)).collect()
    }

    /// Looks up all names. Reads initial weights, start topologies, script and blueprints, but
    /// neither policy nor dataset.
    ///
    /// # Errors
    /// An unknown name, impossible sizes, or an unreadable file.
    pub(crate) fn resolve(config: &TrainConfig, others: OtherInputs<'_>) -> Result<Self> {
        let relocated = others.moved.map(|moved| config.moved(moved));
        let config = relocated.as_ref().unwrap_or(config);
        let devices = Devices::assign(config)?;
        let members: Vec<_> = config
            .of_members()
            .into_iter()
            .enumerate()
            .map(|(n, member)| MemberNames::resolve(member).map_err(|error| error.in_member(n)))
            .collect::<Result<_>>()?;
        check_same_slots(config, &members)?;
        let isa = Isa::from_env().map_err(meristem_device::Error::from)?;
        let spec = dataset_of(config)?;
        let init = weights_of("init", config.init.as_deref())?;
        let starts = starts_of(config)?;
        if init.is_some() && !starts.is_empty() {
            let expected = "one of --init, which brings its own topology, and --start-topology";
            return Err(Error::value("start-topology", "with --init", expected));
        }
        let script = ScriptFile::read(&config.controller)?.map(Arc::new);
        let blueprints = Blueprints::read(config, others.blueprints)?;
        let (policy, moved) = (None, others.moved.cloned());
        Ok(Self { devices, spec, isa, members, init, starts, script, blueprints, policy, moved })
    }
}

/// The settings of a new run, with the policy that it starts from and the policy's width filled in.
///
/// # Errors
/// An unknown name, unreadable weights, an unreadable policy, or a policy of another width than
/// requested.
pub fn with_policy(config: &TrainConfig) -> Result<TrainConfig> {
    Ok(Names::of_new(config, OtherInputs::default())?.0)
}

/// Settings and host of the envs of one member.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// The settings of the run with those of the member over them.
    pub(crate) config: TrainConfig,
    /// The host description.
    pub(crate) host: HostSpec,
    /// Trained parameters of the host without modules.
    pub(crate) host_parameters: usize,
    /// Loss of training, and of the control and test splits.
    pub(crate) loss: Loss,
    slots: Vec<SlotName>,
}

impl Member {
    fn new(names: MemberNames, image: &TaskShape, info: &DatasetInfo) -> Result<Self> {
        let MemberNames { config, host, slots } = names;
        let host_parameters = host.parameters(image).map_err(|error| misfit(&host, error, info))?;
        let loss = Task::new(&TaskSettings::from(&config), info)?.loss;
        Ok(Self { config, host, host_parameters, loss, slots })
    }
}

/// A configuration that was checked against a dataset.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The settings.
    pub(crate) config: TrainConfig,
    /// The members; at least one.
    members: Vec<Member>,
    /// Shape of the images that the hosts are made for.
    pub(crate) image: TaskShape,
    /// Description of the dataset.
    pub(crate) info: DatasetInfo,
    /// Normalisation of the images, and names of their classes.
    pub(crate) interface: Interface,
    /// Task of the run.
    pub(crate) task: Task,
    /// Instruction set of the kernels.
    pub(crate) isa: Isa,
    /// Compiled plans, shared by the networks of all envs.
    pub(crate) plans: Plans,
    blueprints: Arc<BlueprintSet>,
    init: Option<Arc<Weights>>,
    /// Constants that the initial weights were trained with, if they differ from the run's.
    pub(crate) other_normalization: Option<Normalization>,
    /// Files whose topologies the hosts begin with, all modules permanent: none, one for all envs,
    /// or one for each.
    starts: Vec<Arc<Weights>>,
    /// Script of the controller, if it has one.
    pub(crate) script: Option<Arc<ScriptFile>>,
    /// Policy that the run starts from.
    pub(crate) policy: Option<Arc<PolicyFile>>,
    /// Files that envs and controllers are made from.
    pub(crate) files: Vec<InputFile>,
}

impl Setup {
    /// Checks the host and its initial weights against the dataset.
    ///
    /// # Errors
    /// A host or a normalisation that does not fit the images, or weights that do not fit the host.
    pub(crate) fn new(config: &TrainConfig, names: Names, info: DatasetInfo) -> Result<Self> {
        let files = names.input_files()?;
        let Names { members, isa, init, starts, script, blueprints, policy, .. } = names;
        let image = image_shape(&info);
        let member = |names| Member::new(names, &image, &info);
        let members = members.into_iter().map(member).collect::<Result<Vec<_>>>()?;
        let normalization = config.normalize.constants(&info)?;
        let task = Task::new(&TaskSettings::from(config), &info)?;
        init.iter().try_for_each(|weights| weights.check_further_training(&info))?;
        let own = init.as_ref().map(|weights| weights.normalization(info.channels)).transpose()?;
        let other_normalization = own.flatten().filter(|own| *own != normalization);
        let form = InputForm { kind: info.kind, stored: info.stored };
        let outputs = OutputForm { task: task.kind, scale: task.targets.clone() };
        let (classes, table) = (info.classes.clone(), info.table.clone());
        let interface = Interface { form, normalization, classes, outputs, table };
        let config = config.clone();
        let plans = Plans::default();
        let setup = Self {
            config,
            members,
            image,
            info,
            interface,
            task,
            isa,
            plans,
            blueprints: blueprints.set,
            init,
            other_normalization,
            starts,
            script,
            policy,
            files,
        };
        for env in 0..setup.starts.len().max(setup.members.len()) {
            let host = setup.fresh_host(env)?;
            setup.check_size(env, &host)?;
            setup.check_width_init(env, &host)?;
        }
        Ok(setup)
    }

    /// Settings and host of an env.
    pub(crate) fn member(&self, env: usize) -> &Member {
        &self.members[env % self.members.len()]
    }

    /// Gives other settings to a member, from now on.
    ///
    /// # Errors
    /// Settings that do not fit the run.
    pub(crate) fn set_member(&mut self, number: usize, settings: &settings::Member) -> Result<()> {
        let config = self.config.of_new_member(settings).and_then(|config| {
            config.validate()?;
            Ok(config)
        });
        let config = config.map_err(|error| error.in_member(number))?;
        let names = MemberNames::resolve(config)?;
        self.members[number] = Member::new(names, &self.image, &self.info)?;
        Ok(())
    }

    /// Checks that the host at the beginning of an episode is within its limits.
    fn check_size(&self, env: usize, host: &Host) -> Result<()> {
        let NetworkSize { parameters, macs } = host.size()?;
        let Rules { max_parameters, max_macs, .. } = self.member(env).config.rules;
        let limits = [
            ("max-parameters", "parameters", parameters, max_parameters),
            ("max-macs", "MACs", macs, max_macs),
        ];
        for (key, what, own, limit) in limits {
            if let Some(limit) = limit.filter(|limit| own > *limit) {
                return Err(Error::value(key, limit, format!("at least {own}, the host's {what}")));
            }
        }
        Ok(())
    }

    /// Checks that the initialisation of further features suits a layer of the host, if the
    /// heuristic is to make layers wider.
    fn check_width_init(&self, env: usize, host: &Host) -> Result<()> {
        let config = &self.member(env).config;
        let is_asked =
            config.controller == ControllerKind::Heuristic && config.heuristic.widen_by > 0.0;
        let init = config.rules.width_init;
        let reasons: Vec<String> =
            host.widenable().iter().filter_map(|layer| layer.suits(init).err()).collect();
        match reasons.first() {
            Some(reason) if is_asked && reasons.len() == host.widenable().len() => {
                let expected = format!("another one for `{}`: {reason}", host.spec());
                Err(Error::value("width-init", init.name(), expected))
            }
            _ => Ok(()),
        }
    }

    /// The host of an env at the beginning of every episode: the host in the initial weights; or
    /// else the host in the env's start topology, with all modules permanent; or else a host
    /// without modules.
    pub(crate) fn fresh_host(&self, env: usize) -> Result<Host> {
        let start = self.starts.get(env).or(self.starts.first());
        let mut host = self.host_of(self.member(env), self.init.as_ref().or(start))?;
        if start.is_some() {
            host.make_permanent();
        }
        Ok(host)
    }

    /// The host of a member in a weights file; a host without modules if there is no file.
    fn host_of(&self, member: &Member, file: Option<&Arc<Weights>>) -> Result<Host> {
        let Member { config, host, slots, .. } = member;
        let rules = config.rules;
        match file {
            None => {
                let blueprints = Arc::clone(&self.blueprints);
                Ok(Host::new(host.clone(), self.image, slots, blueprints, rules)?)
            }
            Some(weights) => {
                let wanted = Wanted { host: Some(host), image: &self.image };
                weights.host(&wanted, slots, &self.blueprints, rules)
            }
        }
    }

    /// The host of a checkpoint's topology, if it belongs to this env.
    ///
    /// # Errors
    /// A damaged topology; another host, image shape or set of slots.
    pub(crate) fn rebuild(&self, env: usize, topology: &Topology) -> Result<Host> {
        let member = self.member(env);
        let host = topology.rebuild(&self.blueprints, member.config.rules)?;
        let fresh = self.fresh_host(env)?;
        let names =
            |host: &Host| host.slots().iter().map(|slot| slot.name.clone()).collect::<Vec<_>>();
        // A run that resumes without these files (`Names::of_checkpoint`) cannot compare the slots.
        let without_files = self.init.is_none() && self.config.init.is_some()
            || self.starts.is_empty() && self.config.start_topology.is_some();
        let same = host.first_spec() == fresh.first_spec()
            && host.spec().is_as_wide_as(fresh.spec())
            && host.image() == fresh.image()
            && host.blueprints() == fresh.blueprints()
            && (without_files || names(&host) == names(&fresh));
        if same {
            Ok(host)
        } else {
            Err(Error::value("host", &topology.host, format!("`{}` with its slots", member.host)))
        }
    }

    /// The graph of the host of an env, with the env's optimisers and learning rates scaled by
    /// `rate`.
    pub(crate) fn graph(&self, env: usize, host: &Host, rate: f64) -> Result<Arc<Graph>> {
        let config = &self.member(env).config;
        let mut graph = host.graph(&config.optimisers(rate))?;
        config.vary_optimisers(&mut graph, rate)?;
        Ok(Arc::new(graph))
    }

    /// The graph of a host without its live modules, as a snapshot stores it.
    pub(crate) fn lasting_graph(&self, env: usize, host: &Host) -> Result<Arc<Graph>> {
        let mut lasting = host.clone();
        lasting.prune_live();
        self.graph(env, &lasting, 1.0)
    }

    /// Checks before the run begins that the initial weights fit. Does not wait for the device.
    ///
    /// # Errors
    /// A list of everything that does not fit; out of memory.
    pub(crate) fn try_weights(&self, stream: &Stream) -> Result<()> {
        if self.init.is_none() {
            return Ok(());
        }
        let graph = self.graph(0, &self.fresh_host(0)?, 1.0)?;
        let precision = self.config.precision;
        let options =
            NetworkOptions { precision, ..NetworkOptions::new(self.config.seed, 0, self.isa, 1) };
        self.initialise(&mut Network::new(stream, graph, options)?)
    }

    /// Loads the initial weights, if any, into a fresh network.
    pub(crate) fn initialise(&self, network: &mut Network) -> Result<()> {
        self.init.as_ref().map_or(Ok(()), |weights| weights.fill(network))
    }

    /// Weights of the reward.
    pub(crate) fn reward(&self) -> RewardConfig {
        self.config.reward_config()
    }

    /// Augmentation of training images in the gather.
    pub(crate) fn augment(&self) -> Augment {
        let Augmentations { crop, flip, cutout } = self.config.augment;
        // A quarter of the image side, as usual for small images (8 of 32 pixels).
        let hole = (self.image.height.min(self.image.width) / 4).max(1);
        Augment {
            crop_padding: if crop { CROP_PADDING.min(2 * hole) } else { 0 },
            flip,
            cutout: if cutout { hole } else { 0 },
        }
    }
}

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

/// The dataset with the given name.
///
/// # Errors
/// [`Error::Value`]: an unknown name, for which the nearest is suggested, a root for a dataset that
/// reads no files, or an option of another dataset.
pub fn dataset_spec(name: &str, options: DatasetSpec) -> Result<DatasetSpec> {
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
    Ok(DatasetSpec { source, ..options })
}

/// Checks that a controller that knows slots by their number gets the same slots from all members.
fn check_same_slots(config: &TrainConfig, members: &[MemberNames]) -> Result<()> {
    let by_number = matches!(
        config.controller,
        ControllerKind::Ppo
            | ControllerKind::Policy(_)
            | ControllerKind::Greedy(_)
            | ControllerKind::Fixed(_)
    );
    let [first, others @ ..] = members else { return Ok(()) };
    match others.iter().find(|other| by_number && other.slots != first.slots) {
        None => Ok(()),
        Some(other) => {
            let names = |slots: &[SlotName]| {
                slots.iter().map(SlotName::to_string).collect::<Vec<_>>().join(",")
            };
            let got =
                format!("hosts with slots {} and {}", names(&first.slots), names(&other.slots));
            let expected =
                format!("hosts with the same slots, for controller {}", config.controller);
            Err(Error::value("members", got, expected))
        }
    }
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

    #[test]
    fn a_wrong_dataset_names_the_nearest() {
        let error = dataset_spec("cifar-10", DatasetSpec::embedded()).unwrap_err();
        assert!(matches!(&error, Error::Value { key, .. } if key == "dataset"), "{error:?}");
        assert!(error.to_string().contains("did you mean `cifar10`?"), "{error}");
    }
}

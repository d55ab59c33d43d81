//! Conversion of settings to objects: looks up all names, and finds every error that can be found
//! without training.

pub(crate) mod blueprints;
pub(crate) mod controllers;
mod dataset;
mod names;
mod script;
pub(crate) mod weights;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use meristem_control::{RewardConfig, Script};
use meristem_data::{Augment, DatasetInfo, EnvGather, Normalization};
use meristem_device::Stream;
use meristem_grow::{
    BlueprintSet, Host, HostSpec, MEASURED_WEIGHTS_MAX, NetworkSize, Rules, SlotName, TaskShape,
    Topology,
};
use meristem_nn::graph::{Graph, GroupId};
use meristem_nn::{Isa, Loss, Network, NetworkOptions, Plans};

pub use self::dataset::dataset_spec;
pub(crate) use self::dataset::{dataset_of, image_shape, residency};
pub(crate) use self::names::{Hosts, OtherInputs, ResolvedNames};
use self::names::{ReadFiles, ResolvedMember};
use crate::config::types::MeasuringRule;
use crate::config::{PolicyFile, TrainConfig};
use crate::error::{Error, Result};
use crate::hosts::misfit;
use crate::input_file::{InputFile, add_files};
use crate::settings::{self, Augmentations, ControllerKind, GrowthLr, ObservationForm};
use crate::setup::script::ScriptFile;
use crate::setup::weights::{InputForm, Interface, OutputForm, Wanted, Weights};
use crate::task::{Task, TaskSettings};

/// Names of parameters in an error.
const NAMES_SHOWN: usize = 12;

/// Padding of the random crop in pixels, as usual for images of 32 pixels.
const CROP_PADDING: usize = 4;

/// The settings of a new run, with the policy that it starts from, and the width and form of that
/// policy, filled in.
///
/// # Errors
/// An unknown name, unreadable weights, an unreadable policy, or a policy of another width or form
/// than requested.
pub fn with_policy(config: &TrainConfig) -> Result<TrainConfig> {
    Ok(ResolvedNames::of_new(config, OtherInputs::default())?.0)
}

/// Settings and host of the envs of one member.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// The settings of the run, overridden by those of the member.
    pub(crate) config: TrainConfig,
    /// The host description.
    pub(crate) host: HostSpec,
    /// Trained parameters of the host without modules.
    pub(crate) host_parameters: usize,
    /// Loss of training, and of the control and test splits.
    pub(crate) loss: Loss,
    /// Script of the controller, if it has one.
    pub(crate) script: Option<Arc<Script>>,
    slots: Vec<SlotName>,
    init: Option<Arc<Weights>>,
}

impl Member {
    /// Whether the networks of both members have parameters of the same names.
    fn has_names_of(&self, other: &Self) -> bool {
        let of = |own: &Self| (own.host.clone(), own.slots.clone(), own.config.init.clone());
        of(self) == of(other)
    }

    fn new(names: ResolvedMember, image: &TaskShape, info: &DatasetInfo) -> Result<Self> {
        let ResolvedMember { config, host, slots, init, .. } = names;
        if let Some(weights) = &init {
            weights.check_further_training(info)?;
        }
        let host_parameters = host.parameters(image).map_err(|error| misfit(&host, error, info))?;
        if let Some(rate) = config.dropout.filter(|rate| *rate > 0.0 && !host.has_dropout()) {
            let expected = format!(
                "none with host `{host}`, which has no dropout layers; add layers such as \
                 {{ dropout = {{ p = {rate} }} }}, or use mlp:64,64,dropout={rate}"
            );
            return Err(Error::value("dropout", rate, expected));
        }
        let loss = Task::new(&TaskSettings::from(&config), info)?.loss;
        Ok(Self { config, host, host_parameters, loss, script: None, slots, init })
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
    /// Constants that initial weights were trained with, if they differ from the run's.
    pub(crate) other_normalization: Option<Normalization>,
    /// Files whose topologies the hosts begin with, all modules permanent: none, one for all envs,
    /// or one for each.
    starts: Vec<Arc<Weights>>,
    /// Policy that the run starts from.
    pub(crate) policy: Option<Arc<PolicyFile>>,
    /// Files that envs and controllers are made from, also those that settings of members named
    /// later.
    pub(crate) files: Vec<InputFile>,
    /// Contents of the files that were read.
    read: ReadFiles,
}

impl Setup {
    /// Checks the hosts against the dataset, and initial weights and scripts against the hosts.
    ///
    /// # Errors
    /// A host or a normalisation that does not fit the images; weights, limits or a script that do
    /// not fit the host.
    pub(crate) fn new(
        config: &TrainConfig,
        names: ResolvedNames,
        info: DatasetInfo,
    ) -> Result<Self> {
        let files = names.input_files()?;
        let ResolvedNames { members, isa, starts, blueprints, policy, read, .. } = names;
        let scripts: Vec<_> = members.iter().map(|member| member.script.clone()).collect();
        let image = image_shape(&info);
        let member = |names| Member::new(names, &image, &info);
        let members = members.into_iter().map(member).collect::<Result<Vec<_>>>()?;
        let normalization = config.normalize.constants(&info)?;
        let task = Task::new(&TaskSettings::from(config), &info)?;
        let init = members.iter().filter_map(|member| member.init.as_ref());
        let own = init.map(|weights| weights.normalization(info.channels));
        let own = own.collect::<Result<Vec<_>>>()?;
        let other_normalization = own.into_iter().flatten().find(|own| *own != normalization);
        let form = InputForm { kind: info.kind, stored: info.stored.of_inputs() };
        let outputs = OutputForm { task: task.kind, scale: task.targets.clone() };
        let (classes, table) = (info.classes.clone(), info.table.clone());
        let interface = Interface { form, normalization, classes, outputs, table };
        let config = config.clone();
        let plans = Plans::default();
        let mut setup = Self {
            config,
            members,
            image,
            info,
            interface,
            task,
            isa,
            plans,
            blueprints: blueprints.set,
            other_normalization,
            starts,
            policy,
            files,
            read,
        };
        let has_members = setup.config.members.is_some();
        let of_member = |env: usize, error: Error| {
            if has_members { error.in_member(env % scripts.len()) } else { error }
        };
        for env in 0..setup.starts.len().max(setup.members.len()) {
            setup.check_fresh(env).map_err(|error| of_member(env, error))?;
        }
        for (number, script) in scripts.iter().enumerate() {
            let parsed = setup.parse_script(number, script.as_deref());
            parsed.map_err(|error| of_member(number, error))?;
        }
        Ok(setup)
    }

    /// Checks the host of an env at the beginning of an episode against the env's settings.
    fn check_fresh(&self, env: usize) -> Result<()> {
        let host = self.fresh_host(env)?;
        self.check_size(env, &host)?;
        self.check_width_init(env, &host)?;
        self.check_width_scores(env, &host)
    }

    /// Gives a member the script of its controller, for its host.
    fn parse_script(&mut self, number: usize, script: Option<&ScriptFile>) -> Result<()> {
        if let Some(file) = script {
            let script = file.parse(&self.fresh_host(number)?)?;
            self.members[number].script = Some(Arc::new(script));
        }
        Ok(())
    }

    /// Settings and host of an env.
    pub(crate) fn member(&self, env: usize) -> &Member {
        &self.members[env % self.members.len()]
    }

    /// Gives other settings to a member, from now on. A file that they name is read once in a
    /// run: a copy follows the script of its origin, whatever happened to the file.
    ///
    /// # Errors
    /// Settings that do not fit the run; [`Error::OtherInput`]: a file whose contents differ from
    /// those that the run read before it was resumed.
    pub(crate) fn set_member(
        &mut self,
        number: usize,
        settings: &settings::Member,
        hosts: Hosts,
    ) -> Result<()> {
        let set = self.try_member(number, settings, hosts);
        set.map_err(|error| error.in_member(number))
    }

    fn try_member(
        &mut self,
        number: usize,
        settings: &settings::Member,
        hosts: Hosts,
    ) -> Result<()> {
        let config = self.config.of_new_member(settings)?;
        let names = ResolvedMember::resolve(config, hosts, &mut self.read)?;
        let folder = self.config.run_dir.as_deref().unwrap_or(Path::new("RUN"));
        add_files(folder, &mut self.files, names.files()?)?;
        let script = names.script.clone();
        self.members[number] = Member::new(names, &self.image, &self.info)?;
        if hosts == Hosts::Fresh {
            self.check_fresh(number)?;
            if settings.settings().any(|(key, _)| key == "param_groups") {
                self.check_patterns(&[number])?;
            }
        }
        self.parse_script(number, script.as_deref())
    }

    /// Checks that each pattern of parameter groups matches a parameter. The parameters are those
    /// of the hosts of all members with the pattern, and of all modules that may grow in these
    /// hosts: a pattern for modules is valid in a run without growth, so that runs with and without
    /// growth can have the same groups.
    ///
    /// # Errors
    /// [`Error::Value`] with the pattern, and names of parameters.
    pub(crate) fn check_param_groups(&self) -> Result<()> {
        let mut alike: Vec<Vec<usize>> = vec![];
        for (number, member) in self.members.iter().enumerate() {
            let groups = |other: &usize| &self.members[*other].config.param_groups;
            let same = |others: &&mut Vec<usize>| groups(&others[0]) == &member.config.param_groups;
            match alike.iter_mut().find(same) {
                Some(others) => others.push(number),
                None => alike.push(vec![number]),
            }
        }
        let is_of_all = alike.len() == 1;
        alike.iter().try_for_each(|members| {
            let checked = self.check_patterns(members);
            checked.map_err(|error| if is_of_all { error } else { error.in_member(members[0]) })
        })
    }

    /// Checks the patterns of members that have the same parameter groups.
    fn check_patterns(&self, members: &[usize]) -> Result<()> {
        let Some(groups) = &self.member(members[0]).config.param_groups else { return Ok(()) };
        let mut names = BTreeSet::new();
        let mut seen: Vec<&Member> = vec![];
        for member in members.iter().map(|number| self.member(*number)) {
            if seen.iter().any(|other| other.has_names_of(member)) {
                continue;
            }
            seen.push(member);
            let host = self.host_of(member, member.init.as_ref().or(self.starts.first()))?;
            names.append(&mut host.possible_parameters()?);
            if groups.unmatched(&names).is_none() {
                return Ok(());
            }
        }
        let pattern = groups.unmatched(&names).unwrap_or_default();
        let some: Vec<&str> = names.iter().map(|name| &**name).take(NAMES_SHOWN).collect();
        let expected =
            format!("patterns of {} names of parameters, such as {}", names.len(), some.join(", "));
        Err(Error::value("param-groups", pattern, expected))
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
    /// heuristic, or a policy, is to make layers wider.
    fn check_width_init(&self, env: usize, host: &Host) -> Result<()> {
        let config = &self.member(env).config;
        let init = config.rules.width_init;
        let reasons: Vec<String> =
            host.widenable().iter().filter_map(|layer| layer.suits(init).err()).collect();
        match reasons.first() {
            Some(reason)
                if config.widens_by_setting() && reasons.len() == host.widenable().len() =>
            {
                let expected = format!("another one for `{}`: {reason}", host.spec());
                Err(Error::value("width-init", init.name(), expected))
            }
            _ => Ok(()),
        }
    }

    /// Whether the heuristic decides about growth in width: as the controller, or in demonstrations
    /// for a policy. The controller of a program may be such a policy.
    pub(crate) fn decides_by_rules(&self, config: &TrainConfig) -> bool {
        let taught = config.policy_form() == ObservationForm::SetWiden;
        config.controller == ControllerKind::Heuristic
            || taught && self.config.ppo_demonstrations > 0
    }

    /// Checks that gradients can be measured for the rules of the heuristic that need them, for at
    /// least one layer of the host.
    fn check_width_scores(&self, env: usize, host: &Host) -> Result<()> {
        let config = &self.member(env).config;
        let layers = host.widenable();
        if !self.decides_by_rules(config) || layers.is_empty() {
            return Ok(());
        }
        for MeasuringRule { key, value, score } in MeasuringRule::all(&config.heuristic) {
            let Some(init) = score.gradients_of() else { continue };
            if (0..layers.len()).any(|layer| host.can_score(layer, init)) {
                continue;
            }
            let lacks = layers.iter().find_map(|layer| layer.lacks_for_score(init));
            let small =
                format!("a layer whose features have at most {MEASURED_WEIGHTS_MAX} weights");
            let needs = lacks.unwrap_or(&small);
            let expected = format!("another one for `{}`: it measures {needs}", host.spec());
            return Err(Error::value(key, value, expected));
        }
        Ok(())
    }

    /// The host of an env at the beginning of every episode: the host in the initial weights; or
    /// else the host in the env's start topology, with all modules permanent; or else a host
    /// without modules.
    pub(crate) fn fresh_host(&self, env: usize) -> Result<Host> {
        let start = self.starts.get(env).or(self.starts.first());
        let member = self.member(env);
        let mut host = self.host_of(member, member.init.as_ref().or(start))?;
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
    /// A damaged topology; another host, image shape, list of blueprints or set of slots.
    pub(crate) fn rebuild(&self, env: usize, topology: &Topology) -> Result<Host> {
        let member = self.member(env);
        let host = topology.rebuild(&self.blueprints, member.config.rules)?;
        let fresh = self.fresh_host(env)?;
        let names =
            |host: &Host| host.slots().iter().map(|slot| slot.name.clone()).collect::<Vec<_>>();
        // A run that resumes without the files of initial weights or start topologies
        // (`ResolvedNames::of_checkpoint`) cannot compare slots.
        let without_files = member.init.is_none() && member.config.init.is_some()
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

    /// The graph of the host of an env, with the env's optimisers. Learning rates are multiplied by
    /// `lr_factor`.
    pub(crate) fn graph(&self, env: usize, host: &Host, lr_factor: f64) -> Result<Arc<Graph>> {
        let config = &self.member(env).config;
        let mut graph = host.graph(&config.optimisers(lr_factor))?;
        config.vary_optimisers(&mut graph, lr_factor)?;
        if let GrowthLr::Age { .. } = config.growth_lr {
            config.set_rates_by_age(&mut graph, host, &self.fresh_host(env)?);
        }
        if let Some(rate) = config.dropout {
            graph = graph.with_dropout_of(GroupId::HOST, rate)?;
        }
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
        let with_init = self.members.iter().enumerate().filter(|(_, own)| own.init.is_some());
        for (env, _) in with_init {
            let graph = self.graph(env, &self.fresh_host(env)?, 1.0)?;
            let options = NetworkOptions {
                precision: self.config.precision,
                ..NetworkOptions::new(self.config.seed, 0, self.isa, 1)
            };
            self.initialise(env, &mut Network::new(stream, graph, options)?)?;
        }
        Ok(())
    }

    /// Loads the initial weights of an env, if any, into a fresh network.
    pub(crate) fn initialise(&self, env: usize, network: &mut Network) -> Result<()> {
        self.member(env).init.as_ref().map_or(Ok(()), |weights| weights.fill(network))
    }

    /// Weights of the reward.
    pub(crate) fn reward(&self) -> RewardConfig {
        self.config.reward_config()
    }

    /// Batch, seed and augmentation of an env in the gather.
    pub(crate) fn gather(&self, env: usize) -> EnvGather {
        let TrainConfig { batch, seed, augment, .. } = self.member(env).config;
        EnvGather { batch, seed, augment: self.augment(augment) }
    }

    /// Augmentation of training images in the gather.
    fn augment(&self, Augmentations { crop, flip, cutout }: Augmentations) -> Augment {
        // A quarter of the image side, as usual for small images (8 of 32 pixels).
        let hole = (self.image.height.min(self.image.width) / 4).max(1);
        Augment {
            crop_padding: if crop { CROP_PADDING.min(2 * hole) } else { 0 },
            flip,
            cutout: if cutout { hole } else { 0 },
        }
    }
}

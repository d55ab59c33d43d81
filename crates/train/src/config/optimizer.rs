//! Optimisers of hosts and modules, from the settings.

use meristem_grow::{Host, Optimisers};
use meristem_nn::graph::{AdamConfig, Graph, LionConfig, MuonConfig, Optimiser, SgdConfig};

use super::table::TrainConfig;
use super::types::{Hyperparameters, ModuleLr, OptimizerKind, ParamGroup, Scaled, number_text};
use crate::error::{Error, Result};

impl TrainConfig {
    /// The hyperparameters of the optimiser that are set.
    fn given_hyperparameters(&self) -> Hyperparameters {
        let &Self { lr, momentum, weight_decay, beta1, beta2, eps, adam_lr, .. } = self;
        Hyperparameters { lr, momentum, weight_decay, beta1, beta2, eps, adam_lr }
    }

    /// The hyperparameters of the optimiser: as set, else its defaults.
    pub(super) fn hyperparameters(&self) -> Hyperparameters {
        self.given_hyperparameters().or(self.optimizer.defaults())
    }

    /// The settings with the hyperparameters of the optimiser filled in. They stay unset if members
    /// have other optimisers, because the defaults depend on the optimiser.
    pub(super) fn with_hyperparameters(&self) -> Self {
        let mut members = self.members.iter().flat_map(|members| members.all());
        if members.any(|member| member.get("optimizer").is_some()) {
            return self.clone();
        }
        let Hyperparameters { lr, momentum, weight_decay, beta1, beta2, eps, adam_lr } =
            self.hyperparameters();
        Self { lr, momentum, weight_decay, beta1, beta2, eps, adam_lr, ..self.clone() }
    }

    /// Checks that the optimiser has the hyperparameters that are set.
    ///
    /// # Errors
    /// [`Error::Value`] names the hyperparameter, and those that the optimiser has.
    pub(super) fn check_optimizer(&self) -> Result<()> {
        let known = self.optimizer.defaults().flags();
        for ((flag, given), (_, default)) in
            self.given_hyperparameters().flags().into_iter().zip(known)
        {
            if let (Some(number), None) = (given, default) {
                let flags: Vec<_> = known
                    .iter()
                    .filter(|(_, default)| default.is_some())
                    .map(|(f, _)| *f)
                    .collect();
                let expected = format!(
                    "none with optimizer {}, which has {}",
                    self.optimizer,
                    flags.join(", ")
                );
                return Err(Error::value(flag, number_text(number), expected));
            }
        }
        Ok(())
    }

    /// Optimisers of the host, and of its modules, with learning rates multiplied by `lr_factor`.
    ///
    /// A module has the optimiser of its host without weight decay. With `module_lr` fixed, SGD has
    /// the rate .01 and the momentum .9 for modules.
    pub(crate) fn optimisers(&self, lr_factor: f64) -> Optimisers {
        let values = self.hyperparameters();
        let of_module = match self.module_lr {
            ModuleLr::Fixed if self.optimizer.is_sgd() => {
                Hyperparameters { lr: Some(0.01), momentum: Some(0.9), ..values }
            }
            ModuleLr::Fixed | ModuleLr::Host => values,
        };
        let module = Hyperparameters { weight_decay: Some(0.0), ..of_module };
        Optimisers {
            host: self.optimiser(values, lr_factor),
            module: self.optimiser(module, lr_factor),
        }
    }

    /// Gives the parameters named by `param_groups` the hyperparameters of their group. Learning
    /// rates are multiplied by `lr_factor`.
    ///
    /// # Errors
    /// Never: the optimisers are of one kind.
    pub(crate) fn vary_optimisers(&self, graph: &mut Graph, lr_factor: f64) -> Result<()> {
        let Some(groups) = &self.param_groups else { return Ok(()) };
        Ok(graph.vary_optimisers(|param, optimiser| {
            let (rule, group) = groups.find(&param.name)?;
            Some((rule, varied(*optimiser, group, lr_factor)))
        })?)
    }

    /// Scales the learning rates of modules by the factor for their age. `first` is the host at the
    /// beginning of the episode; its modules keep their learning rates.
    pub(crate) fn set_rates_by_age(&self, graph: &mut Graph, host: &Host, first: &Host) {
        for (slot, first) in host.slots().iter().zip(first.slots()) {
            let Some(module) = slot.module.as_ref().filter(|_| first.module.is_none()) else {
                continue;
            };
            let factor = self.growth_lr.of_age(module.age_steps as usize) as f32;
            let name = slot.name.to_string();
            let group = graph.groups.iter_mut().find(|group| group.name == name);
            if let Some(group) = group.filter(|_| factor != 1.0) {
                let pattern = String::new();
                let factor = Some(Scaled::Factor(factor));
                let rule = ParamGroup { pattern, lr: factor, weight_decay: None };
                let optimisers = std::iter::once(&mut group.optimiser).chain(&mut group.variants);
                optimisers.for_each(|optimiser| *optimiser = varied(*optimiser, &rule, 1.0));
            }
        }
    }

    /// An optimiser with these hyperparameters.
    fn optimiser(&self, values: Hyperparameters, lr_factor: f64) -> Optimiser {
        let clip_norm = self.clip_norm.norm();
        // A hyperparameter that an optimiser does not have is not used.
        let single = |number: Option<f32>| number.unwrap_or_default();
        let scaled = |lr: Option<f32>| (lr_factor * f64::from(single(lr))) as f32;
        let (lr, momentum) = (scaled(values.lr), single(values.momentum));
        let (weight_decay, eps) = (single(values.weight_decay), single(values.eps));
        let betas = [values.beta1, values.beta2].map(Option::unwrap_or_default);
        let sgd = SgdConfig { lr, momentum, weight_decay, clip_norm };
        let adam = AdamConfig { lr, betas, eps, weight_decay, clip_norm };
        match self.optimizer {
            OptimizerKind::Sgd => Optimiser::Sgd(sgd),
            OptimizerKind::Nesterov => Optimiser::Nesterov(sgd),
            OptimizerKind::Adam => Optimiser::Adam(adam),
            OptimizerKind::AdamW => Optimiser::AdamW(adam),
            OptimizerKind::Lion => LionConfig { lr, betas, weight_decay, clip_norm }.into(),
            OptimizerKind::Muon => {
                let others = AdamConfig { lr: scaled(values.adam_lr), ..adam };
                MuonConfig { lr, momentum, others }.into()
            }
        }
    }
}

/// The optimiser with the hyperparameters of a group of parameters. A parameter under Muon has one
/// of two learning rates, and a group sets both.
fn varied(optimiser: Optimiser, group: &ParamGroup, lr_factor: f64) -> Optimiser {
    let lr = |usual: f32| match group.lr {
        None => usual,
        Some(Scaled::Value(lr)) => (lr_factor * f64::from(lr)) as f32,
        Some(Scaled::Factor(factor)) => factor * usual,
    };
    let decay = |usual: f32| match group.weight_decay {
        None => usual,
        Some(Scaled::Value(decay)) => decay,
        Some(Scaled::Factor(factor)) => factor * usual,
    };
    let sgd =
        |of: SgdConfig| SgdConfig { lr: lr(of.lr), weight_decay: decay(of.weight_decay), ..of };
    let adam =
        |of: AdamConfig| AdamConfig { lr: lr(of.lr), weight_decay: decay(of.weight_decay), ..of };
    match optimiser {
        Optimiser::Sgd(of) => Optimiser::Sgd(sgd(of)),
        Optimiser::Nesterov(of) => Optimiser::Nesterov(sgd(of)),
        Optimiser::Adam(of) => Optimiser::Adam(adam(of)),
        Optimiser::AdamW(of) => Optimiser::AdamW(adam(of)),
        Optimiser::Lion(of) => {
            LionConfig { lr: lr(of.lr), weight_decay: decay(of.weight_decay), ..of }.into()
        }
        Optimiser::Muon(of) => MuonConfig { lr: lr(of.lr), others: adam(of.others), ..of }.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use meristem_grow::{
        AlphaTarget, BlueprintSet, GateInputs, Germination, HostSpec, Rules, Style, TaskShape,
        Tempo,
    };

    use super::*;
    use crate::config::ConfigLayer;
    use crate::config::types::Members;

    fn config(layer: ConfigLayer) -> Result<TrainConfig> {
        TrainConfig::resolve(ConfigLayer::default(), layer)
    }

    fn of(optimizer: OptimizerKind) -> ConfigLayer {
        ConfigLayer { optimizer: Some(optimizer), ..ConfigLayer::default() }
    }

    #[test]
    fn plain_sgd_is_that_of_the_hosts() {
        let plain = config(ConfigLayer::default()).unwrap();
        assert_eq!(plain.optimisers(1.0), Optimisers::default());
        assert_eq!(config(of(OptimizerKind::Sgd)).unwrap().optimisers(1.0), Optimisers::default());
    }

    #[test]
    fn modules_have_the_rate_and_momentum_of_the_host_unless_fixed() {
        let of_modules = |module_lr: Option<ModuleLr>, optimizer: OptimizerKind| {
            let (lr, momentum) = (Some(Some(0.2)), Some(Some(0.5)));
            let config = config(ConfigLayer { lr, momentum, module_lr, ..of(optimizer) }).unwrap();
            match config.optimisers(0.5).module {
                Optimiser::Sgd(sgd) | Optimiser::Nesterov(sgd) => {
                    (sgd.lr, sgd.momentum, sgd.weight_decay)
                }
                other => panic!("{other:?}"),
            }
        };
        for optimizer in [OptimizerKind::Sgd, OptimizerKind::Nesterov] {
            assert_eq!(of_modules(None, optimizer), (0.1, 0.5, 0.0));
            assert_eq!(of_modules(Some(ModuleLr::Fixed), optimizer), (0.005, 0.9, 0.0));
        }
    }

    #[test]
    fn numbers_are_as_set_or_those_of_the_optimiser() {
        let layer = ConfigLayer { beta2: Some(Some(0.95)), ..of(OptimizerKind::AdamW) };
        let Optimisers { host, module } = config(layer).unwrap().optimisers(0.5);
        let adam = AdamConfig {
            lr: 5e-4,
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.01,
            clip_norm: 1.0,
        };
        assert_eq!(host, Optimiser::AdamW(adam));
        assert_eq!(module, Optimiser::AdamW(AdamConfig { weight_decay: 0.0, ..adam }));
        let muon = ConfigLayer { lr: Some(Some(0.1)), ..of(OptimizerKind::Muon) };
        let Optimiser::Muon(muon) = config(muon).unwrap().optimisers(0.5).host else {
            panic!("no Muon")
        };
        assert_eq!((muon.lr, muon.momentum, muon.others.lr), (0.05, 0.95, 1.5e-4));
    }

    #[test]
    fn groups_of_parameters_have_their_numbers() {
        let groups = "*.bias: weight_decay=0;head.*: lr=0.1x, weight_decay=2x;*: lr=0.3";
        let layer = ConfigLayer {
            param_groups: Some(Some(groups.parse().unwrap())),
            ..of(OptimizerKind::AdamW)
        };
        let config = config(layer).unwrap();
        let Optimiser::AdamW(usual) = config.optimisers(0.5).host else { panic!("no AdamW") };
        let groups = config.param_groups.unwrap();
        let values = |name: &str| match groups.find(name) {
            Some((_, group)) => match varied(Optimiser::AdamW(usual), group, 0.5) {
                Optimiser::AdamW(of) => (of.lr, of.weight_decay),
                other => panic!("{other:?}"),
            },
            None => panic!("{name} is in no group"),
        };
        assert_eq!(values("head.bias"), (5e-4, 0.0));
        assert_eq!(values("head.weight"), (0.1 * 5e-4, 0.02));
        assert_eq!(values("conv.weight"), (0.15, 0.01));
    }

    #[test]
    fn a_number_of_another_optimiser_is_refused() {
        let layer = ConfigLayer { momentum: Some(Some(0.8)), ..of(OptimizerKind::AdamW) };
        let message = config(layer).unwrap_err().to_string();
        for words in ["momentum", "0.8", "adamw, which has lr, weight-decay, beta1, beta2, eps"] {
            assert!(message.contains(words), "{message}");
        }
        let layer = ConfigLayer { beta1: Some(Some(0.8)), ..ConfigLayer::default() };
        let message = config(layer).unwrap_err().to_string();
        assert!(message.contains("sgd, which has lr, momentum, weight-decay"), "{message}");
    }

    #[test]
    fn settings_of_a_run_have_the_numbers_of_its_optimiser() {
        let text = config(of(OptimizerKind::Lion)).unwrap().resolved_toml();
        for line in ["optimizer = \"lion\"", "beta1 = 0.9", "beta2 = 0.99", "weight_decay = 0.0"] {
            assert!(text.contains(line), "{text}");
        }
        assert!(!text.contains("\nmomentum") && !text.contains("\neps"), "{text}");
        // The values of members with other optimisers have other defaults.
        let members: Members = serde_json::from_str(r#"{"optimizer": ["sgd", "lion"]}"#).unwrap();
        let layer = ConfigLayer { members: Some(Some(members)), ..ConfigLayer::default() };
        let config = config(layer).unwrap();
        assert!(!config.resolved_toml().contains("\nlr ="));
        let members = config.of_members();
        let hosts = [0, 1].map(|member: usize| members[member].optimisers(1.0).host);
        assert_eq!(hosts[0], Optimisers::default().host);
        assert!(matches!(hosts[1], Optimiser::Lion(LionConfig { lr: 1e-4, .. })), "{hosts:?}");
    }

    /// A module that germinated three steps ago, and the same module as one from the beginning.
    #[test]
    fn young_modules_have_the_rates_of_their_age() {
        let spec: HostSpec = "baseline".parse().unwrap();
        let slots = spec.select_slots(["r0c0", "r0c1"]).unwrap();
        let image = TaskShape { channels: 1, height: 28, width: 28, classes: 10 };
        let set = Arc::new(BlueprintSet::standard());
        let first = Host::new(spec, image, &slots, set, Rules::default()).unwrap();
        let germination = Germination {
            blueprint: 0,
            style: Style::LinearAdd,
            tempo: Tempo::Fast,
            alpha_target: AlphaTarget::Full,
            score_pp: None,
        };
        let young = || {
            let config = config(ConfigLayer {
                growth_lr: Some("3:6".parse().unwrap()),
                ..ConfigLayer::default()
            });
            config.unwrap()
        };
        let mut host = first.clone();
        host.germinate(0, germination).unwrap();
        for _ in 0..3 {
            host.step();
            if host.check_advance(0).is_ok() {
                host.advance(0, &GateInputs::default()).ok();
            }
        }
        let optimisers = young().optimisers(1.0);
        let Optimiser::Sgd(module) = optimisers.module else { panic!("no SGD") };
        let rates = |first: &Host| {
            let mut graph = host.graph(&optimisers).unwrap();
            young().set_rates_by_age(&mut graph, &host, first);
            ["r0c0", "host"].map(|name| {
                let group = graph.groups.iter().find(|group| group.name == name);
                match group.map(|group| group.optimiser) {
                    Some(Optimiser::Sgd(sgd)) => sgd.lr / module.lr,
                    other => panic!("{name}: {other:?}"),
                }
            })
        };
        assert_eq!(rates(&first), [2.0, 1.0]);
        // The module was there when the episode began.
        assert_eq!(rates(&host), [1.0, 1.0]);
    }
}

//! Controllers from their settings, and writing of policies.

use std::path::Path;

use meristem_comm::Communicator;
use meristem_control::{
    Controller, EnvController, EnvControllers, Heuristic, Learning, PolicyDomain, Ppo, PpoGroup,
    PpoOptions,
};
use meristem_device::{Device, Stream};
use meristem_nn::safetensors;

use crate::error::{Error, Result};
use crate::external::{External, OwnController};
use crate::processes::World;
use crate::record::run_folder::POLICY;
use crate::settings::{ControllerKind, ObservationForm};
use crate::setup::{Member, Setup};

/// The controller of a run. The variants other than `Deciding` have further methods, which a run
/// calls beside the methods of [`Controller`].
pub(crate) enum AnyController {
    /// Rules, scripts and chance, of which members may have their own.
    Envs(Box<EnvControllers>),
    /// A policy that does not learn, or a controller of the program.
    Deciding(Box<dyn Controller>),
    /// A policy that learns in one rank.
    Policy(Box<Ppo>),
    /// A policy that learns over several ranks.
    Group(Box<PpoGroup>),
    /// A controller of the program that looks at the envs.
    External(Box<dyn External>),
}

impl AnyController {
    /// The controller of a run with `train_samples` training images, for the envs of this process.
    /// The policy of a rank computes on its element of `policy_devices`. `own` is the controller of
    /// the program, if any.
    ///
    /// # Errors
    /// An unfit policy, out of memory; a controller of the program without the setting `external`,
    /// or this setting without such a controller.
    pub(crate) fn new(
        setup: &Setup,
        train_samples: usize,
        policy_devices: &[Device],
        own: Option<OwnController>,
        world: &mut World,
    ) -> Result<Self> {
        let config = &setup.config;
        let only = |learning: Learning| {
            policy(setup, &policy_devices[0].stream("policy"), learning, train_samples)
        };
        if own.is_some() && config.controller != ControllerKind::External {
            let expected = "external, because the program brings a controller";
            return Err(Error::value("controller", &config.controller, expected));
        }
        let deciding = |controller: Box<dyn Controller>| Ok(Self::Deciding(controller));
        match &config.controller {
            ControllerKind::None
            | ControllerKind::Random
            | ControllerKind::Heuristic
            | ControllerKind::Fixed(_) => {
                // Without members there is one, with the settings of the run.
                let mut members = (0..config.members_len()).map(|number| setup.member(number));
                let usual = members.find(|own| own.config.controller == config.controller);
                let usual = usual.map_or(EnvController::None, |own| of_member(own, train_samples));
                let name = config.controller.to_string();
                Ok(Self::Envs(Box::new(EnvControllers::new(&name, usual))))
            }
            ControllerKind::External => match own {
                Some(OwnController::Deciding(controller)) => deciding(controller),
                Some(OwnController::Looking(external)) => Ok(Self::External(external)),
                None => {
                    let expected = "the controller of a program; start or resume this run from \
                                    that program, or give another controller";
                    Err(Error::value("controller", &config.controller, expected))
                }
            },
            ControllerKind::Ppo if config.policy_ranks() > 1 => {
                let members = world.members(config.policy_ranks(), &config.comm_options())?;
                let of_member = |member: &Communicator| {
                    let rank = member.rank();
                    let stream = policy_devices[rank].stream(&format!("policy {rank}"));
                    policy(setup, &stream, Learning::On, train_samples)
                };
                let policies = members.iter().map(of_member).collect::<Result<_>>()?;
                let group = PpoGroup::new(policies, members, &config.exchange.method.options())?;
                Ok(Self::Group(Box::new(group)))
            }
            ControllerKind::Ppo => Ok(Self::Policy(Box::new(only(Learning::On)?))),
            ControllerKind::Policy(_) => deciding(Box::new(only(Learning::Off)?)),
            ControllerKind::Greedy(_) => deciding(Box::new(only(Learning::Greedy)?)),
        }
    }

    /// The controller.
    pub(crate) fn get(&mut self) -> &mut dyn Controller {
        match self {
            Self::Envs(controllers) => &mut **controllers,
            Self::Deciding(controller) => &mut **controller,
            Self::Policy(ppo) => &mut **ppo,
            Self::Group(group) => &mut **group,
            Self::External(external) => &mut **external,
        }
    }

    /// Gives an env the controller of its member. `env` is the number of the env for controllers,
    /// `train_samples` the number of its training samples.
    pub(crate) fn set_env(&mut self, env: usize, member: &Member, train_samples: usize) {
        if let Self::Envs(controllers) = self {
            controllers.set_env(env, of_member(member, train_samples));
        }
    }

    /// The controller, if it looks at the envs.
    pub(crate) fn external(&mut self) -> Option<&mut dyn External> {
        match self {
            Self::External(external) => Some(&mut **external),
            _ => None,
        }
    }

    /// Contents of the policy's file, if the controller learns. Waits for the device.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn policy_bytes(&self) -> Result<Option<Vec<u8>>> {
        let ppo = match self {
            Self::Policy(ppo) => ppo,
            Self::Group(group) => group.first(),
            _ => return Ok(None),
        };
        let (weights, metadata) = ppo.export()?;
        Ok(Some(safetensors::to_bytes(Path::new(POLICY), &weights, &metadata)?))
    }
}

/// The controller of the envs of a member with `train_samples` training samples; none for one that
/// looks at all envs.
fn of_member(member: &Member, train_samples: usize) -> EnvController {
    let Member { config, script, .. } = member;
    match (&config.controller, script) {
        (ControllerKind::Heuristic, _) => {
            EnvController::Heuristic(Box::new(config.heuristic_config(train_samples)))
        }
        (ControllerKind::Random, _) => EnvController::Random(config.seed),
        (ControllerKind::Fixed(_), Some(script)) => EnvController::Script(script.clone()),
        _ => EnvController::None,
    }
}

/// A new policy, or the policy that the run starts from; if it learns, with its teacher.
fn policy(setup: &Setup, stream: &Stream, learning: Learning, train_samples: usize) -> Result<Ppo> {
    let config = &setup.config;
    let options = PpoOptions {
        envs: config.envs / config.policy_ranks(),
        steps: config.steps,
        seed: config.seed,
        isa: setup.isa,
        learning,
        values: config.precision.value_type(),
    };
    let mut ppo = match config.policy_form() {
        ObservationForm::Vector => {
            Ppo::new(stream, config.ppo_config(), &setup.fresh_host(0)?, options)?
        }
        form @ (ObservationForm::Set | ObservationForm::SetWiden) => {
            let members = 0..config.members_len();
            let hosts =
                members.map(|member| setup.fresh_host(member)).collect::<Result<Vec<_>>>()?;
            let domain = PolicyDomain::from_hosts(&hosts);
            match form {
                ObservationForm::SetWiden => {
                    Ppo::of_sets_and_layers(stream, config.ppo_config(), domain, options)?
                }
                _ => Ppo::of_sets(stream, config.ppo_config(), domain, options)?,
            }
        }
    };
    setup.policy.as_ref().map_or(Ok(()), |file| file.fill(&mut ppo))?;
    Ok(match (learning, config.ppo_demonstrations) {
        (Learning::Off | Learning::Greedy, _) | (_, 0) => ppo,
        (Learning::On, rounds) => {
            ppo.with_teacher(Heuristic::new(config.heuristic_config(train_samples)), rounds)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ConfigLayer, TrainConfig};
    use crate::record::events::Event;
    use crate::record::observer::Observer;
    use crate::record::summary::Summary;
    use crate::run::run;
    use crate::settings::{BatchLimit, Preset};

    /// Number of skipped updates of each round.
    #[derive(Default)]
    struct SkippedUpdates(Vec<usize>);

    impl Observer for SkippedUpdates {
        fn event(&mut self, event: &Event) {
            if let Event::PolicyUpdated { report, .. } = event {
                self.0.push(report.skipped);
            }
        }
    }

    #[test]
    fn a_policy_that_diverges_ends_the_run_with_the_third_skipped_update() {
        let base = tempfile::tempdir().unwrap();
        let flags = ConfigLayer {
            preset: Some(Preset::Quick),
            host: Some("minimal".into()),
            controller: Some(ControllerKind::Ppo),
            policy_hidden: Some(Some(8)),
            ppo_lr: Some(1e30),
            run_dir: Some(Some(base.path().join("run"))),
            envs: Some(2),
            batch: Some(16),
            max_batches: Some(BatchLimit::Count(2)),
            control_split: Some(Some(0.01)),
            steps: Some(3),
            rounds: Some(50),
            ..ConfigLayer::default()
        };
        let config = TrainConfig::resolve(ConfigLayer::default(), flags).unwrap();
        let mut skipped = SkippedUpdates::default();
        let error = run(&config, &mut skipped).unwrap_err();
        let diverged = meristem_control::Error::Diverged { skipped: 3 };
        assert!(matches!(error, Error::Control(meristem_control::Error::Diverged { skipped: 3 })));
        assert_eq!(error.to_string(), diverged.to_string());
        assert_eq!(error.exit_code(), 1);
        let [.., one, other] = skipped.0[..] else { panic!("{:?}", skipped.0) };
        assert_eq!((one, other), (1, 1), "the third is the error");
        assert_eq!(skipped.0.iter().sum::<usize>(), 2);
        let text = std::fs::read(base.path().join("run/summary.json")).unwrap();
        let summary: Summary = serde_json::from_slice(&text).unwrap();
        assert_eq!(summary.error, Some(error.to_string()));
        assert_eq!(summary.rounds, skipped.0.len());
    }
}

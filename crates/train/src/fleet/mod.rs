//! The fleet of a run: the machine, the resident data, and the gathers that serve it to the envs.

mod machine;
mod replicas;
mod serving;

use std::sync::Arc;

use meristem_data::{Dataset, GatherBatches, GatherConfig, order};

pub(crate) use self::machine::Machine;
pub(crate) use self::replicas::{Epoch, Replicas};
use self::serving::batch_sizes;
pub(crate) use self::serving::{Serving, for_each_batch, labelled};
use crate::config::TrainConfig;
use crate::error::{Error, Result};
use crate::processes::World;
use crate::setup::Setup;

/// The data of a run, ready to be served to the envs of this process.
pub(crate) struct Fleet {
    /// Devices and streams.
    pub(crate) machine: Machine,
    /// The training set, which the control split is a part of, and the test set.
    pub(crate) datasets: Vec<Arc<Dataset>>,
    /// Deals each epoch's training samples out to all envs of the run; where one host is on several
    /// ranks, what the leader gets.
    pub(crate) train: GatherBatches,
    /// The ranks that the one host is on, if there are several.
    pub(crate) replicas: Option<Replicas>,
    /// Per env: all of the control split; nobody has one when it is empty.
    pub(crate) control: Vec<GatherBatches>,
    /// Per env: all of the test split.
    pub(crate) test: Vec<GatherBatches>,
    /// Per env: the sizes that its training batches have.
    pub(crate) batch_sizes: Vec<Vec<usize>>,
    /// Samples trained on.
    pub(crate) train_samples: usize,
    /// Samples held out for the controller.
    pub(crate) control_samples: usize,
    /// Samples of the test split.
    pub(crate) test_samples: usize,
}

impl Fleet {
    /// Splits the training set, and prepares the gathers of all three parts.
    ///
    /// # Errors
    /// Too few samples for one batch of every env, or for a control split; device errors.
    pub(crate) fn new(
        machine: Machine,
        setup: &Setup,
        [train, test]: [Vec<Arc<Dataset>>; 2],
        world: &mut World,
    ) -> Result<Self> {
        let config = &setup.config;
        let len = train.first().map_or(0, |dataset| dataset.len());
        let (kept, held_out) = order::split_by_seed(len, config.control_share(), config.seed)?;
        check_sizes(config, kept.len(), held_out.len())?;
        let (train_samples, control_samples) = (kept.len(), held_out.len());
        // With several replicas there is one env, and to the gather each of them is one.
        let replicas = config.replicas();
        let devices = machine.ids.repeat(replicas);
        let served = if replicas > 1 { world.rank()..world.rank() + 1 } else { machine.envs() };
        let gather = GatherConfig {
            shuffle: config.shuffle.0,
            seed: config.seed,
            subset: (control_samples > 0).then(|| kept.into()),
            augment: setup.augment(),
            max_batches: config.max_batches.count(),
            served: Some(served.clone()),
            ..GatherConfig::new(config.batch / replicas, devices)
        };
        let replicas = match replicas {
            1 => None,
            ranks => {
                let members = world.members(ranks, &config.comm_options())?;
                Some(Replicas::new(config, &machine, &gather, &train, members)?)
            }
        };
        let gather = GatherBatches::new(&gather, &train, machine.streams())?;
        let serving = |subset| Serving { batch: config.batch, subset, normalization: None };
        let control = match control_samples {
            0 => vec![],
            _ => serving(Some(held_out.into())).gathers(&machine, &train)?,
        };
        let datasets = train.first().into_iter().chain(test.first()).cloned().collect();
        let test_samples = test.first().map_or(0, |dataset| dataset.len());
        let test = serving(None).gathers(&machine, &test)?;
        let batch_sizes = served.map(|env| batch_sizes(&gather, env)).collect();
        Ok(Self {
            machine,
            datasets,
            train: gather,
            replicas,
            control,
            test,
            batch_sizes,
            train_samples,
            control_samples,
            test_samples,
        })
    }
}

/// Every env must have something to learn from in every step.
fn check_sizes(config: &TrainConfig, train: usize, control: usize) -> Result<()> {
    for (key, got) in [("envs", config.envs), ("ranks", config.replicas())] {
        if train < got {
            let expected = format!("at most {train}, the number of training samples");
            return Err(Error::value(key, got, expected));
        }
    }
    if config.control_share() > 0.0 && control == 0 {
        let expected = format!("a share that is at least one of the {train} training samples");
        return Err(Error::value("control-split", config.control_share(), expected));
    }
    Ok(())
}

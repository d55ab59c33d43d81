//! Inner loop of a step.

use meristem_device::Policy;
use meristem_nn::Network;

use crate::env::{Env, networks};
use crate::error::Result;
use crate::fleet::{Epoch, Fleet, labelled};
use crate::step::context::Context;
use crate::step::permitted;

/// The inner loop: trains every env on every batch of the epoch. Does not wait for a device; a hot
/// scope counts copies, waits and allocations, and refuses forbidden ones.
pub(super) fn train_epoch(
    context: &mut Context<'_, '_>,
    envs: &mut [Env],
    epoch: u64,
) -> Result<()> {
    let _span = context.fleet.machine.span(|| "train_epoch");
    let Fleet { machine, train, replicas, .. } = &mut *context.fleet;
    // Data for other processes is waited for, and counted.
    let sends = replicas.is_some() && context.processes > 1;
    let policy =
        if sends || !*context.warm { Policy::Off } else { context.setup.config.hot_scope.0 };
    let (machine, journal) = (&*machine, &mut *context.journal);
    let scopes = || machine.hot_scopes(permitted::TRAIN_STEP, policy, permitted::train_step);
    let Epoch { batches, counts } = match (replicas, &mut *envs) {
        (Some(replicas), [Env { index, network, .. }]) => {
            let mut observed = |network: &Network| journal.batch_enqueued(*index, network);
            replicas.train_epoch(epoch, train, network, &scopes, &mut observed)?
        }
        _ => {
            train.start_epoch(epoch)?;
            let scopes = scopes();
            let mut networks = networks(envs);
            let mut batches = 0;
            while let Some(next) = train.next()? {
                batches += next.len() as u64;
                networks.train_step(&labelled(&next))?;
                for (batch, network) in next.iter().zip(networks.networks()) {
                    journal.batch_enqueued(batch.env, network)?;
                }
            }
            let counts = scopes.into_iter().map(|scope| scope.finish().counts).collect();
            Epoch { batches, counts }
        }
    };
    if *context.warm {
        context.spent.hot.add(batches, counts.into_iter());
    }
    context.spent.training_steps = batches;
    Ok(())
}

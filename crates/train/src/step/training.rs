//! Inner loop of a step.

use meristem_device::ScopePolicy;
use meristem_nn::Network;

use crate::env::{Env, networks};
use crate::error::Result;
use crate::fleet::{Epoch, Fleet, labelled};
use crate::step::context::Context;
use crate::step::permitted;

/// Recomputes the running statistics of all envs on the first batches of the epoch, with fixed
/// weights. A training step leaves averages over weights that have changed since; with them the
/// loss of an evaluation moves from step to step by more than what a module is worth. Does not wait
/// for a device. Replicas of one env do so in their own loops.
pub(super) fn recompute_statistics(
    context: &mut Context<'_, '_>,
    envs: &mut [Env],
    epoch: u64,
) -> Result<()> {
    let Fleet { machine, train, replicas, .. } = &mut *context.fleet;
    let batches = context.setup.config.statistics_batches;
    let mut images = vec![0; envs.len()];
    if batches == 0 || replicas.is_some() {
        return Ok(());
    }
    let _span = machine.span(|| "recompute statistics");
    train.start_epoch(epoch)?;
    let mut networks = networks(envs);
    for _ in 0..batches {
        let Some(next) = train.next()? else { break };
        networks.observe(&next.iter().map(|batch| &batch.inputs).collect::<Vec<_>>())?;
        for (batch, images) in next.iter().zip(&mut images) {
            *images += batch.inputs.dims().first().map_or(0, |images| *images as u64);
        }
    }
    for (env, images) in envs.iter_mut().zip(images) {
        context.spent.training_flops += env.count_flops(1, images)?;
    }
    Ok(())
}

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
        if sends || !*context.warm { ScopePolicy::Off } else { context.setup.config.hot_scope.0 };
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
                batches += networks.train_step(&labelled(&next))?;
                for (batch, network) in next.iter().zip(networks.grown.networks()) {
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

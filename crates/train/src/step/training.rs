//! Training of a step: the inner loop, and the running statistics after it.

use std::sync::Mutex;

use meristem_data::Batch;
use meristem_device::{HotScope, ScopePolicy};
use meristem_nn::{Network, observed_weight};

use crate::env::{Env, TrainedHost};
use crate::error::Result;
use crate::position::StepPosition;
use crate::resources::{
    Epoch, OpenDevices, PassBatches, Resources, STATISTICS_EPOCH, ScopedDevice, SharedEpoch,
    labelled,
};
use crate::step::context::StepContext;
use crate::step::own_loss::{self, fleet, select};
use crate::step::permitted;

/// Trains all networks on one epoch. Waits only for a loss that the program computes, for a host
/// buffer of streamed images, and for other ranks.
///
/// # Errors
/// A device failure, a forbidden operation in the inner loop, a failure of the program's loss.
pub(super) fn train(context: &mut StepContext<'_, '_>) -> Result<()> {
    train_epoch(context)?;
    recompute_statistics(context)
}

/// The inner loop: trains every network on every batch of its epoch. A hot scope counts copies,
/// waits and allocations, and refuses forbidden ones. A loss that the program computes needs
/// copies, waits and allocations for each batch.
fn train_epoch(context: &mut StepContext<'_, '_>) -> Result<()> {
    let _span = context.resources.devices.span(|| "train_epoch");
    let policy = context.epoch_policy();
    let StepPosition { round, step } = context.when;
    let steps = context.setup.config.steps;
    let epoch = |trained: &TrainedHost| (round * steps + trained.own_step(step)) as u64;
    let Resources { devices, train, replicas, train_batch_shapes, loss, .. } =
        &mut *context.resources;
    let (devices, journal) = (&*devices, &mut *context.journal);
    let pass = PassBatches::new(train, train.len(), train_batch_shapes.len());
    let hosts = context.population.hosts().count() as u64;
    let own =
        loss.as_ref().map(|loss| permitted::own_loss(hosts * pass.gathered, loss.is_on_device()));
    let limits = |device: &ScopedDevice| {
        permitted::sum(permitted::train_step(device, pass), own.unwrap_or_default())
    };
    let scopes = || devices.hot_scopes(permitted::TRAIN_STEP, policy, limits);
    let Epoch { batches, counts, sent_bytes } = match (replicas, &mut context.population.envs[..]) {
        (Some(replicas), [Env { index, grown, .. }]) => {
            let (epoch, network) = (epoch(grown), &mut grown.network);
            let mut observed = |network: &Network| journal.batch_enqueued(*index, network);
            let statistics = |pass| statistics_scopes(devices, policy, pass);
            let shared = SharedEpoch {
                train_scopes: &scopes,
                statistics_scopes: &statistics,
                loss: loss.as_mut().map(Mutex::new),
            };
            replicas.train_epoch(epoch, train, network, &shared, &mut observed)?
        }
        _ => {
            let indices = context.population.indices();
            let epochs: Vec<u64> =
                context.population.envs.iter().map(|env| epoch(&env.grown)).collect();
            train.start_epochs(|index| epochs[position(index, &indices)])?;
            let scopes = scopes();
            let mut fleets = context.population.host_fleets();
            let mut batches = 0;
            while let Some(next) = train.next()? {
                let (envs, labelled) = (positions(&next, &indices), labelled(&next));
                for hosts in &mut fleets {
                    let mut hosts = select(hosts, &envs);
                    match loss {
                        Some(loss) => own_loss::train(loss, &mut hosts, &labelled)?,
                        None => fleet(&mut hosts).train_step(&labelled)?,
                    }
                }
                batches += (fleets.len() * next.len()) as u64;
                // The first fleet has the hosts of the envs, without twins.
                if let Some(grown) = fleets.first_mut() {
                    for (batch, trained) in next.iter().zip(select(grown, &envs)) {
                        journal.batch_enqueued(batch.env, &trained.network)?;
                    }
                }
            }
            let counts = scopes.into_iter().map(|scope| scope.finish().counts).collect();
            Epoch { batches, counts, sent_bytes: 0 }
        }
    };
    if *context.warm {
        context.spent.hot.add(batches, counts.into_iter());
    }
    context.spent.training_steps = batches;
    context.spent.exchange_bytes = sent_bytes;
    Ok(())
}

/// The position in `indices` of the env of each of `batches`. `indices` are those of the envs in
/// training, in ascending order.
fn positions(batches: &[Batch], indices: &[usize]) -> Vec<usize> {
    batches.iter().map(|batch| position(batch.env, indices)).collect()
}

/// The position in `indices` of the env with the index `env`. `indices` are those of the envs in
/// training, in ascending order.
pub(super) fn position(env: usize, indices: &[usize]) -> usize {
    indices.partition_point(|index| *index < env)
}

fn statistics_scopes(
    devices: &OpenDevices,
    policy: ScopePolicy,
    pass: PassBatches,
) -> Vec<HotScope> {
    let limits = |device: &ScopedDevice| permitted::statistics(device, pass);
    devices.hot_scopes(permitted::STATISTICS, policy, limits)
}

/// Recomputes the running statistics of all networks that have some, with fixed weights, on the
/// first batches of [`STATISTICS_EPOCH`]. The averages from training come from weights that have
/// changed since. Evaluated with these averages, the control loss varies between steps by more than
/// the contribution of a module. Replicas of one env recompute statistics in their own loops.
fn recompute_statistics(context: &mut StepContext<'_, '_>) -> Result<()> {
    let policy = context.epoch_policy();
    let Resources { devices, train, replicas, train_batch_shapes, .. } = &mut *context.resources;
    let batches = context.setup.config.statistics_batches;
    if batches == 0 || replicas.is_some() || !context.population.has_statistics() {
        return Ok(());
    }
    let _span = devices.span(|| "recompute statistics");
    // Numbers of batches and of images of each env; its twin has the same.
    let mut observed = vec![(0, 0); context.population.envs.len()];
    let _scopes = statistics_scopes(
        devices,
        policy,
        PassBatches::new(train, batches, train_batch_shapes.len()),
    );
    train.start_epoch(STATISTICS_EPOCH)?;
    let indices = context.population.indices();
    let mut fleets = context.population.fleets();
    fleets.iter_mut().try_for_each(|networks| networks.begin_statistics())?;
    for _ in 0..batches {
        let Some(next) = train.next()? else { break };
        let envs = positions(&next, &indices);
        let inputs: Vec<_> = next.iter().map(|batch| &batch.inputs).collect();
        fleets.iter_mut().try_for_each(|networks| networks.select(&envs).observe(&inputs))?;
        for (inputs, env) in inputs.iter().zip(envs) {
            let (batches, images) = &mut observed[env];
            *batches += 1;
            *images += inputs.dims().first().map_or(0, |images| *images as u64);
        }
    }
    let weights: Vec<_> = observed.iter().map(|(batches, _)| observed_weight(*batches)).collect();
    fleets.iter_mut().try_for_each(|networks| networks.finish_statistics(&weights))?;
    let hosts = context.population.hosts_mut().zip(observed.into_iter().cycle());
    for (trained, (_, images)) in hosts.filter(|(trained, _)| trained.network.has_statistics()) {
        context.spent.training_flops += trained.count_flops(1, images)?;
    }
    Ok(())
}

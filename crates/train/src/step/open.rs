//! Opening of a step: growth with time, and the memory and launches that the step needs.

use crate::env::Population;
use crate::error::Result;
use crate::resources::{Resources, present};
use crate::step::context::StepContext;
use crate::step::growth;

/// Advances all hosts, sets learning rates and alphas, and builds everything that the inner loop
/// and the evaluation launch.
///
/// # Errors
/// Out of memory, a failed stream.
pub(super) fn open(context: &mut StepContext<'_, '_>) -> Result<()> {
    let StepContext { when, population, setup, resources, .. } = context;
    for env in &mut population.envs {
        growth::open_step(env, setup, *when, context.journal)?;
    }
    population.twins.iter_mut().try_for_each(|twin| twin.open_step(setup, when.step))?;
    population.set_alphas()?;
    prepare(resources, population, setup.config.statistics_batches)?;
    let sizes = resources.batch_sizes.first().map_or(&[][..], |sizes| sizes);
    for (env, replicas) in population.envs.iter_mut().zip(&mut resources.replicas) {
        replicas.open(&mut env.grown.network, sizes, resources.train.order().batches())?;
    }
    Ok(())
}

/// Allocates memory for new plans, and builds the launches of all networks together.
fn prepare(
    resources: &Resources,
    population: &mut Population,
    statistics_batches: usize,
) -> Result<()> {
    population.prepare_training(&resources.batch_sizes)?;
    let configurations = population.configurations();
    for (mut networks, configurations) in population.fleets().into_iter().zip(configurations) {
        if resources.replicas.is_none() {
            for batch in &resources.train_batch_shapes {
                let (mut networks, sizes) = present(&mut networks, batch);
                networks.prepare_training(&sizes)?;
            }
            for batch in resources.train_batch_shapes.iter().filter(|_| statistics_batches > 0) {
                let (mut networks, sizes) = present(&mut networks, batch);
                networks.prepare_statistics(&sizes)?;
            }
        }
        for batch in &resources.control_batch_shapes {
            let with_part = configurations.iter().zip(batch).filter(|(_, size)| **size > 0);
            let rows: Vec<_> = with_part.map(|(count, _)| 0..*count).collect();
            let (mut networks, sizes) = present(&mut networks, batch);
            networks.prepare_evaluation(&sizes, &rows)?;
        }
    }
    Ok(())
}

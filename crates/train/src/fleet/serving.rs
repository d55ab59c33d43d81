//! Gathers of splits for evaluation, and their batches.

use std::ops::Range;
use std::sync::Arc;

use meristem_data::{Batch, Dataset, GatherBatches, GatherConfig};
use meristem_device::Stream;
use meristem_nn::LabelledBatch;

use super::machine::Machine;
use crate::error::Result;

/// Options for serving a split for evaluation: each env gets all samples, in order.
pub(crate) struct Serving {
    /// Samples in a batch.
    pub(crate) batch: usize,
    /// Indices of the samples; all if absent.
    pub(crate) subset: Option<Arc<[u32]>>,
    /// Normalisation constants; the dataset's own if absent.
    pub(crate) normalization: Option<meristem_data::Normalization>,
}

impl Serving {
    /// A gather for each env, on its stream and with memory of its own. Unlike the training gather,
    /// which distributes the samples over the envs, each of these serves every sample.
    pub(crate) fn gathers(
        &self,
        machine: &Machine,
        datasets: &[Arc<Dataset>],
    ) -> Result<Vec<GatherBatches>> {
        let gather = |(env, stream): (usize, &Stream)| {
            let config = GatherConfig {
                shuffle: false,
                subset: self.subset.clone(),
                normalization: self.normalization.clone(),
                ..GatherConfig::new(self.batch, vec![stream.device().id()])
            };
            let dataset = datasets[machine.device_of[env]].clone();
            Ok(GatherBatches::new(&config, &[dataset], std::slice::from_ref(stream))?)
        };
        machine.streams().iter().enumerate().map(gather).collect()
    }
}

/// Distinct sizes of an env's batches.
pub(crate) fn batch_sizes(gather: &GatherBatches, env: usize) -> Vec<usize> {
    let order = gather.order();
    let mut sizes: Vec<usize> =
        (0..order.batches()).map(|batch| order.part(batch, env).len()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.retain(|&size| size > 0);
    sizes
}

/// Distinct batches, as the sizes of the envs' parts; envs without a part are the last ones.
pub(crate) fn batches_of(gather: &GatherBatches, envs: Range<usize>) -> Vec<Vec<usize>> {
    let order = gather.order();
    let sizes = |batch| {
        let parts = envs.clone().map(|env| order.part(batch, env).len());
        parts.take_while(|&size| size > 0).collect()
    };
    let mut batches: Vec<Vec<usize>> = (0..order.batches()).map(sizes).collect();
    batches.sort_unstable();
    batches.dedup();
    batches
}

/// Inputs and labels of batches.
pub(crate) fn labelled(batches: &[Batch]) -> Vec<LabelledBatch<'_>> {
    batches.iter().map(|batch| (&batch.inputs, &batch.targets)).collect()
}

/// Calls `each` for every batch of one epoch of a gather.
///
/// # Errors
/// An error of the gather or of `each`.
pub(crate) fn for_each_batch(
    gather: &mut GatherBatches,
    mut each: impl FnMut(&Batch) -> Result<()>,
) -> Result<()> {
    while let Some(batches) = gather.next()? {
        batches.iter().try_for_each(&mut each)?;
    }
    Ok(())
}

//! The networks of some envs, to be launched together.

use std::ops::Range;

use meristem_device::Tensor;
use meristem_nn::{LabelledBatch, NetworkFleet};

use super::Env;
use crate::error::Result;

/// The networks of some envs, and those of their twins, which get the same batches. There is a twin
/// for every env or for none.
pub(crate) struct Networks<'a> {
    pub(crate) grown: NetworkFleet<'a>,
    pub(crate) twins: NetworkFleet<'a>,
}

/// The networks of these envs and of their twins.
pub(crate) fn networks(envs: &mut [Env]) -> Networks<'_> {
    let (mut grown, mut twins) = (vec![], vec![]);
    for Env { network, twin, .. } in envs {
        grown.push(network);
        twins.extend(twin.as_mut().map(|twin| &mut twin.network));
    }
    Networks { grown: NetworkFleet::new(grown), twins: NetworkFleet::new(twins) }
}

impl Networks<'_> {
    /// Builds what a training step of batches of these sizes launches; see
    /// [`NetworkFleet::prepare_training`].
    ///
    /// # Errors
    /// As [`NetworkFleet::prepare_training`].
    pub(crate) fn prepare_training(&mut self, sizes: &[usize]) -> Result<()> {
        self.grown.prepare_training(sizes)?;
        if !self.twins.is_empty() {
            self.twins.prepare_training(sizes)?;
        }
        Ok(())
    }

    /// Builds what [`Networks::eval_rows`] launches for batches of these sizes.
    ///
    /// # Errors
    /// As [`NetworkFleet::prepare_evaluation`].
    pub(crate) fn prepare_evaluation(
        &mut self,
        sizes: &[usize],
        rows: &[Range<usize>],
        of_twins: usize,
    ) -> Result<()> {
        self.grown.prepare_evaluation(sizes, rows)?;
        if self.twins.is_empty() {
            return Ok(());
        }
        let one = of_twins..of_twins + 1;
        Ok(self.twins.prepare_evaluation(sizes, &vec![one; sizes.len()])?)
    }

    /// One training step on each batch; see [`NetworkFleet::train_step`]. Returns the number of
    /// steps, those of the twins included.
    ///
    /// # Errors
    /// As [`NetworkFleet::train_step`].
    pub(crate) fn train_step(&mut self, batches: &[LabelledBatch<'_>]) -> Result<u64> {
        self.grown.train_step(batches)?;
        if self.twins.is_empty() {
            return Ok(batches.len() as u64);
        }
        self.twins.train_step(batches)?;
        Ok(2 * batches.len() as u64)
    }

    /// The forward pass of a training step; see [`NetworkFleet::observe`].
    ///
    /// # Errors
    /// As [`NetworkFleet::observe`].
    pub(crate) fn observe(&mut self, inputs: &[&Tensor]) -> Result<()> {
        self.grown.observe(inputs)?;
        if !self.twins.is_empty() {
            self.twins.observe(inputs)?;
        }
        Ok(())
    }

    /// Evaluates batches with these rows of each env, and with this row of each twin; see
    /// [`NetworkFleet::eval_rows`].
    ///
    /// # Errors
    /// As [`NetworkFleet::eval_rows`].
    pub(crate) fn eval_rows(
        &mut self,
        batches: &[LabelledBatch<'_>],
        rows: &[Range<usize>],
        of_twins: usize,
    ) -> Result<()> {
        self.grown.eval_rows(batches, rows)?;
        if self.twins.is_empty() {
            return Ok(());
        }
        let one = of_twins..of_twins + 1;
        Ok(self.twins.eval_rows(batches, &vec![one; batches.len()])?)
    }
}

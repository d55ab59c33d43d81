//! Passes with a loss that the program computes: the networks of all hosts run at the same time,
//! then the program's function is called for each host in order.

use std::ops::Range;

use meristem_device::Tensor;
use meristem_nn::{LabelledBatch, NetworkFleet};

use crate::env::TrainedHost;
use crate::error::Result;
use crate::own_loss::{ProgramLoss, backward};

/// The hosts at these positions in `hosts`. `positions` are in ascending order.
pub(super) fn select<'a>(
    hosts: &'a mut [&mut TrainedHost],
    positions: &[usize],
) -> Vec<&'a mut TrainedHost> {
    let chosen = |position: &usize| positions.binary_search(position).is_ok();
    let all = hosts.iter_mut().enumerate().filter(|(position, _)| chosen(position));
    all.map(|(_, trained)| &mut **trained).collect()
}

/// The networks of hosts.
pub(super) fn fleet<'a>(hosts: &'a mut [&mut TrainedHost]) -> NetworkFleet<'a> {
    NetworkFleet::new(hosts.iter_mut().map(|trained| &mut trained.network))
}

/// One training step of each host. The backward pass of a host runs while the function is called
/// for the next one. Waits for the outputs.
///
/// # Errors
/// A device failure, a failure of the function.
pub(super) fn train(
    loss: &mut ProgramLoss,
    hosts: &mut [&mut TrainedHost],
    batches: &[LabelledBatch<'_>],
) -> Result<()> {
    let inputs: Vec<&Tensor> = batches.iter().map(|(inputs, _)| *inputs).collect();
    let outputs = fleet(hosts).forward(&inputs)?;
    for ((trained, outputs), (_, targets)) in hosts.iter_mut().zip(&outputs).zip(batches) {
        let network = &mut trained.network;
        let sums = backward(loss, network, outputs, targets, 1.0)?;
        network.update()?;
        let log = network.options().batch_log;
        trained.own_results.add_training(&sums, log);
    }
    Ok(())
}

/// Evaluates a batch of each host with these rows of its alphas, one forward pass for each row.
/// Waits for the outputs.
///
/// # Errors
/// A device failure, a failure of the function.
pub(super) fn evaluate(
    loss: &mut ProgramLoss,
    hosts: &mut [&mut TrainedHost],
    batches: &[LabelledBatch<'_>],
    rows: &[Range<usize>],
) -> Result<()> {
    let all = hosts.iter_mut().zip(batches).zip(rows);
    let outputs = all.map(|((trained, (inputs, _)), rows)| {
        rows.clone().map(|row| Ok(trained.network.infer(inputs, row)?)).collect()
    });
    let outputs: Vec<Vec<Tensor>> = outputs.collect::<Result<_>>()?;
    for (((trained, outputs), (_, targets)), rows) in
        hosts.iter_mut().zip(&outputs).zip(batches).zip(rows)
    {
        let targets = loss.targets(targets)?;
        let mut first: Option<Vec<f32>> = None;
        for (row, outputs) in rows.clone().zip(outputs) {
            let mut batch = loss.compute(outputs, &targets, None)?;
            match &first {
                Some(first) => batch.sums.squares = squares(first, &batch.losses),
                None => first = Some(batch.losses),
            }
            trained.own_results.add_evaluation(row, &batch.sums);
        }
    }
    Ok(())
}

/// Sum of the squared differences of two lists.
fn squares(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

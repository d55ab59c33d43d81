//! Metrics of one host over all of its ranks.

use meristem_nn::Metrics;

/// Merges the metrics of all ranks, the leader's first: losses, numbers of samples and sums of
/// scores are sums, a batch's loss is the mean over its samples, and everything else is the
/// leader's. `weight` is the number of samples of a batch on a rank.
pub(super) fn merge(all: &[Metrics], weight: impl Fn(usize, usize) -> f64) -> Metrics {
    let Some((leader, followers)) = all.split_first() else { return Metrics::default() };
    let mut merged = leader.clone();
    for follower in followers {
        merged.loss_sum += follower.loss_sum;
        merged.correct += follower.correct;
        merged.samples += follower.samples;
        merged.sums += follower.sums;
    }
    // `batch_losses` has the losses of the last batches, the last of which is number `steps` − 1.
    let first = leader.steps as usize - leader.batch_losses.len();
    for (at, loss) in merged.batch_losses.iter_mut().enumerate() {
        let batch = first + at;
        let parts = all.iter().enumerate().filter_map(|(rank, metrics)| {
            // A rank without samples in the last batch has one step less, and no loss of that
            // batch.
            let from_end = (metrics.steps as usize).checked_sub(batch)?;
            let at = metrics.batch_losses.len().checked_sub(from_end)?;
            Some((weight(batch, rank), metrics.batch_losses.get(at)?))
        });
        let (weights, sum) =
            parts.fold((0.0, 0.0), |(weights, sum), (w, loss)| (weights + w, sum + w * loss));
        *loss = sum / weights;
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_ranks_are_those_of_all_samples() {
        let rank = |steps: u64, losses: &[f64], samples: u64| Metrics {
            loss_sum: samples as f64,
            correct: samples / 2,
            samples,
            steps,
            batch_losses: losses.to_vec(),
            ..Metrics::default()
        };
        // Batches of 8 + 8, 8 + 8, 2 + 1 and 1 + 0 samples.
        let sizes = [[8.0, 8.0], [8.0, 8.0], [2.0, 1.0], [1.0, 0.0]];
        let weight = |batch: usize, rank: usize| sizes[batch][rank];
        let (a, b) = (rank(4, &[1.0, 2.0, 3.0, 4.0], 19), rank(3, &[2.0, 4.0, 9.0], 17));
        let merged = merge(&[a.clone(), b], weight);
        assert_eq!(
            (merged.loss_sum, merged.correct, merged.samples, merged.steps),
            (36.0, 17, 36, 4)
        );
        assert_eq!(merged.batch_losses, [1.5, 3.0, 5.0, 4.0]);
        // A log of the last two batches, with one rank that lacks the last.
        let merged = merge(&[rank(4, &[3.0, 4.0], 1), rank(3, &[4.0, 9.0], 1)], weight);
        assert_eq!(merged.batch_losses, [5.0, 4.0]);
        assert_eq!(merge(std::slice::from_ref(&a), |_, _| 3.0), a);
    }
}

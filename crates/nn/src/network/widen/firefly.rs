//! Choice of features by the gradients of their outgoing weights, after Wu, Liu, Stone, Liu,
//! "Firefly Neural Architecture Descent", 2020 (arXiv 2102.08574).
//!
//! A candidate has random incoming weights. With outgoing weights of length ε in a direction v, the
//! loss changes by `ε⟨v, G⟩`, where G is the gradient of the outgoing weights; the best direction
//! changes it by `ε‖G‖`. The candidates with the largest ‖G‖ are chosen. The paper also moves the
//! incoming weights of candidates by some steps of gradient descent, and begins with a small ε;
//! here outgoing weights begin with 0, so that the function is kept.

/// Candidates for each chosen feature.
pub(super) const CANDIDATES: usize = 8;

/// Indices, in ascending order, of the `count` candidates whose gradients have the largest norms;
/// of equal norms the lower index. `gradients` has the gradient of each candidate's outgoing
/// weights.
pub(super) fn best(gradients: &[&[f64]], count: usize) -> Vec<usize> {
    let norm = |gradient: &&[f64]| gradient.iter().map(|x| x * x).sum::<f64>();
    let norms: Vec<f64> = gradients.iter().map(norm).collect();
    let mut order: Vec<usize> = (0..norms.len()).collect();
    // The sort is stable.
    order.sort_by(|a, b| norms[*b].total_cmp(&norms[*a]));
    order.truncate(count);
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::best;

    #[test]
    fn the_largest_gradients_are_chosen_in_their_order() {
        let gradients = [[1.0, 0.0], [0.0, -3.0], [2.0, 2.0], [0.0, 0.0], [3.0, 0.0]];
        let gradients: Vec<&[f64]> = gradients.iter().map(|of| &of[..]).collect();
        assert_eq!(best(&gradients, 2), [1, 4]);
        assert_eq!(best(&gradients, 3), [1, 2, 4]);
        assert_eq!(best(&gradients, 9).len(), 5);
    }
}

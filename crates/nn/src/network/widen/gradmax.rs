//! Outgoing weights with which the incoming weights get the largest gradient, from Evci, van
//! Merriënboer, Unterthiner, Pedregosa, Vladymyrov, "GradMax: Growing Neural Networks using
//! Gradient Information", 2022 (arXiv 2201.05125).
//!
//! A feature with incoming weights 0 and outgoing weights v adds nothing to the outputs. Its
//! incoming weights have the gradient `vᵀM` with `M = E[δ hᵀ]`, where δ is the gradient of the
//! outputs of the layer that reads the feature, and h the input of the feature's layer. Among k
//! orthogonal v of one length, the k first left singular vectors of M give the largest gradient.
//! The length is the root mean square of the lengths of the existing features' outgoing weights.

use nalgebra::linalg::SVD;
use nalgebra::{DMatrix, Dyn};

/// Singular values below this part of the largest one count as 0: gradients and activations in f32
/// determine no smaller ones.
pub(super) const RANK: f64 = 1e-6;

/// Limit of the iterations of a decomposition, many times the usual number.
pub(super) const ITERATIONS_MAX: usize = 100_000;

/// Outgoing weights of `count` features, each of length `length`, as the columns of a matrix.
/// `gradient` is M. Features beyond the rank of M are 0. `None` as from [`decomposed`].
pub(super) fn outgoing(gradient: &DMatrix<f64>, count: usize, length: f64) -> Option<DMatrix<f64>> {
    let mut all = DMatrix::zeros(gradient.nrows(), count);
    let found = decomposed(gradient.clone())?;
    let rank = rank(&found);
    let vectors = found.u.iter().flat_map(|u| u.column_iter()).take(rank);
    for (mut column, vector) in all.column_iter_mut().zip(vectors) {
        column.copy_from(&(vector * length));
    }
    Some(all)
}

/// Root mean square of the lengths of the gradients that the incoming weights of the features of
/// [`outgoing`] get; features beyond the rank count with 0.
pub(super) fn largest_gradient(gradient: &DMatrix<f64>, count: usize, length: f64) -> Option<f64> {
    let squares = largest_squares(gradient.clone(), count)?;
    Some(length * (squares / count.max(1) as f64).sqrt())
}

/// The sum of squares of the `count` largest singular values of a matrix. `None` as from
/// [`decomposed`].
pub(super) fn largest_squares(matrix: DMatrix<f64>, count: usize) -> Option<f64> {
    let is_finite = matrix.iter().all(|x| x.is_finite());
    let found = is_finite.then(|| matrix.try_svd(false, false, f64::EPSILON, ITERATIONS_MAX))??;
    let values = found.singular_values.iter().take(count.min(rank(&found)));
    Some(values.map(|value| value * value).sum())
}

/// Number of singular values, largest first, that do not count as 0.
pub(super) fn rank(found: &SVD<f64, Dyn, Dyn>) -> usize {
    let values = &found.singular_values;
    values.iter().take_while(|value| **value > RANK * values[0]).count()
}

/// The singular value decomposition of a matrix; `None` if an element is not finite, or the
/// decomposition does not converge.
pub(super) fn decomposed(matrix: DMatrix<f64>) -> Option<SVD<f64, Dyn, Dyn>> {
    let is_finite = matrix.iter().all(|x| x.is_finite());
    is_finite.then(|| matrix.try_svd(true, true, f64::EPSILON, ITERATIONS_MAX))?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The norm of the incoming gradient `‖vᵀM‖` of the first vector is the largest singular value,
    /// which power iteration finds as well, and each further vector is orthogonal to those before.
    #[test]
    fn the_gradient_is_the_largest_of_orthogonal_vectors() {
        let m = DMatrix::from_fn(5, 7, |i, j| ((3 * i + 5 * j) % 11) as f64 / 3.0 - 1.5);
        let found = outgoing(&m, 4, 2.0).unwrap();
        let mut v = DMatrix::from_fn(5, 1, |i, _| 1.0 + i as f64);
        for _ in 0..2000 {
            v = &m * (m.transpose() * &v);
            v /= v.norm();
        }
        let largest = (m.transpose() * &v).norm();
        let norms: Vec<f64> =
            found.column_iter().map(|v| (m.transpose() * v).norm() / 2.0).collect();
        assert!((norms[0] - largest).abs() < 1e-9 * largest, "{} {largest}", norms[0]);
        assert!(norms.windows(2).all(|pair| pair[0] >= pair[1]), "{norms:?}");
        // Of 4 vectors of length 2.
        let squares = norms.iter().map(|norm| (2.0 * norm).powi(2)).sum::<f64>();
        let all = largest_gradient(&m, 4, 2.0).unwrap();
        assert!((all - (squares / 4.0).sqrt()).abs() < 1e-9 * all, "{all} {norms:?}");
        let gram = found.transpose() * &found;
        assert!((gram - DMatrix::identity(4, 4) * 4.0).norm() < 1e-12);
        let all = outgoing(&m, 6, 1.0).unwrap();
        assert_eq!(all.column(5).norm(), 0.0, "there are five vectors");
        assert_eq!(outgoing(&(m * f64::NAN), 6, 1.0), None);
    }
}

//! Weights of a matrix product with rows and columns swapped, for its gradients.

use super::macros::isa_kernels;
use super::tile;
use super::{Isa, PAD, pad16};

isa_kernels! {
    /// The packed weights `[in_f][pad16(out_f)]` of a layer as weights of the layer with inputs and
    /// outputs swapped: the `out_f` rows from `first` on of panels with `depth` rows of `in_f`
    /// columns, padding lanes zero. The matrix is transposed in squares, each copied to contiguous
    /// memory first: rows of weights often have a power-of-two stride, so the elements of a column
    /// would share few cache sets.
    pub(crate) fn transpose(isa: Isa, sizes: [usize; 2], w: &[f32], to: &mut [f32],
                            rows: [usize; 2]) {
        let ([in_f, out_f], [depth, first]) = (sizes, rows);
        let from_step = pad16(out_f);
        for i in (0..in_f).step_by(PAD) {
            for o in (0..out_f).step_by(PAD) {
                let mut square = [[0f32; PAD]; PAD];
                let rows = w[i * from_step + o..].chunks(from_step).take(in_f - i);
                for (to, row) in square.iter_mut().zip(rows) {
                    to.copy_from_slice(&row[..PAD]);
                }
                for k in 0..PAD.min(out_f - o) {
                    let at = tile::in_panels(depth, in_f, first + o + k, i);
                    for (to, row) in to[at..at + PAD].iter_mut().zip(&square) {
                        *to = row[k];
                    }
                }
            }
        }
    }
}

//! Transposes.

use meristem_kernels::rows::{self, Matrices};
use meristem_kernels::{GradOut, Isa};

use super::support::{Guarded, Values};

/// Element by element from the definition: copies and single sums are exact up to one rounding,
/// which is the same for each instruction set.
#[test]
fn transposes_agree_element_by_element() {
    for [count, rows, columns] in [[1, 1, 1], [3, 5, 7], [2, 16, 16], [2, 17, 40], [4, 64, 3]] {
        let of = Matrices { count, rows, columns };
        let mut values = Values::new(rows as u64);
        let (x, before) = (values.vec(of.len()), values.vec(of.len()));
        let source = |at: usize| {
            let (n, column, row) = (at / (rows * columns), at / rows % columns, at % rows);
            x[(n * rows + row) * columns + column]
        };
        for isa in Isa::available() {
            let mut y = Guarded::poisoned(of.len());
            rows::transpose(isa, of, &x, GradOut::overwrite(y.get()));
            let got = y.check("transpose").to_vec();
            assert_eq!(got, (0..of.len()).map(source).collect::<Vec<f32>>(), "{isa} {of:?}");
            let mut back = Guarded::new(&before);
            rows::transpose(isa, of.transposed(), &got, GradOut::add(back.get()));
            let sums: Vec<f32> = before.iter().zip(&x).map(|(a, b)| a + b).collect();
            assert_eq!(back.check("transpose"), sums, "{isa} {of:?}");
        }
    }
}

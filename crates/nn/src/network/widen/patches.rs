//! Inputs of a convolution, one vector for each position of its output.

use nalgebra::DMatrix;

use crate::dims::Dims;
use crate::graph::ConvGeometry;

/// Number of positions of an output that are measured for each sample, if they suffice. An image
/// has many positions, and neighbours are nearly the same.
const POSITIONS: usize = 16;

/// A convolution, or a linear layer: a convolution whose kernel is the whole image.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    /// Size of an input.
    pub(super) input: Dims,
    /// Kernel, stride, padding and dilation; one group.
    pub(super) geometry: ConvGeometry,
    /// Height and width of an output.
    pub(super) output: [usize; 2],
}

/// Row and column.
pub(super) type Position = [usize; 2];

impl Convolution {
    /// Elements of the kernel.
    pub(super) fn taps(&self) -> usize {
        self.geometry.kernel.iter().product()
    }

    /// Length of a patch.
    pub(super) fn patch_len(&self) -> usize {
        self.input.c * self.taps()
    }

    /// Number of positions of the output that are measured for each of `samples` samples: enough
    /// for products of vectors of `len` elements, if a few such batches are measured.
    pub(super) fn measured(&self, samples: usize, len: usize) -> usize {
        let wanted = (5 * len).div_ceil(2 * samples.max(1));
        wanted.max(POSITIONS).min(self.output[0] * self.output[1])
    }

    /// The `measured` positions of the output that are measured for a sample. They are spread
    /// evenly and differ from sample to sample: over many samples each position has its share.
    pub(super) fn positions(&self, sample: usize, measured: usize) -> Vec<Position> {
        let [height, width] = self.output;
        let all = height * width;
        // Multiples of the golden ratio, modulo 1, are spread evenly for any number of them.
        let offset = (sample as f64 * 0.618_033_988_749_895).fract();
        let at = |i: usize| ((i as f64 + offset) * all as f64 / measured as f64) as usize;
        let positions = (0..measured).map(|i| if measured == all { i } else { at(i) });
        positions.map(|at| [at / width, at % width]).collect()
    }

    /// The position of the input that an element of the kernel reads, for a position of the output;
    /// `None` in the padding.
    pub(super) fn read(&self, [row, column]: Position, tap: usize) -> Option<Position> {
        let ConvGeometry { kernel, stride, padding, dilation, .. } = self.geometry;
        let along = |at: usize, axis: usize, tap: usize, len: usize| {
            let met = (at * stride[axis] + tap * dilation[axis]).checked_sub(padding[axis])?;
            (met < len).then_some(met)
        };
        let row = along(row, 0, tap / kernel[1], self.input.h)?;
        let column = along(column, 1, tap % kernel[1], self.input.w)?;
        Some([row, column])
    }

    /// The patches at positions of samples `[samples][channels][rows][columns]`, in the order of a
    /// kernel `[channels][rows][columns]`, each with a 1 at its end if `has_one`: a row for each. A
    /// row without a position is 0.
    pub(super) fn patches(
        &self,
        values: &[f32],
        rows: &[(usize, Option<Position>)],
        has_one: bool,
    ) -> DMatrix<f64> {
        let Dims { h, w, .. } = self.input;
        let (taps, len) = (self.taps(), self.patch_len());
        let element = |row: usize, column: usize| {
            let (sample, Some(position)) = rows[row] else { return 0.0 };
            if column == len {
                return 1.0;
            }
            let Some([y, x]) = self.read(position, column % taps) else { return 0.0 };
            f64::from(values[sample * self.input.numel() + (column / taps * h + y) * w + x])
        };
        DMatrix::from_fn(rows.len(), len + usize::from(has_one), element)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(h: usize, w: usize, geometry: ConvGeometry, output: [usize; 2]) -> Convolution {
        Convolution { input: Dims { c: 2, h, w }, geometry, output }
    }

    #[test]
    fn a_patch_has_the_order_of_a_kernel_and_zeros_in_the_padding() {
        let it = image(2, 3, ConvGeometry::same(3), [2, 3]);
        let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let rows = [(1, Some([0, 2])), (1, None)];
        let found = it.patches(&values, &rows, true);
        // Channel 0 of the second sample is 12 13 14 / 15 16 17, channel 1 is 6 more.
        let channel = |x: f64| [0.0, 0.0, 0.0, x + 1.0, x + 2.0, 0.0, x + 4.0, x + 5.0, 0.0];
        let expected = [channel(12.0), channel(18.0)].concat();
        let row: Vec<f64> = found.row(0).iter().copied().collect();
        assert_eq!(row, [expected, vec![1.0]].concat());
        assert!(found.row(1).iter().all(|x| *x == 0.0), "also the 1");
    }

    #[test]
    fn stride_and_dilation_move_the_kernel() {
        let geometry = ConvGeometry::new([2, 1]).stride([1, 2]).dilation([2, 1]).padding([1, 0]);
        let it = image(4, 5, geometry, [4, 3]);
        assert_eq!(it.read([0, 1], 0), None, "above the image");
        assert_eq!(it.read([0, 1], 1), Some([1, 2]));
        assert_eq!(it.read([3, 2], 0), Some([2, 4]));
        assert_eq!(it.read([3, 2], 1), None, "below the image");
    }

    #[test]
    fn over_many_samples_every_position_has_its_share() {
        let it = image(7, 9, ConvGeometry::same(1), [7, 9]);
        let mut seen = vec![0; 63];
        for sample in 0..6300 {
            let positions = it.positions(sample, it.measured(6300, 19));
            assert_eq!(positions.len(), 16);
            positions.iter().for_each(|[row, column]| seen[row * 9 + column] += 1);
        }
        // 1,600 each.
        assert!(seen.iter().all(|count| (1595..=1605).contains(count)), "{seen:?}");
        let few = image(4, 4, ConvGeometry::same(3), [4, 4]);
        let positions = few.positions(5, few.measured(6300, 19));
        assert_eq!((positions.len(), positions[5]), (16, [1, 1]));
        assert_eq!([(8, 19), (1, 19)].map(|(samples, len)| it.measured(samples, len)), [16, 48]);
        assert_eq!(it.measured(2, 100), 63, "all positions");
    }
}

//! The sum kernel. It works in blocks that stay in the nearest cache while the values of all ranks
//! are added.

use meristem_device::Args;
use meristem_device::simd::{Vectorized, vectorize};
use smallvec::SmallVec;

use crate::number::{SumElement, divide};

/// Elements per block: a few KiB, so that the inputs are still in the nearest cache when the result
/// overwrites them.
const BLOCK: usize = 1024;

/// Sums the inputs in order and writes the result to every output. Arguments `first..first + n` are
/// the outputs; `sources[i]` is the argument of input i, relative to `first`, or `None` if it is
/// output i.
pub(crate) fn run<T: SumElement>(
    args: &mut Args<'_>,
    first: usize,
    sources: &[Option<usize>],
    divisor: Option<usize>,
) {
    let inputs = sources.iter().map(|source| source.map(|i| args.read::<T>(first + i))).collect();
    let outputs = (0..sources.len()).map(|i| args.write::<T>(first + i)).collect();
    vectorize(args.isa(), SumAll { inputs, outputs, divisor });
}

struct SumAll<'a, T> {
    inputs: SmallVec<[Option<&'a [T]>; 8]>,
    outputs: SmallVec<[&'a mut [T]; 8]>,
    divisor: Option<usize>,
}

impl<T: SumElement> Vectorized for SumAll<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let len = self.outputs.first().map_or(0, |output| output.len());
        let mut buffer = [T::ZERO; BLOCK];
        for start in (0..len).step_by(BLOCK) {
            let range = start..len.min(start + BLOCK);
            let sum = &mut buffer[..range.len()];
            for (i, input) in self.inputs.iter().enumerate() {
                let values = match input {
                    Some(input) => &input[range.clone()],
                    None => &self.outputs[i][range.clone()],
                };
                if i == 0 {
                    sum.copy_from_slice(values);
                } else {
                    sum.iter_mut().zip(values).for_each(|(sum, x)| *sum = sum.plus(*x));
                }
            }
            divide(sum, self.divisor);
            for output in &mut self.outputs {
                output[range.clone()].copy_from_slice(sum);
            }
        }
    }
}

//! Choice of the fastest sum from measurements (X6). A sum that sends more than the dense sum is
//! never chosen.

use std::time::Instant;

use meristem_device::{DType, Owner, Stream, Tensor};

use crate::communicator::Communicator;
use crate::error::Result;
use crate::sparse::lists::check_k;
use crate::sparse::sum::{FeedbackMode, SparseMethod, SparseSum};
use crate::sparse::{check_density, picks};
use crate::transport::{Reduction, Sum, SumOrder};

/// An algorithm for a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// All elements, added in rank order.
    Dense,
    /// The largest elements only.
    Sparse(SparseMethod),
    /// All elements, as eight bits each with a scale for every 256 elements, and with error
    /// feedback. f32 only. A rank sends about a quarter of the bytes of the dense sum.
    Int8,
    /// Dense, gathered top-k or Ok-Topk: the fastest by a table of measurements; without
    /// measurements, the one that sends the fewest bytes.
    Auto,
}

/// Times of a sum of one size, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of elements.
    pub elements: usize,
    /// Share of the elements that each rank selects.
    pub density: f64,
    /// Dense sum.
    pub dense_ms: f64,
    /// Top-k by all-gather.
    pub gather_ms: f64,
    /// Ok-Topk.
    pub split_ms: f64,
}

/// A table of measurements from [`TimingTable::measure`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TimingTable(
    /// The measurements, in any order.
    pub Vec<Timing>,
);

/// Number of exchanges after which Ok-Topk recomputes thresholds and regions under
/// [`Method::Auto`].
pub(crate) const REFRESH: u64 = 32;

impl TimingTable {
    /// Measures f32 sums on this group. All ranks get the same table, with mean times over the
    /// ranks. Waits for the device many times.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_reduce`];
    /// [`Error::BadArgument`](crate::Error::BadArgument) for a density that is not above 0 and at
    /// most 1, or more than 2^32 - 1 elements.
    pub fn measure(
        comm: &mut Communicator,
        stream: &Stream,
        elements: &[usize],
        densities: &[f64],
    ) -> Result<TimingTable> {
        let result = TimingTable::try_measure(comm, stream, elements, densities);
        comm.broadcast_error(result)
    }

    fn try_measure(
        comm: &mut Communicator,
        stream: &Stream,
        elements: &[usize],
        densities: &[f64],
    ) -> Result<TimingTable> {
        let operation = "TimingTable::measure";
        elements.iter().try_for_each(|len| check_k(operation, *len, 0))?;
        for density in densities {
            check_density(operation, *density)?;
        }
        let mut rows = Vec::new();
        for &len in elements {
            for &density in densities {
                let values: Vec<f32> = (0..len).map(|i| (i * 7919 % 1009) as f32).collect();
                let x = Tensor::from_slice(stream, &values, [len], Owner::Collectives)?;
                let k = picks(density, len);
                let methods = [
                    None,
                    Some(SparseMethod::TopK),
                    Some(SparseMethod::OkTopK { refresh: REFRESH }),
                ];
                let mut times = [0.0f64; 3];
                for (time, method) in times.iter_mut().zip(methods) {
                    *time = measure(comm, stream, &x, method, k)?;
                }
                let [dense_ms, gather_ms, split_ms] = mean(comm, stream, times)?;
                let ranks = comm.size();
                rows.push(Timing { ranks, elements: len, density, dense_ms, gather_ms, split_ms });
            }
        }
        Ok(TimingTable(rows))
    }

    /// The fastest algorithm among those that send less than a dense sum; `None` if the dense sum
    /// is fastest. The nearest measurement decides: the distance is the sum of the logarithms of
    /// the ratios of ranks, densities and elements, weighted 100 : 10 : 1. Without measurements the
    /// algorithm that sends least wins.
    pub(crate) fn choose(
        &self,
        n: usize,
        len: usize,
        k: usize,
        dtype: DType,
    ) -> Option<SparseMethod> {
        let far = |row: &Timing| {
            let ratio = |a: f64, b: f64| (a.max(1e-12) / b.max(1e-12)).ln().abs();
            let density = k as f64 / len.max(1) as f64;
            100.0 * ratio(row.ranks as f64, n as f64)
                + 10.0 * ratio(row.density, density)
                + ratio(row.elements as f64, len as f64)
        };
        let row = self.0.iter().min_by(|a, b| far(a).total_cmp(&far(b)));
        let dense = dense_bytes(n, len, dtype);
        let methods = [SparseMethod::TopK, SparseMethod::OkTopK { refresh: REFRESH }];
        let cost = |method: &SparseMethod| match (row, method) {
            (Some(row), SparseMethod::TopK) => row.gather_ms,
            (Some(row), _) => row.split_ms,
            (None, method) => sparse_bytes(*method, n, k, dtype) as f64,
        };
        let none = row.map_or(dense as f64, |row| row.dense_ms);
        methods
            .into_iter()
            .filter(|method| sparse_bytes(*method, n, k, dtype) < dense)
            .min_by(|a, b| cost(a).total_cmp(&cost(b)))
            .filter(|method| cost(method) < none)
    }
}

/// Bytes sent by all ranks for a dense sum.
fn dense_bytes(n: usize, len: usize, dtype: DType) -> u64 {
    2 * (n as u64 - 1) * len as u64 * dtype.size() as u64
}

/// Bytes sent by all ranks for a sparse sum; half of the words are values.
fn sparse_bytes(method: SparseMethod, n: usize, k: usize, dtype: DType) -> u64 {
    method.words(n, k) / 2 * (4 + dtype.size() as u64)
}

/// Median time of several rounds, in milliseconds, from a barrier to the end on this rank.
fn measure(
    comm: &mut Communicator,
    stream: &Stream,
    x: &Tensor,
    method: Option<SparseMethod>,
    k: usize,
) -> Result<f64> {
    const ROUNDS: usize = 7;
    let y = Tensor::zeros(stream, [x.numel()], DType::F32, Owner::Collectives)?;
    let mut sparse = match method {
        Some(method) => Some(SparseSum::new(x, method, FeedbackMode::Residual)?),
        None => None,
    };
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..=ROUNDS {
        stream.synchronize()?;
        comm.barrier()?;
        let start = Instant::now();
        let reduction = Reduction::Sum;
        match &mut sparse {
            Some(sparse) => sparse.run(comm, x, &y, k, reduction)?,
            None => {
                let order = SumOrder::Rank;
                comm.all_reduce_with(&Sum { input: x, output: &y, reduction, order })?;
            }
        }
        stream.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.remove(0); // the first round allocates
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

fn mean(comm: &mut Communicator, stream: &Stream, times: [f64; 3]) -> Result<[f64; 3]> {
    let x = Tensor::from_slice(stream, &times, [3], Owner::Collectives)?;
    comm.all_reduce(&x, Reduction::Mean)?;
    let mean = x.to_vec::<f64>()?;
    Ok([mean[0], mean[1], mean[2]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Top-k by all-gather sends less than a dense sum iff d < 2 s_v / (n (s_v + s_i)).
    #[test]
    fn sparse_sums_that_send_more_are_not_chosen() {
        let len = 10_000;
        for n in [2, 3, 8, 64] {
            for (dtype, value) in [(DType::F32, 4.0), (DType::F64, 8.0), (DType::BF16, 2.0)] {
                let limit = 2.0 * value / (n as f64 * (value + 4.0));
                for k in (0..=len).step_by(100) {
                    let less = (k as f64 / len as f64) < limit;
                    let sends = sparse_bytes(SparseMethod::TopK, n, k, dtype);
                    assert_eq!(sends < dense_bytes(n, len, dtype), less, "{n} {dtype} {k}");
                }
                assert_eq!(TimingTable::default().choose(n, len, len, dtype), None);
            }
        }
        // A single rank sends nothing.
        assert_eq!(TimingTable::default().choose(1, len, 100, DType::F32), None);
        assert_eq!(
            TimingTable::default().choose(2, len, 100, DType::F32),
            Some(SparseMethod::TopK)
        );
        let split = Some(SparseMethod::OkTopK { refresh: REFRESH });
        assert_eq!(TimingTable::default().choose(8, len, 100, DType::F32), split);
    }

    #[test]
    fn the_nearest_measurement_decides() {
        let row = |ranks, elements, density, [dense_ms, gather_ms, split_ms]: [f64; 3]| Timing {
            ranks,
            elements,
            density,
            dense_ms,
            gather_ms,
            split_ms,
        };
        let table = TimingTable(vec![
            row(2, 1000, 0.01, [1.0, 2.0, 3.0]),
            row(2, 1_000_000, 0.01, [9.0, 2.0, 3.0]),
            row(8, 1_000_000, 0.01, [9.0, 3.0, 2.0]),
        ]);
        let choose = |n, len: usize| table.choose(n, len, len / 100, DType::F32);
        assert_eq!(choose(2, 2000), None);
        assert_eq!(choose(2, 500_000), Some(SparseMethod::TopK));
        assert_eq!(choose(7, 500_000), Some(SparseMethod::OkTopK { refresh: REFRESH }));
        // Fast, but sends more than the dense sum.
        assert_eq!(table.choose(8, 1_000_000, 900_000, DType::F32), None);
    }
}

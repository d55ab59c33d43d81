//! X5 against a slow sequential version in f64, step by step and bit for bit: results and the state
//! of every rank.

use meristem_comm::{FeedbackMode, Reduction, SparseMethod, SparseSum};

use crate::common::{RANKS, noise, ranks, upload};

type List = Vec<(usize, f64)>;

/// The k largest entries of a list, in order of index; among equals the lower index wins.
fn largest(list: &List, k: usize) -> List {
    let mut list = list.clone();
    list.sort_by(|(i, a), (j, b)| b.abs().total_cmp(&a.abs()).then(i.cmp(j)));
    list.truncate(k);
    list.sort_by_key(|(i, _)| *i);
    list
}

/// All ranks in one struct. Written from the description: only lists, sorting and adding.
struct Slow {
    len: usize,
    k: usize,
    refresh: usize,
    step: usize,
    /// First element of every region except the first.
    bounds: Vec<usize>,
    /// One entry per rank.
    threshold: Vec<f64>,
    residual: Vec<Vec<f64>>,
}

impl Slow {
    fn new(n: usize, (len, k): (usize, usize), refresh: usize) -> Slow {
        let m = n.min(k);
        let bounds = (1..m).map(|owner| owner * len / m).collect();
        let (threshold, residual) = (vec![0.0; n], vec![vec![0.0; len]; n]);
        Slow { len, k, refresh, step: 0, bounds, threshold, residual }
    }

    /// Picks of a rank. Exchanges that recompute the thresholds select exactly the k largest
    /// elements. Other exchanges select at most k of the elements that reach the threshold, if
    /// these are at least half of k. After exactly k picks, the threshold becomes the smallest of
    /// them.
    fn picks(&mut self, rank: usize, all: &List, anew: bool) -> List {
        let known = self.threshold[rank];
        let reach: List = all.iter().copied().filter(|(_, x)| x.abs() >= known).collect();
        let use_known = !anew && 2 * reach.len() >= self.k;
        let picks = largest(if use_known { &reach } else { all }, self.k);
        if picks.len() == self.k {
            self.threshold[rank] = picks.iter().map(|(_, x)| x.abs()).fold(f64::MAX, f64::min);
        }
        picks
    }

    /// Makes one exchange and returns the sum.
    fn run(&mut self, gradients: &[Vec<f64>]) -> Vec<f64> {
        let (n, k, anew) = (gradients.len(), self.k, self.step.is_multiple_of(self.refresh));
        let m = n.min(k);
        let start = |owner: usize, bounds: &[usize]| if owner == 0 { 0 } else { bounds[owner - 1] };
        // Every rank divides its picks into regions, and sends at most k / m per region.
        let mut sent: Vec<Vec<List>> = Vec::new();
        for (rank, gradient) in gradients.iter().enumerate() {
            let acc = self.residual[rank].iter().zip(gradient).map(|(r, g)| r + g);
            let all: List = acc.enumerate().collect();
            self.residual[rank] = all.iter().map(|(_, x)| *x).collect();
            let picks = self.picks(rank, &all, anew);
            let region = |owner: usize| {
                let from = start(owner, &self.bounds);
                let to = if owner + 1 < m { start(owner + 1, &self.bounds) } else { self.len };
                let here = picks.iter().copied().filter(|(i, _)| (from..to).contains(i));
                largest(&here.collect(), k / m)
            };
            sent.push((0..m).map(region).collect());
        }
        // Every owner adds the lists of its region, from rank 0 upwards, and sends the 2 k / m
        // largest sums.
        let mut survivors = List::new();
        for owner in 0..m {
            let mut sum = vec![None; self.len];
            for (i, x) in sent.iter().flat_map(|of_rank| &of_rank[owner]) {
                sum[*i] = Some(sum[*i].map_or(*x, |so_far: f64| so_far + x));
            }
            let sums = sum.iter().enumerate().filter_map(|(i, x)| Some((i, (*x)?))).collect();
            survivors.extend(largest(&sums, 2 * k / m));
        }
        let result = largest(&survivors, k);
        // A sent element that is in the result is removed from the state.
        for (residual, of_rank) in self.residual.iter_mut().zip(&sent) {
            for (i, _) in of_rank.iter().flatten() {
                if result.iter().any(|(j, _)| j == i) {
                    residual[*i] = 0.0;
                }
            }
        }
        if anew {
            for (i, bound) in self.bounds.iter_mut().enumerate() {
                if let Some((first, _)) = result.get((i + 1) * result.len() / m) {
                    *bound = *first;
                }
            }
        }
        self.step += 1;
        let mut dense = vec![0.0; self.len];
        result.iter().for_each(|(i, x)| dense[*i] = *x);
        dense
    }
}

/// Gradients of a rank and step. Most have similar magnitudes; some are far larger or smaller, so
/// that an old threshold selects all, half or none. They are denser at one end, so that the regions
/// move.
fn gradient(len: usize, rank: usize, step: usize) -> Vec<f64> {
    let scale = [1.0, 1.1, 0.9, 20.0, 0.01, 1.0, 1.0, 1.0][step % 8];
    let tilt = |i: usize| 1.0 + 4.0 * i as f64 / len as f64;
    let values = noise(len, rank, step).into_iter().enumerate();
    values.map(|(i, x)| f64::from(x) * scale * tilt(i)).collect()
}

#[test]
fn ok_topk_equals_a_slow_sequential_version() {
    const STEPS: usize = 10;
    for n in RANKS {
        for (len, k) in [(997, 1), (997, 2), (997, n), (997, 10), (997, 200), (64, 50), (5, 4)] {
            for refresh in [1, 3, 100] {
                let mut slow = Slow::new(n, (len, k), refresh);
                let expected: Vec<_> = (0..STEPS)
                    .map(|step| {
                        let all: Vec<_> = (0..n).map(|rank| gradient(len, rank, step)).collect();
                        (slow.run(&all), slow.residual.clone())
                    })
                    .collect();
                let context = format!("{n} ranks, k = {k} of {len}, refreshed every {refresh}");
                ranks(n, |mut comm, stream| {
                    let x = upload(stream, &vec![0.0f64; len]);
                    let sparse = SparseMethod::OkTopK { refresh: refresh as u64 };
                    let mut sum = SparseSum::new(&x, sparse, FeedbackMode::Residual).unwrap();
                    for (step, (result, residual)) in expected.iter().enumerate() {
                        x.copy_from_slice(&gradient(len, comm.rank(), step)).unwrap();
                        sum.run(&mut comm, &x, &x, k, Reduction::Sum).unwrap();
                        assert_eq!(x.to_vec::<f64>().unwrap(), *result, "{context}, step {step}");
                        let kept = sum.residual().unwrap().to_vec::<f64>().unwrap();
                        assert_eq!(kept, residual[comm.rank()], "{context}, step {step}: residual");
                    }
                });
            }
        }
    }
}

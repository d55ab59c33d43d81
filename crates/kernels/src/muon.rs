//! Muon's update of a matrix (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>), as
//! `torch.optim.Muon` defines it, in f32.
//!
//! ```text
//! buf = μ·buf + (1 − μ)·g;  u = μ·buf + (1 − μ)·g        momentum, Nesterov's form
//! X = u/max(‖u‖, 1e-7);  5 times: X = X·(a·I + b·G + c·G²), G = XᵀX
//! p = (1 − lr·weight_decay)·p − lr·√max(1, rows/columns)·X
//! ```
//!
//! The iteration (Newton–Schulz of fifth order) moves all singular values near 1: X becomes nearly
//! the orthogonal matrix next to u. It commutes with transposition, so X is the matrix or its
//! transpose, whichever has at least as many rows as columns, and G is small. Columns are padded
//! with zeros to whole vectors, which stay zero.

use super::macros::isa_kernels;
use super::optim::{MuonConfig, decayed};
use super::{Isa, pad16};

/// Coefficients a, b and c of the iteration.
pub const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];

/// Number of iterations.
pub const ITERATIONS: usize = 5;

/// Least norm that a matrix is divided by.
pub const NORM_MIN: f64 = 1e-7;

/// A packed parameter as the matrix `[out][rest]`, `[blocks·outputs][rows]`; in memory
/// `[blocks][rows][width]`, see `meristem_nn::layout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MuonMatrix {
    /// First element in the group.
    pub start: usize,
    /// Groups of a convolution.
    pub blocks: usize,
    /// Rows of a block in memory, columns of the matrix.
    pub rows: usize,
    /// Outputs of a block.
    pub outputs: usize,
    /// Outputs of a block with padding.
    pub width: usize,
}

impl MuonMatrix {
    /// Its elements in the group, padding included.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.blocks * self.rows * self.width
    }

    /// Rows of the matrix: outputs of all blocks.
    pub fn out(&self) -> usize {
        self.blocks * self.outputs
    }

    /// Whether X is the transpose, `[rest][out]`.
    pub fn is_transposed(&self) -> bool {
        self.rows >= self.out()
    }

    /// Rows of X, and its columns with padding.
    pub fn tall(&self) -> [usize; 2] {
        let (out, rest) = (self.out(), self.rows);
        if self.is_transposed() { [rest, pad16(out)] } else { [out, pad16(rest)] }
    }

    /// f32 elements of [`step`]'s scratch: X twice, and two square matrices.
    pub fn scratch_len(&self) -> usize {
        let [m, n] = self.tall();
        2 * m * n + 2 * n * n
    }

    /// Factor of the learning rate, `√max(1, rows/columns)`.
    pub fn scale(&self) -> f32 {
        (self.out() as f64 / self.rows.max(1) as f64).max(1.0).sqrt() as f32
    }

    /// Factor of X in the update, `lr·√max(1, rows/columns)`.
    pub(crate) fn rate(&self, lr: f32) -> f32 {
        (f64::from(lr) * f64::from(self.scale())) as f32
    }

    /// Calls `visit(element of X, element in memory)` for every element that is no padding.
    fn for_each(&self, mut visit: impl FnMut(usize, usize)) {
        let ([_, n], is_transposed) = (self.tall(), self.is_transposed());
        for block in 0..self.blocks {
            for row in 0..self.rows {
                let (packed, first) =
                    ((block * self.rows + row) * self.width, block * self.outputs);
                for output in 0..self.outputs {
                    let out = first + output;
                    let at = if is_transposed { row * n + out } else { out * n + row };
                    visit(at, packed + output);
                }
            }
        }
    }
}

/// Elements of a matrix in memory, and scratch.
#[derive(Debug)]
pub struct MuonMemory<'a> {
    /// Parameter.
    pub param: &'a mut [f32],
    /// Gradient.
    pub grad: &'a [f32],
    /// Momentum.
    pub momentum: &'a mut [f32],
    /// [`MuonMatrix::scratch_len`] elements.
    pub scratch: &'a mut [f32],
}

/// One step of a matrix; `clip` is the factor of the gradient.
pub fn step(isa: Isa, of: &MuonMatrix, muon: &MuonConfig, clip: f32, memory: MuonMemory<'_>) {
    let MuonMemory { param, grad, momentum, scratch } = memory;
    let [m, n] = of.tall();
    let (x, rest) = scratch.split_at_mut(m * n);
    let (y, rest) = rest.split_at_mut(m * n);
    let (gram, polynomial) = rest[..2 * n * n].split_at_mut(n * n);
    let share = (1.0 - f64::from(muon.momentum)) as f32;
    x.fill(0.0);
    let mut square = 0.0;
    of.for_each(|at, packed| {
        let g = clip * grad[packed];
        let average = &mut momentum[packed];
        *average += share * (g - *average);
        let update = *average + share * (g - *average);
        square += f64::from(update) * f64::from(update);
        x[at] = update;
    });
    let factor = (1.0 / square.sqrt().max(NORM_MIN)) as f32;
    x.iter_mut().for_each(|x| *x *= factor);
    let (mut x, mut y) = (x, y);
    for _ in 0..ITERATIONS {
        product(isa, [n, m, n], (x, [1, n]), x, gram);
        product(isa, [n, n, n], (gram, [1, n]), gram, polynomial);
        add_to_square(n, gram, polynomial);
        product(isa, [m, n, n], (x, [n, 1]), polynomial, y);
        std::mem::swap(&mut x, &mut y);
    }
    let (keep, rate) = (decayed(muon.lr, muon.others.weight_decay), of.rate(muon.lr));
    of.for_each(|at, packed| param[packed] = keep * param[packed] - rate * x[at]);
}

/// `a·I + b·G + c·G²`, from G and G².
fn add_to_square(n: usize, gram: &[f32], square: &mut [f32]) {
    let [a, b, c] = COEFFICIENTS;
    square.iter_mut().zip(gram).for_each(|(s, g)| *s = b * g + c * *s);
    square.iter_mut().step_by(n + 1).for_each(|s| *s += a);
}

isa_kernels! {
    /// `to = A·B`: A is `[rows, inner]` with these distances between its rows and between its
    /// columns, B is `[inner][columns]`, `to` is `[rows][columns]`, `columns` is a multiple of 16.
    /// Each element is a sum in the order of `inner`.
    fn product(isa: Isa, dims: [usize; 3], a: (&[f32], [usize; 2]), b: &[f32], to: &mut [f32]) {
        const TILE: usize = 4;
        const LANES: usize = 16;
        let ([rows, inner, columns], (a, [down, along])) = (dims, a);
        let mut row = 0;
        while row < rows {
            let count = TILE.min(rows - row);
            for column in (0..columns).step_by(LANES) {
                let mut sums = [[0f32; LANES]; TILE];
                if count == TILE {
                    for k in 0..inner {
                        let b = &b[k * columns + column..][..LANES];
                        for r in 0..TILE {
                            let a = a[(row + r) * down + k * along];
                            for l in 0..LANES {
                                sums[r][l] += a * b[l];
                            }
                        }
                    }
                } else {
                    for r in 0..count {
                        for k in 0..inner {
                            let b = &b[k * columns + column..][..LANES];
                            let a = a[(row + r) * down + k * along];
                            for l in 0..LANES {
                                sums[r][l] += a * b[l];
                            }
                        }
                    }
                }
                for r in 0..count {
                    to[(row + r) * columns + column..][..LANES].copy_from_slice(&sums[r]);
                }
            }
            row += count;
        }
    }
}

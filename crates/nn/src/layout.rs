//! Packed parameters (F3): the range of every parameter in its group's tensor, and its storage
//! order.
//!
//! PyTorch's shapes are for people and files; kernels want the output channels innermost and padded
//! to whole vectors. The packed layout does not depend on the instruction set:
//!
//! | parameter | PyTorch | packed |
//! |---|---|---|
//! | convolution | `[out, in/g, kh, kw]` | `[g][kh][kw][in/g][pad(out/g)]` |
//! | of signals | `[out, in/g, k]` | as with kh = 1 |
//! | depthwise (g = in = out) | `[c, 1, kh, kw]` | `[kh][kw][pad(c)]` |
//! | linear | `[out, in]` | `[in][pad(out)]` |
//! | vector | `[c]` | `[c]` |
//! | table of an embedding | `[entries, size]` | `[entries][size]` |
//!
//! Padding lanes are zero, and stay zero: their gradients are zero.

use crate::graph::{BufferId, Graph, GroupId, ParamId, ParamKind, ParamSpec};
use crate::kernels::muon::MuonMatrix;

/// Output channels are padded to a multiple of this many lanes: one AVX-512 vector of f32.
pub const LANES: usize = 16;

/// `n` rounded up to whole vectors.
pub const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}

/// Packing of one parameter: `[blocks][taps][inputs][width]`. The first `outputs` of each `width`
/// values are elements of the parameter, the others padding. All layouts of the table are of this
/// form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Independent blocks (groups of a convolution).
    blocks: usize,
    /// Kernel positions of a block.
    taps: usize,
    /// Inputs of a block.
    inputs: usize,
    /// Outputs of a block.
    outputs: usize,
    /// Outputs with padding.
    width: usize,
    /// Distance in PyTorch's layout from one output to the next.
    output_stride: usize,
}

impl Packing {
    /// The packing of a parameter of this kind and PyTorch shape.
    pub fn new(kind: ParamKind, shape: &[usize]) -> Self {
        let numel = shape.iter().product();
        match (kind, shape) {
            (ParamKind::ConvWeight { groups }, &[out, 1, kh, kw]) if groups == out => {
                // Depthwise: channels are the lanes, one block.
                Self::rows(1, kh * kw, 1, out)
            }
            (ParamKind::ConvWeight { .. }, &[out, inputs, points]) => {
                Self::new(kind, &[out, inputs, 1, points])
            }
            (ParamKind::ConvWeight { groups }, &[out, inputs, kh, kw]) => {
                Self::rows(groups, kh * kw, inputs, out / groups.max(1))
            }
            (ParamKind::LinearWeight, &[out, inputs]) => Self::rows(1, 1, inputs, out),
            _ => Self { width: numel, ..Self::rows(1, 1, 1, numel) },
        }
    }

    fn rows(blocks: usize, taps: usize, inputs: usize, outputs: usize) -> Self {
        let width = padded(outputs);
        Self { blocks, taps, inputs, outputs, width, output_stride: taps * inputs }
    }

    /// Elements when packed, padding included.
    pub fn len(&self) -> usize {
        self.blocks * self.taps * self.inputs * self.width
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The parameter as a matrix for Muon, from element `start` of its group on.
    pub fn matrix(&self, start: usize) -> MuonMatrix {
        let Self { blocks, taps, inputs, outputs, width, .. } = *self;
        MuonMatrix { start, blocks, rows: taps * inputs, outputs, width }
    }

    /// Calls `visit(packed index, PyTorch index)` for every real element.
    fn for_each(&self, mut visit: impl FnMut(usize, usize)) {
        let mut row = 0;
        for block in 0..self.blocks {
            for tap in 0..self.taps {
                for input in 0..self.inputs {
                    for output in 0..self.outputs {
                        let out = block * self.outputs + output;
                        visit(row + output, out * self.output_stride + input * self.taps + tap);
                    }
                    row += self.width;
                }
            }
        }
    }

    /// PyTorch's layout to the packed one; padding lanes become zero. `packed` has [`Packing::len`]
    /// elements, `torch` the number of elements of the shape.
    pub fn pack(&self, torch: &[f32], packed: &mut [f32]) {
        packed.fill(0.0);
        self.for_each(|p, t| packed[p] = torch[t]);
    }

    /// The packed layout to PyTorch's.
    pub fn unpack(&self, packed: &[f32], torch: &mut [f32]) {
        self.for_each(|p, t| torch[t] = packed[p]);
    }
}

/// Place of a parameter or buffer: a range of its group's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamPlace {
    /// Its group.
    pub group: GroupId,
    /// First element.
    pub start: usize,
    /// Elements, padding lanes of the packed layout included.
    pub len: usize,
}

impl ParamPlace {
    /// The elements' range in the group's tensor.
    pub fn range(self) -> std::ops::Range<usize> {
        self.start..self.start + self.len
    }
}

/// Elements of the tensors of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSize {
    /// f32 elements of values and gradient each.
    pub values: usize,
    /// f32 elements of the optimiser's state
    /// ([`OptimiserKind::moments`](crate::graph::OptimiserKind::moments) of each value): each part
    /// in the layout of the values, one after the other.
    pub moments: usize,
    /// f32 elements of the running statistics, which are the buffers that are not counters.
    pub running_stats: usize,
    /// i64 counters (`num_batches_tracked`, the steps of each parameter, and the batches of
    /// dropout).
    pub counters: usize,
}

/// The places of all parameters and buffers of a graph. Every place starts at a whole vector, so
/// that the lanes between two parameters belong to no parameter and stay zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamLayout {
    /// Per group.
    pub groups: Vec<GroupSize>,
    /// Per parameter, in the values.
    pub params: Vec<ParamPlace>,
    /// Per buffer, in the running statistics, or in the counters for a counter.
    pub buffers: Vec<ParamPlace>,
    /// Per group, the places of its parameters' step counters among its counters, in order; `None`
    /// if its optimiser does not [count steps](crate::graph::OptimiserKind::counts_steps).
    pub steps: Vec<Option<std::ops::Range<usize>>>,
    /// Per group, the place of the count of batches for dropout, which is the last of its counters;
    /// `None` without dropout.
    pub dropout: Vec<Option<usize>>,
}

/// Factors f of the optimiser's steps of the host's packed parameters, then 1 − f; 0 for padding.
/// `None` if the graph has no factors.
pub(crate) fn packed_step_factors(graph: &Graph) -> Option<Vec<f32>> {
    let given = graph.step_factors.as_ref()?;
    let layout = ParamLayout::new(graph);
    let len = layout.groups[GroupId::HOST.index()].values;
    let mut packed = vec![0.0; 2 * len];
    let (factors, rests) = packed.split_at_mut(len);
    for (param, place) in graph.params.iter().zip(&layout.params) {
        if param.group == GroupId::HOST {
            let ones = || vec![1.0; param.shape.iter().product()];
            let of_param = given.get(&param.name).cloned().unwrap_or_else(ones);
            let rest: Vec<f32> = of_param.iter().map(|f| 1.0 - f).collect();
            packing(param).pack(&of_param, &mut factors[place.range()]);
            packing(param).pack(&rest, &mut rests[place.range()]);
        }
    }
    Some(packed)
}

impl ParamLayout {
    /// Places in the order in which the graph declares parameters and buffers.
    pub fn new(graph: &Graph) -> Self {
        let mut groups = vec![GroupSize::default(); graph.groups.len()];
        let mut take = |group: GroupId, len: usize, of: fn(&mut GroupSize) -> &mut usize| {
            let end = of(&mut groups[group.index()]);
            let start = *end;
            *end = padded(start + len);
            ParamPlace { group, start, len }
        };
        let params =
            graph.params.iter().map(|p| take(p.group, packing(p).len(), |g| &mut g.values));
        let params = params.collect();
        let buffers = graph.buffers.iter().map(|b| {
            if b.counter {
                take(b.group, b.len, |g| &mut g.counters)
            } else {
                take(b.group, b.len, |g| &mut g.running_stats)
            }
        });
        let buffers = buffers.collect();
        let mut steps = vec![];
        for (g, (group, spec)) in groups.iter_mut().zip(&graph.groups).enumerate() {
            let kind = spec.optimiser.kind();
            group.moments = kind.moments() * group.values;
            let count = graph.params.iter().filter(|p| p.group.index() == g).count();
            let counters = group.counters..group.counters + count;
            if kind.counts_steps() {
                group.counters = padded(counters.end);
            }
            steps.push(kind.counts_steps().then_some(counters));
        }
        let mut dropout = vec![None; groups.len()];
        for group in graph.groups_with_dropout() {
            let counters = &mut groups[group.index()].counters;
            dropout[group.index()] = Some(*counters);
            *counters = padded(*counters + 1);
        }
        Self { groups, params, buffers, steps, dropout }
    }

    /// The counter of a parameter's steps, by the parameter's position in its group.
    pub(crate) fn step(&self, group: GroupId, position: usize) -> Option<usize> {
        self.steps[group.index()].clone()?.nth(position)
    }

    /// The place of a parameter.
    pub fn param(&self, id: ParamId) -> ParamPlace {
        self.params[id.index()]
    }

    /// The place of a buffer.
    pub fn buffer(&self, id: BufferId) -> ParamPlace {
        self.buffers[id.index()]
    }
}

/// The packing of a parameter.
pub fn packing(param: &ParamSpec) -> Packing {
    Packing::new(param.kind, &param.shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn convolution_layout_by_hand() {
        // [out 4, in/g 3, 2, 1], 2 groups: packed [2][2·1][3][16].
        let (shape, kind) = ([4, 3, 2, 1], ParamKind::ConvWeight { groups: 2 });
        let packing = Packing::new(kind, &shape);
        let torch: Vec<f32> = (0..24).map(|i| i as f32 + 1.0).collect();
        let mut packed = vec![f32::NAN; packing.len()];
        packing.pack(&torch, &mut packed);
        assert_eq!(packed.len(), 2 * 2 * 3 * 16);
        for g in 0..2 {
            for ky in 0..2 {
                for i in 0..3 {
                    for lane in 0..16 {
                        let at = ((g * 2 + ky) * 3 + i) * 16 + lane;
                        let out = g * 2 + lane;
                        let expected = if lane < 2 { torch[(out * 3 + i) * 2 + ky] } else { 0.0 };
                        assert_eq!(packed[at], expected);
                    }
                }
            }
        }
    }

    #[test]
    fn depthwise_keeps_channels_in_lanes() {
        let packing = Packing::new(ParamKind::ConvWeight { groups: 17 }, &[17, 1, 3, 3]);
        assert_eq!(packing.len(), 9 * 32);
        let torch: Vec<f32> = (0..17 * 9).map(|i| i as f32).collect();
        let mut packed = vec![0.0; packing.len()];
        packing.pack(&torch, &mut packed);
        assert_eq!(packed[4 * 32 + 16], torch[16 * 9 + 4]);
    }

    proptest::proptest! {
        #[test]
        fn unpack_undoes_pack(
            groups in 1usize..4, out_g in 1usize..20, in_g in 1usize..5, kh in 1usize..4,
            kw in 1usize..4, form in 0usize..5,
        ) {
            let (kind, shape) = match form {
                0 => (ParamKind::ConvWeight { groups }, vec![groups * out_g, in_g, kh, kw]),
                1 => (ParamKind::ConvWeight { groups: out_g }, vec![out_g, 1, kh, kw]),
                2 => (ParamKind::LinearWeight, vec![out_g, in_g]),
                3 => (ParamKind::ConvWeight { groups }, vec![groups * out_g, in_g, kw]),
                _ => (ParamKind::Vector, if out_g == 1 { vec![] } else { vec![out_g] }),
            };
            let packing = Packing::new(kind, &shape);
            let n: usize = shape.iter().product();
            let torch: Vec<f32> = (0..n).map(|i| i as f32 + 1.0).collect();
            let mut packed = vec![f32::NAN; packing.len()];
            packing.pack(&torch, &mut packed);
            // Every value once, all else zero.
            let mut values: Vec<f32> = packed.iter().copied().filter(|v| *v != 0.0).collect();
            values.sort_by(f32::total_cmp);
            proptest::prop_assert_eq!(&values, &torch);
            let mut back = vec![0.0; n];
            packing.unpack(&packed, &mut back);
            proptest::prop_assert_eq!(back, torch);
        }
    }
}

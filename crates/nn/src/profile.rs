//! The time that each step of a plan takes on a processor, for comparison with lower bounds of this
//! time.

use std::time::Instant;

use meristem_device::DType;

use crate::error::Result;
use crate::graph::Graph;
use crate::kernels::Isa;
use crate::ops::{ConvOp, NormOp, StepOp, conv};
use crate::plan::{Phase, Plan, PlanMemory, PlanOptions, Space, SpaceUse};

/// A step and its time.
#[derive(Clone, Debug)]
pub struct StepTime {
    /// Operation.
    pub op: StepOp,
    /// Median over turns of the mean time of the turn's batches, in seconds.
    pub seconds: f64,
    /// Additions and multiplications of convolutions and linear layers by the direct method, also
    /// if Winograd's filtering computes them.
    pub flops: f64,
    /// Bytes that it reads and writes, each once; scratch is left out.
    pub bytes: usize,
}

/// Measurement of several networks that take turns on a core, as in a fleet. Each network has its
/// own memory, except the arena.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Networks.
    pub networks: usize,
    /// Batches of a turn.
    pub batches: usize,
    /// Turns of each network.
    pub rounds: usize,
}

/// Times every step of a graph's plan on the calling thread, as training or evaluation runs it.
///
/// # Errors
/// As [`Plan::compile`].
pub fn profile(
    graph: &Graph,
    options: PlanOptions,
    isa: Isa,
    Turns { networks, batches, rounds }: Turns,
) -> Result<Vec<StepTime>> {
    let plan = Plan::compile(graph, options)?;
    let phases = Phase::Forward..=Phase::Deliver;
    let steps = plan.steps(phases.clone());
    // As in a fleet, the arena belongs to the core, and all other memory to the network.
    let uses = plan.uses(phases);
    let is_arena = |of: &&SpaceUse| of.space == Space::Arena;
    let mut arena: Vec<SpaceMemory> = uses.iter().filter(is_arena).map(SpaceMemory::new).collect();
    let mut homes: Vec<Vec<SpaceMemory>> = vec![];
    homes.resize_with(networks, || {
        uses.iter().filter(|of| !is_arena(of)).map(SpaceMemory::new).collect()
    });
    let mut times = vec![vec![]; steps.len()];
    for _ in 0..rounds.max(1) {
        for homes in &mut homes {
            let mut memory = PlanMemory::default();
            for home in arena.iter_mut().chain(homes) {
                memory.bind_mut(home.space, home.aligned());
            }
            for _ in 0..batches {
                for (step, times) in steps.iter().zip(&mut times) {
                    let start = Instant::now();
                    step.run(isa, &mut memory);
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
    }
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len().max(1) as f64;
    let median = |times: &mut Vec<f64>| {
        // All batches of a turn count, because the first finds less in the caches.
        let mut turns: Vec<f64> = times.chunks(batches.max(1)).map(mean).collect();
        turns.sort_by(f64::total_cmp);
        turns.get(turns.len() / 2).copied().unwrap_or_default()
    };
    let of = |(step, times): (&crate::plan::PlanStep, &mut Vec<f64>)| {
        let scratch = matches!(step.op.signature(Default::default(), step.values).writes.last(),
            Some(spec) if spec.role == crate::ops::OperandRole::Scratch);
        let writes = &step.writes[..step.writes.len() - usize::from(scratch)];
        let bytes = step.reads.iter().chain(writes).map(|span| span.len * span.dtype.size()).sum();
        StepTime {
            op: step.op.clone(),
            seconds: median(times),
            flops: 2.0 * step.op.multiply_adds() as f64,
            bytes,
        }
    };
    Ok(steps.iter().zip(&mut times).map(of).collect())
}

/// Memory of a space.
struct SpaceMemory {
    space: Space,
    values: Vec<f64>,
}

/// f64 of a cache line.
const LINE: usize = 8;

impl SpaceMemory {
    /// Inputs and parameters around zero; labels of the first class; running statistics of one; all
    /// else zero.
    fn new(of: &SpaceUse) -> Self {
        let len = of.bytes.div_ceil(size_of::<f64>()) + LINE;
        let mut state = 1u32;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let mut pair = |scale: f32| {
            let [low, high] = [value(), value()].map(|v| u64::from((scale * v).to_bits()));
            f64::from_bits(high << 32 | low)
        };
        let one = u64::from(1f32.to_bits());
        let mut fill = || match (of.space, of.dtype) {
            (Space::Input(_), DType::F32) => pair(1.0),
            (Space::Values(_), _) => pair(0.1),
            (Space::RunningStats(_), _) => f64::from_bits(one << 32 | one),
            _ => 0.0,
        };
        Self { space: of.space, values: (0..len).map(|_| fill()).collect() }
    }

    /// The part that begins on a cache line.
    fn aligned(&mut self) -> &mut [f64] {
        let skip = self.values.as_ptr().align_offset(64);
        let len = self.values.len() - LINE;
        &mut self.values[skip..skip + len]
    }
}

impl StepTime {
    /// Short name of the operation.
    pub fn name(&self) -> String {
        name(&self.op)
    }
}

fn name(op: &StepOp) -> String {
    let conv = |of: &conv::ConvProduct| {
        let s = &of.shape;
        let tiles = of.tiles.map_or(String::new(), |tile| format!(" {tile:?}"));
        format!("{}→{} @{}×{}{tiles}", s.in_c, s.out_c, s.in_h, s.in_w)
    };
    match op {
        StepOp::Conv(ConvOp::Forward(of)) => format!("conv {}", conv(of)),
        StepOp::Conv(ConvOp::ForwardWithStats(of)) => format!("conv+stats {}", conv(of)),
        StepOp::Conv(ConvOp::WeightGradient(of)) => format!("weight gradient {}", conv(of)),
        StepOp::Conv(ConvOp::DataGradient { product, .. }) => {
            format!("data gradient {}", conv(product))
        }
        StepOp::Chain(of) => {
            let ends = [of.steps.first(), of.steps.last()].map(|step| step.map(|of| name(&of.op)));
            let [first, last] = ends.map(Option::unwrap_or_default);
            format!("{} steps: {first} … {last}", of.steps.len())
        }
        StepOp::Norm(NormOp::Forward(of)) => {
            format!("norm {}@{}×{}", of.shape.c, of.shape.h, of.shape.w)
        }
        StepOp::Norm(NormOp::GradientSums(of)) => {
            format!("norm gradient's sums {}@{}×{}", of.shape.c, of.shape.h, of.shape.w)
        }
        StepOp::Norm(NormOp::InputGradient { norm: of, .. }) => {
            format!("norm gradient {}@{}×{}", of.shape.c, of.shape.h, of.shape.w)
        }
        op => {
            let text = format!("{op:?}");
            text.chars().take(48).collect()
        }
    }
}

//! Consecutive steps that go sample by sample become chains, which take a block of samples at a
//! time (see [`ops::chain`](crate::ops::chain)).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use meristem_device::DType;

use super::step::{Draft, ValueList};
use super::value::{PlanValue, ValueHome, ValueId, root};
use crate::kernels::parts;
use crate::ops::chain::{Chain, ChainOperand, ChainOperands, ChainSizes, ChainStep, OperandPlace};
use crate::ops::reduction::Reduction;
use crate::ops::{ConvOp, OperandRole, PlanTarget, Spec, StepOp};
use crate::precision::ValueType;

/// Most bytes of all operands of a block: the size of a second-level cache. Only a block of one
/// sample may have more. Several times this size is equally fast on a core with exclusive use of
/// the third-level cache.
pub(super) const BLOCK: usize = 1 << 20;

/// A run of consecutive steps, each of which computes a sample independently of the other samples.
#[derive(Default)]
struct StepRun {
    steps: Vec<Draft>,
    /// Operands of each step.
    forms: Vec<SampleForms>,
}

/// For each operand of a step, whether it is divided by samples (`true`) or shared by all samples.
struct SampleForms {
    reads: Vec<bool>,
    /// Without scratch.
    writes: Vec<bool>,
    /// Set if the step reduces over samples: the operands that it writes for all samples are then
    /// results, written after the last sample.
    reduction: Option<Reduction>,
}

/// An operand of a step.
#[derive(Clone, Copy)]
struct OperandUse {
    id: ValueId,
    by_sample: bool,
    written: bool,
    /// Whether it is written after the last sample.
    is_result: bool,
}

impl OperandUse {
    /// Whether the step adds to it, and all samples share it.
    fn is_sum(&self) -> bool {
        self.written && !self.by_sample && !self.is_result
    }
}

/// The steps, with chains in place of runs that are long and large enough. An independent step that
/// would split a run is moved before it. `host_gradient` is the gradient of the host's parameters.
pub(super) fn with_chains(
    values: &mut Vec<PlanValue>,
    steps: Vec<Draft>,
    batch: usize,
    host_gradient: ValueId,
) -> Vec<Draft> {
    let mut uses = Uses::default();
    steps.iter().for_each(|step| uses.count(values, step));
    let (mut done, mut run) = (vec![], StepRun::default());
    for step in steps {
        if run.steps.first().is_some_and(|first| first.phase != step.phase) {
            done.extend(std::mem::take(&mut run).close(values, batch, &uses));
        }
        match SampleForms::for_step(&step, batch) {
            Some(forms) if run.takes(values, batch, host_gradient, (&step, &forms)) => {
                run.push(step, forms);
            }
            forms => {
                let apart = run.steps.iter().all(|other| are_apart(values, other, &step));
                match forms {
                    Some(forms) if !apart => {
                        let next = run.begin_another(values, batch, host_gradient, (step, forms));
                        done.extend(std::mem::replace(&mut run, next).close(values, batch, &uses));
                    }
                    forms => {
                        if !apart {
                            done.extend(std::mem::take(&mut run).close(values, batch, &uses));
                        }
                        let alone =
                            StepRun { steps: vec![step], forms: forms.into_iter().collect() };
                        done.extend(alone.close(values, batch, &uses));
                    }
                }
            }
        }
    }
    done.extend(run.close(values, batch, &uses));
    done
}

/// Number of times that each memory is an operand.
#[derive(Default)]
struct Uses(HashMap<ValueId, usize>);

impl Uses {
    fn count(&mut self, values: &[PlanValue], step: &Draft) {
        for id in present(&step.reads).chain(present(&step.writes)) {
            *self.0.entry(root(values, id)).or_default() += 1;
        }
    }
}

/// The operands that are not absent.
fn present(ids: &[ValueId]) -> impl Iterator<Item = ValueId> {
    ids.iter().copied().filter(|id| *id != ValueId::NONE)
}

/// Whether two values may have memory in common.
fn meet(values: &[PlanValue], [a, b]: [ValueId; 2]) -> bool {
    let [of, other] = [a, b].map(|id| &values[id.index()]);
    // The whole of a part is never a part itself.
    let range = |value: &PlanValue| match value.home {
        ValueHome::Part { start, .. } => start..start + value.arena_len(),
        _ => 0..value.arena_len(),
    };
    match [of.home, other.home] {
        [ValueHome::Fixed(a), ValueHome::Fixed(b)] => a.overlaps(b),
        _ => {
            let [one, another] = [range(of), range(other)];
            root(values, a) == root(values, b) && one.start < another.end && another.start < one.end
        }
    }
}

/// Whether two values are the same elements. Two ids may name the same parameter, because each
/// request for a parameter makes a new value.
fn is_same(values: &[PlanValue], [a, b]: [ValueId; 2]) -> bool {
    let [of, other] = [a, b].map(|id| &values[id.index()]);
    a == b || of.home != ValueHome::Arena && (of.home, of.len) == (other.home, other.len)
}

/// Whether two steps can be executed in either order.
fn are_apart(values: &[PlanValue], a: &Draft, b: &Draft) -> bool {
    let meets = |write: ValueId, of: &Draft| {
        present(&of.reads).chain(present(&of.writes)).any(|other| meet(values, [write, other]))
    };
    !present(&a.writes).any(|write| meets(write, b))
        && !present(&b.writes).any(|write| meets(write, a))
}

impl SampleForms {
    /// `None` for a step that cannot be divided by samples.
    fn for_step(step: &Draft, batch: usize) -> Option<Self> {
        let (one, all) =
            (step.op.over(1, batch)?, step.op.signature(PlanTarget::Cpu, ValueType::F32));
        let one = one.signature(PlanTarget::Cpu, ValueType::F32);
        let differ = |(all, one): (&Spec, &Spec)| all.len != one.len;
        let writes = all.writes.iter().zip(&one.writes);
        Some(Self {
            reads: all.reads.iter().zip(&one.reads).map(differ).collect(),
            writes: writes.filter(|(of, _)| of.role != OperandRole::Scratch).map(differ).collect(),
            reduction: step.op.reduction(),
        })
    }

    /// The operands of the step, except absent ones and scratch.
    fn uses(&self, step: &Draft) -> impl Iterator<Item = OperandUse> {
        let reads = step.reads.iter().zip(&self.reads).map(|of| (of, false));
        let all = reads.chain(step.writes.iter().zip(&self.writes).map(|of| (of, true)));
        all.filter(|((id, _), _)| **id != ValueId::NONE).map(|((id, by_sample), written)| {
            let is_result = written && !by_sample && self.reduction.is_some();
            OperandUse { id: *id, by_sample: *by_sample, written, is_result }
        })
    }

    /// Whether the step adds to an operand that all samples share.
    fn adds(&self, step: &Draft) -> bool {
        self.uses(step).any(|of| of.is_sum())
    }
}

impl StepRun {
    fn push(&mut self, step: Draft, forms: SampleForms) {
        self.steps.push(step);
        self.forms.push(forms);
    }

    /// Starts the next run with a step that cannot join this run. The cheap steps after the last
    /// product or sum of this run move to the next run if they may precede the new step, which then
    /// finds their results in the cache.
    fn begin_another(
        &mut self,
        values: &[PlanValue],
        batch: usize,
        host_gradient: ValueId,
        (step, forms): (Draft, SampleForms),
    ) -> Self {
        let mut steps = self.steps.iter().zip(&self.forms);
        let last = steps.rposition(|(step, of)| {
            step.op.multiply_adds() > 0 || of.adds(step) || of.reduction.is_some()
        });
        let from = last.map_or(0, |last| last + 1);
        let mut next =
            Self { steps: self.steps.split_off(from), forms: self.forms.split_off(from) };
        if !next.takes(values, batch, host_gradient, (&step, &forms)) {
            self.steps.append(&mut next.steps);
            self.forms.append(&mut next.forms);
        }
        next.push(step, forms);
        next
    }

    /// Whether a step may join the run. Where the step and the run use the same memory and one of
    /// them writes it, both must process it sample by sample, or both must add to it. All sums of a
    /// run belong to one group of parameters, and in the host's group to one parameter, because
    /// gradients of a module may split a run of the host. So a host trains with the same bits with
    /// and without a module.
    fn takes(
        &self,
        values: &[PlanValue],
        batch: usize,
        host_gradient: ValueId,
        (step, forms): (&Draft, &SampleForms),
    ) -> bool {
        let fits = |own: OperandUse| {
            let uses = || self.steps.iter().zip(&self.forms).flat_map(|(step, of)| of.uses(step));
            let mut sums = uses().filter(OperandUse::is_sum);
            let of_host = root(values, own.id) == host_gradient;
            let with = |sum: OperandUse| {
                root(values, sum.id) == root(values, own.id)
                    && (!of_host || is_same(values, [sum.id, own.id]))
            };
            let apart = |other: OperandUse| {
                let pair = [own, other];
                let sample_by_sample = pair.iter().all(|of| of.by_sample);
                let both_add = pair.iter().all(OperandUse::is_sum);
                !(own.written || other.written)
                    || !meet(values, [own.id, other.id])
                    || (sample_by_sample || both_add) && is_same(values, [own.id, other.id])
            };
            (!own.is_sum() || sums.all(with)) && uses().all(apart)
        };
        forms.uses(step).all(fits) && self.parts_agree(values, batch, (step, forms))
    }

    /// Whether all reductions of the run, with this step, have one part size, and the run can have
    /// it too.
    fn parts_agree(&self, values: &[PlanValue], batch: usize, of: (&Draft, &SampleForms)) -> bool {
        let steps: Vec<_> = self.steps.iter().zip(&self.forms).chain([of]).collect();
        let mut parts = steps.iter().filter_map(|(_, of)| Some(of.reduction?.part()));
        let Some(first) = parts.next() else { return true };
        let adds = steps.iter().any(|(step, of)| of.adds(step));
        parts.all(|part| part == first) && (!adds || run_sizes(&steps, values, batch).part == first)
    }

    /// Samples of a block and of a part, if a chain is worth it. If steps add to gradients, these
    /// steps determine the sizes, so that the order of a sum does not depend on adjacent steps; the
    /// operands of other steps only make a block smaller, if the sums keep their bits. Otherwise a
    /// reduction determines the parts.
    fn sizes(&self, values: &[PlanValue], batch: usize) -> Option<ChainSizes> {
        let steps: Vec<_> = self.steps.iter().zip(&self.forms).collect();
        let adds = steps.iter().any(|(step, of)| of.adds(step));
        let RunSizes { most, part } = run_sizes(&steps, values, batch);
        // Blocks of a part are about as large as each other.
        let mut block = part.div_ceil(part.div_ceil(most));
        let units = self.forms.iter().filter_map(|of| Some(of.reduction?.unit()));
        let unit = units.fold(1, least_common_multiple);
        if adds
            && let Some(unit) = weight_unit(&steps, block)
            && (block.is_multiple_of(unit) || block == part)
        {
            // Smaller multiples give the same bits, and the operands of all steps may fit.
            let all = part.div_ceil(part.div_ceil(fitting(&steps, values, batch)));
            block = block.min((all / unit).max(1) * unit);
        }
        block = (block / unit).max(1) * unit;
        // One step is a chain if it adds, so that its sums do not depend on the steps after it.
        (batch > most && steps.len() + usize::from(adds) > 1).then_some(ChainSizes {
            batch,
            block: block.min(part),
            part,
        })
    }

    /// The steps, or the chain that they become.
    fn close(self, values: &mut Vec<PlanValue>, batch: usize, uses: &Uses) -> Vec<Draft> {
        let Some(sizes) = self.sizes(values, batch) else { return self.steps };
        let mut places = OperandLists::new(values, &self, uses);
        let steps = self.steps.iter().zip(&self.forms).map(|(step, forms)| {
            let reads = places.all(&step.reads, &forms.reads);
            let writes = places.all(&step.writes, &forms.writes);
            ChainStep::new(step.op.clone(), &reads, &writes)
        });
        let steps = steps.collect();
        let OperandLists { reads: from, writes: to, inner, .. } = places;
        let operands = |of: &[(ValueId, ChainOperand)]| of.iter().map(|(_, of)| *of).collect();
        let (reads, writes, inner) = (operands(&from), operands(&to), operands(&inner));
        let chain = Chain::new(sizes, steps, ChainOperands { reads, writes, inner });
        let ids =
            |of: &[(ValueId, ChainOperand)]| of.iter().map(|(id, _)| *id).collect::<ValueList>();
        let (reads, mut writes) = (ids(&from), ids(&to));
        let (home, dtype, len) = (ValueHome::Arena, DType::F32, chain.scratch_len());
        values.push(PlanValue { home, dtype, len, from_start: false, to_end: false });
        writes.push(ValueId(values.len() as u32 - 1));
        vec![Draft {
            op: Arc::new(chain).into(),
            values: ValueType::F32,
            reads,
            writes,
            phase: self.steps[0].phase,
        }]
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor.max(1) * b
}

/// Samples of a part of a run, and the most samples whose operands fit into a block.
struct RunSizes {
    most: usize,
    part: usize,
}

/// The sizes that the steps which add to gradients determine, or if there are none, all steps.
fn run_sizes(steps: &[(&Draft, &SampleForms)], values: &[PlanValue], batch: usize) -> RunSizes {
    let mut steps = steps.to_vec();
    let adds = steps.iter().any(|(step, of)| of.adds(step));
    steps.retain(|(step, of)| !adds || of.adds(step));
    let ids = operands_by_sample(&steps);
    let touched: usize = ids.iter().map(|id| values[id.index()].len / batch).sum();
    let products: usize = steps.iter().map(|(step, _)| step.op.multiply_adds()).sum();
    let part = steps.iter().find_map(|(_, of)| Some(of.reduction?.part()));
    let part = part
        .filter(|_| !adds)
        .unwrap_or_else(|| parts::images(batch, 1, products / batch + touched * parts::TOUCH));
    RunSizes { most: fitting(&steps, values, batch), part }
}

/// The values of which each sample has a part.
fn operands_by_sample(steps: &[(&Draft, &SampleForms)]) -> BTreeSet<ValueId> {
    let uses = steps.iter().flat_map(|(step, of)| of.uses(step));
    uses.filter(|of| of.by_sample).map(|of| of.id).collect()
}

/// The most samples whose operands fit into a block.
fn fitting(steps: &[(&Draft, &SampleForms)], values: &[PlanValue], batch: usize) -> usize {
    let ids = operands_by_sample(steps);
    let values = ids.iter().map(|id| &values[id.index()]);
    let bytes: usize = values.map(|of| of.len / batch * of.dtype.size()).sum();
    (BLOCK / bytes.max(1)).max(1)
}

/// Number u of samples such that smaller blocks, of a multiple of u samples, give sums with the
/// same bits as blocks of `block` samples; `None` if each size of a block gives its own bits.
fn weight_unit(steps: &[(&Draft, &SampleForms)], block: usize) -> Option<usize> {
    let mut adding = steps.iter().filter(|(step, of)| of.adds(step));
    adding.try_fold(1, |unit, (step, _)| match step.op {
        // The gradient of a bias is a sum over each block.
        StepOp::Conv(ConvOp::WeightGradient(of)) if step.writes[1] == ValueId::NONE => {
            of.weight_unit(block).map(|of| least_common_multiple(unit, of))
        }
        _ => None,
    })
}

/// The operands of a chain, as they are found.
struct OperandLists<'v> {
    values: &'v [PlanValue],
    /// Values that the run writes.
    written: Vec<ValueId>,
    /// Memories that nothing but the run uses.
    own: Vec<ValueId>,
    reads: Vec<(ValueId, ChainOperand)>,
    writes: Vec<(ValueId, ChainOperand)>,
    inner: Vec<(ValueId, ChainOperand)>,
}

impl<'v> OperandLists<'v> {
    fn new(values: &'v [PlanValue], run: &StepRun, uses: &Uses) -> Self {
        let mut here = Uses::default();
        run.steps.iter().for_each(|step| here.count(values, step));
        let passes = |id: ValueId| values[id.index()].from_start || values[id.index()].to_end;
        let own = here.0.iter().filter(|(id, n)| uses.0.get(id) == Some(n) && !passes(**id));
        Self {
            values,
            written: run.steps.iter().flat_map(|step| present(&step.writes)).collect(),
            own: own.map(|(id, _)| *id).collect(),
            reads: vec![],
            writes: vec![],
            inner: vec![],
        }
    }

    /// The places of operands; `by_sample` marks operands with a part for each sample.
    fn all(&mut self, ids: &[ValueId], by_sample: &[bool]) -> Vec<OperandPlace> {
        ids.iter().zip(by_sample).map(|(id, by_sample)| self.place(*id, *by_sample)).collect()
    }

    fn place(&mut self, id: ValueId, by_sample: bool) -> OperandPlace {
        if id == ValueId::NONE {
            return OperandPlace::Absent;
        }
        let PlanValue { home, dtype, len, .. } = self.values[id.index()];
        let operand = ChainOperand { dtype, len, by_sample };
        let same = |other: ValueId| is_same(self.values, [id, other]);
        let (list, place): (_, fn(usize) -> OperandPlace) =
            if by_sample && home == ValueHome::Arena && self.own.contains(&id) {
                (&mut self.inner, OperandPlace::Inner)
            } else if self.written.iter().any(|written| same(*written)) {
                (&mut self.writes, OperandPlace::Write)
            } else {
                (&mut self.reads, OperandPlace::Read)
            };
        let known = list.iter().position(|(other, of)| same(*other) && *of == operand);
        place(known.unwrap_or_else(|| {
            list.push((id, operand));
            list.len() - 1
        }))
    }
}

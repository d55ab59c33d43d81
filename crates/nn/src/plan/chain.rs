//! Rows of steps that go sample by sample become chains, which take a block of samples at a time
//! (see [`ops::chain`](crate::ops::chain)).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use meristem_device::DType;

use super::step::{Draft, ValueList};
use super::value::{Home, Value, ValueId, root};
use crate::kernels::parts;
use crate::ops::chain::{Chain, Link, Operand, Place, Sizes};
use crate::ops::{Role, Spec, Target};

/// Bytes of all operands of a block, if it has more than one sample: a second-level cache. Several
/// times as many are as good on a core that has the third level for itself.
const BLOCK: usize = 1 << 20;

/// Steps in a row, each of which goes sample by sample.
#[derive(Default)]
struct Row {
    steps: Vec<Draft>,
    /// Operands of each step.
    forms: Vec<Forms>,
}

/// Whether each sample has its part, for the operands of a step.
struct Forms {
    reads: Vec<bool>,
    /// Without scratch.
    writes: Vec<bool>,
}

/// An operand of a step.
#[derive(Clone, Copy)]
struct Use {
    id: ValueId,
    by_sample: bool,
    written: bool,
}

impl Use {
    /// Whether it is added to, the same for all samples.
    fn is_sum(&self) -> bool {
        self.written && !self.by_sample
    }
}

/// The steps, with chains in the place of rows that are long and large enough. A step that breaks a
/// row and has nothing to do with it goes in front of it. `host` is the gradient of the host's
/// parameters.
pub(super) fn with_chains(
    values: &mut Vec<Value>,
    steps: Vec<Draft>,
    batch: usize,
    host: ValueId,
) -> Vec<Draft> {
    let mut uses = Uses::default();
    steps.iter().for_each(|step| uses.count(values, step));
    let (mut done, mut row) = (vec![], Row::default());
    for step in steps {
        if row.steps.first().is_some_and(|first| first.phase != step.phase) {
            done.extend(std::mem::take(&mut row).close(values, batch, &uses));
        }
        match Forms::of(&step, batch) {
            Some(forms) if row.takes(values, host, &step, &forms) => row.push(step, forms),
            forms => {
                let apart = row.steps.iter().all(|other| are_apart(values, other, &step));
                match forms {
                    Some(forms) if !apart => {
                        let next = row.begin_another(values, host, step, forms);
                        done.extend(std::mem::replace(&mut row, next).close(values, batch, &uses));
                    }
                    forms => {
                        if !apart {
                            done.extend(std::mem::take(&mut row).close(values, batch, &uses));
                        }
                        let alone = Row { steps: vec![step], forms: forms.into_iter().collect() };
                        done.extend(alone.close(values, batch, &uses));
                    }
                }
            }
        }
    }
    done.extend(row.close(values, batch, &uses));
    done
}

/// How often each memory is an operand.
#[derive(Default)]
struct Uses(HashMap<ValueId, usize>);

impl Uses {
    fn count(&mut self, values: &[Value], step: &Draft) {
        for id in given(&step.reads).chain(given(&step.writes)) {
            *self.0.entry(root(values, id)).or_default() += 1;
        }
    }
}

/// The operands that are not absent.
fn given(ids: &[ValueId]) -> impl Iterator<Item = ValueId> {
    ids.iter().copied().filter(|id| *id != ValueId::NONE)
}

/// Whether two values may have memory in common.
fn meet(values: &[Value], [a, b]: [ValueId; 2]) -> bool {
    let [of, other] = [a, b].map(|id| &values[id.index()]);
    // A part is of a whole, not of another part.
    let range = |value: &Value| match value.home {
        Home::Part { start, .. } => start..start + value.arena_len(),
        _ => 0..value.arena_len(),
    };
    match [of.home, other.home] {
        [Home::Fixed(a), Home::Fixed(b)] => a.overlaps(b),
        _ => {
            let [one, another] = [range(of), range(other)];
            root(values, a) == root(values, b) && one.start < another.end && another.start < one.end
        }
    }
}

/// Whether two values are the same elements: a parameter is another value each time that it is
/// asked for.
fn is_same(values: &[Value], [a, b]: [ValueId; 2]) -> bool {
    let [of, other] = [a, b].map(|id| &values[id.index()]);
    a == b || of.home != Home::Arena && (of.home, of.len) == (other.home, other.len)
}

/// Whether it does not matter which of two steps comes first.
fn are_apart(values: &[Value], a: &Draft, b: &Draft) -> bool {
    let meets = |write: ValueId, of: &Draft| {
        given(&of.reads).chain(given(&of.writes)).any(|other| meet(values, [write, other]))
    };
    !given(&a.writes).any(|write| meets(write, b)) && !given(&b.writes).any(|write| meets(write, a))
}

impl Forms {
    /// `None` for a step that does not go sample by sample.
    fn of(step: &Draft, batch: usize) -> Option<Self> {
        let (one, all) = (step.op.over(1, batch)?, step.op.signature(Target::Cpu));
        let one = one.signature(Target::Cpu);
        let differ = |(all, one): (&Spec, &Spec)| all.len != one.len;
        let writes = all.writes.iter().zip(&one.writes);
        Some(Self {
            reads: all.reads.iter().zip(&one.reads).map(differ).collect(),
            writes: writes.filter(|(of, _)| of.role != Role::Scratch).map(differ).collect(),
        })
    }

    /// The operands of the step, but for absent ones and scratch.
    fn uses(&self, step: &Draft) -> impl Iterator<Item = Use> {
        let reads = step.reads.iter().zip(&self.reads).map(|of| (of, false));
        let all = reads.chain(step.writes.iter().zip(&self.writes).map(|of| (of, true)));
        all.filter(|((id, _), _)| **id != ValueId::NONE).map(|((id, by_sample), written)| Use {
            id: *id,
            by_sample: *by_sample,
            written,
        })
    }

    /// Whether the step adds to what is the same for all samples.
    fn adds(&self, step: &Draft) -> bool {
        self.uses(step).any(|of| of.is_sum())
    }
}

impl Row {
    fn push(&mut self, step: Draft, forms: Forms) {
        self.steps.push(step);
        self.forms.push(forms);
    }

    /// The row of a step that this one does not take. It begins with the cheap steps behind the
    /// last product or sum here, if these go with the step, which then finds their results in the
    /// cache.
    fn begin_another(
        &mut self,
        values: &[Value],
        host: ValueId,
        step: Draft,
        forms: Forms,
    ) -> Self {
        let mut steps = self.steps.iter().zip(&self.forms);
        let last = steps.rposition(|(step, of)| step.op.multiply_adds() > 0 || of.adds(step));
        let from = last.map_or(0, |last| last + 1);
        let mut next =
            Self { steps: self.steps.split_off(from), forms: self.forms.split_off(from) };
        if !next.takes(values, host, &step, &forms) {
            self.steps.append(&mut next.steps);
            self.forms.append(&mut next.forms);
        }
        next.push(step, forms);
        next
    }

    /// Whether a step may follow: where it and the row use the same memory, and one of them writes
    /// it, both go through it sample by sample, or both add to it. What is added to is of one group
    /// of parameters, and one parameter of the host, whose row a module's gradients may cut in two:
    /// a host trains beside a module as it would without, bit for bit.
    fn takes(&self, values: &[Value], host: ValueId, step: &Draft, forms: &Forms) -> bool {
        let fits = |own: Use| {
            let row = || self.steps.iter().zip(&self.forms).flat_map(|(step, of)| of.uses(step));
            let mut sums = row().filter(Use::is_sum);
            let of_host = root(values, own.id) == host;
            let with = |sum: Use| {
                root(values, sum.id) == root(values, own.id)
                    && (!of_host || is_same(values, [sum.id, own.id]))
            };
            let apart = |other: Use| {
                let both = other.by_sample || own.written && other.written;
                let together = own.by_sample == other.by_sample && both;
                !(own.written || other.written)
                    || !meet(values, [own.id, other.id])
                    || together && is_same(values, [own.id, other.id])
            };
            (!own.is_sum() || sums.all(with)) && row().all(apart)
        };
        forms.uses(step).all(fits)
    }

    /// Samples of a block and of a part, if a chain is worth it. Where steps add to gradients they
    /// follow from these steps alone: the order of a sum does not depend on its neighbours.
    fn sizes(&self, values: &[Value], batch: usize) -> Option<Sizes> {
        let mut steps: Vec<_> = self.steps.iter().zip(&self.forms).collect();
        let adds = steps.iter().any(|(step, of)| of.adds(step));
        steps.retain(|(step, of)| !adds || of.adds(step));
        let uses = steps.iter().flat_map(|(step, of)| of.uses(step));
        let ids: BTreeSet<ValueId> = uses.filter(|of| of.by_sample).map(|of| of.id).collect();
        let samples = || ids.iter().map(|id| &values[id.index()]);
        let bytes: usize = samples().map(|of| of.len / batch * of.dtype.size()).sum();
        let touched: usize = samples().map(|of| of.len / batch).sum();
        let products: usize = steps.iter().map(|(step, _)| step.op.multiply_adds()).sum();
        let most = (BLOCK / bytes.max(1)).max(1);
        let part = parts::images(batch, 1, products / batch + touched * parts::TOUCH);
        // Blocks of a part are about as large as each other.
        let block = part.div_ceil(part.div_ceil(most));
        // One step is a chain if it adds, so that its sums do not depend on who follows it.
        (batch > most && steps.len() + usize::from(adds) > 1).then_some(Sizes {
            batch,
            block,
            part,
        })
    }

    /// The steps, or the chain that they become.
    fn close(self, values: &mut Vec<Value>, batch: usize, uses: &Uses) -> Vec<Draft> {
        let Some(sizes) = self.sizes(values, batch) else { return self.steps };
        let mut places = Places::of(values, &self, uses);
        let links = self.steps.iter().zip(&self.forms).map(|(step, forms)| {
            let reads = places.all(&step.reads, &forms.reads);
            let writes = places.all(&step.writes, &forms.writes);
            Link::new(step.op.clone(), &reads, &writes)
        });
        let links = links.collect();
        let Places { reads: from, writes: to, inner, .. } = places;
        let operands = |of: &Vec<(ValueId, Operand)>| of.iter().map(|(_, of)| *of).collect();
        let chain = Chain::new(sizes, links, [&from, &to, &inner].map(operands));
        let ids = |of: &[(ValueId, Operand)]| of.iter().map(|(id, _)| *id).collect::<ValueList>();
        let (reads, mut writes) = (ids(&from), ids(&to));
        let (home, dtype, len) = (Home::Arena, DType::F32, chain.scratch_len());
        values.push(Value { home, dtype, len, from_start: false, to_end: false });
        writes.push(ValueId(values.len() as u32 - 1));
        vec![Draft { op: Arc::new(chain).into(), reads, writes, phase: self.steps[0].phase }]
    }
}

/// The operands of a chain, as they are found.
struct Places<'v> {
    values: &'v [Value],
    /// Values that the row writes.
    written: Vec<ValueId>,
    /// Memories that nothing but the row uses.
    own: Vec<ValueId>,
    reads: Vec<(ValueId, Operand)>,
    writes: Vec<(ValueId, Operand)>,
    inner: Vec<(ValueId, Operand)>,
}

impl<'v> Places<'v> {
    fn of(values: &'v [Value], row: &Row, uses: &Uses) -> Self {
        let mut here = Uses::default();
        row.steps.iter().for_each(|step| here.count(values, step));
        let passes = |id: ValueId| values[id.index()].from_start || values[id.index()].to_end;
        let own = here.0.iter().filter(|(id, n)| uses.0.get(id) == Some(n) && !passes(**id));
        Self {
            values,
            written: row.steps.iter().flat_map(|step| given(&step.writes)).collect(),
            own: own.map(|(id, _)| *id).collect(),
            reads: vec![],
            writes: vec![],
            inner: vec![],
        }
    }

    /// The places of operands; each sample may have its part.
    fn all(&mut self, ids: &[ValueId], by_sample: &[bool]) -> Vec<Place> {
        ids.iter().zip(by_sample).map(|(id, by_sample)| self.place(*id, *by_sample)).collect()
    }

    fn place(&mut self, id: ValueId, by_sample: bool) -> Place {
        if id == ValueId::NONE {
            return Place::Absent;
        }
        let Value { home, dtype, len, .. } = self.values[id.index()];
        let operand = Operand { dtype, len, by_sample };
        let same = |other: ValueId| is_same(self.values, [id, other]);
        let (list, place): (_, fn(usize) -> Place) =
            if by_sample && home == Home::Arena && self.own.contains(&id) {
                (&mut self.inner, Place::Inner)
            } else if self.written.iter().any(|written| same(*written)) {
                (&mut self.writes, Place::Write)
            } else {
                (&mut self.reads, Place::Read)
            };
        let known = list.iter().position(|(other, of)| same(*other) && *of == operand);
        place(known.unwrap_or_else(|| {
            list.push((id, operand));
            list.len() - 1
        }))
    }
}

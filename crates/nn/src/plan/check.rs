//! Check of a plan's memory: follows every vector of the arena through the steps.

use super::step::Draft;
use super::value::{PlanValue, ValueHome, ValueId, root};
use crate::space::{Space, SpaceSpan};

/// Bytes of a vector: arena values are padded to whole vectors.
const VECTOR: usize = crate::layout::LANES * size_of::<f32>();

/// The first misuse: a step that reads a value which another has overwritten or no step has
/// written, writes memory that it also reads or writes twice, or writes read-only memory; or a
/// value that must last to the end and is overwritten. `None` for a correct plan.
pub(super) fn misuse(values: &[PlanValue], steps: &[Draft], spans: &[SpaceSpan]) -> Option<String> {
    let span = |id: ValueId| spans[id.index()];
    // For each vector of the arena, the value that it holds.
    let mut holds: Vec<Option<ValueId>> = vec![];
    let cells = |s: SpaceSpan| s.bytes().start / VECTOR..s.bytes().end.div_ceil(VECTOR);
    for (i, value) in values.iter().enumerate().filter(|(_, v)| v.from_start) {
        let id = ValueId(i as u32);
        if value.len > 0 {
            set(&mut holds, cells(span(id)), id);
        }
    }
    for (at, step) in steps.iter().enumerate() {
        let named = |ids: &[ValueId]| -> Vec<ValueId> {
            let ids = ids.iter().copied().filter(|id| *id != ValueId::NONE);
            ids.filter(|id| span(*id).len > 0).collect()
        };
        let (reads, writes) = (named(&step.reads), named(&step.writes));
        for (i, &write) in writes.iter().enumerate() {
            let others = reads.iter().chain(&writes[..i]);
            if others.copied().any(|other| span(write).overlaps(span(other))) {
                return Some(format!("step {at} {step:?} writes {:?} and uses it", span(write)));
            }
            if span(write).space.is_read_only() {
                return Some(format!("step {at} {step:?} writes {:?}", span(write)));
            }
        }
        for &read in reads.iter().filter(|id| span(**id).space == Space::Arena) {
            let owner = root(values, read);
            if cells(span(read)).any(|c| holds.get(c).copied().flatten() != Some(owner)) {
                let problem = "which does not hold its value";
                return Some(format!("step {at} {step:?} reads {:?}, {problem}", span(read)));
            }
        }
        for &write in writes.iter().filter(|id| span(**id).space == Space::Arena) {
            set(&mut holds, cells(span(write)), root(values, write));
        }
    }
    let kept = values.iter().enumerate().filter(|(_, v)| v.to_end && v.home == ValueHome::Arena);
    for (i, value) in kept {
        let id = ValueId(i as u32);
        let lost = |c: usize| holds.get(c).copied().flatten() != Some(id);
        if value.len > 0 && cells(span(id)).any(lost) {
            return Some(format!("{:?} does not survive to the end", span(id)));
        }
    }
    None
}

fn set(holds: &mut Vec<Option<ValueId>>, cells: std::ops::Range<usize>, id: ValueId) {
    if holds.len() < cells.end {
        holds.resize(cells.end, None);
    }
    holds[cells].fill(Some(id));
}

#[cfg(test)]
mod tests {
    use super::*;
    use meristem_device::DType;

    use crate::ops::ElementwiseOp;
    use crate::plan::step::{Phase, ValueList};
    use crate::precision::ValueType;

    fn draft(read: u32, write: u32) -> Draft {
        let list = |id| ValueList::from_slice(&[ValueId(id)]);
        let op = ElementwiseOp::Pass { len: 16, accumulate: false }.into();
        let (reads, writes) = (list(read), list(write));
        Draft { op, values: ValueType::F32, reads, writes, phase: Phase::Forward }
    }

    fn span(start: usize) -> SpaceSpan {
        SpaceSpan::new(Space::Arena, DType::F32, start, 16)
    }

    #[test]
    fn each_misuse_is_found() {
        let (home, dtype) = (ValueHome::Arena, DType::F32);
        let arena = PlanValue { home, dtype, len: 16, from_start: false, to_end: false };
        let values =
            [PlanValue { from_start: true, ..arena }, arena, PlanValue { to_end: true, ..arena }];
        let steps = || vec![draft(0, 1), draft(1, 2)];
        let of = |spans: &[SpaceSpan]| misuse(&values, &steps(), spans);
        assert_eq!(of(&[span(0), span(16), span(0)]), None);
        assert!(of(&[span(0), span(0), span(16)]).unwrap().contains("and uses it"));
        assert!(of(&[span(0), span(16), span(24)]).unwrap().contains("and uses it"));
        let reads = misuse(&values, &[draft(1, 2)], &[span(0), span(16), span(32)]);
        assert!(reads.unwrap().contains("does not hold its value"));
        let lost = misuse(&values, &[draft(0, 2), draft(0, 1)], &[span(0), span(16), span(16)]);
        assert!(lost.unwrap().contains("does not survive"));
        let input = SpaceSpan::new(Space::Input(0), DType::F32, 0, 16);
        assert!(misuse(&values, &[draft(0, 1)], &[span(0), input, span(32)]).is_some());
    }
}

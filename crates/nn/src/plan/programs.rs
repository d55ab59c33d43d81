//! Steps as programs of CUDA kernels.

use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use meristem_device::{Call, Piece, Program};

use super::step::{Phase, PlanStep, SpaceUse};
use crate::ops::gpu;
use crate::space::SpaceSpan;

/// Largest number of programs cached for a plan. Each is for a range of phases, and for the first
/// row of alphas and of scores that it uses. Evaluating all 16 subsets of four modules and one more
/// row, one by one for every batch, must not evict and recreate programs.
const PROGRAMS_MAX: usize = 64;

/// Key of a plan's program: the first and the last phase, and the position of every space's first
/// byte in its argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    phases: [Phase; 2],
    starts: Vec<usize>,
}

impl Binding {
    pub(super) fn new(phases: &RangeInclusive<Phase>, bound: &[(SpaceUse, usize)]) -> Self {
        let starts = bound.iter().map(|(_, start)| *start).collect();
        Self { phases: [*phases.start(), *phases.end()], starts }
    }
}

/// The most recently used programs of a plan.
#[derive(Debug, Default)]
pub(super) struct Programs(Mutex<Vec<(Binding, Program)>>);

impl Programs {
    /// The program of a binding.
    pub(super) fn get(&self, binding: Binding, make: impl FnOnce() -> Program) -> Program {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter().position(|(of, _)| *of == binding);
        let entry = known.map_or_else(|| (binding, make()), |at| all.remove(at));
        if all.len() >= PROGRAMS_MAX {
            all.remove(0);
        }
        all.push(entry.clone());
        entry.1
    }
}

/// The calls of steps. For each argument of the launch, `bound` has its space and the position of
/// the space's first byte in the argument.
pub(crate) fn program<'a>(
    steps: impl IntoIterator<Item = &'a PlanStep>,
    bound: &[(SpaceUse, usize)],
) -> Program {
    let lies = |span: SpaceSpan| {
        let found = bound.iter().enumerate().find(|(_, (of, _))| of.space == span.space);
        let (argument, start) = match found {
            Some((argument, (_, start))) => (argument, start + span.bytes().start),
            // A launch binds only spaces that its steps use.
            None if span.len == 0 => (0, 0),
            None => unreachable!("a launch binds what its steps use: {:?}", span.space),
        };
        Piece { argument, start, len: span.len }
    };
    let calls = steps.into_iter().flat_map(|step| {
        let calls = gpu::emit(&step.op, step.values).into_iter();
        calls.map(|call| {
            call.place(|written, at| lies(if written { step.writes[at] } else { step.reads[at] }))
        })
    });
    calls.collect::<Vec<Call>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_used_last_are_kept() {
        let programs = Programs::default();
        let binding = |start| Binding { phases: [Phase::Forward; 2], starts: vec![start] };
        let made = |start| {
            let mut made = false;
            programs.get(binding(start), || {
                made = true;
                Program::from(vec![])
            });
            made
        };
        assert!(made(0) && made(1) && !made(0) && !made(1));
        assert!((2..=PROGRAMS_MAX).all(made), "as many more as there is room for, and one");
        assert!(!made(1) && made(0), "the one that was used longest ago went");
    }
}

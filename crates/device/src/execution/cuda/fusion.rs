//! Fusion of several launches into one: their programs become branches of a graph, and their
//! arguments one record.

use smallvec::SmallVec;

use super::graph::{Branch, MEMBERS_MAX};
use super::program::BoundProgram;
use super::task::{CudaTask, TaskAct};
use crate::execution::args::LaunchRecord;
use crate::execution::call::Program;
use crate::ground::sync::Arc;

/// Independent tasks, fused into one.
pub(super) struct Fusion {
    /// The arguments of all tasks: by branch, then by argument, then by member, as in the tables of
    /// a graph. All other fields are of the first task.
    pub(super) record: LaunchRecord,
    pub(super) branches: Vec<Branch>,
}

impl Fusion {
    /// Fuses tasks that [name their pieces](CudaTask::names_pieces); `None` without any.
    pub(super) fn from_tasks(tasks: Vec<CudaTask>) -> Option<Fusion> {
        let tasks = tasks.into_iter().map(|CudaTask { record, act }| match act {
            TaskAct::Calls(program, bound) => {
                (Branch { program, bound, members: 1, args: record.args.len() }, record)
            }
            _ => unreachable!("only calls name their pieces"),
        });
        let groups = grouped(tasks);
        let LaunchRecord { operation, site, isa, ref call, .. } = *groups.first()?.1.first()?;
        let mut record = LaunchRecord {
            operation,
            site,
            isa,
            call: call.clone(),
            args: SmallVec::new(),
            scratch: None,
        };
        let branches = groups.into_iter().map(|(branch, members)| {
            let mut members: Vec<_> = members.into_iter().map(|of| of.args.into_iter()).collect();
            for _ in 0..branch.args {
                record.args.extend(members.iter_mut().filter_map(Iterator::next));
            }
            branch
        });
        let branches = branches.collect();
        Some(Fusion { record, branches })
    }
}

/// The branches of a graph of programs, each with its number of arguments.
pub(super) fn branches(programs: Vec<(Program, Arc<BoundProgram>, usize)>) -> Vec<Branch> {
    let alone = |(program, bound, args)| (Branch { program, bound, members: 1, args }, ());
    grouped(programs.into_iter().map(alone)).into_iter().map(|(branch, _)| branch).collect()
}

/// Groups branches of one member each into branches of several members, with the data of the
/// members in order.
fn grouped<T>(all: impl Iterator<Item = (Branch, T)>) -> Vec<(Branch, Vec<T>)> {
    let mut groups: Vec<(Branch, Vec<T>)> = vec![];
    for (branch, of) in all {
        let open = groups
            .iter_mut()
            .find(|(known, _)| known.is_alike(&branch) && known.members < MEMBERS_MAX);
        match open {
            Some((known, members)) => {
                known.members += 1;
                members.push(of);
            }
            None => groups.push((branch, vec![of])),
        }
    }
    groups
}

//! Several launches as one: their programs as branches of a graph, their arguments in one record.

use super::graph::{Branch, MEMBERS_MAX};
use super::task::{Task, TaskAct};
use crate::execution::args::Record;
use smallvec::SmallVec;

/// Tasks that have nothing to do with one another, as one.
pub(super) struct Fusion {
    /// Arguments of all: by branch, then by argument, then by member, as in the tables of a graph.
    /// The rest is that of the first task.
    pub(super) record: Record,
    pub(super) branches: Vec<Branch>,
}

impl Fusion {
    /// Fuses tasks that are [placed](Task::is_placed); `None` without any.
    pub(super) fn of(tasks: Vec<Task>) -> Option<Fusion> {
        let mut groups: Vec<(Branch, Vec<Record>)> = vec![];
        for Task { record, act } in tasks {
            let TaskAct::Calls(program, bound) = act else {
                unreachable!("only calls are placed");
            };
            let branch = Branch { program, bound, members: 1, args: record.args.len() };
            let open = groups
                .iter_mut()
                .find(|(known, members)| known.is_alike(&branch) && members.len() < MEMBERS_MAX);
            match open {
                Some((_, members)) => members.push(record),
                None => groups.push((branch, vec![record])),
            }
        }
        let Record { operation, site, isa, ref asked, .. } = *groups.first()?.1.first()?;
        let mut record =
            Record { operation, site, isa, asked: asked.clone(), args: SmallVec::new() };
        let branches = groups.into_iter().map(|(branch, members)| {
            let (args, members_len) = (branch.args, members.len());
            let mut members: Vec<_> = members.into_iter().map(|of| of.args.into_iter()).collect();
            for _ in 0..args {
                record.args.extend(members.iter_mut().filter_map(Iterator::next));
            }
            Branch { members: members_len, ..branch }
        });
        let branches = branches.collect();
        Some(Fusion { record, branches })
    }
}

//! The slow reference check: every command is a node of a graph, every access is kept, and order is
//! reachability. For the same inputs it must find the same launches racy as the sanitizer.

use std::ops::Range;

use super::Sanitizer;
use super::clock::StreamClock;
use crate::ground::AccessKind;
use crate::ground::sync::{Arc, lock};
use crate::hooks::{CommandPosition, SubmittedLaunch, Touched};

/// A command: stream and number.
type CommandId = (u64, u64);

/// An access: block, bytes, kind, storage.
pub(super) type LoggedAccess = (usize, Range<usize>, AccessKind, u64);

/// An input of the sanitizer.
#[derive(Debug, Clone)]
pub(super) enum LogStep {
    Submit { at: CommandId, after: Vec<CommandId>, accesses: Vec<LoggedAccess>, racy: bool },
    Wait { at: CommandId, after: Vec<CommandId> },
    HostSaw(CommandId),
}

/// The id of a command, if its device has a sanitizer.
fn place(at: CommandPosition<'_>) -> Option<CommandId> {
    let clock: &StreamClock = at.stream.state()?;
    Some((Arc::as_ptr(clock.tag()).addr() as u64, at.seq))
}

fn places(after: &[CommandPosition<'_>]) -> Vec<CommandId> {
    after.iter().filter_map(|at| place(*at)).collect()
}

impl Sanitizer {
    pub(super) fn log_submission(&self, launch: &SubmittedLaunch<'_>, racy: bool) {
        let Some(at) = place(launch.at) else { return };
        let accesses =
            launch.touched.iter().map(|Touched { allocation, address, access, bytes }| {
                (*address as usize, bytes.clone(), *access, allocation.id)
            });
        let (after, accesses) = (places(launch.after), accesses.collect());
        lock(&self.log).push(LogStep::Submit { at, after, accesses, racy });
    }

    pub(super) fn log_wait(&self, at: CommandPosition<'_>, after: &[CommandPosition<'_>]) {
        let Some(at) = place(at) else { return };
        lock(&self.log).push(LogStep::Wait { at, after: places(after) });
    }

    pub(super) fn log_sight(&self, at: CommandPosition<'_>) {
        lock(&self.log).extend(place(at).map(LogStep::HostSaw));
    }

    pub(super) fn log(&self) -> Vec<LogStep> {
        lock(&self.log).clone()
    }
}

/// A graph of commands that were enqueued, in the order of submission.
#[derive(Default)]
struct OrderGraph {
    /// Position, direct predecessors, and accesses of each node.
    nodes: Vec<(CommandId, Vec<usize>, Vec<LoggedAccess>)>,
    /// Commands whose end the host saw. Not nodes, because a wait before a launch is a command
    /// without a node.
    seen: Vec<CommandId>,
}

impl OrderGraph {
    /// The last node of the stream up to this position.
    fn last_until(&self, (stream, seq): CommandId) -> Option<usize> {
        self.nodes.iter().rposition(|(at, ..)| at.0 == stream && at.1 <= seq)
    }

    /// The direct predecessors of a command that waits for `after`.
    fn parents(&self, at: CommandId, after: &[CommandId]) -> Vec<usize> {
        let own = [(at.0, u64::MAX)];
        own.iter().chain(after).chain(&self.seen).filter_map(|&p| self.last_until(p)).collect()
    }

    fn reachable(&self, from: &[usize]) -> Vec<bool> {
        let mut reached = vec![false; self.nodes.len()];
        let mut todo = from.to_vec();
        while let Some(node) = todo.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                todo.extend(&self.nodes[node].1);
            }
        }
        reached
    }

    fn is_racy(&self, parents: &[usize], accesses: &[LoggedAccess]) -> bool {
        let before = self.reachable(parents);
        let unordered = self.nodes.iter().zip(before).filter(|(_, before)| !before);
        let mut earlier = unordered.flat_map(|((.., earlier), _)| earlier);
        earlier.any(|(block, bytes, access, id)| {
            accesses.iter().any(|(other, theirs, how, storage)| {
                let overlaps = bytes.start < theirs.end && theirs.start < bytes.end;
                let conflicts =
                    *access == AccessKind::Write || *how == AccessKind::Write || id != storage;
                block == other && overlaps && conflicts
            })
        })
    }
}

/// Verdicts on every launch: the sanitizer's and the graph's.
pub(super) fn verdicts(log: &[LogStep]) -> Vec<(bool, bool)> {
    let mut graph = OrderGraph::default();
    let mut verdicts = Vec::new();
    for step in log {
        match step {
            LogStep::HostSaw(place) => graph.seen.push(*place),
            LogStep::Wait { at, after } => {
                let parents = graph.parents(*at, after);
                graph.nodes.push((*at, parents, Vec::new()));
            }
            LogStep::Submit { at, after, accesses, racy } => {
                let parents = graph.parents(*at, after);
                let expected = graph.is_racy(&parents, accesses);
                verdicts.push((*racy, expected));
                if !racy {
                    graph.nodes.push((*at, parents, accesses.clone()));
                }
            }
        }
    }
    verdicts
}

/// Test of the reference: a race, and the same with each kind of order.
#[test]
fn the_reference_knows_a_race() {
    let bytes = 0..8;
    let write = |at: CommandId, after: &[CommandId]| LogStep::Submit {
        at,
        after: after.to_vec(),
        accesses: vec![(64, bytes.clone(), AccessKind::Write, 1)],
        racy: false,
    };
    let racy = |log: &[LogStep]| verdicts(log).last().unwrap().1;
    let (a, b, c) = (1, 2, 3);
    assert!(racy(&[write((a, 1), &[]), write((b, 1), &[])]));
    assert!(!racy(&[write((a, 1), &[]), write((a, 2), &[])]));
    assert!(!racy(&[write((a, 1), &[]), write((b, 2), &[(a, 1)])]));
    assert!(!racy(&[write((a, 1), &[]), LogStep::HostSaw((a, 1)), write((b, 1), &[])]));
    let chain = |last| {
        [
            write((a, 1), &[]),
            LogStep::Wait { at: (c, 1), after: vec![(a, 1)] },
            LogStep::Wait { at: (c, 2), after: vec![] },
            write((b, 1), &[(c, last)]),
        ]
    };
    assert!(!racy(&chain(1)));
    assert!(racy(&chain(0)));
}

//! The slow reference check: every command is a node of a graph, every access is kept, and order is
//! reachability. From the sanitizer's inputs, it must find the same launches racy.

use super::Sanitizer;
use super::clock::StreamClock;
use crate::ground::Use;
use crate::ground::sync::{Arc, lock};
use crate::hooks::{Launched, Position, Touched};
use std::ops::Range;

/// A command: stream and number.
type Place = (u64, u64);

/// An access: block, bytes, kind, storage.
pub(super) type Access = (usize, Range<usize>, Use, u64);

/// An input of the sanitizer.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Submit { at: Place, after: Vec<Place>, accesses: Vec<Access>, racy: bool },
    Wait { at: Place, after: Vec<Place> },
    HostSaw(Place),
}

/// A position, if its device has a sanitizer.
fn place(at: Position<'_>) -> Option<Place> {
    let clock: &StreamClock = at.stream.note()?;
    Some((Arc::as_ptr(clock.tag()).addr() as u64, at.seq))
}

fn places(after: &[Position<'_>]) -> Vec<Place> {
    after.iter().filter_map(|at| place(*at)).collect()
}

impl Sanitizer {
    pub(super) fn log_submission(&self, launch: &Launched<'_>, racy: bool) {
        let Some(at) = place(launch.at) else { return };
        let accesses =
            launch.touched.iter().map(|Touched { allocation, address, usage, bytes }| {
                (*address as usize, bytes.clone(), *usage, allocation.id)
            });
        let (after, accesses) = (places(launch.after), accesses.collect());
        lock(&self.log).push(Step::Submit { at, after, accesses, racy });
    }

    pub(super) fn log_wait(&self, at: Position<'_>, after: &[Position<'_>]) {
        let Some(at) = place(at) else { return };
        lock(&self.log).push(Step::Wait { at, after: places(after) });
    }

    pub(super) fn log_sight(&self, at: Position<'_>) {
        lock(&self.log).extend(place(at).map(Step::HostSaw));
    }

    pub(super) fn log(&self) -> Vec<Step> {
        lock(&self.log).clone()
    }
}

/// A graph of commands that were enqueued, in the order of submission.
#[derive(Default)]
struct Graph {
    /// Position, direct predecessors, and accesses of each node.
    nodes: Vec<(Place, Vec<usize>, Vec<Access>)>,
    /// Ends that the host saw: positions, not nodes, as there may be waits in between.
    seen: Vec<Place>,
}

impl Graph {
    /// The last node of the stream up to this position.
    fn last_until(&self, (stream, seq): Place) -> Option<usize> {
        self.nodes.iter().rposition(|(at, ..)| at.0 == stream && at.1 <= seq)
    }

    /// The direct predecessors of a command that waits for these.
    fn parents(&self, at: Place, after: &[Place]) -> Vec<usize> {
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

    fn is_racy(&self, parents: &[usize], accesses: &[Access]) -> bool {
        let before = self.reachable(parents);
        let unordered = self.nodes.iter().zip(before).filter(|(_, before)| !before);
        let mut earlier = unordered.flat_map(|((.., earlier), _)| earlier);
        earlier.any(|(block, bytes, usage, id)| {
            accesses.iter().any(|(other, theirs, how, storage)| {
                let overlaps = bytes.start < theirs.end && theirs.start < bytes.end;
                let conflicts = *usage == Use::Write || *how == Use::Write || id != storage;
                block == other && overlaps && conflicts
            })
        })
    }
}

/// Verdicts on every launch: the sanitizer's and the graph's.
pub(super) fn verdicts(log: &[Step]) -> Vec<(bool, bool)> {
    let mut graph = Graph::default();
    let mut verdicts = Vec::new();
    for step in log {
        match step {
            Step::HostSaw(place) => graph.seen.push(*place),
            Step::Wait { at, after } => {
                let parents = graph.parents(*at, after);
                graph.nodes.push((*at, parents, Vec::new()));
            }
            Step::Submit { at, after, accesses, racy } => {
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
    let write = |at: Place, after: &[Place]| Step::Submit {
        at,
        after: after.to_vec(),
        accesses: vec![(64, bytes.clone(), Use::Write, 1)],
        racy: false,
    };
    let racy = |log: &[Step]| verdicts(log).last().unwrap().1;
    let (a, b, c) = (1, 2, 3);
    assert!(racy(&[write((a, 1), &[]), write((b, 1), &[])]));
    assert!(!racy(&[write((a, 1), &[]), write((a, 2), &[])]));
    assert!(!racy(&[write((a, 1), &[]), write((b, 2), &[(a, 1)])]));
    assert!(!racy(&[write((a, 1), &[]), Step::HostSaw((a, 1)), write((b, 1), &[])]));
    let chain = |last| {
        [
            write((a, 1), &[]),
            Step::Wait { at: (c, 1), after: vec![(a, 1)] },
            Step::Wait { at: (c, 2), after: vec![] },
            write((b, 1), &[(c, last)]),
        ]
    };
    assert!(!racy(&chain(1)));
    assert!(racy(&chain(0)));
}

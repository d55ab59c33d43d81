//! The shadow of a block: the latest accesses to each of its bytes.
//!
//! Invariants
//! - Segments are sorted, disjoint, not empty, and no two adjacent ones are equal.
//! - A dropped access is ordered before a stored one: a write drops every earlier access, a read
//!   drops every earlier read that is ordered before it. So work ordered after all stored accesses
//!   is ordered after all earlier accesses, and a later, ordered access never hides a race. The
//!   exception is a block with more than `MOST_SEGMENTS` segments.

use std::cmp::{Ordering, Reverse};
use std::ops::Range;
use std::panic::Location;

use smallvec::SmallVec;

use super::clock::{Tag, VectorClock};
use crate::ground::sync::{Arc, AtomicU64};
use crate::ground::{AccessKind, Owner, RaceAccess};

/// Largest number of segments of a block; above it, the least recently used half is dropped, and a
/// race with an access in it is missed.
const MOST_SEGMENTS: usize = 4096;

/// A storage, as in reports.
#[derive(Debug)]
pub(super) struct StorageOrigin {
    pub(super) id: u64,
    pub(super) site: &'static Location<'static>,
    pub(super) owner: Owner,
    /// Number of the last submission before the storage was freed; 0 while it lives.
    pub(super) freed_after: AtomicU64,
}

/// A submitted access.
#[derive(Debug)]
pub(super) struct ShadowAccess {
    pub(super) stream: Arc<Tag>,
    pub(super) seq: u64,
    /// Its number among all submissions of the device.
    pub(super) order: u64,
    pub(super) operation: &'static str,
    pub(super) site: &'static Location<'static>,
    pub(super) access: AccessKind,
    pub(super) origin: Arc<StorageOrigin>,
}

impl ShadowAccess {
    /// The access, as in reports.
    pub(super) fn report(&self) -> RaceAccess {
        RaceAccess {
            operation: self.operation,
            site: self.site,
            stream: self.stream.name.clone(),
            seq: self.seq,
            order: self.order,
            writes: self.access == AccessKind::Write,
            origin: self.origin.site,
            owner: self.origin.owner,
        }
    }
}

type SegmentReads = SmallVec<[Arc<ShadowAccess>; 2]>;

/// Bytes with the same history.
#[derive(Debug, Clone)]
struct Segment {
    bytes: Range<usize>,
    write: Option<Arc<ShadowAccess>>,
    /// Reads since the write.
    reads: SegmentReads,
}

impl Segment {
    fn marks(&self) -> impl Iterator<Item = &Arc<ShadowAccess>> {
        self.write.iter().chain(&self.reads)
    }

    fn has_history_of(&self, other: &Segment) -> bool {
        let same = |(a, b): (&Arc<ShadowAccess>, &Arc<ShadowAccess>)| Arc::ptr_eq(a, b);
        self.write.is_some() == other.write.is_some()
            && self.reads.len() == other.reads.len()
            && self.marks().zip(other.marks()).all(same)
    }
}

/// The shadow of a block; see the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    segments: Vec<Segment>,
    /// The current storage of the block.
    origin: Option<Arc<StorageOrigin>>,
}

impl Shadow {
    /// The storage with this id, which becomes the current storage of the block; `make` describes
    /// it if it was another one before.
    pub(super) fn origin(
        &mut self,
        id: u64,
        make: impl FnOnce() -> StorageOrigin,
    ) -> Arc<StorageOrigin> {
        match &self.origin {
            Some(origin) if origin.id == id => origin.clone(),
            _ => self.origin.insert(Arc::new(make())).clone(),
        }
    }

    /// The storage with this id, if it is the last one that accessed the block.
    pub(super) fn used_by(&self, id: u64) -> Option<&StorageOrigin> {
        self.origin.as_deref().filter(|origin| origin.id == id)
    }

    /// An earlier access that conflicts with this access and is not in `before`, with the bytes
    /// that both touch. Accesses of two storages always conflict: between them the memory was
    /// freed, which counts as a write.
    pub(super) fn conflict(
        &self,
        bytes: &Range<usize>,
        (access, id): (AccessKind, u64),
        (stream, before): (&Arc<Tag>, &VectorClock),
    ) -> Option<(Arc<ShadowAccess>, Range<usize>)> {
        let first = self.segments.partition_point(|segment| segment.bytes.end <= bytes.start);
        let touched = self.segments[first..].iter().take_while(|s| s.bytes.start < bytes.end);
        for segment in touched {
            let found = segment.marks().find(|mark| {
                let conflicts = access == AccessKind::Write
                    || mark.access == AccessKind::Write
                    || mark.origin.id != id;
                conflicts
                    && !Arc::ptr_eq(&mark.stream, stream)
                    && !before.covers(&mark.stream, mark.seq)
            });
            if let Some(mark) = found {
                let Range { start, end } = segment.bytes;
                return Some((mark.clone(), start.max(bytes.start)..end.min(bytes.end)));
            }
        }
        None
    }

    /// Records an access that is ordered after every conflicting access.
    pub(super) fn record(
        &mut self,
        bytes: &Range<usize>,
        mark: &Arc<ShadowAccess>,
        before: &VectorClock,
    ) {
        let from = self.split(bytes.start);
        let to = self.split(bytes.end);
        let inside = self.segments.splice(from..to, []);
        let mut new: Vec<Segment> = Vec::new();
        if mark.access == AccessKind::Write {
            drop(inside);
            new.push(Segment {
                bytes: bytes.clone(),
                write: Some(mark.clone()),
                reads: SegmentReads::new(),
            });
        } else {
            let mut at = bytes.start;
            let unused = |bytes| Segment {
                bytes,
                write: None,
                reads: SegmentReads::from_elem(mark.clone(), 1),
            };
            for mut segment in inside {
                if at < segment.bytes.start {
                    new.push(unused(at..segment.bytes.start));
                }
                at = segment.bytes.end;
                segment.reads.retain(|read| {
                    !Arc::ptr_eq(&read.stream, &mark.stream)
                        && !before.covers(&read.stream, read.seq)
                });
                segment.reads.push(mark.clone());
                new.push(segment);
            }
            if at < bytes.end {
                new.push(unused(at..bytes.end));
            }
        }
        self.segments.splice(from..from, new);
        self.coalesce();
    }

    /// Splits the segment at `at`; returns the index of the first segment from `at` on.
    fn split(&mut self, at: usize) -> usize {
        let i = self.segments.partition_point(|segment| segment.bytes.end <= at);
        match self.segments.get_mut(i) {
            Some(segment) if segment.bytes.start < at => {
                let mut after = segment.clone();
                after.bytes.start = at;
                segment.bytes.end = at;
                self.segments.insert(i + 1, after);
                i + 1
            }
            _ => i,
        }
    }

    /// Merges equal adjacent segments, and drops the least recently used half if there are too
    /// many.
    fn coalesce(&mut self) {
        self.segments.dedup_by(|after, before| {
            let same = before.bytes.end == after.bytes.start && before.has_history_of(after);
            if same {
                before.bytes.end = after.bytes.end;
            }
            same
        });
        if self.segments.len() > MOST_SEGMENTS {
            let used = |segment: &Segment| segment.marks().map(|mark| mark.order).max();
            let mut orders: Vec<_> = self.segments.iter().map(used).collect();
            orders.sort_unstable_by_key(|order| Reverse(*order));
            let kept = orders.len() / 2;
            let oldest = orders[kept - 1];
            // One access may have used more than half of all segments.
            let mut equal = kept - orders.partition_point(|order| *order > oldest);
            self.segments.retain(|segment| match used(segment).cmp(&oldest) {
                Ordering::Less => false,
                Ordering::Greater => true,
                Ordering::Equal => {
                    let is_kept = equal > 0;
                    equal = equal.saturating_sub(1);
                    is_kept
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::clock::StreamClock;
    use super::*;

    /// A read of a whole block makes all its segments equally old; half of them are kept.
    #[test]
    fn half_of_equally_old_segments_are_kept() {
        let stream = StreamClock::new(&"a".into());
        let site = Location::caller();
        let origin = Arc::new(StorageOrigin {
            id: 1,
            site,
            owner: Owner::Other,
            freed_after: AtomicU64::new(0),
        });
        let access = |order: usize, access| {
            Arc::new(ShadowAccess {
                stream: stream.tag().clone(),
                seq: order as u64 + 1,
                order: order as u64,
                operation: "test",
                site,
                access,
                origin: origin.clone(),
            })
        };
        let mut shadow = Shadow::default();
        let before = VectorClock::default();
        for write in 0..MOST_SEGMENTS {
            let bytes = 2 * write..2 * write + 1;
            shadow.record(&bytes, &access(write, AccessKind::Write), &before);
        }
        assert_eq!(shadow.segments.len(), MOST_SEGMENTS);
        let whole = 0..2 * MOST_SEGMENTS;
        shadow.record(&whole, &access(MOST_SEGMENTS, AccessKind::Read), &before);
        assert_eq!(shadow.segments.len(), MOST_SEGMENTS);
        let other = StreamClock::new(&"b".into());
        let found = shadow.conflict(&whole, (AccessKind::Write, 1), (other.tag(), &before));
        assert!(found.is_some());
    }
}

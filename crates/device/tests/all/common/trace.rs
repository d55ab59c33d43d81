//! A reader of traces, and their invariants.

#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap")]

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::Value;

/// A slice, or a host span, of one lane. Times in nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Slice {
    pub name: String,
    pub category: String,
    pub start: u64,
    pub end: u64,
    /// Spans around it on its lane.
    pub depth: usize,
    pub args: Value,
}

/// The events of a file by lane, checked: every lane has a name and a process with a name, slices
/// of streams do not overlap, host spans nest, arrows go from inside of one slice to inside of
/// another and never back in time, and the totals are right.
pub(crate) struct Read {
    pub lanes: BTreeMap<String, Vec<Slice>>,
    /// Arrows from one (lane, slice) to another.
    pub arrows: Vec<[(String, Slice); 2]>,
    /// Bytes by owner after each change.
    pub memory: Vec<BTreeMap<String, u64>>,
    pub dropped: u64,
    pub notes: Vec<String>,
}

/// A time, and the process and thread of a track.
type End = (u64, (u64, u64));

fn ns(event: &Value, key: &str) -> u64 {
    (event[key].as_f64().unwrap_or_else(|| panic!("no {key} in {event}")) * 1000.0).round() as u64
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}

impl Read {
    pub(crate) fn file(path: &Path) -> Read {
        let text = std::fs::read_to_string(path).unwrap();
        Read::document(&serde_json::from_str(&text).expect("whole JSON"))
    }

    pub(crate) fn document(document: &Value) -> Read {
        let events = document["traceEvents"].as_array().unwrap();
        let mut names: HashMap<(u64, u64), String> = HashMap::new();
        let mut processes: HashMap<u64, String> = HashMap::new();
        let mut tracks: HashMap<(u64, u64), Vec<Slice>> = HashMap::new();
        let mut open: HashMap<(u64, u64), Vec<usize>> = HashMap::new();
        let mut flows: BTreeMap<u64, [Option<End>; 2]> = BTreeMap::new();
        let (mut memory, mut notes, mut counted) = (vec![], vec![], 0);
        for event in events {
            let (pid, tid) = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            let track = tracks.entry((pid, tid)).or_default();
            let slice = |end: u64, depth| Slice {
                name: text(&event["name"]),
                category: text(&event["cat"]),
                start: ns(event, "ts"),
                end,
                depth,
                args: event["args"].clone(),
            };
            match event["ph"].as_str().unwrap() {
                "M" if event["name"] == "process_name" => {
                    assert_eq!(processes.insert(pid, text(&event["args"]["name"])), None);
                }
                "M" => assert_eq!(names.insert((pid, tid), text(&event["args"]["name"])), None),
                "X" => {
                    track.push(slice(ns(event, "ts") + ns(event, "dur"), 0));
                    counted += 1;
                }
                "B" => {
                    let open = open.entry((pid, tid)).or_default();
                    let last = track.iter().map(|slice| slice.start).max().unwrap_or(0);
                    assert!(last <= ns(event, "ts"), "{event} goes back in time");
                    track.push(slice(u64::MAX, open.len()));
                    open.push(track.len() - 1);
                    counted += 1;
                }
                "E" => {
                    let begun = open.get_mut(&(pid, tid)).and_then(Vec::pop).expect("a beginning");
                    track[begun].end = ns(event, "ts");
                    assert!(track[begun].start <= track[begun].end);
                    assert!(track[begun + 1..].iter().all(|inner| inner.end <= track[begun].end));
                }
                "C" => {
                    let bytes = event["args"].as_object().unwrap().iter();
                    memory.push(bytes.map(|(k, v)| (k.clone(), v.as_u64().unwrap())).collect());
                    counted += 1;
                }
                ph @ ("s" | "f") => {
                    let ends = flows.entry(event["id"].as_u64().unwrap()).or_default();
                    let end = &mut ends[usize::from(ph == "f")];
                    assert_eq!(end.replace((ns(event, "ts"), (pid, tid))), None);
                }
                "i" => notes.push(text(&event["name"])),
                ph => panic!("unexpected event {ph}"),
            }
        }
        assert_eq!(document["otherData"]["events"], counted);
        // Slices of streams may come in any order; viewers sort them.
        for track in tracks.values_mut().filter(|track| track.iter().all(|s| s.depth == 0)) {
            track.sort_by_key(|slice| (slice.start, slice.end));
            let apart = |pair: &[Slice]| pair[0].end <= pair[1].start;
            track.windows(2).for_each(|pair| assert!(apart(pair), "these overlap: {pair:?}"));
        }
        let slice_at = |end: Option<End>| {
            let (at, track) = end.expect("both ends of an arrow");
            let inside = |s: &&Slice| s.start <= at && at < s.end.max(s.start + 1);
            let slice = tracks[&track].iter().find(inside);
            (names[&track].clone(), slice.expect("an arrow ends in a slice").clone())
        };
        let arrows: Vec<_> = flows.values().map(|&ends| ends.map(slice_at)).collect();
        for [from, to] in &arrows {
            assert!(from.1.end <= to.1.end, "{from:?} is waited for by {to:?}");
        }
        tracks.retain(|_, track| !track.is_empty());
        assert!(tracks.keys().all(|track| processes.contains_key(&track.0)));
        let lanes = tracks.into_iter().map(|(track, slices)| (names[&track].clone(), slices));
        let dropped = document["otherData"]["dropped"].as_u64().unwrap();
        Read { lanes: lanes.collect(), arrows, memory, dropped, notes }
    }

    /// Slices of a category over all lanes.
    pub(crate) fn of(&self, category: &str) -> Vec<&Slice> {
        self.lanes.values().flatten().filter(|slice| slice.category == category).collect()
    }
}

//! Random programs. On the correct engine they give the sequential result and no report. On engines
//! with planted faults exactly the launches that the slow reference check finds racy are refused,
//! and the accepted launches still give the sequential result.

use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::sample::Index;
use proptest::test_runner::Config;

use super::reference::verdicts;
use crate::ground::fault::{EngineFault, EngineFaults};
use crate::ground::{Error, Result};
use crate::handles::{Device, DeviceOptions, Environment};
use crate::{Args, DeviceId, Event, Owner, Stream, Tensor, read_back_as};

/// A part of a tensor; indices are reduced to the number of existing tensors and elements.
#[derive(Debug, Clone)]
struct TensorPart {
    tensor: Index,
    /// One end, and the other.
    from: Index,
    to: Index,
}

/// A step of a random program.
#[derive(Debug, Clone)]
enum ProgramStep {
    New {
        stream: Index,
        len: usize,
        value: Option<u32>,
    },
    Mix {
        stream: Index,
        to: TensorPart,
        from: Vec<TensorPart>,
        busy: u32,
    },
    Drop {
        tensor: Index,
    },
    Record {
        stream: Index,
    },
    Wait {
        stream: Index,
        event: Index,
    },
    Synchronize {
        stream: Index,
    },
    SynchronizeEvent {
        event: Index,
    },
    Ask {
        event: Index,
    },
    Look {
        tensor: Index,
    },
    /// The stream's last handle is dropped, and the stream is created again.
    Reopen {
        stream: Index,
    },
}

fn part() -> impl Strategy<Value = TensorPart> {
    let index = any::<Index>;
    (index(), index(), index()).prop_map(|(tensor, from, to)| TensorPart { tensor, from, to })
}

fn op() -> impl Strategy<Value = ProgramStep> {
    let index = any::<Index>;
    prop_oneof![
        4 => (index(), 1usize..40, any::<Option<u32>>())
            .prop_map(|(stream, len, value)| ProgramStep::New { stream, len, value }),
        12 => (index(), part(), proptest::collection::vec(part(), 0..3), 0u32..4)
            .prop_map(|(stream, to, from, busy)| ProgramStep::Mix { stream, to, from, busy }),
        3 => index().prop_map(|tensor| ProgramStep::Drop { tensor }),
        2 => index().prop_map(|stream| ProgramStep::Record { stream }),
        2 => (index(), index()).prop_map(|(stream, event)| ProgramStep::Wait { stream, event }),
        1 => index().prop_map(|stream| ProgramStep::Synchronize { stream }),
        1 => index().prop_map(|event| ProgramStep::SynchronizeEvent { event }),
        1 => index().prop_map(|event| ProgramStep::Ask { event }),
        1 => index().prop_map(|tensor| ProgramStep::Look { tensor }),
    ]
}

/// Generates operations as [`op`], and streams that are dropped and created.
fn op_with_ends() -> impl Strategy<Value = ProgramStep> {
    prop_oneof![
        20 => op(),
        1 => any::<Index>().prop_map(|stream| ProgramStep::Reopen { stream }),
    ]
}

fn mix(to: &mut [u32], from: &[&[u32]]) {
    for (i, x) in to.iter_mut().enumerate() {
        let read = from.iter().map(|f| f[i % f.len()]);
        *x = read.fold(x.wrapping_mul(3).wrapping_add(i as u32), u32::wrapping_add);
    }
}

/// Runs a program on a device and on plain vectors. A refused operation is skipped on both.
struct ProgramRunner {
    device: Device,
    streams: Vec<Stream>,
    tensors: Vec<(Tensor, Vec<u32>)>,
    events: Vec<Event>,
    refused: usize,
}

impl ProgramRunner {
    fn new(threads: usize, streams: usize, faults: &[EngineFault]) -> Self {
        let environment = Environment {
            sanitize: true,
            faults: EngineFaults::planted(faults),
            ..Environment::default()
        };
        let options = DeviceOptions { threads, ..DeviceOptions::default() };
        let device = Device::open_in(DeviceId::Cpu(0), &options, environment).unwrap();
        let streams = (0..streams).map(|i| device.stream(&format!("s{i}"))).collect();
        ProgramRunner { device, streams, tensors: Vec::new(), events: Vec::new(), refused: 0 }
    }

    /// The result, unless the operation was refused as a race.
    fn accepted<T>(&mut self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(Error::Race(_)) => {
                self.refused += 1;
                None
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn stream(&self, index: &Index) -> Stream {
        index.get(&self.streams).clone()
    }

    fn run(&mut self, op: &ProgramStep) {
        match op {
            ProgramStep::New { stream, len, value } => {
                self.make(&self.stream(stream), *len, *value)
            }
            ProgramStep::Record { stream } => self.events.push(self.stream(stream).record()),
            ProgramStep::Synchronize { stream } => self.stream(stream).synchronize().unwrap(),
            ProgramStep::Reopen { stream } => {
                let i = stream.index(self.streams.len());
                self.streams[i] = self.device.stream(&format!("again{i}"));
            }
            ProgramStep::Wait { event, .. }
            | ProgramStep::SynchronizeEvent { event }
            | ProgramStep::Ask { event } => {
                if self.events.is_empty() {
                    return;
                }
                let event = event.get(&self.events);
                match op {
                    ProgramStep::Wait { stream, .. } => self.stream(stream).wait(event).unwrap(),
                    ProgramStep::Ask { .. } => drop(event.is_done()),
                    _ => event.synchronize().unwrap(),
                }
            }
            _ if self.tensors.is_empty() => {}
            ProgramStep::Drop { tensor } => {
                let i = tensor.index(self.tensors.len());
                self.tensors.swap_remove(i);
            }
            ProgramStep::Look { tensor } => {
                let (tensor, expected) = tensor.get(&self.tensors).clone();
                if let Some(seen) = self.accepted(tensor.to_vec::<u32>()) {
                    assert_eq!(seen, expected);
                }
            }
            ProgramStep::Mix { stream, to, from, busy } => {
                self.mix(&self.stream(stream), to, from, *busy)
            }
        }
    }

    fn make(&mut self, stream: &Stream, len: usize, value: Option<u32>) {
        let values = vec![value.unwrap_or(0); len];
        let tensor = match value {
            Some(_) => Tensor::from_slice(stream, &values, [len], Owner::Other),
            None => Tensor::zeros(stream, [len], crate::DType::U32, Owner::Other),
        };
        if let Some(tensor) = self.accepted(tensor) {
            self.tensors.push((tensor, values));
        }
    }

    /// The tensor, and the range of its elements.
    fn part(&self, part: &TensorPart) -> (usize, std::ops::Range<usize>) {
        let i = part.tensor.index(self.tensors.len());
        let len = self.tensors[i].1.len();
        let (a, b) = (part.from.index(len), part.to.index(len));
        (i, a.min(b)..a.max(b) + 1)
    }

    fn mix(&mut self, stream: &Stream, to: &TensorPart, from: &[TensorPart], busy: u32) {
        let (to, written) = self.part(to);
        let apart = |(i, read): &(usize, std::ops::Range<usize>)| {
            *i != to || read.end <= written.start || written.end <= read.start
        };
        let from: Vec<_> = from.iter().map(|part| self.part(part)).filter(apart).collect();
        let view = |i: usize, part: &std::ops::Range<usize>| {
            let whole = self.tensors[i].0.on(stream).unwrap();
            whole.view(part.start, [part.len()]).unwrap()
        };
        let reads: Vec<_> = from.iter().map(|(i, part)| view(*i, part)).collect();
        let write = view(to, &written);
        let launch = reads.iter().fold(stream.launch("mix"), |launch, x| launch.read(x));
        let launched = launch.write(&write).run(move |args: &mut Args<'_>| {
            // Different speeds give different interleavings.
            for _ in 0..busy * 3 {
                std::thread::yield_now();
            }
            let read: Vec<_> = (0..args.len() - 1).map(|i| args.read(i)).collect();
            mix(args.write(args.len() - 1), &read);
        });
        if self.accepted(launched).is_some() {
            let read: Vec<_> =
                from.iter().map(|(i, part)| self.tensors[*i].1[part.clone()].to_vec()).collect();
            let read: Vec<_> = read.iter().map(Vec::as_slice).collect();
            mix(&mut self.tensors[to].1[written], &read);
        }
    }

    /// Whether all tensors have the expected values, once all work is done.
    fn is_right(&self) -> bool {
        self.device.synchronize().unwrap();
        let all: Vec<_> = self.tensors.iter().map(|(tensor, _)| tensor).collect();
        let expected = self.tensors.iter().map(|(_, values)| values);
        read_back_as::<u32>(&all).unwrap().iter().eq(expected)
    }

    /// The sanitizer's verdict on each launch, and the reference's.
    fn verdicts(&self) -> Vec<(bool, bool)> {
        verdicts(&self.device.sanitizer().unwrap().log())
    }
}

const FAULTS: [&[EngineFault]; 6] = [
    &[EngineFault::PoolForgets],
    &[EngineFault::NoWaitForProducer],
    &[EngineFault::NoWaitForReaders],
    &[EngineFault::NoWaitForWriter, EngineFault::NoWaitForProducer],
    &[EngineFault::NoWaitForWriter],
    &[
        EngineFault::PoolForgets,
        EngineFault::NoWaitForProducer,
        EngineFault::NoWaitForReaders,
        EngineFault::NoWaitForWriter,
    ],
];

fn config(cases: u32) -> Config {
    let cases = if cfg!(miri) { 2 } else { cases };
    Config { cases, failure_persistence: None, ..Config::default() }
}

fn ops(op: impl Strategy<Value = ProgramStep>) -> impl Strategy<Value = Vec<ProgramStep>> {
    proptest::collection::vec(op, 1..if cfg!(miri) { 30 } else { 150 })
}

proptest! {
    #![proptest_config(config(100))]

    #[test]
    fn a_sound_engine_is_right_and_nothing_is_reported(
        ops in ops(op_with_ends()),
        (threads, streams) in (1usize..5, 1usize..6),
    ) {
        let mut machine = ProgramRunner::new(threads, streams, &[]);
        ops.iter().for_each(|op| machine.run(op));
        prop_assert_eq!(machine.refused, 0);
        prop_assert!(machine.is_right());
        prop_assert!(machine.device.races().is_empty());
        prop_assert!(machine.verdicts().iter().all(|verdict| *verdict == (false, false)));
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn planted_faults_are_refused_where_they_race(
        ops in ops(op()),
        (threads, streams) in (1usize..5, 2usize..6),
        faults in proptest::sample::select(&FAULTS[..]),
    ) {
        let mut machine = ProgramRunner::new(threads, streams, faults);
        ops.iter().for_each(|op| machine.run(op));
        let verdicts = machine.verdicts();
        for (n, (said, is)) in verdicts.iter().enumerate() {
            prop_assert_eq!(said, is, "launch {} of {}", n, verdicts.len());
        }
        prop_assert_eq!(verdicts.iter().filter(|(said, _)| *said).count(), machine.refused);
        prop_assert!(machine.is_right());
    }

    /// Without reuse of memory, the choice of blocks does not matter: the same launches are refused
    /// whatever the schedule.
    #[test]
    fn what_is_refused_does_not_depend_on_the_schedule(
        ops in ops(op()),
        streams in 2usize..6,
        faults in proptest::sample::select(&FAULTS[1..]),
    ) {
        let run = |threads| {
            let mut machine = ProgramRunner::new(threads, streams, faults);
            let same = |step: &&ProgramStep| {
                !matches!(step, ProgramStep::Drop { .. } | ProgramStep::Ask { .. })
            };
            ops.iter().filter(same).for_each(|op| machine.run(op));
            machine.verdicts().iter().map(|(said, _)| *said).collect::<Vec<_>>()
        };
        let one = run(1);
        prop_assert_eq!(&one, &run(2));
        prop_assert_eq!(&one, &run(4));
    }
}

/// The programs above do race, so the tests above can fail.
#[test]
fn random_programs_race_with_every_fault() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for faults in FAULTS {
        let mut refused = 0;
        for _ in 0..40 {
            let ops = ops(op()).new_tree(&mut runner).unwrap().current();
            let mut machine = ProgramRunner::new(2, 4, faults);
            ops.iter().for_each(|op| machine.run(op));
            refused += machine.refused;
        }
        assert!(refused > 0, "{faults:?}");
    }
}

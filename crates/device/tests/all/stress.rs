//! Many streams under a tight limit, and random programs: always the sequential result (S5).

use meristem_device::random::{Purpose, Rng};
use meristem_device::{Args, DType, Device, DeviceId, Event, Owner};
use meristem_device::{Stream, Tensor, read_back_as};
use proptest::prelude::{Strategy, any, proptest};
use proptest::test_runner::Config;

use crate::common::{THREADS, cpu, kernels, limited, open};

const ENVS: usize = 32;
const STEPS: u32 = if cfg!(miri) { 3 } else { 1000 };

/// One step of an env: temporaries are created and dropped on its stream and on the stream of the
/// metrics.
fn step(n: u32, stream: &Stream, side: &Stream, state: &Tensor, metric: &Tensor) {
    let len = state.numel();
    let curves = Tensor::empty(stream, [len], DType::F32, Owner::Activations).unwrap();
    let curve = stream.launch("curve").read(state).write(&curves);
    curve
        .run(|args| {
            let x = args.read::<f32>(0);
            args.write::<f32>(1).iter_mut().zip(x).for_each(|(y, x)| *y = x * (1.0 - x));
        })
        .unwrap();
    // The other stream reads it after the env has dropped its handle.
    let curves_aside = curves.on(side).unwrap();
    let total = side.launch("total").read(&curves_aside).write(metric);
    total.run(|args| args.write::<f64>(1)[0] += f64::from(sum(args.read(0)))).unwrap();
    drop(curves_aside);
    // The logistic map, in its chaotic range: a wrong bit anywhere is everywhere soon.
    let nudge = 0.05 / (1.0 + n as f32);
    let update = stream.launch("update").read(&curves).write(state);
    update
        .run(move |args| {
            let y = args.read::<f32>(0);
            args.write::<f32>(1).iter_mut().zip(y).for_each(|(x, y)| *x = 3.7 * y + nudge);
        })
        .unwrap();
}

fn sum(values: &[f32]) -> f32 {
    values.iter().sum()
}

/// All envs, each on its stream or all on one stream; returns final states and metrics.
fn run(device: &Device, one_stream: bool) -> (Vec<Vec<f32>>, Vec<Vec<f64>>) {
    let streams: Vec<_> =
        (0..if one_stream { 1 } else { ENVS }).map(|i| device.stream(&format!("{i}"))).collect();
    let side = if one_stream { streams[0].clone() } else { device.stream("metrics") };
    let of = |env: usize| &streams[env % streams.len()];
    let states: Vec<_> = (0..ENVS)
        .map(|env| {
            let mut rng = Rng::new(1, Purpose::Test, env as u64, 0);
            let start: Vec<_> = (0..200 + env % 3).map(|_| rng.uniform()).collect();
            let len = start.len();
            Tensor::from_slice(of(env), &start, [len], Owner::Parameters).unwrap()
        })
        .collect();
    let metrics: Vec<_> =
        (0..ENVS).map(|_| Tensor::zeros(&side, [1], DType::F64, Owner::Metrics).unwrap()).collect();
    for n in 0..STEPS {
        for env in 0..ENVS {
            step(n, of(env), &side, &states[env], &metrics[env]);
        }
    }
    let metrics = read_back_as(&metrics.iter().collect::<Vec<_>>()).unwrap();
    (read_back_as(&states.iter().collect::<Vec<_>>()).unwrap(), metrics)
}

#[test]
fn many_streams_under_a_tight_limit_equal_one_with_ample_memory() {
    let expected = run(&cpu(1), true);
    assert!(expected.1.iter().all(|m| m[0].is_finite() && m[0] > 0.0));
    // States of at most 832 bytes in blocks of 832, metrics of 64, and four temporaries for all.
    let limit = ENVS * (832 + 64) + 4 * 832;
    for threads in THREADS {
        let device = limited(threads, Some(limit));
        assert!(run(&device, false) == expected, "{threads} threads");
        assert!(device.memory().reserved_peak <= limit);
        assert_eq!(device.memory().current, 0);
        // 32,000 temporaries went through the room of four, each in memory that another env had.
        let lasting = 2 * ENVS as u64;
        assert_eq!(device.counts().allocations, lasting + (ENVS as u64) * u64::from(STEPS));
        // Without the limit every env keeps its own temporaries.
        let ample = cpu(threads);
        assert!(run(&ample, false) == expected, "{threads} threads, no limit");
        assert!(ample.memory().reserved_peak >= ENVS * (832 + 64 + 832));
    }
}

/// A step of a random program. Indices are taken modulo what exists.
#[derive(Debug, Clone)]
enum Op {
    /// A new tensor of this length, all elements `value`, by a copy or by a kernel.
    New {
        stream: usize,
        len: usize,
        value: u32,
        by_copy: bool,
    },
    /// `to[i] = to[i] * 3 + sum of all from[i % len] + i` on a stream.
    Mix {
        stream: usize,
        to: usize,
        from: [usize; 2],
        busy: u32,
    },
    /// A mix like `Mix`, but only of the second half of `to`, through a view.
    MixHalf {
        stream: usize,
        to: usize,
        from: usize,
    },
    /// `to = zeros` of the same length in new memory.
    Renew {
        stream: usize,
        to: usize,
    },
    /// The host overwrites all elements.
    Overwrite {
        to: usize,
        value: u32,
    },
    /// A handle for another stream replaces the tensor.
    Move {
        stream: usize,
        to: usize,
    },
    Drop {
        to: usize,
    },
    Record {
        stream: usize,
    },
    Wait {
        stream: usize,
    },
    /// The host reads a tensor.
    Look {
        to: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let index = || 0usize..64;
    proptest::prop_oneof![
        3 => (index(), 1usize..400, any::<u32>(), any::<bool>())
            .prop_map(|(stream, len, value, by_copy)| Op::New { stream, len, value, by_copy }),
        8 => (index(), index(), [index(), index()], 0u32..3)
            .prop_map(|(stream, to, from, busy)| Op::Mix { stream, to, from, busy }),
        2 => (index(), index(), index())
            .prop_map(|(stream, to, from)| Op::MixHalf { stream, to, from }),
        2 => (index(), index()).prop_map(|(stream, to)| Op::Renew { stream, to }),
        1 => (index(), any::<u32>()).prop_map(|(to, value)| Op::Overwrite { to, value }),
        1 => (index(), index()).prop_map(|(stream, to)| Op::Move { stream, to }),
        3 => index().prop_map(|to| Op::Drop { to }),
        1 => index().prop_map(|stream| Op::Record { stream }),
        1 => index().prop_map(|stream| Op::Wait { stream }),
        1 => index().prop_map(|to| Op::Look { to }),
    ]
}

/// Effect of a mix on `to[first..]`, given the values it reads.
fn mix(to: &mut [u32], from: &[&[u32]]) {
    for (i, x) in to.iter_mut().enumerate() {
        let read = from.iter().filter(|f| !f.is_empty()).map(|f| f[i % f.len()]);
        *x = read.fold(x.wrapping_mul(3).wrapping_add(i as u32), u32::wrapping_add);
    }
}

/// A program on a device, next to the same on plain vectors.
struct Machine {
    streams: Vec<Stream>,
    tensors: Vec<Tensor>,
    model: Vec<Vec<u32>>,
    event: Option<Event>,
}

impl Machine {
    fn stream(&self, index: usize) -> Stream {
        self.streams[index % self.streams.len()].clone()
    }

    fn do_op(&mut self, op: &Op) {
        let live = self.tensors.len();
        match *op {
            Op::New { stream, len, value, by_copy } => {
                let stream = self.stream(stream);
                let values = vec![value; len];
                let tensor = if by_copy {
                    Tensor::from_slice(&stream, &values, [len], Owner::Other).unwrap()
                } else {
                    crate::common::filled(&stream, len, value)
                };
                self.tensors.push(tensor);
                self.model.push(values);
            }
            Op::Record { stream } => self.event = Some(self.stream(stream).record()),
            Op::Wait { stream } => {
                if let Some(event) = &self.event {
                    self.stream(stream).wait(event).unwrap();
                }
            }
            _ if live == 0 => {}
            Op::Mix { stream, to, from, busy } => {
                let (to, from) = (to % live, from.map(|f| f % live));
                let from: Vec<_> = from.into_iter().filter(|&f| f != to).collect();
                self.mix(&self.stream(stream), to, &from, busy);
            }
            Op::MixHalf { stream, to, from } => self.mix_half(stream, to % live, from % live),
            Op::Renew { stream, to } => {
                let (stream, to) = (self.stream(stream), to % live);
                let len = self.model[to].len();
                let zeros = Tensor::zeros(&stream, [len], DType::U32, Owner::Other);
                self.tensors[to] = zeros.unwrap();
                self.model[to].fill(0);
            }
            Op::Overwrite { to, value } => {
                self.model[to % live].fill(value);
                self.tensors[to % live].copy_from_slice(&self.model[to % live]).unwrap();
            }
            Op::Move { stream, to } => {
                self.tensors[to % live] = self.tensors[to % live].on(&self.stream(stream)).unwrap();
            }
            Op::Drop { to } => {
                self.tensors.swap_remove(to % live);
                self.model.swap_remove(to % live);
            }
            Op::Look { to } => {
                assert_eq!(self.tensors[to % live].to_vec::<u32>().unwrap(), self.model[to % live]);
            }
        }
    }

    fn mix(&mut self, stream: &Stream, to: usize, from: &[usize], busy: u32) {
        let read: Vec<_> = from.iter().map(|&f| self.tensors[f].on(stream).unwrap()).collect();
        let written = self.tensors[to].on(stream).unwrap();
        let launch = read.iter().fold(stream.launch("mix"), |launch, x| launch.read(x));
        let kernel = move |args: &mut Args<'_>| {
            // Different speeds give different interleavings.
            for _ in 0..busy {
                std::thread::yield_now();
            }
            let read: Vec<_> = (0..args.len() - 1).map(|i| args.read(i)).collect();
            mix(args.write(args.len() - 1), &read);
        };
        let call = || kernels::mix(from.len(), written.numel());
        launch.write(&written).gpu(call).run(kernel).unwrap();
        let mut model = std::mem::take(&mut self.model[to]);
        mix(&mut model, &from.iter().map(|&f| self.model[f].as_slice()).collect::<Vec<_>>());
        self.model[to] = model;
    }

    /// Mixes the first half of a tensor, or another one, into the second half of it.
    fn mix_half(&mut self, stream: usize, to: usize, from: usize) {
        let stream = self.stream(stream);
        let half = self.model[to].len() / 2;
        let whole = self.tensors[to].on(&stream).unwrap();
        let upper = whole.view(half, [self.model[to].len() - half]).unwrap();
        let read = if from == to {
            whole.view(0, [half]).unwrap()
        } else {
            self.tensors[from].on(&stream).unwrap()
        };
        let call = || kernels::mix(1, upper.numel());
        let launch = stream.launch("mix_half").read(&read).write(&upper).gpu(call);
        launch.run(|args| mix(args.write(1), &[args.read(0)])).unwrap();
        let read =
            if from == to { self.model[to][..half].to_vec() } else { self.model[from].clone() };
        mix(&mut self.model[to][half..], &[&read]);
    }
}

/// Runs a program on a device with `threads` workers or driver streams, and compares every tensor
/// with the model. Live tensors take at most 400 * 4 bytes each; a tight limit is found by
/// doubling, so that reuse and waiting happen at all degrees of pressure.
fn check_program(id: DeviceId, ops: &[Op], (streams, threads): (usize, usize), tight: bool) {
    let mut limit = if tight { Some(1 << 13) } else { None };
    loop {
        let device = open(id, threads, limit);
        let streams = (0..streams).map(|i| device.stream(&format!("s{i}"))).collect();
        let mut machine = Machine { streams, tensors: Vec::new(), model: Vec::new(), event: None };
        let fits = |machine: &Machine, op: &Op| {
            let new = match op {
                Op::New { len, .. } => *len,
                Op::Renew { .. } => 400,
                _ => 0,
            };
            let live: usize =
                machine.model.iter().map(|m| (m.len() * 4).next_multiple_of(256)).sum();
            limit.is_none_or(|limit| live + new * 4 + 256 <= limit)
        };
        let mut ran = 0;
        for op in ops {
            if !fits(&machine, op) {
                break;
            }
            machine.do_op(op);
            ran += 1;
        }
        let back = read_back_as::<u32>(&machine.tensors.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(back, machine.model);
        match limit {
            Some(bytes) if ran < ops.len() => limit = Some(2 * bytes),
            _ => break,
        }
    }
}

fn config() -> Config {
    Config {
        cases: if cfg!(miri) { 4 } else { 150 },
        failure_persistence: None,
        ..Config::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_programs_equal_the_sequential_run(
        ops in proptest::collection::vec(op(), 1..if cfg!(miri) { 40 } else { 400 }),
        streams in 1usize..7,
        threads in proptest::sample::select(&THREADS[..]),
        tight in any::<bool>(),
    ) {
        check_program(DeviceId::Cpu(0), &ops, (streams, threads), tight);
    }

    #[cfg(feature = "cuda")]
    #[test]
    #[ignore = "needs a GPU or its stand-in"]
    fn random_programs_on_a_gpu_equal_the_sequential_run(
        ops in proptest::collection::vec(op(), 1..400),
        streams in 1usize..7,
        lanes in 1usize..4,
        tight in any::<bool>(),
    ) {
        check_program(DeviceId::Cuda(0), &ops, (streams, lanes), tight);
    }
}

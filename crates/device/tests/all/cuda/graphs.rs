//! Launches that become one graph.

use meristem_device::{
    Act, Counts, DType, Device, DeviceId, Error, HotScope, Launches, Owner, Piece, PlannedLaunch,
    Program, ScopePolicy, Stream, Tensor, read_back_as,
};

use super::{LANES, empty, gpu, no_cpu_kernel, run_set};
use crate::common::kernels::{mix, set};
use crate::common::{cpu, filled, open};

const LEN: usize = 150;

/// Pieces that are all of `arguments` arguments of `LEN` elements.
fn whole(arguments: usize) -> impl Iterator<Item = Piece> {
    (0..arguments).map(|argument| Piece { argument, start: 0, len: LEN })
}

/// x = 3 x + i + a of two tensors, twice.
fn twice() -> Program {
    let call = || mix(1, LEN).with_pieces(whole(2));
    vec![call(), call()].into()
}

fn streams(device: &Device, count: usize) -> Vec<Stream> {
    (0..count).map(|i| device.stream(&format!("env {i}"))).collect()
}

/// Adds `program` over the tensors of each stream.
fn add<'a>(
    launches: &mut Launches<'a>,
    program: &Program,
    (stream, from, to): (&'a Stream, &'a Tensor, &'a Tensor),
) -> Result<(), Error> {
    let launch = stream.launch("twice").read(from).write(to).gpu(|| program.clone());
    launch.add(launches, no_cpu_kernel)
}

/// Result of `twice` on `x`, with `a` everywhere in the first tensor.
fn expected(x: &[u32], a: u32) -> Vec<u32> {
    let mix = |x: u32, i: usize| 3 * x + i as u32 + a;
    x.iter().enumerate().map(|(i, &x)| mix(mix(x, i), i)).collect()
}

/// Five networks run one program and two run another. Some inputs come from a ring.
/// A hot scope that permits one copy to the device: the addresses of a graph's arguments.
fn step_with_one_table(device: &Device) -> HotScope {
    let permitted = Counts { copies_to_device: 1, ..Counts::default() };
    device.hot_scope("step", ScopePolicy::Deny).permit(permitted)
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn launches_side_by_side_are_one_and_leave_what_each_would() {
    for lanes in LANES {
        let device = gpu(lanes);
        let streams = streams(&device, 7);
        let programs = [twice(), Program::from(vec![mix(1, LEN).with_pieces(whole(2))])];
        let states: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 1)).collect();
        let ring: [Vec<Tensor>; 2] =
            [5, 6].map(|value| streams.iter().map(|s| filled(s, LEN, value)).collect());
        let mut expect = vec![vec![1u32; LEN]; 7];
        for round in 0..8u32 {
            // Every fourth batch is of no ring, and freed while the graph runs.
            let fresh: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 7)).collect();
            let (batch, value) = match round % 4 {
                3 => (&fresh, 7),
                n => (&ring[n as usize % 2], 5 + n % 2),
            };
            let before = device.counts();
            let scope = (round > 0).then(|| step_with_one_table(&device));
            let mut launches = Launches::default();
            for (i, stream) in streams.iter().enumerate() {
                let tensors = (stream, &batch[i], &states[i]);
                add(&mut launches, &programs[usize::from(i % 3 == 2)], tensors).unwrap();
            }
            launches.run().unwrap();
            drop(scope);
            let counts = device.counts() - before;
            assert_eq!((counts.launches, counts.allocations), (1, u64::from(round == 0)));
            for (i, of) in expect.iter_mut().enumerate() {
                *of = match i % 3 {
                    2 => (0u32..).zip(&*of).map(|(i, x)| 3 * x + i + value).collect(),
                    _ => expected(of, value),
                };
            }
            // The next work of each stream comes after the graph.
            run_set(&streams[1], &batch[1], value);
        }
        let all: Vec<&Tensor> = states.iter().collect();
        assert!(read_back_as::<u32>(&all).unwrap() == expect, "{lanes} lanes");
    }
}

/// All members of a graph wait if one member must wait, on any CUDA stream.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_graph_waits_for_what_its_members_wait_for() {
    for lanes in LANES {
        let device = gpu(lanes);
        let (program, streams) = (twice(), streams(&device, 3));
        let source = device.stream("source");
        for round in 0..10 {
            let made: Vec<Tensor> = (0..3).map(|i| filled(&source, LEN, round + i)).collect();
            let inputs: Vec<Tensor> =
                made.iter().zip(&streams).map(|(made, s)| made.on(s).unwrap()).collect();
            let states: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 2)).collect();
            let mut launches = Launches::default();
            for i in 0..3 {
                add(&mut launches, &program, (&streams[i], &inputs[i], &states[i])).unwrap();
            }
            launches.run().unwrap();
            // After the graph has read them.
            made.iter().for_each(|made| run_set(&source, made, 1000));
            let back = read_back_as::<u32>(&states.iter().collect::<Vec<_>>()).unwrap();
            let expect: Vec<_> = (0..3).map(|i| expected(&[2; LEN], round + i)).collect();
            assert!(back == expect, "{lanes} lanes, round {round}");
        }
    }
}

/// A launch runs after the earlier commands of its stream, even if the graph runs on another CUDA
/// stream and no tensor implies that order.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_graph_comes_after_what_its_members_got_before() {
    for lanes in LANES {
        let device = gpu(lanes);
        let (program, streams) = (twice(), streams(&device, 3));
        let tensors: Vec<_> =
            streams.iter().map(|s| (filled(s, LEN, 1), filled(s, LEN, 2))).collect();
        let (source, other) = (device.stream("source"), device.stream("other"));
        for round in 0..30 {
            device.synchronize().unwrap();
            run_set(&other, &empty(&other, LEN), round);
            streams[1].wait(&other.record()).unwrap();
            run_set(&streams[2], &empty(&source, LEN).on(&streams[2]).unwrap(), round);
            let before = [streams[1].record(), streams[2].record()];
            let mut launches = Launches::default();
            for (stream, (from, to)) in streams.iter().zip(&tensors) {
                add(&mut launches, &program, (stream, from, to)).unwrap();
            }
            launches.run().unwrap();
            streams[0].synchronize().unwrap();
            let done = before.map(|event| event.is_done());
            assert_eq!(done, [true; 2], "{lanes} lanes, round {round}");
        }
    }
}

/// More tensors of a size than fit into the little memory of the next test; on a GPU, which has
/// room for a million, 270 MB of them.
const MOST: usize = 4096;

/// A process with little memory, all of which the pool keeps.
#[test]
#[ignore = "the next test runs it in a process of its own"]
fn alone_a_graph_where_the_pool_has_all_memory() {
    let device = gpu(1);
    let (program, streams) = (twice(), streams(&device, 2));
    let tensors: Vec<_> = streams.iter().map(|s| (filled(s, LEN, 1), filled(s, LEN, 2))).collect();
    let mut all = vec![];
    for len in [16 << 10, 1 << 10, 64, 1] {
        let empty = || Tensor::empty(&streams[0], [len], DType::U32, Owner::Other);
        all.extend(std::iter::repeat_with(empty).map_while(Result::ok).take(MOST));
    }
    drop(all);
    let mut launches = Launches::default();
    for (stream, (from, to)) in streams.iter().zip(&tensors) {
        add(&mut launches, &program, (stream, from, to)).unwrap();
    }
    launches.run().unwrap();
    assert_eq!(tensors[1].1.to_vec::<u32>().unwrap(), expected(&[2; LEN], 1));
}

/// On a GPU, where the variable means nothing, the pool does not fill the memory.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_graph_gets_memory_that_the_pool_keeps() {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let name = "cuda::graphs::alone_a_graph_where_the_pool_has_all_memory";
    command.args([name, "--exact", "--ignored"]).env("MERISTEM_STANDIN_MEMORY", "1048576");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn building_a_graph_counts_as_an_allocation_that_a_hot_scope_refuses() {
    let device = gpu(1);
    let (program, streams) = (twice(), streams(&device, 2));
    let states: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 2)).collect();
    let inputs: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 1)).collect();
    let launches = || {
        let mut launches = Launches::default();
        for i in 0..2 {
            add(&mut launches, &program, (&streams[i], &inputs[i], &states[i])).unwrap();
        }
        launches
    };
    let first = launches(); // loads the kernels
    let scope = device.hot_scope("step", ScopePolicy::Deny);
    let error = first.run().unwrap_err();
    assert!(
        matches!(error, Error::HotScope { act: Act::Allocate, operation: "build a graph", .. }),
        "{error}"
    );
    drop(scope);
    launches().run().unwrap();
    let back = read_back_as::<u32>(&[&states[0], &states[1]]).unwrap();
    assert!(back == vec![expected(&[2; LEN], 1); 2], "only the one that was not refused ran");
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_graph_that_was_prepared_is_not_built_in_a_hot_scope() {
    let (device, host) = (gpu(2), cpu(1));
    let (program, streams) = (twice(), streams(&device, 3));
    let ahead = |stream| PlannedLaunch {
        stream,
        operation: "twice",
        program: program.clone(),
        arguments: 2,
    };
    let worker = host.stream("w");
    let before = device.counts();
    Launches::prepare(streams.iter().chain([&worker]).map(ahead).collect()).unwrap();
    assert_eq!((device.counts() - before).allocations, 1);
    // Calls over whole arguments are no graph.
    let whole = Program::from(set(LEN, 9));
    let ahead =
        PlannedLaunch { stream: &streams[0], operation: "set", program: whole, arguments: 1 };
    Launches::prepare(vec![ahead]).unwrap();
    assert_eq!((device.counts() - before).allocations, 1);
    let states: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 2)).collect();
    let inputs: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 1)).collect();
    let scope = step_with_one_table(&device);
    let mut launches = Launches::default();
    for i in 0..3 {
        add(&mut launches, &program, (&streams[i], &inputs[i], &states[i])).unwrap();
    }
    launches.run().unwrap();
    drop(scope);
    assert_eq!(states[2].to_vec::<u32>().unwrap(), expected(&[2; LEN], 1));
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn launches_that_share_what_they_write_are_refused_and_nothing_runs() {
    let device = gpu(2);
    let (program, streams) = (twice(), streams(&device, 2));
    let (input, state) = (filled(&streams[0], LEN, 1), filled(&streams[0], LEN, 2));
    let of_other = state.on(&streams[1]).unwrap();
    let input_of_other = input.on(&streams[1]).unwrap();
    let mut launches = Launches::default();
    add(&mut launches, &program, (&streams[0], &input, &state)).unwrap();
    add(&mut launches, &program, (&streams[1], &input_of_other, &of_other)).unwrap();
    let error = launches.run().unwrap_err();
    assert!(matches!(error, Error::Overlap { operation: "twice", .. }), "{error}");
    for words in ["argument 1 of launch 0", "argument 1 of launch 1 (twice)"] {
        assert!(error.to_string().contains(words), "{error}");
    }
    let mut launches = Launches::default();
    let error = add(&mut launches, &program, (&streams[1], &input, &of_other)).unwrap_err();
    assert!(matches!(error, Error::Mismatch { operation: "twice", .. }), "{error}");
    assert_eq!(state.to_vec::<u32>().unwrap(), [2; LEN]);
}

/// More programs than a lane keeps graphs: the oldest go, also while they run.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn graphs_that_were_forgotten_are_built_again() {
    let device = gpu(2);
    let stream = device.stream("s");
    let input = filled(&stream, LEN, 1);
    let programs: Vec<Program> = (0..70).map(|_| twice()).collect();
    let states: Vec<Tensor> = programs.iter().map(|_| filled(&stream, LEN, 2)).collect();
    for _ in 0..2 {
        for (program, state) in programs.iter().zip(&states) {
            let mut launches = Launches::default();
            add(&mut launches, program, (&stream, &input, state)).unwrap();
            launches.run().unwrap();
        }
    }
    let expect = expected(&expected(&[2; LEN], 1), 1);
    let back = read_back_as::<u32>(&states.iter().collect::<Vec<_>>()).unwrap();
    assert!(back.iter().all(|state| *state == expect));
}

/// Two devices and the processor side by side; programs over whole arguments run one by one.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn devices_are_taken_apart() {
    let devices = [gpu(1), cpu(1), gpu(2)];
    let placed = Program::from(vec![set(LEN, 9).with_pieces(whole(1))]);
    for program in [placed, Program::from(set(LEN, 9))] {
        let streams: Vec<Stream> =
            (0..6).map(|i| devices[i % 3].stream(&format!("s{i}"))).collect();
        let tensors: Vec<Tensor> = streams.iter().map(|s| filled(s, LEN, 1)).collect();
        let mut launches = Launches::default();
        for (stream, tensor) in streams.iter().zip(&tensors) {
            let launch = stream.launch("set").write(tensor).gpu(|| program.clone());
            launch.add(&mut launches, |args| args.write::<u32>(0).fill(9)).unwrap();
        }
        launches.run().unwrap();
        tensors.iter().for_each(|tensor| assert_eq!(tensor.to_vec::<u32>().unwrap(), [9; LEN]));
    }
}

/// An invalid launch of a member is refused, with its operation's name, before any member runs.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_member_that_does_not_fit_is_refused() {
    let device = open(DeviceId::Cuda(0), 1, None);
    let stream = device.stream("s");
    let (long, short, to) =
        (empty(&stream, LEN), empty(&stream, LEN - 1), [empty(&stream, LEN), empty(&stream, LEN)]);
    let program = twice();
    let mut launches = Launches::default();
    add(&mut launches, &program, (&stream, &long, &to[0])).unwrap();
    let error = add(&mut launches, &program, (&stream, &short, &to[1])).unwrap_err();
    let expected = "`twice`: `tensor 0 of mix1` must be aligned and inside of one of 2 arguments, \
                    got Piece { argument: 0, start: 0, len: 150 }";
    assert_eq!(error.to_string(), expected);
}

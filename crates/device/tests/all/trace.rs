//! Traces: every event is there, once, in its lane (H8); traces change no result, and wait for
//! nothing (H7).

#[path = "common/trace.rs"]
mod read;

use std::path::PathBuf;

use meristem_device::random::{Purpose, Rng};
use meristem_device::{
    Args, Counts, DType, Device, DeviceId, DeviceOptions, Error, MemoryFormat, Owner, Tensor,
    Trace, read_back,
};
use read::Read;

use crate::common::{Gate, THREADS, filled, set};

fn open(threads: usize, trace: Option<Trace>) -> Device {
    let options = DeviceOptions { threads, trace, ..DeviceOptions::default() };
    Device::open(DeviceId::Cpu(0), &options).unwrap()
}

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    (folder, path)
}

fn add(args: &mut Args<'_>) {
    let x = args.read::<u32>(0);
    args.write::<u32>(1).iter_mut().zip(x).for_each(|(y, x)| *y = y.wrapping_mul(3) + x);
}

/// A random program with every kind of event of a trace, on three streams that use each other's
/// results. Returns the results and the counts.
fn program(device: &Device) -> (Vec<Vec<u8>>, Counts) {
    let streams = ["a", "b", "c"].map(|name| device.stream(name));
    let mut rng = Rng::new(11, Purpose::Test, 0, 0);
    let owners = [Owner::Batches, Owner::Policy, Owner::Metrics];
    let mut tensors: Vec<Tensor> = (0..3)
        .map(|i| Tensor::from_slice(&streams[i], &[i as u32; 60], [60], owners[i]).unwrap())
        .collect();
    let trace = device.trace();
    let _run = trace.map(|trace| trace.span("run"));
    for step in 0..40 {
        let _step = trace.map(|trace| trace.span(format!("step {step}")));
        for _ in 0..20 {
            let [from, to] = [0, 1].map(|_| rng.below(3) as usize);
            let x = tensors[from].on(&streams[to]).unwrap();
            match rng.below(6) {
                0 => tensors[to].copy_from_slice(&[step; 60]).unwrap(),
                1 => {
                    tensors[to] = Tensor::zeros(&streams[to], [60], DType::U32, owners[to]).unwrap()
                }
                2 => streams[to].wait(&streams[from].record()).unwrap(),
                _ if from == to => set(&streams[to], &tensors[to], step).unwrap(),
                _ => streams[to].launch("add").read(&x).write(&tensors[to]).run(add).unwrap(),
            }
        }
        let _scope = trace.map(|trace| trace.span("read"));
        match step % 10 {
            0 => streams[0].synchronize().unwrap(),
            3 => streams[1].record().synchronize().unwrap(),
            6 => device.synchronize().unwrap(),
            9 => drop(tensors[0].to_vec::<u32>().unwrap()),
            _ => {}
        }
    }
    let result = read_back(&tensors.iter().collect::<Vec<_>>()).unwrap();
    drop(tensors);
    (result, device.counts())
}

#[test]
fn a_trace_has_everything_and_changes_nothing() {
    let plain = program(&open(2, None));
    for threads in THREADS {
        let (_folder, path) = scratch();
        let trace = Trace::create(&path).unwrap();
        let device = open(threads, Some(trace.clone()));
        assert_eq!(program(&device), plain);
        let counts = plain.1;
        let report = trace.finish().unwrap();
        assert_eq!(trace.finish().unwrap(), report);
        let read = Read::file(&path);
        assert_eq!((read.dropped, report.dropped), (0, 0));
        assert_eq!(read.of("launch").len() as u64, counts.launches);
        // Copies to the host: one read-back of one stream, and one of three. All other copies are
        // to the device.
        let host = &read.lanes["trace::a_trace_has_everything_and_changes_nothing"];
        let of_host =
            |category: &str| host.iter().filter(|s| s.category == category).count() as u64;
        assert_eq!(of_host("copy_to_host"), counts.copies_to_host);
        assert_eq!(of_host("copy_to_host") + of_host("wait"), counts.synchronizations);
        assert_eq!(of_host("scope"), 1 + 40 + 40);
        let copies_in = read.of("copy_to_device").len() + read.of("host_copy").len();
        assert_eq!(copies_in as u64, counts.copies_to_device);
        assert!(read.of("launch").iter().all(|s| s.args["site"].to_string().contains(".rs:")));
        let step = host.iter().find(|s| s.name == "step 7").unwrap();
        assert_eq!((step.depth, host.iter().find(|s| s.name == "read").unwrap().depth), (1, 2));
        commands_are_in_order(&read);
        waits_point_at_producers(&read);
        assert!(read.memory.iter().any(|m| m["batches"] == 240 && m["metrics"] == 240));
        assert!(read.memory.last().unwrap().values().all(|&bytes| bytes == 0));
    }
}

/// On every stream each command appears once, and no number is missing.
fn commands_are_in_order(read: &Read) {
    for stream in ["a", "b", "c"] {
        let commands: Vec<_> =
            read.lanes[stream].iter().map(|s| s.args["command"].as_u64().unwrap()).collect();
        assert_eq!(commands, (1..=commands.len() as u64).collect::<Vec<_>>());
    }
}

/// Every wait has an arrow from the last command that it had to wait for.
fn waits_point_at_producers(read: &Read) {
    let mut waits = 0;
    for stream in ["a", "b", "c"] {
        for wait in read.lanes[stream].iter().filter(|s| s.category == "wait") {
            let producer = wait.args["stream"].as_str().unwrap();
            let until = wait.args["producer_command"].as_u64().unwrap();
            let mut before = read.lanes[producer].iter().rev().filter(|s| s.category != "wait");
            let last = before.find(|s| s.args["command"].as_u64().unwrap() <= until).unwrap();
            assert_eq!(wait.args["operation"], last.name);
            assert!(last.end <= wait.end);
            let arrow = read.arrows.iter().find(|[_, to]| to.0 == stream && to.1 == *wait);
            assert_eq!(arrow.unwrap()[0], (producer.to_owned(), last.clone()));
            waits += 1;
        }
    }
    assert!(waits > 20 && waits == read.arrows.len(), "{waits}");
}

#[test]
fn launches_have_names_shapes_and_types() {
    let (_folder, path) = scratch();
    let trace = Trace::create(&path).unwrap();
    let device = open(1, Some(trace.clone()));
    let stream = device.stream("env 0");
    let images = (MemoryFormat::ChannelsLast, Owner::Batches);
    let x =
        Tensor::empty_with_format(&stream, [2, 3, 4, 5], DType::F32, images.0, images.1).unwrap();
    let y = Tensor::empty(&stream, [7], DType::I64, Owner::Metrics).unwrap();
    stream.launch("with \"quotes\"").read(&x).write(&y).run(|_| {}).unwrap();
    stream.synchronize().unwrap();
    trace.finish().unwrap();
    let read = Read::file(&path);
    let launch = read.of("launch")[0];
    assert_eq!(launch.name, "with \"quotes\"");
    let arguments = ["read f32 [2, 3, 4, 5] channels last", "write i64 [7]"];
    assert_eq!(launch.args["arguments"], serde_json::json!(arguments));
    assert!(launch.args["site"].as_str().unwrap().contains("trace.rs"));
    assert!(read.lanes.contains_key("env 0"));
}

#[test]
fn the_limit_is_kept_and_what_is_missing_is_counted() {
    let (_folder, path) = scratch();
    let trace = Trace::create_bounded(&path, 10).unwrap();
    let device = open(2, Some(trace.clone()));
    let stream = device.stream("a");
    for n in 0..30 {
        let _outer = trace.span("outer");
        let _inner = trace.span("inner");
        drop(filled(&stream, 10, n));
    }
    stream.synchronize().unwrap();
    let report = trace.finish().unwrap();
    let read = Read::file(&path);
    assert_eq!(report.events, 10);
    // 60 spans, 60 changes of memory, 30 launches, and the wait; a separate thread writes them. The
    // race sanitizer poisons all memory but the first, which is new.
    let missing = 151 - 10 + if device.is_sanitized() { 29 } else { 0 };
    assert_eq!((report.dropped, read.dropped), (missing, missing));
    assert_eq!(read.notes, [format!("{missing} events found no room and are missing")]);
}

#[test]
fn the_file_is_whole_at_any_time() {
    let (_folder, path) = scratch();
    let trace = Trace::create(&path).unwrap();
    assert_eq!(Read::file(&path).lanes.len(), 0);
    let device = open(1, Some(trace.clone()));
    let stream = device.stream("a");
    let _open = trace.span("not over");
    let gate = Gate::close(&stream);
    set(&stream, &filled(&stream, 5, 1), 2).unwrap();
    gate.open();
    stream.synchronize().unwrap();
    // The writer comes by itself.
    let mut read = Read::file(&path);
    while read.of("launch").len() < 3 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        read = Read::file(&path);
    }
    assert_eq!(read.of("scope")[0].name, "not over");
    trace.finish().unwrap();
    // Later spans are ignored.
    drop(trace.span("late"));
    set(&stream, &filled(&stream, 5, 1), 2).unwrap();
    stream.synchronize().unwrap();
    drop((device, stream));
    assert_eq!(Read::file(&path).of("launch").len(), 3);
}

#[test]
fn a_trace_ends_with_its_last_handle() {
    let (_folder, path) = scratch();
    let device = open(1, Some(Trace::create(&path).unwrap()));
    let stream = device.stream("a");
    set(&stream, &filled(&stream, 5, 1), 2).unwrap();
    drop((stream, device));
    assert_eq!(Read::file(&path).of("launch").len(), 2);
}

#[test]
fn work_after_a_panic_shows_as_dropped() {
    let (_folder, path) = scratch();
    let trace = Trace::create(&path).unwrap();
    let device = open(1, Some(trace.clone()));
    let (a, b) = (device.stream("a"), device.stream("b"));
    let gate = Gate::close(&a);
    a.launch("bad").run(|_| panic!("on purpose")).unwrap();
    a.launch("lost").run(|_| {}).unwrap();
    b.wait(&a.record()).unwrap();
    gate.open();
    for stream in [&a, &b] {
        let error = stream.synchronize().unwrap_err();
        assert!(matches!(error, Error::KernelPanicked { operation: "bad", .. }), "{error}");
    }
    trace.finish().unwrap();
    let read = Read::file(&path);
    let dropped = |s: &read::Slice| s.args["dropped"] == true;
    let of_a: Vec<_> = read.lanes["a"].iter().map(|s| (s.name.as_str(), dropped(s))).collect();
    assert_eq!(of_a, [("gate", false), ("bad", false), ("lost", true)]);
    assert_eq!(read.lanes["b"][0].args["operation"], "lost");
}

#[test]
fn devices_share_a_trace_and_streams_come_and_go() {
    let (_folder, path) = scratch();
    let trace = Trace::create(&path).unwrap();
    let [one, two] = [0, 1].map(|_| open(1, Some(trace.clone())));
    for n in 0..50 {
        let (a, b) = (one.stream(&format!("a{n}")), two.stream(&format!("b{n}")));
        let gate = Gate::close(&a);
        b.wait(&a.record()).unwrap();
        b.launch("after").run(|_| {}).unwrap();
        gate.open();
        b.synchronize().unwrap();
    }
    trace.finish().unwrap();
    let read = Read::file(&path);
    assert_eq!((read.of("launch").len(), read.arrows.len()), (100, 50));
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let (folder, _) = scratch();
    for path in [folder.path().join("missing").join("run.json"), folder.path().to_owned()] {
        let error = Trace::create(&path).unwrap_err();
        assert!(matches!(error, Error::Trace { .. }), "{error}");
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
}

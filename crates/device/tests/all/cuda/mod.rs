//! A CUDA device: memory, copies, kernels, order across CUDA streams, and errors. The tests run on
//! a GPU, or on the stand-in driver (`cargo xtask standin cargo test …`), which delays and reorders
//! all work as far as CUDA allows. Each test whose name begins with `alone` needs a process of its
//! own; other tests or `bench/gpu.sh` start it.

mod exchange;
mod graphs;

use meristem_device::{
    Act, Call, Counts, CudaError, DType, Device, DeviceId, DeviceOptions, Error, Fill, LaunchGroup,
    Owner, Property, ScopePolicy, Stream, Tensor, Trace, read_back_as,
};

use crate::common::kernels::cuda::{LINE, Line, MISSING, SUM_BLOCKS, TRAP, WRONG_KERNEL};
use crate::common::kernels::{mix, set};
use crate::common::{cpu, filled, open};

/// Numbers of lanes for which results must be the same.
const LANES: [usize; 3] = [1, 2, 3];

fn gpu(lanes: usize) -> Device {
    open(DeviceId::Cuda(0), lanes, None)
}

fn empty(stream: &Stream, len: usize) -> Tensor {
    Tensor::empty(stream, [len], DType::U32, Owner::Other).unwrap()
}

fn run_set(stream: &Stream, tensor: &Tensor, value: u32) {
    crate::common::set(stream, tensor, value).unwrap();
}

fn no_cpu_kernel(_: &mut meristem_device::Args<'_>) {
    unreachable!("the device is a GPU")
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn elements_of_every_type_come_back() {
    let device = gpu(1);
    let stream = device.stream("s");
    for len in [0, 1, 3, 64, 1000, 70_001] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
        let tensor = Tensor::from_slice(&stream, &bytes, [len], Owner::Other).unwrap();
        assert_eq!(tensor.to_vec::<u8>().unwrap(), bytes);
        let floats: Vec<f32> = (0..len).map(|i| i as f32 / 3.0).collect();
        let tensor = Tensor::from_slice(&stream, &floats, [len], Owner::Other).unwrap();
        assert_eq!(tensor.to_vec::<f32>().unwrap(), floats);
        let numbers: Vec<i64> = (0..len as i64).map(|i| i << 33).collect();
        let tensor = Tensor::from_slice(&stream, &numbers, [len], Owner::Other).unwrap();
        assert_eq!(tensor.to_vec::<i64>().unwrap(), numbers);
    }
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn new_memory_is_zero_only_if_asked_for() {
    let device = gpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    for round in 0..20u32 {
        let stream = if round % 2 == 0 { &a } else { &b };
        let zeros = Tensor::zeros(stream, [33], DType::U32, Owner::Other).unwrap();
        assert_eq!(zeros.to_vec::<u32>().unwrap(), [0; 33]);
        run_set(stream, &zeros, round + 1); // the next round gets this memory
    }
    // Lengths and windows that are no whole words.
    for (start, len) in [(0, 1), (1, 2), (3, 9), (4, 4), (2, 31)] {
        let tensor = Tensor::from_slice(&a, &[9u8; 40], [40], Owner::Other).unwrap();
        let window = tensor.view(start, [len]).unwrap();
        a.fill("fill", &[&window], Fill::Word(0x0403_0201)).unwrap();
        let mut expected = vec![9u8; 40];
        for i in 0..len {
            expected[start + i] = 1 + (i % 4) as u8;
        }
        assert_eq!(tensor.to_vec::<u8>().unwrap(), expected, "{start}..+{len}");
    }
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_kernel_gets_its_tensors_and_values() {
    let device = gpu(1);
    let stream = device.stream("s");
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let x = Tensor::from_slice(&stream, &x, [1000], Owner::Other).unwrap();
    let y = Tensor::zeros(&stream, [1000], DType::F32, Owner::Other).unwrap();
    let values = Line { slope: 0.5, offset: 1.0, from: 10 };
    let call = || Call::new(&LINE, 3, 96).values(values);
    stream.launch("line").read(&x).write(&y).gpu(call).run(no_cpu_kernel).unwrap();
    let expected: Vec<f32> =
        (0..1000).map(|i| if i < 10 { 0.0 } else { 0.5 * i as f32 + 1.0 }).collect();
    assert_eq!(y.to_vec::<f32>().unwrap(), expected);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn threads_of_a_block_share_memory() {
    let device = gpu(1);
    let stream = device.stream("s");
    let values: Vec<u32> = (0..1000).collect();
    let x = Tensor::from_slice(&stream, &values, [1000], Owner::Other).unwrap();
    let sums = empty(&stream, 4);
    let call = || Call::new(&SUM_BLOCKS, 4, 256).shared(256 * 4);
    stream.launch("sum").read(&x).write(&sums).gpu(call).run(no_cpu_kernel).unwrap();
    let expected: Vec<u32> = values.chunks(256).map(|chunk| chunk.iter().sum()).collect();
    assert_eq!(sums.to_vec::<u32>().unwrap(), expected);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn streams_wait_for_what_they_use() {
    for lanes in LANES {
        let device = gpu(lanes);
        let (a, b, c) = (device.stream("a"), device.stream("b"), device.stream("c"));
        for round in 0..30 {
            let x = filled(&a, 300, round);
            let on_b = x.on(&b).unwrap();
            let y = filled(&b, 300, 1);
            let mixed = b.launch("mix").read(&on_b).write(&y).gpu(|| mix(1, 300));
            mixed.run(no_cpu_kernel).unwrap();
            run_set(&a, &x, 1000); // after b has read it
            let z = empty(&c, 300);
            c.copy("copy", &[(&y.on(&c).unwrap(), &z)]).unwrap();
            drop(y); // while c reads it
            run_set(&b, &empty(&b, 300), 77); // in its memory, perhaps
            let expected: Vec<u32> = (0..300).map(|i| 3 + i + round).collect();
            let back = read_back_as::<u32>(&[&z, &x]).unwrap();
            assert_eq!(back, [expected, vec![1000; 300]], "{lanes} lanes, round {round}");
        }
        assert_eq!(device.memory().current, 0);
    }
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn an_upload_reads_the_host_before_it_returns() {
    let device = gpu(2);
    let stream = device.stream("s");
    let mut values = vec![0u32; 5000];
    let tensors: Vec<Tensor> = (0..100)
        .map(|round| {
            values.fill(round);
            Tensor::from_slice(&stream, &values, [5000], Owner::Other).unwrap()
        })
        .collect();
    values.fill(u32::MAX);
    for (round, tensor) in tensors.iter().enumerate() {
        assert_eq!(tensor.to_vec::<u32>().unwrap(), vec![round as u32; 5000]);
    }
}

/// Buffers that another thread fills are uploaded on a stream for copies, while kernels of another
/// stream read earlier uploads. A read waits for its upload, and an upload for earlier reads.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn buffers_of_another_thread_are_uploaded_in_stream_order() {
    for lanes in LANES {
        let device = gpu(lanes);
        let (copies, stream) = (device.copy_stream("copies"), device.stream("s"));
        let slots = [0, 1].map(|_| empty(&copies, 1000));
        let read = slots.each_ref().map(|slot| slot.on(&stream).unwrap());
        let sums = Tensor::zeros(&stream, [40], DType::U32, Owner::Other).unwrap();
        // One more than the slots: after the first rounds all buffers have been used before.
        let buffers = copies.host_buffers(3, 4000).unwrap();
        let before = device.counts();
        for round in 0..40usize {
            let mut buffer = buffers.take().unwrap();
            let buffer = std::thread::spawn(move || {
                let values = vec![round as u32 + 1; 1000];
                buffer.bytes().copy_from_slice(bytemuck::cast_slice(&values));
                buffer
            });
            let buffer = buffer.join().unwrap();
            copies.upload_from("upload", &slots[round % 2], buffer).unwrap();
            let (from, to) = (&read[round % 2], sums.view(round, [1]).unwrap());
            let piece = from.view(999, [1]).unwrap();
            stream.copy("keep", &[(&piece, &to)]).unwrap();
        }
        let counts = device.counts() - before;
        assert_eq!((counts.copies_to_device, counts.allocations), (40, 0));
        // Each buffer that is taken again is waited for at most once.
        assert!(counts.synchronizations <= 40 - 3, "{counts:?}");
        assert_eq!(sums.to_vec::<u32>().unwrap(), (1..=40).collect::<Vec<u32>>());
    }
}

/// A buffer of one device is uploaded to another by a copy; a buffer that is too small is refused.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_buffer_fits_the_tensor_and_goes_to_any_device() {
    let (device, other) = (gpu(1), open(DeviceId::Cpu(0), 1, None));
    let stream = other.stream("s");
    let tensor = Tensor::zeros(&stream, [3], DType::U32, Owner::Other).unwrap();
    let copies = device.copy_stream("copies");
    let mut buffer = copies.host_buffers(1, 16).unwrap().take().unwrap();
    buffer.bytes().copy_from_slice(bytemuck::cast_slice(&[7u32, 8, 9, 10]));
    stream.upload_from("upload", &tensor, buffer).unwrap();
    assert_eq!(tensor.to_vec::<u32>().unwrap(), [7, 8, 9]);
    let buffer = copies.host_buffers(1, 8).unwrap().take().unwrap();
    let error = stream.upload_from("upload", &tensor, buffer).unwrap_err().to_string();
    assert!(error.contains("at least 12 bytes") && error.contains('8'), "{error}");
}

/// Page-locked memory of any size is allocated when the buffers are made, and not by uploads. Only
/// a program that holds all buffers gets one more, which is counted. A refused upload frees its
/// buffer.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn host_buffers_are_locked_before_the_first_upload() {
    let device = gpu(1);
    let copies = device.copy_stream("copies");
    // More than an upload without a ring locks.
    let buffers = copies.host_buffers(2, (64 << 20) + 4).unwrap();
    let slot = Tensor::zeros(&copies, [(16 << 20) + 1], DType::U32, Owner::Other).unwrap();
    let before = device.counts();
    for round in 1..=5u8 {
        let mut buffer = buffers.take().unwrap();
        buffer.bytes()[64 << 20..].fill(round);
        copies.upload_from("upload", &slot, buffer).unwrap();
    }
    let counts = device.counts() - before;
    assert_eq!((counts.copies_to_device, counts.allocations), (5, 0));
    assert!(counts.synchronizations <= 3, "{counts:?}");
    let last = slot.view(16 << 20, [1]).unwrap();
    assert_eq!(last.to_vec::<u32>().unwrap(), [u32::from_ne_bytes([5; 4])]);
    let held = [buffers.take().unwrap(), buffers.take().unwrap()];
    let scope = device.hot_scope("refused", ScopePolicy::Deny);
    for buffer in held {
        let error = copies.upload_from("upload", &slot, buffer).unwrap_err().to_string();
        assert!(error.contains("any copy to the device"), "{error}");
    }
    drop(scope);
    let before = device.counts();
    let held = [buffers.take().unwrap(), buffers.take().unwrap()];
    assert_eq!(device.counts() - before, Counts::default(), "refused buffers are free");
    let scope = device.hot_scope("held", ScopePolicy::Deny);
    let error = buffers.take().unwrap_err().to_string();
    assert!(error.contains("any allocation") && error.contains("HostBuffers::take"), "{error}");
    drop((scope, held));
    // Dropped buffers are free again, and nothing is waited for.
    let before = device.counts();
    let _held = [buffers.take().unwrap(), buffers.take().unwrap()];
    assert_eq!(device.counts() - before, Counts::default());
    for bytes in [1 << 60, usize::MAX] {
        let error = copies.host_buffers(2, bytes).unwrap_err().to_string();
        let words = format!("did not lock 2 host buffers of {bytes} bytes");
        assert!(error.contains(&words) && error.contains("smaller batches"), "{error}");
    }
}

/// A wait for a host buffer is counted, and refused where waits are forbidden.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_wait_for_a_host_buffer_is_counted() {
    let device = gpu(1);
    let copies = device.copy_stream("copies");
    let buffers = copies.host_buffers(1, 4).unwrap();
    let slot = Tensor::zeros(&copies, [1], DType::U32, Owner::Other).unwrap();
    let upload = || copies.upload_from("upload", &slot, buffers.take()?);
    let before = device.counts();
    (0..200).for_each(|_| upload().unwrap());
    let counts = device.counts() - before;
    assert_eq!((counts.copies_to_device, counts.allocations), (200, 0));
    // On a GPU so short a copy may be done before the next.
    let is_standin = std::env::var_os("MERISTEM_STANDIN_SEED").is_some();
    assert!((u64::from(is_standin)..200).contains(&counts.synchronizations), "{counts:?}");
    let scope = device.hot_scope("upload", ScopePolicy::Deny);
    let _scope = scope.permit(Counts { copies_to_device: 200, ..Counts::default() });
    match (0..200).find_map(|_| upload().err()) {
        None => assert!(!is_standin, "no upload waits"),
        Some(error) => {
            let error = error.to_string();
            assert!(error.contains("any wait") && error.contains("HostBuffers::take"), "{error}");
        }
    }
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_group_runs_from_one_state() {
    for lanes in LANES {
        let device = gpu(lanes);
        let (a, b) = (device.stream("a"), device.stream("b"));
        let x = Tensor::zeros(&a, [200], DType::U32, Owner::Other).unwrap();
        let (first, second) = (x.view(0, [100]).unwrap(), x.view(100, [100]).unwrap());
        let mut group = LaunchGroup::default();
        let launch = a.launch("set").write(&first).gpu(|| set(100, 1));
        launch.join(&mut group, no_cpu_kernel).unwrap();
        let launch = b.launch("set").write(&second).gpu(|| set(100, 2));
        launch.join(&mut group, no_cpu_kernel).unwrap();
        group.run().unwrap();
        assert_eq!(x.to_vec::<u32>().unwrap(), [[1; 100], [2; 100]].concat());
    }
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn events_are_reached_in_order_and_across_devices() {
    let (device, host) = (gpu(2), cpu(1));
    let (a, b, worker) = (device.stream("a"), device.stream("b"), host.stream("w"));
    let x = filled(&a, 10, 1);
    let event = a.record();
    b.wait(&event).unwrap();
    worker.wait(&event).unwrap();
    let y = filled(&worker, 10, 2);
    a.wait(&worker.record()).unwrap();
    run_set(&a, &x, 3);
    let last = a.record();
    last.synchronize().unwrap();
    assert!(event.is_done() && last.is_done());
    device.synchronize().unwrap();
    assert_eq!((x.to_vec::<u32>().unwrap()[9], y.to_vec::<u32>().unwrap()[9]), (3, 2));
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn memory_is_limited_and_counted() {
    let device = open(DeviceId::Cuda(0), 1, Some(1 << 16));
    let stream = device.stream("s");
    let half = empty(&stream, 8000);
    let error = Tensor::empty(&stream, [20_000], DType::U32, Owner::Batches).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit: Some(65_536), .. }), "{error}");
    assert_eq!(device.memory().current, 32_000);
    drop(half);
    assert_eq!(device.memory().current, 0);
    assert!(device.trim() >= 32_000);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn loading_kernels_counts_as_a_wait_that_a_hot_scope_refuses() {
    let device = gpu(1);
    let stream = device.stream("s");
    let x = empty(&stream, 10);
    let scope = device.hot_scope("step", ScopePolicy::Deny);
    let error = crate::common::set(&stream, &x, 1).unwrap_err();
    assert!(
        matches!(error, Error::HotScope { act: Act::Synchronize, operation: "load kernels", .. }),
        "{error}"
    );
    drop(scope);
    run_set(&stream, &x, 1);
    let scope = device.hot_scope("step", ScopePolicy::Deny);
    run_set(&stream, &x, 2);
    drop(scope);
    assert_eq!(x.to_vec::<u32>().unwrap(), [2; 10]);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn launches_that_do_not_fit_their_kernel_are_refused() {
    let device = gpu(1);
    let stream = device.stream("s");
    let x = empty(&stream, 10);
    let error = stream.launch("odd").write(&x).run(no_cpu_kernel).unwrap_err();
    let Error::NoKernel { operation: "odd", device: DeviceId::Cuda(0) } = error else {
        panic!("{error}")
    };
    assert_eq!(error.to_string(), "`odd` has no kernel for cuda:0 yet; run it on the cpu");
    let refused = |call: Call, property: Property, text: &str| {
        let launch = stream.launch("odd").write(&x).gpu(|| call);
        let error = launch.run(no_cpu_kernel).unwrap_err();
        assert!(matches!(error, Error::Mismatch { property: p, .. } if p == property), "{error}");
        assert_eq!(error.to_string(), text);
    };
    refused(mix(1, 10), Property::Shape, "`odd`: `tensors of mix1` must be 2, got 1");
    refused(
        mix(0, 10).values(1u32),
        Property::Shape,
        "`odd`: `values of mix0` must be 0 bytes, got 4 bytes",
    );
    let large = Call::new(&TRAP, 1, 2048);
    refused(large, Property::Shape, "`odd`: `threads of trap` must be 1 to 1024, got 2048");
    let floats = Tensor::zeros(&stream, [10], DType::F32, Owner::Other).unwrap();
    let launch = stream.launch("odd").write(&floats).gpu(|| mix(0, 10));
    let error = launch.run(no_cpu_kernel).unwrap_err();
    assert!(matches!(error, Error::Mismatch { property: Property::DType, .. }), "{error}");
    let launch = stream.launch("odd").read(&x).gpu(|| mix(0, 10));
    let error = launch.run(no_cpu_kernel).unwrap_err();
    assert!(matches!(error, Error::Mismatch { property: Property::Access, .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "`odd`: `tensor 0 of mix0` must be declared as written, got one that is read"
    );
    // Nothing of it was enqueued, and the stream is as good as new.
    run_set(&stream, &x, 5);
    assert_eq!(x.to_vec::<u32>().unwrap(), [5; 10]);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn kernels_that_cannot_be_compiled_are_named() {
    let device = gpu(1);
    let stream = device.stream("s");
    let x = empty(&stream, 10);
    let launch = stream.launch("wrong").write(&x);
    let error = launch.gpu(|| Call::new(&WRONG_KERNEL, 1, 32)).run(no_cpu_kernel);
    match error.unwrap_err() {
        Error::Cuda { source: CudaError::Compile { source_name, log, .. }, .. } => {
            assert_eq!(source_name, "tests/wrong.cu");
            assert!(log.contains("wrong.cu") && log.contains("error"), "{log}");
        }
        other => panic!("{other}"),
    }
    let launch = stream.launch("missing").write(&x);
    let error = launch.gpu(|| Call::new(&MISSING, 1, 32)).run(no_cpu_kernel);
    match error.unwrap_err() {
        Error::Cuda { source: CudaError::Call { function, code, .. }, .. } => {
            assert_eq!((function, &*code), ("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND"));
        }
        other => panic!("{other}"),
    }
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn work_without_elements_does_nothing() {
    let device = gpu(1);
    let stream = device.stream("s");
    let none = empty(&stream, 0);
    run_set(&stream, &none, 1);
    stream.fill("fill", &[&none], Fill::Zero).unwrap();
    stream.copy("copy", &[(&none, &empty(&stream, 0))]).unwrap();
    assert_eq!(none.to_vec::<u32>().unwrap(), [0u32; 0]);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn the_sanitizer_sees_the_program_order() {
    let options = DeviceOptions { threads: 2, sanitize: true, ..DeviceOptions::default() };
    let device = Device::open(DeviceId::Cuda(0), &options).unwrap();
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = empty(&a, 100);
    assert_eq!(x.to_vec::<u32>().unwrap(), [meristem_device::POISON; 100]);
    run_set(&a, &x, 1);
    let y = x.on(&b).unwrap();
    run_set(&b, &y, 2);
    assert_eq!(x.to_vec::<u32>().unwrap(), [2; 100]);
    assert!(device.races().is_empty());
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_trace_has_the_times_of_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let trace = Trace::create(&path).unwrap();
    let options = DeviceOptions { trace: Some(trace.clone()), ..DeviceOptions::default() };
    let device = Device::open(DeviceId::Cuda(0), &options).unwrap();
    let stream = device.stream("s");
    let x = empty(&stream, 100);
    for value in 0..10 {
        run_set(&stream, &x, value);
    }
    assert_eq!(x.to_vec::<u32>().unwrap(), [9; 100]);
    drop((x, stream, device));
    trace.finish().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    let sets: Vec<_> = events.iter().filter(|e| e["name"] == "set" && e["ph"] == "X").collect();
    assert_eq!(sets.len(), 10);
    let end = |e: &serde_json::Value| e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap();
    assert!(sets.is_sorted_by(|a, b| end(a) <= b["ts"].as_f64().unwrap() + 1.0), "{sets:?}");
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_device_that_is_not_there_is_named() {
    let error = Device::open(DeviceId::Cuda(99), &DeviceOptions::default()).unwrap_err();
    let Error::Cuda { source: CudaError::NoSuchDevice { asked: 99, found }, .. } = error else {
        panic!("{error}")
    };
    assert!(found >= 1);
}

/// On a GPU the context of this process does not recover.
#[test]
#[ignore = "ends the device for this process"]
fn alone_a_fault_fails_every_stream() {
    let device = gpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = filled(&a, 10, 7);
    let y = filled(&b, 10, 1);
    let launch = a.launch("trap").write(&x).gpu(|| Call::new(&TRAP, 1, 1));
    launch.run(no_cpu_kernel).unwrap();
    for tensor in [&x, &y] {
        let error = tensor.to_vec::<u32>().unwrap_err();
        let Error::DeviceFailed { device: DeviceId::Cuda(0), .. } = error else {
            panic!("{error}")
        };
    }
    let error = crate::common::set(&b, &y, 2).unwrap_err();
    assert!(matches!(error, Error::DeviceFailed { .. }), "{error}");
}

//! Exchanges that NCCL refuses, or does not finish enqueuing: faults of the stand-in. Each test
//! runs in a separate process, which has both members of the group.
//!
//! The NCCL of a GPU has no such faults, so these tests fail there: `--skip cuda::exchange`, as in
//! `bench/gpu_phases.py`.

use std::io;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use meristem_device::{DType, Device, Error, Owner, PeerPlace, Peers, Stream, Tensor};

use super::{empty, gpu};

/// Time after which a test counts as hanging.
const LIMIT: Duration = Duration::from_secs(120);

fn run(name: &str, variable: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = format!("cuda::exchange::{name}");
    // Each member connects in a group of calls.
    command.args([&*name, "--exact", "--ignored"]).env(variable, "3");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn nothing_ends_on_the_device_before_the_reason_of_a_refused_exchange_is_known() {
    run("alone_a_refused_exchange", "MERISTEM_STANDIN_NCCL_FAIL");
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn an_exchange_is_counted_before_it_is_enqueued() {
    run("alone_an_exchange_in_progress", "MERISTEM_STANDIN_NCCL_STALL");
}

/// A member with its device, and a tensor of it.
struct Side {
    device: Device,
    stream: Stream,
    peers: Peers,
    tensor: Tensor,
}

impl Side {
    fn send(&self) -> Result<(), Error> {
        self.stream.launch("exchange").read(&self.tensor).exchange(&self.peers, vec![1])
    }

    /// Aborts, and checks that a result on this stream is lost for that reason.
    fn abort(&self) {
        self.peers.abort(Arc::new(io::Error::other("rank 1 is lost")));
    }

    fn is_lost(&self, of: &Tensor) {
        let error = of.to_vec::<u32>().unwrap_err();
        assert!(matches!(error, Error::DeviceFailed { .. }), "{error:?}");
        let words = "its exchanges were aborted: rank 1 is lost";
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// Two members that have joined a group.
fn group() -> [Side; 2] {
    let devices = [gpu(2), gpu(2)];
    let streams = devices.each_ref().map(|device| device.stream("s"));
    let id = Peers::new_id(&streams[0]).unwrap();
    let join = |rank: usize| {
        let place = PeerPlace { id, rank, size: 2, patience: LIMIT };
        let peers = Peers::begin(&streams[rank], &place).unwrap();
        peers.connect().unwrap();
        peers
    };
    let [first, second] = std::thread::scope(|scope| {
        let second = scope.spawn(|| join(1));
        [join(0), second.join().unwrap()]
    });
    let tensors = streams.each_ref().map(|stream| empty(stream, 100));
    let [a, b] = devices;
    let [s, t] = streams;
    let [x, y] = tensors;
    [
        Side { device: a, stream: s, peers: first, tensor: x },
        Side { device: b, stream: t, peers: second, tensor: y },
    ]
}

#[test]
#[ignore = "run by another test, with a fault of the stand-in"]
fn alone_a_refused_exchange() {
    let [side, _other] = group();
    // Neither the exchange nor other streams wait for the reason of the error.
    side.send().unwrap();
    let progress = side.peers.progress();
    assert_eq!((progress.submitted, progress.enqueued), (2, 1));
    assert!(side.peers.check_group().is_err());
    let stream = side.device.stream("beside");
    let beside = Tensor::zeros(&stream, [8], DType::U32, Owner::Other).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| side.is_lost(&beside));
        scope.spawn(|| side.is_lost(&side.tensor));
        side.abort();
    });
}

#[test]
#[ignore = "run by another test, with a fault of the stand-in"]
fn alone_an_exchange_in_progress() {
    let [side, _other] = group();
    std::thread::scope(|scope| {
        let sent = scope.spawn(|| side.send());
        let begin = Instant::now();
        while side.peers.progress().submitted < 2 && begin.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let progress = side.peers.progress();
        assert_eq!((progress.submitted, progress.enqueued, progress.ended), (2, 1, 1));
        // Called on another thread while this thread is inside a call to NCCL.
        side.abort();
        sent.join().unwrap().unwrap();
    });
    side.is_lost(&side.tensor);
}

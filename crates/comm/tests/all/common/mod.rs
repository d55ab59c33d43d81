//! Test helpers: groups of ranks, inputs, and a transport without a sum.

pub(crate) mod port;

use std::time::Duration;

use meristem_comm::{
    CollectiveCall, CommOptions, Communicator, Error, Parcel, Result, Spans, Sum, SumElement,
    Transport,
};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{
    Device, DeviceId, DeviceOptions, Element, Error as DeviceError, Owner, Stream, Tensor,
};

/// Numbers of ranks for the tests of every algorithm.
pub(crate) const RANKS: [usize; 7] = [1, 2, 3, 4, 5, 7, 8];

/// The device of the tests: the CPU, or the device in `MERISTEM_TEST_DEVICE`.
pub(crate) fn open() -> Device {
    let named = std::env::var("MERISTEM_TEST_DEVICE");
    open_on(named.map_or(DeviceId::Cpu(0), |name| name.parse().unwrap()))
}

pub(crate) fn open_on(id: DeviceId) -> Device {
    Device::open(id, &DeviceOptions { threads: 2, ..DeviceOptions::default() }).unwrap()
}

/// A deadline that a busy machine meets; no test waits for its end.
pub(crate) fn options() -> CommOptions {
    CommOptions { deadline: Duration::from_secs(30) }
}

/// Runs a closure on every rank of a group, each in a thread with its own stream. Returns the
/// results in rank order.
pub(crate) fn ranks<R: Send>(n: usize, run: impl Fn(Communicator, &Stream) -> R + Sync) -> Vec<R> {
    on(&open(), Communicator::threads(n, &options()).unwrap(), run)
}

/// Checks that all ranks have the panic of a kernel of one of them: with their results, or, if the
/// call of that rank returned it, as its failure.
pub(crate) fn assert_panic_of(failed: usize, errors: &[Error], words: &[&str]) {
    for (rank, error) in errors.iter().enumerate() {
        match error {
            Error::Device(cause) => {
                assert!(matches!(**cause, DeviceError::KernelPanicked { .. }), "{error:?}");
            }
            Error::RankFailed { rank: named, .. } => {
                assert!(*named == failed && rank != failed, "{rank}: {error:?}");
            }
            _ => panic!("{error:?}"),
        }
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

/// Runs a closure on every rank, as [`ranks`], with existing communicators.
pub(crate) fn on<R: Send>(
    device: &Device,
    group: Vec<Communicator>,
    run: impl Fn(Communicator, &Stream) -> R + Sync,
) -> Vec<R> {
    let devices = vec![device.clone(); group.len()];
    on_each(&devices, group, run)
}

/// Runs a closure on every rank, as [`on`], each on its device.
pub(crate) fn on_each<R: Send>(
    devices: &[Device],
    group: Vec<Communicator>,
    run: impl Fn(Communicator, &Stream) -> R + Sync,
) -> Vec<R> {
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = group
            .into_iter()
            .zip(devices)
            .map(|(comm, device)| {
                let stream = device.stream(&format!("rank {}", comm.rank()));
                scope.spawn(move || run(comm, &stream))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn upload<T: Element>(stream: &Stream, values: &[T]) -> Tensor {
    Tensor::from_slice(stream, values, [values.len()], Owner::Other).unwrap()
}

/// A NaN, one of 100 with other payloads and both signs.
pub(crate) fn nan<T: SumElement>(which: usize) -> T {
    // All ones but in the lowest byte, whose top bit belongs to the exponent of bf16.
    let mut bytes = vec![0xff; size_of::<T>()];
    bytes[0] = 0x81 + (which % 100) as u8;
    bytes[size_of::<T>() - 1] = if which.is_multiple_of(2) { 0x7f } else { 0xff };
    bytemuck::pod_read_unaligned(&bytes)
}

/// Approximately normal numbers for a rank and a step: centred sums of four uniform ones.
pub(crate) fn noise(len: usize, rank: usize, step: usize) -> Vec<f32> {
    let mut rng = Rng::new(11, Purpose::Test, rank as u64, step as u64);
    (0..len).map(|_| (0..4).map(|_| rng.uniform() - 0.5).sum()).collect()
}

/// A transport that only exchanges, so that dense sums are made by exchanges.
pub(crate) struct OnlyExchange(pub Box<dyn Transport>);

impl Transport for OnlyExchange {
    fn name(&self) -> &'static str {
        "only-exchange"
    }
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn size(&self) -> usize {
        self.0.size()
    }
    fn exchange(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        self.0.exchange(call, stream, sends, receives)
    }
    fn all_reduce(&mut self, _: &CollectiveCall, _: &Stream, _: &Sum<'_, Spans>) -> Result<bool> {
        Ok(false)
    }
    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        self.0.barrier(call)
    }
    fn abort(&mut self, reason: &str) {
        self.0.abort(reason);
    }
    fn deadline(&self) -> Duration {
        self.0.deadline()
    }
    fn split(&mut self, call: &CollectiveCall, color: u64, key: u64) -> Result<Box<dyn Transport>> {
        Ok(Box::new(OnlyExchange(self.0.split(call, color, key)?)))
    }
}

/// A group over [`OnlyExchange`].
pub(crate) fn only_exchange(n: usize) -> Vec<Communicator> {
    let links = Communicator::threads(n, &options()).unwrap().into_iter();
    links.map(|comm| Communicator::new(Box::new(OnlyExchange(comm.into_transport())))).collect()
}

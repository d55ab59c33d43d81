//! Helpers shared by the tests of this crate.
#![allow(clippy::unwrap_used, reason = "helpers of tests may unwrap")]

pub(crate) mod kernels;

use std::sync::mpsc;

use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Result, Stream, Tensor};

/// Numbers of workers for which results must be the same.
pub(crate) const THREADS: [usize; 3] = [1, 2, 4];

pub(crate) fn cpu(threads: usize) -> Device {
    limited(threads, None)
}

pub(crate) fn limited(threads: usize, memory_limit: Option<usize>) -> Device {
    open(DeviceId::Cpu(0), threads, memory_limit)
}

pub(crate) fn open(id: DeviceId, threads: usize, memory_limit: Option<usize>) -> Device {
    let options = DeviceOptions { threads, memory_limit, ..DeviceOptions::default() };
    Device::open(id, &options).unwrap()
}

/// A tensor of `len` elements that a kernel sets to `value`.
pub(crate) fn filled(stream: &Stream, len: usize, value: u32) -> Tensor {
    let tensor = Tensor::empty(stream, [len], DType::U32, Owner::Other).unwrap();
    set(stream, &tensor, value).unwrap();
    tensor
}

/// Sets all elements.
pub(crate) fn set(stream: &Stream, tensor: &Tensor, value: u32) -> Result<()> {
    let launch = stream.launch("set").write(tensor).gpu(|| kernels::set(tensor.numel(), value));
    launch.run(move |args| args.write::<u32>(0).fill(value))
}

/// Keeps a stream busy from the moment this returns until the gate is opened (or dropped).
pub(crate) struct Gate(mpsc::SyncSender<()>);

impl Gate {
    pub(crate) fn close(stream: &Stream) -> Gate {
        let (opener, opened) = mpsc::sync_channel::<()>(1);
        let (entered, inside) = mpsc::sync_channel::<()>(1);
        let kernel = move |_: &mut meristem_device::Args<'_>| {
            entered.send(()).unwrap();
            let _ = opened.recv();
        };
        stream.launch("gate").run(kernel).unwrap();
        inside.recv().unwrap();
        Gate(opener)
    }

    pub(crate) fn open(self) {
        drop(self.0);
    }
}

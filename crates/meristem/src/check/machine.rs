//! Checks of the machine: devices, libraries, instruction sets.

use std::sync::Arc;

use meristem::comm::Communicator;
use meristem::device::random::{Purpose, Rng};
use meristem::device::{
    DType, Device, DeviceId, DeviceOptions, Fill, MemoryFormat, Owner, Stream, Tensor,
};
use meristem::grow::{self, Optimisers, host_graph};
use meristem::nn::{Isa, Metrics, Network, NetworkOptions};

use super::{Fault, REPORT, Verdict, ensure};

/// Checks that kernels run on all workers of the CPU device, or on all streams of a GPU.
pub(super) fn devices(id: DeviceId) -> Verdict {
    let device = Device::open(id, &DeviceOptions::default())?;
    let streams: Vec<Stream> =
        (0..device.threads()).map(|worker| device.stream(&worker.to_string())).collect();
    let written = streams.iter().enumerate().map(|(i, stream)| write_number(stream, i as u32));
    let written = written.collect::<Result<Vec<Tensor>, _>>()?;
    for (i, tensor) in written.iter().enumerate() {
        let got = tensor.to_vec::<u32>()?;
        ensure(got == [i as u32], || Fault::new(format!("stream {i} wrote {got:?}"), REPORT))?;
    }
    let kind = match id {
        DeviceId::Cpu(_) => ["worker", "workers"],
        DeviceId::Cuda(_) => ["stream of the driver", "streams of the driver"],
    };
    Ok(format!("{id} with {}", crate::plain::counted(device.threads(), kind)))
}

/// Checks that the transports' libraries report their versions.
pub(super) fn libraries() -> Verdict {
    let libraries = Communicator::libraries();
    if libraries.is_empty() {
        return Ok("none; ranks over MPI need a build with --features mpi".into());
    }
    let mut named = vec![];
    for (transport, library) in libraries {
        let first = library.lines().next().unwrap_or_default();
        ensure(!first.is_empty(), || {
            let figure = format!("the library of transport `{transport}` reports no version");
            Fault::new(figure, "install an MPI library, such as libopenmpi-dev, and rebuild")
        })?;
        named.push(format!("{transport}: {first}"));
    }
    Ok(named.join("; "))
}

fn write_number(stream: &Stream, number: u32) -> meristem::device::Result<Tensor> {
    let tensor = Tensor::zeros(stream, [1], DType::U32, Owner::Other)?;
    stream.fill("write_number", &[&tensor], Fill::Word(number))?;
    Ok(tensor)
}

/// Relative tolerance between two devices or instruction sets, of the mean loss over [`STEPS`]
/// training steps. Different orders of addition give an error of about 1e-6 per step at this size;
/// a wrong kernel gives an error far above 1e-3.
const TOLERANCE: f64 = 1e-3;
const STEPS: usize = 8;
const BATCH: usize = 32;

/// Checks that training a host gives the same loss with every instruction set of this machine.
pub(super) fn instruction_sets() -> Verdict {
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    let stream = device.stream("check");
    let sets = Isa::available();
    let losses = sets.iter().map(|&isa| train(&stream, isa)).collect::<Result<Vec<f64>, _>>()?;
    let (portable, mut widest) = (losses[0], 0.0f64);
    for (isa, loss) in sets.iter().zip(&losses) {
        let apart = (loss - portable).abs() / portable;
        ensure(apart <= TOLERANCE, || {
            let figure = format!("loss {loss} with {isa}, {portable} with portable kernels");
            Fault::new(figure, "run with MERISTEM_ISA=portable, and report a bug")
        })?;
        widest = widest.max(apart);
    }
    let names: Vec<&str> = sets.iter().map(|isa| isa.name()).collect();
    let used = device.isa();
    Ok(format!("{}; losses within {widest:.0e}; in use: {used}", names.join(", ")))
}

/// Checks that training a host gives the same loss on a GPU as on the CPU.
pub(super) fn kernels(id: DeviceId) -> Verdict {
    let on = |id| -> Result<f64, Fault> {
        let device = Device::open(id, &DeviceOptions::default())?;
        train(&device.stream("check"), Isa::portable())
    };
    let (portable, got) = (on(DeviceId::Cpu(0))?, on(id)?);
    let apart = (got - portable).abs() / portable;
    ensure(apart <= TOLERANCE, || {
        Fault::new(format!("loss {got} on {id}, {portable} with portable kernels"), REPORT)
    })?;
    Ok(format!("loss within {apart:.0e} of the CPU's after {STEPS} steps"))
}

/// Mean loss of a small host over its training steps, on random images.
fn train(stream: &Stream, isa: Isa) -> Result<f64, Fault> {
    let spec: grow::HostSpec = "baseline".parse().map_err(grow::Error::from)?;
    let image = grow::TaskShape { channels: 3, height: 16, width: 16, classes: 10 };
    let graph = Arc::new(host_graph(&spec, &image, Optimisers::default().host)?);
    let mut network = Network::new(stream, graph, NetworkOptions::new(1, 0, isa, BATCH))?;
    let mut random = Rng::new(1, Purpose::Test, 0, 0);
    let (shape, format) = ([BATCH, 3, 16, 16], MemoryFormat::ChannelsLast);
    let inputs = Tensor::empty_with_format(stream, shape, DType::F32, format, Owner::Batches)?;
    let pixels: Vec<f32> = (0..inputs.numel()).map(|_| 2.0 * random.uniform() - 1.0).collect();
    inputs.copy_from_slice(&pixels)?;
    let labels: Vec<u32> = (0..BATCH).map(|_| random.below(10)).collect();
    let targets = Tensor::from_slice(stream, &labels, [BATCH], Owner::Batches)?;
    for _ in 0..STEPS {
        network.train_step(&inputs, &targets)?;
    }
    let metrics = Metrics::parse(&network.metrics().to_vec::<f64>()?);
    Ok(metrics.loss_sum / metrics.samples as f64)
}

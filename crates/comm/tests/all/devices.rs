//! Ranks that are threads, each on another device: the bits of ranks on one device.

use meristem_comm::{
    Communicator, Error, Exchange, ExchangeState, Method, Reduction, SparseMethod, TopKStorage,
    topk_all_gather,
};
use meristem_device::{Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};

use crate::common::{noise, on_each, open_on, options, upload};
use crate::exchange::{MODEL, made, options as exchange_options, step};

/// Results of a rank, as bits.
type Bits = Vec<Vec<u8>>;

fn bytes(tensor: &Tensor) -> Vec<u8> {
    bytemuck::cast_slice(&tensor.to_vec::<f32>().unwrap()).to_vec()
}

/// Every kind of exchange, and the state that it keeps.
fn exchanges(mut comm: Communicator, stream: &Stream) -> (Bits, Vec<ExchangeState>, [u64; 2]) {
    let (rank, ranks) = (comm.rank(), comm.size());
    let mut bits = vec![];
    for len in [1, 100, 5000] {
        let sum = upload(stream, &noise(len, rank, len));
        comm.all_reduce(&sum, Reduction::Mean).unwrap();
        let all = Tensor::zeros(stream, [ranks * len], sum.dtype(), Owner::Other).unwrap();
        let own = upload(stream, &noise(len, rank, 7));
        comm.all_gather(&own, &all).unwrap();
        comm.broadcast(&own, ranks - 1).unwrap();
        bits.extend([&sum, &all, &own].map(bytes));
    }
    let values = upload(stream, &noise(400, rank, 1));
    let mut picks = TopKStorage::new(&values, ranks, 9).unwrap();
    let (values, indices) = {
        let gathered = topk_all_gather(&mut comm, &values, &mut picks, None, 9).unwrap();
        (bytes(&gathered.values), gathered.indices.to_vec::<u32>().unwrap())
    };
    bits.extend([values, bytemuck::cast_slice(&indices).to_vec()]);
    let sparse = [SparseMethod::TopK, SparseMethod::GTopK, SparseMethod::OkTopK { refresh: 2 }];
    let methods = sparse.map(Method::Sparse).into_iter().chain([Method::Dense, Method::Int8]);
    let mut states = vec![];
    for method in methods {
        let mut exchange: Exchange = made(&exchange_options(method), stream, &MODEL).unwrap();
        for number in 0..3 {
            let gradients = step(&mut exchange, &mut comm, stream, number);
            bits.extend(gradients.iter().map(|values| bytemuck::cast_slice(values).to_vec()));
        }
        states.push(exchange.export().unwrap());
    }
    comm.barrier().unwrap();
    // A group of the ranks 1 and 2, and one of rank 0 alone.
    let mut part = comm.split(u64::from(rank > 0), 0).unwrap();
    let sum = upload(stream, &noise(33, rank, 2));
    part.all_reduce(&sum, Reduction::Sum).unwrap();
    bits.push(bytes(&sum));
    let traffic = comm.traffic();
    (bits, states, [traffic.sent_bytes, traffic.received_bytes])
}

fn all_on(devices: &[Device]) -> Vec<(Bits, Vec<ExchangeState>, [u64; 2])> {
    let group = Communicator::threads(devices.len(), &options()).unwrap();
    on_each(devices, group, exchanges)
}

/// Two of three ranks share a device; and each rank has another opening of one device.
#[test]
fn ranks_on_several_devices_have_the_bits_of_one() {
    let cpu = |number| open_on(DeviceId::Cpu(number));
    let one = cpu(0);
    let expected = all_on(&[one.clone(), one.clone(), one]);
    let shared = cpu(1);
    assert!(all_on(&[cpu(0), shared.clone(), shared]) == expected);
    assert!(all_on(&[cpu(0), cpu(0), cpu(0)]) == expected);
}

/// On two GPUs, or on a GPU and the CPU, whose payloads of NaN may differ: there are none.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn ranks_on_a_cuda_device_and_a_cpu_have_the_bits_of_one() {
    let [cpu, gpu] = [DeviceId::Cpu(0), DeviceId::Cuda(0)].map(open_on);
    let expected = all_on(&[cpu.clone(), cpu.clone(), cpu.clone()]);
    assert!(all_on(&[gpu.clone(), cpu, gpu.clone()]) == expected);
    let other = Device::open(DeviceId::Cuda(1), &DeviceOptions::default());
    // A machine with one GPU.
    let other = other.unwrap_or_else(|_| open_on(DeviceId::Cuda(0)));
    assert!(all_on(&[gpu.clone(), other, gpu]) == expected);
}

/// Messages through host memory are checked like those on one device.
#[test]
fn messages_that_do_not_fit_are_named() {
    use meristem_comm::{CollectiveCall, Parcel, Transport};
    let devices = [open_on(DeviceId::Cpu(0)), open_on(DeviceId::Cpu(1))];
    let group = Communicator::threads(2, &options()).unwrap();
    let errors = on_each(&devices, group, |comm, stream| {
        let mut link: Box<dyn Transport> = comm.into_transport();
        let (call, values) = (CollectiveCall::new("unequal"), [1.0f32; 5]);
        let tensor = upload(stream, &values[..4 + link.rank()]);
        let parcel = [Parcel::new(1 - link.rank(), &tensor).unwrap()];
        match link.rank() {
            0 => link.exchange(&call, stream, &parcel, &[]),
            _ => link.exchange(&call, stream, &[], &parcel),
        }
    });
    for error in errors {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Disagreement { rank: 0, .. }), "{error:?}");
        let words = "has a message of 4 x f32, the others 5 x f32";
        assert!(error.to_string().contains(words), "{error}");
    }
}

//! Two ranks that are threads: a dense mean, then the mean of the largest tenth with error
//! feedback. `cargo run -p meristem-comm --example two_threads`

use meristem_comm::{
    CommOptions, Communicator, FeedbackMode, Reduction, Result, SparseMethod, SparseSum,
};
use meristem_device::{Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};

fn main() -> Result<()> {
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    let group = Communicator::threads(2, &CommOptions::default())?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = group
            .into_iter()
            .map(|comm| {
                let stream = device.stream(&format!("rank {}", comm.rank()));
                scope.spawn(move || rank(comm, &stream))
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or(Ok(())))
    })
}

fn rank(mut comm: Communicator, stream: &Stream) -> Result<()> {
    let me = comm.rank();
    let values: Vec<f32> = (0..20).map(|i| (i * (2 * me + 1) % 11) as f32).collect();
    let gradient = Tensor::from_slice(stream, &values, [20], Owner::Other)?;
    comm.all_reduce(&gradient, Reduction::Mean)?;
    let mean = gradient.to_vec::<f32>()?; // the one wait
    if me == 0 {
        println!("mean            {mean:?}");
    }
    let mut sum = SparseSum::new(&gradient, SparseMethod::TopK, FeedbackMode::Residual)?;
    for step in 0..3 {
        gradient.copy_from_slice(&values)?;
        sum.run(&mut comm, &gradient, &gradient, 2, Reduction::Mean)?;
        let mean = gradient.to_vec::<f32>()?;
        if me == 0 {
            println!("top 2, step {step}   {mean:?}");
        }
    }
    if me == 0 {
        println!("{} bytes sent by rank 0", comm.traffic().sent_bytes);
    }
    comm.barrier()
}

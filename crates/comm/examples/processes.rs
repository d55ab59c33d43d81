//! Ranks that are processes: the mean of a gradient, dense, then of the largest tenth with error
//! feedback. All ranks have the same bits. Needs an MPI library:
//!
//! ```sh
//! cargo build -p meristem-comm --features mpi --example processes
//! mpirun -n 4 target/debug/examples/processes    # as root and with few cores:
//! mpirun -n 4 --allow-run-as-root --oversubscribe target/debug/examples/processes
//! ```

use std::process::ExitCode;

use meristem_comm::{
    CommOptions, Communicator, Error, FeedbackMode, Reduction, SparseMethod, SparseSum,
};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Tensor};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let mut comm = Communicator::mpi(&CommOptions::default())?;
    let (me, n) = (comm.rank(), comm.size());
    // Processes share the cores of the machine.
    let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
    let stream = Device::open(DeviceId::Cpu(0), &options)?.stream("rank");

    let values: Vec<f32> = (0..20).map(|i| (i * (2 * me + 1) % 11) as f32).collect();
    let gradient = Tensor::from_slice(&stream, &values, [20], Owner::Other)?;
    comm.all_reduce(&gradient, Reduction::Mean)?;
    let mut said = vec![format!("mean of {n}    {:?}", gradient.to_vec::<f32>()?)];

    let mut sum = SparseSum::new(&gradient, SparseMethod::TopK, FeedbackMode::Residual)?;
    for step in 0..3 {
        gradient.copy_from_slice(&values)?;
        sum.run(&mut comm, &gradient, &gradient, 2, Reduction::Mean)?;
        said.push(format!("top 2, step {step} {:?}", gradient.to_vec::<f32>()?));
    }

    // Gathers every rank's result on every rank.
    let all = Tensor::zeros(&stream, [20 * n], DType::F32, Owner::Other)?;
    comm.all_gather(&gradient, &all)?;
    let all = all.to_vec::<f32>()?;
    let same = all.chunks(20).all(|of_rank| of_rank == &all[..20]);
    said.push(format!("all ranks the same: {same}"));
    if me == 0 {
        said.iter().for_each(|line| println!("{line}"));
        println!("{} bytes sent by rank 0", comm.traffic().sent_bytes);
    }
    Ok(())
}

//! What a launch, a wait and an allocation cost the host, as distributions. Run on an idle machine:
//! `cargo bench -p meristem-device`.

use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Result, Stream, Tensor};
use std::time::Instant;

const SAMPLES: usize = 20_000;

fn main() -> Result<()> {
    let device = Device::open(DeviceId::Cpu, &DeviceOptions::default())?;
    let (stream, side) = (device.stream("main"), device.stream("side"));
    let tensors = (0..8)
        .map(|_| Tensor::zeros(&stream, [64], DType::F32, Owner::Other))
        .collect::<Result<Vec<_>>>()?;
    let aside = tensors[0].on(&side)?;
    println!("{} workers; nanoseconds, each sample one operation", device.threads());
    println!("{:<34}{:>8}{:>8}{:>8}{:>8}{:>9}", "", "mean", "p10", "p50", "p90", "p99");
    report("enqueue, empty, queue not full", enqueue(&stream, &[])?);
    report("enqueue, 8 arguments", enqueue(&stream, &tensors)?);
    report("round trip: launch and wait", sample(1, || round_trip(&stream, &tensors[..1]))?);
    report(
        "the same over two streams",
        sample(1, || two_streams(&stream, &side, &tensors, &aside))?,
    );
    let none = || Tensor::empty(&stream, [1000], DType::F32, Owner::Other).map(drop);
    report("allocate and release", sample(100, none)?);
    let two = || {
        let x = Tensor::empty(&stream, [1000], DType::F32, Owner::Other)?;
        Tensor::empty(&stream, [3000], DType::F32, Owner::Batches).map(|y| drop((x, y)))
    };
    report("allocate and release, of 2 sizes", sample(100, two)?.iter().map(|t| t / 2.0).collect());
    Ok(())
}

/// Enqueues in bursts that fit the queue, waiting in between.
fn enqueue(stream: &Stream, tensors: &[Tensor]) -> Result<Vec<f64>> {
    const BURST: usize = 200;
    let mut samples = Vec::with_capacity(SAMPLES);
    while samples.len() < SAMPLES {
        for _ in 0..BURST {
            let start = Instant::now();
            let launch = tensors.iter().fold(stream.launch("empty"), |launch, x| launch.write(x));
            launch.run(|_| {})?;
            samples.push(start.elapsed().as_nanos() as f64);
        }
        stream.synchronize()?;
    }
    Ok(samples)
}

fn round_trip(stream: &Stream, tensors: &[Tensor]) -> Result<()> {
    stream.launch("empty").write(&tensors[0]).run(|_| {})?;
    stream.synchronize()
}

/// A launch on one stream, and one on another that has to wait for it.
fn two_streams(a: &Stream, b: &Stream, tensors: &[Tensor], aside: &Tensor) -> Result<()> {
    a.launch("produce").write(&tensors[0]).run(|_| {})?;
    b.launch("consume").read(aside).run(|_| {})?;
    b.synchronize()
}

/// Times `repeat` calls at once, per call.
fn sample(repeat: usize, mut call: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    (0..SAMPLES)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..repeat {
                call()?;
            }
            Ok(start.elapsed().as_nanos() as f64 / repeat as f64)
        })
        .collect()
}

fn report(name: &str, mut samples: Vec<f64>) {
    samples.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| samples[(share * (samples.len() - 1) as f64) as usize];
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    let (p10, p50, p90, p99) = (at(0.1), at(0.5), at(0.9), at(0.99));
    println!("{name:<34}{mean:>8.0}{p10:>8.0}{p50:>8.0}{p90:>8.0}{p99:>9.0}");
}

//! Training of one host without modules on the embedded images, and its evaluation.
//!
//!     cargo run --release -p meristem --example train_host

use std::sync::Arc;

use meristem::data::{DatasetSpec, GatherBatches, GatherConfig, Residency, Split, cache};
use meristem::device::{Device, DeviceId, DeviceOptions};
use meristem::grow::{HostSpec, Optimisers, TaskShape, host_graph};
use meristem::nn::{Isa, Metrics, Network, NetworkOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    let stream = device.stream("env 0");

    // The images are on the device as bytes; each batch is gathered from there.
    let load = |split| cache::load(&device, &DatasetSpec::embedded(), split, Residency::Resident);
    let (train, test) = (load(Split::Train)?, load(Split::Test)?);
    let info = train.info();
    let image = TaskShape {
        channels: info.channels,
        height: info.height,
        width: info.width,
        classes: info.classes.len(),
    };

    // A network is a graph, which is compiled into a plan at its first use.
    let host: HostSpec = "cnn:channels=8,blocks=3,kernel=3,pools=3".parse()?;
    let graph = Arc::new(host_graph(&host, &image, Optimisers::default().host)?);
    let options = NetworkOptions::new(42, 0, Isa::detect(), 128);
    let mut network = Network::new(&stream, graph, options)?;
    println!("{host}: {} parameters", host.parameters(&image)?);

    let config = GatherConfig { seed: 42, ..GatherConfig::new(128, vec![device.id()]) };
    let mut batches = GatherBatches::new(&config, &[train], std::slice::from_ref(&stream))?;
    for epoch in 0..3 {
        network.reset_metrics()?;
        batches.start_epoch(epoch)?;
        while let Some(batch_of_each_env) = batches.next()? {
            for batch in &batch_of_each_env {
                network.train_step(&batch.inputs, &batch.targets)?; // does not wait
            }
        }
        let metrics = Metrics::parse(&network.metrics().to_vec()?); // the only wait of an epoch
        println!("epoch {epoch}: loss {:.4}", metrics.loss_sum / metrics.samples as f64);
    }

    let config = GatherConfig { shuffle: false, ..GatherConfig::new(128, vec![device.id()]) };
    let mut batches = GatherBatches::new(&config, &[test], std::slice::from_ref(&stream))?;
    network.reset_metrics()?;
    batches.start_epoch(0)?;
    while let Some(batch_of_each_env) = batches.next()? {
        for batch in &batch_of_each_env {
            network.eval_step(&batch.inputs, &batch.targets, 0)?;
        }
    }
    let metrics = Metrics::parse(&network.metrics().to_vec()?);
    let accuracy = metrics.eval[0].accuracy().unwrap_or(0.0);
    println!("test accuracy {:.1} %", 100.0 * accuracy);
    Ok(())
}

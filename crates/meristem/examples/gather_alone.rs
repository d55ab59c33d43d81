//! The gather without a network: batches for two consumers from one resident copy.
//!
//!     cargo run --release -p meristem --example gather_alone

use meristem::data::{Augment, DatasetSpec, GatherBatches, GatherConfig, Residency, Split, cache};
use meristem::device::{Device, DeviceId, DeviceOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    let data = cache::load(&device, &DatasetSpec::embedded(), Split::Train, Residency::Resident)?;
    println!("{} images, {:.1} MB on the device", data.len(), device.memory().current as f64 / 1e6);

    // One stream per consumer: each gets its own memory, and neither waits for the other.
    let streams = [device.stream("left"), device.stream("right")];
    let config = GatherConfig {
        seed: 42,
        drop_last: true,
        augment: Augment::STANDARD,
        ..GatherConfig::new(128, vec![device.id(); 2])
    };
    let mut batches = GatherBatches::new(&config, &[data], &streams)?;

    for epoch in 0..2 {
        batches.start_epoch(epoch)?;
        let before = device.counts();
        let mut count = 0;
        while let Some(parts) = batches.next()? {
            if count == 0 {
                for part in &parts {
                    // Reading a tensor waits for its gather; no other call here waits.
                    let labels = part.targets.to_vec::<u32>()?;
                    println!(
                        "epoch {epoch}, consumer {}: images {:?} with strides {:?}, labels {:?} …",
                        part.env,
                        part.inputs.dims(),
                        part.inputs.strides(),
                        &labels[..8]
                    );
                }
            }
            count += 1;
        }
        let spent = device.counts() - before;
        println!("epoch {epoch}: {count} batches each, {} allocations", spent.allocations);
    }
    device.synchronize()?;
    Ok(())
}

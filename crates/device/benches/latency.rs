//! Cost of a launch, a wait and an allocation to the host, as distributions. Run on an idle
//! machine: `cargo bench -p meristem-device`, with `-- --json` for one line of JSON. The cases take
//! turns in many short blocks, so that other activity of the machine affects all of them alike.

use std::time::{Duration, Instant};

use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Result, Stream, Tensor};

/// Turns of every case.
const BLOCKS: usize = 200;
/// Launches of a block: they fit the queue.
const BURST: usize = 100;
/// Calls that are timed at once where one is too short to time.
const BATCH: usize = 100;
/// Round trips of a block to a worker that has gone to sleep, and how long it is left alone.
const SLEEPS: usize = 5;
const ALONE: Duration = Duration::from_millis(1);

fn main() -> Result<()> {
    let json = std::env::args().any(|argument| argument == "--json");
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    let bench = Bench::new(&device)?;
    let mut cases = Case::all();
    // The first block warms caches, the pool and the clock.
    for block in 0..=BLOCKS {
        for case in &mut cases {
            let samples = (case.block)(&bench)?;
            if block > 0 {
                case.samples.extend(samples);
            }
        }
    }
    cases.iter_mut().for_each(|case| case.samples.sort_unstable_by(f64::total_cmp));
    if json {
        print_json(&device, &cases)
    } else {
        print_table(&device, &cases)
    }
    Ok(())
}

/// Device, streams and tensors of the cases.
struct Bench {
    main: Stream,
    side: Stream,
    tensors: Vec<Tensor>,
}

impl Bench {
    fn new(device: &Device) -> Result<Self> {
        let (main, side) = (device.stream("main"), device.stream("side"));
        let tensor = |_| Tensor::zeros(&main, [64], DType::F32, Owner::Other);
        let tensors = (0..4).map(tensor).collect::<Result<_>>()?;
        Ok(Bench { main, side, tensors })
    }

    fn launch(&self, arguments: usize) -> Result<()> {
        let launch = self.main.launch("empty");
        self.tensors[..arguments].iter().fold(launch, |launch, x| launch.write(x)).run(|_| {})
    }

    fn enqueue(&self, arguments: usize) -> Result<Vec<f64>> {
        let samples = (0..BURST).map(|_| timed(1, || self.launch(arguments))).collect();
        self.main.synchronize()?;
        samples
    }

    fn round_trip(&self) -> Result<()> {
        self.launch(1)?;
        self.main.synchronize()
    }

    fn asleep(&self) -> Result<Vec<f64>> {
        (0..SLEEPS)
            .map(|_| {
                std::thread::sleep(ALONE);
                timed(1, || self.round_trip())
            })
            .collect()
    }

    fn allocate(&self, sizes: &[usize]) -> Result<Vec<f64>> {
        let once = || {
            let tensor = |&len: &usize| Tensor::empty(&self.main, [len], DType::F32, Owner::Other);
            match sizes {
                [one] => tensor(one).map(drop),
                _ => sizes.iter().map(tensor).collect::<Result<Vec<_>>>().map(drop),
            }
        };
        let each = sizes.len() as f64;
        (0..10).map(|_| Ok(timed(BATCH, once)? / each)).collect()
    }

    /// One stream is made to wait for another that has not finished.
    fn record_and_wait(&self) -> Result<Vec<f64>> {
        let one = |_| {
            self.launch(0)?;
            timed(1, || self.side.wait(&self.main.record()))
        };
        let samples = (0..BURST).map(one).collect();
        self.side.synchronize()?;
        self.main.synchronize()?;
        samples
    }
}

/// Nanoseconds per call of `repeat` calls.
fn timed(repeat: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..repeat {
        call()?;
    }
    Ok(start.elapsed().as_nanos() as f64 / repeat as f64)
}

struct Case {
    name: &'static str,
    /// The project's target for the median on an idle machine, in nanoseconds.
    target: Option<f64>,
    block: fn(&Bench) -> Result<Vec<f64>>,
    /// Nanoseconds.
    samples: Vec<f64>,
}

impl Case {
    fn all() -> Vec<Case> {
        let case = |name, target, block| Case { name, target, block, samples: Vec::new() };
        vec![
            case("enqueue an empty kernel", Some(1000.0), |b| b.enqueue(0)),
            case("enqueue, 4 arguments", None, |b| b.enqueue(4)),
            case("launch and wait, worker awake", Some(5000.0), |b| {
                (0..BURST).map(|_| timed(1, || b.round_trip())).collect()
            }),
            case("launch and wait, worker asleep", None, Bench::asleep),
            case("allocate and release", Some(100.0), |b| b.allocate(&[1000])),
            case("allocate and release, 3 sizes", None, |b| b.allocate(&[1000, 300, 5000])),
            case("event: record, and make wait", None, Bench::record_and_wait),
        ]
    }

    fn at(&self, share: f64) -> f64 {
        self.samples[(share * (self.samples.len() - 1) as f64) as usize]
    }
}

const SHARES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)];

fn print_table(device: &Device, cases: &[Case]) {
    println!("nanoseconds; {} workers, {BLOCKS} blocks of each in turns", device.threads());
    println!("{:<32}{:>9}{:>9}{:>9}{:>11}{:>9}", "", "p50", "p90", "p99", "max", "target");
    for case in cases {
        let [p50, p90, p99, max] = SHARES.map(|(_, share)| case.at(share));
        let target = case.target.map_or(String::new(), |target| format!("{target:.0}"));
        println!("{:<32}{p50:>9.0}{p90:>9.0}{p99:>9.0}{max:>11.0}{target:>9}", case.name);
    }
}

fn print_json(device: &Device, cases: &[Case]) {
    let case = |case: &Case| {
        let mut object = serde_json::Map::new();
        object.insert("name".into(), case.name.into());
        object.insert("samples".into(), case.samples.len().into());
        object.insert("target_ns".into(), case.target.into());
        for (name, share) in SHARES {
            object.insert(format!("{name}_ns"), case.at(share).into());
        }
        object
    };
    let cases: Vec<_> = cases.iter().map(case).collect();
    println!(
        "{}",
        serde_json::json!({ "workers": device.threads(), "blocks": BLOCKS, "cases": cases })
    );
}

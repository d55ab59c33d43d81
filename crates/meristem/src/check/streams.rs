//! Checks of streams: many streams with little memory, compared with one stream with ample memory.

use meristem::device::{
    Call, DType, Device, DeviceId, DeviceOptions, Kernel, KernelSource, Operand, Owner, Stream,
    Tensor, read_back_as,
};

use super::{Fault, REPORT, Verdict, ensure};

static SOURCE: KernelSource = KernelSource {
    name: "crates/meristem/src/check/streams.cu",
    text: include_str!("streams.cu"),
    headers: &[],
};

const READ: Operand = Operand::read::<f32>();

const fn kernel(entry: &'static str, operands: &'static [Operand]) -> Kernel {
    Kernel { source: &SOURCE, entry, operands, values: 0 }
}

static CURVE: Kernel = kernel("curve", &[READ, Operand::write::<f32>()]);
static SUM: Kernel = kernel("sum", &[READ, Operand::write::<f64>()]);
static UPDATE: Kernel = kernel("update", &[READ, Operand::write::<f32>()]);

const STREAMS: usize = 32;
const STEPS: usize = 300;
const LEN: usize = 256;
/// Memory limit: the states, the sums, and four temporaries shared by all streams.
const LIMIT: usize = STREAMS * (4 * LEN + 64) + 4 * (4 * LEN);

/// Checks that 32 streams with memory for four temporaries give the bits of one stream with ample
/// memory.
pub(super) fn stress(id: DeviceId) -> Verdict {
    let ample = DeviceOptions { threads: 1, ..DeviceOptions::default() };
    let expected = run(&Device::open(id, &ample)?, 1)?;
    let tight = DeviceOptions { memory_limit: Some(LIMIT), ..DeviceOptions::default() };
    let device = Device::open(id, &tight)?;
    let got = run(&device, STREAMS)?;
    let wrong = got.iter().zip(&expected).filter(|(a, b)| a != b).count();
    ensure(wrong == 0, || {
        Fault::new(
            format!(
                "{wrong} of {STREAMS} streams have other bits than one stream with ample memory"
            ),
            REPORT,
        )
    })?;
    let peak = device.memory().reserved_peak;
    Ok(format!(
        "{STREAMS} streams with {STEPS} steps each in {} KiB: \
         the bits of one stream with ample memory",
        peak / 1024
    ))
}

/// Checks the same program with the race sanitizer, which checks every launch by vector clocks.
pub(super) fn races(id: DeviceId) -> Verdict {
    let options = DeviceOptions { sanitize: true, ..DeviceOptions::default() };
    let device = Device::open(id, &options)?;
    let got = run(&device, STREAMS)?;
    let races = device.races();
    if let Some(race) = races.first() {
        return Err(Fault::new(race.to_string(), REPORT));
    }
    let ample = Device::open(id, &DeviceOptions::default())?;
    let same = got == run(&ample, 1)?;
    ensure(same, || Fault::new("the results depend on uninitialised memory", REPORT))?;
    Ok(format!("{} launches on {STREAMS} streams, no races", device.counts().launches))
}

/// Runs the program. Every step computes a temporary from the state of an env. Another stream sums
/// the temporary, and may read it after the host thread has dropped it.
fn run(device: &Device, streams: usize) -> Result<Vec<Vec<u8>>, Fault> {
    let streams: Vec<Stream> = (0..streams).map(|i| device.stream(&format!("env {i}"))).collect();
    let side = device.stream("sums");
    let (mut states, mut sums) = (vec![], vec![]);
    for env in 0..STREAMS {
        let start: Vec<f32> = (0..LEN).map(|i| (i + env + 1) as f32 / 400.0).collect();
        let stream = &streams[env % streams.len()];
        states.push(Tensor::from_slice(stream, &start, [LEN], Owner::Parameters)?);
        sums.push(Tensor::zeros(&side, [1], DType::F64, Owner::Metrics)?);
    }
    for _ in 0..STEPS {
        for (state, sum) in states.iter().zip(&sums) {
            step(state, &side, sum)?;
        }
    }
    let sums: Vec<Vec<f64>> = read_back_as(&sums.iter().collect::<Vec<_>>())?;
    let states: Vec<Vec<f32>> = read_back_as(&states.iter().collect::<Vec<_>>())?;
    let bits = |(state, sum): (&Vec<f32>, &Vec<f64>)| {
        let state = state.iter().flat_map(|value| value.to_le_bytes());
        state.chain(sum.iter().flat_map(|value| value.to_le_bytes())).collect()
    };
    Ok(states.iter().zip(&sums).map(bits).collect())
}

/// Runs one step of the logistic map in its chaotic range, in which a wrong bit soon changes all
/// bits.
fn step(state: &Tensor, side: &Stream, sum: &Tensor) -> meristem::device::Result<()> {
    let stream = state.stream();
    let curve = Tensor::empty(stream, [LEN], DType::F32, Owner::Activations)?;
    let launch = stream.launch("curve").read(state).write(&curve);
    launch.gpu(|| Call::each(&CURVE, LEN)).run(|args| {
        let x = args.read::<f32>(0);
        args.write::<f32>(1).iter_mut().zip(x).for_each(|(y, x)| *y = x * (1.0 - x));
    })?;
    let aside = curve.on(side)?;
    side.launch("sum").read(&aside).write(sum).gpu(|| Call::new(&SUM, 1, 32)).run(|args| {
        let total: f32 = args.read::<f32>(0).iter().sum();
        args.write::<f64>(1)[0] += f64::from(total);
    })?;
    drop(aside);
    let launch = stream.launch("update").read(&curve).write(state);
    launch.gpu(|| Call::each(&UPDATE, LEN)).run(|args| {
        let y = args.read::<f32>(0);
        args.write::<f32>(1).iter_mut().zip(y).for_each(|(x, y)| *x = 3.7 * y + 0.01);
    })
}

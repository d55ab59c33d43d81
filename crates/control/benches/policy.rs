//! Time of the policy: a step of 16 envs at width 128, and a pass of an update with Adam's step at width
//! 512 over 4 envs × 40 steps; the peer of the latter is `bench/torch_ppo.py`.
//!
//! `cargo bench -p meristem-control --bench policy`; `MERISTEM_ISA` picks the instruction set. Each figure is
//! the median of many runs, the wait for the device included.

use std::time::Instant;

use meristem_control::policy::{
    LossConfig, Pass, Policy, PolicyBatch, PolicyConfig, PolicyInputs, PolicyShape,
};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};
use meristem_nn::Isa;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let isa = Isa::from_env()?;
    println!("instruction set {isa}, one stream");
    let stream = Device::open(DeviceId::Cpu, &DeviceOptions::default())?.stream("policy");
    step(&stream, isa)?;
    update(&stream, isa)
}

fn shape(hidden: usize) -> PolicyShape {
    PolicyShape { features: 23 + 31 * 3, slots: 3, blueprints: 7, hidden }
}

fn new(stream: &Stream, hidden: usize, isa: Isa) -> Outcome<Policy> {
    let config = PolicyConfig::new(1);
    Ok(Policy::new(stream, shape(hidden), &config, &LossConfig::default(), isa)?)
}

fn report(what: &str, mut times_us: Vec<f64>) {
    times_us.sort_by(f64::total_cmp);
    let at = |share: f64| times_us[(share * (times_us.len() - 1) as f64) as usize];
    println!("{what}: median {:.0} us, 10 % {:.0}, 90 % {:.0}", at(0.5), at(0.1), at(0.9));
}

fn step(stream: &Stream, isa: Isa) -> Outcome<()> {
    const ENVS: usize = 16;
    let mut policy = new(stream, 128, isa)?;
    let shape = *policy.shape();
    let inputs = Inputs::new(stream, &shape, ENVS, ENVS)?;
    let output = empty(stream, ENVS, shape.logits() + 1)?;
    let next = policy.initial_state(ENVS)?;
    let mut times = vec![];
    for _ in 0..500 {
        let start = Instant::now();
        policy.step(&inputs.all(), &output, &next)?;
        output.to_vec::<f32>()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    report("step, 16 envs, width 128, read-back included", times);
    Ok(())
}

fn update(stream: &Stream, isa: Isa) -> Outcome<()> {
    const STEPS: usize = 40;
    const ENVS: usize = 4;
    const ROWS: usize = STEPS * ENVS;
    let mut policy = new(stream, 512, isa)?;
    let shape = *policy.shape();
    let inputs = Inputs::new(stream, &shape, ROWS, ENVS)?;
    let mut rng = Rng::new(2, Purpose::Test, 0, 0);
    let heads = shape.heads();
    let choices: Vec<u32> = (0..ROWS).flat_map(|_| heads).map(|n| rng.below(n as u32)).collect();
    let choices = Tensor::from_slice(stream, &choices, [ROWS, heads.len()], Owner::Policy)?;
    let legal = vec![1u8; ROWS * shape.logits()];
    let legal = Tensor::from_slice(stream, &legal, [ROWS, shape.logits()], Owner::Policy)?;
    let (advantages, returns) = (floats(stream, ROWS, 1)?, floats(stream, ROWS, 1)?);
    let (advantages, returns) = (advantages.view(0, [ROWS])?, returns.view(0, [ROWS])?);
    let batch = PolicyBatch {
        steps: STEPS,
        inputs: inputs.all(),
        choices: &choices,
        legal: &legal,
        advantages: &advantages,
        returns: &returns,
    };
    let mut times = vec![];
    for epoch in 0..60 {
        let start = Instant::now();
        let pass = if epoch == 0 { Pass::First } else { Pass::Later };
        policy.differentiate(&batch, pass)?;
        policy.report()?;
        policy.apply()?;
        policy.report()?; // waits for the update
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    report("update, 4 envs x 40 steps, width 512", times.split_off(5));
    Ok(())
}

struct Inputs {
    observations: Tensor,
    blueprints: Tensor,
    keep: Tensor,
    state: Tensor,
}

impl Inputs {
    fn new(stream: &Stream, shape: &PolicyShape, rows: usize, envs: usize) -> Outcome<Self> {
        let blueprints: Vec<u32> = (0..rows * shape.slots).map(|i| i as u32 % 8).collect();
        Ok(Self {
            observations: floats(stream, rows, shape.features)?,
            blueprints: Tensor::from_slice(
                stream,
                &blueprints,
                [rows, shape.slots],
                Owner::Policy,
            )?,
            keep: Tensor::from_slice(stream, &vec![1f32; rows], [rows], Owner::Policy)?,
            state: Tensor::zeros(stream, [envs, 2 * shape.hidden], DType::F32, Owner::Policy)?,
        })
    }

    fn all(&self) -> PolicyInputs<'_> {
        let Self { observations, blueprints, keep, state } = self;
        PolicyInputs { observations, blueprints, keep, state }
    }
}

fn floats(stream: &Stream, rows: usize, columns: usize) -> Outcome<Tensor> {
    let mut rng = Rng::new(3, Purpose::Test, 0, columns as u64);
    let values: Vec<f32> = (0..rows * columns).map(|_| 2.0 * rng.uniform() - 1.0).collect();
    Ok(Tensor::from_slice(stream, &values, [rows, columns], Owner::Policy)?)
}

fn empty(stream: &Stream, rows: usize, columns: usize) -> Outcome<Tensor> {
    Ok(Tensor::empty(stream, [rows, columns], DType::F32, Owner::Policy)?)
}

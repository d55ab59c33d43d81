//! Times of the policy: the control step of 16 envs at width 128, its forward pass, and a pass of
//! an update with Adam's step at width 512 over 4 envs × 40 steps. `bench/torch_ppo.py` measures
//! the same update in PyTorch.
//!
//! `cargo bench -p meristem-control --bench policy`, with `-- --json` for one line of JSON;
//! `MERISTEM_ISA` selects the instruction set. Every number is from many runs and includes the wait
//! for the device.

#[path = "../tests/all/common/mod.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod common;

use std::time::Instant;

use meristem_control::policy::{
    LossConfig, Policy, PolicyBatch, PolicyConfig, PolicyForm, PolicyInputs, PolicyShape, PpoPass,
};
use meristem_control::{Controller, Learning, Ppo, PpoConfig, PpoOptions};
use meristem_device::random::{Purpose, Rng};
use meristem_device::{DType, Device, DeviceId, DeviceOptions, Owner, Stream, Tensor};
use meristem_nn::{Isa, ValueType};

use self::common::{FakeEnv, quick, tiny, worth};

type BenchResult<T> = Result<T, Box<dyn std::error::Error>>;

const SLOTS: usize = 3;
const STEP_ENVS: usize = 16;

fn main() -> BenchResult<()> {
    let json = std::env::args().any(|word| word == "--json");
    let stream = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?.stream("policy");
    let isa = stream.device().isa();
    let results = [
        ("control_step_us", "control step, 16 envs, width 128", control_step(&stream, isa)?),
        ("forward_us", "of it the forward pass and its read-back", forward(&stream, isa)?),
        ("update_us", "update, 4 envs x 40 steps, width 512", update(&stream, isa)?),
    ];
    if json {
        let fields = results.iter().map(|(key, _, times)| {
            let [least, median] = [0.0, 0.5].map(|share| quantile(times, share));
            format!("\"{key}\": {median}, \"{key}_least\": {least}")
        });
        println!("{{{}}}", fields.collect::<Vec<_>>().join(", "));
        return Ok(());
    }
    println!("instruction set {isa}, one stream; microseconds");
    for (_, what, times) in &results {
        let at = |share: f64| quantile(times, share);
        let [least, low, median, high] = [0.0, 0.1, 0.5, 0.9].map(at);
        println!("{what}: median {median:.0}, least {least:.0}, 10 % {low:.0}, 90 % {high:.0}");
    }
    Ok(())
}

fn quantile(times: &[f64], share: f64) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[(share * (times.len() - 1) as f64) as usize]
}

fn shape(hidden: usize) -> PolicyShape {
    let form = PolicyForm::Vector;
    PolicyShape { form, features: 23 + 31 * SLOTS, slots: SLOTS, blueprints: 7, hidden }
}

fn new(stream: &Stream, hidden: usize, isa: Isa) -> BenchResult<Policy> {
    let config = PolicyConfig::new(1);
    Ok(Policy::new(stream, shape(hidden), &config, &LossConfig::default(), isa)?)
}

/// Whole steps of the learning controller on hosts that do not train: observe, forward and draw,
/// read back, apply the actions and rewards.
fn control_step(stream: &Stream, isa: Isa) -> BenchResult<Vec<f64>> {
    const STEPS: usize = 40;
    let config = PpoConfig { hidden: 128, ..PpoConfig::default() };
    let (seed, learning) = (1, Learning::On);
    let options =
        PpoOptions { envs: STEP_ENVS, steps: STEPS, seed, isa, learning, values: ValueType::F32 };
    let host = tiny(SLOTS, quick());
    let mut ppo = Ppo::new(stream, config, &host, options)?;
    let mut times = vec![];
    for _round in 0..4 {
        let env = |i| FakeEnv::new(i, host.clone(), STEPS as u32);
        let mut fleet: Vec<_> = (0..STEP_ENVS).map(env).collect();
        (0..STEP_ENVS).for_each(|env| ppo.begin_episode(env));
        for step in 0..STEPS {
            for env in &mut fleet {
                env.epoch(2.0, (10 + step) as f32);
                env.measured.fill(worth(Some(1.0)));
                env.remember(&[]);
            }
            let start = Instant::now();
            let views: Vec<_> = fleet.iter().map(FakeEnv::view).collect();
            let actions = ppo.decide_all(&views)?;
            for (env, action) in fleet.iter_mut().zip(&actions) {
                env.act(action);
            }
            ppo.reward_all(&[0.1; STEP_ENVS])?;
            stream.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        ppo.end_round(&fleet.iter().map(FakeEnv::view).collect::<Vec<_>>())?;
    }
    Ok(times.split_off(STEPS))
}

fn forward(stream: &Stream, isa: Isa) -> BenchResult<Vec<f64>> {
    let mut policy = new(stream, 128, isa)?;
    let shape = *policy.shape();
    let inputs = Inputs::new(stream, &shape, STEP_ENVS, STEP_ENVS)?;
    let output = empty(stream, STEP_ENVS, shape.logits() + 1)?;
    let next = policy.initial_state(STEP_ENVS)?;
    let mut times = vec![];
    for _ in 0..500 {
        let start = Instant::now();
        policy.forward(1, &inputs.all(), &output, &next)?;
        output.to_vec::<f32>()?;
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times.split_off(5))
}

fn update(stream: &Stream, isa: Isa) -> BenchResult<Vec<f64>> {
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
        let pass = if epoch == 0 { PpoPass::First } else { PpoPass::Later };
        policy.differentiate(&batch, pass)?;
        policy.report()?;
        policy.apply()?;
        policy.report()?; // waits for the update
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times.split_off(5))
}

struct Inputs {
    observations: Tensor,
    blueprints: Tensor,
    keep: Tensor,
    state: Tensor,
}

impl Inputs {
    fn new(stream: &Stream, shape: &PolicyShape, rows: usize, envs: usize) -> BenchResult<Self> {
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
        PolicyInputs { rows: vec![observations, blueprints, keep], state }
    }
}

fn floats(stream: &Stream, rows: usize, columns: usize) -> BenchResult<Tensor> {
    let mut rng = Rng::new(3, Purpose::Test, 0, columns as u64);
    let values: Vec<f32> = (0..rows * columns).map(|_| 2.0 * rng.uniform() - 1.0).collect();
    Ok(Tensor::from_slice(stream, &values, [rows, columns], Owner::Policy)?)
}

fn empty(stream: &Stream, rows: usize, columns: usize) -> BenchResult<Tensor> {
    Ok(Tensor::empty(stream, [rows, columns], DType::F32, Owner::Policy)?)
}

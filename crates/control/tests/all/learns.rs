//! PPO on a task with a known optimum (see `common::toy`).

use meristem_control::{
    Controller, Heuristic, HeuristicConfig, Learning, Ppo, PpoConfig, PpoOptions, RandomController,
};
use meristem_device::{Device, DeviceId, DeviceOptions, Stream};
use meristem_nn::{Isa, ValueType};

use crate::common::quick_heuristic;
use crate::common::toy::{STEPS, Toy, best_return, play};

const ENVS: usize = 32;
const ROUNDS: usize = 200;
/// Rounds between two evaluations of the policy without exploration.
const LOOK: usize = 5;

/// Mean sum of rewards over several rounds of a controller that does not learn.
fn mean_return(controller: &mut dyn Controller) -> f64 {
    let mut fleet: Vec<Toy> = (0..ENVS).map(Toy::new).collect();
    (0..5).map(|_| play(controller, &mut fleet).0).sum::<f64>() / 5.0
}

fn new(stream: &Stream, envs: usize, seed: u64, learning: Learning) -> Ppo {
    // The policy and the task are small, so a higher learning rate than the default is stable.
    let config = PpoConfig { hidden: 32, lr: 2e-3, ..PpoConfig::default() };
    let (steps, isa) = (STEPS as usize, Isa::detect());
    let options = PpoOptions { envs, steps, seed, isa, learning, values: ValueType::F32 };
    let toy = Toy::new(0);
    Ppo::new(stream, config, &toy.env.host, options).unwrap()
}

/// First round after which the greedy policy earns `goal`, and its mean sum of rewards.
fn learn(seed: u64, goal: f64) -> (usize, f64) {
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
    let stream = device.stream("policy");
    let mut policy = new(&stream, ENVS, seed, Learning::On);
    let mut judge = new(&stream, 1, seed, Learning::Greedy);
    let mut fleet: Vec<Toy> = (0..ENVS).map(Toy::new).collect();
    let mut one = [Toy::new(0)];
    let mut best = f64::NEG_INFINITY;
    for round in 1..=ROUNDS {
        play(&mut policy, &mut fleet);
        if round % LOOK == 0 {
            let (weights, metadata) = policy.export().unwrap();
            judge.import(&weights, &metadata).unwrap();
            let earned = play(&mut judge, &mut one).0;
            best = best.max(earned);
            if earned >= goal {
                return (round, earned);
            }
        }
    }
    panic!("seed {seed}: {best:.3} after {ROUNDS} rounds, wanted {goal:.3}");
}

/// At least 90 % of the largest return within 200 rounds, for three seeds, each above the
/// heuristic. Measured when this was written: rounds 70, 40, 30 and 75 for seeds 0 to 3; the
/// heuristic earns 30 % of the largest return.
#[test]
fn ppo_reaches_90_percent_of_the_optimum() {
    let best = best_return();
    let heuristics = [HeuristicConfig::default(), quick_heuristic()]
        .map(|config| mean_return(&mut Heuristic::new(config)));
    let random = mean_return(&mut RandomController::new(1));
    println!("best {best:.3}, heuristics {heuristics:.3?}, random {random:.3}");
    for seed in 0..3 {
        let (round, earned) = learn(seed, 0.9 * best);
        println!("seed {seed}: {earned:.3} after {round} rounds");
        assert!(heuristics.iter().all(|of_heuristic| earned > *of_heuristic) && earned > random);
    }
}

/// After six rounds the greedy policy repeats its teacher's actions over an episode without the
/// teacher.
#[test]
fn a_policy_learns_to_imitate_its_teacher() {
    const TAUGHT: usize = 6;
    let teacher = || Heuristic::new(quick_heuristic());
    let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
    let stream = device.stream("policy");
    let mut policy = new(&stream, 4, 0, Learning::On).with_teacher(teacher(), TAUGHT);
    let (mut own, mut fleet) = (teacher(), (0..4).map(Toy::new).collect::<Vec<_>>());
    let mut of_teacher = vec![];
    for _ in 0..TAUGHT {
        of_teacher.push(play(&mut own, &mut fleet).0);
        let (earned, report) = play(&mut policy, &mut fleet);
        assert_eq!(of_teacher.last(), Some(&earned), "the teacher acts");
        let report = report.unwrap();
        assert_eq!((report.kl, report.skipped, report.stopped_by_kl), (0.0, 0, false));
    }
    let mut judge = new(&stream, 1, 0, Learning::Greedy);
    let (weights, metadata) = policy.export().unwrap();
    judge.import(&weights, &metadata).unwrap();
    assert_eq!(of_teacher[0], play(&mut judge, &mut [Toy::new(0)]).0);
    let (earned, report) = play(&mut policy, &mut fleet);
    assert!(!of_teacher.contains(&earned), "the policy acts");
    assert!(report.unwrap().entropies.iter().any(|entropy| *entropy > 0.0));
}

//! The presets: named starting points of a configuration.

use meristem_control::{GovernorConfig, PpoConfig, RewardMode};
use meristem_grow::Tempo;

use crate::config::TrainConfig;
use crate::settings::{
    Augmentations, ClipNorm, CommKind, ControllerKind, ExchangeKind, HotScopePolicy, Limit, Preset,
    Switch, Telemetry,
};

/// Seconds that ranks wait for each other: one whose envs are small waits at the end of each step for one whose envs
/// have grown.
pub(crate) const COMM_DEADLINE: usize = 600;

/// The settings of a preset under a controller, before file and flags. Who learns has rounds to learn in; for
/// the others one long round is worth more.
pub(crate) fn base(preset: Preset, controller: ControllerKind) -> TrainConfig {
    let learns = controller == ControllerKind::Ppo;
    let length = |rounds: usize, steps: usize, alone: usize| {
        if learns { (rounds, steps) } else { (1, alone) }
    };
    let (rounds, steps) = match preset {
        Preset::Default => length(6, 20, 120),
        Preset::Quick => length(2, 10, 18),
        Preset::Full => length(20, 60, 60),
    };
    let base = TrainConfig { preset, controller, rounds, steps, ..default() };
    match preset {
        Preset::Default => base,
        Preset::Quick => TrainConfig {
            // Growth is what there is to see, and ten seconds are too short to wait for a real plateau.
            min_contribution: 0.0,
            plateau_steps: 1,
            plateau_gain: 2.0,
            tempo: Tempo::Fast,
            ..base
        },
        Preset::Full => TrainConfig { min_training_steps: 10, min_contribution: 1.0, ..base },
    }
}

/// Width of a new policy.
pub(crate) fn policy_width(preset: Preset) -> usize {
    match preset {
        Preset::Default | Preset::Quick => PpoConfig::default().hidden,
        Preset::Full => 512,
    }
}

/// Four small hosts on the embedded data: about a minute on two cores (U1).
fn default() -> TrainConfig {
    let (ppo, governor) = (PpoConfig::default(), GovernorConfig::default());
    TrainConfig {
        preset: Preset::Default,
        name: None,
        run_dir: None,
        seed: 42,
        dataset: "embedded".into(),
        data_root: None,
        skip_bad: false,
        data_budget: None,
        control_split: None,
        shuffle: Switch(true),
        augment: Augmentations::default(),
        host: "baseline".into(),
        init: None,
        export: None,
        trace: None,
        envs: 4,
        devices: vec!["cpu".into()],
        policy_device: None,
        device_memory: None,
        threads: 0,
        rounds: 1,
        steps: 120,
        batch: 128,
        max_batches: Limit::All,
        lr: 0.01,
        momentum: 0.9,
        weight_decay: 5e-4,
        clip_norm: ClipNorm::at(1.0),
        controller: ControllerKind::default(),
        reward: RewardMode::default(),
        policy: None,
        comm: CommKind::default(),
        ranks: None,
        comm_deadline: COMM_DEADLINE,
        exchange: ExchangeKind::default(),
        data_parallel: false,
        policy_hidden: None,
        ppo_epochs: ppo.epochs,
        ppo_lr: ppo.lr,
        ppo_adam_eps: ppo.adam_eps,
        ppo_clip_norm: ppo.clip_norm,
        ppo_gamma: ppo.gamma,
        ppo_lambda: ppo.lambda,
        ppo_clip: ppo.clip,
        ppo_value_weight: ppo.value_weight,
        ppo_entropy_weight: ppo.entropy_weight,
        ppo_target_kl: ppo.target_kl,
        ppo_advantage_std_floor: ppo.advantage_std_floor,
        ppo_skips_max: ppo.skips_max,
        slots: vec!["r0".into()],
        max_modules: 3,
        min_training_steps: 3,
        min_contribution: 0.5,
        plateau_steps: 3,
        plateau_gain: 0.5,
        tempo: Tempo::Standard,
        governor_collapse_width: governor.collapse_width,
        governor_learned_share: governor.learned_share,
        governor_spike_loss: governor.spike_loss,
        governor_spike_sigmas: governor.spike_sigmas,
        governor_spike_factor: governor.spike_factor,
        governor_spike_patience: governor.spike_patience,
        governor_snapshot_steps: governor.snapshot_steps,
        governor_failures_max: governor.failures_max,
        governor_penalty: governor.penalty,
        log_batches: false,
        telemetry: Telemetry::default(),
        gradient_stats_every: 1,
        time_every: 1,
        hot_scope: HotScopePolicy::default(),
        checkpoint_every: 10,
    }
}

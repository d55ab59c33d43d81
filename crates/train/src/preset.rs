//! The presets: named starting points of a configuration.

use meristem_control::RewardMode;
use meristem_grow::Tempo;

use crate::config::TrainConfig;
use crate::settings::{
    Augmentations, ClipNorm, CommKind, ControllerKind, ExchangeKind, HotScopePolicy, Limit, Preset,
    Switch,
};

/// The settings of a preset, before file and flags.
pub(crate) fn base(preset: Preset) -> TrainConfig {
    match preset {
        Preset::Default => default(),
        Preset::Quick => TrainConfig {
            preset,
            steps: 18,
            // Growth is what there is to see, and ten seconds are too short to wait for a real plateau.
            min_contribution: 0.0,
            plateau_steps: 1,
            plateau_gain: 2.0,
            tempo: Tempo::Fast,
            ..default()
        },
        Preset::Full => TrainConfig {
            preset,
            steps: 60,
            policy_hidden: 512,
            min_training_steps: 10,
            min_contribution: 1.0,
            ..default()
        },
    }
}

/// Four small hosts on the embedded data: about a minute on two cores (U1).
fn default() -> TrainConfig {
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
        threads: 0,
        rounds: 1,
        steps: 120,
        batch: 128,
        max_batches: Limit::All,
        lr: 0.01,
        momentum: 0.9,
        weight_decay: 5e-4,
        clip_norm: ClipNorm::at(1.0),
        controller: ControllerKind::Heuristic,
        reward: RewardMode::default(),
        policy: None,
        policy_hidden: 128,
        comm: CommKind::default(),
        ranks: 1,
        exchange: ExchangeKind::default(),
        slots: vec!["r0".into()],
        max_modules: 3,
        min_training_steps: 3,
        min_contribution: 0.5,
        plateau_steps: 3,
        plateau_gain: 0.5,
        tempo: Tempo::Standard,
        log_batches: false,
        hot_scope: HotScopePolicy::default(),
        checkpoint_every: 10,
    }
}

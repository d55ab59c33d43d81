//! The settings of a policy that learns.

use clap::Args;
use meristem::control::RewardMode;
use meristem::train::config::Layer;
use meristem::train::settings::reward;

/// How a policy learns (PPO), and what for.
#[derive(Debug, Args)]
pub(crate) struct PolicyArguments {
    /// What it is rewarded for: basic, contribution or sparse
    #[arg(long, value_parser = reward, help_heading = "Policy")]
    reward: Option<RewardMode>,
    /// Width of a new policy [default: 128, with preset full 512]; one from a file has its own
    #[arg(long, value_name = "N", help_heading = "Policy")]
    policy_hidden: Option<usize>,
    /// Passes of an update over the round
    #[arg(long, value_name = "N", help_heading = "Policy")]
    ppo_epochs: Option<usize>,
    /// Learning rate (Adam)
    #[arg(long, value_name = "RATE", help_heading = "Policy")]
    ppo_lr: Option<f32>,
    /// Adam's ε
    #[arg(long, value_name = "EPS", help_heading = "Policy")]
    ppo_adam_eps: Option<f32>,
    /// Largest norm of the policy's gradient
    #[arg(long, value_name = "NORM", help_heading = "Policy")]
    ppo_clip_norm: Option<f32>,
    /// Discount of rewards; also that of the stage potential in the reward
    #[arg(long, value_name = "GAMMA", help_heading = "Policy")]
    ppo_gamma: Option<f64>,
    /// λ of the advantages (GAE)
    #[arg(long, value_name = "LAMBDA", help_heading = "Policy")]
    ppo_lambda: Option<f64>,
    /// How far a ratio of probabilities may leave 1
    #[arg(long, value_name = "EPS", help_heading = "Policy")]
    ppo_clip: Option<f32>,
    /// Weight of the value loss
    #[arg(long, value_name = "W", help_heading = "Policy")]
    ppo_value_weight: Option<f32>,
    /// Weight of the entropy bonus
    #[arg(long, value_name = "W", help_heading = "Policy")]
    ppo_entropy_weight: Option<f32>,
    /// An update ends where the KL exceeds 1.5 times this
    #[arg(long, value_name = "KL", help_heading = "Policy")]
    ppo_target_kl: Option<f64>,
    /// Advantages are divided by their deviation, and by this at least
    #[arg(long, value_name = "STD", help_heading = "Policy")]
    ppo_advantage_std_floor: Option<f64>,
    /// So many updates in a row with loss or gradient not finite end the run
    #[arg(long, value_name = "N", help_heading = "Policy")]
    ppo_skips_max: Option<usize>,
}

impl PolicyArguments {
    /// The settings that were given as flags.
    pub(crate) fn layer(&self) -> Layer {
        Layer {
            reward: self.reward,
            policy_hidden: self.policy_hidden.map(Some),
            ppo_epochs: self.ppo_epochs,
            ppo_lr: self.ppo_lr,
            ppo_adam_eps: self.ppo_adam_eps,
            ppo_clip_norm: self.ppo_clip_norm,
            ppo_gamma: self.ppo_gamma,
            ppo_lambda: self.ppo_lambda,
            ppo_clip: self.ppo_clip,
            ppo_value_weight: self.ppo_value_weight,
            ppo_entropy_weight: self.ppo_entropy_weight,
            ppo_target_kl: self.ppo_target_kl,
            ppo_advantage_std_floor: self.ppo_advantage_std_floor,
            ppo_skips_max: self.ppo_skips_max,
            ..Layer::default()
        }
    }
}

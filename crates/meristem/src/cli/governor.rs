//! The settings of the governor.

use clap::Args;
use meristem::train::config::Layer;

/// When an env has failed, and what becomes of it: it goes back to a snapshot.
#[derive(Debug, Args)]
pub(crate) struct GovernorArguments {
    /// A loss this close to ln(classes), as a share of it, is that of guessing [default: 0.065]
    #[arg(long, value_name = "SHARE", help_heading = "Governor")]
    governor_collapse_width: Option<f64>,
    /// Guessing is a failure once the mean loss was below this share of ln(classes) [default: 0.6]
    #[arg(long, value_name = "SHARE", help_heading = "Governor")]
    governor_learned_share: Option<f64>,
    /// The loss of a spike is above this [default: 12]
    #[arg(long, value_name = "LOSS", help_heading = "Governor")]
    governor_spike_loss: Option<f64>,
    /// The loss of a spike is also so many standard deviations above the running mean [default: 6]
    #[arg(long, value_name = "N", help_heading = "Governor")]
    governor_spike_sigmas: Option<f64>,
    /// The loss of a spike is also so many times the running mean [default: 3]
    #[arg(long, value_name = "N", help_heading = "Governor")]
    governor_spike_factor: Option<f64>,
    /// So many spikes in a row are a failure [default: 3]
    #[arg(long, value_name = "N", help_heading = "Governor")]
    governor_spike_patience: Option<u32>,
    /// Steps between snapshots; one is taken after each fossilize too [default: 5]
    #[arg(long, value_name = "N", help_heading = "Governor")]
    governor_snapshot_steps: Option<u32>,
    /// So many failures of one env with no snapshot between them end the run, for all envs [default: 3]
    #[arg(long, value_name = "N", help_heading = "Governor")]
    governor_failures_max: Option<u32>,
    /// What a failure adds to the reward of the action that is to blame [default: -10]
    #[arg(long, value_name = "REWARD", allow_negative_numbers = true, help_heading = "Governor")]
    governor_penalty: Option<f64>,
}

impl GovernorArguments {
    /// The settings that were given as flags, over others.
    pub(crate) fn over(&self, others: Layer) -> Layer {
        Layer {
            governor_collapse_width: self.governor_collapse_width,
            governor_learned_share: self.governor_learned_share,
            governor_spike_loss: self.governor_spike_loss,
            governor_spike_sigmas: self.governor_spike_sigmas,
            governor_spike_factor: self.governor_spike_factor,
            governor_spike_patience: self.governor_spike_patience,
            governor_snapshot_steps: self.governor_snapshot_steps,
            governor_failures_max: self.governor_failures_max,
            governor_penalty: self.governor_penalty,
            ..others
        }
    }
}

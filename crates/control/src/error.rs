//! What can go wrong while deciding and learning.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of controllers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network of a policy failed.
    #[error(transparent)]
    Network(#[from] meristem_nn::Error),
    /// The device of a policy failed.
    #[error(transparent)]
    Device(#[from] meristem_device::Error),
    /// Ranks that learn together could not exchange.
    #[error(transparent)]
    Ranks(#[from] meristem_comm::Error),
    /// Ranks that learn together have different policies after an update.
    #[error(
        "the ranks' policies differ after an update (fingerprints {fingerprints}): this is a defect, please report it"
    )]
    RanksDiffer {
        /// Of each rank's policy, by rank.
        fingerprints: String,
    },
    /// What was saved of a controller does not fit this one.
    #[error("the saved state of the controller `{controller}` cannot be used: {problem}")]
    BadState {
        /// The controller that was to take it.
        controller: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The action script cannot be read as one.
    #[error("action script, line {line}: {problem}")]
    Script {
        /// Line in the file, from 1.
        line: usize,
        /// What is wrong with it, and what was expected.
        problem: String,
    },
    /// The action script wants something that is not legal when its step comes.
    #[error(
        "action script, line {line}: not legal in env {env} at step {step}: {reason}. Correct the script"
    )]
    ScriptIllegal {
        /// Line in the file, from 1.
        line: usize,
        /// The env.
        env: usize,
        /// The step of the episode, from 0.
        step: u32,
        /// Why not.
        reason: meristem_grow::LifecycleError,
    },
    /// A policy from a file cannot be used here.
    #[error("the policy does not fit: {problem}")]
    Policy {
        /// What was expected, what came, what to do.
        problem: String,
    },
    /// Updates of the policy were skipped because loss or gradient was not finite, too often in a row.
    #[error(
        "the policy diverged: {skipped} updates in a row had a loss or gradient that is not finite. \
         Start again with a smaller learning rate (`PpoConfig::lr`, `--ppo-lr`)"
    )]
    Diverged {
        /// Updates skipped in a row.
        skipped: usize,
    },
    /// A caller's mistake: the calls of a step came in another order, or for another number of envs.
    #[error("controller `{controller}`: expected {expected}, got {got}")]
    Protocol {
        /// The controller.
        controller: &'static str,
        /// What should have come.
        expected: String,
        /// What came.
        got: String,
    },
}

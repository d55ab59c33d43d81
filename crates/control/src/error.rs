//! Errors of deciding and learning.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of controllers and policies.
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
        "the policies differ between ranks after an update, with fingerprints {fingerprints}; \
         this is a bug in meristem, please report it"
    )]
    RanksDiffer {
        /// Fingerprint of each rank's policy, by rank.
        fingerprints: String,
    },
    /// A saved state that does not fit this controller.
    #[error("the saved state of the controller `{controller}` cannot be used: {problem}")]
    BadState {
        /// The controller to restore.
        controller: String,
        /// Reason.
        problem: String,
    },
    /// The action script does not parse.
    #[error("action script, line {line}: {problem}")]
    Script {
        /// Line in the file, from 1.
        line: usize,
        /// Reason, with the expected value.
        problem: String,
    },
    /// The action script contains an action that is illegal at its step.
    #[error(
        "action script, line {line}: not legal in env {env} at step {step}: {reason}; \
         correct the script"
    )]
    ScriptIllegal {
        /// Line in the file, from 1.
        line: usize,
        /// The env.
        env: usize,
        /// The step of the episode, from 0.
        step: u32,
        /// The rule that the action violates.
        reason: meristem_grow::LifecycleError,
    },
    /// A policy from a file cannot be used here.
    #[error("the policy cannot be used: {problem}")]
    Policy {
        /// Expected and actual content, and the remedy.
        problem: String,
    },
    /// Too many consecutive updates of the policy were skipped because the loss or the gradient was
    /// not finite.
    #[error(
        "the policy diverged: {skipped} consecutive updates had a non-finite loss or gradient; \
         start again with a lower learning rate (`PpoConfig::lr`, `--ppo-lr`)"
    )]
    Diverged {
        /// Consecutive updates skipped.
        skipped: usize,
    },
    /// A controller that the calling program passed failed.
    #[error("the controller of the calling program failed: {problem}")]
    External {
        /// Its error.
        problem: String,
    },
    /// A call of a step in the wrong order, or with the wrong number of envs.
    #[error("controller `{controller}`: expected {expected}, got {got}")]
    Protocol {
        /// The controller.
        controller: &'static str,
        /// The call expected.
        expected: String,
        /// The call made.
        got: String,
    },
}

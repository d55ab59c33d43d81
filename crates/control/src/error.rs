//! What can go wrong while deciding.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of controllers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network of a policy, or its device, failed.
    #[error(transparent)]
    Network(#[from] meristem_nn::Error),
    /// What was saved of a controller does not fit this one.
    #[error("the saved state of the controller `{controller}` cannot be used: {problem}")]
    BadState {
        /// The controller that was to take it.
        controller: String,
        /// What is wrong with it.
        problem: String,
    },
}

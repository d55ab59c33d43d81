//! Groups of parameters.

use super::optimiser::Optimiser;

/// Parameters that are clipped and updated together: the host, or one module.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupSpec {
    /// `host`, or the slot's name.
    pub name: String,
    /// Optimiser of its parameters. Plans depend on its kind, and not on its numbers, such as the
    /// learning rate.
    pub optimiser: Optimiser,
    /// Optimisers of the same kind with other numbers, each for the parameters whose
    /// [`ParamSpec::variant`](super::ParamSpec::variant) names it.
    pub variants: Vec<Optimiser>,
}

impl GroupSpec {
    /// The group's optimiser, then its variants.
    pub fn optimisers(&self) -> impl Iterator<Item = &Optimiser> {
        std::iter::once(&self.optimiser).chain(&self.variants)
    }
}

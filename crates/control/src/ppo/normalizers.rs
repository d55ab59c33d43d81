//! Normalisers of the inputs of a policy.

use crate::normalizer::Normalizer;
use crate::policy::{PolicyForm, PolicyShape};

/// The normaliser of observations, and those of the elements of each set, if the policy has sets.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Normalizers {
    pub(super) observations: Normalizer,
    /// Normalisers of slots, of blueprints, and of layers if the policy observes them.
    pub(super) sets: Option<Vec<Normalizer>>,
}

impl Normalizers {
    pub(super) fn new(shape: &PolicyShape) -> Self {
        let sets = match shape.form {
            PolicyForm::Vector => None,
            PolicyForm::Set { slot_features, blueprint_features, layers } => {
                let widths = [slot_features, blueprint_features].into_iter();
                let widths = widths.chain(layers.map(|layers| layers.features));
                Some(widths.map(Normalizer::new).collect())
            }
        };
        Self { observations: Normalizer::new(shape.features), sets }
    }

    /// Whether the normalisers `other`, from a file, are valid and have the sizes of these.
    pub(super) fn accept(&self, other: &Self) -> bool {
        other.observations.fits(self.observations.len())
            && match (&self.sets, &other.sets) {
                (None, None) => true,
                (Some(own), Some(other)) => {
                    own.len() == other.len()
                        && own.iter().zip(other).all(|(own, other)| other.fits(own.len()))
                }
                _ => false,
            }
    }

    /// All normalisers.
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut Normalizer> {
        std::iter::once(&mut self.observations).chain(self.sets.iter_mut().flatten())
    }
}

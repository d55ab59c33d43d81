//! The size that a host can reach, and its limits.

use std::collections::BTreeSet;

use super::Host;
use crate::error::{Error, Result};
use crate::graph::{NetworkSize, grown_graph};
use crate::lifecycle::{
    AlphaTarget, Germination, LifecycleError, Module, Rules, Slot, Stage, Style, Tempo,
};
use crate::optimisers::Optimisers;

impl Host {
    /// Upper bound of the host's size, unless another module germinates or a layer becomes wider:
    /// every module counts as permanent, with the trained gate of `Style::LinearGate`. A live
    /// module may get this style; a fossilized one keeps its own, but is counted in the same way.
    ///
    /// # Errors
    /// The errors of [`Host::graph`].
    pub fn size(&self) -> Result<NetworkSize> {
        NetworkSize::largest(&self.spec, &self.image, &self.slots)
    }

    /// Size of the host, as [`Host::size`], after a germination of this blueprint in this slot.
    ///
    /// # Errors
    /// [`LifecycleError::NoSuchSlot`], [`LifecycleError::NoSuchBlueprint`], or
    /// [`crate::BlueprintError`] for a blueprint that does not fit the slot.
    pub fn size_with(&self, index: usize, blueprint: usize) -> Result<NetworkSize> {
        self.slot(index)?;
        let mut slots = self.slots.clone();
        slots[index].module = Some(self.gated(blueprint)?);
        NetworkSize::largest(&self.spec, &self.image, &slots)
    }

    /// Names of the parameters of the host and of all modules that may grow in its slots.
    ///
    /// # Errors
    /// As [`Self::graph`].
    pub fn possible_parameters(&self) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        let mut add = |slots: &[Slot]| {
            let graph = grown_graph(&self.spec, &self.image, slots, &Optimisers::default())?;
            names.extend(graph.params.into_iter().map(|param| param.name));
            Ok::<_, Error>(())
        };
        add(&self.slots)?;
        for blueprint in 0..self.blueprints.len() {
            let mut slots = self.slots.clone();
            let fitting = slots.iter_mut().zip(&self.fits).filter(|(_, fits)| fits[blueprint]);
            for (slot, _) in fitting {
                (slot.stage, slot.module) = (Stage::Fossilized, Some(self.gated(blueprint)?));
            }
            add(&slots)?;
        }
        Ok(names)
    }

    /// Checks the size limits of the host for a germination of this blueprint in this slot.
    pub(super) fn check_size(&self, index: usize, blueprint: usize) -> Result<(), LifecycleError> {
        let Rules { max_parameters, max_macs, .. } = self.rules;
        if max_parameters.is_none() && max_macs.is_none() {
            return Ok(());
        }
        // The caller has checked that the blueprint fits the slot, so the size exists.
        let Ok(size) = self.size_with(index, blueprint) else { return Ok(()) };
        let Some((what, needs, limit)) = self.exceeded(size) else { return Ok(()) };
        let slot = self.slot(index)?.name.clone();
        let blueprint = self.blueprint(blueprint)?.name.clone();
        Err(LifecycleError::TooLarge { slot, blueprint, what, needs, limit })
    }

    /// The limit that a network of this size exceeds: its unit, the size, and the limit.
    pub(super) fn exceeded(
        &self,
        NetworkSize { parameters, macs }: NetworkSize,
    ) -> Option<(&'static str, u64, u64)> {
        let Rules { max_parameters, max_macs, .. } = self.rules;
        let limits = [("parameters", parameters, max_parameters), ("MACs", macs, max_macs)];
        let exceeded = |(what, needs, limit): (_, u64, Option<u64>)| {
            Some((what, needs, limit.filter(|limit| needs > *limit)?))
        };
        limits.into_iter().find_map(exceeded)
    }

    /// A new module with the trained gate of [`Style::LinearGate`].
    fn gated(&self, blueprint: usize) -> Result<Module, LifecycleError> {
        let germination = Germination {
            blueprint,
            style: Style::LinearGate,
            tempo: Tempo::Fast,
            alpha_target: AlphaTarget::Full,
            score_pp: None,
        };
        Ok(Module::germinated(self.blueprint(blueprint)?, self.rules.birth, germination))
    }
}

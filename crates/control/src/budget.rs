//! Numbers of parameters, as the heuristic counts them, and the room that its limit leaves.

use meristem_grow::{Host, Slot};

use crate::heuristic_config::HeuristicConfig;
use crate::rules::legal_blueprints;

/// Parameters of a blueprint in a slot; `None` only for an index without a blueprint. Does not
/// check that the blueprint fits the slot ([`meristem_grow::Blueprint::parameters`]).
pub(crate) fn size_in(host: &Host, slot: &Slot, blueprint: usize) -> Option<usize> {
    host.blueprints().get(blueprint)?.parameters(slot.dims).ok()
}

/// Parameters of a host and all its modules, also modules that are not yet blended in.
pub(crate) fn parameters(host: &Host) -> usize {
    let module = |slot: &Slot| size_in(host, slot, slot.module.as_ref()?.blueprint_index);
    let modules: usize = host.slots().iter().filter_map(module).sum();
    host.bare_parameters() + modules
}

/// Whether the host is within the budget.
pub(crate) fn fits(host: &Host, config: &HeuristicConfig) -> bool {
    config.max_parameters.is_none_or(|most| parameters(host) <= most)
}

/// The modules that may germinate within the limit: slot, blueprint and number of parameters.
pub(crate) fn fitting_modules(
    host: &Host,
    config: &HeuristicConfig,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let room =
        config.max_parameters.map_or(usize::MAX, |most| most.saturating_sub(parameters(host)));
    let sized = host.slots().iter().enumerate().flat_map(move |(index, slot)| {
        let legal = legal_blueprints(index, host).enumerate().filter(|(_, legal)| *legal);
        legal.filter_map(move |(b, _)| Some((index, b, size_in(host, slot, b)?)))
    });
    sized.filter(move |(_, _, size)| *size <= room)
}

impl HeuristicConfig {
    /// Whether `max_parameters` is so low that the heuristic never grows this host: without the
    /// limit there is a module for a slot, or a layer to widen, and within it there is none.
    pub fn lacks_room(&self, host: &Host) -> bool {
        let without_limit = Self { max_parameters: None, ..*self };
        !self.can_grow(host) && without_limit.can_grow(host)
    }

    fn can_grow(&self, host: &Host) -> bool {
        let mut layers = 0..host.widenable().len();
        fitting_modules(host, self).next().is_some()
            || self.widen_by > 0.0
                && layers.any(|layer| self.further_features(host, layer).is_some())
    }
}

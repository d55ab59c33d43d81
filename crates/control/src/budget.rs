//! Numbers of parameters, as the heuristic counts them.

use meristem_grow::{Host, Slot};

use crate::heuristic_config::HeuristicConfig;

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

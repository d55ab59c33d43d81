//! Observations for a policy that serves any host: numbers of the env, of each slot and of each
//! blueprint.
//!
//! Numbers of the env begin with [`BaseObservation`], numbers of a slot with [`SlotObservation`].
//! The numbers after them mean the same in every host, so that a policy can be used with other
//! hosts: sizes relative to the host, the data and the limits, and the results of the gates and the
//! rules. `docs/control.md`, Observation, has a table.

use std::collections::HashMap;
use std::sync::Arc;

use meristem_grow::{Blueprint, BlueprintSet, Host, NetworkSize, Slot};
use meristem_nn::ScoreKind;
use meristem_nn::graph::Dims;

use crate::action::ActionOp;
use crate::masks::Legality;
use crate::observation::{
    BaseObservation, RowWriter, SlotObservation, if_finite, log_scale, recent_mean,
};
use crate::policy::{ADAM, LayerSet, PolicyForm, PolicyShape};
use crate::view::EnvView;

/// Number of kinds of blueprints: one for each blueprint of the standard set and of the set for
/// vectors, and one for all others.
const KINDS: usize = 10;

/// Contribution, in standard errors, that is written as 1.
const CERTAIN: f64 = 5.0;

/// Numbers of an env besides those of [`BaseObservation`].
const OF_ENV: usize = 23;
/// Numbers of a slot besides those of [`SlotObservation`] and of its blueprint's kind.
const OF_SLOT: usize = 15;
/// Numbers of a blueprint besides its kind.
const OF_BLUEPRINT: usize = 9;

/// Writes observations of sets. Keeps the sizes of the blueprints.
#[derive(Debug)]
pub(crate) struct SetObserver {
    /// The blueprints that have a separate kind.
    known: Vec<Arc<Blueprint>>,
    /// Sizes by index of the blueprint and shape of the slot; `None` where it does not fit.
    sizes: HashMap<(usize, [usize; 3]), Option<NetworkSize>>,
}

/// Buffers for the observation of one env, in the order of [`PolicyShape::inputs`].
pub(crate) struct SetRow<'a> {
    /// `[features]`.
    pub(crate) observations: &'a mut [f32],
    pub(crate) slots: SetBuffers<'a>,
    pub(crate) blueprints: SetBuffers<'a>,
}

/// Buffers for one set of elements of an env.
pub(crate) struct SetBuffers<'a> {
    /// `[elements][features]`.
    pub(crate) elements: &'a mut [f32],
    pub(crate) present: &'a mut [f32],
    pub(crate) scale: &'a mut [f32],
}

impl SetBuffers<'_> {
    /// Writes which places have one of `count` elements, and the scale of their mean.
    pub(crate) fn write_presence(&mut self, count: usize) {
        self.scale.fill(self.present.len() as f32 / count.max(1) as f32);
        let (is, not) = self.present.split_at_mut(count.min(self.present.len()));
        is.fill(1.0);
        not.fill(0.0);
    }
}

impl SetObserver {
    /// Floats per env.
    pub(crate) const ENV: usize = BaseObservation::LEN + OF_ENV;
    /// Floats per slot.
    pub(crate) const SLOT: usize = SlotObservation::LEN + KINDS + OF_SLOT;
    /// Floats per blueprint.
    pub(crate) const BLUEPRINT: usize = KINDS + OF_BLUEPRINT;

    pub(crate) fn new() -> Self {
        let sets = [BlueprintSet::standard(), BlueprintSet::vectors()];
        let known = sets.iter().flat_map(|set| set.iter().cloned()).collect();
        Self { known, sizes: HashMap::new() }
    }

    /// The shape of a policy for hosts of up to `slots` slots and lists of up to `blueprints`
    /// blueprints.
    pub(crate) fn shape(
        slots: usize,
        blueprints: usize,
        layers: Option<LayerSet>,
        hidden: usize,
    ) -> PolicyShape {
        let (slot_features, blueprint_features) = (Self::SLOT, Self::BLUEPRINT);
        let form = PolicyForm::Set { slot_features, blueprint_features, layers };
        PolicyShape { form, features: Self::ENV, slots, blueprints, hidden }
    }

    /// Forgets the sizes of blueprints: the hosts that follow may have others.
    pub(crate) fn forget(&mut self) {
        self.sizes.clear();
    }

    /// Writes the observation of an env. Padding is 0.
    pub(crate) fn write(&mut self, view: &EnvView<'_>, legality: &Legality, row: &mut SetRow<'_>) {
        let host = view.host;
        let (slots, blueprints) = (host.slots().len(), host.blueprints().len());
        row.slots.write_presence(slots);
        row.blueprints.write_presence(blueprints);
        let (of_slots, of_blueprints) = (&mut *row.slots.elements, &mut *row.blueprints.elements);
        of_slots.fill(0.0);
        of_blueprints.fill(0.0);
        let of_host = HostSizes::of(host);
        self.write_env(view, &of_host, &mut RowWriter::new(row.observations));
        for (index, to) in of_slots.chunks_exact_mut(Self::SLOT).take(slots).enumerate() {
            self.write_slot(view, legality, &of_host, index, &mut RowWriter::new(to));
        }
        let of_blueprints = of_blueprints.chunks_exact_mut(Self::BLUEPRINT).take(blueprints);
        for (index, to) in of_blueprints.enumerate() {
            self.write_blueprint(legality, &of_host, index, &mut RowWriter::new(to));
        }
    }

    fn write_env(&self, view: &EnvView<'_>, sizes: &HostSizes<'_>, row: &mut RowWriter<'_>) {
        let (host, facts) = (view.host, &view.facts);
        BaseObservation::from_view(view).write(row);
        let count = |n: usize| log_scale(n as f32);
        let left = view.episode_steps.saturating_sub(view.step.saturating_add(1));
        row.all(&[log_scale(left as f32), log_scale(view.episode_steps as f32), facts.lr_factor]);
        // Training samples per parameter, and the sizes themselves.
        let parameters = sizes.size.parameters as f32;
        row.all(&[
            ratio(facts.train_samples as f32, parameters),
            count(facts.train_samples),
            log_scale(parameters),
            log_scale(sizes.size.macs as f32),
            ratio(parameters, host.first_parameters() as f32),
        ]);
        // The gap between control and training loss, and the fall of the control loss since the
        // first step of the episode or after the last rollback.
        let (control, training) = (recent_mean(view.losses), recent_mean(view.train_losses));
        let first = view.losses.first().copied().unwrap_or(0.0);
        let now = view.losses.last().copied().unwrap_or(0.0);
        row.all(&[
            log_scale(control - training),
            if_finite(control / training - 1.0).clamp(-2.0, 2.0),
            log_scale(first - now),
        ]);
        for (used, limit) in sizes.limits() {
            row.all(&[limit.map_or(0.0, |limit| used / limit), flag(limit.is_some())]);
        }
        let most = host.rules().max_modules.max(1);
        row.all(&[host.modules() as f32 / most as f32, count(most)]);
        row.all(&ScoreKind::ALL.map(|kind| flag(kind == facts.score_kind)));
        row.all(&[count(host.slots().len()), count(host.image().classes)]);
        let loss_of_guessing = (host.image().classes as f32).ln();
        row.all(&[if_finite(now / loss_of_guessing).clamp(0.0, 3.0)]);
    }

    fn write_slot(
        &mut self,
        view: &EnvView<'_>,
        legality: &Legality,
        sizes: &HostSizes<'_>,
        index: usize,
        row: &mut RowWriter<'_>,
    ) {
        let slot = &view.host.slots()[index];
        SlotObservation::from_view(view, index).write(row);
        let module = slot.module.as_ref();
        row.all(&module.map_or([0.0; KINDS], |module| self.kind(&module.blueprint)));
        let Dims { c, h, w } = slot.dims;
        let last = (view.host.slots().len() - 1).max(1);
        row.all(&[log_scale(c as f32), log_scale((h * w) as f32), index as f32 / last as f32]);
        let own = module.and_then(|module| self.size(view.host, module.blueprint_index, slot));
        let own = own.map_or(0.0, |size| size.parameters as f32);
        row.all(&[log_scale(own), ratio(own, view.host.bare_parameters() as f32)]);
        // Legality of each op except WAIT.
        for op in &ActionOp::OF_HEAD[1..] {
            row.all(&[flag(legality.slots(*op).get(index) == Some(&true))]);
        }
        let contribution = view.measured(index).contribution_loss;
        let certainty = contribution.map_or(0.0, |c| c.difference / c.standard_error / CERTAIN);
        let difference = contribution.map_or(0.0, |c| c.difference);
        row.all(&[
            flag(view.gate_passes(index)),
            flag(contribution.is_some()),
            if_finite(certainty as f32).clamp(-1.0, 1.0),
            log_scale(difference as f32),
        ]);
        // The largest module that may germinate here, relative to the host.
        let legal = legality.blueprints(index).iter().enumerate().filter(|(_, legal)| **legal);
        let legal = legal.filter_map(|(blueprint, _)| self.size(view.host, blueprint, slot));
        let largest = legal.map(|size| size.parameters).max().unwrap_or(0);
        row.all(&[ratio(largest as f32, sizes.size.parameters as f32)]);
    }

    fn write_blueprint(
        &mut self,
        legality: &Legality,
        sizes: &HostSizes<'_>,
        index: usize,
        row: &mut RowWriter<'_>,
    ) {
        let host = sizes.host;
        let Some(blueprint) = host.blueprints().get(index) else { return };
        row.all(&self.kind(blueprint));
        let is_legal = |slot: &usize| legality.blueprints(*slot).get(index) == Some(&true);
        let places: Vec<usize> = (0..host.slots().len()).filter(is_legal).collect();
        let used = host.slots().iter().filter_map(|slot| slot.module.as_ref());
        let used = used.filter(|module| module.blueprint_index == index).count();
        row.all(&[places.len() as f32 / host.slots().len().max(1) as f32, used as f32]);
        let of_places =
            places.iter().filter_map(|slot| self.size(host, index, &host.slots()[*slot]));
        let all: Vec<NetworkSize> = of_places.collect();
        let least = all.iter().map(|size| size.parameters).min().unwrap_or(0) as f32;
        let most = all.iter().map(|size| size.parameters).max().unwrap_or(0) as f32;
        let macs = all.iter().map(|size| size.macs).max().unwrap_or(0) as f32;
        row.all(&[log_scale(least), log_scale(most), log_scale(macs)]);
        let NetworkSize { parameters, macs: host_macs } = sizes.size;
        row.all(&[ratio(most, parameters as f32), ratio(macs, host_macs as f32)]);
        for ((used, limit), own) in sizes.limits().into_iter().zip([most, macs]) {
            let share = limit.map_or(0.0, |limit| own / (limit - used).max(1.0));
            row.all(&[share.clamp(0.0, 2.0)]);
        }
    }

    /// One-hot of the kind of a blueprint; the last place is for blueprints that are not known.
    fn kind(&self, blueprint: &Blueprint) -> [f32; KINDS] {
        let known = self.known.iter().position(|known| **known == *blueprint);
        let mut kind = [0.0; KINDS];
        kind[known.unwrap_or(KINDS - 1).min(KINDS - 1)] = 1.0;
        kind
    }

    /// Size of a blueprint in a slot; `None` if it does not fit.
    fn size(&mut self, host: &Host, blueprint: usize, slot: &Slot) -> Option<NetworkSize> {
        let Dims { c, h, w } = slot.dims;
        let size = || {
            let graph = host.blueprints().get(blueprint)?.graph(slot.dims, ADAM).ok()?;
            Some(NetworkSize { parameters: graph.parameters(None) as u64, macs: graph.macs() })
        };
        *self.sizes.entry((blueprint, [c, h, w])).or_insert_with(size)
    }
}

/// A host and its size, for numbers relative to them.
pub(crate) struct HostSizes<'a> {
    /// The size that the host compares with its limits.
    pub(crate) size: NetworkSize,
    host: &'a Host,
}

impl<'a> HostSizes<'a> {
    pub(crate) fn of(host: &'a Host) -> Self {
        let size = host.size().unwrap_or(NetworkSize { parameters: 0, macs: 0 });
        Self { size, host }
    }

    /// Parameters, then MACs, of the host, each with its limit if there is one.
    pub(crate) fn limits(&self) -> [(f32, Option<f32>); 2] {
        let (NetworkSize { parameters, macs }, rules) = (self.size, self.host.rules());
        let limit = |limit: Option<u64>| limit.map(|limit| limit as f32);
        [(parameters as f32, limit(rules.max_parameters)), (macs as f32, limit(rules.max_macs))]
    }
}

pub(crate) fn flag(is: bool) -> f32 {
    f32::from(u8::from(is))
}

/// Logarithm of a quotient: ln((a + 1) / (b + 1)) / 7, in the scale of [`log_scale`].
pub(crate) fn ratio(a: f32, b: f32) -> f32 {
    ((a + 1.0) / (b + 1.0)).ln() / 7.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_blueprint_has_a_kind_and_others_share_one() {
        let observer = SetObserver::new();
        assert_eq!(observer.known.len(), KINDS - 1);
        let one_hot = |kind: [f32; KINDS]| kind.iter().position(|x| *x == 1.0).unwrap();
        for (place, blueprint) in observer.known.iter().enumerate() {
            assert_eq!(one_hot(observer.kind(blueprint)), place);
            let renamed = Blueprint { name: "another".into(), ..(**blueprint).clone() };
            assert_eq!(one_hot(observer.kind(&renamed)), KINDS - 1);
        }
    }
}

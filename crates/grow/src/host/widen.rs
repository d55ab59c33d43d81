//! Growth in width: more features of a layer of the host.

use std::collections::HashMap;

use meristem_nn::graph::{Dims, WidthInit};

use super::{Host, check_size};
use crate::error::Result;
use crate::lifecycle::{LifecycleError, Slot};
use crate::spec::{HostError, HostSpec, SizedLayer, SlotName, WidenableLayer, has_bias};
use crate::suggest::nearest;

/// Limit of `gradmax` and `tiny`: the largest number of incoming, or of outgoing, weights of a
/// feature. The time of their matrix decompositions grows with the third power of this number:
/// about ten seconds at the limit.
pub const MEASURED_WEIGHTS_MAX: usize = 1024;

/// Limit of `tiny` for images: the largest number of sums of products that it keeps, which is the
/// product of an outgoing kernel's elements, a feature's incoming weights, and the weights of an
/// output of the next layer. At the limit they take 128 MiB.
const MEASURED_PRODUCTS_MAX: usize = 1 << 24;

/// A layer that became wider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WidthChange {
    /// Prefix of the layer's tensor names.
    pub layer: String,
    /// Output features before.
    pub from: usize,
    /// Output features now.
    pub to: usize,
}

impl Host {
    /// Layers of the host that can become wider, in the order of [`HostSpec::widenable`]. A layer
    /// is addressed by its index in this list. No change of width alters the indices.
    pub fn widenable(&self) -> Vec<WidenableLayer> {
        self.spec.widenable()
    }

    /// Index of the layer with this name in [`Host::widenable`].
    ///
    /// # Errors
    /// [`LifecycleError::Widen`] with the names of the layers that can become wider.
    pub fn find_layer(&self, name: &str) -> Result<usize, LifecycleError> {
        let layers = self.widenable();
        let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        names.iter().position(|known| *known == name).ok_or_else(|| {
            let known = if names.is_empty() { "none".into() } else { names.join(", ") };
            let near = nearest(name, names.iter().copied());
            let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            let problem = format!("it cannot become wider; layers that can: {known}{hint}");
            LifecycleError::Widen { layer: name.into(), problem }
        })
    }

    /// Checks that a layer may get `by` further features: `by` is not 0, the rule `width_init`
    /// suits the layer, the slots that get wider with it are empty, no blueprint becomes too large
    /// for them, and the host stays within `max_parameters` and `max_macs`. A blueprint may cease
    /// to fit a wider slot; [`Host::check_germinate`] then refuses it there.
    ///
    /// # Errors
    /// [`LifecycleError::Widen`] with the reason.
    pub fn check_widen(&self, layer: usize, by: usize) -> Result<(), LifecycleError> {
        self.widened(layer, by).map(|_| ())
    }

    /// Gives a layer `by` further features. [`meristem_nn::Network::widen`] gives the network its
    /// further parameters.
    ///
    /// # Errors
    /// The errors of [`Host::check_widen`]; the host is then unchanged.
    pub fn widen(&mut self, layer: usize, by: usize) -> Result<WidthChange, LifecycleError> {
        let (host, change) = self.widened(layer, by)?;
        *self = host;
        Ok(change)
    }

    /// This host with the widths of `spec`.
    ///
    /// # Errors
    /// [`crate::HostError::Widths`] if `spec` does not result from this host by widening layers.
    pub(crate) fn with_widths(mut self, spec: HostSpec) -> Result<Self> {
        if !spec.is_as_wide_as(&self.spec) {
            let (host, first) = (spec.to_string(), self.spec.to_string());
            return Err(HostError::Widths { host, first }.into());
        }
        self.spec = spec;
        self.update_sizes()?;
        self.update_fits()?;
        Ok(self)
    }

    /// A copy of this host with `by` further features of a layer, for its size, or for a network in
    /// which the gradients of further features are measured ([`meristem_nn::WidthProbe`]). Limits,
    /// rules and blueprints are not checked.
    ///
    /// # Errors
    /// [`LifecycleError::Widen`] for a layer that cannot become wider, a module in a slot that gets
    /// wider with it, or sizes that are too large.
    pub fn with_features(&self, layer: usize, by: usize) -> Result<Self, LifecycleError> {
        let layer = self.widenable_layer(layer)?;
        let fail = |problem: String| LifecycleError::Widen { layer: layer.name.clone(), problem };
        let wider = |slot: &&Slot| layer.slots.contains(&slot.name);
        if let Some(slot) = self.slots.iter().filter(wider).find(|slot| slot.module.is_some()) {
            return Err(fail(format!(
                "slot {}, which gets wider with it, has a module; only empty slots can",
                slot.name
            )));
        }
        let mut host = self.clone();
        host.spec = self.spec.widened(&layer.name, by).map_err(|error| fail(error.to_string()))?;
        host.update_sizes().map_err(|error| fail(error.to_string()))?;
        Ok(host)
    }

    /// Whether a layer has a score from the measurement of this initialisation
    /// ([`meristem_nn::WidthProbe::score`]), and its features have few enough weights.
    pub fn can_score(&self, layer: usize, init: WidthInit) -> bool {
        let found = self.widenable_layer(layer);
        let found = found.ok().filter(|layer| layer.lacks_for_score(init).is_none());
        found.is_some_and(|layer| self.check_measured(&layer, init).is_ok())
    }

    /// Checks that what an initialisation measures is within [`MEASURED_WEIGHTS_MAX`] and
    /// [`MEASURED_PRODUCTS_MAX`].
    fn check_measured(
        &self,
        layer: &WidenableLayer,
        init: WidthInit,
    ) -> Result<(), LifecycleError> {
        if !matches!(init, WidthInit::Gradmax | WidthInit::Tiny) {
            return Ok(());
        }
        let fail = |problem: String| {
            let (layer, init) = (layer.name.clone(), init.name());
            let problem = format!(
                "{problem}; width-init {init} has this limit, zero, net2wider, variance_transfer \
                 and firefly have none"
            );
            LifecycleError::Widen { layer, problem }
        };
        let sized = self.spec.sizes(&self.image).map_err(|error| fail(error.to_string()))?;
        // Number of weights, and output features.
        let size = |name: &str| {
            let of = sized.iter().find(|sized| sized.layer.name() == Some(name));
            of.map_or((0, 1), |SizedLayer { layer, parameters, output, .. }| {
                (parameters - if has_bias(layer) { output.c } else { 0 }, output.c)
            })
        };
        let (reader, outputs) = size(layer.reader());
        let (outgoing, incoming) = (reader / layer.features, size(&layer.name).0 / layer.features);
        let mut counts = vec![
            ("a feature has", outgoing, "outgoing weights", MEASURED_WEIGHTS_MAX),
            ("a feature has", incoming, "incoming weights", MEASURED_WEIGHTS_MAX),
        ];
        let elements = outgoing / outputs.max(1);
        if init == WidthInit::Tiny && elements > 1 {
            let read = reader / outputs.max(1);
            let products = elements.saturating_mul(read).saturating_mul(incoming);
            counts.extend([
                ("an output of the next layer has", read, "weights", MEASURED_WEIGHTS_MAX),
                ("there are", products, "products of activations", MEASURED_PRODUCTS_MAX),
            ]);
        }
        for (subject, count, what, limit) in counts {
            if count > limit {
                return Err(fail(format!(
                    "{subject} {count} {what}, and at most {limit} are measured"
                )));
            }
        }
        Ok(())
    }

    /// The layer that is wider than in `before`, the description of this host before the change of
    /// width. Returns the index of the layer and the number of its further features.
    pub fn wider_than(&self, before: &HostSpec) -> Option<(usize, usize)> {
        let pairs = before.widenable().into_iter().zip(self.widenable()).enumerate();
        let mut further = pairs.map(|(at, (old, new))| (at, new.features - old.features));
        further.find(|(_, further)| *further > 0)
    }

    fn widened(&self, layer: usize, by: usize) -> Result<(Host, WidthChange), LifecycleError> {
        let found = self.widenable_layer(layer)?;
        let WidenableLayer { ref name, features, .. } = found;
        let fail = |problem: String| LifecycleError::Widen { layer: name.clone(), problem };
        if by == 0 {
            return Err(fail("it must get at least 1 further feature, got 0".into()));
        }
        found.suits(self.rules.width_init).map_err(fail)?;
        self.check_measured(&found, self.rules.width_init)?;
        let mut host = self.with_features(layer, by)?;
        host.update_fits().map_err(|error| fail(error.to_string()))?;
        let size = host.size().map_err(|error| fail(error.to_string()))?;
        if let Some((what, needs, limit)) = host.exceeded(size) {
            let problem = format!("with it the host has {needs} {what}, and its limit is {limit}");
            return Err(fail(problem));
        }
        let change = WidthChange { layer: name.clone(), from: features, to: features + by };
        Ok((host, change))
    }

    fn widenable_layer(&self, layer: usize) -> Result<WidenableLayer, LifecycleError> {
        let mut layers = self.widenable();
        if layer < layers.len() {
            return Ok(layers.swap_remove(layer));
        }
        let (layer, layers) = (format!("number {layer}"), layers.len());
        let problem = format!("the host has {layers} layers that can become wider");
        Err(LifecycleError::Widen { layer, problem })
    }

    /// Updates the sizes of slots and of the bare host, which depend on the widths of layers.
    fn update_sizes(&mut self) -> Result<()> {
        let sized = self.spec.sizes(&self.image)?;
        let at_slot = |sized: &SizedLayer<'_>| Some((sized.layer.slot()?.clone(), sized.output));
        let dims: HashMap<SlotName, Dims> = sized.iter().filter_map(at_slot).collect();
        self.slots.iter_mut().for_each(|slot| slot.dims = dims[&slot.name]);
        self.bare_parameters = sized.iter().map(|sized| sized.parameters).sum();
        Ok(())
    }

    /// Updates which blueprints fit into the slots.
    fn update_fits(&mut self) -> Result<()> {
        for (slot, fits) in self.slots.iter().zip(&mut self.fits) {
            for (blueprint, fits) in self.blueprints.iter().zip(fits) {
                check_size(blueprint, slot.dims)?;
                *fits = blueprint.fits(slot.dims);
            }
        }
        Ok(())
    }
}

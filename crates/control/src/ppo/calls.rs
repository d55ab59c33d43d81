//! Checks of the calls of a policy: their order, and the envs that they name.

use super::rollout::RolloutShape;
use super::{Learning, NAME, Ppo};
use crate::error::{Error, Result};
use crate::policy::{PolicyForm, PolicyShape};
use crate::view::EnvView;

impl Ppo {
    /// Checks that the views list this rank's envs in order, and that the hosts fit the policy.
    pub(super) fn check_views(&self, views: &[EnvView<'_>]) -> Result<()> {
        let RolloutShape { envs, steps, .. } = *self.rollout.shape();
        let PolicyShape { form, slots, blueprints, .. } = *self.policy.shape();
        let places = self.policy.shape().layers().map(|layers| layers.places);
        let layers = |view: &EnvView<'_>| view.host.widenable().len();
        let fits = |(index, view): (usize, &EnvView<'_>)| {
            let has =
                [(view.host.slots().len(), slots), (view.host.blueprints().len(), blueprints)];
            let fits = |(has, most): (usize, usize)| match form {
                PolicyForm::Vector => has == most,
                PolicyForm::Set { .. } => has <= most,
            };
            let mut has = has.into_iter().chain(places.map(|places| (layers(view), places)));
            view.env == self.first_env + index && has.all(fits)
        };
        if views.len() != envs || !views.iter().enumerate().all(fits) {
            let at_most = if form == PolicyForm::Vector { "" } else { "at most " };
            let most = places.map(|places| format!(", at most {places} layers that can widen"));
            let expected = format!(
                "{envs} envs in order, {at_most}{slots} slots, {at_most}{blueprints} blueprints{}",
                most.unwrap_or_default()
            );
            let of = |view: &EnvView<'_>| {
                let host = view.host;
                (view.env, host.slots().len(), host.blueprints().len(), layers(view))
            };
            let got: Vec<_> = views.iter().map(of).collect();
            return Err(protocol(expected, format!("(env, slots, blueprints, layers) {got:?}")));
        }
        if self.learning == Learning::On && self.step > steps {
            return Err(protocol(format!("at most {steps} steps"), self.step.to_string()));
        }
        Ok(())
    }

    /// Checks the order of calls: the rewards of the last decision must be missing if
    /// `rewards_missing` is true, and must have been received if it is false.
    pub(super) fn check_rewards_missing(&self, rewards_missing: bool) -> Result<()> {
        if self.learning != Learning::On || self.rewards_missing == rewards_missing {
            return Ok(());
        }
        let [expected, got] = if rewards_missing {
            ["a decision before rewards", "rewards"]
        } else {
            ["the rewards of the last step", "another call"]
        };
        Err(protocol(expected.into(), got.into()))
    }
}

pub(super) fn protocol(expected: String, got: String) -> Error {
    Error::Protocol { controller: NAME, expected, got }
}

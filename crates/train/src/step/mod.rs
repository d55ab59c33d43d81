//! One step of this process's envs, in five parts:
//!
//! - `open` advances the hosts and updates their networks;
//! - `training` gathers the batches of the epoch and trains all networks side by side. It waits
//!   only in the cases that `training::train` names;
//! - `measure` evaluates the control split in every configuration, and reads the metrics of all
//!   networks back at once;
//! - `governor` rolls failed envs back;
//! - `decision` calls the controller and executes its actions. Before that, `visit` calls an
//!   external controller with the envs.
//!
//! At the end `events` records the results, `width` widens the networks whose new features are
//! initialised from measured gradients, and `governor` takes the snapshots that are due.
//!
//! The other modules:
//!
//! - `context` has everything that the parts of a step use;
//! - `growth` executes actions and records growth;
//! - `counterfactuals` has the contributions of modules, `width_scores` scores of layers;
//! - `telemetry` has the details for the events;
//! - `permitted` has the limits of the hot path;
//! - `own_loss` makes the passes with a loss that the program computes;
//! - `report` evaluates at the end of an episode.

mod context;
mod counterfactuals;
mod decision;
mod events;
mod governor;
mod growth;
mod measure;
mod open;
mod own_loss;
mod permitted;
pub(crate) mod report;
mod telemetry;
mod training;
pub(crate) mod visit;
mod width;
mod width_scores;

pub(crate) use self::context::StepContext;
use self::telemetry::{StepClock, StepDetails};
use crate::error::Result;

/// Runs one step. Waits for the devices.
///
/// # Errors
/// A diverged env, a device failure.
pub(crate) fn step(context: &mut StepContext<'_, '_>) -> Result<()> {
    let mut clock = StepClock::start(StepDetails::new(&context.setup.config, context.when.step));
    let _span = context.resources.devices.span(|| format!("step {}", context.when.step));

    clock.time(|phases| &mut phases.open, || open::open(context))?;
    clock.time(|phases| &mut phases.train, || training::train(context))?;
    clock.time(|phases| &mut phases.measure, || measure::measure(context))?;
    context.spent.step_seconds = clock.measured();
    events::record_batches(context);
    let actions = clock.time(
        |phases| &mut phases.decide,
        || governor::govern(context).and_then(|()| decision::decide(context)),
    )?;
    *context.warm = true;
    context.spent.steps = 1;
    context.spent.own_loss = context.resources.take_loss_cost();

    events::record_results(context, actions, &clock)?;
    width::widen(context)?;
    governor::take_snapshots(context)
}

//! A custom controller: it receives each env after each step, and returns an action for it.
//!
//!     cargo run --release -p meristem --example own_controller

use meristem::control::{self, Action, Controller, EnvView};
use meristem::grow::{AlphaTarget, Stage, Style, Tempo};
use meristem::train::config::{ConfigLayer, TrainConfig};
use meristem::train::settings::{BatchLimit, ControllerKind, Preset};
use meristem::train::{Silent, run_with};

/// Controller that plants the smallest module when the control accuracy did not rise, and keeps the
/// module if its gate passes.
struct Patient;

impl Controller for Patient {
    fn name(&self) -> &str {
        "patient"
    }

    fn decide_all(&mut self, envs: &[EnvView<'_>]) -> control::Result<Vec<Action>> {
        Ok(envs.iter().map(decide).collect())
    }
}

/// The action of one env.
fn decide(env: &EnvView<'_>) -> Action {
    let slots = env.host.slots();
    // A module whose gate passes advances; the last stage is permanent.
    if let Some(slot) = (0..slots.len()).find(|slot| env.gate_passes(*slot)) {
        return match slots[slot].stage {
            Stage::Holding => Action::Fossilize { slot },
            _ => Action::Advance { slot },
        };
    }
    let [.., before, now] = env.scores_pp else { return Action::Wait };
    let germination = |slot| Action::Germinate {
        slot,
        blueprint: 0,
        style: Style::LinearAdd,
        tempo: Tempo::Fast,
        alpha_target: AlphaTarget::Full,
    };
    let fits = |slot: &usize| env.host.check_germinate(*slot, 0).is_ok();
    let slot = (0..slots.len()).find(fits).filter(|_| now <= before);
    slot.map_or(Action::Wait, germination)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings = ConfigLayer {
        preset: Some(Preset::Quick),
        controller: Some(ControllerKind::External),
        envs: Some(2),
        max_batches: Some(BatchLimit::Count(20)),
        ..ConfigLayer::default()
    };
    let config = TrainConfig::resolve(ConfigLayer::default(), settings)?;
    let controller: Box<dyn Controller> = Box::new(Patient);
    let summary = run_with(&config, controller, &mut Silent)?;
    for env in &summary.envs {
        let share = env.test_score.unwrap_or(f64::NAN);
        println!("env {}: test accuracy {:.1} %", env.env, 100.0 * share);
        for module in &env.modules {
            println!("  {} in {} is {}", module.blueprint, module.slot, module.stage);
        }
    }
    println!("run folder: {}", summary.run_dir.display());
    Ok(())
}

//! A custom module: a blueprint is one value.
//!
//!     cargo run --release -p meristem --example own_blueprint

use meristem::grow::{Blueprint, BlueprintLayer, BlueprintSet, Channels, Join};
use meristem::nn::graph::Dims;
use meristem::train::config::{ConfigLayer, TrainConfig};
use meristem::train::settings::{ControllerKind, Preset};
use meristem::train::{Event, Observer, run_with};

/// Observer that prints events of growth.
struct Tell;

impl Observer for Tell {
    fn event(&mut self, event: &Event) {
        match event {
            Event::ModuleGerminated { env, slot, blueprint, parameters, .. } => {
                println!("env {env}: {blueprint} in {slot}, {parameters} parameters");
            }
            Event::StageChanged { env, slot, from, to, .. } => {
                println!("env {env}: {slot} goes from {from} to {to}");
            }
            _ => {}
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // x + GroupNorm(depthwise conv5x5, then conv1x1). Like every residual blueprint it ends with a
    // norm that starts at zero, so the new module is the identity and still has a gradient.
    let wide_depthwise = Blueprint::new(
        "wide_depthwise",
        vec![
            BlueprintLayer::Conv { out: Channels::Same, kernel: 5, depthwise: true },
            BlueprintLayer::Conv { out: Channels::Same, kernel: 1, depthwise: false },
            BlueprintLayer::GroupNorm { zero: true },
        ],
        Join::Residual,
    );
    wide_depthwise.check()?;
    let slot = Dims { c: 8, h: 28, w: 28 };
    println!("{} parameters at 8 channels", wide_depthwise.parameters(slot)?);

    let settings = ConfigLayer {
        preset: Some(Preset::Quick),
        controller: Some(ControllerKind::Heuristic),
        envs: Some(2),
        ..ConfigLayer::default()
    };
    let config = TrainConfig::resolve(ConfigLayer::default(), settings)?;
    let only_mine = BlueprintSet::empty().with(wide_depthwise)?;
    let summary = run_with(&config, only_mine, &mut Tell)?;

    for env in &summary.envs {
        let share = env.test_score.unwrap_or(f64::NAN);
        println!("env {}: test accuracy {:.1} %", env.env, 100.0 * share);
        for module in &env.modules {
            let contribution = module.contribution.map_or("unknown".into(), |c| format!("{c:+.1}"));
            println!("  {} in {}: contribution {contribution}", module.blueprint, module.slot);
        }
    }
    println!("run folder: {}", summary.run_dir.display());
    Ok(())
}

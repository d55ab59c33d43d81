//! A custom training loop: the program steps a run, reads its state, and chooses when to end it.
//!
//!     cargo run --release -p meristem --example own_loop

use meristem::control::{Action, Controller, Heuristic, HeuristicConfig};
use meristem::train::config::{ConfigLayer, TrainConfig};
use meristem::train::session::Session;
use meristem::train::settings::{BatchLimit, ControllerKind, Preset};

/// Control accuracy at which the loop ends, 0..1.
const ENOUGH: f64 = 0.7;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings = ConfigLayer {
        preset: Some(Preset::Quick),
        controller: Some(ControllerKind::External),
        envs: Some(2),
        max_batches: Some(BatchLimit::Count(20)),
        ..ConfigLayer::default()
    };
    let config = TrainConfig::resolve(ConfigLayer::default(), settings)?;
    let mut session = Session::start(&config)?;
    let mut heuristic = Heuristic::new(HeuristicConfig::default());

    for step in 1..=config.steps {
        // Trains one epoch and measures; the closure is called repeatedly meanwhile.
        let envs = session.step(&mut || {})?;
        let accuracies: Vec<_> = envs.iter().filter_map(|env| env.figures.control_score).collect();
        let worst = accuracies.iter().copied().fold(1.0, f64::min);
        println!("step {step}: control accuracy at least {:.1} %", 100.0 * worst);

        // Any action is possible here; this loop uses the heuristic of `meristem train`.
        let views: Vec<_> = envs.iter().map(|env| env.view()).collect();
        let actions = if worst < ENOUGH {
            heuristic.decide_all(&views)?
        } else {
            vec![Action::Wait; views.len()]
        };
        session.act(actions, &mut || {})?;
        if worst >= ENOUGH {
            break;
        }
    }

    // The run has a run folder: it can be watched, reported and resumed.
    let summary = session.close()?;
    println!("{} steps; run folder: {}", summary.steps, summary.run_dir.display());
    Ok(())
}

//! Drawn tasks: a dataset, the settings of a round, and those of each env.

use meristem_data::{Generated, Source};
use meristem_device::random::{Purpose, Rng};

use super::request::{PolicyTraining, Use};
use crate::config::{ConfigLayer, TrainConfig, add_rates_from_before};
use crate::error::{Error, Result};
use crate::settings::{ControllerKind, Member, Sampler, Space, Switch, Telemetry};

/// Random draws of a task, each with its own key.
#[derive(Clone, Copy)]
enum Draw {
    /// Seed of the runs.
    Run,
    /// Seed of the dataset.
    Data,
    /// Settings from the space of tasks.
    Settings,
    /// Family of the task.
    Family,
}

/// Key of a draw of a use. The keys differ from the keys of the draws of members, which are below
/// the number of envs.
fn key(of: Use, draw: Draw) -> u64 {
    u64::MAX - 1 - (of as u64) - 2 * (draw as u64)
}

/// Index of the family to which task `number` of the use `of` belongs; 0 without families.
pub(super) fn family(request: &PolicyTraining, of: Use, number: usize) -> usize {
    let key = key(of, Draw::Family);
    let position = Rng::new(request.seed, Purpose::Members, key, number as u64).uniform();
    request.family_at(position.into())
}

/// Draws task `number` of the use `of`. The draws depend only on the arguments.
///
/// # Errors
/// [`Error::Value`]: settings that do not fit together.
pub(super) fn draw(
    request: &PolicyTraining,
    of: Use,
    number: usize,
    controller: ControllerKind,
) -> Result<TrainConfig> {
    let seed = |draw: Draw| {
        let key = key(of, draw);
        Rng::new(request.seed, Purpose::Members, key, number as u64).next_u64() >> 1
    };
    let spaces = request.spaces(family(request, of, number))?;
    // The seed of the dataset is part of the dataset's displayed name, so it is shortened.
    let (run_seed, data_seed) = (seed(Draw::Run), seed(Draw::Data) >> 31);
    let place = |dimension: usize| {
        let random = (seed(Draw::Settings), dimension as u64);
        f64::from(Rng::new(random.0, Purpose::Members, u64::MAX, random.1).uniform())
    };
    let named = |error| Error::value("task", text_of(&spaces.task), error);
    let drawn = spaces.task.member(place).map_err(named)?;
    let mut layer = request.layer()?;
    let options = apply(&drawn, &mut layer)?;
    layer.dataset = Some(dataset(layer.dataset.as_deref(), &options, data_seed));
    layer.seed = Some(run_seed);
    layer.envs = Some(request.envs_of(of));
    layer.rounds = Some(1);
    layer.controller = Some(controller);
    layer.checkpoint_every = Some(0);
    layer.twin = Some(Some(Switch(true)));
    layer.telemetry.get_or_insert(Telemetry::Off);
    layer.reward.get_or_insert(meristem_control::RewardMode::Shaped);
    if !spaces.members.is_empty() {
        let members = Sampler::Random.draw(&spaces.members, request.members_of(of), run_seed);
        let named = |error| Error::value("members", "the drawn settings", error);
        layer.members = Some(Some(members.map_err(named)?));
    }
    if let Some(version) = request.settings_version {
        let added = add_rates_from_before(&mut layer, version);
        added.map_err(|error| Error::value("settings_version", version, error))?;
    }
    TrainConfig::resolve(ConfigLayer::default(), layer)
}

/// Sets the drawn settings, and returns the options of the dataset.
fn apply(drawn: &Member, layer: &mut ConfigLayer) -> Result<Vec<(String, String)>> {
    let mut options = vec![];
    for (key, value) in drawn.settings() {
        if Generated::OPTIONS.contains(&key) {
            options.push((key.to_string(), value.to_string()));
        } else {
            let wrong = |error| {
                let expected = format!("other values: {error}");
                Error::value("task", format!("{key}={value}"), expected)
            };
            layer.set(key, value).map_err(wrong)?;
        }
    }
    Ok(options)
}

/// Adds the seed and the drawn options to the name of a generated dataset, as far as the dataset
/// has these options and the name does not set them. The name of any other dataset is returned
/// unchanged.
fn dataset(name: Option<&str>, options: &[(String, String)], seed: u64) -> String {
    let name = name.unwrap_or("blobs");
    let (source, given) = name.split_once(':').unwrap_or((name, ""));
    let known = source.parse().map_or(&[][..], Source::options);
    if known.is_empty() {
        return name.into();
    }
    let has = |key: &str| given.split(',').any(|option| option.split('=').next() == Some(key));
    let seed = [("seed".to_string(), seed.to_string())];
    let drawn = seed.iter().chain(options);
    let drawn = drawn.filter(|(key, _)| known.contains(&&**key) && !has(key));
    let drawn = drawn.map(|(key, value)| format!("{key}={value}"));
    let given = given.split(',').filter(|option| !option.is_empty()).map(str::to_string);
    format!("{source}:{}", given.chain(drawn).collect::<Vec<_>>().join(","))
}

fn text_of(space: &Space) -> String {
    let dimensions = space.dimensions().iter().map(ToString::to_string);
    dimensions.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use meristem_grow::Birth;
    use meristem_nn::graph::Optimiser;

    use super::*;
    use crate::settings::ModuleLr;

    const FILE: &str = r#"
        rounds = 4
        envs = 3
        [settings]
        steps = 7
        [task]
        dataset = { choice = ["blobs", "spirals", "friedman"] }
        noise = { uniform = [0.5, 2] }
        label_noise = { uniform = [0, 0.2] }
        steps = { int = [4, 9] }
        [members]
        lr = { log_uniform = [0.01, 0.3] }
    "#;

    #[test]
    fn tasks_are_pure_functions_of_their_number_and_use() {
        let request = PolicyTraining::parse(Path::new("p.toml"), FILE).unwrap();
        let draw = |of, number| draw(&request, of, number, ControllerKind::External).unwrap();
        assert_eq!(draw(Use::Round, 2), draw(Use::Round, 2));
        let all: Vec<TrainConfig> = (0..40).map(|n| draw(Use::Round, n)).collect();
        for source in ["blobs:", "spirals:", "friedman:"] {
            assert!(all.iter().any(|config| config.dataset.starts_with(source)));
        }
        for config in &all {
            assert!((4..=9).contains(&config.steps));
            assert_eq!(config.members.as_ref().unwrap().all().len(), 3);
            let of_friedman = config.dataset.starts_with("friedman");
            assert_eq!(config.dataset.contains("label_noise"), !of_friedman, "{}", config.dataset);
            let others = (0..40).map(|n| draw(Use::Evaluation, n).seed);
            assert!(others.into_iter().all(|seed| seed != config.seed));
        }
        let distinct: std::collections::BTreeSet<u64> = all.iter().map(|c| c.seed).collect();
        assert_eq!(distinct.len(), 40);
    }

    #[test]
    fn an_earlier_version_has_its_defaults() {
        let drawn = |text: &str| {
            let text = format!("rounds = 1\nenvs = 6\n{text}");
            let request = PolicyTraining::parse(Path::new("p.toml"), &text).unwrap();
            draw(&request, Use::Round, 0, ControllerKind::External).unwrap()
        };
        let rates = |config: &TrainConfig| -> Vec<(String, f64)> {
            let rate = |config: &TrainConfig| match config.optimisers(1.0).host {
                Optimiser::Sgd(sgd) | Optimiser::Nesterov(sgd) => f64::from(sgd.lr),
                Optimiser::Adam(adam) => f64::from(adam.lr),
                other => panic!("{other:?}"),
            };
            let members = config.of_members();
            members.iter().map(|m| (m.optimizer.to_string(), rate(m))).collect()
        };
        let of = |config: &TrainConfig| (rates(config), config.rules.birth, config.module_lr);
        let sgd = |rate: f32| vec![("sgd".to_string(), f64::from(rate))];
        assert_eq!(of(&drawn("")), (sgd(0.1), Birth::Joint, ModuleLr::Host));
        assert_eq!(of(&drawn("settings_version = 16")), of(&drawn("")));
        let earlier = (sgd(0.01), Birth::Aside, ModuleLr::Fixed);
        assert_eq!(of(&drawn("settings_version = 15")), earlier);
        // Values that are given stay.
        let given = "settings_version = 15\n[settings]\nlr = 0.2\nbirth = \"joint\"";
        assert_eq!(of(&drawn(given)), (sgd(0.2), Birth::Joint, ModuleLr::Fixed));
        // Each member has the default of its optimiser, whatever the setting of all runs.
        for optimizer in ["sgd", "adam"] {
            let text = format!(
                "settings_version = 15\n[settings]\noptimizer = \"{optimizer}\"\n\
                 [members]\noptimizer = {{ choice = [\"sgd\", \"adam\"] }}"
            );
            let rates = rates(&drawn(&text));
            assert_eq!(rates.len(), 6);
            for (optimizer, rate) in rates {
                let expected = if optimizer == "sgd" { 0.01f32 } else { 0.001 };
                assert_eq!(rate, f64::from(expected), "{optimizer}");
            }
        }
    }

    #[test]
    fn families_have_spaces_of_their_own_and_shares_by_weight() {
        let families = r#"
            [[families]]
            weight = 3
            [[families]]
            task.dataset = { choice = ["mnist1d"] }
            members.host = { choice = ["conv1d:4,4"] }
        "#;
        let parse = |text: &str| PolicyTraining::parse(Path::new("p.toml"), text).unwrap();
        let request = parse(&format!("{FILE}{families}"));
        let (alone, mut of_second) = (parse(FILE), 0);
        for number in 0..200 {
            let draw = |request| draw(request, Use::Round, number, ControllerKind::External);
            let (own, other) = (draw(&request).unwrap(), draw(&alone).unwrap());
            if family(&request, Use::Round, number) == 0 {
                assert_eq!(own, other, "the spaces of all tasks");
                continue;
            }
            of_second += 1;
            assert!(own.dataset.starts_with("mnist1d:"), "{}", own.dataset);
            assert_eq!((own.steps, own.seed), (other.steps, other.seed));
            let members = own.members.as_ref().unwrap().all();
            assert!(members.iter().all(|member| member.get("host") == Some("conv1d:4,4")));
            assert!(members.iter().all(|member| member.get("lr").is_some()));
        }
        // A quarter of 200 tasks, within four standard deviations.
        assert!((26..=74).contains(&of_second), "{of_second}");
    }

    #[test]
    fn a_generated_dataset_gets_the_options_that_its_name_lacks() {
        let options = [("noise".to_string(), "2".to_string())];
        assert_eq!(dataset(Some("embedded"), &options, 3), "embedded");
        assert_eq!(dataset(Some("blobs:train=9"), &options, 3), "blobs:train=9,seed=3,noise=2");
        assert_eq!(dataset(Some("blobs:noise=1,seed=4"), &options, 3), "blobs:noise=1,seed=4");
        assert_eq!(dataset(None, &options, 3), "blobs:seed=3,noise=2");
    }
}

//! Tests of ranges, over all declarations: a bound that the reference page states is accepted from
//! flags and files, and the next number beyond it is refused.

use std::path::Path;

use super::declare::{NumberRange, Setting};
use super::file::parse;
use super::table::{ConfigLayer, TrainConfig, all};
use super::types::Preset;

/// Sources of a value.
#[derive(Clone, Copy, Debug)]
enum GivenAs {
    Flag,
    Toml,
    Json,
}

/// The configuration with `setting` parsed from `text`, or the error.
fn resolved(setting: &Setting, text: &str, from: GivenAs) -> Result<TrainConfig, String> {
    let key = setting.key;
    let layer = match from {
        GivenAs::Flag => {
            let mut layer = ConfigLayer::default();
            layer.set(key, text).map(|()| layer).map_err(|error| error.to_string())
        }
        GivenAs::Toml => {
            parse(Path::new("c.toml"), &format!("{key} = {text}")).map_err(|e| e.to_string())
        }
        GivenAs::Json => {
            parse(Path::new("c.json"), &format!("{{\"{key}\": {text}}}")).map_err(|e| e.to_string())
        }
    };
    let mut config = TrainConfig::of_preset(Preset::Default, true);
    config.apply(layer?);
    config.check_ranges().map(|()| config).map_err(|error| error.to_string())
}

/// Bounds of a range, as text of the reference page; each with the next number outside the range,
/// in 32 and in 64 bits.
fn bounds(range: NumberRange) -> Vec<(String, Vec<String>)> {
    let stated = range.to_string();
    let (low, high) = stated.split_once(" to ").unwrap_or((&stated, ""));
    let low = low.trim_start_matches("at least ").to_string();
    match range {
        NumberRange::Any => vec![],
        NumberRange::Whole(least, most) => {
            let below = least.checked_sub(1).map_or("-1".into(), |below| below.to_string());
            let above = most.checked_add(1).map(|above| vec![above.to_string()]);
            let above = above.map(|above| (high.to_string(), above));
            [(low, vec![below])].into_iter().chain(above).collect()
        }
        NumberRange::Real(least, most) => {
            let text = |beyond: f64| format!("{beyond:e}");
            let below = [f64::from((least as f32).next_down()), least.next_down()].map(text);
            let above = [f64::from((most as f32).next_up()), most.next_up()].map(text);
            vec![(low, below.into()), (high.into(), above.into())]
        }
    }
}

#[test]
fn every_stated_bound_is_accepted_and_nothing_beyond_it() {
    for setting in all() {
        for (bound, beyond) in bounds(setting.range) {
            for from in [GivenAs::Flag, GivenAs::Toml, GivenAs::Json] {
                let at = format!("{} = {bound} ({from:?})", setting.key);
                let config = resolved(setting, &bound, from);
                let config = config.unwrap_or_else(|error| panic!("{at}: {error}"));
                for next in &beyond {
                    // Rounded to 32 bits, the next 64-bit number may equal the bound.
                    let accepted = resolved(setting, next, from).ok();
                    let is_bound = accepted.is_none_or(|accepted| accepted == config);
                    assert!(is_bound, "{} = {next} ({from:?}) is beyond {bound}", setting.key);
                }
            }
        }
    }
}

/// The `config.toml` of a run has every setting with a range, with the value that the run uses,
/// except `stop_after`, which is left out.
#[test]
fn a_bound_is_written_as_it_was_read() {
    for setting in all().iter().filter(|setting| setting.key != "stop_after") {
        for (bound, _) in bounds(setting.range) {
            let config = resolved(setting, &bound, GivenAs::Flag).unwrap();
            let text = config.resolved_toml();
            let mut read = TrainConfig::of_preset(Preset::Default, true);
            read.apply(parse(Path::new("config.toml"), &text).unwrap());
            assert_eq!(read.resolved_toml(), text, "{} = {bound}", setting.key);
            assert!(text.contains(&format!("\n{} = ", setting.key)), "{} = {bound}", setting.key);
        }
    }
}

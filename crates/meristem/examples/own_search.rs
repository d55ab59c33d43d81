//! A custom search over settings of members: golden-section search for the learning rate, one
//! member after the other.
//!
//!     cargo run --release -p meristem --example own_search

use meristem::data::order::EpochMode;
use meristem::train::config::{ConfigLayer, TrainConfig};
use meristem::train::external::Searcher;
use meristem::train::settings::{BatchLimit, ControllerKind, Member, Preset, Sampler};
use meristem::train::{self, EndReason, Silent, run_with};

/// Share of the interval that is left after each member.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// Search between two logarithms of the learning rate, given that the score has one maximum there.
struct GoldenSection {
    low: f64,
    high: f64,
    /// Rates and scores of the members that are complete.
    tried: Vec<(f64, f64)>,
    /// Logarithm of the rate in training, and its last score.
    now: (f64, f64),
}

impl GoldenSection {
    /// Places at which the search looks into the interval.
    fn places(&self) -> [f64; 2] {
        let inner = GOLDEN * (self.high - self.low);
        [self.high - inner, self.low + inner]
    }

    fn score(&self, place: f64) -> Option<f64> {
        let known = self.tried.iter().find(|(other, _)| (other - place).abs() < 1e-6);
        known.map(|(_, score)| *score)
    }
}

impl Searcher for GoldenSection {
    fn suggest(&mut self, _member: usize) -> train::Result<Member> {
        let mut places = self.places();
        if let [Some(left), Some(right)] = places.map(|place| self.score(place)) {
            if left > right {
                self.high = places[1];
            } else {
                self.low = places[0];
            }
            places = self.places();
        }
        let untried = places.into_iter().find(|place| self.score(*place).is_none());
        self.now = (untried.unwrap_or(places[0]), f64::NEG_INFINITY);
        let mut member = Member::default();
        // A key that is there once and a number have no error.
        let _ = member.push("lr", &format!("{:.4e}", self.now.0.exp()));
        Ok(member)
    }

    fn report(&mut self, _member: usize, _steps: usize, score: Option<f64>) -> train::Result<bool> {
        self.now.1 = score.unwrap_or(f64::NEG_INFINITY);
        Ok(true)
    }

    fn complete(&mut self, _member: usize, _ended: Option<EndReason>) -> train::Result<()> {
        self.tried.push(self.now);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let settings = ConfigLayer {
        preset: Some(Preset::Quick),
        controller: Some(ControllerKind::None),
        control_split: Some(Some(0.2)),
        sampler: Some(Sampler::External),
        samples: Some(Some(8)),
        places: Some(Some(1)),
        epoch: Some(EpochMode::Full),
        steps: Some(4),
        max_batches: Some(BatchLimit::Count(20)),
        ..ConfigLayer::default()
    };
    let config = TrainConfig::resolve(ConfigLayer::default(), settings)?;
    let (low, high) = (1e-3_f64.ln(), 0.5_f64.ln());
    let search = GoldenSection { low, high, tried: vec![], now: (low, 0.0) };
    let searcher: Box<dyn Searcher> = Box::new(search);
    let summary = run_with(&config, searcher, &mut Silent)?;
    for place in summary.leaderboard() {
        let control = place.control.map_or(f64::NAN, |score| 100.0 * score.mean);
        println!("{}: control accuracy {control:.1} %", place.member);
    }
    Ok(())
}

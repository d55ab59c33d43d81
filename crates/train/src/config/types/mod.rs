//! Types of single settings: choices by name, limits, sizes, lists.
//!
//! Each has one text form, which flags, configuration files and messages share.

mod amount;
mod augmentations;
mod blueprints;
mod changes;
mod choice;
mod class_weights;
mod controller;
mod distribution;
mod exchange;
mod growth;
mod members;
mod normalize;
mod optimizer;
mod param_groups;
mod policy_start;
mod sampler;
mod scheduler;
mod space;
mod task;
mod widen;

pub use self::amount::{BatchLimit, ByteSize, ClipNorm};
pub use self::augmentations::Augmentations;
pub use self::blueprints::BlueprintSource;
pub use self::changes::{Numbers, PlannedChange, PlannedChanges};
pub use self::choice::{
    CommKind, HotScopePolicy, LrSchedule, ModuleLr, ObservationForm, Preset, Switch, Telemetry,
};
pub use self::class_weights::ClassWeights;
pub use self::controller::ControllerKind;
pub use self::distribution::Distribution;
pub use self::exchange::{ExchangeKind, ExchangeMethod};
pub use self::growth::{GrowthLr, GrowthMomentum};
pub(crate) use self::members::{MEMBERS_MAX, SEPARATOR};
pub use self::members::{Member, Members};
pub use self::normalize::Normalize;
pub use self::optimizer::OptimizerKind;
pub(crate) use self::optimizer::{Hyperparameters, number_text};
pub use self::param_groups::{ParamGroup, ParamGroups, Scaled};
pub use self::policy_start::{BuiltInPolicy, PolicyStart};
pub use self::sampler::Sampler;
pub use self::scheduler::Scheduler;
pub use self::space::{Dimension, Space};
pub use self::task::{LossKind, TaskKind};
pub(crate) use self::widen::MeasuringRule;
pub use super::text::BadValue;
pub(crate) use super::text::{choose, one_of, serde_as_text, unknown};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        for text in ["none", "crop", "crop,flip", "crop,flip,cutout"] {
            assert_eq!(text.parse::<Augmentations>().unwrap().to_string(), text);
        }
        for text in ["all", "12"] {
            assert_eq!(text.parse::<BatchLimit>().unwrap().to_string(), text);
        }
        for (name, preset) in Preset::NAMES {
            assert_eq!(preset.to_string(), name);
        }
        for (name, level) in Telemetry::NAMES {
            assert_eq!(level.to_string(), name);
        }
        for (name, optimizer) in OptimizerKind::NAMES {
            assert_eq!(optimizer.to_string(), name);
        }
        for (name, schedule) in LrSchedule::NAMES {
            assert_eq!(schedule.to_string(), name);
        }
    }

    #[test]
    fn normalisations_round_trip_and_wrong_ones_say_why() {
        for text in ["data", "cifar10", "imagenet", "mean=0.5;std=0.25", "mean=0.1,-2;std=1,0.3"] {
            assert_eq!(text.parse::<Normalize>().unwrap().to_string(), text);
        }
        for (text, words) in [
            ("cifar", "did you mean `cifar10`?"),
            ("mean=0.5", "the means, then the standard deviations"),
            ("std=1;mean=0", "the means, then the standard deviations"),
            ("mean=a;std=1", "as numbers"),
            ("mean=;std=", "as numbers"),
            ("mean=0;std=1;max=2", "nothing after"),
            ("mean=0,0;std=1", "as many means"),
            ("mean=0;std=0", "positive, finite"),
            ("mean=nan;std=1", "finite means"),
            ("mean=0;std=1e-42", "positive, finite"),
        ] {
            let message = text.parse::<Normalize>().unwrap_err().to_string();
            assert!(message.contains(words) && message.contains(text), "{message}");
        }
    }

    #[test]
    fn learning_rates_follow_their_schedules() {
        let factors = |schedule: LrSchedule, steps: usize, warmup: usize| -> Vec<f64> {
            (0..steps).map(|step| schedule.factor(step, steps, warmup)).collect()
        };
        let near = |got: Vec<f64>, expected: &[f64]| {
            let fits = got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3);
            assert!(got.len() == expected.len() && fits, "{got:?} {expected:?}");
        };
        use LrSchedule::{Constant, Cosine, OneCycle};
        assert_eq!(factors(Constant, 3, 0), [1.0; 3], "exactly");
        near(factors(Constant, 4, 2), &[1.0 / 3.0, 2.0 / 3.0, 1.0, 1.0]);
        near(factors(Cosine, 4, 0), &[1.0, 0.8536, 0.5, 0.1464]);
        near(factors(Cosine, 5, 1), &[0.5, 1.0, 0.8536, 0.5, 0.1464]);
        near(
            factors(OneCycle, 10, 0),
            &[0.28, 0.52, 0.76, 1.0, 0.9505, 0.8117, 0.6113, 0.3887, 0.1883, 0.0495],
        );
        near(factors(OneCycle, 4, 1), &[0.52, 1.0, 0.75, 0.25]);
        for schedule in [Constant, Cosine, OneCycle] {
            for (steps, warmup) in [(1, 0), (1, 5), (2, 1), (3, 3), (60, 0), (60, 7)] {
                let all = factors(schedule, steps, warmup);
                assert!(all.iter().all(|f| *f > 0.0 && *f <= 1.0), "{schedule} {all:?}");
            }
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!("3MiB".parse::<ByteSize>().unwrap().0, 3 << 20);
        assert_eq!("200 MB".parse::<ByteSize>().unwrap().0, 200_000_000);
        for wrong in ["3 parsecs", "99999999999999GB"] {
            let message = wrong.parse::<ByteSize>().unwrap_err().to_string();
            assert!(message.contains(wrong), "{message}");
        }
    }

    #[test]
    fn a_wrong_name_is_answered_with_the_nearest() {
        let message = "flop".parse::<Augmentations>().unwrap_err().to_string();
        assert!(message.contains("did you mean `flip`?"), "{message}");
        let message = "none,flip".parse::<Augmentations>().unwrap_err().to_string();
        assert!(message.contains("none"), "{message}");
        let message = "dney".parse::<HotScopePolicy>().unwrap_err().to_string();
        assert!(message.contains("off | warn | deny; did you mean `deny`?"), "{message}");
    }
}

//! Types of single settings: choices by name, limits, sizes, lists.
//!
//! Each has one text form, which flags, configuration files and messages share.

mod amount;
mod augmentations;
mod choice;
mod controller;
mod exchange;

pub use self::amount::{ByteSize, ClipNorm, Limit};
pub use self::augmentations::Augmentations;
pub use self::choice::{CommKind, HotScopePolicy, Preset, Switch, Telemetry};
pub use self::controller::ControllerKind;
pub use self::exchange::ExchangeKind;
pub use super::text::BadValue;
pub(crate) use super::text::{choose, serde_as_text, unknown};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_forms_round_trip() {
        for text in ["none", "crop", "crop,flip", "crop,flip,cutout"] {
            assert_eq!(text.parse::<Augmentations>().unwrap().to_string(), text);
        }
        for text in ["all", "12"] {
            assert_eq!(text.parse::<Limit>().unwrap().to_string(), text);
        }
        for (name, preset) in Preset::NAMES {
            assert_eq!(preset.to_string(), name);
        }
        for (name, level) in Telemetry::NAMES {
            assert_eq!(level.to_string(), name);
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

//! Augmentations of training images.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, choose, serde_as_text};
use crate::config::value::value_as_text;

/// Augmentations that the gather applies. Text form: `none`, or any of `crop,flip,cutout`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Augmentations {
    /// Random crop from the image padded by four pixels, or two if a side is below 8.
    pub crop: bool,
    /// Horizontal flip, half of the time.
    pub flip: bool,
    /// Cutout of one square.
    pub cutout: bool,
}

impl FromStr for Augmentations {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let mut chosen = Self::default();
        if text == "none" {
            return Ok(chosen);
        }
        for name in text.split(',') {
            match choose(name.trim(), &[("crop", 0), ("flip", 1), ("cutout", 2), ("none", 3)])? {
                0 => chosen.crop = true,
                1 => chosen.flip = true,
                2 => chosen.cutout = true,
                _ => return Err(BadValue::new(text, "`none` alone, or any of crop,flip,cutout")),
            }
        }
        Ok(chosen)
    }
}

impl fmt::Display for Augmentations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(self.crop, "crop"), (self.flip, "flip"), (self.cutout, "cutout")];
        let chosen: Vec<&str> = names.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        if chosen.is_empty() { f.write_str("none") } else { f.write_str(&chosen.join(",")) }
    }
}
serde_as_text!(Augmentations);
value_as_text!(Augmentations, "none, or any of crop,flip,cutout");

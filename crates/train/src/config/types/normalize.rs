//! Choice of the constants that pixels are normalised with.

use std::fmt;
use std::str::FromStr;

use meristem_data::{DatasetInfo, Normalization};
use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text, unknown};
use crate::config::value::value_as_text;
use crate::error::{Error, Result};

/// Published mean and standard deviation of the training images of CIFAR-10.
const CIFAR10: [[f32; 3]; 2] = [[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]];
/// Published constants of ImageNet, which torchvision's models are trained with.
const IMAGENET: [[f32; 3]; 2] = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]];

/// Constants that pixels are normalised with. Text form: `data`, `cifar10`, `imagenet`, or
/// `mean=A,B,C;std=D,E,F` with one number for each channel, for pixels in 0..1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Normalize {
    /// Mean and standard deviation of the dataset's training images.
    #[default]
    Data,
    /// Published constants of CIFAR-10.
    Cifar10,
    /// Published constants of ImageNet.
    Imagenet,
    /// Other constants.
    Constants(Normalization),
}

impl Normalize {
    const FORMS: [&'static str; 4] = ["data", "cifar10", "imagenet", "mean=A,B,C;std=D,E,F"];

    /// The constants for the images of a dataset.
    ///
    /// # Errors
    /// [`Error::Value`]: another number of channels than the images have.
    pub fn constants(&self, info: &DatasetInfo) -> Result<Normalization> {
        let of_data = || Normalization { mean: info.mean.clone(), std: info.std.clone() };
        Ok(self.fixed(info.channels)?.unwrap_or_else(of_data))
    }

    /// The constants, unless they come from a dataset.
    ///
    /// # Errors
    /// As [`Normalize::constants`].
    pub(crate) fn fixed(&self, channels: usize) -> Result<Option<Normalization>> {
        let published =
            |[mean, std]: [[f32; 3]; 2]| Normalization { mean: mean.to_vec(), std: std.to_vec() };
        let constants = match self {
            Self::Data => return Ok(None),
            Self::Cifar10 => published(CIFAR10),
            Self::Imagenet => published(IMAGENET),
            Self::Constants(constants) => constants.clone(),
        };
        if constants.mean.len() == channels {
            Ok(Some(constants))
        } else {
            let expected = format!(
                "data, or mean=…;std=… with one number for each channel: the images have \
                     {channels}"
            );
            Err(Error::value("normalize", format!("`{self}`"), expected))
        }
    }
}

impl FromStr for Normalize {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text {
            "data" => return Ok(Self::Data),
            "cifar10" => return Ok(Self::Cifar10),
            "imagenet" => return Ok(Self::Imagenet),
            _ if !text.contains('=') => return Err(unknown(text, &Self::FORMS)),
            _ => {}
        }
        let bad = |why: &str| BadValue::new(text, format!("mean=A,B,C;std=D,E,F: {why}"));
        let mut parts = text.split(';');
        let mut values = |key: &str| -> Option<Vec<f32>> {
            let (name, list) = parts.next()?.split_once('=')?;
            let numbers = list.split(',').map(|number| number.trim().parse().ok());
            if name.trim() == key { numbers.collect() } else { None }
        };
        let (Some(mean), Some(std)) = (values("mean"), values("std")) else {
            return Err(bad("the means, then the standard deviations, as numbers"));
        };
        if parts.next().is_some() {
            return Err(bad("nothing after the standard deviations"));
        }
        if mean.len() != std.len() {
            return Err(bad("as many means as standard deviations"));
        }
        let constants = Normalization { mean, std };
        if constants.is_usable() {
            Ok(Self::Constants(constants))
        } else {
            Err(bad("finite means and positive, finite standard deviations"))
        }
    }
}

impl fmt::Display for Normalize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list =
            |values: &[f32]| values.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        match self {
            Self::Data => f.write_str("data"),
            Self::Cifar10 => f.write_str("cifar10"),
            Self::Imagenet => f.write_str("imagenet"),
            Self::Constants(Normalization { mean, std }) => {
                write!(f, "mean={};std={}", list(mean), list(std))
            }
        }
    }
}
serde_as_text!(Normalize);
value_as_text!(Normalize, Normalize::FORMS.join(", "));

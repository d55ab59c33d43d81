//! Weights of the classes in the loss.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use meristem_data::DatasetInfo;
use serde::{Deserialize, Serialize};

use crate::config::text::{BadValue, serde_as_text};
use crate::config::value::value_as_text;
use crate::error::{Error, Result};

/// Weights of the classes in the loss. Text form: `none`, `balanced`, or one number for each class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ClassWeights {
    /// Every class has weight 1.
    #[default]
    None,
    /// n / (K · n\[c\]) for class c with n\[c\] of the n training samples of K classes: every class
    /// has the same share of the loss. A class without samples has weight 1.
    Balanced,
    /// One for each class.
    Weights(Vec<f32>),
}

impl ClassWeights {
    const FORMS: &'static str = "none, balanced, or one number for each class, such as 1,2.5,1";

    /// The weight of each class of a dataset; `None` if all are 1.
    ///
    /// # Errors
    /// [`Error::Value`]: another number of weights than the dataset has classes.
    pub(crate) fn of(&self, info: &DatasetInfo) -> Result<Option<Arc<[f32]>>> {
        let classes = info.classes.len();
        match self {
            Self::None => Ok(None),
            Self::Balanced => {
                let weight = |count: &usize| match count {
                    0 => 1.0,
                    count => (info.train_len as f64 / (classes * count) as f64) as f32,
                };
                Ok(Some(info.per_class.iter().map(weight).collect()))
            }
            Self::Weights(weights) if weights.len() == classes => Ok(Some(weights[..].into())),
            Self::Weights(weights) => {
                let expected = format!("one number for each of the {classes} classes");
                Err(Error::value("class-weights", format!("{} numbers", weights.len()), expected))
            }
        }
    }
}

impl FromStr for ClassWeights {
    type Err = BadValue;
    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text {
            "none" => return Ok(Self::None),
            "balanced" => return Ok(Self::Balanced),
            _ => {}
        }
        let is_weight = |weight: &f32| weight.is_finite() && *weight >= 0.0;
        let weight = |part: &str| part.trim().parse().ok().filter(is_weight);
        let weights: Option<Vec<f32>> = text.split(',').map(weight).collect();
        let weights = weights.filter(|weights| weights.iter().any(|weight| *weight > 0.0));
        weights.map(Self::Weights).ok_or_else(|| {
            let expected = format!("{}; at least 0, and one above 0", Self::FORMS);
            BadValue::new(text, expected)
        })
    }
}

impl fmt::Display for ClassWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Balanced => f.write_str("balanced"),
            Self::Weights(weights) => {
                let numbers: Vec<String> = weights.iter().map(ToString::to_string).collect();
                f.write_str(&numbers.join(","))
            }
        }
    }
}
serde_as_text!(ClassWeights);
value_as_text!(ClassWeights, ClassWeights::FORMS);

#[cfg(test)]
mod tests {
    use meristem_data::{DatasetFiles, DatasetSpec};

    use super::*;

    #[test]
    fn weights_by_hand() {
        let mut info = DatasetFiles::open(&DatasetSpec::embedded()).unwrap().info().unwrap();
        assert_eq!(info.per_class, [1000; 10]);
        let balanced = ClassWeights::Balanced.of(&info).unwrap().unwrap();
        assert_eq!(balanced[..], [1.0; 10]);
        info.classes.truncate(3);
        (info.train_len, info.per_class) = (12, vec![8, 4, 0]);
        let balanced = ClassWeights::Balanced.of(&info).unwrap().unwrap();
        assert_eq!(balanced[..], [0.5, 1.0, 1.0]);
        assert_eq!(ClassWeights::None.of(&info).unwrap(), None);
        let error = ClassWeights::Weights(vec![1.0, 2.0]).of(&info).unwrap_err().to_string();
        assert!(error.contains("2 numbers") && error.contains("3 classes"), "{error}");
    }

    #[test]
    fn texts_parse_and_print_alike() {
        for text in ["none", "balanced", "1,2.5,0"] {
            assert_eq!(text.parse::<ClassWeights>().unwrap().to_string(), text);
        }
        for text in ["", "1,x", "-1,1", "1,NaN", "inf", "0,0", "balance"] {
            assert!(text.parse::<ClassWeights>().is_err(), "{text}");
        }
    }
}

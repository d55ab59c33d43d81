//! Rules by which rows of a table become vectors and targets.

use std::collections::HashSet;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::named::named;
use crate::notes;
use crate::targets::OUTPUTS_MAX;

/// Most categories of a column.
pub(super) const CATEGORIES_MAX: usize = 1024;
/// Most features of a table, a category counting as one.
pub(super) const FEATURES_MAX: usize = 65_536;

/// Treatment of missing values of features: of empty cells, and of NA, N/A, NaN, NULL, None and
/// other texts that pandas reads as missing. A missing target is always an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingValues {
    /// A missing value is an error.
    #[default]
    Refuse,
    /// The mean of the training rows stands for a missing number. In a column of categories missing
    /// values are one more category, with the empty name, if a training row has one; else a missing
    /// value is an error.
    Fill,
}

named! {
    MissingValues, "missing" of "table":
    "refuse" => Refuse, "fill" => Fill;
    "`fill` fills missing values of features"
}

/// Options of [`Source::Table`](crate::Source::Table); other sources ignore them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TableOptions {
    /// Names of the target columns. May be empty if there are rules.
    pub target: Vec<String>,
    /// Treatment of missing values.
    pub missing: MissingValues,
    /// Whether one target column of whole numbers has numbers, instead of classes.
    pub numbers: bool,
    /// Rules of another table, such as those of a weights file, to apply to this one. Without them
    /// the rules follow from the training rows.
    pub rules: Option<Arc<TableRules>>,
}

/// Rules by which rows of a table become vectors and targets: F features, in the order of the
/// columns, and the targets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableRules {
    /// Columns of features, in the order of the features.
    pub features: Vec<FeatureColumn>,
    /// Columns of targets.
    pub targets: TargetColumns,
}

/// A column of features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FeatureColumn {
    /// Name of the column.
    pub name: String,
    /// Conversion of its values to features.
    #[serde(flatten)]
    pub rule: FeatureRule,
}

/// The column in words, such as `colour` of 3 categories.
impl fmt::Display for FeatureColumn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.rule {
            FeatureRule::Numeric { .. } => write!(f, "`{}` of numbers", self.name),
            FeatureRule::Categorical { categories } => {
                let names = notes::some_of(categories.iter().map(|name| format!("`{name}`")));
                write!(f, "`{}` of {} categories ({names})", self.name, categories.len())
            }
        }
    }
}

/// Conversion of the values of a column to features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum FeatureRule {
    /// One feature, the number.
    Numeric {
        /// Number that stands for a missing value; without it a missing value is an error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fill: Option<f64>,
    },
    /// One feature for each category: 1 for the value's category, else 0.
    Categorical {
        /// Values of the training rows, sorted by their bytes. The empty name is that of missing
        /// values.
        categories: Vec<String>,
    },
}

impl FeatureRule {
    /// Number of features.
    pub fn width(&self) -> usize {
        match self {
            Self::Numeric { .. } => 1,
            Self::Categorical { categories } => categories.len(),
        }
    }
}

/// Columns of targets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum TargetColumns {
    /// One class for each row.
    Classes {
        /// Name of the column.
        column: String,
        /// Values of the training rows: whole numbers in their order, or else texts, sorted by
        /// their bytes.
        classes: Vec<String>,
    },
    /// Numbers (y − mean) / std.
    Numbers {
        /// The columns, in the order of the outputs.
        columns: Vec<NumberColumn>,
    },
}

/// A column of target numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NumberColumn {
    /// Name of the column.
    pub name: String,
    /// Mean of the training rows.
    pub mean: f64,
    /// Population standard deviation of the training rows; 1 for a constant column.
    pub std: f64,
}

// No number of rules that were checked is NaN.
impl Eq for TableRules {}

impl Hash for TableRules {
    /// Hashes the names of the columns.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.features.iter().for_each(|column| column.name.hash(state));
        self.target_names().for_each(|name| name.hash(state));
    }
}

impl TableRules {
    /// The first column of features that differs from those of `other` by name, kind or
    /// categories, in words; `None` if both tables have the same features.
    pub fn other_feature(&self, other: &Self) -> Option<String> {
        let same = |(a, b): (&FeatureColumn, &FeatureColumn)| {
            let rules = match (&a.rule, &b.rule) {
                (FeatureRule::Numeric { .. }, FeatureRule::Numeric { .. }) => true,
                (a, b) => a == b,
            };
            a.name == b.name && rules
        };
        let differs = self.features.iter().zip(&other.features).find(|pair| !same(*pair));
        match differs {
            Some((a, b)) => Some(format!("{a} and {b}")),
            None if self.features.len() == other.features.len() => None,
            None => Some(format!("{} and {} columns", self.features.len(), other.features.len())),
        }
    }

    /// Number of features F.
    pub fn width(&self) -> usize {
        self.features.iter().map(|column| column.rule.width()).sum()
    }

    /// Names of the target columns.
    pub fn target_names(&self) -> impl Iterator<Item = &str> {
        let (class, numbers) = match &self.targets {
            TargetColumns::Classes { column, .. } => (Some(column), &[][..]),
            TargetColumns::Numbers { columns } => (None, &columns[..]),
        };
        class.into_iter().chain(numbers.iter().map(|column| &column.name)).map(String::as_str)
    }

    /// Checks rules that were read from a file.
    ///
    /// # Errors
    /// [`Error::Argument`]: no feature or no target, or too many; two columns, categories or
    /// classes of one name; numbers that are not finite, or a standard deviation that is not
    /// positive.
    pub fn check(&self) -> Result<()> {
        let wrong = |expected: &str, got: String| Error::Argument {
            operation: "table",
            argument: "rules",
            expected: expected.into(),
            got,
            remedy: "take the rules from the weights of a run".into(),
        };
        let width = self.features.iter().try_fold(0_usize, |sum, column| {
            sum.checked_add(column.rule.width()).filter(|sum| *sum <= FEATURES_MAX)
        });
        if width.is_none_or(|width| width == 0) {
            let got = width.map_or("more", |_| "none");
            return Err(wrong(&format!("rules of 1 to {FEATURES_MAX} features"), got.into()));
        }
        let columns = self.features.iter().map(|column| &*column.name).chain(self.target_names());
        if let Some(twice) = repeated(columns) {
            return Err(wrong("rules of different columns", format!("`{twice}` twice")));
        }
        for FeatureColumn { name, rule } in &self.features {
            match rule {
                FeatureRule::Numeric { fill: Some(fill) } if !fits(*fill) => {
                    return Err(wrong("rules with finite numbers", format!("{fill} for `{name}`")));
                }
                FeatureRule::Numeric { .. } => {}
                FeatureRule::Categorical { categories } => {
                    if categories.is_empty() || categories.len() > CATEGORIES_MAX {
                        let expected = format!("rules with 1 to {CATEGORIES_MAX} categories");
                        let got = format!("{} for `{name}`", categories.len());
                        return Err(wrong(&expected, got));
                    }
                    if let Some(twice) = repeated(categories.iter().map(String::as_str)) {
                        let got = format!("`{twice}` twice in `{name}`");
                        return Err(wrong("rules with different categories", got));
                    }
                }
            }
        }
        let (outputs, is_sound) = match &self.targets {
            TargetColumns::Classes { classes, .. } => {
                (classes.len(), repeated(classes.iter().map(String::as_str)).is_none())
            }
            TargetColumns::Numbers { columns } => {
                let fits = |column: &NumberColumn| {
                    fits(column.mean) && column.std.is_finite() && column.std > 0.0
                };
                (columns.len(), columns.iter().all(fits))
            }
        };
        if !is_sound || outputs == 0 || outputs > OUTPUTS_MAX as usize {
            let expected = format!(
                "rules of 1 to {OUTPUTS_MAX} different classes or of finite means and positive \
                 standard deviations"
            );
            return Err(wrong(&expected, "others".into()));
        }
        Ok(())
    }
}

/// Whether a number is finite as an f32.
pub(super) fn fits(number: f64) -> bool {
    (number as f32).is_finite()
}

/// A name that occurs twice.
fn repeated<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = HashSet::new();
    names.into_iter().find(|name| !seen.insert(*name))
}

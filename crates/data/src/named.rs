//! Settings with a few named values.

/// Implements, for an enum without fields, the list of its values with their names, `Display` and
/// `FromStr`. An unknown name is an [`Error::Argument`](crate::Error::Argument) of the operation.
macro_rules! named {
    (
        $type:ident, $argument:literal of $operation:literal:
        $($name:literal => $value:ident),+; $remedy:literal
    ) => {
        impl $type {
            /// Every value, with its name in configuration.
            pub const NAMES: [(&'static str, Self); [$($name),+].len()] =
                [$(($name, Self::$value)),+];

            /// The name in configuration.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name),+
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::Error;

            fn from_str(name: &str) -> Result<Self, $crate::Error> {
                let known = Self::NAMES.iter().find(|(known, _)| *known == name);
                known.map(|(_, value)| *value).ok_or_else(|| $crate::Error::Argument {
                    operation: $operation,
                    argument: $argument,
                    expected: Self::NAMES.map(|(name, _)| name).join(" or "),
                    got: format!("`{name}`"),
                    remedy: $remedy.into(),
                })
            }
        }
    };
}

pub(crate) use named;

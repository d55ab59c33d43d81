//! The parts of a setting's declaration, and the macro that derives everything else from it.

mod defaults;
mod range;
mod setting;

pub use self::defaults::{Absent, DefaultText};
pub(crate) use self::defaults::{Defaults, absent, absent_by_preset, presets, same};
pub use self::range::NumberRange;
pub use self::setting::{Setting, SettingScope};

/// Derives from the declarations the struct of all values, the struct of the values from one
/// source, and the table of [`Setting`]s.
///
/// A declaration is a doc comment with the help text, then `key: type = defaults, attribute(…),
/// …;`. Defaults are [`same`], [`presets`], [`absent`] or [`absent_by_preset`]; attributes are
/// methods of [`Setting`]. A setting that is a field of a configuration of another crate is
/// declared as `key in group.field: type, attribute(…), …;`. The group's configuration holds its
/// value and its default.
macro_rules! settings {
    (
        groups { $(
            $(#[doc = $about:literal])+
            $name:ident : $config:ty = $initial:expr ;
        )+ }
        $( $heading:literal { $(
            $(#[doc = $help:literal])+
            $key:ident
            $( in $group:ident $( . $field:ident )+ $( [ $index:expr ] )? : $type:ty )?
            $( : $own:ty = $default:expr )?
            $(, $attribute:ident ( $($value:expr),* ) )* ;
        )+ } )+
    ) => {
        /// Every setting of a run, resolved.
        #[derive(Clone, Debug, PartialEq)]
        pub struct TrainConfig {
            $($($(
                #[doc = concat!("Value of [`ConfigLayer::", stringify!($key), "`].")]
                pub $key: $own,
            )?)+)+
            $( $(#[doc = $about])+ pub $name: $config, )+
        }

        /// Settings given by one source; the others come from sources of lower priority.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(default)]
        pub struct ConfigLayer {
            $($( $(#[doc = $help])+ pub $key: Option<$($type)? $($own)?>, )+)+
        }

        /// Defaults of the groups.
        mod defaults {
            use super::*;
            $( pub(super) fn $name() -> Defaults<$config> { $initial } )+
        }

        static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| vec![$($({
            $( let defaults: Defaults<$own> = $default; )?
            $( let defaults: Defaults<$type> = defaults::$group()
                .map(|$group| place!($group $(.$field)+ $([$index])?)); )?
            Setting::new(stringify!($key), $heading, &[$($help),+], &defaults)
                $( .$attribute($($value),*) )*
        }),+),+]);

        impl ConfigLayer {
            /// Every known key, in the order of the reference page.
            pub const KEYS: &'static [&'static str] = &[$($( stringify!($key) ),+),+];

            /// Sets `key` to the value of `text`.
            ///
            /// # Errors
            /// An unknown key, or text that is not a value of the setting's type.
            pub fn set(&mut self, key: &str, text: &str) -> Result<(), BadValue> {
                match key {
                    $($( stringify!($key) => self.$key = Some(SettingValue::parse(text)?), )+)+
                    _ => return Err(unknown(key, Self::KEYS)),
                }
                Ok(())
            }

            /// Keys that have a value.
            pub fn given(&self) -> Vec<&'static str> {
                let all = [$($( self.$key.is_some() ),+),+];
                let given = Self::KEYS.iter().zip(all).filter(|(_, given)| *given);
                given.map(|(key, _)| *key).collect()
            }
        }

        impl TrainConfig {
            /// Defaults of a preset, for a controller that learns or does not.
            pub(crate) fn of_preset(preset: Preset, learns: bool) -> Self {
                Self {
                    $($($( $key: {
                        let defaults: Defaults<$own> = $default;
                        defaults.pick(preset, learns)
                    }, )?)+)+
                    $( $name: defaults::$name().pick(preset, learns), )+
                }
            }

            /// Overrides the settings that `layer` has.
            pub fn apply(&mut self, layer: ConfigLayer) {
                $($( if let Some(value) = layer.$key {
                    place!(self $( .$group $(.$field)+ $([$index])? )? ; $key) = value;
                } )+)+
            }

            /// Checks every number against its range.
            ///
            /// # Errors
            /// [`Error::Value`](crate::Error::Value) names the first value outside its range.
            pub(crate) fn check_ranges(&self) -> crate::error::Result<()> {
                $($( setting(stringify!($key))
                    .check(&place!(self $( .$group $(.$field)+ $([$index])? )? ; $key))?; )+)+
                Ok(())
            }
        }

        #[cfg(test)]
        impl TrainConfig {
            /// Keys of the settings that are kept in a group, each with the name of its group.
            pub(crate) const GROUPED: &'static [(&'static str, &'static str)] =
                &[$($($( (stringify!($key), stringify!($group)), )?)+)+];

            /// All groups by name, as JSON.
            pub(crate) fn groups(&self) -> Vec<(&'static str, serde_json::Value)> {
                vec![$( (stringify!($name), serde_json::to_value(self.$name).unwrap()) ),+]
            }
        }

        /// A map of all keys, in the order of the reference page.
        impl Serialize for TrainConfig {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_struct("TrainConfig", ConfigLayer::KEYS.len())?;
                $($( map.serialize_field(
                    stringify!($key),
                    &place!(self $( .$group $(.$field)+ $([$index])? )? ; $key),
                )?; )+)+
                map.end()
            }
        }
    };
}

/// The place of a setting's value: in a group, or else the field of its key.
macro_rules! place {
    ($config:ident $(.$field:ident)+ $([$index:expr])? $(; $key:ident)?) => {
        $config $(.$field)+ $([$index])?
    };
    ($config:ident ; $key:ident) => {
        $config.$key
    };
}

pub(crate) use {place, settings};

//! JSON objects that have each key once.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Parses JSON that people write. A key that an object has twice is an error here; the parser of
/// `serde_json::Value` silently keeps the last value.
///
/// # Errors
/// A message with line and column, also for a key that an object has twice.
pub fn parse_json(text: &str) -> Result<Value, String> {
    let Unique(value) = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(value)
}

/// A value whose objects have each key once.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Values).map(Unique)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = vec![];
        while let Some(Unique(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("the key `{key}` is there twice")));
            }
            let Unique(value) = entries.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_serde_json() {
        let text = r#"{"a": [1, -2, 2.5, 18446744073709551615, true, null, "μ"], "b": {"a": {}}}"#;
        assert_eq!(parse_json(text), Ok(serde_json::from_str(text).unwrap()));
        for broken in ["", "{", "{\"a\" 1}", "[1,]", "1 2", &"[".repeat(200)] {
            let expected = serde_json::from_str::<Value>(broken).unwrap_err().to_string();
            assert_eq!(parse_json(broken), Err(expected));
        }
    }

    #[test]
    fn a_key_that_comes_twice_is_an_error_at_any_depth() {
        for text in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"c": 1, "a": 2, "\u0061": 3}}]"#] {
            let error = parse_json(text).unwrap_err();
            assert!(error.starts_with("the key `a` is there twice at line 1 column"), "{error}");
        }
    }
}

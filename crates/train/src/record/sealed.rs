//! JSON objects that end with a checksum of their text.
//!
//! The last key of the object is `crc32`: the CRC-32 of all bytes before the comma in front of it,
//! as eight hexadecimal digits. Other programs read such an object as any other. Objects of version
//! 2 or later always have the key; one of version 1 without it is from an earlier build and is not
//! checked.

use serde::Deserialize;

/// Key of the checksum.
pub(crate) const KEY: &str = "crc32";

/// First version of events, summaries and studies in which every object has a checksum, so that
/// damage in the key itself is detected.
const SINCE: u32 = 2;

/// Problem of an object that differs from its checksum.
pub(crate) const BROKEN: &str = "its text differs from its checksum: it was changed or damaged";

/// State of the checksum of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seal {
    /// It fits the text.
    Whole,
    /// The object has no checksum, and its version does not require one.
    Absent,
    /// The text differs from the text that was written, or is no object.
    Broken,
}

/// Appends the checksum to `object`, the text of a JSON object with at least one key. `space` is
/// the white space between two keys.
pub(crate) fn seal(object: &mut String, space: &str) {
    let body = object.trim_end().strip_suffix('}').map(str::trim_end).map(str::len);
    let Some(body) = body else { return };
    object.truncate(body);
    let digits = digits(object.as_bytes());
    let (colon, end) = if space.is_empty() { (":", "") } else { (": ", "\n") };
    object.push_str(&format!(",{space}\"{KEY}\"{colon}\"{digits}\"{end}}}"));
}

/// Checks the text of an object. White space may follow it. `newest` is the newest supported
/// version of its format; a later version may have its checksum elsewhere.
pub(crate) fn check(object: &[u8], newest: u32) -> Seal {
    #[derive(Deserialize)]
    struct VersionKey {
        #[serde(default)]
        v: u32,
    }
    if let Some((body, written)) = parts(object) {
        // A fuzzer would spend its time on wrong checksums.
        let is_whole = cfg!(fuzzing) || digits(body).as_bytes() == written;
        return if is_whole { Seal::Whole } else { Seal::Broken };
    }
    match serde_json::from_slice(object) {
        Ok(VersionKey { v }) if !(SINCE..=newest).contains(&v) => Seal::Absent,
        _ => Seal::Broken,
    }
}

fn digits(body: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(body))
}

/// Text before the comma that precedes the checksum, and the checksum's digits.
fn parts(object: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = object.trim_ascii_end().strip_suffix(b"}")?.trim_ascii_end();
    let rest = rest.strip_suffix(b"\"")?;
    let (rest, digits) = rest.split_at_checked(rest.len().checked_sub(8)?)?;
    let rest = rest.strip_suffix(b"\"")?.trim_ascii_end().strip_suffix(b":")?;
    let rest = rest.strip_suffix(b"\"")?.strip_suffix(KEY.as_bytes())?.strip_suffix(b"\"")?;
    let body = rest.trim_ascii_end().strip_suffix(b",")?;
    Some((body, digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(text: &str, space: &str) -> String {
        let mut text = text.to_string();
        seal(&mut text, space);
        text
    }

    #[test]
    fn a_checksum_is_the_last_key() {
        // The CRC-32 of `{"v":1,"seq":0`, by Python's binascii.
        let line = sealed("{\"v\":1,\"seq\":0}", "");
        assert_eq!(line, "{\"v\":1,\"seq\":0,\"crc32\":\"3577b8ef\"}");
        let pretty = sealed("{\n  \"v\": 1\n}\n", "\n  ");
        assert!(pretty.starts_with("{\n  \"v\": 1,\n  \"crc32\": \"") && pretty.ends_with("\"\n}"));
        for text in [line, pretty] {
            let value: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!((&value["v"], check(text.as_bytes(), 2)), (&1.into(), Seal::Whole));
            assert_eq!(check((text + "\n").as_bytes(), 2), Seal::Whole);
        }
        assert_eq!(check(b"{\"crc32\":\"00000000\"}", 2), Seal::Absent, "an object without a key");
    }

    #[test]
    fn a_checksum_may_be_absent_in_the_first_version_and_in_later_ones_than_is_known() {
        for (object, seal) in [
            ("{\"v\":1,\"seq\":0}\n", Seal::Absent),
            ("{\"version\":1}", Seal::Absent),
            ("{\"v\":2,\"seq\":0}", Seal::Broken),
            ("{\"v\":3,\"seq\":0}", Seal::Absent),
            ("", Seal::Broken),
        ] {
            assert_eq!(check(object.as_bytes(), 2), seal, "{object}");
        }
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let line = sealed("{\"v\":2,\"seq\":12,\"loss\":0.25}", "");
        for at in 0..line.len() {
            for other in 0..=255 {
                let mut bytes = line.clone().into_bytes();
                if std::mem::replace(&mut bytes[at], other) == other {
                    continue;
                }
                assert_eq!(check(&bytes, 2), Seal::Broken, "byte {at} became {other}");
            }
        }
    }
}

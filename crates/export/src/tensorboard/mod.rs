//! Records of TensorBoard's event files.
//!
//! A file is a sequence of records that starts with [`file_start`]. Each record is framed as a
//! TFRecord, all little-endian: length, its checksum, data, their checksum.

mod messages;

use prost::Message;

use self::messages::{
    DT_STRING, EventDimensionProto, EventProto, EventTensorProto, EventTensorShapeProto,
    HistogramProto, PluginDataProto, START, SessionLogProto, SummaryMetadataProto, SummaryProto,
    SummaryValueProto,
};

/// A value at one step.
#[derive(Clone, Debug, PartialEq)]
pub enum SeriesValue {
    /// A point of a curve.
    Scalar(f64),
    /// Counts of the values 0, 1, 2, and so on.
    Counts(Vec<u64>),
    /// Text in Markdown.
    Text(String),
}

/// The start of a file: the version of the format, and the start of a session at step 0. Readers
/// then drop the data of earlier files in the folder.
pub fn file_start(wall_time: f64) -> Vec<u8> {
    let version =
        EventProto { file_version: Some("brain.Event:2".into()), ..EventProto::default() };
    let start = EventProto {
        session_log: Some(SessionLogProto { status: START }),
        ..EventProto::default()
    };
    [version, start]
        .into_iter()
        .flat_map(|event| record(&EventProto { wall_time, ..event }))
        .collect()
}

/// A record with the values of one step, by tag. `wall_time` is in seconds since 1970.
pub fn values(wall_time: f64, step: u64, values: Vec<(String, SeriesValue)>) -> Vec<u8> {
    let value = values.into_iter().map(|(tag, shown)| value(tag, shown)).collect();
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    record(&EventProto {
        wall_time,
        step,
        summary: Some(SummaryProto { value }),
        ..EventProto::default()
    })
}

fn value(tag: String, shown: SeriesValue) -> SummaryValueProto {
    let value = SummaryValueProto { tag, ..SummaryValueProto::default() };
    match shown {
        SeriesValue::Scalar(number) => {
            SummaryValueProto { simple_value: Some(number as f32), ..value }
        }
        SeriesValue::Counts(counts) => {
            SummaryValueProto { histo: Some(histogram(&counts)), ..value }
        }
        SeriesValue::Text(text) => {
            let tensor = EventTensorProto {
                dtype: DT_STRING,
                tensor_shape: Some(EventTensorShapeProto {
                    dim: vec![EventDimensionProto { size: 1 }],
                }),
                string_val: vec![text.into_bytes()],
            };
            let plugin_data = Some(PluginDataProto { plugin_name: "text".into() });
            SummaryValueProto {
                tensor: Some(tensor),
                metadata: Some(SummaryMetadataProto { plugin_data }),
                ..value
            }
        }
    }
}

/// A histogram with one bucket around each whole number.
fn histogram(counts: &[u64]) -> HistogramProto {
    let weighted = |power: i32| -> f64 {
        counts.iter().enumerate().map(|(at, n)| (at as f64).powi(power) * *n as f64).sum()
    };
    let at = |place: Option<usize>| place.unwrap_or_default() as f64;
    HistogramProto {
        min: at(counts.iter().position(|n| *n > 0)),
        max: at(counts.iter().rposition(|n| *n > 0)),
        num: weighted(0),
        sum: weighted(1),
        sum_squares: weighted(2),
        bucket_limit: (0..counts.len()).map(|at| at as f64 + 0.5).collect(),
        bucket: counts.iter().map(|n| *n as f64).collect(),
    }
}

/// An event as a TFRecord.
fn record(event: &EventProto) -> Vec<u8> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    let mut framed = Vec::with_capacity(data.len() + 16);
    framed.extend(length);
    framed.extend(masked_checksum(&length).to_le_bytes());
    framed.extend_from_slice(&data);
    framed.extend(masked_checksum(&data).to_le_bytes());
    framed
}

/// CRC-32C, rotated, plus a constant. TFRecord masks its checksums in this way because the CRC of
/// data followed by its own CRC does not depend on the data.
fn masked_checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every event file of TensorFlow starts with a record of length 24 (wall time and
    /// `brain.Event:2`), and thus with this checksum of the length.
    #[test]
    fn records_are_framed_like_tensorflows() {
        let bytes = file_start(1.5);
        assert_eq!(bytes[..12], [24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
        let data = &bytes[12..36];
        assert_eq!(data[9..], *b"\x1a\x0dbrain.Event:2");
        assert_eq!(bytes[36..40], masked_checksum(data).to_le_bytes());
        // The check value of CRC-32C (RFC 3720, B.4: 32 bytes of zeros), masked.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn a_histogram_has_one_bucket_per_number() {
        let of = histogram(&[0, 3, 0, 1, 0]);
        assert_eq!((of.min, of.max, of.num, of.sum, of.sum_squares), (1.0, 3.0, 4.0, 6.0, 12.0));
        assert_eq!(of.bucket_limit, [0.5, 1.5, 2.5, 3.5, 4.5]);
        assert_eq!(of.bucket, [0.0, 3.0, 0.0, 1.0, 0.0]);
        assert_eq!((histogram(&[0, 0]).min, histogram(&[0, 0]).max), (0.0, 0.0));
    }
}

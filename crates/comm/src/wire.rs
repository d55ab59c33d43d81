//! Messages between ranks besides elements: headers that announce a call, and notices of a rank
//! that leaves or fails. They are small enough that every MPI library sends them without waiting
//! for the receiver.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use meristem_device::{DType, MAX_DIMS, MemoryFormat, Shape};

use crate::error::Error;
use crate::transport::CollectiveCall;

/// Largest number of parcels from one rank to another per exchange over MPI.
pub(crate) const PARCELS_MAX: usize = 32;
/// Largest number of bytes of a text; the rest is cut off.
const TEXT_MAX: usize = 200;
/// Largest number of distinct names, which limits the memory that invalid messages can use.
const NAMES_MAX: usize = 1000;

/// Element types in the order of their numbers in a message.
const DTYPES: [DType; 8] = [
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::U8,
    DType::U32,
    DType::I64,
    DType::F16,
    DType::I16,
];

/// Contents of a parcel: element type (`None` for internal bytes) and number of elements.
pub(crate) type Content = (Option<DType>, usize);

/// Header that a rank sends to each other rank at the start of an exchange.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CallHeader {
    /// Number of the exchange in the group, from 1; 0 over TCP, whose hub does not need it.
    pub(crate) step: u64,
    pub(crate) call: CollectiveCall,
    /// Parcels from the sender to the receiver.
    pub(crate) parcels: Vec<Content>,
}

/// Notice from a rank to the other ranks, outside an exchange.
#[derive(Debug, Clone)]
pub(crate) enum RankNotice {
    /// The rank left after `steps` exchanges.
    Left {
        steps: u64,
        panicked: bool,
        /// Whether the rank can finalize MPI: no requests are in flight.
        in_order: bool,
    },
    /// The group is unusable.
    Failed(Error),
    /// The rank's device has ended `exchanges` exchanges in a group of devices.
    Ended { membership: u64, exchanges: u64 },
}

impl CallHeader {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let CollectiveCall { operation, dtype, shape, format, parameter, state_digest } = self.call;
        let mut out = WireWriter::default();
        out.number(self.step).dtype(dtype).shape(shape);
        out.number(u64::from(format == MemoryFormat::ChannelsLast))
            .number(parameter)
            .number(state_digest)
            .text(operation);
        for (dtype, len) in self.parcels.iter().take(PARCELS_MAX) {
            out.dtype(*dtype).number(*len as u64);
        }
        out.0
    }

    /// Decodes a header; `None` for bytes that this version does not write.
    pub(crate) fn decode(bytes: &[u8]) -> Option<CallHeader> {
        let mut from = WireReader(bytes);
        let (step, dtype, shape) = (from.number()?, from.dtype()?, from.shape()?);
        let format = match from.number()? {
            0 => MemoryFormat::Contiguous,
            _ => MemoryFormat::ChannelsLast,
        };
        let (parameter, state_digest) = (from.number()?, from.number()?);
        let operation = name_of(from.text()?)?;
        let call = CollectiveCall { operation, dtype, shape, format, parameter, state_digest };
        let mut parcels = Vec::new();
        while !from.0.is_empty() {
            parcels.push((from.dtype()?, from.number()? as usize));
        }
        Some(CallHeader { step, call, parcels })
    }
}

impl RankNotice {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = WireWriter::default();
        match self {
            RankNotice::Left { steps, panicked, in_order } => {
                out.number(0).number(*steps);
                out.number(u64::from(*panicked)).number(u64::from(*in_order));
            }
            RankNotice::Failed(Error::RankGone { operation, rank, reason }) => {
                out.number(1).text(operation).number(*rank as u64).text(reason);
            }
            RankNotice::Failed(Error::RankLate { operation, rank, seconds }) => {
                out.number(2).text(operation).number(*rank as u64).number(seconds.to_bits());
            }
            RankNotice::Failed(Error::Disagreement { operation, rank, what, expected, got }) => {
                out.number(3).text(operation).number(*rank as u64);
                out.text(what).text(expected).text(got);
            }
            RankNotice::Failed(Error::RankFailed { rank, reason }) => {
                out.number(4).number(*rank as u64).text(reason);
            }
            RankNotice::Failed(Error::Endless { operation, seconds }) => {
                out.number(5).number(seconds.to_bits()).text(operation);
            }
            RankNotice::Ended { membership, exchanges } => {
                out.number(6).number(*membership).number(*exchanges);
            }
            // A rank's own errors are sent as [`Error::RankFailed`].
            RankNotice::Failed(_) => {
                out.number(u64::MAX);
            }
        }
        out.0
    }

    /// Decodes a notice; `None` for bytes that this version does not write.
    pub(crate) fn decode(bytes: &[u8]) -> Option<RankNotice> {
        let mut from = WireReader(bytes);
        let kind = from.number()?;
        if kind == 0 {
            let (steps, panicked) = (from.number()?, from.number()? == 1);
            return Some(RankNotice::Left { steps, panicked, in_order: from.number()? == 1 });
        }
        if kind == 4 {
            let (rank, reason) = (from.number()? as usize, from.text()?);
            return Some(RankNotice::Failed(Error::RankFailed { rank, reason }));
        }
        if kind == 5 {
            let (seconds, operation) = (f64::from_bits(from.number()?), name_of(from.text()?)?);
            return Some(RankNotice::Failed(Error::Endless { operation, seconds }));
        }
        if kind == 6 {
            let (membership, exchanges) = (from.number()?, from.number()?);
            return Some(RankNotice::Ended { membership, exchanges });
        }
        let operation = name_of(from.text()?)?;
        let rank = from.number()? as usize;
        Some(RankNotice::Failed(match kind {
            1 => Error::RankGone { operation, rank, reason: name_of(from.text()?)? },
            2 => Error::RankLate { operation, rank, seconds: f64::from_bits(from.number()?) },
            3 => {
                let what = name_of(from.text()?)?;
                let (expected, got) = (from.text()?, from.text()?);
                Error::Disagreement { operation, rank, what, expected, got }
            }
            _ => return None,
        }))
    }
}

/// A `'static` copy of a text of the program, such as an operation's name. Each text is leaked
/// once; `None` beyond [`NAMES_MAX`] texts.
fn name_of(text: String) -> Option<&'static str> {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = names.get(&*text) {
        return Some(name);
    }
    (names.len() < NAMES_MAX).then(|| {
        let name: &'static str = text.leak();
        names.insert(name);
        name
    })
}

/// Appends encoded values to bytes.
#[derive(Default)]
pub(crate) struct WireWriter(pub(crate) Vec<u8>);

impl WireWriter {
    pub(crate) fn number(&mut self, number: u64) -> &mut Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    /// Writes the number of bytes, then the bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.number(bytes.len() as u64).0.extend(bytes);
        self
    }

    pub(crate) fn dtype(&mut self, dtype: Option<DType>) -> &mut Self {
        let place = DTYPES.iter().position(|known| Some(*known) == dtype);
        self.0.push(place.map_or(u8::MAX, |place| place as u8));
        self
    }

    fn shape(&mut self, shape: Shape) -> &mut Self {
        self.0.push(shape.dims().len() as u8);
        shape.dims().iter().fold(self, |out, extent| out.number(*extent as u64))
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        let end = (0..=text.len().min(TEXT_MAX)).rev().find(|end| text.is_char_boundary(*end));
        let text = &text.as_bytes()[..end.unwrap_or(0)];
        self.0.push(text.len() as u8);
        self.0.extend(text);
        self
    }
}

/// Reads values from bytes, in order; `None` if bytes are missing.
pub(crate) struct WireReader<'a>(pub(crate) &'a [u8]);

impl<'a> WireReader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        self.take(len)
    }

    pub(crate) fn dtype(&mut self) -> Option<Option<DType>> {
        match self.take(1)?[0] {
            u8::MAX => Some(None),
            place => DTYPES.get(usize::from(place)).map(|dtype| Some(*dtype)),
        }
    }

    fn shape(&mut self) -> Option<Shape> {
        let rank = usize::from(self.take(1)?[0]);
        let dims = (0..rank.min(MAX_DIMS + 1)).map(|_| self.number().map(|n| n as usize));
        let dims: Vec<usize> = dims.collect::<Option<_>>()?;
        let numel = dims.iter().try_fold(1usize, |numel, extent| numel.checked_mul(*extent));
        (rank <= MAX_DIMS && numel.is_some()).then(|| Shape::from(&dims))
    }

    pub(crate) fn text(&mut self) -> Option<String> {
        let len = usize::from(self.take(1)?[0]);
        String::from_utf8(self.take(len)?.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_stay_small() {
        let call = CollectiveCall {
            operation: "all_reduce",
            dtype: Some(DType::BF16),
            shape: [(1 << 31) + 7, 3, 1, 2].into(),
            format: MemoryFormat::ChannelsLast,
            parameter: u64::MAX,
            state_digest: 5,
        };
        let parcels = vec![(Some(DType::U32), 3), (None, 24), (Some(DType::F64), 1 << 40)];
        let header = CallHeader { step: 9, call, parcels };
        let bytes = header.encode();
        assert_eq!(CallHeader::decode(&bytes), Some(header.clone()));
        // Up to the end of the operation's name; the parcels follow it.
        for cut in 0..8 + 1 + 33 + 8 + 16 + 11 {
            assert_eq!(CallHeader::decode(&bytes[..cut]), None, "{cut}");
        }
        let parcels = vec![(Some(DType::F32), 1); PARCELS_MAX];
        assert!(CallHeader { parcels, ..header }.encode().len() < 1000);
    }

    #[test]
    fn notices_round_trip() {
        let (operation, rank, long) = ("gtopk", 3, "ä".repeat(200));
        let errors = [
            Error::RankGone { operation, rank, reason: "left" },
            Error::RankLate { operation, rank, seconds: 0.25 },
            Error::RankFailed { rank, reason: "a kernel panicked".into() },
            Error::Disagreement {
                operation,
                rank,
                what: "a",
                expected: "b".into(),
                got: "c".into(),
            },
        ];
        for error in errors {
            let Some(RankNotice::Failed(got)) =
                RankNotice::decode(&RankNotice::Failed(error.clone()).encode())
            else {
                panic!("{error}")
            };
            assert_eq!(got.to_string(), error.to_string());
        }
        let (what, expected) = ("x", String::new());
        let error = Error::Disagreement { operation, rank, what, expected, got: long };
        let bytes = RankNotice::Failed(error).encode();
        assert!(bytes.len() < 1000 && RankNotice::decode(&bytes).is_some());
        let left = RankNotice::Left { steps: 5, panicked: true, in_order: false }.encode();
        let Some(RankNotice::Left { steps: 5, panicked: true, in_order: false }) =
            RankNotice::decode(&left)
        else {
            panic!("{left:?}")
        };
        let ended = RankNotice::Ended { membership: 2, exchanges: 70 }.encode();
        let Some(RankNotice::Ended { membership: 2, exchanges: 70 }) = RankNotice::decode(&ended)
        else {
            panic!("{ended:?}")
        };
        assert!(RankNotice::decode(&[]).is_none());
    }
}

//! The header of an array: numpy's `.npy` format (NEP 1), versions 1 to 3.

use std::fmt;

use half::{bf16, f16};

use super::input::Input;
use crate::error::{Mismatch, Result, damaged};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Longest header; numpy itself refuses longer ones.
const HEADER_BYTES_MAX: u32 = 10_000;
/// Longest text of an element.
const TEXT_CHARS_MAX: usize = 10_000;

/// An integer element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IntType {
    pub(crate) bytes: usize,
    pub(crate) signed: bool,
    pub(crate) big_endian: bool,
}

impl IntType {
    /// An unsigned byte.
    pub(crate) const U8: Self = Self { bytes: 1, signed: false, big_endian: false };

    /// The value of one element of `self.bytes` bytes.
    pub(crate) fn value(self, element: &[u8]) -> i128 {
        let mut wide = [0; 8];
        for (i, byte) in element.iter().enumerate() {
            wide[if self.big_endian { self.bytes - 1 - i } else { i }] = *byte;
        }
        let (value, bits) = (i128::from(u64::from_le_bytes(wide)), 8 * self.bytes);
        let negative = self.signed && value >> (bits - 1) != 0;
        if negative { value - (1 << bits) } else { value }
    }
}

impl fmt::Display for IntType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.signed { "int" } else { "uint" };
        write!(f, "{sign}{}", 8 * self.bytes)
    }
}

/// A floating-point element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FloatType {
    F16 {
        big_endian: bool,
    },
    /// Only in safetensors, which are little-endian.
    Bf16,
    F32 {
        big_endian: bool,
    },
    F64 {
        big_endian: bool,
    },
}

impl FloatType {
    /// Bytes of one element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F16 { .. } | Self::Bf16 => 2,
            Self::F32 { .. } => 4,
            Self::F64 { .. } => 8,
        }
    }

    /// The value of one element of `self.bytes()` bytes.
    pub(crate) fn value(self, element: &[u8]) -> f64 {
        let mut wide = [0; 8];
        let little = &mut wide[..element.len()];
        little.copy_from_slice(element);
        if let Self::F16 { big_endian: true }
        | Self::F32 { big_endian: true }
        | Self::F64 { big_endian: true } = self
        {
            little.reverse();
        }
        let [a, b, c, d, ..] = wide;
        match self {
            Self::F16 { .. } => f16::from_le_bytes([a, b]).to_f64(),
            Self::Bf16 => bf16::from_le_bytes([a, b]).to_f64(),
            Self::F32 { .. } => f64::from(f32::from_le_bytes([a, b, c, d])),
            Self::F64 { .. } => f64::from_le_bytes(wide),
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 { .. } => "float16",
            Self::Bf16 => "bfloat16",
            Self::F32 { .. } => "float32",
            Self::F64 { .. } => "float64",
        })
    }
}

/// Text of at most `chars` characters, UTF-32, with zeros after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextType {
    pub(crate) chars: usize,
    pub(crate) big_endian: bool,
}

impl TextType {
    /// Bytes of one element.
    pub(crate) const fn bytes(self) -> usize {
        4 * self.chars
    }

    /// The text of one element of `self.bytes()` bytes; `None` for a code that is no character.
    pub(crate) fn value(self, element: &[u8]) -> Option<String> {
        let code = if self.big_endian { u32::from_be_bytes } else { u32::from_le_bytes };
        let codes = element.as_chunks::<4>().0.iter().map(|bytes| code(*bytes));
        let text = codes.map(char::from_u32).collect::<Option<String>>()?;
        Some(text.trim_end_matches('\0').to_owned())
    }
}

impl fmt::Display for TextType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "text <U{}", self.chars)
    }
}

/// The element type of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ElementType {
    Int(IntType),
    Float(FloatType),
    /// A byte of 0 or 1.
    Bool,
    Text(TextType),
    /// The name of a type that no dataset has.
    Other(String),
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(int) => int.fmt(f),
            Self::Float(float) => float.fmt(f),
            Self::Bool => f.write_str("bool"),
            Self::Text(text) => text.fmt(f),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// Element type, shape and order of an array; its data begins at the input's offset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NpyHeader {
    pub(crate) element: ElementType,
    pub(crate) shape: Vec<usize>,
    /// Whether the first index changes fastest, which no dataset has.
    pub(crate) is_fortran: bool,
}

impl fmt::Display for NpyHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.is_fortran { " in Fortran order" } else { "" };
        write!(f, "{} {:?}{order}", self.element, self.shape)
    }
}

/// Reads the header and leaves `input` at the first element.
pub(crate) fn read_header(input: &mut Input<'_>) -> Result<NpyHeader> {
    let mut start = [0; 8];
    input.read_exact(&mut start, "the start of the array")?;
    if !start.starts_with(MAGIC) {
        let got = format!("{:02x?}", &start[..6]);
        return Err(damaged(input.path(), 0, "the start of the array", "\\x93NUMPY", got));
    }
    let length = match start[6] {
        1 => {
            let mut bytes = [0; 2];
            input.read_exact(&mut bytes, "the length of the header")?;
            u32::from(u16::from_le_bytes(bytes))
        }
        2 | 3 => input.read_u32("the length of the header")?.swap_bytes(),
        other => {
            return Err(damaged(
                input.path(),
                6,
                "the format version",
                "1, 2 or 3",
                format!("{other}"),
            ));
        }
    };
    let offset = input.offset();
    if length > HEADER_BYTES_MAX {
        let expected = format!("at most {HEADER_BYTES_MAX}");
        return Err(damaged(
            input.path(),
            8,
            "the length of the header",
            expected,
            format!("{length}"),
        ));
    }
    let mut text = vec![0; length as usize];
    input.read_exact(&mut text, "the header")?;
    let text = String::from_utf8_lossy(&text).into_owned();
    parse(&text).map_err(|(expected, got)| {
        Mismatch::new("the header", expected, got)
            .remedy("save the array with numpy again")
            .at(input.path(), offset)
    })
}

/// Parses `{'descr': '|u1', 'fortran_order': False, 'shape': (3, 4), }`; an error has the expected
/// and the actual text.
fn parse(text: &str) -> Result<NpyHeader, (String, String)> {
    let value = |key: &str| {
        let after = text.split_once(&format!("'{key}':")).map(|(_, after)| after.trim_start());
        after.ok_or_else(|| (format!("a `{key}`"), format!("{:?}", text.trim_end())))
    };
    let until = |text: &str, end: &[char]| text.split(end).next().unwrap_or("").trim().to_string();
    let order = until(value("fortran_order")?, &[',', '}']);
    let is_fortran = match order.as_str() {
        "False" => false,
        "True" => true,
        _ => return Err(("a `fortran_order` of True or False".into(), order)),
    };
    let descr = until(value("descr")?, &[',', '}']);
    let descr = descr.trim_matches(['\'', '"']).to_string();
    let element = parse_int(&descr).map(ElementType::Int);
    let element = element.or_else(|| parse_float(&descr).map(ElementType::Float));
    let element = element.or_else(|| parse_text(&descr).map(ElementType::Text));
    let element = element.or_else(|| (descr == "|b1").then_some(ElementType::Bool));
    let element = element.unwrap_or_else(|| ElementType::Other(name_of(&descr)));
    let shape_text = value("shape")?;
    let inner = shape_text.strip_prefix('(').and_then(|rest| rest.split_once(')'));
    let wrong = || ("a shape such as (3, 4)".to_string(), until(shape_text, &[')', '}']));
    let (inner, _) = inner.ok_or_else(wrong)?;
    let dims = inner.split(',').map(str::trim).filter(|dim| !dim.is_empty());
    let shape = dims.map(|dim| dim.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
    Ok(NpyHeader { element, shape, is_fortran })
}

/// The name that numpy prints for `descr`, the code of a type that no dataset has.
fn name_of(descr: &str) -> String {
    let letters = descr.trim_start_matches(['<', '>', '|', '=']);
    let bits = |digits: &str| digits.parse::<u32>().ok().and_then(|bytes| bytes.checked_mul(8));
    match (letters, letters.strip_prefix('f').and_then(bits)) {
        (_, Some(bits)) => format!("float{bits}"),
        ("O", _) => "objects".into(),
        _ => descr.chars().take(40).collect(),
    }
}

fn parse_int(descr: &str) -> Option<IntType> {
    let mut letters = descr.chars();
    let big_endian = match letters.next()? {
        '<' | '|' | '=' => false,
        '>' => true,
        _ => return None,
    };
    let signed = match letters.next()? {
        'i' => true,
        'u' => false,
        _ => return None,
    };
    let bytes = letters.as_str().parse().ok().filter(|bytes| matches!(bytes, 1 | 2 | 4 | 8))?;
    Some(IntType { bytes, signed, big_endian: big_endian && bytes > 1 })
}

fn parse_float(descr: &str) -> Option<FloatType> {
    let (order, code) = descr.split_at_checked(1)?;
    let big_endian = match order {
        "<" | "=" => false,
        ">" => true,
        _ => return None,
    };
    match code {
        "f2" => Some(FloatType::F16 { big_endian }),
        "f4" => Some(FloatType::F32 { big_endian }),
        "f8" => Some(FloatType::F64 { big_endian }),
        _ => None,
    }
}

fn parse_text(descr: &str) -> Option<TextType> {
    let (order, chars) = descr.split_once('U')?;
    let big_endian = match order {
        "<" | "=" => false,
        ">" => true,
        _ => return None,
    };
    let chars = chars.parse().ok().filter(|chars| (1..=TEXT_CHARS_MAX).contains(chars))?;
    Some(TextType { chars, big_endian })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_numpy_parse() {
        let text = "{'descr': '|u1', 'fortran_order': False, 'shape': (100, 28, 28), }  \n";
        let header = |element, shape| Ok(NpyHeader { element, shape, is_fortran: false });
        assert_eq!(parse(text), header(ElementType::Int(IntType::U8), vec![100, 28, 28]));
        let text = "{'descr': '>i8', 'fortran_order': False, 'shape': (7,), }";
        let dtype = IntType { bytes: 8, signed: true, big_endian: true };
        assert_eq!(parse(text), header(ElementType::Int(dtype), vec![7]));
        for (descr, name) in [("<f16", "float128"), ("|O", "objects"), ("<Ux", "<Ux"), ("<f", "<f")]
        {
            let text = format!("{{'descr': '{descr}', 'fortran_order': True, 'shape': (), }}");
            let (element, shape) = (ElementType::Other(name.into()), vec![]);
            assert_eq!(parse(&text), Ok(NpyHeader { element, shape, is_fortran: true }));
        }
        let text = "{'descr': '|b1', 'fortran_order': False, 'shape': (2, 3), }";
        assert_eq!(parse(text), header(ElementType::Bool, vec![2, 3]));
        let order = "'fortran_order': False, 'descr': '|u1', ";
        for (wrong, expected, got) in [
            (String::new(), "a `fortran_order`", "\"\""),
            ("'fortran_order': 1, ".into(), "a `fortran_order` of True or False", "1"),
            (format!("{order}'shape': ("), "a shape such as (3, 4)", "("),
            (format!("{order}'shape': (7, x)"), "a shape such as (3, 4)", "(7, x"),
        ] {
            assert_eq!(parse(&wrong), Err((expected.into(), got.into())), "{wrong}");
        }
    }

    #[test]
    fn floats_of_every_type() {
        let float = |code: &str| parse_float(code).unwrap();
        for (code, bytes, name) in [
            ("<f2", &[0x00, 0xc1][..], "float16"),
            (">f2", &[0xc1, 0x00], "float16"),
            ("<f4", &(-2.5_f32).to_le_bytes(), "float32"),
            (">f4", &(-2.5_f32).to_be_bytes(), "float32"),
            ("<f8", &(-2.5_f64).to_le_bytes(), "float64"),
            (">f8", &(-2.5_f64).to_be_bytes(), "float64"),
        ] {
            assert_eq!(float(code).value(bytes), -2.5, "{code}");
            assert_eq!(
                (float(code).bytes(), float(code).to_string().as_str()),
                (bytes.len(), name)
            );
        }
        assert_eq!(FloatType::Bf16.value(&[0x20, 0xc0]), -2.5);
        assert_eq!([parse_float("<f16"), parse_float("f4"), parse_float("")], [None; 3]);
    }

    #[test]
    fn text_of_both_byte_orders() {
        let little = parse_text("<U3").unwrap();
        assert_eq!((little.bytes(), little.to_string().as_str()), (12, "text <U3"));
        let codes: Vec<u32> = vec!['é'.into(), '🌱'.into(), 0];
        let bytes = |to: fn(u32) -> [u8; 4]| codes.iter().copied().flat_map(to).collect::<Vec<_>>();
        assert_eq!(little.value(&bytes(u32::to_le_bytes)).unwrap(), "é🌱");
        let big = parse_text(">U3").unwrap();
        assert_eq!(big.value(&bytes(u32::to_be_bytes)).unwrap(), "é🌱");
        // Half of a pair of UTF-16, and a code beyond the last.
        let one = parse_text("<U1").unwrap();
        assert_eq!(
            [0xd800_u32, 0x11_0000].map(|code| one.value(&code.to_le_bytes())),
            [None, None]
        );
        assert_eq!(["U3", "|U3", "<U", "<U0", "<U10001"].map(parse_text), [None; 5]);
    }

    #[test]
    fn labels_of_every_type() {
        let i64_be = IntType { bytes: 8, signed: true, big_endian: true };
        assert_eq!(i64_be.value(&[0, 0, 0, 0, 0, 0, 1, 2]), 258);
        assert_eq!(i64_be.value(&[255; 8]), -1);
        let u64_le = IntType { bytes: 8, signed: false, big_endian: false };
        assert_eq!(u64_le.value(&[0, 0, 0, 0, 1, 0, 0, 0]), 1 << 32);
        assert_eq!(u64_le.value(&[255; 8]), i128::from(u64::MAX));
        assert_eq!(IntType::U8.value(&[200]), 200);
        assert_eq!(IntType { signed: true, ..IntType::U8 }.value(&[200]), -56);
    }
}

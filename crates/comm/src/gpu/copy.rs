//! Calls of `copy.cu`.

use meristem_device::{Call, Kernel, KernelSource, Operand, Piece};

use super::{ABSENT, source};

pub(super) static SOURCE: KernelSource = source!("copy.cu");

/// Copies per call.
const COPIES: usize = 4;
/// Bytes per block.
const CHUNK: usize = 16384;

const FROM: Operand = Operand::read::<u8>();
const TO: Operand = Operand::write::<u8>();

static COPY: Kernel = Kernel {
    source: &SOURCE,
    entry: "copy",
    operands: &[FROM, FROM, FROM, FROM, TO, TO, TO, TO],
    values: size_of::<[u32; COPIES]>(),
};

/// Copies bytes, from one piece to another of the same length.
pub(crate) fn copies(pairs: &[[Piece; 2]]) -> Vec<Call> {
    let filled: Vec<[Piece; 2]> = pairs.iter().copied().filter(|pair| pair[0].len > 0).collect();
    let call = |pairs: &[[Piece; 2]]| {
        let (mut from, mut to, mut ends) = ([ABSENT; COPIES], [ABSENT; COPIES], [0u32; COPIES]);
        let mut end = 0;
        for (i, last) in ends.iter_mut().enumerate() {
            if let Some(pair) = pairs.get(i) {
                [from[i], to[i]] = *pair;
                end += pair[0].len.div_ceil(CHUNK) as u32;
            }
            *last = end;
        }
        Call::new(&COPY, end, 256).with_pieces(from.into_iter().chain(to)).values(ends)
    };
    filled.chunks(COPIES).map(call).collect()
}

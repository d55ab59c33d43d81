//! Comparison of the ranks' calls.

use meristem_device::DType;

use crate::error::{Error, Result};
use crate::transport::CollectiveCall;

/// Compares the calls of all ranks, in rank order. If calls differ from the most frequent one, the
/// error names the lowest such rank.
pub(crate) fn check(calls: &[CollectiveCall]) -> Result<()> {
    let votes = |call: &CollectiveCall| calls.iter().filter(|other| *other == call).count();
    // The first of the most frequent calls.
    let Some(usual) = calls.iter().rev().max_by_key(|call| votes(call)) else { return Ok(()) };
    let Some((rank, call)) = calls.iter().enumerate().find(|(_, call)| *call != usual) else {
        return Ok(());
    };
    let dtype =
        |call: &CollectiveCall| call.dtype.map_or("none".to_owned(), |dtype| dtype.to_string());
    let (what, expected, got) = if call.operation != usual.operation {
        ("operation", format!("`{}`", usual.operation), format!("`{}`", call.operation))
    } else if call.dtype != usual.dtype {
        ("element type", dtype(usual), dtype(call))
    } else if call.count() != usual.count() {
        ("element count", usual.count().to_string(), call.count().to_string())
    } else if call.shape != usual.shape {
        ("shape", usual.shape.to_string(), call.shape.to_string())
    } else if call.format != usual.format {
        ("memory format", usual.format.to_string(), call.format.to_string())
    } else if call.state_digest != usual.state_digest {
        let shown = |call: &CollectiveCall| format!("with digest {:016x}", call.state_digest);
        ("a state between calls", shown(usual), shown(call))
    } else {
        ("parameter", usual.parameter.to_string(), call.parameter.to_string())
    };
    Err(Error::Disagreement { operation: usual.operation, rank, what, expected, got })
}

/// The error for element types that cannot be summed.
pub(crate) fn not_a_number(operation: &'static str, dtype: Option<DType>) -> Error {
    let got = dtype.map_or("none".to_owned(), |dtype| dtype.to_string());
    Error::argument(operation, "element type", "f32, f64 or bf16", got)
}

#[cfg(test)]
mod tests {
    use meristem_device::MemoryFormat;

    use super::*;

    fn call(operation: &'static str, count: usize) -> CollectiveCall {
        CollectiveCall {
            dtype: Some(DType::F32),
            shape: [count].into(),
            ..CollectiveCall::new(operation)
        }
    }

    #[test]
    fn the_differing_rank_is_named() {
        let (a, b) = (call("sum", 3), call("sum", 4));
        assert!(check(&[]).is_ok() && check(&[a]).is_ok() && check(&[a, a, a]).is_ok());
        for (calls, expected) in [
            (vec![a, b, a], 1),
            (vec![b, a, a], 0),
            (vec![a, b], 1),
            (vec![a, a, b, b], 2),
            (vec![a, call("gather", 3), a], 1),
            (vec![a, a, CollectiveCall { dtype: None, ..a }], 2),
            (vec![a, a, CollectiveCall { parameter: 1, ..a }], 2),
            (vec![a, CollectiveCall { shape: [3, 1].into(), ..a }, a], 1),
            (vec![CollectiveCall { format: MemoryFormat::ChannelsLast, ..a }, a, a], 0),
            (vec![a, CollectiveCall { state_digest: 1, ..a }, a], 1),
        ] {
            let Err(Error::Disagreement { rank, .. }) = check(&calls) else { panic!("{calls:?}") };
            assert_eq!(rank, expected, "{calls:?}");
        }
    }
}

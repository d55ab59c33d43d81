//! Programs of launches: checked, bound to their kernels, and launched.

use super::context::Context;
use super::driver::{Called, check, driver};
use super::module::{Function, Module};
use crate::execution::args::{Arg, Record};
use crate::execution::call::{Call, Piece, Program};
use crate::ground::sync::Arc;
use crate::ground::{Error, Property, Result, Use};
use cudarc::driver::sys as cu;
use smallvec::SmallVec;
use std::ffi::c_void;
use std::fmt;
use std::ptr;

/// A program that was checked, with the functions that it calls.
pub(crate) struct Bound(Vec<BoundCall>);

struct BoundCall {
    call: Call,
    function: Function,
    /// Keeps the function loaded.
    _module: Arc<Module>,
}

// SAFETY: a function is a handle of the driver.
unsafe impl Send for BoundCall {}

/// A tensor as kernels see it: `Span` of meristem.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct Span {
    /// Address of the first element, or its offset to each address of the row.
    data: u64,
    len: i64,
    /// Address of a row of addresses, one for each member of a call; 0 for none.
    row: u64,
}

impl Bound {
    /// Checks a program against the launch's arguments, and compiles the sources that were not
    /// compiled yet.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the tensors or the values of a call are not those that its kernel
    /// declares; [`Error::Cuda`] if one cannot be compiled or loaded.
    pub(super) fn new(context: &Context, program: Program, record: &Record) -> Result<Bound> {
        let calls = program.0.into_iter().map(|call| {
            check_call(&call, record)?;
            let bound = bind(context, call);
            let bound = bound.map_err(|source| Error::Cuda { device: context.id, source })?;
            check_threads(&bound, record)?;
            Ok(bound)
        });
        Ok(Bound(calls.collect::<Result<_>>()?))
    }

    /// Launches the calls. The context is current.
    pub(super) fn launch(self, stream: cu::CUstream, record: &Record) -> Called {
        self.0.into_iter().try_for_each(|call| call.launch(stream, record))
    }
}

fn bind(context: &Context, call: Call) -> Called<BoundCall> {
    let module = context.module(call.kernel.source)?;
    context.bind()?;
    let function = module.function(call.kernel, call.shared)?;
    Ok(BoundCall { call, function, _module: module })
}

impl BoundCall {
    /// Launches it; a call without blocks does nothing.
    fn launch(mut self, stream: cu::CUstream, record: &Record) -> Called {
        let Call { blocks, threads, shared, .. } = self.call;
        if blocks == 0 {
            return Ok(());
        }
        let mut spans: SmallVec<[Span; 8]> = spans(&self.call, record).collect();
        let mut parameters: SmallVec<[*mut c_void; 9]> =
            spans.iter_mut().map(|span| ptr::from_mut(span).cast()).collect();
        if self.call.values_len > 0 {
            parameters.push(self.call.values.as_mut_ptr().cast());
        }
        // SAFETY: the function lives with its module. Its parameters are one span for each operand
        // and the struct of values, with the types and sizes that `check_call` compared with its
        // declaration; they are copied during the call. The spans are inside of memory that is
        // alive and ordered until the kernel has ended: see `lane`.
        check("cuLaunchKernel", unsafe {
            (driver().cuLaunchKernel)(
                self.function.raw,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|call| call.call.kernel.entry)).finish()
    }
}

/// The tensors of a call, in the order of its kernel's operands.
fn pieces<'a>(call: &'a Call, record: &'a Record) -> impl Iterator<Item = Piece> + 'a {
    let whole = |(argument, arg): (usize, &Arg)| {
        let len = arg.bytes / arg.dtype.size();
        Piece { argument, start: 0, len }
    };
    let all = record.args.iter().enumerate().map(whole);
    let given = call.pieces.as_ref();
    given.into_iter().flatten().copied().chain(all.take(match given {
        Some(_) => 0,
        None => record.args.len(),
    }))
}

/// As the kernel gets them.
fn spans<'a>(call: &'a Call, record: &'a Record) -> impl Iterator<Item = Span> + 'a {
    pieces(call, record).map(|Piece { argument, start, len }| {
        let data = if len == 0 { 0 } else { record.args[argument].address() + start as u64 };
        Span { data, len: len as i64, row: 0 }
    })
}

/// Compares a call with its kernel's declaration and the launch's arguments.
fn check_call(call: &Call, record: &Record) -> Result<()> {
    let kernel = call.kernel;
    let mismatch = |argument: String, property, expected: String, got: String| {
        let operation = record.operation;
        Err(Error::Mismatch { operation, argument, property, expected, got })
    };
    let (expected, got) = (kernel.operands.len(), pieces(call, record).count());
    if expected != got {
        let argument = format!("tensors of {}", kernel.entry);
        return mismatch(argument, Property::Shape, expected.to_string(), got.to_string());
    }
    for (i, (operand, piece)) in kernel.operands.iter().zip(pieces(call, record)).enumerate() {
        let Piece { argument, start, len } = piece;
        let named = || format!("tensor {i} of {}", kernel.entry);
        let (size, dtype) = (operand.dtype().size(), operand.dtype());
        let arg = record.args.get(argument).filter(|arg| {
            let end = len.checked_mul(size).and_then(|bytes| bytes.checked_add(start));
            let aligned = (arg.offset + start).is_multiple_of(size);
            len == 0 || (aligned && end.is_some_and(|end| end <= arg.bytes))
        });
        let Some(arg) = arg else {
            let expected = format!("aligned and inside of one of {} arguments", record.args.len());
            return mismatch(named(), Property::Shape, expected, format!("{piece:?}"));
        };
        if call.pieces.is_none() && dtype != arg.dtype {
            return mismatch(named(), Property::DType, dtype.to_string(), arg.dtype.to_string());
        }
        // A kernel that only reads may get an argument that the launch declares as written.
        if operand.usage() == Use::Write && arg.usage == Use::Read && len > 0 {
            let words = (String::from("declared as written"), String::from("one that is read"));
            return mismatch(named(), Property::DType, words.0, words.1);
        }
    }
    if kernel.values != call.values_len {
        let (argument, words) =
            (format!("values of {}", kernel.entry), |n: usize| format!("{n} bytes"));
        let (expected, got) = (words(kernel.values), words(call.values_len));
        return mismatch(argument, Property::Shape, expected, got);
    }
    Ok(())
}

/// Compares the threads of a call with what its kernel's registers leave room for.
fn check_threads(BoundCall { call, function, .. }: &BoundCall, record: &Record) -> Result<()> {
    if (1..=function.threads).contains(&call.threads) {
        return Ok(());
    }
    Err(Error::Mismatch {
        operation: record.operation,
        argument: format!("threads of {}", call.kernel.entry),
        property: Property::Shape,
        expected: format!("1 to {}", function.threads),
        got: call.threads.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_the_layout_of_the_header() {
        assert_eq!((size_of::<Span>(), align_of::<Span>()), (24, 8));
    }
}

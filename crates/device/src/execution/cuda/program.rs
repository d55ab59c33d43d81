//! Programs of launches: checked, bound to their kernels, and launched.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys as cu;
use smallvec::SmallVec;

use super::context::CudaContext;
use super::driver::{Called, check, driver};
use super::module::KernelFunction;
use crate::execution::args::{Arg, LaunchRecord};
use crate::execution::call::{Call, Piece, Program};
use crate::ground::sync::{Arc, Weak, lock};
use crate::ground::{AccessKind, Error, Property, Result};

/// A program bound to its functions on a device.
pub(crate) struct BoundProgram {
    /// The modules of the functions live as long as the context.
    context: Weak<CudaContext>,
    functions: Vec<KernelFunction>,
    /// Requirements on each argument, by position, see [`needs`]. `None`: every launch is checked
    /// call by call.
    needs: Option<Vec<ArgumentNeed>>,
}

// SAFETY: functions are handles of the driver, which locks their objects.
unsafe impl Send for BoundProgram {}
// SAFETY: as above.
unsafe impl Sync for BoundProgram {}

/// Largest number of arguments for which requirements are stored.
const ARGUMENTS_MAX: usize = 256;

/// Requirements of all calls of a program on one argument.
#[derive(Clone, Copy, Default)]
struct ArgumentNeed {
    /// Smallest size in bytes: the end of its last piece.
    bytes: usize,
    /// Alignment in bytes: the size of the largest element type of its pieces.
    alignment: usize,
    /// Whether a call writes it.
    written: bool,
}

/// A tensor among the parameters of a kernel: `Span` of meristem.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelSpan {
    /// Without `row`: address of the first element. With `row`: offset of the first element, in
    /// bytes, from the address of the member.
    pub(super) data: u64,
    /// Number of elements.
    pub(super) len: i64,
    /// Address of a row of the table of a graph, which has one address for each member of the call;
    /// 0 for a call outside of a graph.
    pub(super) row: u64,
}

impl BoundProgram {
    /// Checks a program against the launch's arguments. The first launch on a device binds the
    /// program to its functions, and compiles sources that are not compiled yet.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the tensors or the values of a call do not match its kernel's
    /// declaration; [`Error::Cuda`] if a source cannot be compiled or loaded.
    pub(super) fn for_launch(
        context: &Arc<CudaContext>,
        program: &Program,
        record: &LaunchRecord,
    ) -> Result<Arc<BoundProgram>> {
        let bound = BoundProgram::for_program(context, program, record.operation)?;
        if !bound.fits(record) {
            program.0.list.iter().try_for_each(|call| check_call(call, record))?;
        }
        Ok(bound)
    }

    /// Binds a program to its functions, without arguments.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if a call has more threads than its kernel can have, or does not match
    /// the kernel's declaration; [`Error::Cuda`] if a source cannot be compiled or loaded.
    pub(super) fn for_program(
        context: &Arc<CudaContext>,
        program: &Program,
        operation: &'static str,
    ) -> Result<Arc<BoundProgram>> {
        if let Some(bound) = BoundProgram::known(context, program) {
            return Ok(bound);
        }
        let functions = program.0.list.iter().map(|call| {
            check_declared(call, operation)?;
            let function = bind(context, call);
            let function = function.map_err(|source| Error::Cuda { device: context.id, source })?;
            check_threads(call, &function, operation)?;
            Ok(function)
        });
        let functions = functions.collect::<Result<_>>()?;
        let needs = needs(program);
        let bound = Arc::new(BoundProgram { context: Arc::downgrade(context), functions, needs });
        let mut all = lock(&program.0.bound);
        let dropped = |bound: &BoundProgram| bound.context.strong_count() == 0;
        all.retain(|known| !known.downcast_ref::<BoundProgram>().is_some_and(dropped));
        all.push(bound.clone());
        Ok(bound)
    }

    /// Whether the program is bound on this device.
    pub(super) fn is_known(context: &Arc<CudaContext>, program: &Program) -> bool {
        BoundProgram::known(context, program).is_some()
    }

    /// The bound program, if it was launched or prepared on this device before.
    fn known(context: &Arc<CudaContext>, program: &Program) -> Option<Arc<BoundProgram>> {
        let all = lock(&program.0.bound);
        let mut all = all.iter().filter_map(|known| known.clone().downcast::<BoundProgram>().ok());
        all.find(|bound| ptr::eq(bound.context.as_ptr(), Arc::as_ptr(context)))
    }

    /// Whether the arguments are known to meet the requirements of all calls.
    fn fits(&self, record: &LaunchRecord) -> bool {
        let fits = |(arg, need): (&Arg, &ArgumentNeed)| {
            let access = !need.written || arg.access == AccessKind::Write;
            let aligned = need.alignment == 0 || arg.offset.is_multiple_of(need.alignment);
            access && aligned && arg.bytes >= need.bytes
        };
        let Some(needs) = &self.needs else { return false };
        needs.len() <= record.args.len() && record.args.iter().zip(needs).all(fits)
    }

    /// Calls with at least one block, in order, each with its function.
    pub(super) fn calls<'a>(
        &'a self,
        program: &'a Program,
    ) -> impl Iterator<Item = (&'a Call, cu::CUfunction)> {
        let all = program.0.list.iter().zip(&self.functions);
        all.filter(|(call, _)| call.blocks > 0).map(|(call, function)| (call, function.raw))
    }

    /// Launches the calls. The context is current.
    pub(super) fn launch(
        &self,
        program: &Program,
        stream: cu::CUstream,
        record: &LaunchRecord,
    ) -> Called {
        self.calls(program).try_for_each(|(call, function)| {
            let mut parameters = Parameters::new(call, spans(call, record));
            // SAFETY: the function lives as long as its module, and the module as long as the
            // context, which the stream holds. For the parameters see `Parameters`. The spans are
            // inside of memory that is alive and ordered until the kernel has ended: see `stream`.
            check("cuLaunchKernel", unsafe {
                (driver().cuLaunchKernel)(
                    function,
                    call.blocks,
                    1,
                    1,
                    call.threads,
                    1,
                    1,
                    call.shared,
                    stream,
                    parameters.pointers().as_mut_ptr(),
                    ptr::null_mut(),
                )
            })
        })
    }
}

/// Parameters of a kernel: one span for each operand, and the struct of values. `check_declared`
/// has compared their number and the size of the values with the kernel's declaration, and
/// `BoundProgram::fits` or `check_call` the spans with the launch's arguments. The driver copies
/// them during the launch.
pub(super) struct Parameters<'a> {
    call: &'a Call,
    spans: SmallVec<[KernelSpan; 8]>,
}

impl<'a> Parameters<'a> {
    pub(super) fn new(call: &'a Call, spans: impl Iterator<Item = KernelSpan>) -> Self {
        Parameters { call, spans: spans.collect() }
    }

    /// Addresses of the parameters, which live as long as `self`.
    pub(super) fn pointers(&mut self) -> SmallVec<[*mut c_void; 9]> {
        let spans = self.spans.iter_mut().map(|span| ptr::from_mut(span).cast());
        // The driver only reads them.
        let values =
            (self.call.values_len > 0).then(|| self.call.values.as_ptr().cast_mut().cast());
        spans.chain(values).collect()
    }
}

fn bind(context: &CudaContext, call: &Call) -> Called<KernelFunction> {
    let module = context.module(call.kernel.source)?;
    context.bind()?;
    module.function(call.kernel, call.shared)
}

/// Requirements of a program on its arguments; `None` if a call takes arguments whole, or if a
/// piece is of an argument beyond [`ARGUMENTS_MAX`], begins within an element, or has an end that
/// overflows.
fn needs(program: &Program) -> Option<Vec<ArgumentNeed>> {
    let mut needs = vec![];
    for call in &program.0.list {
        for (piece, operand) in call.pieces.as_ref()?.iter().zip(call.kernel.operands) {
            if piece.len > 0 {
                let size = operand.dtype().size();
                if piece.argument >= ARGUMENTS_MAX {
                    return None;
                }
                needs.resize(needs.len().max(piece.argument + 1), ArgumentNeed::default());
                let need = &mut needs[piece.argument];
                let end = piece.len.checked_mul(size)?.checked_add(piece.start)?;
                if !piece.start.is_multiple_of(size) {
                    return None;
                }
                need.bytes = need.bytes.max(end);
                need.alignment = need.alignment.max(size);
                need.written |= operand.access() == AccessKind::Write;
            }
        }
    }
    Some(needs)
}

/// The tensors of a call, in the order of its kernel's operands.
fn pieces<'a>(call: &'a Call, record: &'a LaunchRecord) -> impl Iterator<Item = Piece> + 'a {
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

/// The tensors of a call as parameters of the kernel.
fn spans<'a>(call: &'a Call, record: &'a LaunchRecord) -> impl Iterator<Item = KernelSpan> + 'a {
    pieces(call, record).map(|Piece { argument, start, len }| {
        let data = if len == 0 { 0 } else { record.args[argument].address() + start as u64 };
        KernelSpan { data, len: len as i64, row: 0 }
    })
}

/// Compares the number of pieces and the size of the values of a call with its kernel's
/// declaration.
fn check_declared(call: &Call, operation: &'static str) -> Result<()> {
    let kernel = call.kernel;
    let mismatch = |argument: String, expected: String, got: String| {
        let property = Property::Shape;
        Err(Error::Mismatch { operation, argument, property, expected, got })
    };
    let expected = kernel.operands.len();
    let got = call.pieces.as_ref().map_or(expected, |pieces| pieces.len());
    if expected != got {
        let argument = format!("tensors of {}", kernel.entry);
        return mismatch(argument, expected.to_string(), got.to_string());
    }
    if kernel.values != call.values_len {
        let (argument, words) =
            (format!("values of {}", kernel.entry), |n: usize| format!("{n} bytes"));
        return mismatch(argument, words(kernel.values), words(call.values_len));
    }
    Ok(())
}

/// Compares a call with the launch's arguments.
fn check_call(call: &Call, record: &LaunchRecord) -> Result<()> {
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
        // An operand that is only read may be an argument that the launch declares as written.
        if operand.access() == AccessKind::Write && arg.access == AccessKind::Read && len > 0 {
            let words = (String::from("declared as written"), String::from("one that is read"));
            return mismatch(named(), Property::Access, words.0, words.1);
        }
    }
    Ok(())
}

/// Compares the threads of a call with the maximum that its kernel's registers allow.
fn check_threads(call: &Call, function: &KernelFunction, operation: &'static str) -> Result<()> {
    if (1..=function.threads_max).contains(&call.threads) {
        return Ok(());
    }
    Err(Error::Mismatch {
        operation,
        argument: format!("threads of {}", call.kernel.entry),
        property: Property::Shape,
        expected: format!("1 to {}", function.threads_max),
        got: call.threads.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_the_layout_of_the_header() {
        assert_eq!((size_of::<KernelSpan>(), align_of::<KernelSpan>()), (24, 8));
    }
}

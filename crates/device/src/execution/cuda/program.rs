//! Programs of launches: checked, bound to their kernels, and launched.

use super::context::CudaContext;
use super::driver::{Called, check, driver};
use super::module::KernelFunction;
use crate::execution::args::{Arg, LaunchRecord};
use crate::execution::call::{Call, Piece, Program};
use crate::ground::sync::{Arc, Weak, lock};
use crate::ground::{Error, Property, Result, AccessKind};
use cudarc::driver::sys as cu;
use smallvec::SmallVec;
use std::ffi::c_void;
use std::ptr;

/// A program's functions on a device.
pub(crate) struct BoundProgram {
    /// Its modules live as long as it does.
    context: Weak<CudaContext>,
    functions: Vec<KernelFunction>,
    /// Bounds of the arguments by their positions; `None` if a call takes them whole, so that every
    /// launch is checked call by call.
    needs: Option<Vec<Need>>,
}

// SAFETY: functions are handles of the driver, which locks what is behind them.
unsafe impl Send for BoundProgram {}
// SAFETY: as above.
unsafe impl Sync for BoundProgram {}

/// Arguments of a program whose bounds are kept.
const ARGUMENTS_MAX: usize = 256;

/// Bounds of an argument.
#[derive(Clone, Copy, Default)]
struct Need {
    bytes: usize,
    /// Largest element that a piece of it has.
    alignment: usize,
    written: bool,
}

/// A tensor as kernels see it: `Span` of meristem.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// Address of the first element, or its offset to each address of the row.
    pub(super) data: u64,
    pub(super) len: i64,
    /// Address of a row of addresses, one for each member of a call; 0 for none.
    pub(super) row: u64,
}

impl BoundProgram {
    /// Checks a program against the launch's arguments. At its first launch on the device it is
    /// bound to its functions, and the sources that were not compiled yet are.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the tensors or the values of a call are not those that its kernel
    /// declares; [`Error::Cuda`] if one cannot be compiled or loaded.
    pub(super) fn of(
        context: &Arc<CudaContext>,
        program: &Program,
        record: &LaunchRecord,
    ) -> Result<Arc<BoundProgram>> {
        let bound = BoundProgram::ahead(context, program, record.operation)?;
        if !bound.fits(record) {
            program.0.list.iter().try_for_each(|call| check_call(call, record))?;
        }
        Ok(bound)
    }

    /// The program as bound to its functions, before there are arguments.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if a call has more threads than its kernel can have, or is not what its
    /// kernel declares; [`Error::Cuda`] if one cannot be compiled or loaded.
    pub(super) fn ahead(
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

    /// Whether the program was launched on this device.
    pub(super) fn is_known(context: &Arc<CudaContext>, program: &Program) -> bool {
        BoundProgram::known(context, program).is_some()
    }

    /// The program's functions on this device, if it was launched there.
    fn known(context: &Arc<CudaContext>, program: &Program) -> Option<Arc<BoundProgram>> {
        let all = lock(&program.0.bound);
        let mut all = all.iter().filter_map(|known| known.clone().downcast::<BoundProgram>().ok());
        all.find(|bound| ptr::eq(bound.context.as_ptr(), Arc::as_ptr(context)))
    }

    /// Whether the arguments are known to be within the bounds of all calls.
    fn fits(&self, record: &LaunchRecord) -> bool {
        let fits = |(arg, need): (&Arg, &Need)| {
            let access = !need.written || arg.usage == AccessKind::Write;
            let aligned = need.alignment == 0 || arg.offset.is_multiple_of(need.alignment);
            access && aligned && arg.bytes >= need.bytes
        };
        let Some(needs) = &self.needs else { return false };
        needs.len() <= record.args.len() && record.args.iter().zip(needs).all(fits)
    }

    /// The calls with their functions, in order; those without blocks are left out.
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
            // SAFETY: the function lives with its module, and that with the context, which the lane
            // holds. For the parameters see `Parameters`. The spans are inside of memory that is
            // alive and ordered until the kernel has ended: see `lane`.
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

/// Parameters of a kernel: one span for each operand and the struct of values, with the types and
/// sizes that `check_call` compared with its declaration. The driver copies them during the call
/// that they are given to.
pub(super) struct Parameters<'a> {
    call: &'a Call,
    spans: SmallVec<[Span; 8]>,
}

impl<'a> Parameters<'a> {
    pub(super) fn new(call: &'a Call, spans: impl Iterator<Item = Span>) -> Self {
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

/// Bounds of the arguments of a program; `None` as well for pieces whose ends no number can say.
fn needs(program: &Program) -> Option<Vec<Need>> {
    let mut needs = vec![];
    for call in &program.0.list {
        for (piece, operand) in call.pieces.as_ref()?.iter().zip(call.kernel.operands) {
            if piece.len > 0 {
                let size = operand.dtype().size();
                if piece.argument >= ARGUMENTS_MAX {
                    return None;
                }
                needs.resize(needs.len().max(piece.argument + 1), Need::default());
                let need = &mut needs[piece.argument];
                let end = piece.len.checked_mul(size)?.checked_add(piece.start)?;
                if !piece.start.is_multiple_of(size) {
                    return None;
                }
                need.bytes = need.bytes.max(end);
                need.alignment = need.alignment.max(size);
                need.written |= operand.usage() == AccessKind::Write;
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

/// As the kernel gets them.
fn spans<'a>(call: &'a Call, record: &'a LaunchRecord) -> impl Iterator<Item = Span> + 'a {
    pieces(call, record).map(|Piece { argument, start, len }| {
        let data = if len == 0 { 0 } else { record.args[argument].address() + start as u64 };
        Span { data, len: len as i64, row: 0 }
    })
}

/// Compares a call with its kernel's declaration, as far as it does not take arguments whole.
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
        // A kernel that only reads may get an argument that the launch declares as written.
        if operand.usage() == AccessKind::Write && arg.usage == AccessKind::Read && len > 0 {
            let words = (String::from("declared as written"), String::from("one that is read"));
            return mismatch(named(), Property::Access, words.0, words.1);
        }
    }
    Ok(())
}

/// Compares the threads of a call with what its kernel's registers leave room for.
fn check_threads(call: &Call, function: &KernelFunction, operation: &'static str) -> Result<()> {
    if (1..=function.threads).contains(&call.threads) {
        return Ok(());
    }
    Err(Error::Mismatch {
        operation,
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

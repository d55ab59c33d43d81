//! Kernels: compiling and loading them, and running a grid of blocks of threads.

mod block;
mod compile;
mod copies;
mod fiber;
mod grid;
mod module;
mod options;
mod signals;
mod source;

pub(crate) use compile::{CompileError, SourceText, compile};
pub(crate) use grid::{KernelGrid, KernelRunner};
pub(crate) use module::{Argument, LoadedModule};

/// Threads of a warp.
pub(crate) const WARP: usize = 32;

/// Largest number of threads of a block.
pub(crate) const THREADS_MAX: usize = 1024;

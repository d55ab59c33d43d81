//! Kernels: their compilation, their loading, and how a grid of blocks of threads runs.

mod block;
mod compile;
mod copies;
mod fiber;
mod grid;
mod module;
mod options;
mod signals;
mod source;

pub(crate) use compile::{CompileError, Source, compile};
pub(crate) use grid::{Engine, Grid};
pub(crate) use module::{Argument, Module};

/// Threads of a warp.
pub(crate) const WARP: usize = 32;

/// Most threads of a block.
pub(crate) const THREADS_MAX: usize = 1024;

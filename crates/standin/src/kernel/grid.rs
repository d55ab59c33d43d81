//! Grids: all blocks of a kernel, one after the other, in an order that the seed decides.

use std::ffi::c_void;
use std::slice;
use std::sync::Arc;

use cudarc::driver::sys::CUresult;

use super::block::{Order, Stopped, Threads};
use super::module::{DYNAMIC_ROOM, GUARD_BYTES, Module};
use super::{Argument, THREADS_MAX, signals};
use crate::ground::{Fault, Random};
use crate::memory::{Asan, Memory, POISON};

/// The value of every byte there.
const GUARD: u8 = 0xc3;

/// Alignment of every argument.
const ALIGNMENT: usize = 16;

/// A kernel with its grid and a copy of its arguments.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    /// The module that the kernel is in.
    pub(crate) module: Arc<Module>,
    /// Its number there.
    pub(crate) kernel: usize,
    /// Blocks in each dimension.
    pub(crate) blocks: [u32; 3],
    /// Threads of a block in each dimension.
    pub(crate) threads: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub(crate) shared: usize,
    values: Vec<u128>,
}

impl Grid {
    /// A kernel, whose arguments are copied.
    ///
    /// # Safety
    /// `values` points to as many pointers as the kernel has arguments, each to one of its type.
    pub(crate) unsafe fn new(
        module: Arc<Module>,
        kernel: usize,
        shape: ([u32; 3], [u32; 3]),
        shared: usize,
        values: *const *mut c_void,
    ) -> Self {
        let mut copied = vec![];
        for (at, argument) in module.arguments(kernel).iter().enumerate() {
            let bytes = argument.bytes as usize;
            let start = copied.len();
            copied.resize(start + bytes.div_ceil(ALIGNMENT), 0u128);
            // SAFETY: the caller's contract; there is room for the value.
            unsafe {
                let to = copied[start..].as_mut_ptr().cast::<u8>();
                (*values.add(at)).cast::<u8>().copy_to_nonoverlapping(to, bytes);
            }
        }
        let (blocks, threads) = shape;
        Self { module, kernel, blocks, threads, shared, values: copied }
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        self.module.name(self.kernel)
    }

    /// Each argument with its first value's place.
    fn arguments(&self) -> impl Iterator<Item = (Argument, &[u128])> {
        let mut start = 0;
        self.module.arguments(self.kernel).iter().map(move |argument| {
            let words = (argument.bytes as usize).div_ceil(ALIGNMENT);
            let value = &self.values[start..start + words];
            start += words;
            (*argument, value)
        })
    }

    /// Checks that pointers among the arguments are null or in live memory, and that no struct has
    /// a pointer to memory that was freed.
    pub(crate) fn check(&self, memory: &Memory) -> Result<(), Fault> {
        for (at, (argument, value)) in self.arguments().enumerate() {
            let words = value.iter().flat_map(|word| [*word as u64, (*word >> 64) as u64]);
            let words = words.take(argument.bytes as usize / 8);
            let wrong = |address: &u64| match argument.is_pointer {
                0 => memory.is_freed(*address),
                _ => *address != 0 && memory.owner(*address, 0).is_none(),
            };
            if let Some(address) = words.into_iter().find(wrong) {
                let cause = format!(
                    "argument {at} of kernel {} is {address:#x}, {}",
                    self.name(),
                    memory.describe(address)
                );
                return Err(Fault::illegal_address(cause));
            }
        }
        Ok(())
    }
}

/// Runs grids.
#[derive(Debug)]
pub(crate) struct Engine {
    threads: Box<Threads>,
    random: Random,
}

// SAFETY: fibers are only run under the lock of the machine, by whichever thread holds it.
unsafe impl Send for Engine {}

impl Engine {
    pub(crate) fn new(seed: u64) -> Self {
        Self { threads: Box::new(Threads::new(Random::new(seed, 1))), random: Random::new(seed, 2) }
    }

    /// Runs all blocks of a grid.
    pub(crate) fn run(&mut self, grid: &Grid, memory: &Memory) -> Result<(), Fault> {
        signals::install();
        let exported = grid.module.exported();
        let blocks = grid.blocks.iter().map(|count| *count as usize).product();
        let sequence = Sequence::draw(&mut self.random, blocks);
        let order = Order::draw(&mut self.random);
        let mut threads: Vec<u32> = (0..grid.threads.iter().product()).collect();
        debug_assert!(threads.len() <= THREADS_MAX);
        if order == Order::Reversed {
            threads.reverse();
        }
        let mut values: Vec<*mut c_void> =
            grid.arguments().map(|(_, value)| value.as_ptr().cast_mut().cast()).collect();
        // SAFETY: the module's own variables, which nobody else uses now.
        unsafe {
            *exported.block_size = grid.threads;
            *exported.grid_size = grid.blocks;
        }
        for number in 0..blocks {
            let index = position(sequence.at(number), grid.blocks);
            if order == Order::Shuffled {
                self.random.shuffle(&mut threads);
            }
            Shared { grid }.poison();
            let run = grid.module.entry(grid.kernel).run;
            // SAFETY: the values are copies of the kernel's arguments; all else is the module's.
            let ended = unsafe {
                *exported.block_index = index;
                self.threads.block(exported, run, values.as_mut_ptr(), (&threads, order))
            };
            let ended = ended.and_then(|()| Shared { grid }.check());
            ended.map_err(|stopped| describe(grid, index, stopped, memory))?;
        }
        Ok(())
    }
}

/// A fault with kernel, block, thread and address.
fn describe(grid: &Grid, [x, y, z]: [u32; 3], stopped: Stopped, memory: &Memory) -> Fault {
    let Stopped { code, thread, cause } = stopped;
    let thread = thread.map_or(String::new(), |thread| {
        let [x, y, z] = position(thread as usize, grid.threads);
        format!(", thread ({x}, {y}, {z})")
    });
    let address = match code {
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => {
            format!(", {}", memory.describe(signals::address()))
        }
        _ => String::new(),
    };
    let name = grid.name();
    Fault::new(code, format!("kernel {name}, block ({x}, {y}, {z}){thread}: {cause}{address}"))
}

/// The three indices of a number.
fn position(number: usize, [x, y, _]: [u32; 3]) -> [u32; 3] {
    let (x, y) = (x as usize, y as usize);
    [(number % x) as u32, (number / x % y) as u32, (number / x / y) as u32]
}

/// An order of `0..count` that needs no list: `first + step · i` modulo `count`, where `step` and
/// `count` have no common divisor.
struct Sequence {
    first: usize,
    step: usize,
    count: usize,
}

impl Sequence {
    fn draw(random: &mut Random, count: usize) -> Self {
        let (first, step) = match Order::draw(random) {
            Order::Forward => (0, 1),
            Order::Reversed => (count - 1, count - 1),
            Order::Shuffled => {
                let mut step = 1 + random.below(count);
                while divisor(step, count) != 1 {
                    step = 1 + random.below(count);
                }
                (random.below(count), step)
            }
        };
        Self { first, step, count }
    }

    fn at(&self, number: usize) -> usize {
        let (number, step) = (number as u128, self.step as u128);
        ((self.first as u128 + number * step) % self.count as u128) as usize
    }
}

/// The greatest common divisor.
fn divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { divisor(b, a % b) }
}

/// Shared memory of a module, for one grid.
struct Shared<'a> {
    grid: &'a Grid,
}

impl Shared<'_> {
    /// Fills shared memory with poison, and the guard zone with its value.
    fn poison(&self) {
        let exported = self.grid.module.exported();
        let shared = self.grid.shared;
        if let Some(asan) = Asan::get() {
            asan.unpoison(exported.dynamic, DYNAMIC_ROOM);
            // SAFETY: the end of what the grid has of it.
            let behind = unsafe { exported.dynamic.add(shared) };
            asan.poison(behind, DYNAMIC_ROOM - shared);
        } else {
            // SAFETY: the guard zone, of which the module has room for behind the most.
            unsafe { exported.dynamic.add(shared).write_bytes(GUARD, GUARD_BYTES) };
        }
        fill(exported.shared, self.grid.module.shared_bytes());
        fill(exported.dynamic, shared);
    }

    /// Finds writes behind dynamic shared memory.
    fn check(&self) -> Result<(), Stopped> {
        if Asan::get().is_some() {
            return Ok(());
        }
        let (dynamic, shared) = (self.grid.module.exported().dynamic, self.grid.shared);
        // SAFETY: the guard zone.
        let zone = unsafe { slice::from_raw_parts(dynamic.add(shared), GUARD_BYTES) };
        match zone.iter().position(|byte| *byte != GUARD) {
            None => Ok(()),
            Some(at) => Err(Stopped {
                code: CUresult::CUDA_ERROR_LAUNCH_FAILED,
                thread: None,
                cause: format!("a write {at} bytes behind {shared} bytes of dynamic shared memory"),
            }),
        }
    }
}

/// Fills a range with poison, word by word: AddressSanitizer refuses `memset` between variables.
fn fill(from: *mut u8, bytes: usize) {
    // SAFETY: a range that the module has for shared memory; a word may be anywhere.
    unsafe {
        for at in 0..bytes / POISON.len() {
            from.cast::<[u8; POISON.len()]>().add(at).write(POISON);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sequence_has_each_number_once() {
        let mut random = Random::new(7, 0);
        let mut different = std::collections::BTreeSet::new();
        for count in [1, 2, 6, 97, 128] {
            for _ in 0..50 {
                let sequence = Sequence::draw(&mut random, count);
                let numbers: Vec<usize> = (0..count).map(|number| sequence.at(number)).collect();
                let mut sorted = numbers.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..count).collect::<Vec<_>>());
                different.insert(numbers);
            }
        }
        assert!(different.len() > 50, "{} orders", different.len());
    }

    #[test]
    fn a_number_has_one_position() {
        assert_eq!(position(0, [4, 3, 2]), [0, 0, 0]);
        assert_eq!(position(4, [4, 3, 2]), [0, 1, 0]);
        assert_eq!(position(23, [4, 3, 2]), [3, 2, 1]);
    }
}

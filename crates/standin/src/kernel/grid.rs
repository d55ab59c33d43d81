//! Grids: all blocks of a kernel, one after the other, in an order that the seed decides.

use std::ffi::c_void;
use std::slice;
use std::sync::Arc;

use cudarc::driver::sys::CUresult;

use super::block::{BlockThreads, Stopped, ThreadOrder};
use super::module::{DYNAMIC_ROOM, GUARD_BYTES, LoadedModule};
use super::{Argument, THREADS_MAX, signals};
use crate::ground::{DeviceFault, SeededRandom};
use crate::memory::{AddressSpace, Asan, POISON};

/// The value of every byte of the guard zone.
const GUARD: u8 = 0xc3;

/// Alignment of every argument.
const ALIGNMENT: usize = 16;

/// A kernel with its grid and a copy of its arguments.
#[derive(Clone, Debug)]
pub(crate) struct KernelGrid {
    /// The module of the kernel.
    pub(crate) module: Arc<LoadedModule>,
    /// Index of the kernel in the module.
    pub(crate) kernel: usize,
    /// Blocks in each dimension.
    pub(crate) blocks: [u32; 3],
    /// Threads of a block in each dimension.
    pub(crate) threads: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub(crate) shared: usize,
    values: Vec<u128>,
}

impl KernelGrid {
    /// A kernel with a copy of its arguments.
    ///
    /// # Safety
    /// `values` points to one pointer for each argument of the kernel, to a value of the argument's
    /// type.
    pub(crate) unsafe fn new(
        module: Arc<LoadedModule>,
        kernel: usize,
        blocks: [u32; 3],
        threads: [u32; 3],
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
        Self { module, kernel, blocks, threads, shared, values: copied }
    }

    /// The kernel's name.
    pub(crate) fn name(&self) -> String {
        self.module.name(self.kernel)
    }

    /// Each argument with its value.
    fn arguments(&self) -> impl Iterator<Item = (Argument, &[u128])> {
        let mut start = 0;
        self.module.arguments(self.kernel).iter().map(move |argument| {
            let words = (argument.bytes as usize).div_ceil(ALIGNMENT);
            let value = &self.values[start..start + words];
            start += words;
            (*argument, value)
        })
    }

    /// Checks that pointers among the arguments are null or in live memory, and that no struct
    /// contains a pointer to freed memory.
    pub(crate) fn check(&self, memory: &AddressSpace) -> Result<(), DeviceFault> {
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
                return Err(DeviceFault::illegal_address(cause));
            }
        }
        Ok(())
    }
}

/// Runs grids.
#[derive(Debug)]
pub(crate) struct KernelRunner {
    threads: Box<BlockThreads>,
    random: SeededRandom,
}

// SAFETY: fibers are run only by the thread that holds the lock of the machine.
unsafe impl Send for KernelRunner {}

impl KernelRunner {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            threads: Box::new(BlockThreads::new(SeededRandom::new(seed, 1))),
            random: SeededRandom::new(seed, 2),
        }
    }

    /// Runs all blocks of a grid.
    pub(crate) fn run(
        &mut self,
        grid: &KernelGrid,
        memory: &AddressSpace,
    ) -> Result<(), DeviceFault> {
        signals::install();
        let exported = grid.module.exported();
        let blocks = grid.blocks.iter().map(|count| *count as usize).product();
        let sequence = Sequence::draw(&mut self.random, blocks);
        let order = ThreadOrder::draw(&mut self.random);
        let mut threads: Vec<u32> = (0..grid.threads.iter().product()).collect();
        debug_assert!(threads.len() <= THREADS_MAX);
        if order == ThreadOrder::Reversed {
            threads.reverse();
        }
        let mut values: Vec<*mut c_void> =
            grid.arguments().map(|(_, value)| value.as_ptr().cast_mut().cast()).collect();
        // SAFETY: the module's variables, which are not used elsewhere now.
        unsafe {
            *exported.block_size = grid.threads;
            *exported.grid_size = grid.blocks;
        }
        for number in 0..blocks {
            let index = position(sequence.at(number), grid.blocks);
            if order == ThreadOrder::Shuffled {
                self.random.shuffle(&mut threads);
            }
            SharedMemory { grid }.poison();
            let run = grid.module.entry(grid.kernel).run;
            // SAFETY: the values are copies of the kernel's arguments; all other arguments are the
            // module's.
            let ended = unsafe {
                *exported.block_index = index;
                self.threads.block(exported, run, values.as_mut_ptr(), (&threads, order))
            };
            let ended = ended.and_then(|()| SharedMemory { grid }.check());
            ended.map_err(|stopped| describe(grid, index, stopped, memory))?;
        }
        Ok(())
    }
}

/// A fault with kernel, block, thread and address.
fn describe(
    grid: &KernelGrid,
    [x, y, z]: [u32; 3],
    stopped: Stopped,
    memory: &AddressSpace,
) -> DeviceFault {
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
    DeviceFault::new(
        code,
        format!("kernel {name}, block ({x}, {y}, {z}){thread}: {cause}{address}"),
    )
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
    fn draw(random: &mut SeededRandom, count: usize) -> Self {
        let (first, step) = match ThreadOrder::draw(random) {
            ThreadOrder::Forward => (0, 1),
            ThreadOrder::Reversed => (count - 1, count - 1),
            ThreadOrder::Shuffled => {
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
struct SharedMemory<'a> {
    grid: &'a KernelGrid,
}

impl SharedMemory<'_> {
    /// Fills shared memory with poison, and the guard zone with its value.
    fn poison(&self) {
        let exported = self.grid.module.exported();
        let shared = self.grid.shared;
        if let Some(asan) = Asan::get() {
            asan.unpoison(exported.dynamic, DYNAMIC_ROOM);
            // SAFETY: the end of the grid's part of the module's memory.
            let after = unsafe { exported.dynamic.add(shared) };
            asan.poison(after, DYNAMIC_ROOM - shared);
        } else {
            // SAFETY: the guard zone, for which the module has room after the largest size.
            unsafe { exported.dynamic.add(shared).write_bytes(GUARD, GUARD_BYTES) };
        }
        fill(exported.shared, self.grid.module.shared_bytes());
        fill(exported.dynamic, shared);
    }

    /// Finds writes after the end of dynamic shared memory.
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
                cause: format!("a write {at} bytes after {shared} bytes of dynamic shared memory"),
            }),
        }
    }
}

/// Fills a range with poison, word by word: AddressSanitizer refuses `memset` between variables.
fn fill(from: *mut u8, bytes: usize) {
    // SAFETY: a range of the module's shared memory; a word of bytes needs no alignment.
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
        let mut random = SeededRandom::new(7, 0);
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

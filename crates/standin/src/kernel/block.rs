//! One block of threads. Threads are fibers, which stop at barriers and at exchanges of a warp.
//!
//! A fiber starts one thread after the other until none is left. A thread that has to wait keeps
//! its fiber, and another fiber continues with the threads that have not started. So a kernel
//! without barriers and exchanges runs on one fiber, as a loop.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::{process, ptr};

use cudarc::driver::sys::CUresult;

use super::copies::{Copies, Late};
use super::fiber::{self, Fiber, HostStack, SwitchPoint};
use super::module::{BlockState, HostFunctions, ModuleTable};
use super::{THREADS_MAX, WARP};
use crate::ground::SeededRandom;

/// Words that a thread can give to other threads at once; `meristem_words` of the shim.
const LANE_WORDS: usize = 3;

/// Functions that kernels call.
static HOST: HostFunctions = HostFunctions { wait, ended, fail, copy, commit, arrive };

// SAFETY: pointers to functions.
unsafe impl Sync for HostFunctions {}

/// The running block; one at a time in the process, under the lock of the machine.
static RUNNING: AtomicPtr<BlockThreads> = AtomicPtr::new(ptr::null_mut());

/// The host thread that runs the block.
static RUNNER: AtomicU64 = AtomicU64::new(0);

/// Order of the threads of a block, and of the blocks of a grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ThreadOrder {
    /// In order of their numbers.
    Forward,
    /// In descending order of their numbers.
    Reversed,
    /// In random order.
    Shuffled,
}

impl ThreadOrder {
    pub(super) fn draw(random: &mut SeededRandom) -> Self {
        match random.below(4) {
            0 => Self::Forward,
            1 => Self::Reversed,
            _ => Self::Shuffled,
        }
    }
}

/// The reason why a block was stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stopped {
    pub(super) code: CUresult,
    /// The thread at fault, if there is one.
    pub(super) thread: Option<u32>,
    pub(super) cause: String,
}

/// A place in a source file.
#[derive(Clone, Copy, Debug)]
struct SourcePlace {
    file: *const c_char,
    line: c_int,
}

impl SourcePlace {
    fn is(self, other: Self) -> bool {
        // SAFETY: names of files are string constants of a loaded module.
        let same = || unsafe { CStr::from_ptr(self.file) == CStr::from_ptr(other.file) };
        self.line == other.line && (self.file == other.file || same())
    }

    fn text(self) -> String {
        // SAFETY: as above.
        let file = unsafe { CStr::from_ptr(self.file) };
        format!("{}:{}", file.to_string_lossy(), self.line)
    }
}

/// A thread that waits, and the fiber that it keeps.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    fiber: usize,
    thread: u32,
    site: SourcePlace,
}

/// The fibers, and the state of the block that they run.
#[derive(Debug)]
pub(super) struct BlockThreads {
    // In boxes, because fibers are added while a fiber runs.
    #[expect(clippy::vec_box, reason = "a fiber must not move while another one is added")]
    fibers: Vec<Box<Fiber>>,
    home: HostStack,
    /// Whether the last switch was from home.
    from_home: bool,
    current: usize,
    /// Fibers without a thread.
    idle: Vec<usize>,
    /// Fibers with a thread that can continue.
    ready: VecDeque<usize>,
    /// Threads at the block's barrier.
    barrier: Vec<Waiter>,
    /// Threads of each warp at an exchange.
    warps: [Vec<Waiter>; THREADS_MAX / WARP],
    /// Values that threads exchange within their warp.
    lanes: Vec<u64>,
    /// Asynchronous copies of each thread, once a kernel has had one.
    copies: Vec<Copies>,
    order: ThreadOrder,
    random: SeededRandom,
    block: *mut BlockState,
    run: Option<unsafe extern "C" fn(*mut *mut c_void)>,
    values: *mut *mut c_void,
    stopped: Option<Stopped>,
}

/// The next switch of fibers.
enum NextFiber {
    /// None: the fiber continues.
    Stay,
    Go(SwitchPoint, SwitchPoint),
}

impl BlockThreads {
    pub(super) fn new(random: SeededRandom) -> Self {
        Self {
            fibers: vec![],
            home: HostStack::new(),
            from_home: false,
            current: 0,
            idle: vec![],
            ready: VecDeque::new(),
            barrier: vec![],
            warps: [const { vec![] }; THREADS_MAX / WARP],
            lanes: vec![0; 2 * THREADS_MAX * LANE_WORDS],
            copies: vec![],
            order: ThreadOrder::Forward,
            random,
            block: ptr::null_mut(),
            run: None,
            values: ptr::null_mut(),
            stopped: None,
        }
    }

    /// Runs one block to its end. `threads` are its threads in the order in which they start.
    ///
    /// # Safety
    /// `run` and `exported` belong to one module, and `values` points to the kernel's arguments.
    pub(super) unsafe fn block(
        &mut self,
        exported: &ModuleTable,
        run: unsafe extern "C" fn(*mut *mut c_void),
        values: *mut *mut c_void,
        threads: (&[u32], ThreadOrder),
    ) -> Result<(), Stopped> {
        let (started, order) = threads;
        let count = started.len() as u32;
        (self.block, self.run, self.values, self.order) =
            (exported.block, Some(run), values, order);
        // SAFETY: the module's block, which is not used elsewhere now.
        unsafe {
            *self.block = BlockState {
                host: &raw const HOST,
                order: started.as_ptr(),
                started: 0,
                count,
                live: count,
                waiting: 0,
                current: 0,
                lanes: self.lanes.as_mut_ptr(),
                turn: [0; 32],
            };
        }
        self.copies.clear();
        let Some(first) = self.fresh() else { return Err(no_stack()) };
        self.current = first;
        self.from_home = true;
        let (from, to) = (self.home.place(), self.fibers[first].place());
        RUNNER.store(host_thread(), Ordering::Relaxed);
        RUNNING.store(self, Ordering::Relaxed);
        // SAFETY: this thread is home; a fiber in `idle` is fresh, or was left in `fiber_main`.
        unsafe { fiber::switch(from, to) };
        RUNNING.store(ptr::null_mut(), Ordering::Relaxed);
        let result = match self.stopped.take() {
            Some(stopped) => Err(stopped),
            None => self.deadlock().map_or(Ok(()), Err),
        };
        if result.is_err() {
            self.abandon();
        }
        result
    }

    /// Whether a block runs on the calling host thread.
    pub(super) fn is_running() -> bool {
        !RUNNING.load(Ordering::Relaxed).is_null()
            && RUNNER.load(Ordering::Relaxed) == host_thread()
    }

    /// The end of the running fiber's stack.
    pub(super) fn stack_top() -> *mut u8 {
        with(|threads| threads.fibers[threads.current].top())
    }

    /// Asynchronous copies of the running thread.
    fn copies(&mut self) -> &mut Copies {
        let thread = self.state().current as usize;
        if self.copies.len() <= thread {
            self.copies.resize(THREADS_MAX, Copies::default());
        }
        &mut self.copies[thread]
    }

    fn state(&mut self) -> &mut BlockState {
        // SAFETY: set by `block`; the module lives as long as the block runs.
        unsafe { &mut *self.block }
    }

    /// A fiber without a thread.
    fn fresh(&mut self) -> Option<usize> {
        self.idle.pop().or_else(|| {
            let number = self.fibers.len();
            self.fibers.push(Box::new(Fiber::new(number, fiber_main)?));
            Some(number)
        })
    }

    /// The running thread has reached the barrier, or an exchange of its warp.
    fn arrive(&mut self, is_warp: bool, site: SourcePlace) -> NextFiber {
        let (fiber, thread) = (self.current, self.state().current);
        let live = self.state().live as usize;
        let warp = thread as usize / WARP;
        let (group, all) =
            if is_warp { (&mut self.warps[warp], WARP) } else { (&mut self.barrier, live) };
        let other = group.first().copied().filter(|other| !other.site.is(site));
        group.push(Waiter { fiber, thread, site });
        let arrived = group.len();
        if let Some(other) = other {
            let kind = if is_warp { "exchange" } else { "barrier" };
            let cause = format!(
                "divergent {kind}: threads {} and {thread} wait at {} and {}",
                other.thread,
                other.site.text(),
                site.text()
            );
            return self.stop(CUresult::CUDA_ERROR_LAUNCH_FAILED, cause);
        }
        if arrived == all {
            if is_warp {
                self.state().turn[warp] ^= 1;
                let released = self.warps[warp].drain(..).map(|waiter| waiter.fiber);
                self.ready.extend(released);
            } else {
                self.release();
            }
        } else if !is_warp {
            self.state().waiting += 1;
        }
        self.next()
    }

    /// Releases the threads at the barrier.
    fn release(&mut self) {
        self.state().waiting = 0;
        self.ready.extend(self.barrier.drain(..).map(|waiter| waiter.fiber));
    }

    /// Ends the block.
    fn stop(&mut self, code: CUresult, cause: String) -> NextFiber {
        self.stopped = Some(Stopped { code, thread: Some(self.state().current), cause });
        self.go_home()
    }

    fn go_home(&mut self) -> NextFiber {
        let from = self.fibers[self.current].place();
        NextFiber::Go(from, self.home.place())
    }

    /// Chooses the next fiber: a fiber with a thread that can continue, or a fiber for threads that
    /// have not started. If there is none, switches back to the host.
    fn next(&mut self) -> NextFiber {
        let (started, count) = (self.state().started, self.state().count);
        let shuffled = self.order == ThreadOrder::Shuffled;
        let start =
            started < count && (self.ready.is_empty() || !shuffled || self.random.below(2) == 0);
        let chosen = if start {
            self.fresh()
        } else if shuffled && !self.ready.is_empty() {
            let at = self.random.below(self.ready.len());
            self.ready.swap_remove_back(at)
        } else if self.order == ThreadOrder::Reversed {
            self.ready.pop_back()
        } else {
            self.ready.pop_front()
        };
        match chosen {
            Some(fiber) if fiber == self.current => NextFiber::Stay,
            Some(fiber) => {
                let from = self.fibers[self.current].place();
                self.current = fiber;
                NextFiber::Go(from, self.fibers[fiber].place())
            }
            None => {
                if start {
                    self.stopped = Some(no_stack());
                }
                self.go_home()
            }
        }
    }

    /// The reason why threads still wait although none can continue.
    fn deadlock(&self) -> Option<Stopped> {
        // SAFETY: the block that has just run.
        let live = unsafe { (*self.block).live as usize };
        if live == 0 {
            return None;
        }
        let at_barrier = self.barrier.first().map(|first| {
            format!("{} threads at the barrier at {}", self.barrier.len(), first.site.text())
        });
        let warps = self.warps.iter().enumerate().filter_map(|(warp, waiters)| {
            let site = waiters.first()?.site.text();
            let lanes = waiters.len();
            Some(format!("{lanes} of {WARP} lanes of warp {warp} at the exchange at {site}"))
        });
        let groups: Vec<String> = at_barrier.into_iter().chain(warps).collect();
        Some(Stopped {
            code: CUresult::CUDA_ERROR_LAUNCH_FAILED,
            thread: None,
            cause: format!(
                "divergent barrier: {live} threads have not ended and wait forever: {}",
                groups.join(", ")
            ),
        })
    }

    /// Forgets all threads of a block that did not end.
    fn abandon(&mut self) {
        self.barrier.clear();
        self.warps.iter_mut().for_each(Vec::clear);
        self.ready.clear();
        self.idle = (0..self.fibers.len()).collect();
        self.fibers.iter_mut().for_each(|fiber| fiber.restart(fiber_main));
    }
}

fn host_thread() -> u64 {
    // SAFETY: has no preconditions.
    unsafe { libc::pthread_self() as u64 }
}

fn no_stack() -> Stopped {
    Stopped {
        code: CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        thread: None,
        cause: "no memory for the stack of a thread".into(),
    }
}

/// Changes the running block. No switch happens inside.
fn with<T>(change: impl FnOnce(&mut BlockThreads) -> T) -> T {
    // SAFETY: set while a block runs, and then called by the running fiber only.
    change(unsafe { &mut *RUNNING.load(Ordering::Relaxed) })
}

/// Switches, if the fiber is not to stay.
fn leave(next: NextFiber) {
    if let NextFiber::Go(from, to) = next {
        // SAFETY: `from` is the running fiber; `to` was left before or is fresh.
        let left = unsafe { fiber::switch(from, to) };
        came(left);
    }
}

/// Records the stack that was left by the switch to this fiber.
fn came(left: (*const u8, usize)) {
    with(|threads| {
        if std::mem::take(&mut threads.from_home) {
            threads.home.left(left);
        }
    });
}

/// Body of a fiber: starts threads of the block until none is left.
extern "C" fn fiber_main() -> ! {
    came(fiber::arrived());
    loop {
        let (run, values) = with(|threads| (threads.run, threads.values));
        if let Some(run) = run {
            // SAFETY: the contract of `BlockThreads::block`.
            unsafe { run(values) };
        }
        leave(with(|threads| {
            threads.idle.push(threads.current);
            threads.next()
        }));
    }
}

extern "C" fn wait(warp: c_int, file: *const c_char, line: c_int) {
    leave(with(|threads| threads.arrive(warp != 0, SourcePlace { file, line })));
}

extern "C" fn ended() {
    with(BlockThreads::release);
}

extern "C" fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    let copy = Late { to, from, bytes };
    with(|threads| threads.copies().issue(copy));
    // SAFETY: the kernel passed this memory; if it is not accessible, a signal ends the block.
    unsafe { copy.poison() };
}

extern "C" fn commit() {
    with(|threads| threads.copies().commit());
}

extern "C" fn arrive(prior: c_uint) {
    for copy in with(|threads| threads.copies().wait(prior as usize)) {
        // SAFETY: as above.
        unsafe { copy.run() };
    }
}

extern "C" fn fail(code: c_int, what: *const c_char, file: *const c_char, line: c_int) -> ! {
    let code = match code {
        710 => CUresult::CUDA_ERROR_ASSERT,
        716 => CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        _ => CUresult::CUDA_ERROR_LAUNCH_FAILED,
    };
    // SAFETY: string constants of the module.
    let what = unsafe { CStr::from_ptr(what) }.to_string_lossy().into_owned();
    stop(code, format!("{what} at {}", SourcePlace { file, line }.text()))
}

/// Ends the block from the running thread.
pub(super) fn stop(code: CUresult, cause: String) -> ! {
    leave(with(|threads| threads.stop(code, cause)));
    // The host never continues a stopped thread.
    process::abort()
}

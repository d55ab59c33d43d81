//! The simulated machine: devices, their streams, and the times at which streams advance.
//!
//! No command runs when it is enqueued. Streams advance when the host has to see a result, in an
//! order that the seed decides and that only stream order and events restrict.

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::sys::CUresult;

use super::graph::{BuiltExec, BuiltGraph, GraphRun};
use super::point::StreamPoint;
use super::stream::{CommandTask, QueuedCommand, SimEvent, SimStream};
use super::work::DeviceWork;
use crate::ground::{DeviceFault, HandleTable, SeededRandom, StandinSettings};
use crate::kernel::{KernelRunner, LoadedModule};
use crate::memory::AddressSpace;

/// Largest number of commands that a query runs.
const QUERY_COMMANDS: usize = 4;

/// One device.
#[derive(Debug)]
pub(crate) struct SimDevice {
    /// Handle of its primary context.
    pub(crate) context: u64,
    /// Number of times that the context was retained and not released.
    pub(crate) retained: usize,
    /// Handle of its default stream.
    pub(crate) default_stream: u64,
    /// The error that all calls return from now on.
    pub(crate) fault: Option<DeviceFault>,
}

/// A kernel, as the host refers to it.
#[derive(Clone, Debug)]
pub(crate) struct LoadedFunction {
    /// Handle of its module.
    pub(crate) owner: u64,
    pub(crate) module: Arc<LoadedModule>,
    /// Index of the kernel in the module.
    pub(crate) kernel: usize,
    /// Largest number of bytes of dynamic shared memory of a launch.
    pub(crate) dynamic_max: usize,
    /// Preferred share of a multiprocessor's memory for shared memory, in percent; -1 for none.
    pub(crate) carve_out: c_int,
}

/// The state of the driver.
#[derive(Debug)]
pub(crate) struct SimMachine {
    pub(crate) devices: Vec<SimDevice>,
    pub(crate) memory: AddressSpace,
    /// Largest number of bytes of dynamic shared memory that a kernel can be permitted.
    pub(crate) shared_max: usize,
    pub(crate) streams: HandleTable<SimStream>,
    pub(crate) events: HandleTable<SimEvent>,
    /// Modules, each with the number of its device.
    pub(crate) modules: HandleTable<(usize, Arc<LoadedModule>)>,
    pub(crate) functions: HandleTable<LoadedFunction>,
    pub(crate) graphs: HandleTable<BuiltGraph>,
    pub(crate) execs: HandleTable<BuiltExec>,
    engine: KernelRunner,
    random: SeededRandom,
    /// Latest end of a command that the host has seen, see [`SimStream::ends`].
    now: u64,
}

/// Eagerness of streams that the host does not wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    /// Not at all.
    Idle,
    /// As often as other streams.
    Fair,
    /// Up to 63 commands of any streams run first; then as [`Mood::Fair`].
    Eager,
}

impl SimMachine {
    pub(crate) fn new(settings: &StandinSettings) -> Self {
        let mut contexts: HandleTable<()> = HandleTable::new();
        let mut streams = HandleTable::new();
        let devices = (0..settings.devices).map(|device| SimDevice {
            context: contexts.insert(()),
            retained: 0,
            default_stream: streams.insert(SimStream::new(device, true)),
            fault: None,
        });
        let devices = devices.collect();
        Self {
            devices,
            memory: AddressSpace::new(settings.devices, settings.memory),
            shared_max: settings.shared,
            streams,
            events: HandleTable::new(),
            modules: HandleTable::new(),
            functions: HandleTable::new(),
            graphs: HandleTable::new(),
            execs: HandleTable::new(),
            engine: KernelRunner::new(settings.seed),
            random: SeededRandom::new(settings.seed, 0),
            now: 0,
        }
    }

    /// The code of the device's fault, if it has one.
    pub(crate) fn healthy(&self, device: usize) -> Result<(), CUresult> {
        self.devices[device].fault.as_ref().map_or(Ok(()), |fault| Err(fault.code))
    }

    /// Appends work to a stream, after the points `after` in other streams.
    pub(crate) fn enqueue(
        &mut self,
        stream: u64,
        after: Vec<StreamPoint>,
        work: DeviceWork,
    ) -> Result<StreamPoint, CUresult> {
        let enqueued = self.now;
        self.push(stream, QueuedCommand { after, enqueued, task: CommandTask::Work(work) })
    }

    /// Appends a launch of a graph to a stream.
    pub(crate) fn enqueue_graph(
        &mut self,
        stream: u64,
        exec: u64,
    ) -> Result<StreamPoint, CUresult> {
        let BuiltExec { plan, last, .. } = self.execs.get(exec)?;
        let command = QueuedCommand {
            after: last.iter().copied().collect(),
            enqueued: self.now,
            task: CommandTask::Graph(GraphRun::new(Arc::clone(plan))),
        };
        let point = self.push(stream, command)?;
        self.execs.get_mut(exec)?.last = Some(point);
        Ok(point)
    }

    fn push(&mut self, stream: u64, mut command: QueuedCommand) -> Result<StreamPoint, CUresult> {
        let device = self.streams.get(stream)?.device;
        self.healthy(device)?;
        command.after.extend(self.legacy(stream)?);
        let queue = self.streams.get_mut(stream)?;
        queue.queue.push_back(command);
        queue.enqueued += 1;
        Ok(StreamPoint { stream, at: queue.enqueued })
    }

    /// The order with the default stream: a command of it comes after the earlier commands of all
    /// blocking streams of the device, and a command of these after its earlier commands.
    fn legacy(&self, stream: u64) -> Result<Vec<StreamPoint>, CUresult> {
        let own = self.streams.get(stream)?;
        let default = self.devices[own.device].default_stream;
        let point = |(stream, of): (u64, &SimStream)| StreamPoint { stream, at: of.enqueued };
        Ok(if stream == default {
            let others = self
                .streams
                .iter()
                .filter(|(other, of)| *other != stream && of.device == own.device && of.blocking);
            others.map(point).collect()
        } else if own.blocking {
            vec![point((default, self.streams.get(default)?))]
        } else {
            vec![]
        })
    }

    /// Whether all commands before a point are done.
    pub(crate) fn is_done(&self, point: StreamPoint) -> bool {
        self.streams.get(point.stream).map_or(true, |stream| stream.done >= point.at)
    }

    /// Time at which a point is done, see [`SimStream::ends`].
    pub(crate) fn time(&self, point: StreamPoint) -> u64 {
        let stream = self.streams.get(point.stream).ok();
        let last = (point.at as usize).checked_sub(1);
        let end = stream.zip(last).and_then(|(stream, last)| stream.ends.get(last).copied());
        // A stream that is gone was done before.
        end.unwrap_or(if stream.is_some() { 0 } else { self.now })
    }

    /// The current end of a stream.
    pub(crate) fn end(&self, stream: u64) -> Result<StreamPoint, CUresult> {
        Ok(StreamPoint { stream, at: self.streams.get(stream)?.enqueued })
    }

    /// Runs streams until all points are done, and returns true. Returns false if the rest of the
    /// work waits for messages of other processes, and an error if a device of a point has a fault.
    pub(crate) fn advance(&mut self, points: &[StreamPoint]) -> Result<bool, CUresult> {
        let mood = [Mood::Idle, Mood::Fair, Mood::Eager][self.random.below(3)];
        let waiting = |machine: &Self| points.iter().any(|point| !machine.is_done(*point));
        if mood == Mood::Eager && waiting(self) {
            let commands = self.random.below(64);
            self.run_some(commands);
        }
        let needed = self.needed(points);
        let wanted = |machine: &Self| {
            let mut able = machine.able();
            able.retain(|stream| mood != Mood::Idle || needed.contains(stream));
            able
        };
        while waiting(self) {
            let mut able = wanted(self);
            if able.is_empty() {
                if needed.iter().any(|stream| self.awaits_others(*stream)) {
                    return Ok(false);
                }
                // Messages of other processes may have arrived in between.
                able = wanted(self);
            }
            assert!(!able.is_empty(), "the host waits for what can never run");
            let stream = able[self.random.below(able.len())];
            self.step(stream);
        }
        self.now = points.iter().map(|point| self.time(*point)).fold(self.now, u64::max);
        self.sweep();
        for point in points {
            if let Ok(stream) = self.streams.get(point.stream) {
                self.healthy(stream.device)?;
            }
        }
        Ok(true)
    }

    /// The ends of all streams of a device.
    pub(crate) fn ends(&self, device: usize) -> Vec<StreamPoint> {
        let of_device = self.streams.iter().filter(|(_, stream)| stream.device == device);
        of_device
            .map(|(handle, stream)| StreamPoint { stream: handle, at: stream.enqueued })
            .collect()
    }

    /// Runs a random number of commands, and returns whether a point is done.
    pub(crate) fn query(&mut self, point: StreamPoint) -> bool {
        let commands = self.random.below(QUERY_COMMANDS + 1);
        self.run_some(commands);
        let done = self.is_done(point);
        if done {
            self.now = self.now.max(self.time(point));
        }
        self.sweep();
        done
    }

    fn run_some(&mut self, commands: usize) {
        for _ in 0..commands {
            let able = self.able();
            if able.is_empty() {
                return;
            }
            let stream = able[self.random.below(able.len())];
            self.step(stream);
        }
    }

    /// Streams with a first command that may run.
    fn able(&self) -> Vec<u64> {
        let may_run = |of: &SimStream| self.reached(of).is_some_and(|task| self.is_ready(task));
        self.streams.iter().filter(|(_, of)| may_run(of)).map(|(stream, _)| stream).collect()
    }

    /// The first command of a stream, if everything before it is done.
    fn reached<'a>(&self, stream: &'a SimStream) -> Option<&'a CommandTask> {
        let first = stream.queue.front()?;
        first.after.iter().all(|point| self.is_done(*point)).then_some(&first.task)
    }

    /// Whether a reached command waits for no other process. A command with freed memory is ready,
    /// so that it reports the error.
    fn is_ready(&self, task: &CommandTask) -> bool {
        match task {
            CommandTask::Work(DeviceWork::Exchange(exchange)) => {
                let work = DeviceWork::Exchange(exchange.clone());
                work.check(&self.memory).is_err() || exchange.is_ready()
            }
            _ => true,
        }
    }

    /// Whether a stream has reached an exchange that other processes have not reached.
    fn awaits_others(&self, stream: u64) -> bool {
        let stream = self.streams.get(stream).ok();
        let reached = stream.and_then(|stream| self.reached(stream));
        reached.is_some_and(|task| !self.is_ready(task))
    }

    /// Whether a stream of a device has reached an exchange that other processes have not reached.
    pub(crate) fn has_stopped(&self, device: usize) -> bool {
        let mut of_device = self.streams.iter().filter(|(_, stream)| stream.device == device);
        of_device.any(|(handle, _)| self.awaits_others(handle))
    }

    /// Streams that must run before these points are done.
    fn needed(&self, points: &[StreamPoint]) -> Vec<u64> {
        let mut needed = vec![];
        let mut open: Vec<StreamPoint> = points.to_vec();
        let mut seen: Vec<StreamPoint> = vec![];
        while let Some(point) = open.pop() {
            if self.is_done(point) || seen.contains(&point) {
                continue;
            }
            seen.push(point);
            let Ok(stream) = self.streams.get(point.stream) else { continue };
            if !needed.contains(&point.stream) {
                needed.push(point.stream);
            }
            let commands = stream.queue.iter().take((point.at - stream.done) as usize);
            open.extend(commands.flat_map(|command| command.after.iter().copied()));
        }
        needed
    }

    /// Runs the first command of a stream, or one node of it.
    fn step(&mut self, handle: u64) {
        let Some(begin) = self.begin(handle) else { return };
        let Ok(stream) = self.streams.get_mut(handle) else { return };
        let device = stream.device;
        let Some(first) = stream.queue.front_mut() else { return };
        let (work, is_last, duration) = match &mut first.task {
            CommandTask::Work(DeviceWork::Nothing) => (DeviceWork::Nothing, true, 0),
            CommandTask::Work(work) => (std::mem::replace(work, DeviceWork::Nothing), true, 1),
            CommandTask::Graph(run) => {
                let work = run.take(&mut self.random).unwrap_or(DeviceWork::Nothing);
                (work, run.is_done(), run.len() as u64)
            }
        };
        if is_last {
            stream.queue.pop_front();
            stream.done += 1;
            stream.ends.push(begin + duration);
        }
        if let Err(fault) = work.run(&mut self.engine, &self.memory) {
            self.fail(device, fault);
        }
    }

    /// Time at which the first command of a stream begins, see [`SimStream::ends`].
    fn begin(&self, handle: u64) -> Option<u64> {
        let stream = self.streams.get(handle).ok()?;
        let first = stream.queue.front()?;
        let before = first.after.iter().map(|point| self.time(*point));
        let own = stream.ends.last().copied().unwrap_or(0);
        Some(before.fold(own.max(first.enqueued), u64::max))
    }

    /// Records a fault of a device, and drops the commands of its streams.
    pub(crate) fn fail(&mut self, device: usize, fault: DeviceFault) {
        let hint = match fault.code {
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS => "; `cargo xtask standin --asan` names the line",
            _ => "",
        };
        eprintln!("meristem-standin: device {device}: {:?}: {}{hint}", fault.code, fault.cause);
        self.devices[device].fault.get_or_insert(fault);
        for (_, stream) in self.streams.iter_mut().filter(|(_, of)| of.device == device) {
            stream.queue.clear();
            stream.done = stream.enqueued;
        }
    }

    /// Destroys all objects of a device's context after its work is done, except the default stream
    /// and graphs that are not executable, which belong to no device.
    pub(crate) fn close(&mut self, device: usize) {
        // After a fault, which has been reported, there is nothing to wait for. Exchanges that
        // other processes never reach end with the context.
        let ends = self.ends(device);
        let _ = self.advance(&ends);
        let default = self.devices[device].default_stream;
        self.streams.retain(|handle, of| of.device != device || handle == default);
        self.events.retain(|_, of| of.device != device);
        self.execs.retain(|_, of| of.device != device);
        let gone = |(handle, (of, _)): (u64, &(usize, _))| (*of == device).then_some(handle);
        let modules: Vec<u64> = self.modules.iter().filter_map(gone).collect();
        self.functions.retain(|_, of| !modules.contains(&of.owner));
        self.modules.retain(|_, (of, _)| *of != device);
        self.memory.close(device);
    }

    /// Removes destroyed streams that are done.
    fn sweep(&mut self) {
        self.streams.retain(|_, stream| !stream.destroyed || !stream.queue.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::work::{CopySource, CopyTarget, CopyWork, FillWork};
    use super::*;
    use crate::ground::SHARED_MAX;
    use crate::memory::MemoryKind;

    /// A machine with two streams that do not block, and some memory on the device and on the host.
    struct MachineFixture {
        machine: SimMachine,
        streams: [u64; 2],
        on_device: u64,
        on_host: u64,
    }

    impl MachineFixture {
        fn new(seed: u64) -> Self {
            let settings =
                StandinSettings { seed, devices: 2, memory: 1 << 20, shared: SHARED_MAX };
            let mut machine = SimMachine::new(&settings);
            let streams = [(); 2].map(|()| machine.streams.insert(SimStream::new(0, false)));
            let [on_device, on_host] = [MemoryKind::Device(0), MemoryKind::Pinned]
                .map(|kind| machine.memory.allocate(kind, 4).unwrap());
            Self { machine, streams, on_device, on_host }
        }

        fn fill(&mut self, stream: u64, value: u8, after: &[StreamPoint]) -> StreamPoint {
            let fill = FillWork { to: self.on_device, value: vec![value], count: 4 };
            self.machine.enqueue(stream, after.to_vec(), DeviceWork::Fill(fill)).unwrap()
        }

        /// Copies to the host, waits, and returns the first byte there.
        fn look(&mut self, stream: u64, after: &[StreamPoint]) -> u8 {
            let (from, to) = (CopySource::Device(self.on_device), CopyTarget::Host(self.on_host));
            let copy = DeviceWork::Copy(CopyWork { from, to, bytes: 4 });
            let point = self.machine.enqueue(stream, after.to_vec(), copy).unwrap();
            assert_eq!(self.machine.advance(&[point]), Ok(true));
            // SAFETY: the fixture's own memory.
            unsafe { *(self.on_host as *const u8) }
        }
    }

    /// Results of a case over many seeds.
    fn over_seeds(case: impl Fn(MachineFixture) -> u8) -> BTreeSet<u8> {
        (0..40).map(|seed| case(MachineFixture::new(seed))).collect()
    }

    const POISON: u8 = crate::memory::POISON[0];

    #[test]
    fn only_waits_order_streams() {
        let unordered = over_seeds(|mut of| {
            let [a, b] = of.streams;
            of.fill(a, 1, &[]);
            of.look(b, &[])
        });
        assert_eq!(unordered, BTreeSet::from([POISON, 1]));
        let ordered = over_seeds(|mut of| {
            let [a, b] = of.streams;
            let point = of.fill(a, 1, &[]);
            // The point is before the second fill, which may come before or after the copy.
            of.fill(a, 2, &[]);
            of.look(b, &[point])
        });
        assert_eq!(ordered, BTreeSet::from([1, 2]));
    }

    /// Times are of a device that runs streams at once, whatever the order in which they ran here.
    #[test]
    fn times_follow_from_the_order_alone() {
        let times = over_seeds(|mut of| {
            let [a, b] = of.streams;
            let first = of.fill(a, 1, &[]);
            let second = of.fill(a, 1, &[]);
            // Beside the second fill, and after it.
            let beside = of.fill(b, 1, &[first]);
            let after = of.fill(b, 1, &[second]);
            of.look(b, &[]);
            // The host has seen the end of the copy, the fourth command of a chain.
            let late = of.fill(a, 1, &[]);
            of.look(a, &[]);
            let times = [first, second, beside, after, late].map(|point| of.machine.time(point));
            assert_eq!(times, [1, 2, 2, 3, 5]);
            0
        });
        assert_eq!(times.len(), 1);
    }

    #[test]
    fn the_default_stream_is_in_order_with_those_that_block() {
        let results = over_seeds(|mut of| {
            let blocking = of.machine.streams.insert(SimStream::new(0, true));
            let default = of.machine.devices[0].default_stream;
            of.fill(blocking, 1, &[]);
            of.fill(default, 2, &[]);
            of.look(blocking, &[])
        });
        assert_eq!(results, BTreeSet::from([2]));
    }

    #[test]
    fn commands_of_a_destroyed_stream_run_and_queries_get_there() {
        let results = over_seeds(|mut of| {
            let [a, b] = of.streams;
            let point = of.fill(a, 1, &[]);
            of.machine.streams.get_mut(a).unwrap().destroyed = true;
            let queries = (0..1000).take_while(|_| !of.machine.query(point)).count();
            assert!(queries < 1000, "never done");
            assert!(of.machine.streams.get(a).is_err(), "done and destroyed, and still there");
            of.look(b, &[])
        });
        assert_eq!(results, BTreeSet::from([1]));
    }

    #[test]
    fn a_fault_stays_on_its_device() {
        let mut of = MachineFixture::new(0);
        let [a, b] = of.streams;
        let point = of.fill(a, 1, &[]);
        of.machine.memory.free(of.on_device, false);
        assert_eq!(of.machine.advance(&[point]), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        let later = of.machine.enqueue(b, vec![], DeviceWork::Nothing);
        assert_eq!(later, Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        let cause = &of.machine.devices[0].fault.as_ref().unwrap().cause;
        assert!(cause.starts_with("a fill of 4 bytes at 0x"), "{cause}");
        assert!(cause.ends_with("at byte 0 of freed allocation 0 of 4 bytes"), "{cause}");
        let other = of.machine.devices[1].default_stream;
        assert!(of.machine.enqueue(other, vec![], DeviceWork::Nothing).is_ok());
        let ends = of.machine.ends(1);
        assert_eq!(of.machine.advance(&ends), Ok(true));
    }

    #[test]
    fn closing_a_device_frees_what_is_its_own() {
        let mut of = MachineFixture::new(0);
        let other = of.machine.memory.allocate(MemoryKind::Device(1), 4).unwrap();
        of.fill(of.streams[0], 1, &[]);
        of.machine.close(0);
        assert_eq!(of.machine.memory.available(0), 1 << 20);
        assert_eq!(of.machine.memory.owner(other, 4), Some(MemoryKind::Device(1)));
        assert!(of.machine.streams.get(of.streams[0]).is_err());
        assert!(of.machine.streams.get(of.machine.devices[0].default_stream).is_ok());
    }
}

//! Devices of a run, each opened once, with one stream per env.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use meristem_data::{Dataset, DatasetFiles, Residency, Split, cache};
use meristem_device::{
    Counts, Device, DeviceId, DeviceOptions, HotScope, ScopePolicy, Stream, Tensor, Trace,
    TraceSpan, read_back_f64,
};
use meristem_nn::Metrics;

use crate::config::devices::Devices;
use crate::error::Result;

/// Properties of a device that determine the limits of a hot scope on it.
pub(crate) struct ScopedDevice {
    /// Number of this process's envs on the device.
    pub(crate) envs: u64,
    /// Whether launches are graphs, which read the addresses of their operands from tables.
    pub(crate) has_graphs: bool,
}

/// The envs of this process: their devices, each opened once, and one stream per env.
#[derive(Clone)]
pub(crate) struct OpenDevices {
    /// Device of each env of the run.
    pub(super) ids: Vec<DeviceId>,
    /// Range of this process's envs.
    envs: Range<usize>,
    /// Distinct devices of these envs, in the order of their first env; then those of ranks with a
    /// replica, and those of policies, if they are not among them.
    devices: Vec<Device>,
    /// Device of each of these envs, as an index into `devices`.
    pub(super) device_of: Vec<usize>,
    /// Device of each rank with a replica of the one env, as an index into `devices`; empty if
    /// ranks are not threads.
    rank_devices: Vec<usize>,
    /// Stream of each of these envs.
    streams: Vec<Stream>,
    /// Device of the policy of each rank, as an index into `devices`.
    policies: Vec<usize>,
    /// Whether memory is limited, so that an allocation may have to wait.
    capped: bool,
    trace: Option<Trace>,
}

impl OpenDevices {
    /// Opens the devices of this process's envs and of its policies. `placed` has all envs of the
    /// run.
    ///
    /// # Errors
    /// A device that does not exist or is not part of this build.
    pub(crate) fn open(
        placed: &Devices,
        envs: Range<usize>,
        options: &DeviceOptions,
    ) -> Result<Self> {
        let mut devices: Vec<Device> = vec![];
        let mut open = |id: DeviceId| {
            let known = devices.iter().position(|device| device.id() == id);
            Ok(match known {
                Some(index) => index,
                None => {
                    devices.push(Device::open(id, options)?);
                    devices.len() - 1
                }
            })
        };
        let ids = &placed.of_envs;
        let device_of = ids[envs.clone()].iter().map(|id| open(*id)).collect::<Result<Vec<_>>>()?;
        let ranks = placed.of_ranks.iter();
        let rank_devices = ranks.map(|id| open(*id)).collect::<Result<Vec<_>>>()?;
        let policies = placed.of_policies.iter();
        let policies = policies.map(|id| open(*id)).collect::<Result<Vec<_>>>()?;
        let stream = |(env, &at): (usize, &usize)| devices[at].stream(&format!("env {env}"));
        let streams = envs.clone().zip(&device_of).map(stream).collect();
        let (ids, trace, capped) =
            (ids.clone(), options.trace.clone(), options.memory_limit.is_some());
        Ok(Self { ids, envs, devices, device_of, rank_devices, streams, policies, capped, trace })
    }

    /// The devices of a run with the first `count` of these envs, and of its policies.
    pub(crate) fn of_first_envs(&self, count: usize) -> Self {
        let mut first = self.clone();
        first.ids.truncate(count);
        first.device_of.truncate(count);
        first.streams.truncate(count);
        first.envs = 0..first.ids.len();
        first
    }

    /// Range of this process's envs.
    pub(crate) fn envs(&self) -> Range<usize> {
        self.envs.clone()
    }

    /// Number and stream of each of this process's envs.
    pub(crate) fn streams_by_env(&self) -> impl Iterator<Item = (usize, &Stream)> {
        self.envs().zip(&self.streams)
    }

    /// The device of the policy of each rank.
    pub(crate) fn of_policies(&self) -> Vec<Device> {
        self.policies.iter().map(|device| self.devices[*device].clone()).collect()
    }

    /// The distinct devices of envs, of ranks with a replica, and of policies.
    pub(crate) fn distinct(&self) -> &[Device] {
        &self.devices
    }

    /// The device of a rank with a replica of the one env.
    pub(super) fn of_rank(&self, rank: usize) -> &Device {
        &self.devices[self.rank_devices.get(rank).copied().unwrap_or(self.device_of[0])]
    }

    /// The device of each env of the run, or of each of several replicas of its one env.
    pub(super) fn of_parts(&self, replicas: usize) -> Vec<DeviceId> {
        match self.rank_devices.len() {
            0 | 1 => self.ids.repeat(replicas),
            ranks => (0..ranks).map(|rank| self.of_rank(rank).id()).collect(),
        }
    }

    /// Whether ranks of this process that train one host, or one policy, are on different devices:
    /// their exchanges pass through host memory.
    pub(crate) fn are_ranks_apart(&self) -> bool {
        let are_apart = |devices: &[usize]| devices.windows(2).any(|pair| pair[0] != pair[1]);
        are_apart(&self.rank_devices) || are_apart(&self.policies)
    }

    /// The devices of all envs of the run, in the order of their first env; then those of ranks
    /// with a replica.
    pub(crate) fn env_devices(&self) -> Vec<DeviceId> {
        let of_ranks = self.rank_devices.iter().map(|device| self.devices[*device].id());
        let mut ids: Vec<DeviceId> = self.ids.iter().copied().chain(of_ranks).collect();
        ids.dedup();
        ids
    }

    /// Opens a span of the calling thread in the trace, if there is one. Dropping it ends the span.
    pub(crate) fn span<N: Into<Cow<'static, str>>>(
        &self,
        name: impl FnOnce() -> N,
    ) -> Option<TraceSpan> {
        self.trace.as_ref().map(|trace| trace.span(name()))
    }

    /// Streams of this process's envs.
    pub(crate) fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// Worker threads of the first device.
    pub(crate) fn threads(&self) -> usize {
        self.devices.first().map_or(0, |device| device.threads())
    }

    /// Maximum number of workers of a device.
    pub(crate) fn workers(&self) -> u64 {
        self.devices.iter().map(|device| device.threads() as u64).max().unwrap_or(1)
    }

    /// Loads a split of `files` onto each device that has envs; the training split onto those of
    /// ranks with a replica, too.
    pub(crate) fn load(
        &self,
        files: &Arc<DatasetFiles>,
        split: Split,
        residency: Residency,
    ) -> Result<Vec<Arc<Dataset>>> {
        let load = |device| Ok(cache::load_files(device, files, split, residency)?);
        let of_ranks = self.rank_devices.iter().filter(|_| split == Split::Train);
        let last = self.device_of.iter().chain(of_ranks).max();
        self.devices[..last.map_or(0, |last| last + 1)].iter().map(load).collect()
    }

    /// Opens a scope on each device for this thread. `permitted` has the limits on a device; if
    /// memory is limited, an allocation may also wait.
    #[track_caller]
    pub(crate) fn hot_scopes(
        &self,
        name: &'static str,
        policy: ScopePolicy,
        permitted: impl Fn(&ScopedDevice) -> Counts,
    ) -> Vec<HotScope> {
        let mut scopes = vec![];
        for (index, device) in self.devices.iter().enumerate() {
            // A thread trains one replica.
            let replicas = u64::from(self.rank_devices.contains(&index));
            let envs = self.device_of.iter().filter(|&&at| at == index).count() as u64;
            let envs = envs.max(replicas);
            let has_graphs = matches!(device.id(), DeviceId::Cuda(_));
            let mut permitted = permitted(&ScopedDevice { envs, has_graphs });
            if self.capped {
                permitted.synchronizations += permitted.allocations;
            }
            scopes.push(device.hot_scope(name, policy).permit(permitted));
        }
        scopes
    }

    /// Reads the metrics of this process's envs or replicas, `tensors` in their order. One copy and
    /// one wait per device.
    pub(crate) fn read_metrics(&self, tensors: &[&Tensor]) -> Result<Vec<Metrics>> {
        let mut metrics = vec![Metrics::default(); tensors.len()];
        for device in &self.devices {
            let envs: Vec<usize> =
                (0..tensors.len()).filter(|&env| tensors[env].device() == device).collect();
            let of_device: Vec<&Tensor> = envs.iter().map(|&env| tensors[env]).collect();
            for (&env, raw) in envs.iter().zip(read_back_f64(&of_device)?) {
                metrics[env] = Metrics::parse(&raw);
            }
        }
        Ok(metrics)
    }
}

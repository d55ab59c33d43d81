//! The machine of a run: its devices, each opened once, and one stream per env.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use meristem_data::{Dataset, DatasetSpec, Residency, Split, cache};
use meristem_device::{
    Counts, Device, DeviceId, DeviceOptions, HotScope, Policy, Span, Stream, Tensor, Trace,
    read_back_f64,
};
use meristem_nn::Metrics;

use crate::config::devices::Devices;
use crate::error::Result;

/// The envs of this process: their devices, each opened once, and one stream per env (S1).
#[derive(Clone)]
pub(crate) struct Machine {
    /// The device of each env of the run.
    pub(super) ids: Vec<DeviceId>,
    /// The envs of this process.
    envs: Range<usize>,
    /// Their distinct devices, in the order of their first env, and the policy's if it is none of
    /// them.
    devices: Vec<Device>,
    /// Device of each of them: index into `devices`.
    pub(super) device_of: Vec<usize>,
    /// Stream of each of them.
    streams: Vec<Stream>,
    /// The policy's device: index into `devices`.
    policy: usize,
    /// Whether memory is capped, so that an allocation may have to wait for some.
    capped: bool,
    trace: Option<Trace>,
}

impl Machine {
    /// Opens the devices of this process' envs, and that of the policy. `placed` has all envs of
    /// the run.
    ///
    /// # Errors
    /// A device that is not there, or not part of this build.
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
        let policy = open(placed.policy)?;
        let stream = |(env, &at): (usize, &usize)| devices[at].stream(&format!("env {env}"));
        let streams = envs.clone().zip(&device_of).map(stream).collect();
        let (ids, trace, capped) =
            (ids.clone(), options.trace.clone(), options.memory_limit.is_some());
        Ok(Self { ids, envs, devices, device_of, streams, policy, capped, trace })
    }

    /// The envs of this process.
    pub(crate) fn envs(&self) -> Range<usize> {
        self.envs.clone()
    }

    /// Each of them with its stream.
    pub(crate) fn streams_by_env(&self) -> impl Iterator<Item = (usize, &Stream)> {
        self.envs().zip(&self.streams)
    }

    /// The policy's device.
    pub(crate) fn policy_device(&self) -> &Device {
        &self.devices[self.policy]
    }

    /// The distinct devices of envs and policy.
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Names of the devices of all envs of the run, in the order of their first env.
    pub(crate) fn device_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.ids.iter().map(DeviceId::to_string).collect();
        names.dedup();
        names
    }

    /// Begins a span of the calling thread in the trace, if there is one; it ends when it is
    /// dropped.
    pub(crate) fn span<N: Into<Cow<'static, str>>>(
        &self,
        name: impl FnOnce() -> N,
    ) -> Option<Span> {
        self.trace.as_ref().map(|trace| trace.span(name()))
    }

    /// The streams, one per env of this process.
    pub(crate) fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// A split, resident on each device that has envs.
    pub(crate) fn load(
        &self,
        spec: &DatasetSpec,
        split: Split,
        residency: Residency,
    ) -> Result<Vec<Arc<Dataset>>> {
        let load = |device| Ok(cache::load(device, spec, split, residency)?);
        let with_envs = self.device_of.iter().max().map_or(0, |last| last + 1);
        self.devices[..with_envs].iter().map(load).collect()
    }

    /// Opens a scope on each device for this thread, with what `permitted` says of so many envs.
    /// Where memory is capped, an allocation may also wait for memory that others still use.
    #[track_caller]
    pub(crate) fn hot_scopes(
        &self,
        name: &'static str,
        policy: Policy,
        permitted: impl Fn(u64) -> Counts,
    ) -> Vec<HotScope> {
        let mut scopes = vec![];
        for (index, device) in self.devices.iter().enumerate() {
            let envs = self.device_of.iter().filter(|&&at| at == index).count();
            let mut permitted = permitted(envs as u64);
            if self.capped {
                permitted.synchronizations += permitted.allocations;
            }
            scopes.push(device.hot_scope(name, policy).permit(permitted));
        }
        scopes
    }

    /// The metrics of this process' envs or replicas (`tensors` in their order): one copy and one
    /// wait per device (H1).
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

//! Ranks with elements on GPUs, one GPU per process. Elements move over NCCL, from device to
//! device; another transport connects the processes for control messages.
//!
//! NCCL has no deadlines, and does not detect different calls of the ranks. Every exchange
//! therefore begins with an agreement of the processes, and calls NCCL afterwards. Steps that can
//! fail on one rank alone come before the agreement. A thread of each rank watches the group
//! ([`watcher`]) and aborts the device's exchanges when a rank is lost. Elements in host memory are
//! exchanged over the control transport.

mod watcher;

use std::time::Duration;

use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, Owner, PeerPlace, Peers, Stream, Tensor,
};

use self::watcher::DeviceWatcher;
use crate::check::GroupRank;
use crate::error::Result;
use crate::packing::{Packing, unpack};
use crate::spans::Spans;
use crate::transport::{CollectiveCall, Parcel, Parcels, Sum, Transport, check_parcels, others};

/// Environment variables that turn on NCCL's log.
pub(crate) const DEBUG_ENVIRONMENT: &[(&str, &str)] =
    if cfg!(feature = "cuda") { &[("NCCL_DEBUG", "INFO")] } else { &[] };

/// The transport of a rank.
pub(crate) struct Nccl {
    /// The device of the latest exchange, with its membership and watcher.
    member: Option<(Device, Peers, DeviceWatcher)>,
    /// Number of groups of devices joined so far.
    memberships: u64,
    control: Box<dyn Transport>,
    /// A stream of the CPU, for control messages.
    host: Stream,
    packing: Packing,
}

impl Nccl {
    /// Creates a transport for the ranks that `control` connects.
    ///
    /// # Errors
    /// No NCCL, or a build without CUDA.
    pub(crate) fn over(control: Box<dyn Transport>) -> Result<Nccl> {
        Peers::library()?;
        let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
        let host = Device::open(DeviceId::Cpu(0), &options)?.stream("nccl, control");
        Ok(Nccl { member: None, memberships: 0, control, host, packing: Packing::default() })
    }

    /// The group of devices of the stream's device. All ranks join it in their first exchange, and
    /// again after a change of device, which all ranks must make together; they wait for each
    /// other.
    fn member(&mut self, stream: &Stream) -> Result<(&Peers, &DeviceWatcher)> {
        if !matches!(&self.member, Some((device, ..)) if device == stream.device()) {
            self.member = None;
            let (peers, watcher) = self.join(stream)?;
            self.member = Some((stream.device().clone(), peers, watcher));
        }
        match &self.member {
            Some((_, peers, watcher)) => Ok((peers, watcher)),
            None => unreachable!("set above"),
        }
    }

    fn join(&mut self, stream: &Stream) -> Result<(Peers, DeviceWatcher)> {
        let (rank, size) = (self.control.rank(), self.control.size());
        let name = Tensor::zeros(&self.host, [Peers::ID_BYTES], DType::U8, Owner::Collectives)?;
        let call = CollectiveCall::on("nccl, join", &name);
        if rank == 0 {
            name.copy_from_slice(&Peers::new_id(stream)?)?;
            let sends = others(0, size).map(|peer| Parcel::new(peer, &name));
            let sends: Vec<Parcel> = sends.collect::<Result<_>>()?;
            self.control.exchange(&call, &self.host, &sends, &[])?;
        } else {
            self.control.exchange(&call, &self.host, &[], &[Parcel::new(0, &name)?])?;
        }
        let mut id = [0; Peers::ID_BYTES];
        id.copy_from_slice(&name.to_vec::<u8>()?);
        let patience = watcher::patience(self.control.deadline());
        let place = PeerPlace { id, rank, size, patience };
        self.memberships += 1;
        DeviceWatcher::join(&mut *self.control, stream, &place, self.memberships)
    }
}

impl Transport for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn exchange(
        &mut self,
        call: &CollectiveCall,
        stream: &Stream,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<()> {
        if matches!(stream.device().id(), DeviceId::Cpu(_)) {
            return self.control.exchange(call, stream, sends, receives);
        }
        let group = GroupRank { rank: self.rank(), size: self.size() };
        check_parcels(call.operation, stream, group, Parcels { sends, receives })?;
        // All steps that can fail on this rank alone come before the agreement. After it the other
        // devices wait for this one.
        let (peers, watcher) = self.member(stream)?;
        watcher.check(call.operation)?;
        let peers = peers.clone();
        let packed = self.packing.pack("nccl, pack", Parcels { sends, receives })?;
        self.control.exchange(call, &self.host, &[], &[])?;
        let mut launch = stream.launch(call.operation);
        launch = packed.sends.iter().fold(launch, |launch, whole| launch.read(whole));
        launch = packed.receives.iter().fold(launch, |launch, whole| launch.write(whole));
        let ranks = sends.iter().chain(receives).map(|parcel| parcel.peer).collect();
        launch.exchange(&peers, ranks)?;
        unpack("nccl, unpack", receives, &packed.receives)
    }

    fn all_reduce(&mut self, _: &CollectiveCall, _: &Stream, _: &Sum<'_, Spans>) -> Result<bool> {
        // NCCL's sums add in an order that depends on the machine.
        Ok(false)
    }

    fn barrier(&mut self, call: &CollectiveCall) -> Result<()> {
        self.control.barrier(call)
    }

    fn abort(&mut self, reason: &str) {
        self.control.abort(reason);
    }

    fn leave(&mut self) {
        self.control.leave();
    }

    fn deadline(&self) -> Duration {
        self.control.deadline()
    }

    fn split(&mut self, call: &CollectiveCall, color: u64, key: u64) -> Result<Box<dyn Transport>> {
        Ok(Box::new(Nccl::over(self.control.split(call, color, key)?)?))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // Leave first, so that other ranks' calls fail at once. The device's exchanges may take
        // until the deadline to end.
        self.control.leave();
        self.member = None;
    }
}

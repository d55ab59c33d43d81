//! Devices: the number in the settings, each like an H100.

use std::ffi::{c_char, c_int, c_uint};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute, CUresult, CUuuid};

use super::call::{DriverAnswer, INVALID, driver, initialise, machine, write};
use crate::kernel::{THREADS_MAX, WARP};
use crate::order::SimMachine;

/// The CUDA version of these functions.
const VERSION: c_int = 13000;

const NAME: &str = "Meristem stand-in";

/// The place of a device in the machine.
pub(super) fn place(machine: &SimMachine, device: CUdevice) -> DriverAnswer<usize> {
    let place = usize::try_from(device).ok().filter(|place| *place < machine.devices.len());
    place.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

fn attribute(machine: &SimMachine, of: CUdevice_attribute, device: usize) -> Option<c_int> {
    use CUdevice_attribute as A;
    Some(match of {
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
        A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
        A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
        A::CU_DEVICE_ATTRIBUTE_WARP_SIZE => WARP as c_int,
        A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => THREADS_MAX as c_int,
        A::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => c_int::MAX,
        A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | A::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
        A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => 48 << 10,
        A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => machine.shared_max as c_int,
        A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => 228 << 10,
        A::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => 1 << 10,
        A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
        | A::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR
        | A::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 64 << 10,
        A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => 2048,
        A::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => 32,
        A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE => 1_980_000,
        A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => 2_619_000,
        A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => 5120,
        A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 50 << 20,
        A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
        A::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | A::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | A::CU_DEVICE_ATTRIBUTE_ECC_ENABLED
        | A::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED => 1,
        A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => device as c_int + 1,
        A::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        | A::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        | A::CU_DEVICE_ATTRIBUTE_INTEGRATED
        | A::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT
        | A::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
        | A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID
        | A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID => 0,
        _ => return None,
    })
}

driver! {
    /// Makes the devices, once.
    fn cuInit(Flags: c_uint) {
        if Flags != 0 {
            return Err(INVALID);
        }
        initialise()
    }

    /// The version of CUDA, 1000 times the major number plus 10 times the minor one.
    fn cuDriverGetVersion(driverVersion: *mut c_int) {
        write(driverVersion, VERSION)
    }

    /// The number of devices.
    fn cuDeviceGetCount(count: *mut c_int) {
        machine(|machine| write(count, machine.devices.len() as c_int))
    }

    /// The device with a number.
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        machine(|machine| {
            place(machine, ordinal)?;
            write(device, ordinal)
        })
    }

    /// The name of a device, cut off at `len` bytes with the final zero.
    fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice) {
        machine(|machine| {
            place(machine, dev)?;
            let room = usize::try_from(len).ok().filter(|room| *room > 0).ok_or(INVALID)?;
            for (at, byte) in NAME.bytes().take(room - 1).chain([0]).enumerate() {
                write(name.wrapping_add(at), byte as c_char)?;
            }
            Ok(())
        })
    }

    /// Bytes that identify a device.
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice) {
        machine(|machine| {
            let mut bytes = [0; 16];
            bytes[15] = place(machine, dev)? as c_char + 1;
            write(uuid, CUuuid { bytes })
        })
    }

    /// An attribute of a device; attributes that the stand-in lacks are invalid.
    fn cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: CUdevice) {
        machine(|machine| {
            let device = place(machine, dev)?;
            let value = attribute(machine, attrib, device).ok_or_else(|| {
                eprintln!("meristem-standin: {attrib:?} is not modelled");
                INVALID
            })?;
            write(pi, value)
        })
    }

    /// Bytes of a device's memory.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) {
        machine(|machine| {
            place(machine, dev)?;
            write(bytes, machine.memory.capacity())
        })
    }
}

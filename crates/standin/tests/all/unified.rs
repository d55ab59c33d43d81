//! Attributes of addresses, registered memory, and copies between any two addresses.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUpointer_attribute, CUresult};
use meristem_standin::driver::{memory, unified};

use super::harness::{Case, Gpu, good, say, values};

const SOURCE: &str = r#"extern "C" __global__ void nothing() {}"#;

/// Memory type, context and device of an address, by the calls for several attributes and for one.
fn named(address: CUdeviceptr) -> (u32, CUcontext, Result<i32, CUresult>) {
    use CUpointer_attribute as A;
    let (mut kind, mut managed) = (7u32, 7u32);
    let mut context: CUcontext = ptr::dangling_mut();
    let mut attributes = [
        A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        A::CU_POINTER_ATTRIBUTE_CONTEXT,
        A::CU_POINTER_ATTRIBUTE_IS_MANAGED,
    ];
    let mut places: [*mut c_void; 3] =
        [(&raw mut kind).cast(), (&raw mut context).cast(), (&raw mut managed).cast()];
    let mut device = 7;
    // SAFETY: there is a place of the right type for each attribute.
    let found = unsafe {
        let (attributes, places) = (attributes.as_mut_ptr(), places.as_mut_ptr());
        good(unified::cuPointerGetAttributes(3, attributes, places, address));
        let ordinal = A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        unified::cuPointerGetAttribute((&raw mut device).cast(), ordinal, address)
    };
    assert_eq!(managed, 0);
    (kind, context, if found == CUresult::CUDA_SUCCESS { Ok(device) } else { Err(found) })
}

/// Page-locks the values.
fn register(values: &mut [u32]) -> CUresult {
    let (address, bytes) = (values.as_mut_ptr().cast(), size_of_val(values));
    // SAFETY: the values are live until they are unregistered.
    unsafe { memory::cuMemHostRegister_v2(address, bytes, 0) }
}

#[test]
fn an_address_names_its_memory() {
    let body = |gpu: &Gpu| {
        let device = gpu.allocate(100);
        let pinned = gpu.pinned(100).as_ptr() as CUdeviceptr;
        let mut values = vec![0u32; 100];
        let address = values.as_ptr() as CUdeviceptr;
        let unknown = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(named(device + 399), (2, gpu.context, Ok(0)));
        assert_eq!(named(device + 400), (0, ptr::null_mut(), unknown));
        assert_eq!(named(pinned + 4), (1, ptr::null_mut(), Ok(-1)));
        assert_eq!(named(address), (0, ptr::null_mut(), unknown));
        good(register(&mut values));
        assert_eq!(named(address + 399), (1, ptr::null_mut(), Ok(-1)));
        assert_eq!(named(address + 400), (0, ptr::null_mut(), unknown));
        let registered = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        assert_eq!(register(&mut values[50..51]), registered);
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the places are ours, and the values are live.
        unsafe {
            good(unified::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, device + 8));
            assert_eq!((base, bytes), (device, 400));
            let of_host = unified::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, pinned);
            assert_eq!(of_host, CUresult::CUDA_ERROR_INVALID_VALUE);
            let place = values.as_mut_ptr().cast();
            good(memory::cuMemHostUnregister(place));
            let missing = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
            assert_eq!(memory::cuMemHostUnregister(place), missing);
        }
        assert_eq!(named(address), (0, ptr::null_mut(), unknown));
        say("ended");
    };
    let name = "unified::an_address_names_its_memory";
    let said = Case { name, source: SOURCE, body }.run(0..1);
    assert!(said.iter().all(|said| values(said) == ["\"ended\""]));
}

/// Copies to registered memory without a wait are late in some orders, and copies that wait never.
#[test]
fn copies_between_any_two_addresses() {
    let body = |gpu: &Gpu| {
        let on = gpu.stream();
        let (x, y) = (gpu.allocate(64), gpu.allocate(64));
        let (from, mut to) = (vec![5u32; 64], vec![0u32; 64]);
        let [source, target] =
            [from.as_ptr(), to.as_mut_ptr().cast_const()].map(|at| at as CUdeviceptr);
        // SAFETY: there are 256 bytes at each address, until the stream has ended.
        unsafe {
            good(unified::cuMemcpy(x, source, 256));
            good(unified::cuMemcpyAsync(y, x, 256, on));
            // The host waits for pageable memory.
            good(unified::cuMemcpyAsync(target, y, 256, on));
            assert_eq!(to, from);
            to.fill(0);
            good(register(&mut to));
            good(unified::cuMemcpyAsync(target, y, 256, on));
            say(if to[63] == 5 { "done" } else { "late" });
            good(gpu.wait(on));
            assert_eq!(to, from);
            to.fill(0);
            good(unified::cuMemcpy(target, y, 256));
            assert_eq!(to, from);
            // Beyond the end of an allocation.
            let beyond = unified::cuMemcpyAsync(x, y + 4, 256, on);
            assert_ne!(beyond, CUresult::CUDA_SUCCESS);
            good(memory::cuMemHostUnregister(to.as_mut_ptr().cast()));
        }
    };
    let name = "unified::copies_between_any_two_addresses";
    let said = Case { name, source: SOURCE, body }.run(0..6);
    assert!(said.is_empty() || said.iter().any(|said| values(said) == ["\"late\""]));
}

//! Allocations: the owners of addresses, and freed addresses.

use std::collections::{BTreeMap, VecDeque};
use std::{ptr, slice};

use super::mapping::PAGE;
use super::{Asan, Mapping, POISON};

/// Alignment of allocations; the driver promises 256.
const ALIGNMENT: usize = 512;

/// Bytes before an allocation that are checked.
const GUARD_BEFORE: usize = 256;

/// The value of every byte in a guard zone.
const GUARD: u8 = 0xc3;

/// Largest number of freed allocations with reserved addresses; the addresses of older allocations
/// are released.
const QUARANTINE: usize = 8192;

/// Owner of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Memory of the device with this number.
    Device(usize),
    /// Page-locked memory of the host, which devices can address.
    Pinned,
}

/// One allocation, live or freed.
#[derive(Debug)]
struct MemoryRegion {
    /// Number in order of allocation, for messages.
    number: u64,
    kind: MemoryKind,
    bytes: usize,
    mapping: Mapping,
}

/// All allocations by their first address.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    live: BTreeMap<u64, MemoryRegion>,
    freed: BTreeMap<u64, MemoryRegion>,
    freed_order: VecDeque<u64>,
    /// Memory of the host that was page-locked after its allocation: bytes by first address.
    registered: BTreeMap<u64, usize>,
    allocated: u64,
    /// Bytes in use of each device.
    used: Vec<usize>,
    /// Bytes of each device.
    capacity: usize,
}

impl AddressSpace {
    /// An empty address space for `devices` devices of `capacity` bytes each.
    pub(crate) fn new(devices: usize, capacity: usize) -> Self {
        Self {
            live: BTreeMap::new(),
            freed: BTreeMap::new(),
            freed_order: VecDeque::new(),
            registered: BTreeMap::new(),
            allocated: 0,
            used: vec![0; devices],
            capacity,
        }
    }

    /// Bytes of each device.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of a device that are not in use.
    pub(crate) fn available(&self, device: usize) -> usize {
        self.capacity - self.used[device]
    }

    /// The address of new memory full of poison; `None` if there is not enough.
    pub(crate) fn allocate(&mut self, kind: MemoryKind, bytes: usize) -> Option<u64> {
        let whole = bytes.checked_next_multiple_of(ALIGNMENT)?;
        if let MemoryKind::Device(device) = kind
            && whole > self.available(device)
        {
            return None;
        }
        let mapping = Mapping::new(whole)?;
        let slack = mapping.open_bytes() - whole;
        // The end of the allocation is as near to the closed page as its alignment permits.
        // SAFETY: `slack` bytes and the allocation are in the open pages.
        let base = unsafe { mapping.open().add(slack) };
        let address = base as u64;
        let region = MemoryRegion { number: self.allocated, kind, bytes, mapping };
        region.fill(address);
        self.allocated += 1;
        if let MemoryKind::Device(device) = kind {
            self.used[device] += whole;
        }
        // A new mapping can have the address of an allocation that was freed and given back.
        self.freed.remove(&address);
        self.live.insert(address, region);
        Some(address)
    }

    /// Frees the allocation that begins at `address`; `false` if there is no such allocation of
    /// this kind.
    pub(crate) fn free(&mut self, address: u64, pinned: bool) -> bool {
        let Some(region) = self.live.get(&address) else { return false };
        if (region.kind == MemoryKind::Pinned) != pinned {
            return false;
        }
        let Some(region) = self.live.remove(&address) else { return false };
        if let MemoryKind::Device(device) = region.kind {
            self.used[device] -= region.bytes.next_multiple_of(ALIGNMENT);
        }
        region.close();
        self.freed.insert(address, region);
        self.freed_order.push_back(address);
        if self.freed_order.len() > QUARANTINE
            && let Some(oldest) = self.freed_order.pop_front()
        {
            self.freed.remove(&oldest);
        }
        true
    }

    /// Frees all memory of a device.
    pub(crate) fn close(&mut self, device: usize) {
        let own = self.live.iter().filter(|(_, region)| region.kind == MemoryKind::Device(device));
        let addresses: Vec<u64> = own.map(|(address, _)| *address).collect();
        for address in addresses {
            self.free(address, false);
        }
    }

    /// Page-locks memory of the host; `false` if a part of it is page-locked or of a device.
    pub(crate) fn register(&mut self, address: u64, bytes: usize) -> bool {
        let Some(end) = address.checked_add(bytes as u64) else { return false };
        let before = self.registered.range(..end).next_back();
        let is_free = before.is_none_or(|(base, bytes)| base + *bytes as u64 <= address)
            && self
                .live
                .range(..end)
                .next_back()
                .is_none_or(|(base, region)| base + region.bytes as u64 <= address);
        if is_free {
            self.registered.insert(address, bytes);
        }
        is_free
    }

    /// Ends the page-locking of memory that begins at `address`; `false` if there is none.
    pub(crate) fn unregister(&mut self, address: u64) -> bool {
        self.registered.remove(&address).is_some()
    }

    /// The owner of live or registered memory that contains all these bytes. For ranges of no
    /// bytes, the end of an allocation counts as part of it.
    pub(crate) fn owner(&self, address: u64, bytes: usize) -> Option<MemoryKind> {
        let inside = |base: u64, whole: usize| {
            let offset = usize::try_from(address - base).ok();
            offset.and_then(|offset| offset.checked_add(bytes)).is_some_and(|end| end <= whole)
        };
        let live = self.live.range(..=address).next_back();
        let live = live.filter(|(base, region)| inside(**base, region.bytes));
        let registered = || self.registered.range(..=address).next_back();
        live.map(|(_, region)| region.kind).or_else(|| {
            registered().filter(|(base, whole)| inside(**base, **whole)).map(|_| MemoryKind::Pinned)
        })
    }

    /// First address and bytes of the live allocation of a device that contains the address.
    pub(crate) fn allocation(&self, address: u64) -> Option<(u64, usize)> {
        let (base, region) = self.live.range(..=address).next_back()?;
        let inside = address - base < region.bytes as u64;
        (inside && region.kind != MemoryKind::Pinned).then_some((*base, region.bytes))
    }

    /// Whether the address is in memory that was freed.
    pub(crate) fn is_freed(&self, address: u64) -> bool {
        let before = self.freed.range(..=address).next_back();
        before.is_some_and(|(base, region)| address - base < region.bytes as u64)
            && self.owner(address, 0).is_none()
    }

    /// A text for an address: the nearest allocation, and the offset from it.
    pub(crate) fn describe(&self, address: u64) -> String {
        let near = |regions: &BTreeMap<u64, MemoryRegion>, state: &str| {
            let (base, region) =
                regions.range(..=address.saturating_add(PAGE as u64)).next_back()?;
            let (start, end) = (*base, base + region.bytes as u64);
            let place = match address {
                _ if address < start => format!("{} bytes before", start - address),
                _ if address < end => format!("at byte {} of", address - start),
                _ if address - end < PAGE as u64 => format!("{} bytes after", address - end),
                _ => return None,
            };
            Some(format!("{place} {state} {} of {} bytes", region.number, region.bytes))
        };
        near(&self.live, "allocation")
            .filter(|text| !text.contains("before") && !text.contains("after"))
            .or_else(|| near(&self.freed, "freed allocation").filter(|t| t.contains("at byte")))
            .or_else(|| near(&self.live, "allocation"))
            .or_else(|| near(&self.freed, "freed allocation"))
            .unwrap_or_else(|| "near no allocation".into())
    }

    /// A text for the first allocation whose guard zone was written to. The zone is restored.
    pub(crate) fn damage(&self) -> Option<String> {
        self.live.iter().find_map(|(base, region)| {
            let offset = region.damage(*base)?;
            region.guard(*base);
            let bytes = region.bytes;
            let place = match usize::try_from(offset) {
                Ok(offset) => format!("{} bytes after the end", offset - bytes),
                Err(_) => format!("{} bytes before the start", -offset),
            };
            Some(format!("a write {place} of allocation {} of {bytes} bytes", region.number))
        })
    }
}

impl MemoryRegion {
    /// Fills fresh memory with poison and its guard zones with their value.
    fn fill(&self, base: u64) {
        // SAFETY: the bytes of the allocation, in the open pages of its mapping.
        let bytes = unsafe { slice::from_raw_parts_mut(base as *mut u8, self.bytes) };
        let mut words = bytes.chunks_exact_mut(POISON.len());
        words.by_ref().for_each(|word| word.copy_from_slice(&POISON));
        let rest = words.into_remainder();
        rest.copy_from_slice(&POISON[..rest.len()]);
        self.guard(base);
        if let Some(asan) = Asan::get() {
            let (before, after) = self.zones(base);
            asan.poison(before.as_ptr(), before.len());
            asan.poison(after.as_ptr(), after.len());
        }
    }

    /// Gives the pages back.
    fn close(&self) {
        if let Some(asan) = Asan::get() {
            asan.unpoison(self.mapping.open(), self.mapping.open_bytes());
        }
        self.mapping.close();
    }

    /// The guard zones before and after the allocation.
    fn zones(&self, base: u64) -> (&[u8], &[u8]) {
        let open = self.mapping.open() as u64;
        let before = GUARD_BEFORE.min((base - open) as usize);
        let end = base + self.bytes as u64;
        let after = (open + self.mapping.open_bytes() as u64 - end) as usize;
        // SAFETY: both ranges are in the open pages.
        unsafe {
            (
                slice::from_raw_parts((base as *const u8).sub(before), before),
                slice::from_raw_parts(end as *const u8, after),
            )
        }
    }

    /// Writes the value of the guard zones.
    fn guard(&self, base: u64) {
        let (before, after) = self.zones(base);
        for zone in [before, after] {
            // SAFETY: the zone is in the open pages, and used here only.
            unsafe { ptr::write_bytes(zone.as_ptr().cast_mut(), GUARD, zone.len()) };
        }
    }

    /// Offset from the allocation's start of the first damaged byte of a guard zone.
    fn damage(&self, base: u64) -> Option<i64> {
        let (before, after) = self.zones(base);
        // Most zones are intact, which this finds many bytes at a time.
        let whole = |zone: &[u8]| zone.iter().fold(0, |wrong, byte| wrong | (byte ^ GUARD)) == 0;
        let wrong = |zone: &[u8]| {
            if whole(zone) { None } else { zone.iter().position(|byte| *byte != GUARD) }
        };
        let after = wrong(after).map(|at| (self.bytes + at) as i64);
        after.or_else(|| wrong(before).map(|at| at as i64 - before.len() as i64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(address: u64, bytes: usize) -> Vec<u8> {
        // SAFETY: the tests read memory that they allocated.
        unsafe { slice::from_raw_parts(address as *const u8, bytes) }.to_vec()
    }

    fn write(address: u64, value: u8) {
        // SAFETY: the tests write to an allocation or its guard zone.
        unsafe { *(address as *mut u8) = value };
    }

    #[test]
    fn fresh_memory_is_poison_and_a_device_is_full_at_its_size() {
        let mut memory = AddressSpace::new(1, 4096);
        let address = memory.allocate(MemoryKind::Device(0), 10).unwrap();
        assert_eq!(address % ALIGNMENT as u64, 0);
        assert_eq!(read(address, 10), [&POISON[..], &POISON, &POISON[..2]].concat());
        assert_eq!(memory.available(0), 4096 - 512);
        assert_eq!(memory.allocate(MemoryKind::Device(0), 4096), None);
        assert!(memory.allocate(MemoryKind::Pinned, 8192).is_some());
        assert!(!memory.free(address, true), "freed as pinned memory");
        assert!(memory.free(address, false));
        assert!(!memory.free(address, false), "freed twice");
        assert_eq!(memory.available(0), 4096);
        assert!(memory.is_freed(address + 9) && !memory.is_freed(address + 10));
    }

    #[test]
    fn ranges_are_inside_one_allocation_or_not() {
        let mut memory = AddressSpace::new(2, 1 << 20);
        let address = memory.allocate(MemoryKind::Device(1), 1000).unwrap();
        assert_eq!(memory.owner(address + 10, 990), Some(MemoryKind::Device(1)));
        assert_eq!(memory.owner(address + 10, 991), None);
        assert_eq!(memory.owner(address + 1000, 0), Some(MemoryKind::Device(1)));
        assert_eq!(memory.owner(address - 1, 1), None);
        assert_eq!(memory.describe(address + 10), "at byte 10 of allocation 0 of 1000 bytes");
        assert_eq!(memory.describe(address + 1001), "1 bytes after allocation 0 of 1000 bytes");
        assert_eq!(memory.describe(address - 4), "4 bytes before allocation 0 of 1000 bytes");
        memory.free(address, false);
        assert_eq!(memory.describe(address), "at byte 0 of freed allocation 0 of 1000 bytes");
        assert_eq!(memory.describe(64), "near no allocation");
        // Below a null pointer.
        assert_eq!(memory.describe(u64::MAX - 3), "near no allocation");
    }

    #[test]
    fn a_write_beside_an_allocation_is_found_once() {
        let mut memory = AddressSpace::new(1, 1 << 20);
        let address = memory.allocate(MemoryKind::Device(0), 1000).unwrap();
        assert_eq!(memory.damage(), None);
        write(address + 1003, 7);
        let expected = "a write 3 bytes after the end of allocation 0 of 1000 bytes";
        assert_eq!(memory.damage().as_deref(), Some(expected));
        assert_eq!(memory.damage(), None);
        write(address - 2, 7);
        let expected = "a write 2 bytes before the start of allocation 0 of 1000 bytes";
        assert_eq!(memory.damage().as_deref(), Some(expected));
    }
}

//! Keys of random numbers from names.

/// FNV-1a, 64 bits. Written out here because repeatable runs depend on it.
pub(crate) fn name_key(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

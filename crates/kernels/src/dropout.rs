//! Dropout: masks from a counter-based generator, and their application.
//!
//! # Draws
//! Elements are numbered over the samples of a batch, `sample · each + element`, in the order of
//! memory (NHWC). Number n has the word `n / 16 % 4` of the block `n / 64 · 16 + n % 16` of
//! [`philox`](meristem_device::random::philox) with the layer's key and the counter
//! `[block, block, batch, batch]`, each pair being the low and the high word. So 16 neighbouring
//! blocks give 64 neighbouring elements without a permutation. An element is dropped if its word is
//! below the threshold, `rate · 2³²`.
//!
//! A draw is a function of key, batch, sample and element: parts and workers do not change it. The
//! samples of rank r are numbered from r · ⌈batch / ranks⌉, so that no two ranks draw alike.

use super::macros::isa_kernels;
use super::{GradOut, Isa, parts};

/// Blocks that are computed side by side.
const LANES: usize = 16;
/// Elements of these blocks.
const GROUP: usize = 4 * LANES;

/// Draws of a layer in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskDraw {
    /// Key of the layer.
    pub key: [u32; 2],
    /// Words below it drop their element.
    pub threshold: u32,
    /// Number of the batch.
    pub batch: u64,
    /// Number of the first element.
    pub first: u64,
}

impl MaskDraw {
    /// The draws of a layer with these numbers and `each` elements per sample.
    pub fn from_numbers(numbers: &[f64], batch: u64, each: usize) -> Self {
        let [threshold, key0, key1] = [0, 2, 3].map(|at| numbers[at] as u32);
        let first = (numbers[4] as u64).wrapping_mul(each as u64);
        Self { key: [key0, key1], threshold, batch, first }
    }
}

/// Draws a mask: 1 where an element is kept, else 0.
pub fn draw(isa: Isa, of: &MaskDraw, mask: &mut [u8]) {
    let part = parts::elements(mask.len());
    let all = mask.chunks_mut(part).enumerate();
    parts::each_alone(all, |(at, mask)| {
        let first = of.first.wrapping_add((at * part) as u64);
        draw_part(isa, &MaskDraw { first, ..*of }, mask);
    });
}

isa_kernels! {
    /// [`draw`] on the calling thread.
    fn draw_part(isa: Isa, of: &MaskDraw, mask: &mut [u8]) {
        let (mut number, mut rest) = (of.first, mask);
        while !rest.is_empty() {
            let skipped = (number % GROUP as u64) as usize;
            let kept = group(of, number / GROUP as u64);
            let (now, later) = rest.split_at_mut(rest.len().min(GROUP - skipped));
            now.copy_from_slice(&kept[skipped..skipped + now.len()]);
            number = number.wrapping_add(now.len() as u64);
            rest = later;
        }
    }

    /// Writes or adds `x · scale` where the mask is not 0, and 0 elsewhere.
    pub fn apply(isa: Isa, x: &[f32], mask: &[u8], scale: f32, to: GradOut<'_>) {
        for ((y, &x), &mask) in to.values.iter_mut().zip(x).zip(mask) {
            let value = if mask == 0 { 0.0 } else { x * scale };
            *y = if to.accumulate { *y + value } else { value };
        }
    }
}

/// The mask of 64 elements.
#[inline(always)]
fn group(of: &MaskDraw, number: u64) -> [u8; GROUP] {
    let block = |lane: usize| number.wrapping_mul(LANES as u64).wrapping_add(lane as u64);
    let mut counter = [[0; LANES]; 4];
    for lane in 0..LANES {
        let block = block(lane);
        counter[0][lane] = block as u32;
        counter[1][lane] = (block >> 32) as u32;
        counter[2][lane] = of.batch as u32;
        counter[3][lane] = (of.batch >> 32) as u32;
    }
    let words = philox_lanes(of.key, counter);
    let mut kept = [0; GROUP];
    for (kept, words) in kept.chunks_exact_mut(LANES).zip(&words) {
        for (kept, &word) in kept.iter_mut().zip(words) {
            *kept = u8::from(word >= of.threshold);
        }
    }
    kept
}

/// [`philox`](meristem_device::random::philox) of several counters, side by side for vectors.
#[inline(always)]
fn philox_lanes(mut key: [u32; 2], mut x: [[u32; LANES]; 4]) -> [[u32; LANES]; 4] {
    for _ in 0..10 {
        let mut next = [[0; LANES]; 4];
        for lane in 0..LANES {
            let a = 0xD251_1F53 * u64::from(x[0][lane]);
            let b = 0xCD9E_8D57 * u64::from(x[2][lane]);
            next[0][lane] = (b >> 32) as u32 ^ x[1][lane] ^ key[0];
            next[1][lane] = b as u32;
            next[2][lane] = (a >> 32) as u32 ^ x[3][lane] ^ key[1];
            next[3][lane] = a as u32;
        }
        x = next;
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    x
}

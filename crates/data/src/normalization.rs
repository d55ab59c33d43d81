//! Normalisation constants: exact from a histogram of bytes, or from sums of floats.

use crate::shape::StoredType;

/// Statistics of each channel of the samples that were added, in any chunks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ChannelStatistics {
    Bytes(ByteHistogram),
    Floats(FloatSums),
}

impl ChannelStatistics {
    /// Statistics of no samples.
    pub(crate) fn new(stored: StoredType, channels: usize) -> Self {
        match stored {
            StoredType::U8 => Self::Bytes(ByteHistogram::new(channels)),
            stored => Self::Floats(FloatSums::new(stored, channels)),
        }
    }

    /// Adds the bytes of whole NHWC samples.
    pub(crate) fn add(&mut self, samples: &[u8]) {
        match self {
            Self::Bytes(histogram) => histogram.add(samples),
            Self::Floats(sums) => sums.add(samples),
        }
    }

    /// Mean and population standard deviation per channel; without any sample mean 0, std 1.
    pub(crate) fn normalization(&self) -> Normalization {
        match self {
            Self::Bytes(histogram) => histogram.normalization(),
            Self::Floats(sums) => sums.normalization(),
        }
    }
}

/// Sums over the values of each channel, in f64 and in the order of the samples. The first value
/// is subtracted from all, so that a large mean does not cancel a small deviation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FloatSums {
    stored: StoredType,
    pixels: u64,
    channels: Vec<FloatSum>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct FloatSum {
    first: f64,
    sum: f64,
    squares: f64,
}

impl FloatSums {
    fn new(stored: StoredType, channels: usize) -> Self {
        Self { stored, pixels: 0, channels: vec![FloatSum::default(); channels] }
    }

    fn add(&mut self, samples: &[u8]) {
        let channels = self.channels.len();
        for pixel in self.stored.widened(samples).chunks_exact(channels * size_of::<f32>()) {
            let values =
                pixel.as_chunks().0.iter().map(|bytes| f64::from(f32::from_ne_bytes(*bytes)));
            for (channel, value) in self.channels.iter_mut().zip(values) {
                if self.pixels == 0 {
                    channel.first = value;
                }
                let difference = value - channel.first;
                channel.sum += difference;
                channel.squares += difference * difference;
            }
            self.pixels += 1;
        }
    }

    fn normalization(&self) -> Normalization {
        let count = self.pixels as f64;
        let of_channel = |FloatSum { first, sum, squares }: &FloatSum| {
            if self.pixels == 0 {
                return (0.0, 1.0);
            }
            let offset = sum / count;
            // Rounding may leave a small negative number for a channel that is almost constant.
            let std = (squares / count - offset * offset).max(0.0).sqrt() as f32;
            ((first + offset) as f32, if std > 0.0 { std } else { 1.0 })
        };
        let (mean, std) = self.channels.iter().map(of_channel).unzip();
        Normalization { mean, std }
    }
}

/// Counts of each byte value in each channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ByteHistogram {
    channels: Vec<[u64; 256]>,
}

impl ByteHistogram {
    /// An empty histogram.
    pub(crate) fn new(channels: usize) -> Self {
        Self { channels: vec![[0; 256]; channels] }
    }

    /// Counts whole NHWC images.
    pub(crate) fn add(&mut self, images: &[u8]) {
        if let [grey] = &mut self.channels[..] {
            return images.iter().for_each(|value| grey[*value as usize] += 1);
        }
        for pixel in images.chunks_exact(self.channels.len()) {
            for (counts, value) in self.channels.iter_mut().zip(pixel) {
                counts[*value as usize] += 1;
            }
        }
    }

    /// Mean and population standard deviation per channel, in [0, 1] units. Sums are integers, so
    /// the result does not depend on the order of the images; it is rounded once, at the end.
    /// Without any image: mean 0, std 1.
    pub(crate) fn normalization(&self) -> Normalization {
        let (mean, std) = self.channels.iter().map(mean_std).unzip();
        Normalization { mean, std }
    }
}

fn mean_std(counts: &[u64; 256]) -> (f32, f32) {
    let (mut count, mut sum, mut squares) = (0_u128, 0_u128, 0_u128);
    for (value, occurrences) in counts.iter().enumerate() {
        let (value, occurrences) = (value as u128, u128::from(*occurrences));
        count += occurrences;
        sum += occurrences * value;
        squares += occurrences * value * value;
    }
    if count == 0 {
        return (0.0, 1.0);
    }
    let mean = sum as f64 / (count as f64 * 255.0);
    // n·Σv² − (Σv)² is exact in integers; in floating point it would cancel.
    let variance = (count * squares - sum * sum) as f64 / (count as f64 * count as f64);
    // A constant channel normalises to zero, not to infinity.
    let std = if variance > 0.0 { variance.sqrt() / 255.0 } else { 1.0 };
    (mean as f32, std as f32)
}

/// Normalisation constants per channel: f(v) = (v − mean) / std for a value v, which is b / 255 for
/// a stored byte b.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalization {
    /// One for each channel.
    pub mean: Vec<f32>,
    /// One for each channel; positive.
    pub std: Vec<f32>,
}

impl Normalization {
    /// Constants that leave values as they are: f(v) = v.
    pub fn identity(channels: usize) -> Self {
        Self { mean: vec![0.0; channels], std: vec![1.0; channels] }
    }

    /// Whether there are as many means as standard deviations, all standard deviations are
    /// positive, and the value of every byte and of every float near the mean stays finite.
    pub fn is_usable(&self) -> bool {
        let finite = |(scale, shift): (f32, f32)| scale.is_finite() && shift.is_finite();
        self.mean.len() == self.std.len()
            && self.std.iter().all(|std| *std > 0.0)
            && [StoredType::U8, StoredType::F32]
                .into_iter()
                .all(|stored| self.multiply_add(stored).into_iter().all(finite))
    }

    /// The constants as multiply-add: f(v) = s · scale + shift for a stored value s, each operation
    /// rounded to f32. Rounded once from f64, scale is 1 / (255 · std) for bytes and 1 / std for
    /// floats, and shift is −mean / std. Returns `(scale, shift)` per channel.
    pub fn multiply_add(&self, stored: StoredType) -> Vec<(f32, f32)> {
        let one = stored.one();
        let form = |(mean, std): (&f32, &f32)| {
            let (mean, std) = (f64::from(*mean), f64::from(*std));
            ((1.0 / (one * std)) as f32, (-mean / std) as f32)
        };
        self.mean.iter().zip(&self.std).map(form).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_match_a_plain_computation() {
        let images: Vec<u8> = (0..6000_u32).map(|i| (i * i % 251) as u8).collect();
        let mut histogram = ByteHistogram::new(3);
        histogram.add(&images[..2997]);
        histogram.add(&images[2997..]);
        let Normalization { mean, std } = histogram.normalization();
        for channel in 0..3 {
            let values: Vec<f64> =
                images.iter().skip(channel).step_by(3).map(|v| f64::from(*v) / 255.0).collect();
            let expected = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|v| (v - expected).powi(2)).sum::<f64>() / 2000.0;
            assert!((f64::from(mean[channel]) - expected).abs() < 1e-7);
            assert!((f64::from(std[channel]) - variance.sqrt()).abs() < 1e-7);
        }
    }

    #[test]
    fn constant_and_empty_channels_do_not_divide_by_zero() {
        let mut histogram = ByteHistogram::new(1);
        assert_eq!(histogram.normalization(), Normalization::identity(1));
        histogram.add(&[51; 10]);
        let constants = histogram.normalization();
        assert_eq!(constants, Normalization { mean: vec![0.2], std: vec![1.0] });
    }
}

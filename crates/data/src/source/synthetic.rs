//! Datasets that are generated and need no file (D13).
//!
//! | name | samples |
//! |---|---|
//! | `mnist1d` | signals 1×40 of 10 classes, 4,000 and 1,000, after Greydanus and Kobak (2020, |
//! | | arXiv 2011.14439) |
//! | `blobs` | points of 5 classes, 4,000 and 1,000: deviation 1 around centres in (−10, 10)² |
//! | `spirals` | points of 3 classes, 3,000 and 750: arms of 1.75 turns in a circle of radius 1, |
//! | | with noise of 0.03 |
//! | `friedman` | vectors of 10 features with a number y, 4,000 and 1,000: Friedman #1 (Friedman |
//! | | 1991, Annals of Statistics 19) with noise of deviation 1 |
//!
//! Sample i of a set with classes has class i mod classes. The generator `Rng::new(42,
//! Purpose::Synthetic, set, i)` draws its random numbers, with the sets counted from 0 in the order
//! of the table, so every sample is a function of its index. Test samples follow the training
//! samples. The options [`Generated`] replace the seed 42, the sizes, and the noise.

use meristem_device::random::{Purpose, Rng};

use super::generated::Generated;
use super::{Layout, OnBad, Reader, Sink, Split, TestSplit};
use crate::error::Result;
use crate::shape::{InputKind, SampleForm, SampleShape, StoredType};
use crate::targets::{OutputMoments, Standardization, StoredTargets, TargetKind};

/// Added to the number of a set, in the keys of random numbers, for the draw of wrong labels.
const WRONG_LABELS_KEY: u64 = 16;
/// Added to the number of a set, in the keys of random numbers, for the draw of centres.
const CENTRES_KEY: u64 = 32;
/// A point in the plane.
const PLANE: SampleForm = SampleForm {
    kind: InputKind::Vector,
    shape: SampleShape { channels: 2, height: 1, width: 1 },
    stored: StoredType::F32,
};

/// A generated dataset.
pub(crate) struct Synthetic {
    layout: Layout,
    values: Vec<f32>,
    /// Targets of both splits.
    targets: StoredTargets,
}

impl Synthetic {
    pub(crate) fn mnist1d(options: &Generated) -> Self {
        let shape = SampleShape { channels: 1, height: 1, width: POINTS };
        let form = SampleForm { kind: InputKind::Signal, shape, stored: StoredType::F32 };
        let noise = options.noise.0;
        let digit = |random: &mut Rng, label| digit(random, label, noise);
        Self::generate((0, options), form, 10, [4000, 1000], digit)
    }

    pub(crate) fn blobs(options: &Generated) -> Self {
        let centres = centres(options);
        let noise = options.noise.0;
        let blob = |random: &mut Rng, label: u32| blob(random, centres[label as usize], noise);
        Self::generate((1, options), PLANE, centres.len() as u32, [4000, 1000], blob)
    }

    pub(crate) fn spirals(options: &Generated) -> Self {
        let classes = options.classes.unwrap_or(3);
        let arms = Arms { classes, turns: options.turns.0, noise: options.noise.0 };
        let spiral = |random: &mut Rng, label| spiral(random, label, &arms);
        Self::generate((2, options), PLANE, classes, [3000, 750], spiral)
    }

    fn generate(
        (set, options): (u64, &Generated),
        SampleForm { kind, shape, stored }: SampleForm,
        classes: u32,
        usual: [usize; 2],
        sample: impl Fn(&mut Rng, u32) -> Vec<f32>,
    ) -> Self {
        let [train, test] = sizes(options, usual);
        let labels: Vec<u32> = (0..(train + test) as u32).map(|i| i % classes).collect();
        let values = labels.iter().enumerate().flat_map(|(i, label)| {
            sample(&mut Rng::new(options.seed, Purpose::Synthetic, set, i as u64), *label)
        });
        let values = values.collect();
        let noise = options.label_noise.0;
        let wrong = |(i, label): (usize, u32)| {
            let mut random =
                Rng::new(options.seed, Purpose::Synthetic, set + WRONG_LABELS_KEY, i as u64);
            let is_wrong = i < train && noise > 0.0 && uniform(&mut random) < noise;
            if is_wrong { random.below(classes) } else { label }
        };
        let labels = labels.into_iter().enumerate().map(wrong).collect();
        let classes = (0..classes).map(|class| class.to_string()).collect();
        let test = TestSplit::Samples(test);
        let (targets, standardization) = (TargetKind::Classes, Standardization::default());
        let layout = Layout { kind, shape, stored, targets, classes, standardization, train, test };
        Self { layout, values, targets: StoredTargets::Classes(labels) }
    }

    pub(crate) fn friedman(options: &Generated) -> Self {
        let [train, test] = sizes(options, [4000, 1000]);
        let random = |i| Rng::new(options.seed, Purpose::Synthetic, 3, i);
        let sample = |i| friedman(&mut random(i), options.noise.0);
        let (features, numbers): (Vec<_>, Vec<f64>) =
            (0..(train + test) as u64).map(sample).unzip();
        let mut moments = OutputMoments::new(1);
        numbers[..train].iter().for_each(|number| moments.add(*number));
        let standardization = moments.standardization();
        let values = numbers.iter().map(|number| standardization.apply(0, *number)).collect();
        let layout = Layout {
            kind: InputKind::Vector,
            shape: SampleShape { channels: FEATURES, height: 1, width: 1 },
            stored: StoredType::F32,
            targets: TargetKind::Numbers,
            classes: vec!["y".into()],
            standardization,
            train,
            test: TestSplit::Samples(test),
        };
        let targets = StoredTargets::Values { values, width: 1 };
        Self { layout, values: features.concat(), targets }
    }
}

/// Training and test samples.
fn sizes(options: &Generated, [train, test]: [usize; 2]) -> [usize; 2] {
    let size = |own: Option<u32>, usual: usize| own.map_or(usual, |own| own as usize);
    [size(options.train, train), size(options.test, test)]
}

impl Reader for Synthetic {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, split: Split, _on_bad: OnBad<'_>, sink: Sink<'_>) -> Result<()> {
        let (size, train) = (self.layout.shape.numel(), self.layout.train);
        let range = match split {
            Split::Train => 0..train,
            Split::Test => train..self.targets.len(),
        };
        let values = &self.values[range.start * size..range.end * size];
        let chunk = self.layout.chunk_samples();
        for (i, values) in values.chunks(chunk * size).enumerate() {
            let start = range.start + i * chunk;
            let targets = self.targets.part(start..start + values.len() / size);
            sink(bytemuck::cast_slice(values), targets)?;
        }
        Ok(())
    }
}

/// Uniform in [0, 1), of 53 bits.
fn uniform(random: &mut Rng) -> f64 {
    (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// Two independent normal numbers: Box and Muller, 1958.
fn normal(random: &mut Rng) -> [f64; 2] {
    let radius = (-2.0 * (1.0 - uniform(random)).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * uniform(random)).sin_cos();
    [radius * cos, radius * sin]
}

/// Centres of the blobs.
const CENTRES: [[f64; 2]; 5] = [[-6.0, 4.0], [3.5, 7.0], [7.0, -2.5], [-1.0, -1.5], [-5.0, -7.5]];

/// The centres above, or as many others as there are classes.
fn centres(options: &Generated) -> Vec<[f64; 2]> {
    let Some(classes) = options.classes else { return CENTRES.into() };
    let centre = |class: u32| {
        let key = (1 + CENTRES_KEY, u64::from(class));
        let mut random = Rng::new(options.seed, Purpose::Synthetic, key.0, key.1);
        [(); 2].map(|()| 20.0 * uniform(&mut random) - 10.0)
    };
    (0..classes).map(centre).collect()
}

fn blob(random: &mut Rng, [x, y]: [f64; 2], noise: f64) -> Vec<f32> {
    let [dx, dy] = normal(random).map(|d| d * noise);
    vec![(x + dx) as f32, (y + dy) as f32]
}

/// Form of the spirals.
struct Arms {
    classes: u32,
    turns: f64,
    noise: f64,
}

fn spiral(random: &mut Rng, label: u32, arms: &Arms) -> Vec<f32> {
    let &Arms { classes, turns, noise } = arms;
    // The root spreads the samples evenly over the length of an arm.
    let radius = uniform(random).sqrt();
    let angle = std::f64::consts::TAU * (turns * radius + f64::from(label) / f64::from(classes));
    let [dx, dy] = normal(random).map(|d| d * noise);
    let (sin, cos) = angle.sin_cos();
    vec![(radius * cos + 0.03 * dx) as f32, (radius * sin + 0.03 * dy) as f32]
}

/// Features of a sample of `friedman`; the last five are independent of its number.
const FEATURES: usize = 10;

/// Features uniform in [0, 1], rounded to f32, and their number:
/// 10 sin(π x1 x2) + 20 (x3 − ½)² + 10 x4 + 5 x5, with normal noise of deviation 1.
fn friedman(random: &mut Rng, noise: f64) -> ([f32; FEATURES], f64) {
    let features = [(); FEATURES].map(|()| uniform(random) as f32);
    let [a, b, c, d, e, ..] = features.map(f64::from);
    let wave = 10.0 * (std::f64::consts::PI * a * b).sin();
    let number = wave + 20.0 * (c - 0.5) * (c - 0.5) + 10.0 * d + 5.0 * e;
    (features, number + noise * normal(random)[0])
}

/// Points of a digit.
const POINTS: usize = 40;
/// Points of a digit's shape before it is stretched.
const SHAPE_POINTS: usize = 12;
/// Least and most zeros after the shape.
const PADDING: [usize; 2] = [36, 60];
/// Points of a stretched and padded digit.
const LONG: usize = SHAPE_POINTS + PADDING[1];
/// Exclusive upper limit of the places by which a digit is shifted.
const SHIFT_MAX: u32 = 48;
/// Range of the height around 1.
const HEIGHT: f64 = 0.4;
/// Range of the slope around 0.
const SLOPE: f64 = 0.75;
/// Deviation of the smooth noise, before it is smoothed.
const SMOOTH: f64 = 0.25;
/// Deviation of the white noise.
const WHITE: f64 = 0.02;
/// Standard deviation of the window that smooths noise, in points; it ends at four of them.
const WINDOW: f64 = 2.0;

/// Shapes of the digits, as drawn by the paper's authors.
const SHAPES: [[f64; SHAPE_POINTS]; 10] = [
    [5.0, 6.0, 6.5, 6.75, 7.0, 7.0, 7.0, 7.0, 6.75, 6.5, 6.0, 5.0],
    [5.0, 3.0, 3.0, 3.4, 3.8, 4.2, 4.6, 5.0, 5.4, 5.8, 5.0, 5.0],
    [5.0, 6.0, 6.5, 6.5, 6.0, 5.25, 4.75, 4.0, 3.5, 3.5, 4.0, 5.0],
    [5.0, 6.0, 6.5, 6.5, 6.0, 5.0, 5.0, 6.0, 6.5, 6.5, 6.0, 5.0],
    [5.0, 4.4, 3.8, 3.2, 2.6, 2.6, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0],
    [5.0, 3.0, 3.0, 3.0, 3.0, 5.0, 6.0, 6.5, 6.5, 6.0, 4.5, 5.0],
    [5.0, 4.0, 3.5, 3.25, 3.0, 3.0, 3.0, 3.0, 3.25, 3.5, 4.0, 5.0],
    [5.0, 7.0, 7.0, 6.6, 6.2, 5.8, 5.4, 5.0, 4.6, 4.2, 5.0, 5.0],
    [5.0, 4.0, 3.5, 3.5, 4.0, 5.0, 5.0, 4.0, 3.5, 3.5, 4.0, 5.0],
    [5.0, 4.0, 3.5, 3.5, 4.0, 5.0, 5.0, 5.0, 5.0, 4.7, 4.3, 5.0],
];

/// A digit as a signal: its shape is padded, stretched, scaled, shifted around, covered with noise,
/// tilted, and sampled at [`POINTS`] points. The paper has the same steps, order and constants.
fn digit(random: &mut Rng, label: u32, factor: f64) -> Vec<f32> {
    let mut x = standardised(SHAPES[label as usize]).to_vec();
    let span = (PADDING[1] - PADDING[0] + 1) as u32;
    x.resize(SHAPE_POINTS + PADDING[0] + random.below(span) as usize, 0.0);
    let mut x = resampled(&x, LONG);
    let height = 1.0 + HEIGHT * (uniform(random) - 0.5);
    x.iter_mut().for_each(|value| *value *= height);
    x.rotate_right(random.below(SHIFT_MAX) as usize);
    let smooth = smoothed(&noise(random, factor * SMOOTH));
    for (value, noise) in x.iter_mut().zip(smooth).filter(|(value, _)| **value == 0.0) {
        *value = noise;
    }
    x.iter_mut().zip(noise(random, factor * WHITE)).for_each(|(value, noise)| *value += noise);
    let slope = SLOPE * (uniform(random) - 0.5);
    let place = |i: usize| i as f64 / (LONG - 1) as f64 - 0.5;
    x.iter_mut().enumerate().for_each(|(i, value)| *value -= slope * place(i));
    resampled(&x, POINTS).into_iter().map(|value| value as f32).collect()
}

/// A shape with mean 0 and deviation 1, moved to begin at 0, and divided by 6. A value of exactly 0
/// would count as padding, so 1e-8 is added.
fn standardised(shape: [f64; SHAPE_POINTS]) -> [f64; SHAPE_POINTS] {
    let n = SHAPE_POINTS as f64;
    let mean = shape.iter().sum::<f64>() / n;
    let std = (shape.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n).sqrt();
    shape.map(|value| (value - shape[0]) / std / 6.0 + 1e-8)
}

/// Values at `n` even places from the first to the last point, by linear interpolation.
fn resampled(x: &[f64], n: usize) -> Vec<f64> {
    let step = (x.len() - 1) as f64 / (n - 1) as f64;
    let value = |i: usize| {
        let place = i as f64 * step;
        let before = (place as usize).min(x.len() - 2);
        let share = place - before as f64;
        x[before] * (1.0 - share) + x[before + 1] * share
    };
    (0..n).map(value).collect()
}

fn noise(random: &mut Rng, deviation: f64) -> Vec<f64> {
    let pairs = (0..LONG / 2).flat_map(|_| normal(random));
    pairs.map(|value| value * deviation).collect()
}

/// The mean around each point, weighted by a normal density. Values are mirrored at the ends.
fn smoothed(x: &[f64]) -> Vec<f64> {
    let reach = (4.0 * WINDOW) as isize;
    let weight = |d: isize| (-0.5 * (d as f64 / WINDOW).powi(2)).exp();
    let total: f64 = (-reach..=reach).map(weight).sum();
    let mirrored = |i: isize| {
        let n = x.len() as isize;
        let place = if i < 0 {
            -1 - i
        } else if i >= n {
            2 * n - 1 - i
        } else {
            i
        };
        x[place as usize]
    };
    let mean =
        |i: isize| (-reach..=reach).map(|d| weight(d) * mirrored(i + d)).sum::<f64>() / total;
    (0..x.len() as isize).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::generated::OptionNumber;

    /// A digit without noise, slope and scaling is its shape: mirrored smoothing keeps constants,
    /// resampling keeps lines, and the first point of a shape is the padding's value.
    #[test]
    fn parts_of_a_digit() {
        assert!(smoothed(&[2.5; 40]).iter().all(|value| (value - 2.5).abs() < 1e-12));
        let line: Vec<f64> = (0..72).map(f64::from).collect();
        let resampled = resampled(&line, 40);
        assert!((resampled[39] - 71.0).abs() < 1e-12 && (resampled[1] - 71.0 / 39.0).abs() < 1e-12);
        for shape in SHAPES {
            let made = standardised(shape);
            assert!((made[0] - 1e-8).abs() < 1e-15 && made.iter().all(|value| *value != 0.0));
            let mean = made.iter().sum::<f64>() / 12.0;
            let deviation =
                (made.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 12.0).sqrt();
            assert!((deviation * 6.0 - 1.0).abs() < 1e-12);
        }
    }

    /// The classes are balanced, each sample depends on its index alone, and noise has its size.
    #[test]
    fn sets_are_balanced_and_pinned() {
        let usual = Generated::default();
        let sets =
            [Synthetic::mnist1d(&usual), Synthetic::blobs(&usual), Synthetic::spirals(&usual)];
        let checksums = sets.each_ref().map(|made| {
            let (classes, size) = (made.layout.classes.len(), made.layout.shape.numel());
            let StoredTargets::Classes(labels) = &made.targets else { panic!("classes") };
            assert_eq!(made.values.len(), labels.len() * size);
            assert!(made.values.iter().all(|value| value.is_finite()));
            assert!(labels.iter().enumerate().all(|(i, label)| *label as usize == i % classes));
            // Rounded, so that the last bits of a system's functions do not matter.
            let rounded: Vec<i32> =
                made.values.iter().map(|value| (value * 64.0).round() as i32).collect();
            crc32fast::hash(bytemuck::cast_slice(&rounded[..4000]))
        });
        assert_eq!(checksums, [264_765_996, 538_380_100, 2_717_388_696]);
        let mut random = Rng::new(1, Purpose::Synthetic, 9, 9);
        let noise: Vec<f64> = (0..200).flat_map(|_| noise(&mut random, 1.0)).collect();
        let n = noise.len() as f64;
        let mean = noise.iter().sum::<f64>() / n;
        let variance = noise.iter().map(|value| value * value).sum::<f64>() / n;
        // Five deviations of the mean and of the variance of 14,400 numbers.
        assert!(mean.abs() < 5.0 / n.sqrt() && (variance - 1.0).abs() < 5.0 * (2.0 / n).sqrt());
    }

    /// Options change what they name and nothing else: sizes leave the samples, wrong labels leave
    /// the features and the test split.
    #[test]
    fn options_change_what_they_name() {
        let usual = Generated::default();
        let labels = |made: &Synthetic| match &made.targets {
            StoredTargets::Classes(labels) => labels.clone(),
            _ => panic!("classes"),
        };
        let few = Generated { train: Some(100), test: Some(50), ..usual.clone() };
        let (whole, part) = (Synthetic::mnist1d(&usual), Synthetic::mnist1d(&few));
        assert_eq!(whole.values[..150 * POINTS], part.values);
        assert_eq!((part.layout.train, labels(&part).len()), (100, 150));
        let noisy = Generated { label_noise: OptionNumber(0.5), ..usual.clone() };
        let (clean, noisy) = (Synthetic::blobs(&usual), Synthetic::blobs(&noisy));
        assert_eq!(clean.values, noisy.values);
        let (clean, noisy) = (labels(&clean), labels(&noisy));
        assert_eq!(clean[4000..], noisy[4000..]);
        let wrong = clean.iter().zip(&noisy).filter(|(a, b)| a != b).count() as f64;
        // Half of 4,000 are drawn, 4/5 of them are wrong: 1,600, with a deviation of 31.
        assert!((wrong - 1600.0).abs() < 5.0 * 31.0, "{wrong}");
        let drawn = Generated { classes: Some(7), noise: OptionNumber(0.0), ..usual.clone() };
        let drawn = Synthetic::blobs(&drawn);
        assert_eq!(drawn.layout.classes.len(), 7);
        assert_eq!(drawn.values[..14], drawn.values[14..28], "without noise only centres are left");
        let seed = |seed| Synthetic::friedman(&Generated { seed, ..usual.clone() }).values;
        assert!(seed(42) == Synthetic::friedman(&usual).values && seed(42) != seed(43));
        let arms = Generated { turns: OptionNumber(0.0), noise: OptionNumber(0.0), ..usual };
        let straight = Synthetic::spirals(&arms);
        // The first arm lies on the positive x axis.
        assert!(straight.values.chunks(6).all(|three| three[0] >= 0.0 && three[1] == 0.0));
    }
}

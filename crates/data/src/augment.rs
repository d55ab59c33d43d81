//! Random crop, flip and cutout, as a pure function of (seed, epoch, sample) (D8).
//!
//! The random words w0 … w4 are the first five of `random::Rng::new(seed, Purpose::Augment, epoch,
//! sample)`, `sample` being the index in the dataset: an image is augmented alike in every batch
//! and env, and on every device. A position among n is `(w · n) >> 32`; its bias, below n / 2^32,
//! is negligible here.
//!
//! 1. Crop with padding p: the image is padded with black (byte 0), and a window of the image's
//!    size is taken, its corner at position w0 among 2p + 1 rows and w1 among 2p + 1 columns.
//! 2. Flip: left and right are swapped if the top bit of w2 is set.
//! 3. Normalisation.
//! 4. Cutout of side s (DeVries and Taylor, 2017, arXiv 1708.04552): the square with rows `cy − s/2
//!    .. cy − s/2 + s` and the same range of columns around cx, clipped to the image, becomes 0,
//!    the mean; cy is position w3 among the rows, cx position w4 among the columns.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use meristem_device::random::{Purpose, Rng};

use crate::error::{Error, Result};
use crate::shape::{InputKind, SampleShape};

/// Augmentations to apply; the default is none. As text: `none`, `standard`, or parts joined by
/// commas, such as `crop=4,flip,cutout=8`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Augment {
    /// Pixels of padding on each side before a random crop to the original size; 0 for none.
    pub crop_padding: usize,
    /// Whether to flip left and right with probability 1/2.
    pub flip: bool,
    /// Side of the square that is cut out, in pixels; 0 for none.
    pub cutout: usize,
}

impl Augment {
    /// No augmentation.
    pub const NONE: Self = Self { crop_padding: 0, flip: false, cutout: 0 };
    /// The usual recipe for CIFAR: crop with 4 pixels of padding, and flip.
    pub const STANDARD: Self = Self { crop_padding: 4, flip: true, cutout: 0 };

    /// Refuses samples that are no images, and a padding or cutout above their shorter side.
    pub(crate) fn check(&self, kind: InputKind, shape: SampleShape) -> Result<()> {
        if kind != InputKind::Image && *self != Self::NONE {
            return Err(Error::Argument {
                operation: "gather",
                argument: "augment",
                expected: format!("none for {}", kind.plural()),
                got: self.to_string(),
                remedy: "crop, flip and cutout are for images".into(),
            });
        }
        let shorter = shape.height.min(shape.width);
        for (argument, value) in
            [("augment.crop_padding", self.crop_padding), ("augment.cutout", self.cutout)]
        {
            if value > shorter {
                return Err(Error::Argument {
                    operation: "gather",
                    argument,
                    expected: format!("at most {shorter}, the shorter side of the images"),
                    got: value.to_string(),
                    remedy: "an eighth of the side is usual for a crop, a quarter for a cutout"
                        .into(),
                });
            }
        }
        Ok(())
    }

    /// Draws the augmentation of `sample` in `epoch`.
    pub(crate) fn draw(
        &self,
        shape: SampleShape,
        seed: u64,
        epoch: u64,
        sample: u32,
    ) -> AugmentDraw {
        let SampleShape { height, width, .. } = shape;
        let mut random = Rng::new(seed, Purpose::Augment, epoch, u64::from(sample));
        // Only the cutout uses the last two words.
        let words: [u32; 5] =
            std::array::from_fn(|i| if i < 3 || self.cutout > 0 { random.next_u32() } else { 0 });
        let place = |word: u32, n: usize| ((u64::from(word) * n as u64) >> 32) as usize;
        let span = 2 * self.crop_padding + 1;
        let cut = |word, n| {
            let start = place(word, n) as isize - (self.cutout / 2) as isize;
            start.max(0) as usize..(start + self.cutout as isize).clamp(0, n as isize) as usize
        };
        AugmentDraw {
            top: place(words[0], span) as isize - self.crop_padding as isize,
            left: place(words[1], span) as isize - self.crop_padding as isize,
            flip: self.flip && words[2] >> 31 == 1,
            cut_rows: cut(words[3], height),
            cut_columns: cut(words[4], width),
        }
    }
}

/// The augmentation of one image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AugmentDraw {
    /// Source row of row 0; rows outside of the image are black.
    pub(crate) top: isize,
    /// Source column of column 0, before the flip.
    pub(crate) left: isize,
    pub(crate) flip: bool,
    /// Rows of the result to cut out; empty for none.
    pub(crate) cut_rows: Range<usize>,
    /// Columns of the result to cut out; empty for none.
    pub(crate) cut_columns: Range<usize>,
}

impl fmt::Display for Augment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.crop_padding > 0).then(|| format!("crop={}", self.crop_padding)),
            self.flip.then(|| "flip".to_string()),
            (self.cutout > 0).then(|| format!("cutout={}", self.cutout)),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        f.write_str(if parts.is_empty() { "none" } else { "" })?;
        f.write_str(&parts.join(","))
    }
}

impl FromStr for Augment {
    type Err = Error;

    /// # Errors
    /// [`Error::Argument`] for an unknown part, or one without a whole number of pixels.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "none" => return Ok(Self::NONE),
            "standard" => return Ok(Self::STANDARD),
            _ => {}
        }
        let mut augment = Self::NONE;
        for part in text.split(',') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match (name, value.parse()) {
                ("flip", _) if value.is_empty() => augment.flip = true,
                ("crop", Ok(padding)) => augment.crop_padding = padding,
                ("cutout", Ok(side)) => augment.cutout = side,
                _ => {
                    return Err(Error::Argument {
                        operation: "augment",
                        argument: "augment",
                        expected: "none, standard, or a list of crop=PIXELS, flip, cutout=PIXELS"
                            .into(),
                        got: format!("`{part}`"),
                        remedy: "separate several by commas: crop=4,flip,cutout=8".into(),
                    });
                }
            }
        }
        Ok(augment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for text in ["none", "crop=4,flip", "cutout=8", "crop=2,flip,cutout=1", "flip"] {
            assert_eq!(text.parse::<Augment>().unwrap().to_string(), text);
        }
        assert_eq!("standard".parse::<Augment>().unwrap(), Augment::STANDARD);
        for wrong in ["", "crop", "crop=x", "flip=1", "rotate", "crop=4 flip"] {
            let error = wrong.parse::<Augment>().unwrap_err();
            assert!(matches!(error, Error::Argument { .. }), "{error:?}");
            assert!(error.to_string().contains("crop=4,flip"), "{error}");
        }
    }

    #[test]
    fn draws_cover_their_ranges_and_depend_on_every_part_of_the_key() {
        let shape = SampleShape { channels: 1, height: 7, width: 9 };
        let augment = Augment { crop_padding: 2, flip: true, cutout: 3 };
        let draws: Vec<AugmentDraw> = (0..2000).map(|i| augment.draw(shape, 1, 0, i)).collect();
        for top in -2..=2 {
            assert!(draws.iter().any(|d| d.top == top) && draws.iter().any(|d| d.left == top));
        }
        let flips = draws.iter().filter(|d| d.flip).count();
        assert!((900..1100).contains(&flips), "{flips} of 2000");
        assert!(draws.iter().all(|d| d.cut_rows.end <= 7 && d.cut_columns.end <= 9));
        assert!(
            draws.iter().any(|d| d.cut_rows == (0..2))
                && draws.iter().any(|d| d.cut_rows == (5..7))
        );
        let first = |seed, epoch, sample| augment.draw(shape, seed, epoch, sample);
        let differs = |a: fn(u32) -> (u64, u64, u32)| {
            (0..50).map(a).any(|(s, e, n)| first(s, e, n) != first(1, 0, 0))
        };
        assert!(differs(|i| (u64::from(i), 0, 0)));
        assert!(differs(|i| (1, u64::from(i) << 32, 0)));
        assert!(differs(|i| (1, 0, i)));
    }
}

//! Blocks of tiles that are computed together, and the copy of their images with a halo.

use crate::PAD;

/// Division of a convolution's images into tiles.
#[derive(Clone, Copy)]
pub(super) struct TileGrid {
    pub(super) h: usize,
    pub(super) w: usize,
    /// Rows, and columns, of outputs of a tile.
    pub(super) outputs: usize,
}

impl TileGrid {
    /// Rows and columns of tiles of an image.
    pub(super) const fn tiles(&self) -> [usize; 2] {
        [self.h.div_ceil(self.outputs), self.w.div_ceil(self.outputs)]
    }

    /// Points of a tile.
    pub(super) const fn points(&self) -> usize {
        (self.outputs + 2) * (self.outputs + 2)
    }
}

/// Tiles that are computed together: all of some images, or some rows of one.
#[derive(Clone, Copy)]
pub(super) struct TileBlock {
    pub(super) grid: TileGrid,
    pub(super) images: usize,
    /// First row of tiles of each image.
    pub(super) first: usize,
    /// Rows of tiles of each image.
    pub(super) rows: usize,
}

/// Place of a tile in a block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TilePosition {
    pub(super) image: usize,
    pub(super) row: usize,
    pub(super) column: usize,
}

impl TileBlock {
    /// Refuses a block whose tiles do not have `outputs` outputs or exceed the images: the
    /// transforms compute addresses from it.
    pub(super) fn check(&self, outputs: usize) {
        let inside = self.first + self.rows <= self.grid.tiles()[0];
        assert!(self.grid.outputs == outputs && inside, "winograd: tiles of the images");
    }

    /// Number of tiles.
    pub(super) const fn len(&self) -> usize {
        self.images * self.rows * self.grid.tiles()[1]
    }

    /// Stride between the points of a block, in elements: an odd number of cache lines, because
    /// points at a power-of-two stride would share few cache sets. If a vector holds two tiles,
    /// there is space for one extra tile.
    pub(super) const fn plane(&self, c: usize) -> usize {
        ((self.len() * c).div_ceil(PAD) | 1) * PAD
    }

    /// The tile after this one.
    #[inline(always)]
    pub(super) const fn after(&self, at: TilePosition) -> TilePosition {
        let TilePosition { image, row, column } = at;
        if column + 1 < self.grid.tiles()[1] {
            return TilePosition { column: column + 1, ..at };
        }
        if row + 1 < self.rows {
            return TilePosition { image, row: row + 1, column: 0 };
        }
        TilePosition { image: image + 1, row: 0, column: 0 }
    }

    /// Rows and columns of the copy of an image.
    const fn padded(&self) -> [usize; 2] {
        [self.rows * self.grid.outputs + 2, self.grid.tiles()[1] * self.grid.outputs + 2]
    }

    /// Strides of the copy: between images, and between rows.
    pub(super) const fn strides(&self, c: usize) -> [usize; 2] {
        let [rows, columns] = self.padded();
        [rows * columns * c, columns * c]
    }

    /// Elements of the copy.
    pub(super) const fn padded_len(&self, c: usize) -> usize {
        self.images * self.strides(c)[0]
    }

    /// Copies the images' rows that the tiles read, with zeros around the images: `x` has whole
    /// images of `c` channels, `to` has [`TileBlock::padded_len`].
    pub(super) fn copy(&self, c: usize, x: &[f32], to: &mut [f32]) {
        let TileGrid { h, w, outputs } = self.grid;
        let [image, row] = self.strides(c);
        let top = self.first * outputs;
        for (x, to) in x.chunks_exact(h * w * c).zip(to.chunks_exact_mut(image)) {
            for (y, to) in to.chunks_exact_mut(row).enumerate() {
                let source = (top + y).checked_sub(1).filter(|y| *y < h);
                let Some(source) = source else {
                    to.fill(0.0);
                    continue;
                };
                let from = &x[source * w * c..(source + 1) * w * c];
                let (left, to) = to.split_at_mut(c);
                let (to, right) = to.split_at_mut(w * c);
                left.fill(0.0);
                to.copy_from_slice(from);
                right.fill(0.0);
            }
        }
    }

    /// Rows and columns of the outputs of a tile that are inside the image.
    #[inline(always)]
    pub(super) const fn inside(&self, of: TilePosition) -> [usize; 2] {
        let TileGrid { h, w, outputs } = self.grid;
        let [y, x] = [h - (self.first + of.row) * outputs, w - of.column * outputs];
        [if y < outputs { y } else { outputs }, if x < outputs { x } else { outputs }]
    }
}

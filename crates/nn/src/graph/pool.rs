//! Pooling over windows.

use super::{Dims, GraphBuilder, NodeId, NodeOp, PoolGeometry};
use crate::error::{Error, Result};

impl GraphBuilder {
    /// Max pooling with a square window, no padding; `layer` is named in errors.
    ///
    /// # Errors
    /// As [`GraphBuilder::max_pool2d_with`].
    pub fn max_pool2d(
        &mut self,
        x: NodeId,
        layer: &str,
        kernel: usize,
        stride: usize,
    ) -> Result<NodeId> {
        self.max_pool2d_with(x, layer, PoolGeometry::square(kernel, stride))
    }

    /// PyTorch's `MaxPool2d`; `layer` is named in errors. A signal is an image with one row, whose
    /// windows have a height of 1.
    ///
    /// # Errors
    /// [`Error::TooSmall`] for windows that do not fit into the padded image, and empty ones;
    /// [`Error::Unsupported`] for a padding of more than half a window.
    pub fn max_pool2d_with(
        &mut self,
        x: NodeId,
        layer: &str,
        window: PoolGeometry,
    ) -> Result<NodeId> {
        let dims = self.pooled(x, layer, window)?;
        Ok(self.push(NodeOp::MaxPool2d { x, window }, dims))
    }

    /// PyTorch's `AvgPool2d`, whose padding counts as zeros (`count_include_pad`); `layer` is named
    /// in errors.
    ///
    /// # Errors
    /// As [`GraphBuilder::max_pool2d_with`].
    pub fn avg_pool2d(&mut self, x: NodeId, layer: &str, window: PoolGeometry) -> Result<NodeId> {
        let dims = self.pooled(x, layer, window)?;
        Ok(self.push(NodeOp::AvgPool2d { x, window }, dims))
    }

    /// Maximum over the image: `C × H × W` to `C × 1 × 1`.
    pub fn global_max_pool(&mut self, x: NodeId) -> NodeId {
        let Dims { c, h, w } = self.dims(x);
        let window = PoolGeometry { kernel: [h, w], stride: [1; 2], padding: [0; 2] };
        self.push(NodeOp::MaxPool2d { x, window }, Dims { c, h: 1, w: 1 })
    }

    /// Shape of the output.
    fn pooled(&self, x: NodeId, layer: &str, window: PoolGeometry) -> Result<Dims> {
        let dims = self.dims(x);
        if !window.pads_by_half() {
            let expected = "a padding of at most half of the window";
            let ([h, w], [rows, columns]) = (window.kernel, window.padding);
            let got = format!("{rows}x{columns} around a {h}x{w} window");
            return Err(Error::Unsupported { layer: layer.into(), expected, got });
        }
        match (window.windows(0, dims.h), window.windows(1, dims.w)) {
            (Some(h), Some(w)) => Ok(Dims { c: dims.c, h, w }),
            _ => Err(Error::TooSmall { layer: layer.into(), dims, window: window.kernel }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{ConvGeometry, SgdConfig};

    #[test]
    fn windows_that_cannot_be_are_refused_by_name() {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
        let mut b = GraphBuilder::new(Dims { c: 3, h: 1, w: 40 }, sgd);
        let x = b.input();
        let row = PoolGeometry { kernel: [1, 3], stride: [1, 2], padding: [0, 1] };
        let pooled = b.max_pool2d_with(x, "pool", row).unwrap();
        assert_eq!(b.dims(pooled), Dims { c: 3, h: 1, w: 20 });
        assert_eq!(b.global_max_pool(pooled), NodeId(2));
        let far = PoolGeometry { padding: [0, 2], ..row };
        let error = b.avg_pool2d(x, "pool", far).unwrap_err();
        let expected = "`pool`: expected a padding of at most half of the window, got 0x2 around a \
                        1x3 window";
        assert_eq!(error.to_string(), expected);
        for window in [PoolGeometry::square(2, 1), PoolGeometry { stride: [1, 0], ..row }] {
            let error = b.max_pool2d_with(x, "pool", window).unwrap_err();
            assert!(matches!(error, Error::TooSmall { .. }), "{error:?}");
        }
        let error = b.max_pool2d(x, "pool", 0, 1).unwrap_err();
        assert!(matches!(error, Error::TooSmall { window: [0, 0], .. }), "{error:?}");
        // A comparison for each element of a window: three of 20 outputs, then 20 of one.
        let graph = b.finish_at(NodeId(2));
        assert_eq!([1, 2].map(|node| graph.flops(NodeId(node))), [3 * 3 * 20, 3 * 20]);
    }

    #[test]
    fn parts_that_do_not_fit_and_windows_apart_are_refused() {
        let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
        let mut b = GraphBuilder::new(Dims { c: 3, h: 5, w: 4 }, sgd);
        let x = b.input();
        let flat = b.flatten(x);
        assert_eq!(b.dims(flat), Dims { c: 60, h: 1, w: 1 });
        let both = b.concat(&[x, x]).unwrap();
        assert_eq!(b.dims(both), Dims { c: 6, h: 5, w: 4 });
        let error = b.concat(&[x, flat]).unwrap_err();
        let expected = "concat: expected 60 channels of 5 x 4 per sample, got 60 channels of 1 x 1";
        assert_eq!(error.to_string(), expected);
        let error = b.concat(&[]).unwrap_err().to_string();
        assert_eq!(error, "`concat`: expected at least one part, got none");
        assert!(matches!(b.multiply(x, both), Err(Error::Dims { op: "multiply", .. })));
        let apart = ConvGeometry::new([3, 1]).dilation([2, 1]);
        let y = b.conv2d(x, "fits", 2, apart, false).unwrap();
        assert_eq!(b.dims(y), Dims { c: 2, h: 1, w: 4 });
        for dilation in [[3, 1], [0, 1]] {
            let error = b.conv2d(x, "far", 2, apart.dilation(dilation), false).unwrap_err();
            assert!(matches!(error, Error::TooSmall { .. }), "{error:?}");
        }
    }
}

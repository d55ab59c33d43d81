//! The `cnn` host of the goldens, and training it on a device.

use std::sync::Arc;

use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Stream, Tensor,
};
use meristem_nn::graph::{ConvGeometry, Dims, Graph, GraphBuilder, NodeId, SgdConfig};

/// The host optimiser of `docs/growth.md`.
pub(crate) const SGD: SgdConfig =
    SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1.0 };

/// A `cnn` host.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) channels: usize,
    pub(crate) blocks: usize,
    pub(crate) kernel: usize,
    pub(crate) pools: usize,
}

pub(crate) const BASELINE: Shape = Shape { channels: 8, blocks: 3, kernel: 3, pools: 3 };
pub(crate) const DEEP: Shape = Shape { channels: 8, blocks: 5, kernel: 3, pools: 5 };
pub(crate) const MINIMAL: Shape = Shape { channels: 2, blocks: 3, kernel: 1, pools: 0 };

/// A host; `slot(builder, name, x)` may add nodes after block i (`r0c{i}`) and after its pool
/// (`r1c{i}`).
pub(crate) fn graph(
    shape: Shape,
    dims: Dims,
    mut slot: impl FnMut(&mut GraphBuilder, &str, NodeId) -> NodeId,
) -> Arc<Graph> {
    let mut b = GraphBuilder::new(dims, SGD);
    let mut x = b.input();
    for i in 0..shape.blocks {
        let geometry = ConvGeometry::same(shape.kernel);
        let out = shape.channels << i;
        x = b.conv2d(x, &format!("blocks.{i}.conv"), out, geometry, false).unwrap();
        x = b.batch_norm(x, &format!("blocks.{i}.bn")).unwrap();
        x = b.relu(x);
        x = slot(&mut b, &format!("r0c{i}"), x);
        if i < shape.pools {
            x = b.max_pool2d(x, "pool", 2, 2).unwrap();
            x = slot(&mut b, &format!("r1c{i}"), x);
        }
    }
    let x = b.global_avg_pool(x);
    let logits = b.linear(x, "classifier", 10, true, None).unwrap();
    Arc::new(b.finish(logits).unwrap())
}

/// The bare host.
pub(crate) fn bare(shape: Shape, dims: Dims) -> Arc<Graph> {
    graph(shape, dims, |_, _, x| x)
}

/// A stream of a CPU device with this many workers.
pub(crate) fn stream(threads: usize) -> Stream {
    let options = DeviceOptions { threads, ..DeviceOptions::default() };
    Device::open(DeviceId::Cpu(0), &options).unwrap().stream("env 0")
}

/// Images, given in PyTorch's order, on a device.
pub(crate) fn images(stream: &Stream, x: &[f32], dims: Dims) -> Tensor {
    let batch = x.len() / dims.numel();
    let shape = [batch, dims.c, dims.h, dims.w];
    let format = MemoryFormat::ChannelsLast;
    let x = super::to_nhwc(x, dims);
    let tensor =
        Tensor::empty_with_format(stream, shape, DType::F32, format, Owner::Batches).unwrap();
    tensor.copy_from_slice(&x).unwrap();
    tensor
}

/// Labels on a device.
pub(crate) fn labels(stream: &Stream, y: &[u32]) -> Tensor {
    Tensor::from_slice(stream, y, [y.len()], Owner::Batches).unwrap()
}

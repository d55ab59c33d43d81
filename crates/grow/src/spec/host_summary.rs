//! Sizes of a host, layer by layer.

use meristem_nn::graph::{Dims, GraphBuilder, NodeId};
use serde::Serialize;

use super::error::HostError;
use super::host_layer::HostLayer;
use super::host_spec::HostSpec;
use super::slot_name::SlotName;
use super::task_shape::TaskShape;
use super::walk::HostVisitor;
use crate::optimisers::Optimisers;

/// A layer with its output shape, parameters and multiply-accumulate operations for images of one
/// shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizedLayer<'a> {
    /// The layer.
    pub layer: &'a HostLayer,
    /// Nesting depth: number of layers that contain this layer.
    pub depth: usize,
    /// Shape of the output per image.
    pub output: Dims,
    /// Trained parameters, without those of nested layers.
    pub parameters: usize,
    /// Multiply-accumulate operations per image, in evaluation, without those of nested layers.
    pub macs: u64,
}

/// A host without modules, for images of one shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostSummary {
    /// Name of the host.
    pub name: String,
    /// Description of the host.
    pub host: String,
    /// Channels, rows and columns of an image.
    pub input: [usize; 3],
    /// Classes of the dataset.
    pub classes: usize,
    /// Layers in forward order, the layers of branches before the layer that joins them.
    pub layers: Vec<LayerSummary>,
    /// Number of slots.
    pub slots: usize,
    /// Trained parameters.
    pub parameters: usize,
    /// Multiply-accumulate operations per image, in evaluation.
    pub macs: u64,
}

/// A layer or slot of a [`HostSummary`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerSummary {
    /// Prefix of the tensor names, or name of the slot; `None` for a layer without a name.
    pub name: Option<String>,
    /// Kind of the layer, with its kernel.
    pub layer: String,
    /// Nesting depth: number of layers that contain this layer.
    pub depth: usize,
    /// Channels, rows and columns of the output for one image.
    pub output: [usize; 3],
    /// Trained parameters.
    pub parameters: usize,
    /// Multiply-accumulate operations per image.
    pub macs: u64,
}

/// Sizes of the layers that were added to a graph.
struct Sizes<'a> {
    sized: Vec<SizedLayer<'a>>,
    /// Parameters and multiply-accumulate operations of the layers added so far.
    before: (usize, u64),
}

impl<'a> HostVisitor<'a> for Sizes<'a> {
    type Error = HostError;

    fn slot(&mut self, _: &mut GraphBuilder, _: &SlotName, x: NodeId) -> Result<NodeId, HostError> {
        Ok(x)
    }

    fn added(&mut self, layer: &'a HostLayer, depth: usize, b: &GraphBuilder, x: NodeId) {
        let (parameters, macs) = (b.so_far().parameters(None), b.so_far().macs());
        self.sized.push(SizedLayer {
            layer,
            depth,
            output: b.dims(x),
            parameters: parameters - self.before.0,
            macs: macs - self.before.1,
        });
        self.before = (parameters, macs);
    }
}

impl HostSpec {
    /// All layers with their sizes for these images, in the order of [`HostSpec::all_layers`].
    ///
    /// # Errors
    /// As [`HostSpec::validate`].
    pub fn sizes(&self, image: &TaskShape) -> Result<Vec<SizedLayer<'_>>, HostError> {
        Self::check_image(image)?;
        self.check_family(image)?;
        let dims = Dims { c: image.channels, h: image.height, w: image.width };
        let mut b = GraphBuilder::new(dims, Optimisers::default().host);
        let mut sizes = Sizes { sized: vec![], before: (0, 0) };
        self.add_to(&mut b, image, &mut sizes)?;
        if b.so_far().params.is_empty() {
            let (host, problem) = (self.name(), "it has no parameters to train".into());
            return Err(HostError::Description { host, problem });
        }
        Ok(sizes.sized)
    }

    /// Sizes of all layers for images of this shape.
    ///
    /// # Errors
    /// As [`HostSpec::validate`].
    pub fn summary(&self, image: &TaskShape) -> Result<HostSummary, HostError> {
        let layer = |sized: SizedLayer<'_>| {
            let SizedLayer { layer, depth, output: Dims { c, h, w }, parameters, macs } = sized;
            let (name, layer) = (layer.name().map(str::to_owned), layer.to_string());
            LayerSummary { name, layer, depth, output: [c, h, w], parameters, macs }
        };
        let layers: Vec<LayerSummary> = self.sizes(image)?.into_iter().map(layer).collect();
        Ok(HostSummary {
            name: self.name(),
            host: self.description().to_owned(),
            input: [image.channels, image.height, image.width],
            classes: image.classes,
            slots: self.slots().len(),
            parameters: layers.iter().map(|layer| layer.parameters).sum(),
            macs: layers.iter().map(|layer| layer.macs).sum(),
            layers,
        })
    }
}

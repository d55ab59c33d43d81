//! Sizes of a host, layer by layer, for people and programs.

use meristem_nn::graph::Dims;
use serde::Serialize;

use super::error::HostError;
use super::host_layer::{HostLayer, LayerSize};
use super::host_spec::HostSpec;
use super::task_shape::TaskShape;

/// A host without modules, for images of one shape (row N6).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostSummary {
    /// Description of the host.
    pub host: String,
    /// Channels, rows and columns of an image.
    pub input: [usize; 3],
    /// Classes of the dataset.
    pub classes: usize,
    /// Layers in forward order.
    pub layers: Vec<LayerSummary>,
    /// Number of slots.
    pub slots: usize,
    /// Trained parameters.
    pub parameters: usize,
    /// Multiply-accumulate operations per image, in evaluation (saturating).
    pub macs: usize,
}

/// A layer or slot of a [`HostSummary`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerSummary {
    /// Prefix of the tensor names, or name of the slot; `None` for a layer without a name.
    pub name: Option<String>,
    /// Kind of the layer, with its kernel.
    pub layer: String,
    /// Channels, rows and columns of the output for one image.
    pub output: [usize; 3],
    /// Trained parameters.
    pub parameters: usize,
    /// Multiply-accumulate operations per image.
    pub macs: usize,
}

impl HostSpec {
    /// Sizes of all layers for images of this shape.
    ///
    /// # Errors
    /// As [`HostSpec::validate`].
    pub fn summary(&self, image: &TaskShape) -> Result<HostSummary, HostError> {
        self.validate(image)?;
        let layer = |(layer, size): (&HostLayer, LayerSize)| {
            let LayerSize { output: Dims { c, h, w }, parameters, macs } = size;
            let name = layer.name().map(str::to_owned);
            LayerSummary { name, layer: layer.to_string(), output: [c, h, w], parameters, macs }
        };
        let layers: Vec<LayerSummary> = self.sizes(image).map(layer).collect();
        Ok(HostSummary {
            host: self.description().to_owned(),
            input: [image.channels, image.height, image.width],
            classes: image.classes,
            slots: self.slots().len(),
            parameters: self.parameters(image),
            macs: layers.iter().fold(0, |sum, layer| sum.saturating_add(layer.macs)),
            layers,
        })
    }
}

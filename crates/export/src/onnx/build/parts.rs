//! Operators and initializers, added one by one.

use meristem_nn::graph::{BufferId, ParamId};

use super::OnnxBuilder;
use crate::onnx::OnnxError;
use crate::onnx::messages::{AttributeProto, FLOAT, INT64, NodeProto, TensorProto};

impl OnnxBuilder<'_> {
    /// Adds an operator and returns the name of its output.
    pub(super) fn push(
        &mut self,
        operator: &str,
        inputs: &[&(impl AsRef<str> + ?Sized)],
        attributes: Vec<AttributeProto>,
    ) -> String {
        let output = format!("{operator}.{}", self.nodes.len());
        let inputs: Vec<&str> = inputs.iter().map(|input| input.as_ref()).collect();
        self.push_to(operator, &inputs, &output, attributes);
        output
    }

    pub(super) fn push_to(
        &mut self,
        operator: &str,
        inputs: &[&str],
        output: &str,
        attribute: Vec<AttributeProto>,
    ) {
        self.nodes.push(NodeProto {
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec![output.into()],
            name: output.into(),
            op_type: operator.into(),
            attribute,
        });
    }

    /// The initializer of a parameter, in another shape if given.
    pub(super) fn param(
        &mut self,
        id: ParamId,
        shape: Option<&[usize]>,
    ) -> Result<String, OnnxError> {
        let param = &self.network.graph.params[id.index()];
        self.tensor(&param.name, shape.unwrap_or(&param.shape))
    }

    pub(super) fn buffer(&mut self, id: BufferId) -> Result<String, OnnxError> {
        let buffer = &self.network.graph.buffers[id.index()];
        self.tensor(&buffer.name, &[buffer.len])
    }

    /// The initializer of a tensor in the state.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<String, OnnxError> {
        let expected = shape.iter().product();
        let found = self.network.state.get(name);
        match found.and_then(|tensor| tensor.as_f32()) {
            Some(values) if values.len() == expected => Ok(self.constant(name, shape, values)),
            _ => {
                let got = found.map_or("nothing".into(), |tensor| tensor.form());
                Err(OnnxError::Tensor { name: name.into(), expected, got })
            }
        }
    }

    /// An initializer with floats; added once per name.
    pub(super) fn constant(&mut self, name: &str, shape: &[usize], values: &[f32]) -> String {
        let bytes = || values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.initializer(name, FLOAT, shape, bytes)
    }

    /// An initializer with the shape for a `Reshape`; added once per shape.
    pub(super) fn shape(&mut self, dims: &[i64]) -> String {
        let texts: Vec<String> = dims.iter().map(ToString::to_string).collect();
        let bytes = || dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        self.initializer(&format!("shape.{}", texts.join(".")), INT64, &[dims.len()], bytes)
    }

    fn initializer(
        &mut self,
        name: &str,
        data_type: i32,
        shape: &[usize],
        bytes: impl FnOnce() -> Vec<u8>,
    ) -> String {
        if self.named.insert(name.into()) {
            let dims = shape.iter().map(|dim| *dim as i64).collect();
            let raw_data = bytes();
            self.initializers.push(TensorProto { dims, data_type, name: name.into(), raw_data });
        }
        name.into()
    }
}

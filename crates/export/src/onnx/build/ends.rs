//! The input of a model, with its preprocessing, and its output.

use meristem_nn::graph::Dims;

use super::{OnnxBuilder, axis, value_info};
use crate::onnx::messages::{AttributeProto, FLOAT, UINT8, ValueInfoProto};
use crate::onnx::{LOGITS, OUTPUTS, Preprocessing};

impl OnnxBuilder<'_> {
    /// The model's output, its name and meaning: the logits, or numbers in the units of the
    /// targets.
    pub(super) fn output(&mut self, logits: &str) -> (&'static str, &'static str) {
        let Some(constants) = self.network.outputs else {
            self.push_to("Flatten", &[logits], LOGITS, vec![axis(1)]);
            return (LOGITS, "logits, [N, classes]");
        };
        let flat = self.push("Flatten", &[logits], vec![axis(1)]);
        let (scale, shift): (Vec<f32>, Vec<f32>) = constants.iter().copied().unzip();
        let scale = self.constant("outputs.scale", &[scale.len()], &scale);
        let shift = self.constant("outputs.shift", &[shift.len()], &shift);
        let scaled = self.push("Mul", &[&flat, &scale], vec![]);
        self.push_to("Add", &[&scaled, &shift], OUTPUTS, vec![]);
        (OUTPUTS, "numbers, [N, outputs]")
    }

    /// Name of the model's input.
    fn input_name(&self) -> &'static str {
        if self.network.sample.len() == 3 { "images" } else { "inputs" }
    }

    /// Whether the model takes images of bytes, whose channels are last, as in files.
    fn takes_pixels(&self) -> bool {
        self.network.sample.len() == 3 && self.network.preprocessing.is_some_and(|p| p.bytes)
    }

    /// Description of the model's input.
    pub(super) fn input_info(&self) -> ValueInfoProto {
        let Dims { c, h, w } = self.network.graph.input_dims();
        let (name, sample) = (self.input_name(), self.network.sample);
        if self.takes_pixels() {
            let meaning = "images as bytes, [N, rows, columns, channels]";
            return value_info(name, UINT8, &[h, w, c], meaning);
        }
        let axes = match sample.len() {
            1 => "[N, features]",
            2 => "[N, channels, points]",
            _ => "[N, channels, rows, columns]",
        };
        let kind = if name == "images" { "images" } else { "samples" };
        let (element, meaning) = match self.network.preprocessing {
            None => (FLOAT, format!("normalised {kind}, {axes}")),
            Some(Preprocessing { bytes: false, .. }) => (FLOAT, format!("{kind}, {axes}")),
            Some(Preprocessing { bytes: true, .. }) => (UINT8, format!("{kind} as bytes, {axes}")),
        };
        value_info(name, element, sample, &meaning)
    }

    /// The normalised samples, `[N, C, H, W]`.
    pub(super) fn input(&mut self) -> String {
        let Dims { c, h, w } = self.network.graph.input_dims();
        let mut x = self.input_name().to_string();
        let Some(Preprocessing { bytes, constants }) = self.network.preprocessing else {
            return self.as_image(x, [c, h, w]);
        };
        if bytes {
            let cast = AttributeProto::int("to", FLOAT as usize);
            x = self.push("Cast", &[&x], vec![cast]);
        }
        let pixels = self.takes_pixels();
        if !pixels {
            x = self.as_image(x, [c, h, w]);
        }
        let (scale, shift): (Vec<f32>, Vec<f32>) = constants.iter().copied().unzip();
        // Constants per channel, which is the last axis, or the third from the end.
        let shape: &[usize] = if pixels { &[c] } else { &[c, 1, 1] };
        let scale = self.constant("preprocessing.scale", shape, &scale);
        let shift = self.constant("preprocessing.shift", shape, &shift);
        let scaled = self.push("Mul", &[&x, &scale], vec![]);
        let shifted = self.push("Add", &[&scaled, &shift], vec![]);
        if !pixels {
            return shifted;
        }
        let axes = AttributeProto::ints("perm", &[0, 3, 1, 2]);
        self.push("Transpose", &[&shifted], vec![axes])
    }

    /// Vectors and signals as images of one row.
    fn as_image(&mut self, x: String, [c, h, w]: [usize; 3]) -> String {
        if self.network.sample.len() == 3 {
            return x;
        }
        let shape = self.shape(&[-1, c as i64, h as i64, w as i64]);
        self.push("Reshape", &[&x, &shape], vec![])
    }
}

//! The families `mlp` and `conv1d` of hosts, which are given as the widths of their layers.

use super::error::HostError;
use super::host_layer::HostLayer;
use super::layer_values::Features;
use super::limits::SIZE_MAX;
use super::per_axis::PerAxis;
use super::task_shape::TaskShape;

/// Largest number of widths.
const WIDTHS_MAX: usize = 32;
/// Prefix of the probability of dropout, an optional last part of an `mlp`.
const DROPOUT: &str = "dropout=";
/// Points of a window of `conv1d`.
const WINDOW: usize = 5;

/// A family whose hosts differ in the widths of their layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WidthFamily {
    /// `mlp:256,256` or `mlp:256,256,dropout=0.2`: a multilayer perceptron.
    Mlp,
    /// `conv1d:16,32,64`: convolutions over signals, as `conv2d` layers with 1×5 windows, so that
    /// the weights have the shape of PyTorch's `Conv2d`.
    Conv1d,
}

impl WidthFamily {
    /// The family of a text, by its beginning.
    pub(super) fn of(text: &str) -> Option<Self> {
        [WidthFamily::Mlp, WidthFamily::Conv1d].into_iter().find(|of| text.starts_with(of.prefix()))
    }

    fn prefix(self) -> &'static str {
        match self {
            WidthFamily::Mlp => "mlp:",
            WidthFamily::Conv1d => "conv1d:",
        }
    }

    /// Meaning of a part of the text, for errors.
    fn part(self) -> &'static str {
        match self {
            WidthFamily::Mlp => "the width of a hidden layer",
            WidthFamily::Conv1d => "the channels of a convolution",
        }
    }

    /// Layers of the host with this text.
    ///
    /// # Errors
    /// [`HostError::BadPart`] for a width that is no number, [`HostError::Size`] for one outside
    /// its range, or for too many.
    pub(super) fn layers(self, text: &str) -> Result<Vec<HostLayer>, HostError> {
        let (widths_text, dropout) = self.dropout(text)?;
        let widths = self.widths(widths_text)?;
        let mut layers = match self {
            WidthFamily::Mlp => perceptron(&widths, dropout),
            WidthFamily::Conv1d => convolutions(&widths),
        };
        let (name, out) = ("classifier".into(), Features::Classes);
        layers.push(HostLayer::Linear { name, out, bias: true });
        Ok(layers)
    }

    /// The text without a last part `dropout=…`, and the probability in that part, if there is one.
    fn dropout(self, text: &str) -> Result<(&str, Option<f32>), HostError> {
        let Some((before, part)) = text.rsplit_once(',') else { return Ok((text, None)) };
        let Some(p) = part.trim().strip_prefix(DROPOUT).filter(|_| self == WidthFamily::Mlp) else {
            return Ok((text, None));
        };
        match p.parse().ok().filter(|p| (0.0..1.0).contains(p)) {
            Some(p) => Ok((before, Some(p))),
            None => {
                let expected = "a probability of dropout from 0 to below 1";
                Err(HostError::BadPart { given: text.into(), expected, part: part.into() })
            }
        }
    }

    fn widths(self, text: &str) -> Result<Vec<usize>, HostError> {
        let [width_of, number_of] = match self {
            WidthFamily::Mlp => ["width of a hidden layer", "number of hidden layers"],
            WidthFamily::Conv1d => ["channels of a convolution", "number of convolutions"],
        };
        let parts = text.strip_prefix(self.prefix()).unwrap_or(text).split(',').map(str::trim);
        let width = |(i, part): (usize, &str)| {
            let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            let (given, expected) = (text.into(), self.part());
            let bad = || HostError::BadPart { given, expected, part: part.into() };
            let width = digits.then(|| part.parse().ok()).flatten().ok_or_else(bad)?;
            HostError::check_size(width_of, width, 1, SIZE_MAX)?;
            HostError::check_size(number_of, i + 1, 1, WIDTHS_MAX)?;
            Ok(width)
        };
        parts.enumerate().map(width).collect()
    }

    /// Checks that a host of this family takes samples of this shape.
    ///
    /// # Errors
    /// [`HostError::Description`] for `conv1d` with samples that are not signals: its windows have
    /// one row and several points.
    pub(super) fn check(self, host: &str, image: &TaskShape) -> Result<(), HostError> {
        if self == WidthFamily::Mlp || (image.height == 1 && image.width > 1) {
            return Ok(());
        }
        let problem = format!(
            "it takes signals, which have one row and several points, and not samples of {image}; \
             use baseline or resnet8 for images, mlp:64,64 for vectors"
        );
        Err(HostError::Description { host: host.into(), problem })
    }
}

/// The sample as a vector; then for each width a linear layer, ReLU, the slot `h{i}`, and dropout
/// if there is any.
fn perceptron(widths: &[usize], dropout: Option<f32>) -> Vec<HostLayer> {
    let mut layers = vec![HostLayer::Flatten];
    for (i, out) in widths.iter().enumerate() {
        let (name, out) = (format!("hidden.{i}"), Features::Count(*out));
        layers.push(HostLayer::Linear { name, out, bias: true });
        layers.push(HostLayer::Relu);
        layers.push(HostLayer::Slot { name: format!("h{i}").into() });
        layers.extend(dropout.map(|p| HostLayer::dropout(format!("dropout.{i}"), p)));
    }
    layers
}

/// For each width a convolution, batch norm, ReLU and the slot `c{i}`, with a pool of two points
/// between them; then the mean over all points.
fn convolutions(widths: &[usize]) -> Vec<HostLayer> {
    let mut layers = vec![];
    for (i, out) in widths.iter().enumerate() {
        if i > 0 {
            let (name, kernel) = (format!("blocks.{i}.pool"), PerAxis { rows: 1, columns: 2 });
            let padding = PerAxis::both(0);
            layers.push(HostLayer::MaxPool2d { name, kernel, stride: None, padding });
        }
        let window = PerAxis { rows: 1, columns: WINDOW };
        layers.push(HostLayer::conv2d(format!("blocks.{i}.conv"), *out, window));
        layers.push(HostLayer::BatchNorm { name: format!("blocks.{i}.bn") });
        layers.push(HostLayer::Relu);
        layers.push(HostLayer::Slot { name: format!("c{i}").into() });
    }
    layers.push(HostLayer::GlobalAvgPool);
    layers
}

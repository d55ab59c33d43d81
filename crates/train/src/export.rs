//! Export of a weights file to other tools.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use meristem_data::{InputKind, Normalization, SampleShape, StoredType};
use meristem_device::{DeviceId, DeviceOptions};
use meristem_export::onnx;
use meristem_grow::{BlueprintSet, Host, Optimisers, Rules, TaskShape};
use meristem_nn::graph::Graph;
use meristem_nn::{Isa, Network, NetworkOptions};

use crate::config::devices::Devices;
use crate::config::types::Normalize;
use crate::error::{Error, Result};
use crate::hosts::read_host;
use crate::resources::OpenDevices;
use crate::setup::weights::{InputForm, OutputForm, Wanted, Weights};
use crate::task::TargetScale;

/// An export of a weights file to ONNX.
#[derive(Clone, Debug)]
pub struct OnnxConfig {
    /// Path of the weights file.
    pub weights: PathBuf,
    /// Host description, for a file without a topology in its metadata.
    pub host: Option<String>,
    /// Rows and columns of the images, for a file without a topology in its metadata.
    pub image_size: Option<[usize; 2]>,
    /// Normalisation, for a file without constants in its metadata.
    pub normalize: Option<Normalize>,
    /// Whether the model takes samples as the dataset stores them (pixels as bytes) and normalises
    /// them itself.
    pub preprocessing: bool,
}

/// An ONNX model.
#[derive(Clone, Debug)]
pub struct OnnxModel {
    /// Contents of its file.
    pub bytes: Vec<u8>,
    /// Element type and shape of the model's input, such as `images f32 [N, 3, 32, 32]`.
    pub input: String,
    /// Name of the model's output: `logits`, or `outputs` in the units of the targets.
    pub output: &'static str,
    /// Channels, rows and columns of an image, and number of classes.
    pub image: TaskShape,
    /// Constants that pixels are normalised with, if they are known.
    pub normalization: Option<Normalization>,
}

/// Exports the network of a weights file, as evaluation computes it: host and modules with their
/// alphas. Checks the weights by loading them into a network on the processor. Does not wait.
///
/// # Errors
/// Weights without a topology, if host and image size are not given; weights that do not fit;
/// [`Error::Value`]: another normalisation or image size than the file has, or preprocessing
/// without constants; [`Error::Onnx`]: an operation that has no ONNX form.
pub fn onnx(config: &OnnxConfig) -> Result<OnnxModel> {
    let weights = Weights::load(&config.weights)?;
    let host = host(config, &weights)?;
    let image = *host.image();
    let normalization = normalization(config, &weights, &image)?;
    let classes = weights.classes()?;
    let graph = Arc::new(host.graph(&Optimisers::default())?);
    check(&weights, &graph)?;
    let form = weights.sample_form()?;
    let TaskShape { channels, height, width, .. } = image;
    let sample = form.kind.dims(SampleShape { channels, height, width });
    let scale_and_shift = normalization.as_ref().map(|n| n.multiply_add(form.stored));
    let preprocessing = match (config.preprocessing, &scale_and_shift) {
        (false, _) => None,
        (true, Some(constants)) => {
            Some(onnx::Preprocessing { bytes: form.stored == StoredType::U8, constants })
        }
        (true, None) => {
            let expected = "with --normalize: the weights file has no normalisation constants";
            return Err(Error::value("with-preprocessing", "no constants", expected));
        }
    };
    let outputs = weights.output_form()?.unwrap_or(OutputForm::CLASSES);
    let scale = outputs.scale.as_ref().map(TargetScale::scale_and_shift);
    let mut metadata = metadata(config, (&host, form), normalization.as_ref(), classes.as_deref());
    if outputs != OutputForm::CLASSES {
        metadata.push(("outputs".into(), serde_json::json!(outputs).to_string()));
    }
    if let Some(rules) = weights.table_rules()? {
        metadata.push(("table".into(), serde_json::json!(rules).to_string()));
    }
    let bytes = onnx::encode(&onnx::OnnxNetwork {
        graph: &graph,
        state: &weights.state,
        alphas: &host.alphas(),
        sample: &sample,
        preprocessing,
        outputs: scale.as_deref(),
        metadata: &metadata,
    })?;
    let input = input_text(config.preprocessing, form, &sample);
    let output = if scale.is_some() { onnx::OUTPUTS } else { onnx::LOGITS };
    Ok(OnnxModel { bytes, input, output, image, normalization })
}

/// The host in the file; `config.host` for a file without a topology.
fn host(config: &OnnxConfig, weights: &Weights) -> Result<Host> {
    let spec = match &config.host {
        Some(text) => Some(read_host(text)?),
        None => None,
    };
    let image = match weights.image()? {
        Some(image) => image,
        None => {
            let Some([height, width]) = config.image_size else {
                let got = format!("no size, and no topology in {}", config.weights.display());
                return Err(Error::value("image-size", got, "rows and columns, such as 32x32"));
            };
            let spec = spec.as_ref().ok_or_else(|| weights.needs_host())?;
            let [channels, classes] = weights.channels_and_classes(spec)?;
            TaskShape { channels, height, width, classes }
        }
    };
    if let Some([height, width]) = config.image_size.filter(|s| *s != [image.height, image.width]) {
        let expected = format!("{}x{}, as in the file", image.height, image.width);
        return Err(Error::value("image-size", format!("{height}x{width}"), expected));
    }
    let wanted = Wanted { host: spec.as_ref(), image: &image };
    weights.host(&wanted, &[], &Arc::new(BlueprintSet::standard()), Rules::default())
}

/// The constants in the file; `config.normalize` for a file without constants.
fn normalization(
    config: &OnnxConfig,
    weights: &Weights,
    image: &TaskShape,
) -> Result<Option<Normalization>> {
    let own = weights.normalization(image.channels)?;
    let Some(given) = &config.normalize else { return Ok(own) };
    let Some(constants) = given.fixed(image.channels)? else {
        let expected = "cifar10, imagenet or mean=…;std=…, since an export reads no dataset";
        return Err(Error::value("normalize", format!("`{given}`"), expected));
    };
    if own.is_some_and(|own| own != constants) {
        let expected = "no other constants than those in the weights file, or none";
        return Err(Error::value("normalize", format!("`{given}`"), expected));
    }
    Ok(Some(constants))
}

/// Checks that the weights fit the network, and are complete and finite.
fn check(weights: &Weights, graph: &Arc<Graph>) -> Result<()> {
    let isa = Isa::from_env().map_err(meristem_device::Error::from)?;
    let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
    let devices = OpenDevices::open(&Devices::one(DeviceId::Cpu(0)), 0..1, &options)?;
    let options = NetworkOptions { configs: 1, ..NetworkOptions::new(0, 0, isa, 1) };
    let mut network = Network::new(&devices.streams()[0], Arc::clone(graph), options)?;
    weights.fill(&mut network)
}

/// Kind, element type and shape of the model's input.
fn input_text(preprocessing: bool, form: InputForm, sample: &[usize]) -> String {
    let mut axes: Vec<String> = sample.iter().map(ToString::to_string).collect();
    let is_bytes = preprocessing && form.stored == StoredType::U8;
    if is_bytes && form.kind == InputKind::Image {
        axes.rotate_left(1);
    }
    let element = if is_bytes { "u8" } else { "f32" };
    format!("{} {element} [N, {}]", form.kind.plural(), axes.join(", "))
}

/// Keys and values of the model's metadata.
fn metadata(
    config: &OnnxConfig,
    (host, form): (&Host, InputForm),
    normalization: Option<&Normalization>,
    classes: Option<&[String]>,
) -> Vec<(String, String)> {
    let mut all = vec![("host".to_string(), host.spec().description().to_string())];
    if let Some(classes) = classes {
        all.push(("classes".into(), serde_json::json!(classes).to_string()));
    }
    if let Some(Normalization { mean, std }) = normalization {
        let constants = serde_json::json!({ "mean": mean, "std": std });
        all.push(("normalization".into(), constants.to_string()));
    }
    let axes = match form.kind {
        InputKind::Vector => "[N, F]",
        InputKind::Signal => "[N, C, L]",
        InputKind::Image => "[N, C, H, W]",
    };
    let input = match (config.preprocessing, form.stored) {
        (true, StoredType::U8) if form == InputForm::PIXELS => {
            "u8 [N, H, W, C]: pixels, which the model normalises".into()
        }
        (true, StoredType::U8) => format!("u8 {axes}: bytes, which the model normalises"),
        (true, _) => format!("f32 {axes}: values, which the model normalises"),
        (false, StoredType::U8) => {
            let value = if form.kind == InputKind::Image { "pixel" } else { "byte" };
            format!("f32 {axes}: ({value} / 255 - mean) / std for each channel")
        }
        (false, _) => format!("f32 {axes}: (value - mean) / std for each channel"),
    };
    all.push(("input".into(), input));
    let name = config.weights.file_name().unwrap_or_default();
    all.push(("weights".into(), Path::new(name).display().to_string()));
    all
}

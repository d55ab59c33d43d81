//! `meristem export onnx`.

use std::process::ExitCode;

use meristem::export::onnx::OPSET;
use meristem::train::check_output;
use meristem::train::export::{OnnxConfig, onnx};
use meristem::train::run_folder::write_whole;

use crate::cli::OnnxArguments;
use crate::commands::Outcome;
use crate::plain::{self, printable};

pub(super) fn run(arguments: &OnnxArguments) -> Outcome {
    check_output("out", &arguments.out)?;
    let model = onnx(&OnnxConfig {
        weights: arguments.weights.clone(),
        host: arguments.host.clone(),
        image_size: arguments.image_size,
        normalize: arguments.normalize.clone(),
        preprocessing: arguments.with_preprocessing,
    })?;
    write_whole(&arguments.out, &model.bytes)?;
    let image = model.image;
    let input = if arguments.with_preprocessing {
        format!("u8 [N, {}, {}, {}]", image.height, image.width, image.channels)
    } else {
        format!("f32 [N, {}, {}, {}]", image.channels, image.height, image.width)
    };
    plain::out(&printable(&format!(
        "{}: images {input} to logits f32 [N, {}], opset {OPSET}",
        arguments.out.display(),
        image.classes
    )));
    if model.normalization.is_none() {
        plain::err(
            "note: the weights file has no normalisation constants, so the model has none in its \
             metadata; --normalize states them",
        );
    }
    Ok(ExitCode::SUCCESS)
}

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
    plain::out(&printable(&format!(
        "{}: {} to {} f32 [N, {}], opset {OPSET}",
        arguments.out.display(),
        model.input,
        model.output,
        model.image.classes
    )));
    if model.normalization.is_none() {
        plain::err(
            "note: the weights file has no normalisation constants, so the model has none in its \
             metadata; --normalize states them",
        );
    }
    Ok(ExitCode::SUCCESS)
}

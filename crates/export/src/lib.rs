//! Files of other tools, as bytes: ONNX models, and records of TensorBoard's event files. Nothing
//! here reads or writes a file, and nothing waits for a device.
#![forbid(unsafe_code)]

pub mod onnx;
pub mod tensorboard;

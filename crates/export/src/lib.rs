//! Files of other tools, as bytes: ONNX models, records of TensorBoard's event files, and drawings
//! in SVG. The crate does no I/O and uses no device.
//!
//! ```
//! use meristem_export::tensorboard::{SeriesValue, file_start, values};
//!
//! let (now, step) = (1_790_000_000.0, 3);
//! let mut file = file_start(now);
//! file.extend(values(now, step, vec![("control_accuracy".into(), SeriesValue::Scalar(0.84))]));
//! // The bytes of a file `events.out.tfevents.…`, which TensorBoard reads.
//! assert_eq!(u64::from_le_bytes(file[..8].try_into().unwrap()), 24);
//! ```
//!
//! [`onnx::encode`] does the same for a network.
#![forbid(unsafe_code)]

pub mod drawing;
pub mod onnx;
pub mod tensorboard;

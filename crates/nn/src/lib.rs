//! Networks as data, compiled into plans and trained on a stream.
//!
//! - [`graph`]: a network as a list of operations with shapes, and the parameters they name.
//! - [`layout`]: packed parameters and their places (F3); `init`: their first values.
//! - [`plan`]: graph -> flat list of steps over one arena; backward derived when built.
//! - [`ops`]: the operation of a step, as a value over typed operands that any backend can read.
//! - [`kernels`]: pure functions over slices, one body for all instruction sets.
//! - [`network`]: a graph with its parameters, momentum and buffers on a stream: training and
//!   evaluation steps, growth, metrics, weights in and out.
//! - [`profile`]: the time that each step of a plan takes.
//! - [`state`], [`safetensors`]: weights under PyTorch's names and shapes (U5), and their files.
//!
//! Ids in parentheses, such as (U5), are rows of `docs/requirements.md`.
//!
//! ```
//! use std::sync::Arc;
//! use meristem_device::{Device, DeviceId, DeviceOptions, Owner, Tensor};
//! use meristem_nn::graph::{Dims, GraphBuilder, SgdConfig};
//! use meristem_nn::{Isa, Metrics, Network, NetworkOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let sgd = SgdConfig { lr: 0.1, momentum: 0.9, weight_decay: 0.0, clip_norm: 1.0 };
//! let mut graph = GraphBuilder::new(Dims { c: 2, h: 1, w: 1 }, sgd);
//! let logits = graph.linear(graph.input(), "fc", 2, true, None)?;
//! let graph = Arc::new(graph.finish(logits)?);
//!
//! let stream = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?.stream("env 0");
//! let options = NetworkOptions::new(42, 0, Isa::detect(), 4);
//! let mut network = Network::new(&stream, graph, options)?;
//! let x = Tensor::from_slice(&stream, &[1.0f32, 0.0, 0.0, 1.0], [2, 2], Owner::Batches)?;
//! let y = Tensor::from_slice(&stream, &[0u32, 1], [2], Owner::Batches)?;
//! for _ in 0..50 {
//!     network.train_step(&x, &y)?; // waits for nothing
//! }
//! let metrics = Metrics::parse(&network.metrics().to_vec()?); // the one wait
//! assert!(metrics.batch_losses[49] < 0.1 * metrics.batch_losses[0]);
//! # Ok(())
//! # }
//! ```

mod dims;
mod error;
pub mod graph;
mod init;
pub use meristem_kernels as kernels;
pub mod layout;
mod loss;
mod metrics;
mod name_key;
pub mod network;
pub mod ops;
pub mod plan;
mod precision;
pub mod profile;
pub mod safetensors;
mod score;
mod space;
pub mod state;

/// Revision of the kernels' rounding. A change of the order of sums, or of the way that products
/// are computed, raises it: a run that continues with another build compares the revisions.
pub const ROUNDING: u32 = 2;

pub use error::{Error, Result};
pub use graph::Graph;
pub use kernels::Isa;
pub use loss::Loss;
pub use metrics::{EvalMetrics, GroupMetrics, Metrics, MetricsLayout, PairedLoss};
pub use network::{
    ActivationProbe, FurtherFeatures, LabelledBatch, Network, NetworkFleet, NetworkOptions, Plans,
    SequenceDraw, SequenceNetwork, SequenceOptions, SequenceRun, Snapshot, WidthProbe,
    observed_weight,
};
pub use plan::{Plan, PlanMode, PlanOptions};
pub use precision::{Precision, ValueType};
pub use score::{Score, ScoreKind, ScoreSums, target_squares};
pub use state::{HostData, HostTensor, StateDict, StateError};

//! Batch norm (fused with ReLU and 2 × 2 max pooling) and group norm.

pub mod batch;
pub(crate) mod channels;
pub mod group;
mod image;
mod moments;

pub use batch::{
    Activation, BatchNormBackward, BatchNormForward, BatchStats, ChannelMoments,
    batch_norm_act_forward, batch_norm_gradient_sums, batch_norm_input_gradient, batch_stats,
    update_running,
};
pub use group::{
    GroupNormBackward, GroupNormForward, GroupNormGrads, GroupNormSaved, group_norm_backward,
    group_norm_forward,
};

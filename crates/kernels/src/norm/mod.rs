//! Batch norm (fused with ReLU and 2 × 2 max pooling), group norm, layer norm and RMS norm.

pub mod batch;
pub(crate) mod channels;
pub mod group;
mod image;
pub mod layer;
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
pub use layer::{
    LayerNormBackward, LayerNormForward, LayerNormGrads, LayerNormSaved, layer_norm_backward,
    layer_norm_forward,
};

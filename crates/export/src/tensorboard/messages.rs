//! Messages of TensorBoard's event files, with the names, tags and types of TensorFlow's
//! `event.proto`, `summary.proto` and `tensor.proto`. Unused fields are left out.

use prost::Message;

/// Element type of text in a tensor.
pub(super) const DT_STRING: i32 = 7;
/// Status of an event that starts a session: a reader drops all data that it read before this event
/// for the same or later steps.
pub(super) const START: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct EventProto {
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(super) summary: Option<SummaryProto>,
    #[prost(message, optional, tag = "7")]
    pub(super) session_log: Option<SessionLogProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLogProto {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<SummaryValueProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryValueProto {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    #[prost(message, optional, tag = "5")]
    pub(super) histo: Option<HistogramProto>,
    #[prost(message, optional, tag = "8")]
    pub(super) tensor: Option<EventTensorProto>,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadataProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HistogramProto {
    #[prost(double, tag = "1")]
    pub(super) min: f64,
    #[prost(double, tag = "2")]
    pub(super) max: f64,
    #[prost(double, tag = "3")]
    pub(super) num: f64,
    #[prost(double, tag = "4")]
    pub(super) sum: f64,
    #[prost(double, tag = "5")]
    pub(super) sum_squares: f64,
    #[prost(double, repeated, tag = "6")]
    pub(super) bucket_limit: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    pub(super) bucket: Vec<f64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct EventTensorProto {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) tensor_shape: Option<EventTensorShapeProto>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct EventTensorShapeProto {
    #[prost(message, repeated, tag = "2")]
    pub(super) dim: Vec<EventDimensionProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct EventDimensionProto {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryMetadataProto {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginDataProto>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginDataProto {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
}

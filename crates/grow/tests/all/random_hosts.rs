//! Random hosts: each is refused, or trains.

use std::sync::Arc;

use meristem_device::{DType, Device, DeviceId, DeviceOptions, MemoryFormat, Owner, Tensor};
use meristem_grow::{HostSpec, Optimisers, TaskShape, host_graph};
use meristem_nn::graph::Graph;
use meristem_nn::{Isa, Network, NetworkOptions};
use proptest::prelude::*;

const BATCH: usize = 3;

/// One step on small random images, on every instruction set; all weights stay finite.
fn train(graph: Graph, image: &TaskShape) {
    let (graph, TaskShape { channels, height, width, classes }) = (Arc::new(graph), *image);
    let options = DeviceOptions { threads: 1, ..DeviceOptions::default() };
    let stream = Device::open(DeviceId::Cpu(0), &options).unwrap().stream("env 0");
    for isa in Isa::available() {
        let options = NetworkOptions::new(1, 0, isa, BATCH);
        let mut network = Network::new(&stream, Arc::clone(&graph), options).unwrap();
        let shape = [BATCH, channels, height, width];
        let format = MemoryFormat::ChannelsLast;
        let x = Tensor::empty_with_format(&stream, shape, DType::F32, format, Owner::Batches);
        let x = x.unwrap();
        let pixel = |i: usize| (i * 37 % 101) as f32 / 50.0 - 1.0;
        let pixels: Vec<f32> = (0..shape.iter().product()).map(pixel).collect();
        x.copy_from_slice(&pixels).unwrap();
        let labels: Vec<u32> = (0..BATCH as u32).map(|i| i % classes as u32).collect();
        let y = Tensor::from_slice(&stream, &labels, [BATCH], Owner::Batches).unwrap();
        network.train_step(&x, &y).unwrap();
        network.eval_step(&x, &y, 0).unwrap();
        let state = network.state_dict().unwrap();
        for (name, tensor) in state.iter() {
            if let Some(values) = tensor.as_f32() {
                assert!(values.iter().all(|value| value.is_finite()), "{isa}: {name}");
            }
        }
    }
}

/// A layer with small random sizes; many do not fit their input.
fn layer() -> impl Strategy<Value = String> {
    let size = || 0usize..5;
    let conv = (1usize..7, size(), 1usize..4, size(), 1usize..3, 1usize..3, any::<bool>());
    let conv = conv.prop_map(|(out, kernel, stride, padding, dilation, groups, bias)| {
        format!(
            r#"{{"conv2d": {{"out": {out}, "kernel": [{kernel}, 1], "stride": {stride}, "padding":
            {padding}, "dilation": {dilation}, "groups": {groups}, "bias": {bias}}}}}"#
        )
    });
    let pool = ("(max|avg)", 1usize..4, 1usize..3, 0usize..2);
    let pool = pool.prop_map(|(kind, kernel, stride, padding)| {
        format!(
            r#"{{"{kind}_pool2d": {{"kernel": [{kernel}, 2], "stride": {stride}, "padding":
            {padding}}}}}"#
        )
    });
    let signal = (1usize..7, size(), 1usize..4, size(), 1usize..3, 1usize..3, any::<bool>());
    let signal = signal.prop_map(|(out, kernel, stride, padding, dilation, groups, bias)| {
        format!(
            r#"{{"conv1d": {{"out": {out}, "kernel": {kernel}, "stride": {stride}, "padding":
            {padding}, "dilation": {dilation}, "groups": {groups}, "bias": {bias}}}}}"#
        )
    });
    let row_pool = ("(max|avg)", 1usize..4, 1usize..3, 0usize..2);
    let row_pool = row_pool.prop_map(|(kind, kernel, stride, padding)| {
        format!(
            r#"{{"{kind}_pool1d": {{"kernel": {kernel}, "stride": {stride}, "padding":
            {padding}}}}}"#
        )
    });
    let plain = prop::sample::select(vec![
        "\"relu\"",
        "\"tanh\"",
        "\"gelu\"",
        "\"silu\"",
        "\"elu\"",
        "\"hard_swish\"",
        "\"softplus\"",
        "\"batch_norm\"",
        "{\"group_norm\": {\"groups\": 2}}",
        "\"layer_norm\"",
        "\"rms_norm\"",
        "{\"dropout\": {\"p\": 0.5}}",
        "{\"leaky_relu\": {\"slope\": 0.5}}",
        "\"global_avg_pool\"",
        "\"global_max_pool\"",
        "\"flatten\"",
        "{\"linear\": {\"out\": 6}}",
    ]);
    let leaf = prop_oneof![conv, pool, signal, row_pool, plain.prop_map(String::from)];
    leaf.prop_recursive(2, 12, 3, |inner| {
        let list = prop::collection::vec(inner, 0..3).prop_map(|layers| layers.join(", "));
        let joins = prop::sample::select(vec!["add", "multiply", "concat"]);
        (joins, list.clone(), list).prop_map(|(join, a, b)| {
            format!(r#"{{"branches": {{"join": "{join}", "branches": [[{a}], [{b}]]}}}}"#)
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// A random host is refused, or trains: a step with values that are finite.
    #[test]
    fn random_hosts_train_or_are_refused(
        layers in prop::collection::vec(layer(), 0..6), height in 1usize..7, width in 1usize..6,
        slot in any::<bool>(),
    ) {
        let mut all = layers;
        if slot {
            all.insert(all.len() / 2, r#"{"slot": {"name": "a"}}, {"save": {"name": "b"}}"#.into());
            all.push(r#"{"save": {"name": "c"}}, {"load": {"name": "b"}}, "tanh""#.into());
            all.push(r#"{"join": {"join": "concat", "from": ["b", "c"]}}"#.into());
            let branches = r#"[[], ["global_avg_pool"]]"#;
            all.push(format!(r#"{{"branches": {{"join": "multiply", "branches": {branches}}}}}"#));
        }
        all.push(r#""global_avg_pool", {"linear": {"out": "classes"}}"#.into());
        let text = format!(r#"{{"layers": [{}]}}"#, all.join(", "));
        let image = TaskShape { channels: 3, height, width, classes: 4 };
        let host = HostSpec::from_json(&text, "random");
        let graph = host.map(|host| host_graph(&host, &image, Optimisers::default().host));
        if let Ok(Ok(graph)) = graph {
            train(graph, &image);
        }
    }
}

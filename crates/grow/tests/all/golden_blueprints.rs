//! Every standard blueprint, forward and backward through a plan, against PyTorch.
//!
//! Tolerance of a tensor: PyTorch's own error against f64 (`torch_error`), plus the plan's error,
//! in ulps (2^-23) of the tensor's largest value. A sum of K ≤ 180 products rounds K times by half
//! an ulp of a partial sum, which grows like √K: 32. A norm adds cancellation in x − mean: 64. The
//! errors of successive layers add up, since each layer passes them on with a gain near one (the
//! weights of the goldens have variance 1/fan-in).

use std::collections::BTreeMap;
use std::path::Path;

use meristem_grow::{Blueprint, BlueprintLayer, BlueprintSet, Optimisers};
use meristem_nn::graph::{Dims, Graph};
use meristem_nn::layout::{ParamLayout, packing};
use meristem_nn::plan::{GroupMemory, Plan, PlanMemory, PlanMode, PlanOptions, Space};
use meristem_nn::{Isa, StateDict};
use serde_json::Value;

fn ulps(blueprint: &Blueprint) -> f64 {
    let of_layer = |layer: &BlueprintLayer| match layer {
        BlueprintLayer::Relu => 0.0,
        BlueprintLayer::GroupNorm { .. } => 64.0,
        _ => 32.0,
    };
    blueprint.layers.iter().map(of_layer).sum::<f64>() + 32.0 // 32 for the join
}

/// Converts `[N][C][H·W]` to `[N][H·W][C]`, for samples of `planes · pixels` values.
fn transposed(x: &[f32], planes: usize, pixels: usize) -> Vec<f32> {
    let sample = |x: &[f32]| -> Vec<f32> {
        let pixel = |p: usize| (0..planes).map(move |c| c * pixels + p);
        (0..pixels).flat_map(pixel).map(|i| x[i]).collect()
    };
    x.chunks(planes * pixels).flat_map(sample).collect()
}

/// Output and gradients of a module, under the names and in the order of the golden file.
fn run(
    graph: &Graph,
    isa: Isa,
    batch: usize,
    tensors: &BTreeMap<&str, &[f32]>,
) -> BTreeMap<String, Vec<f32>> {
    let plan = Plan::compile(graph, PlanOptions::new(batch, PlanMode::Gradient)).unwrap();
    let layout = ParamLayout::new(graph);
    let Dims { c, h, w } = graph.input_dims();
    let x = transposed(tensors["in.x"], c, h * w);
    let mut values: Vec<Vec<f32>> = layout.groups.iter().map(|g| vec![0.0; g.values]).collect();
    for (param, place) in graph.params.iter().zip(&layout.params) {
        let given = tensors[format!("in.{}", param.name).as_str()];
        packing(param).pack(given, &mut values[place.group.index()][place.range()]);
    }
    // Optimiser settings, which do not affect a gradient.
    let mut moments: Vec<Vec<f32>> = layout.groups.iter().map(|g| vec![0.0; g.moments]).collect();
    // NaN everywhere, so that a read before the first write is detected.
    let mut arena = vec![f32::NAN; plan.arena_len()];
    let gradient = plan.output_gradient().unwrap();
    arena[gradient].copy_from_slice(&transposed(tensors["grad_out.y"], c, h * w));
    let mut memory = PlanMemory::new(&mut arena, &[&x], &[]);
    for (values, momentum) in values.iter_mut().zip(&mut moments) {
        let (running_stats, counters) = (&mut [][..], &mut [][..]);
        memory.push_group(GroupMemory {
            values,
            optimiser_state: momentum,
            running_stats,
            counters,
        });
    }
    plan.run(isa, &mut memory).unwrap();
    drop(memory);

    assert_eq!(plan.output().space, Space::Arena);
    let back = |x: &[f32]| transposed(x, h * w, c);
    let mut got = BTreeMap::new();
    got.insert("out.y".into(), back(&arena[plan.output().range()]));
    got.insert("grad.x".into(), back(&arena[plan.input_gradient(0).unwrap()]));
    for (i, param) in graph.params.iter().enumerate() {
        let mut unpacked = vec![0.0; param.shape.iter().product()];
        let range = plan.parameter_gradient(graph.param_id(i)).unwrap();
        packing(param).unpack(&arena[range], &mut unpacked);
        got.insert(format!("grad.{}", param.name), unpacked);
    }
    got
}

fn golden() -> (StateDict, Vec<Value>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/blueprints.safetensors");
    let (tensors, metadata) = meristem_nn::safetensors::load(&path).unwrap();
    (tensors, serde_json::from_str(&metadata["cases"]).unwrap())
}

#[test]
fn blueprints_match_pytorch() {
    let (file, cases) = golden();
    let set = BlueprintSet::standard();
    for case in &cases {
        let name = case["case"].as_str().unwrap();
        let prefix = format!("{name}/");
        let tensors: BTreeMap<&str, &[f32]> = file
            .iter()
            .filter_map(|(key, tensor)| Some((key.strip_prefix(&prefix)?, tensor.as_f32()?)))
            .collect();
        let [batch, c, h, w] = *file.get(&format!("{name}/in.x")).unwrap().shape else {
            panic!("{name}: x is no batch of images")
        };
        let blueprint = set.get(set.find(case["op"].as_str().unwrap()).unwrap()).unwrap();
        let graph = blueprint.graph(Dims { c, h, w }, Optimisers::default().module).unwrap();
        // The file has exactly the parameters of the module, under their names.
        let inputs = tensors.keys().filter(|key| key.starts_with("in.")).count();
        assert_eq!(inputs, graph.params.len() + 1, "{name}");
        for isa in Isa::available() {
            let got = run(&graph, isa, batch, &tensors);
            assert_eq!(got.len(), graph.params.len() + 2);
            for (key, got) in got {
                let expected = tensors[key.as_str()];
                let largest = expected.iter().fold(0f64, |m, v| m.max(f64::from(*v).abs()));
                let torch = case["torch_error"][&key].as_f64().unwrap();
                let limit = torch + ulps(blueprint) * f64::from(f32::EPSILON) * largest;
                assert_eq!(got.len(), expected.len(), "{name} {key}");
                for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                    let apart = (f64::from(*g) - f64::from(*e)).abs();
                    let what = format!("{name} ({isa}) {key}[{i}]");
                    assert!(
                        apart <= limit,
                        "{what}: {g}, PyTorch {e}, {apart:.2e} over {limit:.2e}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_standard_blueprint_has_goldens() {
    let (_, cases) = golden();
    for blueprint in BlueprintSet::standard().iter() {
        for channels in [8, 16] {
            let found = cases.iter().any(|case| {
                case["op"] == *blueprint.name && case["channels"].as_u64() == Some(channels)
            });
            assert!(found, "{} at {channels}", blueprint.name);
        }
    }
}

//! Pairs of features that cancel, and old weights of the size that the wider layer calls for, after
//! Yuan, Savarese, Maire, "Accelerated Training via Incrementally Growing Neural Networks using
//! Variance Transfer and Learning Rate Adaptation", 2023 (arXiv 2306.12700).
//!
//! A layer with C features gets C' of them, k = C' − C. With random V and Z
//!
//! ```text
//! incoming  W₁' = [W₁; V; V]     outgoing  W₂' = [c·W₂, Z, −Z]     c = √(C/C')
//! ```
//!
//! The outputs of a pair cancel, but its gradients are opposite, so the two part at once. A hidden
//! layer of fan-in n begins with weights of a variance proportional to 1/n; the factor c is the
//! ratio of the standard deviations that it begins with at the two widths. The paper scales running
//! statistics of the batch norm that follows by c and c², which makes up for c, up to its ε: with
//! variance σ² of the outputs the function changes by a relative `½(1/c² − 1)·ε/σ²` at most.
//!
//! Two differences from the paper: without a batch norm directly after the reader c is 1, so that
//! the function is kept (the paper scales the weights of an output layer by C/C', and the function
//! with them); V and Z have the distribution of new layers of this program at the new width, where
//! the paper draws normal numbers. Of an odd number of features the last has outgoing weights of 0.

use super::layer::WideLayer;
use super::{FurtherFeatures, Network};
use crate::error::Result;
use crate::graph::{BufferId, Graph, NodeOp, ParamId, WidthInit};
use crate::init;

/// Further features of the layer that is wider in the graph `wide`.
///
/// # Errors
/// As [`Network::widen`].
pub(super) fn features(network: &Network, wide: &Graph) -> Result<FurtherFeatures> {
    let widening = network.widening(wide, WidthInit::Zero)?;
    let layer = WideLayer::new(wide, &widening)?;
    let (pairs, options) = (layer.features / 2, network.options());
    let mut found = FurtherFeatures::default();
    for param in &wide.params {
        let Some(origin) = widening.origin(&param.name) else { continue };
        let initial = init::values(param, options.seed, options.env);
        if origin.further().0 > 0 {
            let rows = paired(origin.further_rows(&initial), pairs, layer.features, |x| x);
            found.rows.insert(param.name.clone(), rows);
        }
        if param.name == layer.reader {
            let mut columns = origin.further_columns(&initial);
            if layer.features % 2 == 1 {
                let last = columns.len() - columns.len() / layer.features;
                columns[last..].fill(0.0);
            }
            let columns = paired(columns, pairs, layer.features, |x| -x);
            found.columns.insert(param.name.clone(), columns);
            let features = origin.columns() as f64;
            let further = origin.further().1 as f64;
            let factor = ((features - further) / features).sqrt() as f32;
            scale_reader(wide, &layer.reader, factor, &mut found);
        }
    }
    Ok(found)
}

/// The elements of `features` features, in which features `pairs` to `2·pairs` are those before
/// them, mapped by `of`.
fn paired(mut of_all: Vec<f32>, pairs: usize, features: usize, of: fn(f32) -> f32) -> Vec<f32> {
    let half = of_all.len() / features.max(1) * pairs;
    let (first, second) = of_all.split_at_mut(half);
    second.iter_mut().zip(first).for_each(|(to, from)| *to = of(*from));
    of_all
}

/// Scales the weights of the reader, its bias, and the statistics of the batch norm that follows
/// it; nothing if no batch norm does.
fn scale_reader(graph: &Graph, reader: &str, factor: f32, found: &mut FurtherFeatures) {
    let name = |param: ParamId| graph.params[param.index()].name.clone();
    let Some((at, bias)) = graph.nodes.iter().enumerate().find_map(|(at, node)| match node.op {
        NodeOp::Conv2d { weight, bias, .. } if name(weight) == reader => Some((at, bias)),
        _ => None,
    }) else {
        return;
    };
    let reads = |op: &NodeOp| op.inputs().iter().any(|node| node.index() == at);
    let readers: Vec<&NodeOp> =
        graph.nodes.iter().map(|node| &node.op).filter(|op| reads(op)).collect();
    let [NodeOp::BatchNorm { running: [mean, variance], .. }] = readers[..] else { return };
    let buffer = |of: &BufferId| graph.buffers[of.index()].name.clone();
    let factors = &mut found.factors;
    factors.extend(bias.map(|bias| (name(bias), factor)));
    factors.insert(reader.to_owned(), factor);
    factors.insert(buffer(mean), factor);
    factors.insert(buffer(variance), factor * factor);
}

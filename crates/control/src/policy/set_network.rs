//! The graph of the form [`PolicyForm::Set`](super::PolicyForm::Set): a deep set (Zaheer et al.,
//! "Deep sets", 2017) of slots and one of blueprints, and heads that point at their elements
//! (Vinyals et al., "Pointer networks", 2015). A third set, of layers, is like the other two; its
//! logits follow those of the slots in the slot head.
//!
//! ```text
//! slots ─ two Linear ─ ReLU, shared by all slots ─ e ─ maximum and mean over the slots ─┐
//! blueprints, likewise ─────────────────────────── f ─ maximum and mean ────────────────┤
//! observations ─────────────────────────────────────────────────────────────────────────┴─ concat
//!   ─ Linear ─ LayerNorm ─ ReLU ─ x;  context = x + LayerNorm(LSTM(x))
//!
//! context ─ a head's MLP ─ logits (except heads slot and blueprint);  context ─ V's MLP ─ value
//! e and context ─ ReLU(Linear(e) + Linear(context)) ─ Linear ─ a logit for each slot
//! f and context, likewise ─ a logit for each blueprint
//! ```
//!
//! A set is a signal with a point for each element, so a layer shared by its elements is a linear
//! layer over the channels of each point. Padding stays 0 through these layers: instead of biases
//! they have a further channel, which is 1 for an element and 0 for padding. After a ReLU, zeros
//! change neither the maximum nor the sum. The mean over all places times places / elements is the
//! mean over the elements.

use meristem_nn::Result;
use meristem_nn::graph::{AdamConfig, Dims, Graph, GraphBuilder, Init, NodeId};

use super::layers::{mlp, recurrent};
use crate::heads::{HEADS, HeadSize};

/// Sizes of a policy of sets.
#[derive(Clone, Copy, Debug)]
pub(super) struct SetSizes {
    /// Floats of an env.
    pub(super) features: usize,
    /// Places for slots, and floats of a slot.
    pub(super) slots: [usize; 2],
    /// Places for blueprints, and floats of a blueprint.
    pub(super) blueprints: [usize; 2],
    /// Places for layers, and floats of a layer, if the policy observes layers.
    pub(super) layers: Option<[usize; 2]>,
    /// Width of the hidden layers.
    pub(super) hidden: usize,
    /// Number of choices of each head.
    pub(super) heads: [usize; HEADS.len()],
}

/// Inputs of one set of elements, in the order of [`PolicyShape::inputs`](super::PolicyShape).
#[derive(Clone, Copy, Debug)]
struct SetNodes {
    /// Features of each element, 0 in padding: `[elements][features]`.
    elements: NodeId,
    /// 1 for an element, 0 for padding: `[elements]`.
    present: NodeId,
    /// Places divided by elements: 1 without padding.
    scale: NodeId,
}

/// Initial weights of a layer with orthogonal weights.
fn orthogonal(gain: f32) -> Option<Init> {
    Some(Init::Orthogonal { gain })
}

/// The graph of a policy.
pub(super) fn graph(sizes: &SetSizes, adam: AdamConfig) -> Result<Graph> {
    let SetSizes { features, slots, blueprints, layers, hidden, heads } = *sizes;
    let vector = |c: usize| Dims { c, h: 1, w: 1 };
    let mut b = GraphBuilder::new(vector(features), adam);
    let mut set = |[places, features]: [usize; 2]| SetNodes {
        elements: b.another_input(Dims { c: features, h: 1, w: places }),
        present: b.another_input(Dims { c: 1, h: 1, w: places }),
        scale: b.another_input(vector(1)),
    };
    let (slots, blueprints, layers) = (set(slots), set(blueprints), layers.map(&mut set));
    let keep = b.another_input(vector(1));
    let state = b.lstm_state(hidden);
    let width = (hidden / 2).max(1);
    let slots = Encoded::new(&mut b, "slots", &slots, width)?;
    let blueprints = Encoded::new(&mut b, "blueprints", &blueprints, width)?;
    let layers = layers.map(|layers| Encoded::new(&mut b, "layers", &layers, width)).transpose()?;
    let mut parts = vec![b.input(), slots.pooled, blueprints.pooled];
    parts.extend(layers.iter().map(|layers| layers.pooled));
    let x = b.concat(&parts)?;
    let context = recurrent(&mut b, x, hidden, (keep, state))?;
    let mut outputs = vec![];
    for (head, size) in HEADS.iter().zip(heads) {
        let name = format!("heads.{}", head.name);
        outputs.push(match head.size {
            HeadSize::Slots => slots.point(&mut b, context, &name)?,
            HeadSize::Blueprints => blueprints.point(&mut b, context, &name)?,
            HeadSize::Fixed(_) => mlp(&mut b, context, &name, (size, 0.01))?,
        });
        if let (HeadSize::Slots, Some(layers)) = (head.size, &layers) {
            outputs.push(layers.point(&mut b, context, "heads.layer")?);
        }
    }
    outputs.push(mlp(&mut b, context, "value", (1, 0.1))?);
    let output = b.concat(&outputs)?;
    b.finish(output)
}

/// The elements of a set after the shared layers.
struct Encoded {
    /// Encoding of each element and its channel of presence: `[elements][width + 1]`.
    elements: NodeId,
    present: NodeId,
    width: usize,
    /// Maximum and mean over the elements: `[2 · width]`.
    pooled: NodeId,
}

impl Encoded {
    fn new(b: &mut GraphBuilder, name: &str, set: &SetNodes, width: usize) -> Result<Self> {
        let SetNodes { mut elements, present, scale } = *set;
        let mut encoding = elements;
        for layer in 0..2 {
            elements = b.concat(&[encoding, present])?;
            let (name, init) = (format!("{name}.{layer}"), orthogonal(std::f32::consts::SQRT_2));
            encoding = b.linear_of_pixels(elements, &name, width, false, init)?;
            encoding = b.relu(encoding);
        }
        let mean = b.global_avg_pool(encoding);
        // The scale is one number, and channels need one each: a learned factor per channel.
        let one = Some(Init::Constant(1.0));
        let scale = b.linear(scale, &format!("{name}.mean"), width, false, one)?;
        let mean = b.scale_channels(mean, scale, 1.0)?;
        let largest = b.global_max_pool(encoding);
        let pooled = b.concat(&[largest, mean])?;
        let elements = b.concat(&[encoding, present])?;
        Ok(Self { elements, present, width, pooled })
    }

    /// A logit for each element, from its encoding and the context.
    fn point(&self, b: &mut GraphBuilder, context: NodeId, name: &str) -> Result<NodeId> {
        let Self { elements, present, width, .. } = *self;
        let gain = orthogonal(std::f32::consts::SQRT_2);
        let own = b.linear_of_pixels(elements, &format!("{name}.element"), width, false, gain)?;
        let context = b.linear(context, &format!("{name}.context"), width, false, gain)?;
        // The context in the place of each element, with a learned factor for each channel.
        let one = Some(Init::Constant(1.0));
        let places = b.linear_of_pixels(present, &format!("{name}.places"), width, false, one)?;
        let context = b.scale_channels(places, context, 1.0)?;
        let both = b.add(own, context)?;
        let both = b.relu(both);
        let logits =
            b.linear_of_pixels(both, &format!("{name}.logit"), 1, false, orthogonal(0.01))?;
        Ok(b.flatten(logits))
    }
}

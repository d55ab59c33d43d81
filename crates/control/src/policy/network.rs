//! The graph of the policy network.
//!
//! ```text
//! observations ──────────┐
//! blueprints ─ Embedding ┴─ concat ─ Linear ─ LayerNorm ─ ReLU ─ x
//!
//! x + LayerNorm(LSTM(x)) ┬─ a head's MLP ─ logits (one MLP for each of the eight heads)
//!                        └─ V's MLP ─ value
//! ```
//! An MLP is Linear(hidden, ¾·hidden) ─ ReLU ─ Linear. Width 512 with three slots has 4.0 million
//! parameters: 1.8 million of them in the MLPs.

use meristem_nn::Result;
use meristem_nn::graph::{AdamConfig, Dims, Graph, GraphBuilder, Init, LstmNodes, NodeId};

use super::argument;
use crate::heads::HEADS;

/// Size of a blueprint's embedding.
const EMBEDDING: usize = 4;

/// Sizes of a policy's inputs and outputs; a loaded policy must have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyShape {
    /// Floats per observation.
    pub features: usize,
    /// Number of slots.
    pub slots: usize,
    /// Number of blueprints in the set.
    pub blueprints: usize,
    /// Width of the hidden layers.
    pub hidden: usize,
}

/// Adam's settings for a policy (`docs/control.md`); the norm for clipping is over the whole
/// network.
pub const ADAM: AdamConfig =
    AdamConfig { lr: 3e-4, betas: [0.9, 0.999], eps: 1e-5, weight_decay: 0.0, clip_norm: 5.0 };

/// Initialisation and optimiser of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyConfig {
    /// Seed of the initial weights and of the draws.
    pub seed: u64,
    /// Settings of Adam; [`ADAM`] by default.
    pub adam: AdamConfig,
    /// Whether the policy takes the most probable action instead of drawing one.
    pub greedy: bool,
}

impl PolicyConfig {
    /// A configuration with [`ADAM`] and drawn actions.
    pub fn new(seed: u64) -> Self {
        Self { seed, adam: ADAM, greedy: false }
    }
}

impl PolicyShape {
    /// Blueprint index of an empty slot.
    pub fn empty(&self) -> u32 {
        self.blueprints as u32
    }

    /// Number of choices of each head.
    pub fn heads(&self) -> [usize; HEADS.len()] {
        HEADS.map(|head| head.size.choices(self.slots, self.blueprints))
    }

    /// Number of logits of all heads. A row of the output has one further number, V.
    pub fn logits(&self) -> usize {
        self.heads().iter().sum()
    }

    /// The network's graph. Linear layers have orthogonal weights with gain √2; the last layer of a
    /// head has gain .01, the last layer of V .1.
    ///
    /// # Errors
    /// [`meristem_nn::Error::Argument`] for a shape without features, slots or width.
    pub fn graph(&self, config: &PolicyConfig) -> Result<Graph> {
        if self.hidden == 0 || self.features == 0 || self.slots == 0 {
            let expected = "at least one feature, slot and hidden number".into();
            return Err(argument("shape", expected, format!("{self:?}")));
        }
        let vector = |c: usize| Dims { c, h: 1, w: 1 };
        let mut b = GraphBuilder::new(vector(self.features), config.adam);
        let blueprints = b.indices(self.slots);
        let keep = b.another_input(vector(1));
        let state = b.lstm_state(self.hidden);
        let embedded = b.embedding(blueprints, "embedding", self.blueprints + 1, EMBEDDING)?;
        let x = b.concat(&[b.input(), embedded])?;
        let x = linear(&mut b, x, ("encoder.0", self.hidden, std::f32::consts::SQRT_2))?;
        let x = layer_norm(&mut b, x, "encoder.1")?;
        let x = b.relu(x);
        let y = b.lstm(LstmNodes { x, keep, state }, "lstm")?;
        let y = layer_norm(&mut b, y, "norm")?;
        let x = b.add(x, y)?;
        let mut outputs = vec![];
        for (head, size) in HEADS.iter().zip(self.heads()) {
            outputs.push(mlp(&mut b, x, &format!("heads.{}", head.name), (size, 0.01))?);
        }
        outputs.push(mlp(&mut b, x, "value", (1, 0.1))?);
        let output = b.concat(&outputs)?;
        b.finish(output)
    }
}

fn linear(
    b: &mut GraphBuilder,
    x: NodeId,
    (name, out, gain): (&str, usize, f32),
) -> Result<NodeId> {
    b.linear(x, name, out, true, Some(Init::Orthogonal { gain }))
}

/// PyTorch's `LayerNorm` over the features, as a group norm of one group: existing policies were
/// trained with its roundings.
fn layer_norm(b: &mut GraphBuilder, x: NodeId, name: &str) -> Result<NodeId> {
    b.group_norm(x, name, 1, 1.0)
}

fn mlp(b: &mut GraphBuilder, x: NodeId, name: &str, (out, gain): (usize, f32)) -> Result<NodeId> {
    let middle = (3 * b.dims(x).c / 4).max(1);
    let x = linear(b, x, (&format!("{name}.0"), middle, std::f32::consts::SQRT_2))?;
    let x = b.relu(x);
    linear(b, x, (&format!("{name}.2"), out, gain))
}

//! The policy network as a description.
//!
//! ```text
//! observations ──────────┐
//! blueprints ─ Embedding ┴─ concat ─ Linear ─ LayerNorm ─ ReLU ─ x
//!
//! x + LayerNorm(LSTM(x)) ┬─ a head's MLP ─ logits (one MLP for each of the eight heads)
//!                        └─ V's MLP ─ value
//! ```
//! An MLP is Linear(hidden, ¾·hidden) ─ ReLU ─ Linear. At width 512 and three slots that makes 4.0
//! million parameters: 2.2 in front of the heads, 1.8 in them.

use meristem_nn::Result;
use meristem_nn::graph::{AdamConfig, Dims, Graph, GraphBuilder, Init, LstmNodes, NodeId};

use super::argument;
use crate::heads::HEADS;

/// Numbers per blueprint in the embedding.
const EMBEDDING: usize = 4;

/// Sizes of a policy's inputs and outputs: checked when one is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyShape {
    /// Floats of an observation.
    pub features: usize,
    /// Slots.
    pub slots: usize,
    /// Blueprints of the set.
    pub blueprints: usize,
    /// Width.
    pub hidden: usize,
}

/// Optimiser of a policy (`docs/control.md`); gradients are clipped over the whole network.
pub const ADAM: AdamConfig =
    AdamConfig { lr: 3e-4, betas: [0.9, 0.999], eps: 1e-5, clip_norm: 5.0 };

/// Initialisation and optimiser of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyConfig {
    /// Seed of the initial weights, and of the draws.
    pub seed: u64,
    /// The optimiser; [`ADAM`] unless it is set.
    pub adam: AdamConfig,
    /// Whether it takes the most probable actions instead of drawing.
    pub greedy: bool,
}

impl PolicyConfig {
    /// A configuration with [`ADAM`] that draws its actions.
    pub fn new(seed: u64) -> Self {
        Self { seed, adam: ADAM, greedy: false }
    }
}

impl PolicyShape {
    /// Index of a slot without a module among the blueprints.
    pub fn empty(&self) -> u32 {
        self.blueprints as u32
    }

    /// Number of choices of each head.
    pub fn heads(&self) -> [usize; HEADS.len()] {
        HEADS.map(|head| head.size.choices(self.slots, self.blueprints))
    }

    /// Number of logits of all heads; a row of the output has one more number, V.
    pub fn logits(&self) -> usize {
        self.heads().iter().sum()
    }

    /// The network's graph. Linear layers are orthogonal with gain √2, the last of a head with gain
    /// .01, the layer of V with .1.
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
        let x = b.layer_norm(x, "encoder.1")?;
        let x = b.relu(x);
        let y = b.lstm(LstmNodes { x, keep, state }, "lstm")?;
        let y = b.layer_norm(y, "norm")?;
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

fn mlp(b: &mut GraphBuilder, x: NodeId, name: &str, (out, gain): (usize, f32)) -> Result<NodeId> {
    let middle = (3 * b.dims(x).c / 4).max(1);
    let x = linear(b, x, (&format!("{name}.0"), middle, std::f32::consts::SQRT_2))?;
    let x = b.relu(x);
    linear(b, x, (&format!("{name}.2"), out, gain))
}

//! The graph of the policy network. The form [`PolicyForm::Vector`]:
//!
//! ```text
//! observations ──────────┐
//! blueprints ─ Embedding ┴─ concat ─ Linear ─ LayerNorm ─ ReLU ─ x
//!
//! x + LayerNorm(LSTM(x)) ┬─ a head's MLP ─ logits (one MLP for each of the eight heads)
//!                        └─ V's MLP ─ value
//! ```
//! An MLP is Linear(hidden, ¾·hidden) ─ ReLU ─ Linear. The input `keep` resets the state of the
//! LSTM where a trajectory begins. Width 512 with three slots has 4.0 million parameters: 1.8
//! million of them in the MLPs. `set_network` has the form [`PolicyForm::Set`].

use meristem_device::DType;
use meristem_nn::graph::{AdamConfig, Dims, Graph, GraphBuilder};
use meristem_nn::{Result, ValueType};

use super::argument;
use super::layers::{mlp, recurrent};
use super::set_network::{self, SetSizes};
use crate::heads::HEADS;
use crate::masks::HeadLayout;

/// Size of a blueprint's embedding.
const EMBEDDING: usize = 4;

/// Form of a policy's observations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyForm {
    /// One vector with a part for each slot, and the index of the blueprint in each slot. Weights
    /// belong to one number of slots and one list of blueprints.
    Vector,
    /// A vector for the env, and two sets with a vector for each element: the slots and the
    /// blueprints. The shapes of the weights depend on neither number, so one policy serves hosts
    /// of any number of slots. Places beyond the slots of an env are padding.
    Set {
        /// Floats per slot.
        slot_features: usize,
        /// Floats per blueprint.
        blueprint_features: usize,
        /// The layers, a third set, if the policy can choose WIDEN.
        layers: Option<LayerSet>,
    },
}

/// Size of the set of layers that can become wider. Their choices in the slot head follow those of
/// the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSet {
    /// Largest number of such layers in a host; sets with fewer layers are padded.
    pub places: usize,
    /// Floats per layer.
    pub features: usize,
}

/// Sizes of a policy's inputs and outputs. A loaded policy of the form [`PolicyForm::Vector`] must
/// have the same; of the form [`PolicyForm::Set`], the same numbers of features and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyShape {
    /// Form of the observations.
    pub form: PolicyForm,
    /// Floats per observation of the env, without the elements of the sets.
    pub features: usize,
    /// Largest number of slots in a host.
    pub slots: usize,
    /// Largest number of blueprints in a host's set.
    pub blueprints: usize,
    /// Width of the hidden layers.
    pub hidden: usize,
}

/// An input of a policy with one row for each observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyInput {
    /// Name.
    pub name: &'static str,
    /// Type of its numbers: f32 or u32.
    pub dtype: DType,
    /// Numbers per row.
    pub width: usize,
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
    /// Element type of values in the memory of a CUDA device; f32 by default.
    pub values: ValueType,
}

impl PolicyConfig {
    /// A configuration with [`ADAM`], drawn actions and values of f32.
    pub fn new(seed: u64) -> Self {
        Self { seed, adam: ADAM, greedy: false, values: ValueType::F32 }
    }
}

impl PolicyShape {
    /// Blueprint index of an empty slot.
    pub fn empty(&self) -> u32 {
        self.blueprints as u32
    }

    /// Number of choices of each head.
    pub fn heads(&self) -> [usize; HEADS.len()] {
        self.layout().sizes()
    }

    /// Positions of the heads in a row of logits.
    pub fn layout(&self) -> HeadLayout {
        let layout = HeadLayout::new(self.slots, self.blueprints);
        self.layers().map_or(layout, |layers| layout.with_layers(layers.places))
    }

    /// The set of layers, if the policy can choose WIDEN.
    pub fn layers(&self) -> Option<LayerSet> {
        match self.form {
            PolicyForm::Vector => None,
            PolicyForm::Set { layers, .. } => layers,
        }
    }

    /// Number of logits of all heads. A row of the output has one further number, V.
    pub fn logits(&self) -> usize {
        self.heads().iter().sum()
    }

    /// The inputs with one row for each observation, in the graph's order.
    pub fn inputs(&self) -> Vec<PolicyInput> {
        let Self { features, slots, blueprints, .. } = *self;
        let input = |name, dtype, width| PolicyInput { name, dtype, width };
        let floats = |name, width| input(name, DType::F32, width);
        let (observations, keep) = (floats("observations", features), floats("keep", 1));
        match self.form {
            PolicyForm::Vector => {
                vec![observations, input("blueprints", DType::U32, slots), keep]
            }
            PolicyForm::Set { slot_features, blueprint_features, layers } => {
                let mut inputs = vec![
                    observations,
                    floats("slots", slots * slot_features),
                    floats("slots_present", slots),
                    floats("slots_scale", 1),
                    floats("blueprints", blueprints * blueprint_features),
                    floats("blueprints_present", blueprints),
                    floats("blueprints_scale", 1),
                ];
                if let Some(LayerSet { places, features }) = layers {
                    inputs.push(floats("layers", places * features));
                    inputs.push(floats("layers_present", places));
                    inputs.push(floats("layers_scale", 1));
                }
                inputs.push(keep);
                inputs
            }
        }
    }

    /// The network's graph. Linear layers have orthogonal weights with gain √2; the last layer of a
    /// head has gain .01, the last layer of V .1. In the form [`PolicyForm::Set`] the factors of
    /// channels begin at 1.
    ///
    /// # Errors
    /// [`meristem_nn::Error::Argument`] for a shape without features, slots or width, and in the
    /// form [`PolicyForm::Set`] for one without elements of a set or their features.
    pub fn graph(&self, config: &PolicyConfig) -> Result<Graph> {
        if self.hidden == 0 || self.features == 0 || self.slots == 0 {
            let expected = "at least one feature, slot and hidden number".into();
            return Err(argument("shape", expected, format!("{self:?}")));
        }
        match self.form {
            PolicyForm::Vector => self.vector_graph(config),
            PolicyForm::Set { slot_features, blueprint_features, layers } => {
                let layers = layers.map(|LayerSet { places, features }| [places, features]);
                let (slots, blueprints) =
                    ([self.slots, slot_features], [self.blueprints, blueprint_features]);
                if [slots, blueprints].into_iter().chain(layers).flatten().any(|n| n == 0) {
                    let expected = "an element of each set, and features of it".into();
                    return Err(argument("shape", expected, format!("{self:?}")));
                }
                let (heads, Self { features, hidden, .. }) = (self.heads(), *self);
                let sizes = SetSizes { features, slots, blueprints, layers, hidden, heads };
                set_network::graph(&sizes, config.adam)
            }
        }
    }

    fn vector_graph(&self, config: &PolicyConfig) -> Result<Graph> {
        let vector = |c: usize| Dims { c, h: 1, w: 1 };
        let mut b = GraphBuilder::new(vector(self.features), config.adam);
        let blueprints = b.indices(self.slots);
        let keep = b.another_input(vector(1));
        let state = b.lstm_state(self.hidden);
        let embedded = b.embedding(blueprints, "embedding", self.blueprints + 1, EMBEDDING)?;
        let x = b.concat(&[b.input(), embedded])?;
        let x = recurrent(&mut b, x, self.hidden, (keep, state))?;
        let mut outputs = vec![];
        for (head, size) in HEADS.iter().zip(self.heads()) {
            outputs.push(mlp(&mut b, x, &format!("heads.{}", head.name), (size, 0.01))?);
        }
        outputs.push(mlp(&mut b, x, "value", (1, 0.1))?);
        let output = b.concat(&outputs)?;
        b.finish(output)
    }
}

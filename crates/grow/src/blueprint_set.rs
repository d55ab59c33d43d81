//! The blueprints of a run: the seven standard ones, and two for vectors.

use std::sync::Arc;

use crate::blueprint::{Blueprint, BlueprintError, BlueprintLayer, Channels, Join};
use crate::suggest::nearest;

/// The blueprints available to a run, in index order of the action head. Names are unique.
#[derive(Clone, Debug, PartialEq)]
pub struct BlueprintSet {
    blueprints: Vec<Arc<Blueprint>>,
}

impl BlueprintSet {
    /// An empty set.
    pub fn empty() -> Self {
        Self { blueprints: vec![] }
    }

    /// The seven standard blueprints of `docs/growth.md`: norm, attention, depthwise, bottleneck,
    /// conv_small, conv_light, conv_heavy.
    pub fn standard() -> Self {
        Self { blueprints: standard().into_iter().map(Arc::new).collect() }
    }

    /// The blueprints of `docs/growth.md` for slots of vectors: mlp_small, mlp. They fit no slot of
    /// images.
    pub fn vectors() -> Self {
        Self { blueprints: vectors().into_iter().map(Arc::new).collect() }
    }

    /// The set extended by one blueprint.
    ///
    /// # Errors
    /// [`BlueprintError::Duplicate`], or any error of [`Blueprint::check`].
    pub fn with(mut self, blueprint: Blueprint) -> Result<Self, BlueprintError> {
        blueprint.check()?;
        if self.index_of(&blueprint.name).is_some() {
            return Err(BlueprintError::Duplicate { name: blueprint.name });
        }
        self.blueprints.push(Arc::new(blueprint));
        Ok(self)
    }

    /// Number of blueprints.
    pub fn len(&self) -> usize {
        self.blueprints.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.blueprints.is_empty()
    }

    /// The blueprints in index order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Blueprint>> {
        self.blueprints.iter()
    }

    /// The blueprint at an index.
    pub fn get(&self, index: usize) -> Option<&Arc<Blueprint>> {
        self.blueprints.get(index)
    }

    /// Index of the blueprint with this name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.blueprints.iter().position(|blueprint| blueprint.name == name)
    }

    /// Index of the blueprint with this name; the error has the nearest name.
    ///
    /// # Errors
    /// [`BlueprintError::Unknown`].
    pub fn find(&self, name: &str) -> Result<usize, BlueprintError> {
        self.index_of(name).ok_or_else(|| BlueprintError::Unknown {
            name: name.into(),
            nearest: nearest(name, self.iter().map(|b| b.name.as_str())).map(Into::into),
        })
    }
}

impl Default for BlueprintSet {
    fn default() -> Self {
        Self::standard()
    }
}

fn vectors() -> [Blueprint; 2] {
    use BlueprintLayer::{Linear, Relu};
    let mlp = |name: &str, hidden: Channels| {
        let layers = vec![
            Linear { out: hidden, bias: true, zero: false },
            Relu,
            Linear { out: Channels::Same, bias: true, zero: true },
        ];
        Blueprint::new(name, layers, Join::Residual)
    };
    [mlp("mlp_small", Channels::Divided { by: 4, at_least: 8 }), mlp("mlp", Channels::Same)]
}

fn standard() -> [Blueprint; 7] {
    use BlueprintLayer::{GlobalAvgPool, GroupNorm, Linear, Relu, Sigmoid};
    use Channels::{Divided, Same};
    let conv = |kernel| BlueprintLayer::Conv { out: Same, kernel, depthwise: false };
    let middle = Divided { by: 4, at_least: 8 };
    let (one, zero) = (GroupNorm { zero: false }, GroupNorm { zero: true });
    [
        Blueprint::new("norm", vec![one], Join::TanhMix),
        Blueprint::new(
            "attention",
            vec![
                GlobalAvgPool,
                Linear { out: Divided { by: 4, at_least: 1 }, bias: false, zero: false },
                Relu,
                Linear { out: Same, bias: true, zero: true },
                Sigmoid,
            ],
            Join::ChannelScale { factor: 2.0 },
        ),
        Blueprint::new(
            "depthwise",
            vec![BlueprintLayer::Conv { out: Same, kernel: 3, depthwise: true }, conv(1), zero],
            Join::Residual,
        ),
        Blueprint::new(
            "bottleneck",
            vec![
                BlueprintLayer::Conv { out: middle, kernel: 1, depthwise: false },
                Relu,
                BlueprintLayer::Conv { out: middle, kernel: 3, depthwise: false },
                Relu,
                conv(1),
                zero,
            ],
            Join::Residual,
        ),
        Blueprint::new("conv_small", vec![conv(1), zero], Join::Residual),
        Blueprint::new("conv_light", vec![conv(3), zero], Join::Residual),
        Blueprint::new("conv_heavy", vec![conv(3), one, Relu, conv(3), zero], Join::Residual),
    ]
}

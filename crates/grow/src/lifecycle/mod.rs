//! The life of a module in its slot: stages, alpha, gates, and the rules of growth.

mod alpha;
mod error;
mod gates;
mod health;
mod rules;
mod slot;
mod stage;

pub use alpha::{AlphaController, AlphaMode, AlphaTarget, Curve, Speed, Style, Tempo};
pub use error::{AlphaError, LifecycleError, RuleError};
pub use gates::{Comparison, Condition, Gate, GateInputs, GateReport, Gates};
pub use health::GradientHealth;
pub use rules::Rules;
pub use slot::{Birth, Germination, Module, Slot, StageChange};
pub use stage::Stage;

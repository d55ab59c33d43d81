//! Alpha: the weight of a module in its host's output, and its schedule over the steps.

use meristem_nn::graph::BlendMode;
use serde::{Deserialize, Serialize};

use super::error::AlphaError;

/// Defines an enum with the choices of an action head, in index order.
macro_rules! choices {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vmeta])* #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// The choices in index order.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// Index in the action head.
            pub fn index(self) -> usize {
                self as usize
            }

            /// Name in files and events.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

choices! {
    /// Curve of alpha, from 0 at t = 0 to 1 at t = 1.
    Curve {
        /// `t`.
        Linear = "linear",
        /// `½(1 − cos πt)`.
        Cosine = "cosine",
        /// Logistic function of steepness 6, rescaled to reach 0 and 1.
        SigmoidGentle = "sigmoid_gentle",
        /// Logistic function of steepness 12, rescaled.
        Sigmoid = "sigmoid",
        /// Logistic function of steepness 24, rescaled.
        SigmoidSharp = "sigmoid_sharp",
    }
}

impl Curve {
    /// Value of the curve at `t`, clamped to `[0, 1]`. Monotonic; exactly 0 at 0 and 1 at 1.
    pub fn at(self, t: f64) -> f64 {
        // Exact at the ends, without rounding: a finished move ends exactly at its target.
        if t <= 0.0 {
            return 0.0;
        }
        if t >= 1.0 {
            return 1.0;
        }
        let sigmoid = |k: f64| {
            let logistic = |t: f64| 1.0 / (1.0 + (-k * (t - 0.5)).exp());
            (logistic(t) - logistic(0.0)) / (logistic(1.0) - logistic(0.0))
        };
        match self {
            Curve::Linear => t,
            Curve::Cosine => 0.5 * (1.0 - (std::f64::consts::PI * t).cos()),
            Curve::SigmoidGentle => sigmoid(6.0),
            Curve::Sigmoid => sigmoid(12.0),
            Curve::SigmoidSharp => sigmoid(24.0),
        }
    }
}

choices! {
    /// Blending style: the curve of alpha's first move, and the formula that blends the module's
    /// output m with the host's value h. In the formulas a is alpha. x is the module's input: the
    /// value of h, with gradients to the host only in a fossilized or joint module.
    Style {
        /// [`Curve::Linear`], `h + a(m − h)`.
        LinearAdd = "linear_add",
        /// [`Curve::Linear`], `h·(1 + a·tanh(m − x))`.
        LinearMultiply = "linear_multiply",
        /// [`Curve::Sigmoid`], `h + a(m − h)`.
        SigmoidAdd = "sigmoid_add",
        /// [`Curve::Linear`], `h + a·g(x)·(m − h)` with a trained gate.
        LinearGate = "linear_gate",
    }
}

impl Style {
    /// Curve of the first blending.
    pub fn curve(self) -> Curve {
        match self {
            Style::SigmoidAdd => Curve::Sigmoid,
            Style::LinearAdd | Style::LinearMultiply | Style::LinearGate => Curve::Linear,
        }
    }

    /// Blend mode of the network.
    pub fn blend_mode(self) -> BlendMode {
        match self {
            Style::LinearAdd | Style::SigmoidAdd => BlendMode::Add,
            Style::LinearMultiply => BlendMode::Multiply,
            Style::LinearGate => BlendMode::Gate,
        }
    }
}

choices! {
    /// Duration of the first blending.
    Tempo {
        /// 3 steps.
        Fast = "fast",
        /// 5 steps.
        Standard = "standard",
        /// 8 steps.
        Slow = "slow",
    }
}

impl Tempo {
    /// Steps from alpha 0 to the target.
    pub fn steps(self) -> u32 {
        [3, 5, 8][self.index()]
    }
}

choices! {
    /// Target value of alpha.
    AlphaTarget {
        /// .5.
        Half = "0.5",
        /// .7.
        Most = "0.7",
        /// 1.
        Full = "1.0",
    }
}

impl AlphaTarget {
    /// The target as a number.
    pub fn value(self) -> f32 {
        [0.5, 0.7, 1.0][self.index()]
    }
}

choices! {
    /// Duration of a move of alpha, to a new target or for a removal.
    Speed {
        /// At once.
        Instant = "instant",
        /// 3 steps.
        Fast = "fast",
        /// 5 steps.
        Medium = "medium",
        /// 8 steps.
        Slow = "slow",
    }
}

impl Speed {
    /// Steps of the move.
    pub fn steps(self) -> u32 {
        [0, 3, 5, 8][self.index()]
    }
}

/// Whether alpha is moving, and in which direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlphaMode {
    /// At its target.
    Rest,
    /// Rising.
    Up,
    /// Falling.
    Down,
}

/// Moves alpha from its current value to a target along a curve, one step at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AlphaController {
    alpha: f32,
    start: f32,
    target: f32,
    mode: AlphaMode,
    curve: Curve,
    steps_total: u32,
    steps_done: u32,
}

impl AlphaController {
    /// A controller at rest at `alpha` (clamped to `[0, 1]`; NaN becomes 0).
    pub fn at_rest(alpha: f32) -> Self {
        let alpha = if alpha.is_nan() { 0.0 } else { alpha.clamp(0.0, 1.0) };
        Self {
            alpha,
            start: alpha,
            target: alpha,
            mode: AlphaMode::Rest,
            curve: Curve::Linear,
            steps_total: 0,
            steps_done: 0,
        }
    }

    /// Starts a move to `target`. Alpha jumps to the target if `steps` is 0 or alpha is already
    /// there.
    ///
    /// # Errors
    /// [`AlphaError::NotAtRest`] during a move, [`AlphaError::BadTarget`] outside `[0, 1]`.
    pub fn retarget(&mut self, target: f32, steps: u32, curve: Curve) -> Result<(), AlphaError> {
        if !self.is_at_rest() {
            return Err(AlphaError::NotAtRest {
                target: self.target,
                steps_to_go: self.steps_to_go(),
            });
        }
        if !(0.0..=1.0).contains(&target) {
            return Err(AlphaError::BadTarget(target));
        }
        if steps == 0 || target == self.alpha {
            *self = Self { curve, ..Self::at_rest(target) };
            return Ok(());
        }
        let mode = if target > self.alpha { AlphaMode::Up } else { AlphaMode::Down };
        let (alpha, start) = (self.alpha, self.alpha);
        *self = Self { alpha, start, target, mode, curve, steps_total: steps, steps_done: 0 };
        Ok(())
    }

    /// Advances alpha by one step; does nothing at rest. After `steps_total` steps alpha equals the
    /// target exactly.
    pub fn step(&mut self) {
        if self.is_at_rest() {
            return;
        }
        self.steps_done += 1;
        if self.steps_done >= self.steps_total {
            self.alpha = self.target;
            self.mode = AlphaMode::Rest;
            return;
        }
        let t = self.curve.at(f64::from(self.steps_done) / f64::from(self.steps_total));
        let (start, target) = (f64::from(self.start), f64::from(self.target));
        self.alpha = (start + (target - start) * t) as f32;
    }

    /// Current alpha.
    pub fn alpha(&self) -> f32 {
        self.alpha
    }

    /// Alpha at the start of the last move; the target if alpha jumped to it.
    pub fn start(&self) -> f32 {
        self.start
    }

    /// Target of the last move.
    pub fn target(&self) -> f32 {
        self.target
    }

    /// Direction of the current move, or rest.
    pub fn mode(&self) -> AlphaMode {
        self.mode
    }

    /// Curve of the last move.
    pub fn curve(&self) -> Curve {
        self.curve
    }

    /// Length of the last move, in steps.
    pub fn steps_total(&self) -> u32 {
        self.steps_total
    }

    /// Steps of the last move that are done.
    pub fn steps_done(&self) -> u32 {
        self.steps_done
    }

    /// Steps of the last move that are left.
    pub fn steps_to_go(&self) -> u32 {
        self.steps_total - self.steps_done
    }

    /// Whether alpha has reached its target.
    pub fn is_at_rest(&self) -> bool {
        self.mode == AlphaMode::Rest
    }

    /// Checks a controller from a file; the error describes the contradiction.
    pub(crate) fn check(&self) -> Result<(), String> {
        let within = |a: f32| (0.0..=1.0).contains(&a);
        if !(within(self.alpha) && within(self.start) && within(self.target)) {
            return Err(format!("alpha, start and target must be from 0 to 1: {self:?}"));
        }
        let contradicts = match self.mode {
            AlphaMode::Rest => self.alpha != self.target || self.steps_done != self.steps_total,
            AlphaMode::Up => self.target <= self.start || self.steps_done >= self.steps_total,
            AlphaMode::Down => self.target >= self.start || self.steps_done >= self.steps_total,
        };
        if contradicts {
            return Err(format!("alpha's mode, target and steps contradict each other: {self:?}"));
        }
        Ok(())
    }
}

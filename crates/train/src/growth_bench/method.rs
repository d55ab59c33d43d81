//! Methods of the bench: a method is a name, a way to train, and settings.

/// A row of the table.
#[derive(Debug, PartialEq)]
pub struct Method {
    /// Name.
    pub name: &'static str,
    /// Description for the help.
    pub meaning: &'static str,
    /// Way to train.
    pub(super) way: Way,
    /// Settings that override those of the task, as keys and text forms.
    pub(super) settings: &'static [(&'static str, &'static str)],
}

/// Way to train the network of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Under the controller with this text form.
    Controlled(&'static str),
    /// Under a script that fills all slots, from the classifier to the input.
    Scripted,
    /// Under a script with the modules that another method has grown with the same seed, in a
    /// random order at random steps.
    Reordered(&'static str),
    /// The network that another method has grown with the same seed, trained from new weights for
    /// the same number of steps: equal parameters and steps.
    Fixed(&'static str),
    /// The same network, trained for the number of steps that costs as much as growing it.
    EqualCompute {
        /// Method that has grown the network.
        grown: &'static str,
        /// Method that trains it for all steps, which shows the cost of a step.
        fixed: &'static str,
    },
    /// The task's large host, without growth.
    Large,
}

impl Way {
    /// Names of the methods whose runs with the same seed must be complete.
    pub(super) fn needs(self) -> Vec<&'static str> {
        match self {
            Self::Controlled(_) | Self::Scripted | Self::Large => vec![],
            Self::Reordered(grown) | Self::Fixed(grown) => vec![grown],
            Self::EqualCompute { grown, fixed } => vec![grown, fixed],
        }
    }
}

/// Method with which the second column of differences compares. Other methods train its networks.
pub(super) const HEURISTIC: &str = "heuristic";
const STATIC: &str = "static";
const WIDTH: &str = "width";
const STATIC_WIDTH: &str = "static-width";

const fn method(name: &'static str, way: Way, meaning: &'static str) -> Method {
    Method { name, meaning, way, settings: &[] }
}

/// All methods, in the order of the table. A method comes after those that it needs.
pub const METHODS: [Method; 12] = [
    method("none", Way::Controlled("none"), "the host, which does not grow"),
    method("large", Way::Large, "a wider host, which does not grow"),
    method(
        "script",
        Way::Scripted,
        "the largest modules in all slots, from the classifier to the input",
    ),
    method(HEURISTIC, Way::Controlled("heuristic"), "the rules of controller heuristic"),
    method(
        "policy",
        Way::Controlled("greedy:general"),
        "the policy for any host that comes with the program",
    ),
    method(
        "random-order",
        Way::Reordered(HEURISTIC),
        "the modules that the heuristic has grown, in a random order at random steps",
    ),
    method(
        STATIC,
        Way::Fixed(HEURISTIC),
        "the network that the heuristic has grown, from the first step, with equal steps",
    ),
    method(
        "static-compute",
        Way::EqualCompute { grown: HEURISTIC, fixed: STATIC },
        "the same network, with steps for equal training compute",
    ),
    Method {
        name: "aside",
        meaning: "as heuristic, with modules that learn beside the host before they are blended in",
        way: Way::Controlled("heuristic"),
        settings: &[("birth", "aside")],
    },
    Method {
        name: WIDTH,
        meaning: "layers get wider by half of their features, up to twice these; no modules",
        way: Way::Controlled("heuristic"),
        settings: &[("max_modules", "0"), ("widen_by", "0.5")],
    },
    method(
        STATIC_WIDTH,
        Way::Fixed(WIDTH),
        "the host as wide as method width has made it, from the first step, with equal steps",
    ),
    method(
        "static-width-compute",
        Way::EqualCompute { grown: WIDTH, fixed: STATIC_WIDTH },
        "the same network, with steps for equal training compute",
    ),
];

/// The method with a name.
pub(super) fn named(name: &str) -> Option<&'static Method> {
    const ALL: &[Method] = &METHODS;
    ALL.iter().find(|method| method.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_comes_after_those_that_it_needs() {
        for (place, method) in METHODS.iter().enumerate() {
            for needed in method.way.needs() {
                assert!(METHODS[..place].iter().any(|earlier| earlier.name == needed));
            }
        }
    }
}

//! The slots, blueprints and layers that a policy knows.

use meristem_grow::Host;

/// Names of a policy's slots and blueprints. A policy for one number of slots imports only a file
/// with as many slots, of any names, and the same blueprints. In a policy for any host the names
/// are from the hosts with the most slots and the most blueprints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyDomain {
    /// Enabled slots in index order.
    pub slots: Vec<String>,
    /// Blueprints in index order.
    pub blueprints: Vec<String>,
    /// Layers that can become wider, in index order. A policy that observes no layers ignores them;
    /// policy files do not contain them.
    pub layers: Vec<String>,
}

impl PolicyDomain {
    /// The domain of hosts like this one.
    pub fn from_host(host: &Host) -> Self {
        Self {
            slots: host.slots().iter().map(|slot| slot.name.to_string()).collect(),
            blueprints: host.blueprints().iter().map(|b| b.name.clone()).collect(),
            layers: host.widenable().into_iter().map(|layer| layer.name).collect(),
        }
    }

    /// The domain of a policy for all of these hosts: the slots, blueprints and layers of the hosts
    /// with the most of them.
    pub fn from_hosts<'a>(hosts: impl IntoIterator<Item = &'a Host>) -> Self {
        hosts.into_iter().map(Self::from_host).fold(Self::default(), Self::with_more)
    }

    /// The longer list of slots, of blueprints and of layers.
    pub fn with_more(self, other: Self) -> Self {
        let most = |one: Vec<String>, other: Vec<String>| {
            if other.len() > one.len() { other } else { one }
        };
        Self {
            slots: most(self.slots, other.slots),
            blueprints: most(self.blueprints, other.blueprints),
            layers: most(self.layers, other.layers),
        }
    }
}

//! Places in the lists of a graph.

/// Index of a node (and of the value it produces) in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) usize);

/// Index of a parameter in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub(crate) usize);

/// Index of a buffer (state that is not trained) in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub(crate) usize);

/// Index of a parameter group in its graph; the host is group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub(crate) usize);

macro_rules! index {
    ($($id:ident),*) => {$(
        impl $id {
            /// Position in the graph's list.
            pub fn index(self) -> usize {
                self.0
            }
        }
    )*};
}
index!(NodeId, ParamId, BufferId, GroupId);

impl GroupId {
    /// The group of the host: open when a builder is new.
    pub const HOST: GroupId = GroupId(0);
}

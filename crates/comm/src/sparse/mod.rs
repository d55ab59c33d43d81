//! Exchanges of the largest elements only.

pub(crate) mod feedback;
pub(crate) mod gtopk;
pub(crate) mod lists;
pub(crate) mod ok_topk;
pub(crate) mod select;
pub(crate) mod sum;
pub(crate) mod topk;

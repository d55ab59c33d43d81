//! Observers of a device: the timeline of a trace, the race sanitizer, and a thread's hot scopes.
//! They see the engine through `hooks` alone; a device is opened with the observers that its
//! options name.

mod hot_scope;
mod sanitizer;
mod trace;

pub use hot_scope::{ActSite, HotScope, ScopePolicy, ScopeReport};
pub(crate) use sanitizer::Sanitizer;
pub(crate) use trace::Process;
pub use trace::{Trace, TraceReport, TraceSpan};

//! Hot scopes: sections of the host's code in which copies, waits and allocations are counted with
//! their call sites, and reported or refused (V2).
//!
//! A scope belongs to the thread that opened it, and applies to the acts of this thread on the
//! scope's device. Acts of other threads, and of kernels on the workers, are in the device's counts
//! only. Scopes nest: an act is counted by every open scope of its device, and the strictest scope
//! applies; if several scopes refuse the act, the error names the innermost.
//!
//! A scope stores a number that is unique to its device in the process, and no handle of the
//! device. So it keeps neither memory nor workers alive. It applies as long as streams and tensors
//! of the device exist.
//!
//! While a thread has open scopes, they are the gate of its acts (`hooks`). Without a scope an act
//! costs one check of a thread-local.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

use crate::ground::{Act, Counts, Error, Result};
use crate::hooks::set_gate;

/// Treatment of an act that a hot scope does not permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScopePolicy {
    /// Counts only.
    Off,
    /// Counts, and logs a warning once per call site.
    Warn,
    /// Refuses: the act returns [`Error::HotScope`] before anything is enqueued or waited for.
    #[default]
    Deny,
}

impl ScopePolicy {
    /// All policies, the mildest first.
    pub const ALL: [ScopePolicy; 3] = [ScopePolicy::Off, ScopePolicy::Warn, ScopePolicy::Deny];

    /// Its name: `off`, `warn` or `deny`.
    pub fn name(self) -> &'static str {
        match self {
            ScopePolicy::Off => "off",
            ScopePolicy::Warn => "warn",
            ScopePolicy::Deny => "deny",
        }
    }
}

impl fmt::Display for ScopePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A call site of acts in a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActSite {
    /// The act.
    pub act: Act,
    /// The operation.
    pub operation: &'static str,
    /// Call site in the program.
    pub site: &'static Location<'static>,
    /// Number of times it happened.
    pub count: u64,
    /// Number of times a scope refused it.
    pub refused: u64,
}

/// Acts in a scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeReport {
    /// Its name.
    pub name: &'static str,
    /// Its policy.
    pub policy: ScopePolicy,
    /// Acts in the scope, nested scopes included, refused ones excluded.
    pub counts: Counts,
    /// Call sites of everything but launches, in order of first occurrence.
    pub sites: Vec<ActSite>,
}

impl fmt::Display for ScopeReport {
    /// Writes one line, and one for each call site.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hot scope `{}` ({}):", self.name, self.policy)?;
        for act in Act::ALL {
            write!(f, " {} x {act};", self.counts.get(act))?;
        }
        for ActSite { act, operation, site, count, refused } in &self.sites {
            write!(f, "\n  {count} x {act}: `{operation}` at {site}")?;
            if *refused > 0 {
                write!(f, ", {refused} refused")?;
            }
        }
        Ok(())
    }
}

/// An open scope, made by [`Device::hot_scope`](crate::Device::hot_scope); it ends when it is
/// dropped, in any order. Stays on the thread that opened it. Does not keep the device alive, and
/// may outlive it: it applies to the device's streams and tensors while they exist, and its report
/// remains.
#[must_use = "a scope ends when it is dropped"]
pub struct HotScope {
    open: Rc<OpenScope>,
}

/// An open scope in its thread's list.
struct OpenScope {
    /// Number of the device.
    device: u64,
    opened: &'static Location<'static>,
    permitted: Cell<Counts>,
    report: RefCell<ScopeReport>,
    /// Acts of which the scope has warned.
    warned: RefCell<Vec<ActSite>>,
}

/// Decision about an act.
enum ActVerdict {
    Fine,
    Warn { scope: &'static str },
    Deny { scope: &'static str, opened: &'static Location<'static>, permitted: u64 },
}

thread_local! {
    static OPEN: RefCell<Vec<Rc<OpenScope>>> = const { RefCell::new(Vec::new()) };
}

impl HotScope {
    /// Opens a scope for the calling thread's acts on the device of this number.
    pub(crate) fn open(
        device: u64,
        name: &'static str,
        policy: ScopePolicy,
        opened: &'static Location<'static>,
    ) -> HotScope {
        let report = ScopeReport { name, policy, counts: Counts::default(), sites: Vec::new() };
        let (permitted, report) = (Cell::default(), RefCell::new(report));
        let warned = RefCell::default();
        let open = Rc::new(OpenScope { device, opened, permitted, report, warned });
        OPEN.with_borrow_mut(|scopes| scopes.push(open.clone()));
        set_gate(Some(ask));
        HotScope { open }
    }

    /// Permits this many acts of each kind, from the opening on; `launches` is ignored.
    pub fn permit(self, permitted: Counts) -> Self {
        self.open.permitted.set(permitted);
        self
    }

    /// Acts so far.
    pub fn report(&self) -> ScopeReport {
        self.open.report.borrow().clone()
    }

    /// Ends the scope; returns the acts in it.
    pub fn finish(self) -> ScopeReport {
        self.report()
    }
}

impl fmt::Debug for HotScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HotScope({:?})", self.report())
    }
}

impl Drop for HotScope {
    fn drop(&mut self) {
        // While the thread ends, the list of scopes may be destroyed before a `HotScope` that
        // another thread-local holds.
        let _ = OPEN.try_with(|scopes| {
            let mut scopes = scopes.borrow_mut();
            scopes.retain(|open| !Rc::ptr_eq(open, &self.open));
            if scopes.is_empty() {
                set_gate(None);
            }
        });
    }
}

/// Checks an act on a device against the calling thread's open scopes.
///
/// # Errors
/// [`Error::HotScope`] if a scope refuses the act.
#[cold]
fn ask(
    device: u64,
    act: Act,
    operation: &'static str,
    site: &'static Location<'static>,
) -> Result<()> {
    let seen = ActSite { act, operation, site, count: 0, refused: 0 };
    match OPEN.with_borrow(|scopes| judge(scopes, device, seen)) {
        ActVerdict::Fine => Ok(()),
        ActVerdict::Warn { scope } => {
            tracing::warn!(scope, operation, %site, "{act} in a hot scope");
            Ok(())
        }
        ActVerdict::Deny { scope, opened, permitted } => {
            Err(Error::HotScope { scope, act, operation, site, opened, permitted })
        }
    }
}

fn judge(scopes: &[Rc<OpenScope>], device: u64, seen: ActSite) -> ActVerdict {
    let ours = || scopes.iter().rev().filter(|open| open.device == device);
    let by = |policy| ours().find(|open| open.objects_to(policy, seen.act));
    let verdict = match (by(ScopePolicy::Deny), by(ScopePolicy::Warn)) {
        (Some(open), _) => ActVerdict::Deny {
            scope: open.report.borrow().name,
            opened: open.opened,
            permitted: open.permitted.get().get(seen.act),
        },
        (None, Some(open)) if open.is_first_warning(seen) => {
            ActVerdict::Warn { scope: open.report.borrow().name }
        }
        _ => ActVerdict::Fine,
    };
    let happens = !matches!(verdict, ActVerdict::Deny { .. });
    ours().for_each(|open| open.record(seen, happens));
    verdict
}

fn same_place(a: &ActSite, b: &ActSite) -> bool {
    a.act == b.act && a.operation == b.operation && a.site == b.site
}

impl OpenScope {
    /// Whether the scope has this policy, and another such act exceeds its permitted number.
    fn objects_to(&self, policy: ScopePolicy, act: Act) -> bool {
        let report = self.report.borrow();
        report.policy == policy
            && act != Act::Launch
            && report.counts.get(act) >= self.permitted.get().get(act)
    }

    /// Whether the scope has not yet warned of such an act at this place, of which it warns now.
    fn is_first_warning(&self, seen: ActSite) -> bool {
        let mut warned = self.warned.borrow_mut();
        let is_first = !warned.iter().any(|site| same_place(site, &seen));
        warned.extend(is_first.then_some(seen));
        is_first
    }

    fn record(&self, seen: ActSite, happens: bool) {
        let mut report = self.report.borrow_mut();
        if happens {
            report.counts.add(seen.act);
        }
        if seen.act == Act::Launch {
            return;
        }
        let known = report.sites.iter().position(|site| same_place(site, &seen));
        let index = known.unwrap_or_else(|| {
            report.sites.push(seen);
            report.sites.len() - 1
        });
        if happens { report.sites[index].count += 1 } else { report.sites[index].refused += 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Acts that are permitted do not use up the warning of the place where they are.
    #[test]
    fn a_place_is_warned_of_once_when_its_acts_exceed_the_permitted_number() {
        let device = u64::MAX;
        let mut permitted = Counts::default();
        permitted.add(Act::Synchronize);
        let site = Location::caller();
        let scope = HotScope::open(device, "test", ScopePolicy::Warn, site).permit(permitted);
        let seen = ActSite { act: Act::Synchronize, operation: "wait", site, count: 0, refused: 0 };
        let warns = || {
            let verdict = OPEN.with_borrow(|scopes| judge(scopes, device, seen));
            matches!(verdict, ActVerdict::Warn { .. })
        };
        assert_eq!([warns(), warns(), warns()], [false, true, false]);
        assert_eq!(scope.finish().sites[0].count, 3);
    }
}

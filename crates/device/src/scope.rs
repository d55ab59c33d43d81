//! Hot scopes: parts of the host's code in which copies, waits and allocations are counted with
//! their call sites, and reported or refused (V2).
//!
//! A scope belongs to the thread that opened it, and applies to the acts of this thread on the
//! device it was opened on. Acts of other threads, and of kernels on the workers, are in the
//! device's counts only. Scopes nest: an act is counted by every open scope of its device, and the
//! strictest of them applies; of several that would refuse it, the innermost is named in the error.
//!
//! A thread without an open scope pays one check of a thread-local for each act.

use crate::counters::Counters;
use crate::device::Device;
use crate::ground::{Act, Counts, Error, Result};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::Location;
use std::rc::Rc;

/// Treatment of an act that a hot scope does not permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// Counts only.
    Off,
    /// Counts, and logs a warning once per call site.
    Warn,
    /// Refuses: the act returns [`Error::HotScope`] before anything is enqueued or waited for.
    #[default]
    Deny,
}

impl Policy {
    /// All policies, the mildest first.
    pub const ALL: [Policy; 3] = [Policy::Off, Policy::Warn, Policy::Deny];

    /// Its name: `off`, `warn` or `deny`.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Off => "off",
            Policy::Warn => "warn",
            Policy::Deny => "deny",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A call site of acts that a scope saw.
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
    pub policy: Policy,
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
            write!(f, " {} x {act};", self.counts.of(act))?;
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

/// An open scope, made by [`Device::hot_scope`]; it ends when it is dropped, in any order. Stays on
/// the thread that opened it.
#[must_use = "a scope ends when it is dropped"]
pub struct HotScope {
    open: Rc<Open>,
    /// Keeps the counters alive, whose address identifies the device.
    _device: Device,
}

/// An open scope in its thread's list.
struct Open {
    /// Address of the device's counters.
    device: usize,
    opened: &'static Location<'static>,
    permitted: Cell<Counts>,
    report: RefCell<ScopeReport>,
}

/// Decision about an act.
enum Verdict {
    Fine,
    Warn { scope: &'static str },
    Deny { scope: &'static str, opened: &'static Location<'static>, permitted: u64 },
}

thread_local! {
    /// Number of open scopes: the only thing that is checked while there are none.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static OPEN: RefCell<Vec<Rc<Open>>> = const { RefCell::new(Vec::new()) };
}

impl Device {
    /// Opens a hot scope on this thread. Until the guard is dropped, the thread's acts on this
    /// device are counted with their call sites, and `policy` decides about copies, waits and
    /// allocations (V2). Launches are counted and never refused. Does not wait.
    ///
    /// Scopes nest: every open one counts, and the strictest applies.
    ///
    /// ```
    /// # use meristem_device::{DType, Device, DeviceId, DeviceOptions, Error};
    /// # use meristem_device::{Owner, Policy, Tensor};
    /// # let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default())?;
    /// let loss = Tensor::zeros(&device.stream("s"), [1], DType::F32, Owner::Metrics)?;
    /// let scope = device.hot_scope("train_step", Policy::Deny);
    /// let refused = loss.to_vec::<f32>();
    /// assert!(matches!(refused, Err(Error::HotScope { scope: "train_step", .. })));
    /// assert_eq!(scope.finish().sites[0].refused, 1);
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn hot_scope(&self, name: &'static str, policy: Policy) -> HotScope {
        let report = ScopeReport { name, policy, counts: Counts::default(), sites: Vec::new() };
        let open = Rc::new(Open {
            device: std::ptr::from_ref(&self.shared().counters).addr(),
            opened: Location::caller(),
            permitted: Cell::default(),
            report: RefCell::new(report),
        });
        OPEN.with_borrow_mut(|scopes| scopes.push(open.clone()));
        DEPTH.set(DEPTH.get() + 1);
        HotScope { open, _device: self.clone() }
    }
}

impl HotScope {
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
        // While the thread ends its locals may be destroyed before a guard that another local
        // keeps.
        let _ = OPEN.try_with(|scopes| {
            scopes.borrow_mut().retain(|open| !Rc::ptr_eq(open, &self.open));
            DEPTH.set(DEPTH.get() - 1);
        });
    }
}

/// Checks an act on the device of `counters` against the calling thread's open scopes.
///
/// # Errors
/// [`Error::HotScope`] if one of them refuses it.
#[inline]
pub(crate) fn admit(
    counters: &Counters,
    act: Act,
    operation: &'static str,
    site: &'static Location<'static>,
) -> Result<()> {
    if DEPTH.get() == 0 { Ok(()) } else { ask(counters, act, operation, site) }
}

#[cold]
fn ask(
    counters: &Counters,
    act: Act,
    operation: &'static str,
    site: &'static Location<'static>,
) -> Result<()> {
    let device = std::ptr::from_ref(counters).addr();
    let seen = ActSite { act, operation, site, count: 0, refused: 0 };
    match OPEN.with_borrow(|scopes| judge(scopes, device, seen)) {
        Verdict::Fine => Ok(()),
        Verdict::Warn { scope } => {
            tracing::warn!(scope, operation, %site, "{act} in a hot scope");
            Ok(())
        }
        Verdict::Deny { scope, opened, permitted } => {
            Err(Error::HotScope { scope, act, operation, site, opened, permitted })
        }
    }
}

fn judge(scopes: &[Rc<Open>], device: usize, seen: ActSite) -> Verdict {
    let ours = || scopes.iter().rev().filter(|open| open.device == device);
    let by = |policy| ours().find(|open| open.objects_to(policy, seen.act));
    let verdict = match (by(Policy::Deny), by(Policy::Warn)) {
        (Some(open), _) => Verdict::Deny {
            scope: open.report.borrow().name,
            opened: open.opened,
            permitted: open.permitted.get().of(seen.act),
        },
        (None, Some(open)) if !open.has_met(&seen) => {
            Verdict::Warn { scope: open.report.borrow().name }
        }
        _ => Verdict::Fine,
    };
    let happens = !matches!(verdict, Verdict::Deny { .. });
    ours().for_each(|open| open.note(seen, happens));
    verdict
}

fn same_place(a: &ActSite, b: &ActSite) -> bool {
    a.act == b.act && a.operation == b.operation && a.site == b.site
}

impl Open {
    /// Whether it has this policy, and one more such act exceeds what it permits.
    fn objects_to(&self, policy: Policy, act: Act) -> bool {
        let report = self.report.borrow();
        report.policy == policy
            && act != Act::Launch
            && report.counts.of(act) >= self.permitted.get().of(act)
    }

    fn has_met(&self, seen: &ActSite) -> bool {
        self.report.borrow().sites.iter().any(|site| same_place(site, seen))
    }

    fn note(&self, seen: ActSite, happens: bool) {
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
        match happens {
            true => report.sites[index].count += 1,
            false => report.sites[index].refused += 1,
        }
    }
}

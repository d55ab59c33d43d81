//! Hot scopes: counts, call sites, and refusals (V2).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use meristem_device::{
    Act, Counts, DType, Device, Error, Owner, Result, ScopePolicy, Stream, Tensor, read_back,
};

use crate::common::{cpu, filled};

/// Every public operation that copies, waits or allocates, with its first counted act.
fn acts(stream: &Stream, x: &Tensor) -> Vec<(Act, Result<()>)> {
    let event = stream.record();
    let other = Owner::Other;
    let foreign = [7u32; 4];
    vec![
        (Act::CopyToHost, x.to_vec::<u32>().map(drop)),
        (Act::CopyToHost, read_back(&[x, x]).map(drop)),
        (Act::CopyToDevice, x.copy_from_slice(&[7u32; 4])),
        (Act::CopyToDevice, x.copy_from_shared(Arc::new([7u8; 16]), 0)),
        (Act::Synchronize, {
            let pieces = [(foreign.as_ptr().addr() as u64, x)];
            // SAFETY: the array has as many bytes as the tensor, and outlives the call.
            unsafe { stream.copy_foreign("copy_foreign", &pieces) }
        }),
        (Act::Synchronize, stream.synchronize()),
        (Act::Synchronize, event.synchronize()),
        (Act::Synchronize, stream.device().synchronize()),
        (Act::Allocate, Tensor::empty(stream, [4], DType::U32, other).map(drop)),
        (Act::Allocate, Tensor::zeros(stream, [4], DType::U32, other).map(drop)),
        (Act::Allocate, Tensor::from_slice(stream, &[1u32; 4], [4], other).map(drop)),
    ]
}

#[test]
fn a_refused_act_has_not_happened() {
    let device = cpu(2);
    let stream = device.stream("s");
    let x = filled(&stream, 4, 1);
    let (before, end) = (device.counts(), format!("{:?}", stream.record()));
    let scope = device.hot_scope("inner_loop", ScopePolicy::Deny);
    let line = line!() - 1;
    let results = acts(&stream, &x);
    let report = scope.finish();
    for (act, result) in results {
        let error = result.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("`inner_loop`") && text.contains("tests/all/scopes.rs"), "{text}");
        assert!(text.contains(&act.to_string()), "{text}");
        let Error::HotScope { act: got, site, opened, .. } = error else { panic!("{text}") };
        assert_eq!((got, opened.line()), (act, line));
        assert!(site.file().ends_with("scopes.rs") && site.line() < line, "{site}");
        let seen = report.sites.iter().find(|seen| (seen.act, seen.site) == (act, site)).unwrap();
        assert_eq!((seen.count, seen.refused), (0, 1));
    }
    assert_eq!(report.sites.len(), 11);
    assert_eq!(report.counts, Counts::default());
    // Nothing was counted, and nothing was enqueued.
    assert_eq!(device.counts(), before);
    assert_eq!(format!("{:?}", stream.record()), end);
    assert_eq!(x.to_vec::<u32>().unwrap(), [1; 4]);
}

#[test]
fn off_and_warn_count_with_call_sites() {
    let device = cpu(1);
    let stream = device.stream("s");
    let x = filled(&stream, 4, 1);
    for policy in [ScopePolicy::Off, ScopePolicy::Warn] {
        let before = device.counts();
        let scope = device.hot_scope("loop", policy);
        for _ in 0..3 {
            assert!(acts(&stream, &x).into_iter().all(|(_, result)| result.is_ok()));
        }
        let report = scope.report();
        assert_eq!(report.counts, device.counts() - before);
        drop(scope);
        assert_eq!(report.counts.copies_to_host, 6);
        // A site may act in two ways: a read-back copies and waits.
        assert_eq!(report.sites.len(), 14);
        assert!(report.sites.iter().all(|site| (site.count, site.refused) == (3, 0)));
        let text = report.to_string();
        assert!(text.contains("`Tensor::to_vec`") || text.contains("`read_back`"), "{text}");
        assert!(text.contains("scopes.rs:"), "{text}");
    }
}

/// Launches are counted and never refused; views, moves between streams and events are free.
#[test]
fn what_a_hot_path_may_do() {
    let device = cpu(1);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = filled(&a, 8, 1);
    let scope = device.hot_scope("inner_loop", ScopePolicy::Deny);
    for _ in 0..10 {
        let on_b = x.view(4, [4]).unwrap().on(&b).unwrap();
        b.launch("set").write(&on_b).run(|args| args.write::<u32>(0).fill(2)).unwrap();
        a.wait(&b.record()).unwrap();
    }
    let report = scope.finish();
    assert_eq!(report.counts, Counts { launches: 10, ..Counts::default() });
    assert!(report.sites.is_empty());
}

#[test]
fn so_many_are_permitted_and_no_more() {
    let device = cpu(1);
    let x = filled(&device.stream("s"), 4, 1);
    let permitted = Counts { copies_to_host: 1, synchronizations: 1, ..Counts::default() };
    let scope = device.hot_scope("control_step", ScopePolicy::Deny).permit(permitted);
    assert_eq!(x.to_vec::<u32>().unwrap(), [1; 4]);
    let error = x.to_vec::<u32>().unwrap_err();
    assert!(matches!(error, Error::HotScope { permitted: 1, .. }), "{error}");
    assert!(error.to_string().contains("more than 1 x copy to the host"), "{error}");
    assert_eq!(scope.finish().counts, permitted);
}

/// A scope outlives the device that it was opened on, and never applies to a later one.
#[test]
fn a_scope_does_not_keep_its_device_alive() {
    let device = cpu(1);
    let x = filled(&device.stream("s"), 4, 1);
    let scope = device.hot_scope("outlives", ScopePolicy::Deny);
    // The tensor keeps the device open.
    drop(device);
    assert!(matches!(read(&x), Err(Error::HotScope { scope: "outlives", .. })));
    drop(x);
    let later = cpu(1);
    let y = filled(&later.stream("s"), 4, 2);
    assert_eq!(y.to_vec::<u32>().unwrap(), [2; 4]);
    let report = scope.finish();
    assert_eq!(
        (report.counts, report.sites.len(), report.sites[0].refused),
        (Counts::default(), 1, 1)
    );
}

fn read(x: &Tensor) -> Result<()> {
    x.to_vec::<u32>().map(drop)
}

#[test]
fn nested_scopes_all_count_and_the_strictest_rules() {
    let device = cpu(1);
    let x = filled(&device.stream("s"), 4, 1);
    let outer = device.hot_scope("outer", ScopePolicy::Deny);
    let inner = device.hot_scope("inner", ScopePolicy::Off);
    let denied = |result: Result<()>| match result.unwrap_err() {
        Error::HotScope { scope, .. } => scope,
        error => panic!("{error}"),
    };
    // The inner scope does not relax the policy of the outer scope.
    assert_eq!(denied(read(&x)), "outer");
    let innermost = device.hot_scope("innermost", ScopePolicy::Deny);
    assert_eq!(denied(read(&x)), "innermost");
    // Ended in another order than opened.
    drop(outer);
    assert_eq!(denied(read(&x)), "innermost");
    drop(innermost);
    read(&x).unwrap();
    let report = inner.finish();
    assert_eq!(report.counts.copies_to_host, 1);
    assert_eq!(report.sites.iter().map(|site| site.refused).sum::<u64>(), 3);
    let after = device.hot_scope("after", ScopePolicy::Off);
    read(&x).unwrap();
    assert_eq!(after.finish().counts.copies_to_host, 1);
}

#[test]
fn a_scope_is_of_one_device_and_one_thread() {
    let (device, elsewhere) = (cpu(1), cpu(1));
    let x = filled(&device.stream("s"), 4, 1);
    let y = filled(&elsewhere.stream("s"), 4, 1);
    let scope = device.hot_scope("loop", ScopePolicy::Deny);
    // The same device name, another opening.
    read(&y).unwrap();
    std::thread::scope(|threads| threads.spawn(|| read(&x).unwrap()).join().unwrap());
    // A kernel's acts are a worker's: in the device's counts, not in the scope's.
    let before = device.counts();
    let inner = x.clone();
    let kernel =
        move |_: &mut meristem_device::Args<'_>| inner.copy_from_slice(&[2u32; 4]).unwrap();
    x.stream().launch("copy").run(kernel).unwrap();
    assert_eq!(scope.finish().counts, Counts { launches: 1, ..Counts::default() });
    device.synchronize().unwrap();
    assert_eq!((device.counts() - before).copies_to_device, 1);
}

/// A scope remains valid after its device, and does not apply to later devices.
#[test]
fn a_scope_outlives_all_other_handles() {
    let scope = cpu(1).hot_scope("old", ScopePolicy::Deny);
    let devices: Vec<Device> = (0..20).map(|_| cpu(1)).collect();
    devices.iter().for_each(|device| device.synchronize().unwrap());
    assert_eq!(scope.finish().counts, Counts::default());
}

/// Each call site warns once, so that a loop does not flood the log.
#[test]
fn a_warning_comes_once_per_call_site() {
    let warnings = Arc::new(AtomicUsize::new(0));
    let device = cpu(1);
    let x = filled(&device.stream("s"), 4, 1);
    tracing::subscriber::with_default(Counting(warnings.clone()), || {
        let scope = device.hot_scope("loop", ScopePolicy::Warn);
        for _ in 0..5 {
            read(&x).unwrap();
        }
        drop(scope);
    });
    // One for the copy, one for the wait.
    assert_eq!(warnings.load(Ordering::Relaxed), 2);
}

/// Counts the warnings of this thread.
struct Counting(Arc<AtomicUsize>);

impl tracing::Subscriber for Counting {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

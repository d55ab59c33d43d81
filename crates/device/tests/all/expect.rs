//! Every operation refuses a tensor that does not meet its requirements, with the error that V1
//! specifies, and runs nothing.

use meristem_device::{
    DType, Device, DeviceId, DeviceOptions, Error, Expect, Extent, LaunchGroup, MemoryFormat,
    Owner, Property, Result, Stream, Tensor, read_back, read_back_as, read_back_f64,
};

use crate::common::{cpu, filled};

/// Two devices of one name, and tensors of all kinds.
struct Scene {
    device: Device,
    elsewhere: Device,
    a: Stream,
    b: Stream,
    failed: Stream,
    /// u32 [4] of `a`, of `b`, of the other device, and of the failed stream.
    on_a: Tensor,
    on_b: Tensor,
    foreign: Tensor,
    lost: Tensor,
}

impl Scene {
    fn new() -> Self {
        let (device, elsewhere) = (cpu(1), cpu(1));
        let [a, b, failed] = ["a", "b", "failed"].map(|name| device.stream(name));
        let (on_a, on_b, lost) = (filled(&a, 4, 1), filled(&b, 4, 2), filled(&failed, 4, 3));
        let foreign = filled(&elsewhere.stream("a"), 4, 4);
        failed.launch("bad").write(&lost).run(|_| panic!("spoilt")).unwrap();
        let error = device.synchronize().unwrap_err();
        assert!(matches!(error, Error::KernelPanicked { operation: "bad", .. }), "{error}");
        Scene { device, elsewhere, a, b, failed, on_a, on_b, foreign, lost }
    }

    /// Current ends of all streams of the first device.
    fn ends(&self) -> String {
        format!("{:?} {:?} {:?}", self.a.record(), self.b.record(), self.failed.record())
    }
}

type Operation = fn(&Scene) -> Result<()>;
type Case = (&'static str, Operation);

/// Each operation that is refused because of a property of a tensor or stream, with its expected
/// message.
const MISMATCHES: &[Case] = &[
    ("`read`: `argument 0` must be on cpu, got another opening of cpu", |s| {
        s.a.launch("read").read(&s.foreign).run(|_| {})
    }),
    ("`write`: `argument 1` must be on cpu, got another opening of cpu", |s| {
        s.a.launch("write").read(&s.on_a).write(&s.foreign).run(|_| {})
    }),
    (
        "`read`: `argument 0` must be of stream `a`, got one of stream `b` (use `.on(&stream)`)",
        |s| s.a.launch("read").read(&s.on_b).run(|_| {}),
    ),
    ("`t`: `argument 0` must be of stream `a`, got one of stream `b`", |s| {
        let mut group = LaunchGroup::default();
        s.a.launch("t").read(&s.on_b).join(&mut group, |_| {})?;
        group.run()
    }),
    ("`t`: `stream` must be on cpu, got another opening of cpu", |s| {
        let other = s.elsewhere.stream("c");
        let mut group = LaunchGroup::default();
        s.a.launch("t").join(&mut group, |_| {})?;
        other.launch("t").join(&mut group, |_| {})?;
        group.run()
    }),
    ("`Tensor::on`: `stream` must be on cpu, got another opening of cpu", |s| {
        s.foreign.on(&s.a).map(drop)
    }),
    ("`read_back`: `tensors[1]` must be on cpu, got another opening of cpu", |s| {
        read_back(&[&s.on_a, &s.foreign]).map(drop)
    }),
    ("`read_back`: `tensors[0]` must be f32, got u32", |s| {
        read_back_as::<f32>(&[&s.on_a]).map(drop)
    }),
    ("`read_back`: `tensors[0]` must be f64, got u32", |s| read_back_f64(&[&s.on_a]).map(drop)),
    ("`Tensor::to_vec`: `self` must be i64, got u32", |s| s.on_a.to_vec::<i64>().map(drop)),
    ("`Tensor::copy_from_slice`: `elements` must be u32, got u8", |s| {
        s.on_a.copy_from_slice(&[1u8; 4])
    }),
];

/// Operations that a stream refuses after the panic of a kernel.
const ON_A_FAILED_STREAM: &[Operation] = &[
    |s| s.failed.launch("t").write(&s.lost).run(|_| {}),
    |s| s.failed.launch("t").run(|_| {}),
    |s| s.lost.on(&s.a).map(drop),
    |s| s.on_a.on(&s.failed).map(drop),
    |s| Tensor::from_slice(&s.failed, &[1u32], [1], Owner::Other).map(drop),
];

#[test]
fn every_operation_refuses_and_nothing_has_run() {
    let scene = Scene::new();
    let refused = |words: &str, operation: Operation| {
        let (counts, other) = (scene.device.counts(), scene.elsewhere.counts());
        let (ends, memory) = (scene.ends(), scene.device.memory());
        let error = operation(&scene).unwrap_err();
        assert!(error.to_string().contains(words), "expected {words}\ngot      {error}");
        // A launch that joins a group is counted when it joins; the group is refused as a whole.
        if !words.contains("`t`: ") {
            assert_eq!(scene.device.counts(), counts, "{words}");
            assert_eq!(scene.elsewhere.counts(), other, "{words}");
        }
        assert_eq!((scene.ends(), scene.device.memory()), (ends, memory), "{words}");
        error
    };
    for (words, operation) in MISMATCHES {
        let error = refused(words, *operation);
        assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
    }
    let words = "`Tensor::copy_from_slice`: `elements` must have 4 elements, got 3";
    let error = refused(words, |s| s.on_a.copy_from_slice(&[1u32; 3]));
    assert!(matches!(error, Error::WrongLength { .. }), "{error:?}");
    let words = "elements 2..5 are outside the tensor, which has 4";
    let error = refused(words, |s| s.on_a.view(2, [3]).map(drop));
    assert!(matches!(error, Error::OutOfBounds { .. }), "{error:?}");
    let error = refused("`Tensor::view`: `shape` must be four dimensions", |s| {
        s.on_a.view_with_format(0, [4], MemoryFormat::ChannelsLast).map(drop)
    });
    assert!(matches!(error, Error::BadShape { .. }), "{error:?}");
    for operation in ON_A_FAILED_STREAM {
        let error = refused("kernel `bad` on stream `failed`", *operation);
        assert!(matches!(error, Error::KernelPanicked { .. }), "{error:?}");
    }
    assert_eq!(scene.on_a.to_vec::<u32>().unwrap(), [1; 4]);
}

#[test]
fn each_property_is_looked_at_in_its_turn() {
    let scene = Scene::new();
    let stream = &scene.a;
    let image = Tensor::empty_with_format(
        stream,
        [2, 3, 4, 5],
        DType::F32,
        MemoryFormat::ChannelsLast,
        Owner::Other,
    )
    .unwrap();
    let good = || Expect::stream(stream).dtype(DType::F32).shape([2, 3, 4, 5]).channels_last();
    good().check("conv", "x", &image).unwrap();
    let between = [Extent::Between(1, 2), Extent::Any, 4.into(), 5.into()];
    Expect::device(&scene.device).shape(between).check("conv", "x", &image).unwrap();
    let cases = [
        (Expect::device(&scene.elsewhere), Property::Device, "on cpu, got another opening of cpu"),
        (Expect::stream(&scene.b), Property::Stream, "of stream `b`, got one of stream `a`"),
        (good().dtype(DType::U8), Property::DType, "u8, got f32"),
        (good().shape([2, 3, 4]), Property::Shape, "of shape [2, 3, 4], got [2, 3, 4, 5]"),
        (
            good().shape([Extent::Between(3, 9), Extent::Any, 4.into(), 6.into()]),
            Property::Shape,
            "of shape [3..=9, *, 4, 6], got [2, 3, 4, 5]",
        ),
        (good().contiguous(), Property::Format, "contiguous, got channels last"),
        // The device before the shape: the first that is wrong is named.
        (Expect::device(&scene.elsewhere).shape([1]), Property::Device, "on cpu"),
    ];
    for (expect, property, words) in cases {
        let error = expect.check("conv", "x", &image).unwrap_err();
        assert_eq!(
            error.to_string().find(&format!("`conv`: `x` must be {words}")),
            Some(0),
            "{error}"
        );
        assert!(matches!(error, Error::Mismatch { property: got, .. } if got == property));
    }
    let grey = Tensor::empty(stream, [2, 1, 4, 5], DType::F32, Owner::Other).unwrap();
    // One channel: both formats are the same bytes.
    Expect::any().channels_last().check("conv", "x", &grey).unwrap();
    let error = Expect::stream(&scene.failed).check("conv", "x", &scene.lost).unwrap_err();
    assert!(matches!(error, Error::KernelPanicked { .. }), "{error}");
}

/// S6: each logical device has its memory and counts, and an error names both devices.
#[test]
fn logical_devices_are_apart() {
    let open = |k| Device::open(DeviceId::Cpu(k), &DeviceOptions::default()).unwrap();
    let (first, second) = (open(0), open(1));
    let (a, b) = (first.stream("a"), second.stream("b"));
    let x = Tensor::from_slice(&a, &[1u32, 2], [2], Owner::Other).unwrap();
    assert_eq!((first.memory().current, second.memory().current), (8, 0));
    assert_eq!(
        (first.counts().copies_to_device, second.counts(), second.memory().reserved),
        (1, Default::default(), 0)
    );
    let error = b.launch("read").read(&x).run(|_| {}).unwrap_err();
    assert_eq!(error.to_string(), "`read`: `argument 0` must be on cpu:1, got cpu");
    for (refused, words) in [
        (x.on(&b).map(drop), "`Tensor::on`: `stream` must be on cpu, got cpu:1"),
        (b.copy("copy", &[(&x, &x)]), "must be on cpu:1, got cpu"),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    }
    // A stream may wait for another device; values go by way of the host.
    b.wait(&a.record()).unwrap();
    let y = Tensor::from_slice(&b, &x.to_vec::<u32>().unwrap(), [2], Owner::Other).unwrap();
    assert_eq!(y.to_vec::<u32>().unwrap(), [1, 2]);
}

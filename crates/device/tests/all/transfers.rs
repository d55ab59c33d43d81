//! Copies, views and memory formats (H1, F1, F2).

use std::sync::Arc;

use meristem_device::MappedFile;
use meristem_device::{
    Counts, DType, Error, Fill, MemoryFormat, Owner, Property, Shape, Tensor, lend_on_device,
    read_back, read_back_as, read_back_f64,
};

use crate::common::{Gate, cpu, filled, set};

#[test]
fn many_tensors_of_many_streams_come_back_in_one_copy() {
    let device = cpu(2);
    let streams: Vec<_> = (0..8).map(|i| device.stream(&format!("s{i}"))).collect();
    let mut tensors: Vec<_> = (0..24).map(|i| filled(&streams[i % 8], 10 + i, i as u32)).collect();
    tensors.push(Tensor::zeros(&streams[0], [0], DType::U32, Owner::Other).unwrap());
    let before = device.counts();
    let back = read_back_as::<u32>(&tensors.iter().collect::<Vec<_>>()).unwrap();
    for (i, values) in back.iter().take(24).enumerate() {
        assert_eq!(*values, vec![i as u32; 10 + i]);
    }
    assert!(back[24].is_empty());
    let one = Counts { copies_to_host: 1, synchronizations: 1, ..Counts::default() };
    assert_eq!(device.counts() - before, one);
    assert_eq!(read_back(&[&tensors[3], &tensors[3]]).unwrap()[1][..4], 3u32.to_ne_bytes());
    assert!(read_back(&[]).unwrap().is_empty());
    let error = read_back_f64(&[&tensors[0]]).unwrap_err();
    assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
    assert!(error.to_string().contains("must be f64, got u32"), "{error}");
}

#[test]
fn many_tensors_of_many_streams_are_lent_after_one_wait() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let (x, y, none) = (filled(&a, 10, 1), filled(&b, 20, 2), filled(&a, 0, 3));
    let slow = |args: &mut meristem_device::Args<'_>| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        args.write::<u32>(0).fill(4);
    };
    // The last work on `x` is on the other stream.
    let x_on_b = x.on(&b).unwrap();
    b.launch("slow").write(&x_on_b).run(slow).unwrap();
    a.launch("slow").write(&none).run(|_| ()).unwrap();
    let (end, before) = (b.record(), device.counts());
    let lent = lend_on_device(&[&x, &y, &none, &x]).unwrap();
    assert!(end.is_done());
    let one = Counts { synchronizations: 1, ..Counts::default() };
    assert_eq!(device.counts() - before, one);
    let addresses: Vec<u64> = lent.iter().map(|lent| lent.address()).collect();
    assert_eq!(addresses, [x.address(), y.address(), 0, x.address()]);
    lent[0].make_context_current().unwrap();
    assert!(x.is_shared());
    assert!(lend_on_device(&[]).unwrap().is_empty());
    let far = filled(&cpu(1).stream("far"), 1, 1);
    let error = lend_on_device(&[&x, &far]).unwrap_err();
    assert!(matches!(error, Error::Mismatch { property: Property::Device, .. }), "{error:?}");
    // A lost result is an error.
    b.launch("bad").write(&y).run(|_| panic!("on purpose")).unwrap();
    let error = lend_on_device(&[&x, &y]).unwrap_err();
    assert!(matches!(error, Error::KernelPanicked { .. }), "{error:?}");
}

#[test]
fn copies_are_ordered_and_counted_and_do_not_wait() {
    let device = cpu(1);
    let a = device.stream("a");
    let gate = Gate::close(&a);
    let before = device.counts();
    let mut host = vec![1.0f64, 2.0, 3.0];
    let x = Tensor::from_slice(&a, &host, [3], Owner::Other).unwrap();
    host.fill(0.0); // the elements were taken
    let y = Tensor::empty(&a, [3], DType::F64, Owner::Other).unwrap();
    let copy = a.launch("copy").read(&x).write(&y);
    copy.run(|args| args.write::<f64>(1).copy_from_slice(args.read(0))).unwrap();
    x.copy_from_slice(&[4.0f64, 5.0, 6.0]).unwrap();
    // Memory that was used, so that it cannot be written at once.
    drop(x.clone());
    let expected = Counts { copies_to_device: 2, allocations: 2, launches: 1, ..Counts::default() };
    assert_eq!(device.counts() - before, expected);
    gate.open();
    assert_eq!(y.to_vec::<f64>().unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(x.to_vec::<f64>().unwrap(), [4.0, 5.0, 6.0]);
}

#[test]
fn a_copy_into_memory_in_flight_is_staged() {
    let device = cpu(1);
    let a = device.stream("a");
    let gate = Gate::close(&a);
    let old = filled(&a, 100, 1);
    let address = old.address();
    drop(old);
    let mut host = vec![2u32; 100];
    let new = Tensor::from_slice(&a, &host, [100], Owner::Other).unwrap();
    host.fill(3);
    assert_eq!(new.address(), address);
    gate.open();
    assert_eq!(new.to_vec::<u32>().unwrap(), [2; 100]);
}

#[test]
fn shared_host_memory_is_copied_without_staging() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    std::fs::write(&path, (0..200).collect::<Vec<u8>>()).unwrap();
    let file = Arc::new(MappedFile::open(&path).unwrap());
    let device = cpu(1);
    let a = device.stream("a");
    let x = Tensor::empty(&a, [10], DType::U8, Owner::Batches).unwrap();
    let gate = Gate::close(&a);
    x.copy_from_shared(file.clone(), 50).unwrap();
    assert_eq!(Arc::strong_count(&file), 2);
    gate.open();
    assert_eq!(x.to_vec::<u8>().unwrap(), (50..60).collect::<Vec<u8>>());
    assert_eq!(Arc::strong_count(&file), 1);
    assert_eq!(device.counts().copies_to_device, 1);
    x.copy_from_shared(file, 190).unwrap();
    assert_eq!(x.to_vec::<u8>().unwrap()[9], 199);
}

#[test]
fn views_are_windows_of_the_same_memory() {
    let device = cpu(1);
    let a = device.stream("a");
    let x = Tensor::from_slice(&a, &(0..24).collect::<Vec<u32>>(), [4, 6], Owner::Other).unwrap();
    let rows = x.view(6, [2, 6]).unwrap();
    let cell = rows.view(7, []).unwrap();
    assert_eq!(rows.to_vec::<u32>().unwrap(), (6..18).collect::<Vec<u32>>());
    assert_eq!(cell.to_vec::<u32>().unwrap(), [13]);
    assert_eq!(cell.address(), x.address() + 13 * 4);
    assert_eq!(cell.storage_id(), x.storage_id());
    set(&a, &cell, 99).unwrap();
    let expected: Vec<u32> = (0..24).map(|i| if i == 13 { 99 } else { i }).collect();
    assert_eq!(x.to_vec::<u32>().unwrap(), expected);
    let error = rows.view(7, [6]).unwrap_err();
    assert!(matches!(error, Error::OutOfBounds { start: 7, end: 13, len: 12, .. }), "{error}");
}

#[test]
fn neighbours_in_memory_are_joined() {
    let device = cpu(1);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = Tensor::from_slice(&a, &(0..24).collect::<Vec<u32>>(), [24], Owner::Other).unwrap();
    let view = |start, len| x.view(start, [len]).unwrap();
    let both = view(3, 4).joined(&x.view(7, [2, 2]).unwrap()).unwrap();
    assert_eq!((both.dims(), both.address()), (&[8][..], view(3, 1).address()));
    assert_eq!(both.to_vec::<u32>().unwrap(), (3..11).collect::<Vec<u32>>());
    // A gap, the wrong order, other memory, another stream.
    let other = Tensor::zeros(&a, [4], DType::U32, Owner::Other).unwrap();
    for next in [view(8, 4), view(0, 3), view(4, 4), other, view(7, 4).on(&b).unwrap()] {
        assert!(view(3, 4).joined(&next).is_none(), "{next:?}");
    }
}

#[test]
fn channels_last_keeps_the_shape_that_the_user_sees() {
    let device = cpu(1);
    let a = device.stream("a");
    let format = MemoryFormat::ChannelsLast;
    let x = Tensor::empty_with_format(&a, [2, 3, 4, 5], DType::F32, format, Owner::Batches);
    let x = x.unwrap();
    assert_eq!((x.dims(), x.format()), (&[2, 3, 4, 5][..], format));
    assert_eq!(x.strides(), [60, 1, 15, 3]);
    assert_eq!(x.shape(), Shape::from([2, 3, 4, 5]));
    // Memory order is N, H, W, C.
    let write = a.launch("write").write(&x);
    write
        .run(|args| (0u16..).zip(args.write::<f32>(0)).for_each(|(i, x)| *x = f32::from(i)))
        .unwrap();
    let values = x.to_vec::<f32>().unwrap();
    let strides = x.strides();
    let at = |n: usize, c: usize, h: usize, w: usize| {
        values[n * strides[0] + c * strides[1] + h * strides[2] + w * strides[3]]
    };
    assert_eq!(at(1, 2, 3, 4), 119.0);
    assert_eq!(at(0, 1, 0, 0), 1.0);
    assert_eq!(at(0, 0, 0, 1), 3.0);
    // The first image alone.
    let first = x.view_with_format(0, [1, 3, 4, 5], format).unwrap();
    assert_eq!(first.strides(), [60, 1, 15, 3]);
    assert_eq!(first.to_vec::<f32>().unwrap(), values[..60]);
    let flat = Tensor::zeros_with_format(&a, [2, 3], DType::F32, format, Owner::Other);
    let error = flat.unwrap_err();
    assert!(matches!(error, Error::BadShape { .. }), "{error:?}");
    assert!(error.to_string().contains("got [2, 3]"), "{error}");
}

#[test]
fn pieces_are_copied_in_one_command_in_stream_order() {
    let device = cpu(2);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let x = filled(&b, 6, 1).on(&a).unwrap();
    let bytes = Tensor::from_slice(&a, &[1u8, 2, 3, 4, 5], [5], Owner::Other).unwrap();
    let y = filled(&a, 6, 9);
    let some = Tensor::from_slice(&a, &[9u8; 5], [5, 1], Owner::Other).unwrap();
    let none = Tensor::zeros(&a, [0], DType::F32, Owner::Other).unwrap();
    let gate = Gate::close(&b);
    set(&b, &x.on(&b).unwrap(), 7).unwrap(); // the copy has to wait for this
    let before = device.counts();
    let (from, to) = (x.view(1, [4]).unwrap(), y.view(2, [2, 2]).unwrap());
    let pieces =
        [(&from, &to), (&none, &none), (&bytes.view(1, [3]).unwrap(), &some.view(2, [3]).unwrap())];
    a.copy("snapshot", &pieces).unwrap();
    assert_eq!(device.counts() - before, Counts { launches: 1, ..Counts::default() });
    x.copy_from_slice(&[0u32; 6]).unwrap(); // and this for the copy
    gate.open();
    assert_eq!(y.to_vec::<u32>().unwrap(), [9, 9, 7, 7, 7, 7]);
    assert_eq!(some.to_vec::<u8>().unwrap(), [9, 9, 2, 3, 4]);
    assert_eq!(x.to_vec::<u32>().unwrap(), [0; 6]);
    assert!(device.races().is_empty());
}

#[test]
fn pieces_are_filled_in_one_command() {
    let device = cpu(1);
    let a = device.stream("a");
    let (x, y) = (filled(&a, 6, 1), filled(&a, 3, 2));
    let bytes = Tensor::from_slice(&a, &[9u8; 6], [6], Owner::Other).unwrap();
    let before = device.counts();
    a.fill("clear", &[&x.view(1, [2]).unwrap(), &y], Fill::Zero).unwrap();
    assert_eq!(device.counts() - before, Counts { launches: 1, ..Counts::default() });
    assert_eq!(x.to_vec::<u32>().unwrap(), [1, 0, 0, 1, 1, 1]);
    assert_eq!(y.to_vec::<u32>().unwrap(), [0; 3]);
    a.fill("mark", &[&bytes, &y], Fill::Word(0x0102_0304)).unwrap();
    let word = 0x0102_0304_u32.to_ne_bytes();
    assert_eq!(
        bytes.to_vec::<u8>().unwrap(),
        [word[0], word[1], word[2], word[3], word[0], word[1]]
    );
    assert_eq!(y.to_vec::<u32>().unwrap(), [0x0102_0304; 3]);
}

#[test]
fn copies_that_do_not_fit_are_refused() {
    let device = cpu(1);
    let (a, b) = (device.stream("a"), device.stream("b"));
    let (x, y) = (filled(&a, 6, 1), filled(&a, 6, 2));
    let images = |format| {
        Tensor::empty_with_format(&a, [1, 2, 3, 1], DType::U32, format, Owner::Other).unwrap()
    };
    let nhwc = images(MemoryFormat::ChannelsLast);
    let bytes = Tensor::zeros(&a, [6], DType::U8, Owner::Other).unwrap();
    let five = y.view(0, [5]).unwrap();
    let foreign = filled(&b, 6, 1);
    let before = device.counts();
    let cases = [
        (&bytes, Property::DType, "`pieces[1].to` must be u32, got u8"),
        (&five, Property::Shape, "`pieces[1].to` must be of 6 elements, got one of 5"),
        (&nhwc, Property::Format, "`pieces[1].to` must be contiguous, got channels last"),
        (&foreign, Property::Stream, "`argument 3` must be of stream `a`"),
    ];
    for (to, expected, message) in cases {
        let error = a.copy("snapshot", &[(&x, &y), (&x, to)]).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        let Error::Mismatch { operation: "snapshot", property, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(property, expected);
    }
    for pieces in [
        &[(&x, &x)][..],
        &[(&x, &y), (&y, &images(MemoryFormat::Contiguous))],
        &[(&x, &y), (&x, &y)],
    ] {
        let error = a.copy("snapshot", pieces).unwrap_err();
        assert!(matches!(error, Error::Overlap { .. }), "{error}");
    }
    assert!(matches!(a.fill("clear", &[&y, &five], Fill::Zero), Err(Error::Overlap { .. })));
    assert_eq!(device.counts().launches, before.launches);
    assert_eq!(y.to_vec::<u32>().unwrap(), [2; 6]);
}

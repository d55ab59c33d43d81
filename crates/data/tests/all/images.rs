//! Datasets of image files: class folders and CSV files, odd images, scaling.

use std::fs;

use meristem_data::{DatasetFiles, DatasetSpec, Error, Source, Split, import_cifar10, verify};

use crate::common::files::*;
use crate::common::read_split;
use crate::sources::{any_error, open_error};

#[test]
fn class_folders_are_read_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let (train, test) = write_folder(folder.path(), 4, 3);
    fs::write(folder.path().join("train/.DS_Store"), "x").unwrap();
    let spec = spec_of(Source::Folder, folder.path());
    assert_eq!(read_split(&spec, Split::Train), train);
    assert_eq!(read_split(&spec, Split::Test), test);
    let info = DatasetFiles::open(&spec).unwrap().info().unwrap();
    assert_eq!(info.classes, ["ant", "bee", "cat"]);
    assert_eq!((info.width, info.height, info.channels), (6, 5, 3));
}

#[test]
fn grey_images_stay_grey_and_become_rgb_among_rgb() {
    let folder = tempfile::tempdir().unwrap();
    for split in ["train", "test"] {
        save_grey(&folder.path().join(split).join("a/1.png"), 9);
    }
    let spec = spec_of(Source::Folder, folder.path());
    assert_eq!(read_split(&spec, Split::Train), (vec![9; 30], vec![0]));
    save_rgb(&folder.path().join("train/a/0.png"), 6, 5, 7);
    let (images, _) = read_split(&spec, Split::Train);
    assert_eq!((images.len(), &images[90..93]), (180, &[9, 9, 9][..]));
    fs::remove_file(folder.path().join("train/a/0.png")).unwrap();
    save_rgb(&folder.path().join("train/a/2.png"), 6, 5, 7);
    let (images, _) = read_split(&spec, Split::Train);
    assert_eq!((images.len(), &images[..3]), (180, &[9, 9, 9][..]), "the first is grey");
    fs::rename(folder.path().join("train/a/2.png"), folder.path().join("test/a/2.png")).unwrap();
    let error = any_error(&spec).to_string();
    assert!(
        error.contains("2.png") && error.contains("grey") && error.contains("1.png"),
        "{error}"
    );
}

#[test]
fn damaged_images_are_named_and_can_be_left_out() {
    let whole = |image: &[u8]| image.to_vec();
    type Change = fn(&[u8]) -> Vec<u8>;
    let cut: Change = |image| image[..image.len() * 2 / 3].to_vec();
    let text: Change = |_| b"this is no image".to_vec();
    let empty: Change = |_| vec![];
    let flipped: Change = |image| {
        let mut image = image.to_vec();
        let middle = image.len() / 2;
        image[middle] ^= 0x40;
        image
    };
    let cases: [(&str, Change); 7] = [
        ("b.png", cut),
        ("b.png", text),
        ("b.png", empty),
        ("b.png", flipped),
        ("b.jpg", cut),
        ("b.jpg", empty),
        ("b.jpg", text),
    ];
    for (name, change) in cases {
        let folder = tempfile::tempdir().unwrap();
        for split in ["train", "test"] {
            for file in ["a.png", name, "c.png"] {
                save_rgb(&folder.path().join(split).join("x").join(file), 16, 16, 50);
            }
        }
        let path = folder.path().join("train/x").join(name);
        fs::write(&path, change(&whole(&fs::read(&path).unwrap()))).unwrap();
        let strict = spec_of(Source::Folder, folder.path());
        let error = any_error(&strict);
        assert!(error.is_damage() && error.to_string().contains(name), "{error}");
        assert!(error.to_string().contains("--skip-bad"), "{error}");
        let lenient = DatasetSpec { skip_bad: true, ..strict.clone() };
        assert_eq!(read_split(&lenient, Split::Train).1, [0, 0]);
        let info = DatasetFiles::open(&lenient).unwrap().info().unwrap();
        assert_eq!((info.train_len, info.test_len, info.skipped), (2, Some(3), 1));
        let report = verify(&strict).unwrap();
        assert_eq!((report.splits[0].images, report.splits[0].damaged.len()), (2, 1));
        assert!(report.splits[0].damaged[0].error.contains(name));
    }
}

#[test]
fn class_folders_that_do_not_fit_are_named() {
    let fresh = || {
        let folder = tempfile::tempdir().unwrap();
        write_folder(folder.path(), 2, 2);
        let spec = DatasetSpec { skip_bad: true, ..spec_of(Source::Folder, folder.path()) };
        (folder, spec)
    };
    let (folder, spec) = fresh();
    save_rgb(&folder.path().join("train/bee/zz.png"), 7, 5, 1);
    let error = any_error(&spec);
    assert!(matches!(error, Error::Layout { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("zz.png") && text.contains("6×5") && text.contains("7×5"), "{text}");
    assert!(text.contains("such as --resize 32"), "{text}");
    let (folder, spec) = fresh();
    save_rgb(&folder.path().join("test/dog/1.png"), 6, 5, 1);
    let text = open_error(&spec).to_string();
    assert!(text.contains("test/dog") && text.contains("ant, bee, cat"), "{text}");
    let (folder, spec) = fresh();
    save_rgb(&folder.path().join("train/alone.png"), 6, 5, 1);
    let text = open_error(&spec).to_string();
    assert!(text.contains("alone.png") && text.contains("in a class folder"), "{text}");
    let (folder, spec) = fresh();
    fs::create_dir(folder.path().join("train/zebra")).unwrap();
    assert!(open_error(&spec).to_string().contains("zebra"));
}

#[test]
fn an_import_reads_back_as_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("images");
    let classes: Vec<String> = (0..10).map(|i| format!("class {i}")).collect();
    for (split, count) in [("train", 3), ("test", 1)] {
        for (label, class) in classes.iter().enumerate() {
            for i in 0..count {
                let path = source.join(split).join(class).join(format!("{i}.png"));
                save_rgb(&path, 32, 32, (label * 10 + i) as u8);
            }
        }
    }
    let target = folder.path().join("out");
    fs::create_dir(&target).unwrap();
    let report = import_cifar10(&source, &target, false).unwrap();
    assert_eq!((report.train_len, report.test_len, report.skipped), (30, 10, 0));
    let spec = spec_of(Source::Cifar10, &target);
    let (images, labels) = read_split(&spec, Split::Train);
    let (from_images, from_labels) = read_split(&spec_of(Source::Folder, &source), Split::Train);
    for (i, (image, label)) in images.chunks(3072).zip(&labels).enumerate() {
        assert_eq!(*label as usize, i % 10, "round-robin over the classes");
        let place = *label as usize * 3 + i / 10;
        assert_eq!(from_labels[place], *label);
        assert_eq!(image, &from_images[place * 3072..(place + 1) * 3072]);
    }
    assert_eq!(DatasetFiles::open(&spec).unwrap().info().unwrap().classes, classes);
    let records = fs::read_to_string(target.join("cifar-10-batches-bin/records.txt")).unwrap();
    assert!(records.starts_with("data_batch_1.bin 6\n"), "{records}");
    assert!(records.ends_with("test_batch.bin 10\n"), "{records}");

    let again = import_cifar10(&source, &target, false).unwrap_err();
    assert!(matches!(again, Error::Layout { .. }), "{again:?}");
    assert!(again.to_string().contains("an existing one"), "{again}");
    let other = folder.path().join("other");
    fs::write(source.join("train/class 3/1.png"), "no image").unwrap();
    let error = import_cifar10(&source, &other, false).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
    assert!(error.to_string().contains("1.png"), "{error}");
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0, "nothing half-written stays");
    let report = import_cifar10(&source, &other, true).unwrap();
    assert_eq!((report.train_len, report.test_len, report.skipped), (29, 10, 1));
    fs::remove_dir_all(source.join("train/class 9")).unwrap();
    fs::remove_dir_all(source.join("test/class 9")).unwrap();
    let error = import_cifar10(&source, &folder.path().join("nine"), false).unwrap_err();
    assert!(matches!(error, Error::Layout { .. }), "{error:?}");
    assert!(error.to_string().contains("must be 10, got 9"), "{error}");
    write_folder(&folder.path().join("small"), 1, 1);
    let error = import_cifar10(&folder.path().join("small"), &other, false).unwrap_err();
    assert!(matches!(error, Error::Layout { .. }), "{error:?}");
    assert!(error.to_string().contains("32×32 RGB"), "{error}");
}

/// An import writes to a folder with an unpredictable name until it is complete.
#[test]
#[cfg(unix)]
fn an_import_follows_no_link_and_leaves_a_folder_for_everybody() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let [source, target, elsewhere] =
        ["images", "out", "elsewhere"].map(|name| folder.path().join(name));
    for split in ["train", "test"] {
        for label in 0..10 {
            save_rgb(&source.join(format!("{split}/class {label}/0.png")), 32, 32, label);
        }
    }
    fs::create_dir(&target).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    // The name of the unfinished folder in an earlier build.
    symlink(&elsewhere, target.join("cifar-10-batches-bin.partial")).unwrap();
    import_cifar10(&source, &target, false).unwrap();
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    let made = target.join("cifar-10-batches-bin");
    assert!(made.symlink_metadata().unwrap().is_dir());
    let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode();
    assert_eq!(mode(&made), mode(&elsewhere));
    assert_eq!(fs::read_dir(&target).unwrap().count(), 2, "nothing else is left");
}

fn spec_with(root: &std::path::Path, resize: u32) -> DatasetSpec {
    DatasetSpec { resize: Some(resize), ..spec_of(Source::Folder, root) }
}

/// Images in subfolders belong to the class; files that are no images are left out; an empty class
/// is an error.
#[test]
fn nested_folders_are_read_and_strays_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (name, value) in [
        ("train/a/2.png", 2),
        ("train/a/inner/1.png", 3),
        ("train/a/inner/deeper/0.png", 4),
        ("train/b/.hidden/1.png", 9),
        ("train/b/x.PNG", 5),
    ] {
        save_grey(&at(&format!("{name}.png")), value);
        fs::rename(at(&format!("{name}.png")), at(name)).unwrap();
    }
    // Recognised by its contents.
    fs::copy(at("train/a/2.png"), at("train/b/y")).unwrap();
    for stray in ["train/notes.txt", "train/a/notes.txt", "train/a/inner/empty", "train/b/z.gif"] {
        fs::write(at(stray), &stray[..0]).unwrap();
    }
    let spec = spec_of(Source::Folder, folder.path());
    let (images, labels) = read_split(&spec, Split::Train);
    let values: Vec<u8> = images.chunks(30).map(|image| image[0]).collect();
    assert_eq!((values, labels), (vec![2, 3, 4, 5, 2], vec![0, 0, 0, 1, 1]));
    for name in ["train/c/only.txt", "test/a/only.txt"] {
        fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        fs::write(at(name), "x").unwrap();
        let text = open_error(&spec).to_string();
        assert!(text.contains("at least one image, got none"), "{text}");
        fs::remove_dir_all(at(name).parent().unwrap()).unwrap();
    }
    fs::remove_dir_all(at("test")).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("..", at("train/a/inner/loop")).unwrap();
        let text = open_error(&spec).to_string();
        assert!(text.contains("at most 16 folders deep"), "{text}");
    }
}

/// Images are converted as by Pillow's `convert("RGB")`, which torchvision's ImageFolder calls;
/// images with 16 bits are the exception.
#[test]
fn odd_images_are_converted_as_documented() {
    use image::{DynamicImage, ImageBuffer, Luma, LumaA, Rgb, Rgba};
    let rgba = ImageBuffer::from_pixel(2, 2, Rgba([10_u8, 20, 30, 0]));
    let grey_alpha = ImageBuffer::from_pixel(2, 2, LumaA([70_u8, 128]));
    let rgb_16 = ImageBuffer::from_pixel(2, 2, Rgb([256_u16, 65_535, 33_000]));
    let grey_16 = ImageBuffer::from_pixel(2, 2, Luma([33_000_u16]));
    // v / 257, rounded: 33,000 / 257 = 128.4.
    for (image, expected) in [
        (DynamicImage::ImageRgba8(rgba), [10, 20, 30]),
        (DynamicImage::ImageLumaA8(grey_alpha), [70, 70, 70]),
        (DynamicImage::ImageRgb16(rgb_16), [1, 255, 128]),
        (DynamicImage::ImageLuma16(grey_16), [128, 128, 128]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        save_rgb(&folder.path().join("train/a/0.png"), 2, 2, 7);
        image.save(folder.path().join("train/a/1.png")).unwrap();
        let (images, _) = read_split(&spec_of(Source::Folder, folder.path()), Split::Train);
        assert_eq!(images[12..], expected.repeat(4), "{:?}", image.color());
    }
}

/// A text longer than the decoder's limit is removed before decoding.
#[test]
fn metadata_of_any_length_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train/a/0.png");
    save_grey(&path, 5);
    let sound = fs::read(&path).unwrap();
    let body = [&b"tEXtComment\0"[..], &vec![b'x'; 9 << 20]].concat();
    let length = (body.len() as u32 - 4).to_be_bytes();
    let crc = crc32fast::hash(&body).to_be_bytes();
    let png = [&sound[..33], &length, &body, &crc, &sound[33..]].concat();
    fs::write(&path, png).unwrap();
    let (images, _) = read_split(&spec_of(Source::Folder, folder.path()), Split::Train);
    assert_eq!(images, [5; 30]);
}

/// A palette PNG with a transparent entry: two colours, 1 bit per pixel, 2×1 pixels.
#[test]
fn palettes_become_rgb() {
    let folder = tempfile::tempdir().unwrap();
    let chunk = |kind: &[u8; 4], data: &[u8]| {
        let body = [&kind[..], data].concat();
        let crc = crc32fast::hash(&body).to_be_bytes();
        [&(data.len() as u32).to_be_bytes()[..], &body, &crc].concat()
    };
    let row = {
        use std::io::Write;
        let mut out = flate2::write::ZlibEncoder::new(vec![], flate2::Compression::default());
        out.write_all(&[0, 0b0100_0000]).unwrap();
        out.finish().unwrap()
    };
    let png = [
        b"\x89PNG\r\n\x1a\n".to_vec(),
        chunk(b"IHDR", &[0, 0, 0, 2, 0, 0, 0, 1, 1, 3, 0, 0, 0]),
        chunk(b"PLTE", &[1, 2, 3, 200, 100, 50]),
        chunk(b"tRNS", &[0]),
        chunk(b"IDAT", &row),
        chunk(b"IEND", &[]),
    ];
    fs::create_dir_all(folder.path().join("train/a")).unwrap();
    fs::write(folder.path().join("train/a/0.png"), png.concat()).unwrap();
    let (images, _) = read_split(&spec_of(Source::Folder, folder.path()), Split::Train);
    assert_eq!(images, [1, 2, 3, 200, 100, 50]);
}

/// The central square, with a filter as wide as the new pixels. A checkerboard of single pixels
/// becomes grey; without antialiasing it would stay black or white.
#[test]
fn images_are_scaled_to_one_size() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join("train/a").join(name);
    fs::create_dir_all(at("")).unwrap();
    let board = image::GrayImage::from_fn(64, 32, |x, y| match x {
        16..48 => image::Luma([if (x + y) % 2 == 0 { 0 } else { 200 }]),
        _ => image::Luma([255]),
    });
    board.save(at("0.png")).unwrap();
    let tall = image::GrayImage::from_fn(8, 10, |x, y| image::Luma([(x * 20 + y) as u8]));
    tall.save(at("1.png")).unwrap();
    save_grey(&at("2.png"), 33);
    let (images, _) = read_split(&spec_with(folder.path(), 8), Split::Train);
    let squares: Vec<&[u8]> = images.chunks(64).collect();
    assert!(squares[0].iter().all(|grey| (92..=108).contains(grey)), "{:?}", squares[0]);
    let central = |i: usize| ((i % 8) * 20 + i / 8 + 1) as u8;
    assert_eq!(squares[1], (0..64).map(central).collect::<Vec<_>>(), "the size is kept");
    assert!(squares[2].iter().all(|grey| *grey == 33), "enlarged");
    let error = any_error(&spec_of(Source::Folder, folder.path())).to_string();
    assert!(error.contains("64×32") && error.contains("8×10"), "{error}");
}

/// The bits of a scaled image, which are equal on every machine.
#[test]
fn a_scaled_image_is_pinned() {
    let folder = tempfile::tempdir().unwrap();
    save_rgb(&folder.path().join("train/a/0.png"), 97, 61, 40);
    let sums = [7, 32, 128].map(|side| {
        let (images, _) = read_split(&spec_with(folder.path(), side), Split::Train);
        assert_eq!(images.len(), (side * side * 3) as usize);
        crc32fast::hash(&images)
    });
    assert_eq!(sums, [4_278_819_539, 1_175_285_731, 3_706_783_374]);
}

/// A header that claims more than the file can hold is refused before memory is allocated for it.
#[test]
fn a_claim_of_many_pixels_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train/a/0.png");
    save_rgb(&path, 4, 4, 7);
    let sound = fs::read(&path).unwrap();
    save_rgb(&folder.path().join("train/a/1.png"), 4, 4, 7);
    for sides in [[16_384_u32, 16_384], [9_000, 9_000], [1, 16_385], [0, 4], [16_384, 2_000]] {
        let mut png = sound.clone();
        png[16..20].copy_from_slice(&sides[0].to_be_bytes());
        png[20..24].copy_from_slice(&sides[1].to_be_bytes());
        let crc = crc32fast::hash(&png[12..29]).to_be_bytes();
        png[29..33].copy_from_slice(&crc);
        fs::write(&path, &png).unwrap();
        let error = any_error(&spec_with(folder.path(), 8));
        assert!(error.is_damage() && error.to_string().contains("0.png"), "{sides:?}: {error}");
    }
}

fn csv(text: &str) -> (tempfile::TempDir, DatasetSpec) {
    let folder = tempfile::tempdir().unwrap();
    for (name, value) in [("a.png", 1), ("b c.png", 2), ("d.png", 3)] {
        save_grey(&folder.path().join("images").join(name), value);
    }
    let path = folder.path().join("list.csv");
    fs::write(&path, text).unwrap();
    let spec = spec_of(Source::Csv, &path);
    (folder, spec)
}

#[test]
fn a_csv_file_lists_images_with_labels() {
    let text = "\u{feff}Label,path,split,more\ncat,images/d.png,train,1\n\
                \"a, dog\",\"images/b c.png\",train,2\r\ncat,images/a.png,test,3\n";
    let (_folder, spec) = csv(text);
    let (images, labels) = read_split(&spec, Split::Train);
    assert_eq!((images[0], images[30], labels), (3, 2, vec![1, 0]));
    let (images, labels) = read_split(&spec, Split::Test);
    assert_eq!((images[0], labels), (1, vec![1]));
    let info = DatasetFiles::open(&spec).unwrap().info().unwrap();
    assert_eq!((info.name.as_str(), info.test_len), ("csv", Some(1)));
    assert_eq!(info.classes, ["a, dog", "cat"]);
    // Numbers are sorted as numbers, and without a column `split` there is no test split.
    let (_folder, spec) = csv("path,label\nimages/a.png,10\nimages/d.png,9\n");
    let info = DatasetFiles::open(&spec).unwrap().info().unwrap();
    assert_eq!((info.classes, info.test_len), (vec!["9".into(), "10".into()], None));
    assert_eq!(read_split(&spec, Split::Train).1, [1, 0]);
}

#[test]
fn csv_files_that_do_not_fit_are_named_with_the_line() {
    for (text, words) in [
        ("", "line 1 must be names of columns"),
        ("file,label\na,b\n", "got `file,label`"),
        ("path,label\nimages/a.png\n", "line 2 must be 2 cells"),
        ("path,label\nimages/a.png,x\n,y\n", "`path` in line 3 must be some text"),
        ("path,label\nimages/a.png,\n", "`label` in line 2"),
        ("path,label,split\nimages/a.png,x,val\n", "`split` in line 2 must be train or test"),
        ("path,label,split\nimages/a.png,x,test\n", "dataset is not in"),
        ("path,label\n", "dataset is not in"),
        ("path,label\nimages,x\n", "list.csv, line 2: "),
        ("path,label\nimages,x\n", "must be a file"),
        ("path,label,split,Label\n", "at most one column `label`, got 2"),
        ("path,path,label\n", "at most one column `path`, got 2"),
        ("split,path,label,split\n", "at most one column `split`, got 2"),
    ] {
        let (_folder, spec) = csv(text);
        let error = any_error(&spec);
        assert!(!error.is_damage(), "{error:?}");
        assert!(error.to_string().contains(words), "{text:?}: {error}");
    }
    let (folder, spec) = csv("");
    fs::write(folder.path().join("list.csv"), b"path,label\n\xff\xfe,x\n").unwrap();
    assert!(any_error(&spec).to_string().contains("text in UTF-8"));
    let long = format!("path,label\n{},x\n", "a".repeat(5000));
    for (cell, words) in
        [(long.as_str(), "at most 4096 bytes"), ("path,label\na\0b,x\n", "`a\\0b`")]
    {
        fs::write(folder.path().join("list.csv"), cell).unwrap();
        let text = any_error(&spec).to_string();
        assert!(text.contains(words) && text.len() < 600, "{text}");
    }
    #[cfg(unix)]
    {
        let pipe = folder.path().join("pipe");
        std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(matches!(open_error(&spec_of(Source::Csv, &pipe)), Error::Missing { .. }));
        let images = folder.path().join("of_pipes/train/a");
        fs::create_dir_all(&images).unwrap();
        fs::rename(&pipe, images.join("1.png")).unwrap();
        let text =
            open_error(&spec_of(Source::Folder, &folder.path().join("of_pipes"))).to_string();
        assert!(text.contains("at least one image"), "{text}");
    }
    let of_folder = spec_of(Source::Csv, folder.path());
    assert!(open_error(&of_folder).to_string().contains("a CSV file whose first line"));
}

//! Sound files that a dataset cannot use: each error names the file and the remedy.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use meristem_data::{DatasetFiles, DatasetSpec, Error, Source, Split, import_cifar10, verify};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::common::files::*;
use crate::common::read_split;
use crate::sources::{any_error, open_error};

/// An array of an archive: numpy's type, shape, order and bytes.
struct Npy<'a> {
    dtype: &'a str,
    shape: &'a str,
    is_fortran: bool,
    bytes: usize,
}

/// An archive with these training images and labels, all zeros.
fn write_npz(path: &Path, images: &Npy<'_>, labels: &Npy<'_>) {
    use std::io::Write;
    let mut archive = zip::ZipWriter::new(fs::File::create(path).unwrap());
    for (name, &Npy { dtype, shape, is_fortran, bytes }) in
        [("train_images", images), ("train_labels", labels)]
    {
        let options = zip::write::SimpleFileOptions::default();
        archive.start_file(format!("{name}.npy"), options).unwrap();
        let order = if is_fortran { "True" } else { "False" };
        let header =
            format!("{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': ({shape}), }}\n");
        archive.write_all(b"\x93NUMPY\x01\x00").unwrap();
        archive.write_all(&(header.len() as u16).to_le_bytes()).unwrap();
        archive.write_all(header.as_bytes()).unwrap();
        archive.write_all(&vec![0; bytes]).unwrap();
    }
    archive.finish().unwrap();
}

/// Arrays of another shape or type are not damage: the error names both, and the conversion.
#[test]
fn arrays_of_another_form_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.npz");
    let npy = |dtype, shape, bytes| Npy { dtype, shape, is_fortran: false, bytes };
    let images = npy("|u1", "2, 8, 8, 3", 384);
    let labels = npy("<i8", "2,", 16);
    let check = |images: &Npy<'_>, labels: &Npy<'_>, words: &[&str]| {
        write_npz(&path, images, labels);
        let error = open_error(&spec_of(Source::Arrays, &path));
        let text = error.to_string();
        assert!(matches!(error, Error::Layout { .. }), "{text}");
        assert!(words.iter().all(|words| text.contains(words)), "{text}");
        assert!(!text.contains("again") && !text.contains("at byte"), "{text}");
    };
    let expected = "`train_images` must be numbers, N×H×W or N×H×W×C with C from 1 to 4";
    let transpose = "name it train_inputs, which has its channels first";
    let channels_first = npy("|u1", "2, 3, 8, 8", 384);
    check(&channels_first, &labels, &[expected, "got uint8 [2, 3, 8, 8]", transpose]);
    let floats = npy("<f4", "2, 1, 8, 8", 512);
    check(&floats, &labels, &[expected, "got float32 [2, 1, 8, 8]", transpose]);
    let flags = npy("|b1", "2, 8, 8", 128);
    check(&flags, &labels, &["got bool [2, 8, 8]", "x.astype('f4')"]);
    let flat = npy("|u1", "2, 64", 128);
    check(&flat, &labels, &["got uint8 [2, 64]", "x.reshape(-1, 28, 28)"]);
    let fortran = Npy { is_fortran: true, ..npy("|u1", "2, 8, 8", 128) };
    check(&fortran, &labels, &["in Fortran order", "numpy.ascontiguousarray(x)"]);
    let expected = "`train_labels` must be integers [2], one for each sample";
    let fortran = Npy { is_fortran: true, ..npy("|u1", "2, 10", 20) };
    check(&images, &fortran, &[expected, "in Fortran order", "numpy.ascontiguousarray(y)"]);
    check(&images, &npy("|u1", "3, 10", 30), &[expected, "got uint8 [3, 10]", "one row of labels"]);
    check(&images, &npy("<i8", "2, 1", 16), &[expected, "y.reshape(-1)"]);
    check(&images, &npy("<f8", "2,", 16), &[expected, "got float64 [2]", "y.astype('i8')"]);
    for kind in ["npz", "safetensors"] {
        let arrays = Arrays { train_labels: vec![0, -1, 1], ..Arrays::small() };
        let path = write_arrays(folder.path(), kind, &arrays);
        let text = open_error(&spec_of(Source::Arrays, &path)).to_string();
        assert!(text.contains("label 1 of `train_labels`"), "{text}");
        assert!(text.contains("must be from 0 to 65535, got -1 (int64)"), "{text}");
    }
}

/// A clone without LFS has small files of text in place of the data.
#[test]
fn pointers_of_git_lfs_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    let check = |source: Source, name: &str, write: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        fs::write(folder.path().join(name), pointer).unwrap();
        let spec = match source {
            Source::Csv => spec_of(source, &folder.path().join(name)),
            _ => spec_of(source, folder.path()),
        };
        let text = any_error(&spec).to_string();
        assert!(text.contains(name) && text.contains("got a Git LFS pointer"), "{text}");
        assert!(text.contains("`git lfs pull`"), "{text}");
    };
    let idx = |root: &Path| {
        write_idx(root, "train", 7, false);
        write_idx(root, "t10k", 3, false);
    };
    check(Source::FashionMnist, "train-images-idx3-ubyte", &idx);
    check(Source::FashionMnist, "t10k-labels-idx1-ubyte", &idx);
    check(Source::Cifar10, "data_batch_3.bin", &|root| _ = write_cifar10(root, 2));
    check(Source::Cifar10, "batches.meta.txt", &|root| _ = write_cifar10(root, 2));
    check(Source::Arrays, "data.npz", &|_| {});
    check(Source::Arrays, "data.safetensors", &|_| {});
    check(Source::Csv, "list.csv", &|_| {});
    check(Source::Folder, "train/ant/000.png", &|root| _ = write_folder(root, 2, 2));
}

/// Tapes and block devices leave zeros after a file; other bytes are damage.
#[test]
fn a_padded_gzip_file_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let train = write_idx(folder.path(), "train", 7, true);
    write_idx(folder.path(), "t10k", 3, true);
    let path = folder.path().join("train-images-idx3-ubyte.gz");
    let sound = fs::read(&path).unwrap();
    let plain = idx_images(7, &train.0);
    let spec = spec_of(Source::FashionMnist, folder.path());
    let halves = [gzipped(&plain[..50]), vec![0; 3], gzipped(&plain[50..])].concat();
    for padded in
        [[&sound[..], &[0; 512]].concat(), [&sound[..], &vec![0; 200_000]].concat(), halves]
    {
        fs::write(&path, padded).unwrap();
        assert_eq!(read_split(&spec, Split::Train), train);
    }
    for end in [&[0, 0, 7][..], &[1], &[0x1f, 0x8b]] {
        fs::write(&path, [&sound[..], end].concat()).unwrap();
        let error = any_error(&spec);
        assert!(error.is_damage(), "{end:?}: {error}");
    }
}

/// An image that a list names and that is not there is one of many: `verify` reports all of them
/// with their lines, and `skip_bad` leaves them out.
#[test]
fn missing_images_are_named_with_their_lines() {
    let folder = tempfile::tempdir().unwrap();
    for (name, value) in [("a.png", 1), ("b.png", 2)] {
        save_grey(&folder.path().join(name), value);
    }
    fs::write(folder.path().join("cut.png"), "x").unwrap();
    let list = folder.path().join("list.csv");
    let text = "path,label\nnone.png,x\na.png,x\ncut.png,y\ngone.png,y\nb.png,y\n";
    fs::write(&list, text).unwrap();
    let spec = spec_of(Source::Csv, &list);
    let error = any_error(&spec);
    let text = error.to_string();
    assert!(
        text.contains("list.csv, line 2: ") && text.contains("none.png: there is no"),
        "{text}"
    );
    assert!(error.is_damage() && text.contains("--skip-bad"), "{text}");
    let report = verify(&spec).unwrap();
    let errors: Vec<&str> = report.splits[0].damaged.iter().map(|d| d.error.as_str()).collect();
    assert_eq!(errors.len(), 3, "{errors:?}");
    for (error, [line, name]) in
        errors.iter().zip([["line 2", "none.png"], ["line 4", "cut.png"], ["line 5", "gone.png"]])
    {
        assert!(error.contains(line) && error.contains(name), "{error}");
    }
    assert_eq!(report.splits[0].images, 2);
    let lenient = DatasetSpec { skip_bad: true, ..spec };
    assert_eq!(read_split(&lenient, Split::Train).1, [0, 1]);
    let info = DatasetFiles::open(&lenient).unwrap().info().unwrap();
    assert_eq!((info.train_len, info.skipped), (2, 3));
}

/// CIFAR-10 has a line of text for each class.
#[test]
fn an_import_refuses_names_that_are_not_one_line() {
    for name in ["two\nlines", "a\rb", " space", "bell\u{7}"] {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("images");
        for class in (0..9).map(|i| i.to_string()).chain([name.to_string()]) {
            for split in ["train", "test"] {
                save_rgb(&source.join(split).join(&class).join("a.png"), 32, 32, 1);
            }
        }
        let target = folder.path().join("out");
        let error = import_cifar10(&source, &target, false).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Layout { .. }), "{text}");
        assert!(text.contains("the name of a class folder must be one line"), "{text}");
        assert!(
            text.contains(&format!("{name:?}")) && !text.contains(name.trim()) || name == " space"
        );
        assert!(!target.exists(), "nothing is written");
    }
}

/// The texts of the notes that this thread emits.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Subscriber for Notes {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == meristem_data::notes::TARGET
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap().push(message.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Notes while both splits are read.
pub(crate) fn notes_of(spec: &DatasetSpec) -> Vec<String> {
    let notes = Notes::default();
    tracing::subscriber::with_default(notes.clone(), || verify(spec).unwrap());
    let notes = notes.0.lock().unwrap();
    notes.clone()
}

/// Files of a third split are mentioned in a note.
#[test]
fn another_split_is_mentioned() {
    let folder = tempfile::tempdir().unwrap();
    write_folder(folder.path(), 2, 2);
    let spec = spec_of(Source::Folder, folder.path());
    assert_eq!(notes_of(&spec), [""; 0]);
    save_rgb(&folder.path().join("val/ant/1.png"), 6, 5, 1);
    fs::create_dir(folder.path().join(".hidden")).unwrap();
    fs::write(folder.path().join("README"), "x").unwrap();
    assert_eq!(
        notes_of(&spec),
        ["only the folders train and test are read; ignored beside them: val"]
    );
    for name in ["dev", "a", "b"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    let [note] = &notes_of(&spec)[..] else { panic!() };
    assert!(note.ends_with("beside them: a, b, dev and 1 more"), "{note}");

    let path = folder.path().join("val.npz");
    write_npz_with_validation(&path);
    let expected = "only the arrays of train and test are read; ignored: val_images, val_labels";
    assert_eq!(notes_of(&spec_of(Source::Arrays, &path)), [expected]);
}

fn write_npz_with_validation(path: &Path) {
    use std::io::Write;
    fs::write(path, npz_bytes(&Arrays::small(), false)).unwrap();
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut archive = zip::ZipWriter::new_append(file).unwrap();
    for name in ["val_images.npy", "val_labels.npy"] {
        archive.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(b"x").unwrap();
    }
    archive.finish().unwrap();
}

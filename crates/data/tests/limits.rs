//! A small file takes little memory, even if its parts unpack to much more (D9).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "all/common/mod.rs"]
mod common;

use std::alloc::System;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;

use cap::Cap;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use meristem_data::{DatasetSpec, Source, verify};

use common::files::*;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes that a bomb unpacks to.
const UNPACKED: u64 = 96 << 20;
/// Limit of the memory for any of the files here, none of which is larger than 2 MiB.
const PEAK_MAX: usize = 24 << 20;

/// Zeros, compressed a thousandfold.
fn bomb() -> Vec<u8> {
    let mut out = ZlibEncoder::new(vec![], Compression::default());
    std::io::copy(&mut std::io::repeat(0).take(UNPACKED), &mut out).unwrap();
    out.finish().unwrap()
}

/// A PNG of 8×8 pixels with chunks after its header.
fn png_with(path: &Path, chunks: &[(&[u8; 4], &[u8])]) {
    save_rgb(path, 8, 8, 9);
    let sound = fs::read(path).unwrap();
    let mut png = sound[..33].to_vec();
    for (name, data) in chunks {
        let body = [&name[..], data].concat();
        png.extend((data.len() as u32).to_be_bytes());
        png.extend(&body);
        png.extend(crc32fast::hash(&body).to_be_bytes());
    }
    png.extend(&sound[33..]);
    fs::write(path, png).unwrap();
}

/// A JPEG with the same segment many times before its pixels.
fn jpeg_with(path: &Path, code: u8, data: &[u8], times: usize) {
    save_rgb(path, 8, 8, 9);
    let sound = fs::read(path).unwrap();
    let length = (data.len() as u16 + 2).to_be_bytes();
    let segment = [&[0xff, code], &length[..], data].concat();
    fs::write(path, [&sound[..2], &segment.repeat(times), &sound[2..]].concat()).unwrap();
}

/// Whether the images of a class folder are sound, alone in a dataset.
fn check_image(name: &str, write: &dyn Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train/a").join(name);
    write(&path);
    assert!(fs::metadata(&path).unwrap().len() < 2 << 20, "{name}");
    let report = verify(&spec_of(Source::Folder, folder.path())).unwrap();
    assert!(report.is_sound(), "{name}: {report:?}");
}

/// Alone in its process, so that the allocator's peak belongs to this test.
#[test]
fn small_files_take_little_memory() {
    let bomb = bomb();
    let check = |what: &str, run: &dyn Fn()| {
        run();
        let peak = ALLOCATOR.max_allocated();
        assert!(peak < PEAK_MAX, "{what}: {peak} bytes");
    };
    check("nothing", &|| {});
    let of_image = |name: &str, write: &dyn Fn(&Path)| {
        check(name, &|| check_image(name, write));
    };
    let profile = [b"name\0\0", &bomb[..]].concat();
    of_image("profile.png", &|path| png_with(path, &[(b"iCCP", &profile)]));
    of_image("text.png", &|path| png_with(path, &[(b"zTXt", &profile[..]); 8]));
    let text = [b"XML:com.adobe.xmp\0\x01\0\0\0", &bomb[..]].concat();
    of_image("international.png", &|path| png_with(path, &[(b"iTXt", &text[..]); 8]));
    let exif = vec![7; 1 << 20];
    of_image("exif.png", &|path| png_with(path, &[(b"eXIf", &exif)]));
    let xmp = [b"http://ns.adobe.com/xmp/extension/\0", &[b'g'; 60][..]].concat();
    of_image("extended.jpg", &|path| jpeg_with(path, 0xe1, &xmp, 4000));
    of_image("profile.jpg", &|path| jpeg_with(path, 0xe2, b"ICC_PROFILE\0\x01\xff....", 60_000));
    of_image("comment.jpg", &|path| jpeg_with(path, 0xfe, &[b'x'; 60_000], 30));

    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    check("a record without an end", &|| {
        let mut list = fs::File::create(at("list.csv")).unwrap();
        list.write_all(b"path,label\na.png,\"").unwrap();
        (0..UNPACKED >> 16).for_each(|_| list.write_all(&[b'x'; 1 << 16]).unwrap());
        let error = verify(&spec_of(Source::Csv, &at("list.csv"))).unwrap_err().to_string();
        let words = "line 2 must be at most 1048576 bytes";
        assert!(error.contains(words), "{error}");
    });
    check("class names without an end", &|| {
        write_cifar10(&at("cifar"), 1);
        let mut names = fs::File::create(at("cifar/batches.meta.txt")).unwrap();
        (0..UNPACKED >> 16).for_each(|_| names.write_all(&[b'x'; 1 << 16]).unwrap());
        let error = verify(&spec_of(Source::Cifar10, &at("cifar"))).unwrap_err().to_string();
        assert!(error.contains("must be at most 1048576 bytes"), "{error}");
    });
    check("a header of safetensors", &|| {
        let mut file = fs::File::create(at("a.safetensors")).unwrap();
        file.write_all(&UNPACKED.to_le_bytes()).unwrap();
        file.set_len(UNPACKED + 8).unwrap();
        let error = verify(&spec_of(Source::Arrays, &at("a.safetensors"))).unwrap_err();
        assert!(error.to_string().contains("must be at most 16777216 bytes"), "{error}");
    });
    check("labels in an archive", &|| {
        let error = verify(&labels_bomb(&at("a.npz"))).unwrap_err().to_string();
        assert!(error.contains("label 0 of `train_labels` must be from 0"), "{error}");
    });
}

/// An archive of many images of one pixel, with a first label of −1.
fn labels_bomb(path: &Path) -> DatasetSpec {
    let mut archive = zip::ZipWriter::new(fs::File::create(path).unwrap());
    let options = zip::write::SimpleFileOptions::default();
    let labels = UNPACKED / 8;
    for (name, dtype, shape, first) in [
        ("train_images", "|u1", format!("{labels}, 1, 1"), vec![0]),
        ("train_labels", "<i8", format!("{labels},"), vec![255; 8]),
    ] {
        archive.start_file(format!("{name}.npy"), options).unwrap();
        let header =
            format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({shape}), }}\n");
        archive.write_all(b"\x93NUMPY\x01\x00").unwrap();
        archive.write_all(&(header.len() as u16).to_le_bytes()).unwrap();
        archive.write_all(header.as_bytes()).unwrap();
        archive.write_all(&first).unwrap();
        let zeros = (labels - 1) * first.len() as u64;
        std::io::copy(&mut std::io::repeat(0).take(zeros), &mut archive).unwrap();
    }
    archive.finish().unwrap();
    spec_of(Source::Arrays, path)
}

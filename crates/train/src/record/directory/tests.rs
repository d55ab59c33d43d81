//! Tests of directories.

use std::fs;

use super::*;

#[test]
fn a_file_is_written_whole() {
    let base = tempfile::tempdir().unwrap();
    let directory = Directory::open(base.path()).unwrap();
    for text in ["seed = 1", "seed = 2"] {
        directory.write_whole("config.toml", text.as_bytes()).unwrap();
        assert_eq!(directory.names().unwrap(), ["config.toml"]);
        assert_eq!(directory.read("config.toml", 8).unwrap().unwrap(), text.as_bytes());
    }
    assert!(directory.read("config.toml", 7).unwrap_err().to_string().contains("larger"));
}

#[test]
fn unfinished_files_of_killed_processes_go_and_others_stay() {
    let base = tempfile::tempdir().unwrap();
    let directory = Directory::open(base.path()).unwrap();
    let old = std::time::SystemTime::now() - 2 * ABANDONED;
    let write = |name: &str, time: Option<std::time::SystemTime>| {
        let file = File::create(base.path().join(name)).unwrap();
        time.into_iter().for_each(|time| file.set_modified(time).unwrap());
        file
    };
    // Abandoned files, with the name of an earlier build and with the present one.
    write(".a.json.tmp-7", Some(old));
    write(".a.json.7-0.part", Some(old));
    // Files that stay: a young one, two locked ones, and files with other names.
    write(".a.json.8-0.part", None);
    write(".a.json.9-0.part", Some(old)).lock().unwrap();
    let held = write(".a.json.10-0.part", Some(old));
    held.lock().unwrap();
    for name in [".b.json.7.part", ".a.json.backup", "a.json.7.part", ".a.json.x.part"] {
        write(name, Some(old));
    }
    directory.remove_abandoned_parts("a.json".as_ref());
    let stays = [".a.json.10-0.part", ".a.json.8-0.part", ".a.json.backup", ".a.json.x.part"];
    assert_eq!(directory.names().unwrap()[..4], stays);
    assert_eq!(directory.names().unwrap()[4..], [".b.json.7.part", "a.json.7.part"]);
    directory.remove_parts(|name| name == "b.json").unwrap();
    assert_eq!(directory.names().unwrap().len(), 5);
}

#[test]
fn a_failed_write_leaves_nothing() {
    let base = tempfile::tempdir().unwrap();
    fs::create_dir(base.path().join("taken")).unwrap();
    fs::write(base.path().join("taken/kept"), "x").unwrap();
    let directory = Directory::open(base.path()).unwrap();
    directory.write_whole("taken", b"x").unwrap_err();
    assert_eq!(directory.names().unwrap(), ["taken"]);
    assert!(base.path().join("taken/kept").exists());
}

#[test]
#[cfg(unix)]
fn links_are_named_and_not_followed() {
    use std::os::unix::fs::symlink;
    let base = tempfile::tempdir().unwrap();
    let path = |name: &str| base.path().join(name);
    fs::create_dir(path("run")).unwrap();
    fs::create_dir(path("other")).unwrap();
    fs::write(path("precious"), "precious").unwrap();
    fs::write(path("run/own"), "own").unwrap();
    for (link, target) in
        [("away", "../precious"), ("within", "own"), ("gone", "none"), ("folder", "../other")]
    {
        symlink(target, path("run").join(link)).unwrap();
    }
    symlink("run", path("shortcut")).unwrap();
    let run = Directory::open(&path("shortcut")).unwrap();
    for link in ["away", "within", "gone", "folder"] {
        let refused = |error: io::Error| {
            assert!(error.to_string().contains("got a link"), "{link}: {error}");
        };
        refused(run.open_file(link).unwrap_err());
        refused(run.open_writable(link).unwrap_err());
        refused(run.open_or_create(link).unwrap_err());
        refused(run.below(link).map(|_| ()).unwrap_err());
        refused(run.create_below(link).map(|_| ()).unwrap_err());
        assert_eq!(run.create_new(link).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
    run.write_whole("away", b"mine").unwrap();
    assert_eq!(fs::read(path("precious")).unwrap(), b"precious");
    assert_eq!(fs::read(path("run/away")).unwrap(), b"mine");
    assert!(run.open_file("../precious").is_err(), "nothing above it");
}

/// The names of unfinished files can be guessed.
#[test]
#[cfg(unix)]
fn a_link_in_place_of_an_unfinished_file_is_not_followed() {
    let base = tempfile::tempdir().unwrap();
    let path = |name: &str| base.path().join(name);
    fs::write(path("precious"), "precious").unwrap();
    fs::create_dir(path("out")).unwrap();
    let process = std::process::id();
    // More links than all tests of this process have written files by now.
    let planted = |write: usize| path("out").join(format!(".model.onnx.{process}-{write}.part"));
    for write in 0..2000 {
        std::os::unix::fs::symlink("../precious", planted(write)).unwrap();
    }
    let out = Directory::open(&path("out")).unwrap();
    let (part, mut file) = out.create_part("model.onnx".as_ref()).unwrap();
    file.write_all(b"model").unwrap();
    assert!(!path("out").join(&part).symlink_metadata().unwrap().is_symlink(), "{part}");
    out.finish_part(&part, "model.onnx".as_ref()).unwrap();
    assert_eq!(fs::read(path("precious")).unwrap(), b"precious");
    assert_eq!(fs::read(path("out/model.onnx")).unwrap(), b"model");
    assert_eq!(out.names().unwrap().len(), 2001, "the links stay");
}

#[test]
#[cfg(unix)]
fn a_directory_that_was_removed_is_not_made_anew() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("run");
    fs::create_dir(&path).unwrap();
    let run = Directory::open(&path).unwrap();
    run.write_whole("events.jsonl", b"").unwrap();
    let began = run.id_of("events.jsonl").unwrap();
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(run.id_of("events.jsonl").unwrap(), None);
    run.write_whole("summary.json", b"x").unwrap_err();
    run.create_below("weights").unwrap_err();
    run.open_or_create(".lock").unwrap_err();
    assert!(!path.exists());
    fs::create_dir(&path).unwrap();
    fs::write(path.join("events.jsonl"), "").unwrap();
    assert_eq!(run.id_of("events.jsonl").unwrap(), None, "a new one of the same path");
    assert_ne!(Directory::open(&path).unwrap().id_of("events.jsonl").unwrap(), began);
}
